"""What LlamaIndex's own response modes make of marked nodes: which keep them whole, and which warn."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from cases import ORDERS, QUERY, ListRetriever, nodes_of, scored
from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from llama_index.core import Settings
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode, get_response_synthesizer

from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

WHOLE = {
    ResponseMode.COMPACT: 1,
    ResponseMode.TREE_SUMMARIZE: 1,
    ResponseMode.COMPACT_ACCUMULATE: 1,
    ResponseMode.SIMPLE_SUMMARIZE: 1,  # prints a Python list, which is parsed
    ResponseMode.GENERATION: 1,  # reads no node
    ResponseMode.NO_TEXT: 0,
    ResponseMode.CONTEXT_ONLY: 0,
}
WARNS = {
    ResponseMode.REFINE: "1 of the 3 segments",
    ResponseMode.ACCUMULATE: "1 of the 3 segments",
}


class RecordingModel(InvariantModel):
    """The model, and the prompts that it was given."""

    def __init__(self, other: InvariantModel) -> None:
        self.__dict__.update(other.__dict__)
        vars(self)["prompts"] = list[Prompt]()

    def generate(self, prompt: Any, **kwargs: Any) -> Any:
        self.prompts.append(prompt)
        return super().generate(prompt, **kwargs)


@pytest.fixture
def recording(model: InvariantModel) -> RecordingModel:
    return RecordingModel(model)


def engine(llm: InvariantLLM, mode: ResponseMode, nodes: Any, **options: Any) -> RetrieverQueryEngine:
    Settings.llm = llm  # two modes take no LLM, and ask for the global one
    marker = [SegmentMarkerPostprocessor()]
    return RetrieverQueryEngine.from_args(
        ListRetriever(nodes), llm=llm, response_mode=mode, node_postprocessors=marker, **options
    )


def read_of(prompt: Prompt) -> SegmentSet:
    """Return what was read as a set, without metadata, which no model reads."""
    return SegmentSet(Segment(each.text, score=each.score) for each in prompt.segments)


def said_of(call: Callable[[], Any]) -> str:
    """Return the warnings about order of a call, one per line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(each.message) for each in caught if issubclass(each.category, OrderWarning))


def test_these_are_all_modes() -> None:
    assert set(WHOLE) | set(WARNS) == set(ResponseMode)


@pytest.mark.parametrize("mode", WHOLE)
def test_these_modes_keep_nodes_whole_and_answer_alike_in_every_order(
    recording: RecordingModel, mode: ResponseMode
) -> None:
    llm = InvariantLLM(recording, max_tokens=8)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answers = {str(engine(llm, mode, nodes_of(order)).query(QUERY)) for order in ORDERS}
    assert len(recording.prompts) == WHOLE[mode] * len(ORDERS)
    if mode is ResponseMode.CONTEXT_ONLY:  # a list of nodes, not an answer
        assert len(answers) == len(ORDERS)
        return
    assert len(answers) == 1
    read = SegmentSet([]) if mode is ResponseMode.GENERATION else scored()
    assert all(read_of(prompt) == read for prompt in recording.prompts)


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE])
def test_the_plain_model_answers_otherwise_in_another_order(plain_llm: InvariantLLM, mode: ResponseMode) -> None:
    assert len({str(engine(plain_llm, mode, nodes_of(order)).query(QUERY)) for order in ORDERS}) > 1


@pytest.mark.parametrize("mode", WARNS)
def test_these_modes_warn_and_name_the_fix(llm: InvariantLLM, mode: ResponseMode) -> None:
    assert re.search(
        rf"{WARNS[mode]}.*InvariantSynthesizer", said_of(lambda: engine(llm, mode, nodes_of()).query(QUERY))
    )


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE, ResponseMode.COMPACT_ACCUMULATE])
def test_a_mode_that_has_to_cut_warns(model: InvariantModel, mode: ResponseMode) -> None:
    llm = InvariantLLM(model, max_tokens=8)
    nodes = nodes_of()
    for each in nodes:
        each.node.text = " ".join([each.node.text] * 30)
    synthesizer = get_response_synthesizer(llm=llm, response_mode=mode)
    synthesizer._prompt_helper.chunk_size_limit = 300
    marked = SegmentMarkerPostprocessor().postprocess_nodes(nodes)
    assert re.search(r"cut in two.*InvariantSynthesizer", said_of(lambda: synthesizer.synthesize(QUERY, marked)))


def test_multimodal_compact_keeps_nodes_whole(recording: RecordingModel) -> None:
    llm = InvariantLLM(recording, max_tokens=8)
    answers = {str(engine(llm, ResponseMode.COMPACT, nodes_of(o), multimodal=True).query(QUERY)) for o in ORDERS}
    assert len(answers) == 1
    assert all(read_of(prompt) == scored() for prompt in recording.prompts)


@pytest.mark.parametrize("kind", [ContextChatEngine, CondensePlusContextChatEngine])
@pytest.mark.parametrize("way", ["chat", "stream_chat", "achat", "astream_chat"])
async def test_context_chat_engines_keep_nodes_whole(recording: RecordingModel, kind: Any, way: str) -> None:
    llm = InvariantLLM(recording, max_tokens=8)
    answers = set()
    for order in ORDERS:
        chat = kind.from_defaults(
            ListRetriever(nodes_of(order)), llm=llm, node_postprocessors=[SegmentMarkerPostprocessor()]
        )
        response = getattr(chat, way)(QUERY)
        if way.startswith("a"):
            response = await response
        if way == "astream_chat":
            answers.add("".join([piece async for piece in response.async_response_gen()]))
        else:
            answers.add("".join(response.response_gen) if way == "stream_chat" else str(response))
    assert len(answers) == 1
    assert recording.prompts
    assert all(read_of(prompt) == scored() for prompt in recording.prompts)
