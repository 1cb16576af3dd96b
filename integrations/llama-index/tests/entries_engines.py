"""Entries: query engines around query engines, citations, and rerankers."""

from __future__ import annotations

import json
from typing import Any

import torch
from cases import QUERY, engine_of, index_of
from entries_query import marked, ours
from entry import GLOBAL, MORE, HashingLLM, Nodes, invariant, warns
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.postprocessor import LLMRerank
from llama_index.core.query_engine import (
    CitationQueryEngine,
    FLAREInstructQueryEngine,
    MultiStepQueryEngine,
    RetryQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.query_engine.flare.answer_inserter import DirectLookaheadAnswerInserter
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.selectors import LLMMultiSelector, LLMSingleSelector
from llama_index.core.tools import QueryEngineTool
from transformers import LogitsProcessor, LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM


class _Form(LogitsProcessor):
    """Lets a model write a text with one digit of its choice, once."""

    def __init__(self, tokenizer: Any, form: str, largest: int) -> None:
        digits = [tokenizer.encode(str(i))[-1] for i in range(1, largest + 1)]
        self._allowed = [digits if letter == "?" else [tokenizer.encode(letter)[-1]] for letter in form]
        self._start: int | None = None

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        self._start = input_ids.shape[1] if self._start is None else self._start
        allowed = self._allowed[input_ids.shape[1] - self._start]
        kept = torch.full_like(scores, float("-inf"))
        kept[:, allowed] = scores[:, allowed]
        return kept


def filling(llm: InvariantLLM, form: str, largest: int) -> InvariantLLM:
    """Return the LLM for one call, in which it writes this text and chooses the digit for `?`."""
    processor = LogitsProcessorList([_Form(llm.lm.tokenizer, form, largest)])
    return InvariantLLM(llm.lm, max_tokens=len(form), generation_kwargs={"logits_processor": processor})


def cited(llm: InvariantLLM, nodes: Nodes, *, by_ours: bool = False) -> str:
    """Return the text of the source that an answer with one citation leads to."""
    citing = filling(llm, "See [?]", len(nodes))
    options = ours(citing) if by_ours else {}
    response = CitationQueryEngine.from_args(index_of(nodes), llm=citing, **options).query(QUERY)
    number = int(str(response).split("[")[1][0])
    return response.source_nodes[number - 1].node.text.partition(":\n")[2]


def reranked(llm: InvariantLLM, nodes: Nodes) -> str:
    """Return the node that the LLM chooses by its number."""
    chooser = LLMRerank(llm=filling(llm, "Doc: ?, Relevance: 9", len(nodes)), top_n=1)
    return engine_of(nodes, llm=llm, node_postprocessors=[chooser]).query(QUERY).source_nodes[0].text


def citation(llm: Any, nodes: Nodes, **options: Any) -> str:
    return str(CitationQueryEngine.from_args(index_of(nodes), llm=llm, **options).query(QUERY))


def tool(nodes: Nodes, name: str = "harbour", **options: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine_of(nodes, **options), name=name, description=f"Knows the {name}.")


def routed(nodes: Nodes, *names: str) -> str:
    choice = [{"choice": number, "reason": "It fits."} for number in range(1, len(names) + 1)]
    kind = LLMMultiSelector if len(names) > 1 else LLMSingleSelector
    selector = kind.from_defaults(HashingLLM(says=json.dumps(choice)))
    options = {"selector": selector, "select_multi": len(names) > 1}
    return str(RouterQueryEngine.from_defaults([tool(nodes, name) for name in names], **options).query(QUERY))


def sub_questions(nodes: Nodes, **options: Any) -> str:
    asked = [{"sub_question": "When?", "tool_name": "harbour"}, {"sub_question": "Where?", "tool_name": "harbour"}]
    generator = LLMQuestionGenerator.from_defaults(HashingLLM(says=json.dumps(asked)))
    engine = SubQuestionQueryEngine.from_defaults([tool(nodes)], question_gen=generator, verbose=False, **options)
    return str(engine.query(QUERY))


def steps(llm: Any, nodes: Nodes) -> str:
    transform = StepDecomposeQueryTransform(llm=llm)
    return str(MultiStepQueryEngine(engine_of(nodes), transform, index_summary="Boats.", num_steps=2).query(QUERY))


def retried(llm: Any, nodes: Nodes) -> str:
    return str(RetryQueryEngine(engine_of(nodes), RelevancyEvaluator(llm=llm), max_retries=1).query(QUERY))


def looked_ahead(nodes: Nodes) -> str:
    options = {"lookahead_answer_inserter": DirectLookaheadAnswerInserter(), "max_iterations": 1}
    planner = HashingLLM(says=f"The ferry leaves at [Search({QUERY})].")
    return str(FLAREInstructQueryEngine(engine_of(nodes), llm=planner, **options).query(QUERY))


CITATIONS = "`CitationQueryEngine` with the parts of this package"
WITH_OURS = "`CitationQueryEngine.from_args(..., response_synthesizer=InvariantSynthesizer(llm))`"
RERANKED = "choose by a model that scores each node by itself, or let the answer read all"
ENTRIES = [
    *warns("`CitationQueryEngine`", WITH_OURS, {"as it is": citation, "the source that `[n]` leads to": cited}),
    *invariant(CITATIONS, MORE, {
        "`InvariantSynthesizer`": lambda llm, nodes: citation(llm, nodes, **ours(llm)),
        "`InvariantSynthesizer`, the source that `[n]` leads to": lambda llm, nodes: cited(llm, nodes, by_ours=True),
    }),
    *warns(CITATIONS, WITH_OURS, {
        "`SegmentMarkerPostprocessor`": lambda llm, nodes: citation(llm, nodes, **marked()),
    }),
    *invariant("query engines around others", GLOBAL, {
        "`RouterQueryEngine`": lambda _, nodes: routed(nodes, "harbour"),
        "`RouterQueryEngine` to two engines": lambda _, nodes: routed(nodes, "harbour", "town"),
        "`SubQuestionQueryEngine`": lambda _, nodes: sub_questions(nodes),
        "`SubQuestionQueryEngine`, `use_async=False`": lambda _, nodes: sub_questions(nodes, use_async=False),
        "`SubQuestionQueryEngine`, `InvariantSynthesizer` for the last answer": lambda llm, nodes: sub_questions(
            nodes, **ours(llm)
        ),
        "`TransformQueryEngine` with HyDE": lambda llm, nodes: str(
            TransformQueryEngine(engine_of(nodes), HyDEQueryTransform(llm)).query(QUERY)
        ),
        "`MultiStepQueryEngine`": steps,
        "`RetryQueryEngine`": retried,
        "`FLAREInstructQueryEngine`": lambda _, nodes: looked_ahead(nodes),
    }),
    *warns("`LLMRerank`", RERANKED, {"the node that the LLM chooses by its number": reranked}),
]  # fmt: skip
