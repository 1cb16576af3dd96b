"""InvariantLLM: its eight methods, what they take, report and refuse, how it is built, copied and loaded."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from cases import EIGHT, ORDERS, QUERY, TEXTS, ListRetriever, caught, consumed, engine_of, nodes_of
from invariant_rag import InvariantModel, KeyValueCache, Prompt, Segment, SegmentSet, errors
from invariant_rag.errors import (
    ContextOverflow,
    InvalidOption,
    InvalidPrompt,
    InvalidSegment,
    ModelNotFound,
    UnknownName,
    UnsupportedCombination,
    UnsupportedModel,
)
from invariant_rag.methods import resolve_method
from invariant_rag.prompts import mark
from invariant_rag.segments import document_rendering
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms.types import AudioBlock, CitableBlock, DocumentBlock, ImageBlock, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, MessageRole, MockLLM
from llama_index.core.schema import ImageNode, MediaResource, Node, NodeWithScore
from pydantic import BaseModel, ValidationError
from transformers import PreTrainedModel

from llama_index.llms.invariant_rag import AnswerFailed, InvariantLLM, SegmentBlock, UnknownParameter, canonical
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

CHATS = [name for name in EIGHT if name.endswith("chat")]


def asked(name: str, order: Any = (0, 1, 2)) -> Any:
    """What one of the eight methods is asked: a text with marks, or messages with blocks."""
    if name.endswith("complete"):
        return f"Read:\n{''.join(mark(TEXTS[i]) for i in order)}\n{QUERY}\n"
    blocks = [*(SegmentBlock.of(TEXTS[i]) for i in order), TextBlock(text=QUERY)]
    return [ChatMessage("Be brief.", role="system"), ChatMessage(role=MessageRole.USER, blocks=blocks)]


def hash_of(text: str) -> str:
    return Segment(text).content_hash


def text_of(response: Any) -> str:
    return str(response.message.content if hasattr(response, "message") else response.text)


async def call(llm: InvariantLLM, name: str, order: Any = (0, 1, 2), **kwargs: Any) -> Any:
    """Return the response of one of the eight methods; of a stream the last one, which says what all pieces do."""
    response = getattr(llm, name)(asked(name, order), **kwargs)
    response = await response if inspect.iscoroutine(response) else response
    if "stream" not in name:
        return response
    pieces = [each async for each in response] if name.startswith("a") else list(response)
    assert all(text_of(each) == "".join(d.delta for d in pieces[: i + 1]) for i, each in enumerate(pieces))
    assert [each.raw is None for each in pieces] == [True] * (len(pieces) - 1) + [False]
    return pieces[-1]


def expected(model: InvariantModel, name: str, **kwargs: Any) -> str:
    """What the engine itself answers."""
    segments = SegmentSet(TEXTS)
    if name.endswith("chat"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [segments, QUERY]}]
        prompt = model.chat_prompt(messages=messages)
    else:
        prompt = Prompt("Read:\n", segments, f"\n{QUERY}\n", rendering=document_rendering)
    return model.generate(prompt, **{"max_new_tokens": 8, **kwargs}).text


# --- the eight methods ---


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_says_what_the_engine_says_in_every_order(
    llm: InvariantLLM, plain_llm: InvariantLLM, model: InvariantModel, name: str
) -> None:
    responses = [await call(llm, name, order) for order in ORDERS]
    assert {text_of(each) for each in responses} == {expected(model, name)}
    assert len({repr(each.raw) for each in responses}) == 1
    raw = responses[0].raw
    assert raw["usage"] == responses[0].additional_kwargs
    assert raw["usage"]["total_tokens"] == raw["usage"]["prompt_tokens"] + raw["usage"]["completion_tokens"]
    assert (raw["usage"]["completion_tokens"], raw["finish_reason"]) == (8, "length")
    assert raw["dropped"] == raw["trimmed"] == []
    assert sorted(raw["order"]) == sorted(map(hash_of, TEXTS))
    assert len({text_of(await call(plain_llm, name, order)) for order in ORDERS[::5]}) > 1


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_takes_keywords_for_one_call(llm: InvariantLLM, model: InvariantModel, name: str) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 3}
    whole, sampled = expected(model, name), expected(model, name, do_sample=True, **options)
    assert sampled != whole
    assert text_of(await call(llm, name, **options)) == sampled
    assert text_of(await call(InvariantLLM(model, max_tokens=8, **options), name)) == sampled
    penalized = expected(model, name, repetition_penalty=3.0)
    assert text_of(await call(llm, name, repetition_penalty=3.0)) == penalized
    stop = whole[3:5]
    assert text_of(await call(llm, name, stop=["never", stop])) == whole[: whole.index(stop)]
    renamed = InvariantLLM(model, generation_kwargs={"max_new_tokens": 3})
    assert renamed.metadata.num_output == 3
    short = expected(model, name, max_new_tokens=3)
    assert text_of(await call(renamed, name)) == text_of(await call(llm, name, max_new_tokens=3)) == short
    for wrong, said in (
        ({"max_token": 3}, "got 'max_token', which is none"), ({"documents": TEXTS}, "got 'documents', which is none"),
        ({"stop": 2.5}, "stop: expected a list of str"), ({"temperature": [3]}, "temperature: expected"),
    ):  # fmt: skip
        with pytest.raises(InvalidOption, match=said):
            await call(llm, name, **wrong)


async def test_the_event_loop_goes_on_and_calls_at_the_same_time_do_not_mix(
    llm: InvariantLLM, model: InvariantModel
) -> None:
    names, ticks = [name for name in EIGHT if name.startswith("a")] * 2, 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.001)
            ticks += 1

    ticking = asyncio.create_task(tick())
    found = await asyncio.gather(*(call(llm, name) for name in names))
    ticking.cancel()
    assert [text_of(each) for each in found] == [expected(model, name) for name in names]
    assert ticks > len(names)


@pytest.mark.parametrize("way", ["leave the stream", "cancel the call"])
async def test_leaving_ends_the_generation(llm: InvariantLLM, model: InvariantModel, way: str) -> None:
    if way == "leave the stream":
        pieces = await llm.astream_complete(QUERY, max_tokens=3000)
        async for _ in pieces:
            break
        await pieces.aclose()
    else:
        task = asyncio.create_task(llm.acomplete(QUERY, max_tokens=3000))
        await asyncio.sleep(0.3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    start = time.perf_counter()
    await asyncio.to_thread(model.generate, Prompt(suffix="x"), max_new_tokens=1)  # waits for the model
    assert time.perf_counter() - start < 4


# --- what is reported ---


@pytest.mark.parametrize(("overflow", "changed"), [("drop_last", "dropped"), ("trim_segments", "trimmed")])
def test_a_response_names_what_did_not_fit(model: InvariantModel, overflow: str, changed: str) -> None:
    texts = [text * (40 + 10 * i) for i, text in enumerate(TEXTS)]  # together more than the context window
    llm, hashes = InvariantLLM(model.with_method(overflow=overflow), max_tokens=1), {*map(hash_of, texts)}
    asked = [[*(SegmentBlock.of(texts[i]) for i in order), TextBlock(text=QUERY)] for order in ORDERS[::2]]
    first, *others = [llm.chat([ChatMessage(blocks=blocks)]).raw for blocks in asked]
    assert all(each == first for each in others)
    assert set(first[changed]) <= hashes == set(first["order"]) | set(first["dropped"])
    assert first[changed]
    with pytest.raises(ContextOverflow, match="4096"):
        InvariantLLM(model).complete("x" * 5000)


@pytest.mark.parametrize(("alpha", "branch"), [(2.0, "plain"), (-2.0, "invariant")])
async def test_a_routed_model_is_a_model(model: InvariantModel, alpha: float, branch: str) -> None:
    routed = InvariantLLM(model.with_routing(alpha, plain_order="canonical"), max_tokens=8)
    kept = InvariantLLM(getattr(routed.lm, f"{branch}_branch"), max_tokens=8)
    for response in [await call(routed, name) for name in ("chat", "stream_chat")]:
        assert (text_of(response), response.raw["routing"]["branch"]) == (text_of(kept.chat(asked("chat"))), branch)
    response, (message,) = caught(lambda: InvariantLLM(model.with_routing(alpha), max_tokens=2).chat(asked("chat")))
    assert "router" in message
    assert response.raw["invariant"] is False


async def test_segments_that_are_cached_change_nothing_but_the_counts(model: InvariantModel, llm: InvariantLLM) -> None:
    cached, cold = InvariantLLM(model, key_value_cache=KeyValueCache(), max_tokens=8), await call(llm, "chat")
    responses = [await call(cached, name, order) for name, order in zip(CHATS, ORDERS[:4], strict=True)]
    counts = [each.raw["usage"]["cached_tokens"] for each in (cold, *responses)]
    assert counts[:2] == [0, 0]
    assert min(counts[2:]) == max(counts[2:]) > sum(map(len, TEXTS))
    assert {text_of(each) for each in responses} == {text_of(cold)}


# --- how it is built ---


def test_a_folder_is_loaded_as_it_says(folder: Path) -> None:
    model = InvariantLLM(folder, method="pine", ordering="frequency", overflow="drop_last", max_segment_tokens=9).lm
    chosen = (model.method.name, model.ordering.name, model.overflow, model.max_segment_tokens)
    assert chosen == ("pine", "frequency", "drop_last", 9)
    for method in ("rotor", "sequential"):
        llm = InvariantLLM(folder, method=method)
        assert llm.ordering is None
        assert llm.lm.ordering.name == resolve_method(method).default_ordering == llm.to_payload()["ordering"]
    prompt = Prompt(suffix="Hello")
    default = InvariantModel.from_pretrained().generate(prompt, max_new_tokens=4).text
    assert InvariantLLM(max_tokens=4).complete("Hello").text == default


def test_a_model_in_memory_says_what_it_is_and_takes_no_loading_options(
    model: InvariantModel, weights: PreTrainedModel
) -> None:
    llm = InvariantLLM(model.with_method("pine", ordering="frequency"))
    assert (llm.method, llm.ordering, llm.metadata.context_window) == ("pine", "frequency", 4096)
    with pytest.raises(UnsupportedCombination, match="method, backend"):
        InvariantLLM(model, method="pine", backend="sdpa")
    for describe in (llm.to_dict, lambda: pickle.dumps(llm)):
        with pytest.raises(UnsupportedCombination, match="in memory"):
            describe()
    for given in (weights, 5):
        with pytest.raises(UnsupportedModel, match=f"InvariantModel, got {type(given).__name__}") as error:
            InvariantLLM(given)
        assert "InvariantModel(model, tokenizer)" in error.value.hint


def test_metadata_needs_no_weights_and_can_be_set(folder: Path, tmp_path: Path, model: InvariantModel) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    llm = InvariantLLM(tmp_path, max_tokens=7)
    said = llm.metadata
    assert (said.context_window, said.num_output, said.is_chat_model, said.model_name) == (4096, 7, True, str(tmp_path))
    assert said.is_function_calling_model
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        llm.complete("Hello")
    with pytest.raises(ModelNotFound, match="nowhere"):
        assert InvariantLLM(tmp_path / "nowhere").metadata
    said = InvariantLLM(model, context_window=512, is_function_calling_model=False).metadata
    assert (said.context_window, said.is_function_calling_model) == (512, False)


def test_what_is_misspelt_or_unknown_is_refused_when_the_llm_is_built(llm: InvariantLLM) -> None:
    for kind in ("method", "ordering", "backend"):
        with pytest.raises(UnknownName, match=f"unknown {kind} 'foo'; choose from"):
            InvariantLLM(**{kind: "foo"})
    with pytest.raises(ValidationError, match=r"overflow\n.*'drop_last'"):
        InvariantLLM(overflow="foo")
    near = r"'metod'; did you mean 'method'.*\n.*'temprature'; did you mean 'temperature'"
    with pytest.raises(UnknownParameter, match=near) as error:
        InvariantLLM(metod="pine", temprature=0.9)
    assert "`max_new_tokens` is `max_tokens`" in error.value.hint
    with pytest.raises(UnknownParameter, match="did you mean 'max_tokens'"):
        llm.model_copy(update={"max_token": 3})
    with pytest.raises(UnsupportedCombination, match="chat template"):
        InvariantLLM(messages_to_prompt=lambda messages: "x")


def test_dictionaries_pickles_and_copies_answer_alike(folder: Path) -> None:
    cache = KeyValueCache()
    options = {"method": "pine", "ordering": "frequency", "max_tokens": 5, "stop": ["zz"], "temperature": 0.5}
    llm = InvariantLLM(folder, cache, seed=1, **options)
    others = [InvariantLLM.from_dict(llm.to_dict()), pickle.loads(pickle.dumps(llm))]
    for other in (*others, copy.deepcopy(llm), llm.model_copy()):
        assert other.to_dict() == llm.to_dict()
        assert other.complete(asked("complete")).text == llm.complete(asked("complete")).text
    assert all(each.lm.cache is None for each in others)
    assert llm.lm.cache is copy.deepcopy(llm).lm.cache is llm.model_copy().lm.cache is cache
    assert copy.deepcopy(llm).lm is llm.lm
    assert len(pickle.dumps(llm)) < 5000  # no weights
    assert llm.model_copy(update={"max_tokens": 3}).complete("Hello").raw["usage"]["completion_tokens"] == 3
    with pytest.raises(UnsupportedCombination, match="key_value_cache, method, overflow"):
        llm.model_copy(update={"method": "pine", "overflow": "drop_last", "key_value_cache": KeyValueCache()})
    with pytest.raises(ValueError, match="frozen"):
        llm.method = "pine"


CALLS = ("InvalidSegment", "InvalidPrompt", "ContextOverflow", "InvalidSchema", "IncompleteObject", "InvalidObject")
PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
IMAGE = ImageBlock(image=PIXEL, image_mimetype="image/gif")


class Place(BaseModel):
    name: str


@pytest.fixture
def refusing(model: InvariantModel) -> InvariantLLM:
    """An LLM whose calls end with a TypeError of a caller's own function."""

    def fail(ids: Any, scores: Any) -> Any:
        return "concatenate str" + 1  # type: ignore[operator]

    return InvariantLLM(model, max_tokens=8, generation_kwargs={"logits_processor": [fail]})


