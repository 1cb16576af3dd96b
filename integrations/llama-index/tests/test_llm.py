"""InvariantLLM: its eight methods, what they take, report and refuse, what arrives, how it is built and copied."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
from cases import EIGHT, ORDERS, QUERY, TEXTS, ListRetriever, caught, consumed, engine_of, message_of, nodes_of
from invariant_rag import InvariantModel, KeyValueCache, Prompt, Segment, SegmentSet, errors
from invariant_rag.methods import resolve_method
from invariant_rag.prompts import mark
from invariant_rag.segments import document_rendering
from llama_index.core import get_response_synthesizer
from llama_index.core.base.llms import types
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.llms import ChatMessage, MockLLM, TextBlock
from llama_index.core.schema import ImageNode, MediaResource, Node, NodeWithScore
from pydantic import BaseModel, ValidationError

from llama_index.llms.invariant_rag import AnswerFailed, InvariantLLM, SegmentBlock, canonical
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer


def asked(name: str, order: Any = (0, 1, 2), texts: Any = TEXTS) -> Any:
    """What one of the eight methods is asked: a text with marks, or messages with blocks."""
    if name.endswith("complete"):
        return f"Read:\n{''.join(mark(texts[i]) for i in order)}\n{QUERY}\n"
    return [ChatMessage("Be brief.", role="system"), message_of(texts[i] for i in order)]


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
async def test_each_method_says_what_the_engine_says(llm: Any, plain_llm: Any, model: Any, name: str) -> None:
    responses = [await call(llm, name, order) for order in ORDERS]
    assert {text_of(each) for each in responses} == {expected(model, name)}
    assert len({repr(each.raw) for each in responses}) == 1
    raw = responses[0].raw
    assert raw["usage"] == responses[0].additional_kwargs
    assert raw["usage"]["total_tokens"] == raw["usage"]["prompt_tokens"] + raw["usage"]["completion_tokens"]
    assert (raw["usage"]["completion_tokens"], raw["finish_reason"]) == (8, "length")
    assert {*raw["order"]} == {Segment(text).content_hash for text in TEXTS}
    assert raw["dropped"] == raw["trimmed"] == []
    assert len({text_of(await call(plain_llm, name, order)) for order in ORDERS[::5]}) > 1


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_takes_keywords_for_one_call(llm: InvariantLLM, model: InvariantModel, name: str) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 3}
    renamed = InvariantLLM(model, generation_kwargs={"max_new_tokens": 3})
    assert renamed.metadata.num_output == 3
    whole, sampled = expected(model, name), expected(model, name, do_sample=True, **options)
    assert sampled != whole
    for asked_llm, given, said in (
        (llm, options, sampled),
        (InvariantLLM(model, max_tokens=8, **options), {}, sampled),
        (llm, {"repetition_penalty": 3.0}, expected(model, name, repetition_penalty=3.0)),
        (llm, {"stop": ["never", whole[3:5]]}, whole[: whole.index(whole[3:5])]),
        (llm, {"max_new_tokens": 3}, expected(model, name, max_new_tokens=3)),
        (renamed, {}, expected(model, name, max_new_tokens=3)),
    ):
        assert text_of(await call(asked_llm, name, **given)) == said
    for wrong, why in (({"max_token": 3}, "got 'max_token', which is none"), ({"stop": 2.5}, "stop: expected a list")):
        with pytest.raises(errors.InvalidOption, match=why):
            await call(llm, name, **wrong)


async def test_the_event_loop_goes_on_and_concurrent_calls_do_not_mix(llm: InvariantLLM, model: InvariantModel) -> None:
    names, ticks = [name for name in EIGHT if name.startswith("a")] * 2, list[None]()

    async def tick() -> None:
        while True:
            await asyncio.sleep(0.001)
            ticks.append(None)

    ticking = asyncio.create_task(tick())
    found = await asyncio.gather(*(call(llm, name) for name in names))
    ticking.cancel()
    assert [text_of(each) for each in found] == [expected(model, name) for name in names]
    assert len(ticks) > len(names)


async def test_leaving_a_stream_and_cancelling_a_call_end_the_generation(llm: InvariantLLM, model: Any) -> None:
    pieces = await llm.astream_complete(QUERY, max_tokens=3000)
    await anext(pieces)
    await pieces.aclose()
    task = asyncio.create_task(llm.acomplete(QUERY, max_tokens=3000))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    start = time.perf_counter()
    await asyncio.to_thread(model.generate, Prompt(suffix="x"), max_new_tokens=1)  # waits for the model
    assert time.perf_counter() - start < 4


# --- what arrives: carriers of segments, roles, and marks ---

SEGMENT = Segment("It leaves at noon.", title="Ferry")
SCORED = SegmentBlock.of(Segment("It leaves at noon.", title="Ferry", score=0.5))
CITABLE = types.CitableBlock(title="Ferry", source="x", content=[TextBlock(text=SEGMENT.text)])
FILE = types.DocumentBlock(data=SEGMENT.text.encode(), title="Ferry", document_mimetype="text/plain")
ALONE: list[tuple[Any, float | None]] = [(SegmentBlock.of(SEGMENT), None), (SCORED, 0.5), (CITABLE, None), (FILE, None)]
CARRIERS: list[tuple[list[Any], float | None]] = [
    *(([TextBlock(text="Read: "), each, TextBlock(text=QUERY)], score) for each, score in ALONE),
    *(([TextBlock(text=f"Read: {each}{QUERY}")], None) for each in (mark(SEGMENT), mark(SEGMENT, 1))),
]
"""Blocks that carry this segment, and the score that they carry."""


def content(llm: InvariantLLM, *messages: ChatMessage) -> list[tuple[str, list[Any]]]:
    """Return what the model is asked: roles, with texts, and segments one by one."""
    asked = []
    for message in llm._chat_call(messages, {}).request.messages:
        parts = [[part] if isinstance(part, str) else list(part) for part in message["content"]]
        asked.append((message["role"], [each for part in parts for each in part if each]))
    return asked


@pytest.mark.parametrize(("carried", "score"), CARRIERS)
def test_a_segment_arrives_by_every_carrier(llm: InvariantLLM, carried: list[Any], score: float | None) -> None:
    message = ChatMessage(blocks=carried)
    segment = Segment(SEGMENT.text, title="Ferry", score=score)
    assert content(llm, message) == [("user", ["Read: ", segment, QUERY])]
    restored = ChatMessage.model_validate_json(message.model_dump_json())
    assert SegmentBlock not in map(type, restored.blocks), "it is a citable block to everyone else"
    assert content(llm, restored) == [("user", ["Read: ", SEGMENT, QUERY])]


def test_texts_and_roles_are_joined_as_llama_index_joins_them(llm: InvariantLLM) -> None:
    silent = [types.CachePoint(cache_control=types.CacheControl(type="x")), types.ThinkingBlock(content="hm")]
    message = ChatMessage(blocks=[*silent, TextBlock(text="a"), TextBlock(text="b")])
    assert content(llm, message) == [("user", [message.content])]
    messages = [ChatMessage("x", role=role) for role in ("developer", "system", "user", "user", "model")]
    found = [(role, "".join(parts)) for role, parts in content(llm, *messages)]
    assert found == [("system", "x\n\nx"), ("user", "x\n\nx"), ("assistant", "x")]


MARKED = [mark(text, 3) for text in TEXTS]
FOUND = {
    "Read: " + "\n\n".join(MARKED): ([3], False),
    **{str([MARKED[i] for i in order]): ([], True) for order in ORDERS},  # escaped, they are no marks
    "".join(MARKED)[5:]: ([2], True),
    MARKED[0]: ([1], True),
    "Icons: \ue200cite\ue202turn0 \ue201 \ueca0.": ([], False),  # characters of others
}
"""Texts with marks, the sets in them, and whether somebody is warned."""


@pytest.mark.parametrize("text", FOUND, ids=range(len(FOUND)))  # marks have a key of the process
def test_marks_that_arrive_whole_are_a_set_and_others_raise_a_warning(llm: InvariantLLM, text: str) -> None:
    response, messages = caught(llm.complete, text + QUERY)
    assert (response.raw["sets"], bool(messages)) == FOUND[text]


# --- what is reported ---


def test_a_response_names_what_did_not_fit_in_every_order(model: InvariantModel) -> None:
    texts = [text * (40 + 10 * i) for i, text in enumerate(TEXTS)]  # together more than the context window
    for overflow, changed in (("drop_last", "dropped"), ("trim_segments", "trimmed")):
        llm = InvariantLLM(model.with_method(overflow=overflow), max_tokens=1)
        first, *others = [llm.chat(asked("chat", order, texts)).raw for order in ORDERS[::2]]
        assert all(each == first for each in others)
        assert {Segment(text).content_hash for text in texts} == {*first["order"], *first["dropped"]}
        assert first[changed]
    with pytest.raises(errors.ContextOverflow, match="4096"):
        InvariantLLM(model).complete("x" * 5000)


@pytest.mark.parametrize(("alpha", "branch"), [(2.0, "plain"), (-2.0, "invariant")])
def test_a_routed_model_is_a_model(model: InvariantModel, alpha: float, branch: str) -> None:
    routed = InvariantLLM(model.with_routing(alpha, plain_order="canonical"), max_tokens=8)
    kept = InvariantLLM(getattr(routed.lm, f"{branch}_branch"), max_tokens=8)
    for response in (routed.chat(asked("chat")), *list(routed.stream_chat(asked("chat")))[-1:]):
        assert (text_of(response), response.raw["routing"]["branch"]) == (text_of(kept.chat(asked("chat"))), branch)
    response, (message,) = caught(InvariantLLM(model.with_routing(alpha), max_tokens=2).chat, asked("chat"))
    assert ("router" in message, response.raw["invariant"]) == (True, False)


def test_segments_that_are_cached_change_nothing_but_the_counts(model: InvariantModel, llm: InvariantLLM) -> None:
    cached = InvariantLLM(model, key_value_cache=KeyValueCache(), max_tokens=8)
    cold, *warm = [each.chat(asked("chat", order)) for each, order in zip((llm, *[cached] * 3), ORDERS, strict=False)]
    counts = [each.raw["usage"]["cached_tokens"] for each in (cold, *warm)]
    assert (counts[:2], counts[2] == counts[3] > sum(map(len, TEXTS))) == ([0, 0], True)
    assert {text_of(each) for each in warm} == {text_of(cold)}


# --- how it is built ---


def test_a_folder_is_loaded_as_it_says(folder: Path) -> None:
    model = InvariantLLM(folder, method="pine", ordering="frequency", overflow="drop_last", max_segment_tokens=9).lm
    chosen = (model.method.name, model.ordering.name, model.overflow, model.max_segment_tokens)
    assert chosen == ("pine", "frequency", "drop_last", 9)
    for method in ("rotor", "sequential"):
        llm = InvariantLLM(folder, method=method)
        own = resolve_method(method).default_ordering
        assert (llm.ordering, llm.lm.ordering.name, llm.to_payload()["ordering"]) == (None, own, own)
    default = InvariantModel.from_pretrained().generate(Prompt(suffix="Hello"), max_new_tokens=4).text
    assert InvariantLLM(max_tokens=4).complete("Hello").text == default


def test_metadata_needs_no_weights_and_can_be_set(folder: Path, tmp_path: Path, model: InvariantModel) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    llm = InvariantLLM(tmp_path, max_tokens=7)
    said = llm.metadata
    assert (said.context_window, said.num_output, said.is_chat_model, said.model_name) == (4096, 7, True, str(tmp_path))
    assert said.is_function_calling_model
    with pytest.raises(errors.ModelNotFound, match=str(tmp_path)):
        llm.complete("Hello")
    with pytest.raises(errors.ModelNotFound, match="nowhere"):
        assert InvariantLLM(tmp_path / "nowhere").metadata
    said = InvariantLLM(model, context_window=512, is_function_calling_model=False).metadata
    assert (said.context_window, said.is_function_calling_model) == (512, False)


def test_what_cannot_be_is_refused_when_an_llm_is_built(llm: InvariantLLM, model: InvariantModel, weights: Any) -> None:
    for kind in ("method", "ordering", "backend"):
        with pytest.raises(errors.UnknownName, match=f"unknown {kind} 'foo'; choose from"):
            InvariantLLM(**{kind: "foo"})
    with pytest.raises(ValidationError, match=r"overflow\n.*'drop_last'"):
        InvariantLLM(overflow="foo")
    near = r"'metod'; did you mean 'method'.*\n.*'temprature'; did you mean 'temperature'"
    with pytest.raises(errors.UnknownParameter, match=near) as error:
        InvariantLLM(metod="pine", temprature=0.9)
    assert "`max_new_tokens` is `max_tokens`" in error.value.hint
    with pytest.raises(errors.UnknownParameter, match="did you mean 'max_tokens'"):
        llm.model_copy(update={"max_token": 3})
    with pytest.raises(errors.UnsupportedCombination, match="chat template"):
        InvariantLLM(messages_to_prompt=lambda messages: "x")
    for given in (weights, 5):
        with pytest.raises(errors.UnsupportedModel, match=f"InvariantModel, got {type(given).__name__}") as error:
            InvariantLLM(given)
        assert "InvariantModel(model, tokenizer)" in error.value.hint
    chosen = InvariantLLM(model.with_method("pine", ordering="frequency"))
    assert (chosen.method, chosen.ordering, chosen.metadata.context_window) == ("pine", "frequency", 4096)
    with pytest.raises(errors.UnsupportedCombination, match="method, backend"):
        InvariantLLM(model, method="pine", backend="sdpa")
    for describe in (chosen.to_dict, lambda: pickle.dumps(chosen)):
        with pytest.raises(errors.UnsupportedCombination, match="in memory"):
            describe()


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
    with pytest.raises(errors.UnsupportedCombination, match="key_value_cache, method, overflow"):
        llm.model_copy(update={"method": "pine", "overflow": "drop_last", "key_value_cache": KeyValueCache()})
    with pytest.raises(ValueError, match="frozen"):
        llm.method = "pine"


# --- what fails: LlamaIndex answers "Empty Response" where it catches a ValueError ---


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
async def test_what_is_wrong_is_no_empty_response(model: Any, refusing: InvariantLLM, way: str, mode: str) -> None:
    options = {"streaming": way == "streaming", "output_cls": Place if way == "object" else None}
    options |= {"response_mode": mode, "prompt_helper": PromptHelper(context_window=100_000)}  # it thinks that all fits
    wrong = [
        (InvariantLLM(model, max_tokens=4095), errors.ContextOverflow, "4096"),
        (InvariantLLM(model, generation_kwargs={"max_token": 3}), errors.InvalidOption, "max_token"),
        *([(refusing, AnswerFailed, "concatenate str")] if way != "object" else []),
    ]
    for llm, error, said in wrong:
        engine = engine_of(nodes_of(), response_synthesizer=get_response_synthesizer(llm=llm, **options))
        with pytest.raises(error, match=said):
            await consumed(engine.aquery(QUERY) if way == "aquery" else engine.query(QUERY))


@pytest.mark.parametrize("name", EIGHT)
async def test_errors_of_a_call_are_none_that_llama_index_catches(refusing: InvariantLLM, name: str) -> None:
    with pytest.raises(AnswerFailed, match="TypeError") as caught:
        await consumed(getattr(refusing, name)(asked(name)))
    assert isinstance(caught.value.__cause__, TypeError)
    for kind in (ContextChatEngine, CondensePlusContextChatEngine) if name in ("chat", "achat") else ():
        with pytest.raises(AnswerFailed):
            await consumed(getattr(kind.from_defaults(ListRetriever(nodes_of()), llm=refusing), name)(QUERY))
    calls = ("InvalidSegment", "InvalidPrompt", "ContextOverflow", "InvalidSchema", "IncompleteObject", "InvalidObject")
    for kind in (*(getattr(errors, name) for name in calls), errors.UnknownParameter, AnswerFailed):
        assert issubclass(kind, errors.InvariantRAGError)
        assert not issubclass(kind, (ValueError, TypeError))


PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
IMAGE = types.ImageBlock(image=PIXEL, image_mimetype="image/gif")
MEDIA = [
    ImageNode(text="A map.", image_url="https://example.org/map.png", id_="the map"),
    Node(text_resource=MediaResource(text="A map."), image_resource=MediaResource(data=PIXEL), id_="the map"),
    Node(audio_resource=MediaResource(data=b"RIFF"), id_="the map"),
]


@pytest.mark.parametrize("name", EIGHT[4:])
async def test_blocks_that_are_no_text_are_refused_by_name(llm: InvariantLLM, name: str) -> None:
    pdf = types.DocumentBlock(data=b"x", document_mimetype="application/pdf")
    cited = types.CitableBlock(title="", source="", content=[IMAGE])
    for block in (IMAGE, types.AudioBlock(audio=b"RIFF"), pdf, cited):
        with pytest.raises(errors.InvalidPrompt, match=r"expected text.*(image|audio|document)"):
            await consumed(getattr(llm, name)([ChatMessage(blocks=[TextBlock(text="What is this?"), block])]))


@pytest.mark.parametrize("node", MEDIA)
async def test_nodes_that_are_no_text_or_have_no_score_are_refused(llm: InvariantLLM, node: Any) -> None:
    nodes = [*nodes_of(), NodeWithScore(node=node, score=0.1)]
    ours = [InvariantSynthesizer(each) for each in (llm, canonical(MockLLM()))]
    for synthesizer in (*ours, get_response_synthesizer(llm)):
        with pytest.raises(errors.InvalidPrompt, match="image, audio or video in the map"):
            synthesizer.synthesize(QUERY, nodes)
        with pytest.raises(errors.InvalidPrompt, match="image, audio or video in the map"):
            await synthesizer.asynthesize(QUERY, nodes)
    unscored = [NodeWithScore(node=each.node) for each in nodes_of()]
    with pytest.raises(errors.InvalidSegment, match="score"):
        engine_of(unscored, llm=canonical(MockLLM(), ordering="score")).query(QUERY)
