"""Entries: evaluators, of answers from nodes, with nodes as context, and of two answers."""

from __future__ import annotations

from typing import Any

from cases import QUERY, engine_of
from entry import GLOBAL, MORE, Ask, Nodes, invariant, node_id, warns
from llama_index.core.evaluation import (
    AnswerRelevancyEvaluator,
    ContextRelevancyEvaluator,
    CorrectnessEvaluator,
    FaithfulnessEvaluator,
    GuidelineEvaluator,
    PairwiseComparisonEvaluator,
    RelevancyEvaluator,
)
from llama_index.core.evaluation.guideline import EvaluationData
from llama_index.core.types import BaseOutputParser

from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator


class Taking(BaseOutputParser):
    """Takes whatever a model writes as its criticism: a random one writes no JSON."""

    def parse(self, output: str) -> EvaluationData:
        return EvaluationData(passing=True, feedback=output)


def of_contexts(kind: Any) -> Ask:
    """Evaluate a fixed answer, with the nodes as its contexts."""

    def ask(llm: Any, nodes: Nodes) -> str:
        contexts = [each.text for each in nodes]
        return str(kind(llm=llm).evaluate(query=QUERY, response="At noon.", contexts=contexts).feedback)

    return ask


def of_response(kind: Any, **options: Any) -> Ask:
    """Evaluate the answer of a query engine over the nodes."""

    def ask(llm: Any, nodes: Nodes) -> str:
        response = engine_of(nodes).query(QUERY)
        return str(kind(llm=llm, **options).evaluate_response(QUERY, response, reference="At noon.").feedback)

    return ask


ANSWERS = {node_id(0): "At noon, says the harbour master.", node_id(1): "It does not leave in winter."}


def better(evaluator: Any, nodes: Nodes) -> tuple[str, str]:
    """Compare two answers that nobody retrieved, in the order of two nodes; return the better, and what was said."""
    one, other = (ANSWERS[each.node.node_id] for each in nodes if each.node.node_id in ANSWERS)
    result = evaluator.evaluate(query=QUERY, response=one, second_response=other)
    return {1.0: one, 0.0: other}.get(result.score, "a tie"), str(result.feedback)


def comparing(llm: Any, **options: Any) -> PairwiseComparisonEvaluator:
    """Return LlamaIndex's evaluator; the first letter that a random model writes is its verdict."""
    parsed = lambda text: (text < "m", float(text < "m"), text)  # noqa: E731
    return PairwiseComparisonEvaluator(llm, parser_function=parsed, **options)


CONTEXTS, RESPONSES = (FaithfulnessEvaluator, RelevancyEvaluator), (AnswerRelevancyEvaluator,)
IN_BOTH_ORDERS = "`InvariantPairwiseEvaluator(llm)`, or `enforce_consensus=True`"
ENTRIES = [
    *invariant("evaluators with nodes as `contexts`", GLOBAL, {
        f"`{kind.__name__}`": of_contexts(kind) for kind in (*CONTEXTS, ContextRelevancyEvaluator)
    }),
    *invariant("evaluators of the answer of a query engine", GLOBAL, {
        **{f"`{kind.__name__}`": of_response(kind) for kind in (*CONTEXTS, *RESPONSES)},
        "`CorrectnessEvaluator`": of_response(CorrectnessEvaluator, parser_function=lambda text: (None, text)),
        "`GuidelineEvaluator`": of_response(GuidelineEvaluator, output_parser=Taking()),
    }),
    *invariant("two answers", MORE, {
        "`InvariantPairwiseEvaluator`": lambda llm, nodes: better(InvariantPairwiseEvaluator(llm), nodes)[0],
        "`PairwiseComparisonEvaluator`, which asks in both orders": lambda llm, nodes: better(comparing(llm), nodes)[0],
    }),
    *warns("two answers", IN_BOTH_ORDERS, {
        "`PairwiseComparisonEvaluator(enforce_consensus=False)`": lambda llm, nodes: str(
            better(comparing(llm, enforce_consensus=False), nodes)
        ),
    }),
]  # fmt: skip