@pytest.mark.parametrize("mode", ["compact", "tree_summarize", "refine"])
@pytest.mark.parametrize("way", ["query", "aquery", "streaming", "object"])
@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
async def test_what_is_wrong_is_no_empty_response(
    model: InvariantModel, refusing: InvariantLLM, way: str, mode: str
) -> None:
    options = {"streaming": way == "streaming", "output_cls": Place if way == "object" else None}
    options |= {"response_mode": mode, "prompt_helper": PromptHelper(context_window=100_000)}  # it thinks that all fits
    wrong = [
        (InvariantLLM(model, max_tokens=4095), ContextOverflow, "4096"),
        (InvariantLLM(model, generation_kwargs={"max_token": 3}), InvalidOption, "max_token"),
    ]
    for llm, error, said in [*wrong, *([(refusing, AnswerFailed, "concatenate str")] if way != "object" else [])]:
        engine = engine_of(nodes_of(), response_synthesizer=get_response_synthesizer(llm=llm, **options))
        with pytest.raises(error, match=said):
            await consumed(engine.aquery(QUERY) if way == "aquery" else engine.query(QUERY))


async def test_chat_engines_and_nodes_without_a_score_raise_too(refusing: InvariantLLM) -> None:
    for kind in (ContextChatEngine, CondensePlusContextChatEngine):
        for way in ("chat", "achat"):
            with pytest.raises(AnswerFailed):
                await consumed(getattr(kind.from_defaults(ListRetriever(nodes_of()), llm=refusing), way)(QUERY))
    nodes = [NodeWithScore(node=each.node) for each in nodes_of()]
    with pytest.raises(InvalidSegment, match="score"):
        engine_of(nodes, llm=canonical(MockLLM(), ordering="score")).query(QUERY)


