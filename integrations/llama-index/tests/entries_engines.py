"""Entries: query engines around query engines, retrievers around retrievers, and postprocessors."""

from __future__ import annotations

import json
from typing import Any

import torch
from cases import QUERY
from entries_query import marked
from entry import MORE, Nodes, SayingLLM, engine_of, index_of, invariant, under, warns
from llama_index.core.evaluation import RelevancyEvaluator
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.postprocessor import (
    LLMRerank,
)
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
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

# --- a random model that writes what has to be parsed, and chooses only the number in it ---


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


def cited(llm: InvariantLLM, nodes: Nodes, **options: Any) -> str:
    """Return the text of the source that an answer with one citation leads to."""
    citing = filling(llm, "See [?]", len(nodes))
    if options.pop("synthesizer", False):
        options["response_synthesizer"] = InvariantSynthesizer(citing)
    response = CitationQueryEngine.from_args(index_of(nodes), llm=citing, **options).query(QUERY)
    number = int(str(response).split("[")[1][0])
    return response.source_nodes[number - 1].node.text.partition(":\n")[2]


def reranked(llm: InvariantLLM, nodes: Nodes, **options: Any) -> str:
    """Return the node that the LLM chooses by its number."""
    chooser = LLMRerank(llm=filling(llm, "Doc: ?, Relevance: 9", len(nodes)), top_n=1)
    return engine_of(nodes, llm=llm, node_postprocessors=[chooser], **options).query(QUERY).source_nodes[0].text


def citation(llm: Any, nodes: Nodes, **options: Any) -> str:
    return str(CitationQueryEngine.from_args(index_of(nodes), llm=llm, **options).query(QUERY))


OURS = "`CitationQueryEngine.from_args(..., response_synthesizer=InvariantSynthesizer(llm))`"

# --- engines around engines ---


def tool(nodes: Nodes, name: str = "harbour", **options: Any) -> QueryEngineTool:
    return QueryEngineTool.from_defaults(engine_of(nodes, **options), name=name, description=f"Knows the {name}.")


def choice(*numbers: int) -> SayingLLM:
    return SayingLLM(says=json.dumps([{"choice": number, "reason": "It fits."} for number in numbers]))


def routed(nodes: Nodes) -> str:
    selector = LLMSingleSelector.from_defaults(choice(1))
    return str(RouterQueryEngine.from_defaults([tool(nodes)], selector=selector).query(QUERY))


def routed_to_two(nodes: Nodes) -> str:
    selector = LLMMultiSelector.from_defaults(choice(1, 2))
    tools = [tool(nodes), tool(nodes, "town")]
    return str(RouterQueryEngine.from_defaults(tools, selector=selector, select_multi=True).query(QUERY))


def sub_questions(nodes: Nodes, **options: Any) -> str:
    asked = [{"sub_question": "When?", "tool_name": "harbour"}, {"sub_question": "Where?", "tool_name": "harbour"}]
    generator = LLMQuestionGenerator.from_defaults(SayingLLM(says=json.dumps(asked)))
    engine = SubQuestionQueryEngine.from_defaults([tool(nodes)], question_gen=generator, verbose=False, **options)
    return str(engine.query(QUERY))


def steps(llm: Any, nodes: Nodes) -> str:
    transform = StepDecomposeQueryTransform(llm=llm)
    return str(MultiStepQueryEngine(engine_of(nodes), transform, index_summary="Boats.", num_steps=2).query(QUERY))


def retried(llm: Any, nodes: Nodes) -> str:
    evaluator = RelevancyEvaluator(llm=llm)
    return str(RetryQueryEngine(engine_of(nodes), evaluator, max_retries=1).query(QUERY))


def looked_ahead(nodes: Nodes) -> str:
    planner = SayingLLM(says=f"The ferry leaves at [Search({QUERY})].")
    engine = FLAREInstructQueryEngine(
        engine_of(nodes), llm=planner, lookahead_answer_inserter=DirectLookaheadAnswerInserter(), max_iterations=1
    )
    return str(engine.query(QUERY))


ENTRIES = [
    *under(
        "`CitationQueryEngine`",
        warns("as it is", citation, OURS, sizes=(3, 4)),
        warns("the source that `[n]` leads to", cited, OURS),
    ),
    *under(
        "`CitationQueryEngine` with the parts of this package",
        invariant(
            "`InvariantSynthesizer`",
            lambda llm, nodes: citation(llm, nodes, response_synthesizer=InvariantSynthesizer(llm)),
            MORE,
            ordered=False,
        ),
        warns("`SegmentMarkerPostprocessor`", lambda llm, nodes: citation(llm, nodes, **marked()), OURS),
        invariant(
            "`InvariantSynthesizer`, the source that `[n]` leads to",
            lambda llm, nodes: cited(llm, nodes, synthesizer=True),
            MORE,
            ordered=False,
        ),
    ),
    *under(
        "query engines around others",
        invariant("`RouterQueryEngine`", lambda _, nodes: routed(nodes)),
        invariant("`RouterQueryEngine` to two engines", lambda _, nodes: routed_to_two(nodes)),
        invariant("`SubQuestionQueryEngine`", lambda _, nodes: sub_questions(nodes)),
        invariant(
            "`SubQuestionQueryEngine`, `use_async=False`", lambda _, nodes: sub_questions(nodes, use_async=False)
        ),
        invariant(
            "`SubQuestionQueryEngine`, `InvariantSynthesizer` for the last answer",
            lambda llm, nodes: sub_questions(nodes, response_synthesizer=InvariantSynthesizer(llm)),
        ),
        invariant(
            "`TransformQueryEngine` with HyDE",
            lambda llm, nodes: str(TransformQueryEngine(engine_of(nodes), HyDEQueryTransform(llm)).query(QUERY)),
        ),
        invariant("`MultiStepQueryEngine`", steps),
        invariant("`RetryQueryEngine`", retried),
        invariant("`FLAREInstructQueryEngine`", lambda _, nodes: looked_ahead(nodes)),
    ),
    *under(
        "`LLMRerank`",
        warns(
            "the node that the LLM chooses by its number",
            reranked,
            "choose by a model that scores each node by itself, or let the answer read all",
        ),
    ),
]
