"""Entries: evaluators, of answers from nodes, with nodes as context, and of two answers."""

from __future__ import annotations

from typing import Any

from cases import QUERY
from entry import MORE, Nodes, engine_of, invariant, node_id, under, warns
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


def of_contexts(kind: Any, llm: Any, nodes: Nodes) -> str:
    """Evaluate a fixed answer, with the nodes as its contexts."""
    contexts = [each.text for each in nodes]
    return str(kind(llm=llm).evaluate(query=QUERY, response="At noon.", contexts=contexts).feedback)


def of_response(evaluator: Any, nodes: Nodes) -> str:
    """Evaluate the answer of a query engine over the nodes."""
    response = engine_of(nodes).query(QUERY)
    return str(evaluator.evaluate_response(QUERY, response, reference="At noon.").feedback)


ANSWERS = {node_id(0): "At noon, says the harbour master.", node_id(1): "It does not leave in winter."}


def better(evaluator: Any, nodes: Nodes) -> tuple[str, str]:
    """Compare two answers that nobody retrieved, in the order of two nodes; return the better, and what was said."""
    one, other = (ANSWERS[each.node.node_id] for each in nodes if each.node.node_id in ANSWERS)
    result = evaluator.evaluate(query=QUERY, response=one, second_response=other)
    return {1.0: one, 0.0: other}.get(result.score, "a tie"), str(result.feedback)


def comparing(llm: Any, **options: Any) -> PairwiseComparisonEvaluator:
    """Return LlamaIndex's evaluator; the first letter that a random model writes is its verdict."""

    def parsed(text: str) -> tuple[bool, float, str]:
        return text < "m", float(text < "m"), text

    return PairwiseComparisonEvaluator(llm, parser_function=parsed, **options)


ENTRIES = [
    *under(
        "evaluators with nodes as `contexts`",
        *(
            invariant(f"`{kind.__name__}`", lambda llm, nodes, kind=kind: of_contexts(kind, llm, nodes))
            for kind in (FaithfulnessEvaluator, RelevancyEvaluator, ContextRelevancyEvaluator)
        ),
    ),
    *under(
        "evaluators of the answer of a query engine",
        invariant("`FaithfulnessEvaluator`", lambda llm, nodes: of_response(FaithfulnessEvaluator(llm), nodes)),
        invariant("`RelevancyEvaluator`", lambda llm, nodes: of_response(RelevancyEvaluator(llm), nodes)),
        invariant("`AnswerRelevancyEvaluator`", lambda llm, nodes: of_response(AnswerRelevancyEvaluator(llm), nodes)),
        invariant(
            "`CorrectnessEvaluator`",
            lambda llm, nodes: of_response(CorrectnessEvaluator(llm, parser_function=lambda text: (None, text)), nodes),
        ),
        invariant(
            "`GuidelineEvaluator`",
            lambda llm, nodes: of_response(GuidelineEvaluator(llm, output_parser=Taking()), nodes),
        ),
    ),
    *under(
        "two answers",
        invariant(
            "`InvariantPairwiseEvaluator`",
            lambda llm, nodes: better(InvariantPairwiseEvaluator(llm), nodes)[0],
            MORE,
            ordered=False,
        ),
        warns(
            "`PairwiseComparisonEvaluator(enforce_consensus=False)`",
            lambda llm, nodes: str(better(comparing(llm, enforce_consensus=False), nodes)),
            "`InvariantPairwiseEvaluator(llm)`, or `enforce_consensus=True`",
        ),
        invariant(
            "`PairwiseComparisonEvaluator`, which asks in both orders",
            lambda llm, nodes: better(comparing(llm), nodes)[0],
            MORE,
            ordered=False,
        ),
    ),
]