@pytest.mark.parametrize("name", CHATS)
async def test_blocks_that_are_no_text_are_refused_by_name(llm: InvariantLLM, name: str) -> None:
    pdf = DocumentBlock(data=b"x", document_mimetype="application/pdf")
    for block in (IMAGE, AudioBlock(audio=b"RIFF"), pdf, CitableBlock(title="", source="", content=[IMAGE])):
        with pytest.raises(InvalidPrompt, match=r"expected text.*(image|audio|document)"):
            await consumed(getattr(llm, name)([ChatMessage(blocks=[TextBlock(text="What is this?"), block])]))


@pytest.mark.parametrize(
    "node",
    [
        ImageNode(text="A map.", image_url="https://example.org/map.png", id_="the map"),
        Node(text_resource=MediaResource(text="A map."), image_resource=MediaResource(data=PIXEL), id_="the map"),
        Node(audio_resource=MediaResource(data=b"RIFF"), id_="the map"),
    ],
)
async def test_nodes_that_are_no_text_are_refused_by_name(llm: InvariantLLM, node: Any) -> None:
    nodes = [*nodes_of(), NodeWithScore(node=node, score=0.1)]
    ours = [InvariantSynthesizer(each) for each in (llm, canonical(MockLLM()))]
    for synthesizer in (*ours, get_response_synthesizer(llm)):
        with pytest.raises(InvalidPrompt, match="image, audio or video in the map"):
            synthesizer.synthesize(QUERY, nodes)
        with pytest.raises(InvalidPrompt, match="image, audio or video in the map"):
            await synthesizer.asynthesize(QUERY, nodes)


@pytest.mark.parametrize("name", EIGHT)
async def test_errors_of_a_call_are_none_that_llama_index_catches(refusing: InvariantLLM, name: str) -> None:
    with pytest.raises(AnswerFailed, match="TypeError") as caught:
        await consumed(getattr(refusing, name)(QUERY if name.endswith("complete") else [ChatMessage(QUERY)]))
    assert isinstance(caught.value.__cause__, TypeError)
    for kind in (*(getattr(errors, name) for name in CALLS), UnknownParameter, AnswerFailed):
        assert issubclass(kind, errors.InvariantRAGError)
        assert not issubclass(kind, (ValueError, TypeError))
