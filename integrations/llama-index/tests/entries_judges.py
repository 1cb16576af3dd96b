"""Entries: evaluators, of answers from nodes, with nodes as context, and of two answers."""

from __future__ import annotations

import zlib
from typing import Any

from cases import QUERY
from entries_query import GLOBAL
from entry import Entry, Nodes, engine_of
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
from llama_index.core.evaluation.pairwise import EvaluationSource
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


def verdict(text: str) -> tuple[bool | None, float | None, str | None]:
    """Parse whatever a model writes as a vote for one of the answers: a random one names neither."""
    first = zlib.crc32(text.encode()) % 2 == 0
    return first, float(first), text


def of_pair(evaluator: Any, nodes: Nodes) -> str:
    """Compare the first two texts by their id, in the order given; return the better one, and why."""
    one, other = (each.text for each in nodes if each.node.node_id in {"node 0", "node 1"})
    result = evaluator.evaluate(query=QUERY, response=one, second_response=other)
    # Which text an evaluator calls the first depends on what it saw: in the flipped comparison, they are flipped.
    flipped = result.pairwise_source == EvaluationSource.FLIPPED
    first, second = (other, one) if flipped else (one, other)
    winner = {1.0: first, 0.0: second}.get(result.score, "a tie")
    return f"{winner} {'' if isinstance(evaluator, InvariantPairwiseEvaluator) else result.feedback}"


ANSWERS = "`InvariantPairwiseEvaluator(llm)`"
ENTRIES = [
    *(
        Entry(
            f"`{kind.__name__}.evaluate(contexts=...)`",
            GLOBAL,
            "invariant",
            lambda llm, nodes, kind=kind: of_contexts(kind, llm, nodes),
        )
        for kind in (FaithfulnessEvaluator, RelevancyEvaluator, ContextRelevancyEvaluator)
    ),
    *(
        Entry(
            f"`{kind.__name__}.evaluate_response` of `engine.query`",
            GLOBAL,
            "invariant",
            lambda llm, nodes, kind=kind, options=options: of_response(kind(llm=llm, **options), nodes),
        )
        for kind, options in (
            (FaithfulnessEvaluator, {}),
            (RelevancyEvaluator, {}),
            (CorrectnessEvaluator, {"parser_function": lambda text: (None, text)}),
            (GuidelineEvaluator, {"output_parser": Taking()}),
            (AnswerRelevancyEvaluator, {}),
        )
    ),
    Entry(
        "`PairwiseComparisonEvaluator(enforce_consensus=False)`: the order of the two answers",
        ANSWERS,
        "warns",
        lambda llm, nodes: of_pair(
            PairwiseComparisonEvaluator(llm, parser_function=verdict, enforce_consensus=False), nodes
        ),
    ),
    Entry(
        "`PairwiseComparisonEvaluator`: the order of the two answers",
        ANSWERS,
        "warns",
        lambda llm, nodes: of_pair(PairwiseComparisonEvaluator(llm, parser_function=verdict), nodes),
    ),
    Entry(
        "`InvariantPairwiseEvaluator`: the order of the two answers",
        "nothing more",
        "invariant",
        lambda llm, nodes: of_pair(InvariantPairwiseEvaluator(llm), nodes),
        ordered=False,
    ),
]
