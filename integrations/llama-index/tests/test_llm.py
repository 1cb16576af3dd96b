from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import time
from pathlib import Path

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.errors import (
    ContextOverflow,
    ModelNotFound,
    UnknownName,
    UnsupportedCombination,
    UnsupportedModel,
)
from invariant_rag.methods import resolve_method
from invariant_rag.prompts import mark
from invariant_rag.segments import document_rendering
from llama_index.core.base.llms.base import BaseLLM
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import LLM, ChatMessage, MessageRole, TextBlock
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.prompts import PromptTemplate
from pydantic import ValidationError
from transformers import PreTrainedModel

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, UnknownParameter

EIGHT = [f"{prefix}{name}" for name in ("complete", "chat") for prefix in ("", "stream_", "a", "astream_")]
TEXT = f"Read:\n{''.join(map(mark, TEXTS))}\n{QUERY}\n"
MESSAGES = [
    ChatMessage(role=MessageRole.SYSTEM, content="Be brief."),
    ChatMessage(role=MessageRole.USER, blocks=[*map(SegmentBlock.of, TEXTS), *ChatMessage(QUERY).blocks]),
]


async def call(llm: InvariantLLM, name: str, **kwargs: object) -> list[str]:
    """Call one of the eight methods; return the texts of its responses (one, or those of a stream)."""
    response = getattr(llm, name)(MESSAGES if name.endswith("chat") else TEXT, **kwargs)
    if inspect.iscoroutine(response):
        response = await response
    if name.startswith("astream"):
        responses = [each async for each in response]
    else:
        responses = list(response) if name.startswith("stream") else [response]
    if "stream" in name:
        assert [each.delta for each in responses] != [None] * len(responses)
        text = ""
        for each in responses:
            text += each.delta
            assert text == (each.message.content if name.endswith("chat") else each.text)
    return [each.message.content if name.endswith("chat") else each.text for each in responses]


def expected(model: InvariantModel, name: str, **kwargs: object) -> str:
    """What the engine itself answers."""
    segments = SegmentSet(TEXTS)
    if name.endswith("chat"):
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [segments, QUERY]}]
        prompt = model.chat_prompt(messages=messages)
    else:
        prompt = Prompt("Read:\n", segments, f"\n{QUERY}\n", rendering=document_rendering)
    return model.generate(prompt, max_new_tokens=8, **kwargs).text


def test_it_is_an_llm() -> None:
    bases = (BaseLLM, LLM, FunctionCallingLLM)
    assert list(bases) == [base for base in bases if base in InvariantLLM.__mro__]


def test_all_eight_methods_are_its_own() -> None:
    assert all(name in vars(InvariantLLM) for name in EIGHT)
    assert len(EIGHT) == 8


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_says_what_the_engine_says(llm: InvariantLLM, model: InvariantModel, name: str) -> None:
    assert (await call(llm, name))[-1] == expected(model, name)


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_takes_sampling_parameters_for_one_call(
    llm: InvariantLLM, model: InvariantModel, name: str
) -> None:
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 3}
    wanted = expected(model, name, do_sample=True, temperature=0.7, top_p=0.9, top_k=50, seed=3)
    assert wanted != expected(model, name)
    assert (await call(llm, name, **options))[-1] == wanted
    assert (await call(InvariantLLM(model, max_tokens=8, **options), name))[-1] == wanted


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_ends_before_a_stop_string(llm: InvariantLLM, model: InvariantModel, name: str) -> None:
    whole = expected(model, name)
    stop = whole[3:5]
    assert (await call(llm, name, stop=stop))[-1] == whole[: whole.index(stop)]
    assert (await call(llm, name, stop=["never", stop]))[-1] == whole[: whole.index(stop)]


@pytest.mark.parametrize("name", EIGHT)
async def test_an_answer_without_text_is_one_empty_response(
    llm: InvariantLLM, model: InvariantModel, name: str
) -> None:
    assert await call(llm, name, stop=expected(model, name)[0]) == [""]


@pytest.mark.parametrize("name", EIGHT)
async def test_each_method_passes_other_keywords_to_generate(
    llm: InvariantLLM, model: InvariantModel, name: str
) -> None:
    assert (await call(llm, name, repetition_penalty=3.0))[-1] == expected(model, name, repetition_penalty=3.0)


@pytest.mark.parametrize("name", EIGHT)
async def test_a_misspelt_keyword_of_a_call_is_refused_with_what_is_near(name: str) -> None:
    nothing_loaded = InvariantLLM("no/such-model")
    with pytest.raises(
        UnknownParameter, match=r"'max_token'; did you mean 'max_tokens' or .*\n.*'no_such_keyword'"
    ) as error:
        await call(nothing_loaded, name, max_token=3, no_such_keyword=1)
    assert "temperature" in error.value.hint


@pytest.mark.parametrize("keyword", ["docs", "documents", "nodes"])
def test_documents_beside_a_prompt_are_refused_with_where_they_belong(keyword: str) -> None:
    with pytest.raises(UnknownParameter, match=keyword) as error:
        InvariantLLM("no/such-model").complete("Who?", **{keyword: ["a"]})
    assert "SegmentBlock" in error.value.hint


@pytest.mark.parametrize("name", EIGHT)
async def test_the_limit_may_be_called_as_transformers_calls_it(model: InvariantModel, name: str) -> None:
    llm = InvariantLLM(model, generation_kwargs={"max_new_tokens": 8})
    assert llm.metadata.num_output == 8
    assert (await call(llm, name))[-1] == expected(model, name)
    assert (await call(InvariantLLM(model), name, max_new_tokens=8))[-1] == expected(model, name)
    assert (await call(llm, name, max_tokens=3))[-1] == (await call(llm, name, max_new_tokens=3))[-1]


@pytest.mark.parametrize("name", [name for name in EIGHT if name.startswith("a")])
async def test_the_event_loop_goes_on_meanwhile(llm: InvariantLLM, name: str) -> None:
    longest, before = 0.0, time.perf_counter()

    async def watch() -> None:
        nonlocal longest, before
        while True:
            await asyncio.sleep(0)
            now = time.perf_counter()
            longest, before = max(longest, now - before), now

    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0)
    start = time.perf_counter()
    await call(llm, name, max_tokens=200)
    await asyncio.sleep(0)
    watcher.cancel()
    assert longest < (time.perf_counter() - start) / 2


async def test_leaving_an_async_stream_ends_the_generation(llm: InvariantLLM, model: InvariantModel) -> None:
    pieces = await llm.astream_complete(TEXT, max_tokens=2000)
    async for _ in pieces:
        break
    await pieces.aclose()
    start = time.perf_counter()
    await asyncio.to_thread(model.generate, Prompt(suffix="x"), max_new_tokens=1)  # waits for the model
    assert time.perf_counter() - start < 1


async def test_cancelling_a_call_ends_the_generation(llm: InvariantLLM, model: InvariantModel) -> None:
    task = asyncio.create_task(llm.acomplete(TEXT, max_tokens=3000))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    start = time.perf_counter()
    await asyncio.to_thread(model.generate, Prompt(suffix="x"), max_new_tokens=1)  # waits for the model
    assert time.perf_counter() - start < 4


async def test_calls_at_the_same_time_do_not_mix(llm: InvariantLLM, model: InvariantModel) -> None:
    names = [name for name in EIGHT if name.startswith("a")] * 2
    assert [texts[-1] for texts in await asyncio.gather(*(call(llm, name) for name in names))] == [
        expected(model, name) for name in names
    ]


def test_a_response_tells_usage_finish_reason_and_order(llm: InvariantLLM, model: InvariantModel) -> None:
    raw = llm.chat(MESSAGES).raw
    assert raw["usage"]["completion_tokens"] == 8
    assert raw["usage"]["total_tokens"] == raw["usage"]["prompt_tokens"] + 8
    assert raw["finish_reason"] == "length"
    assert sorted(raw["order"]) == sorted(Segment(text).content_hash for text in TEXTS)
    assert (raw["dropped"], raw["trimmed"]) == ([], [])


@pytest.mark.parametrize("overflow", ["drop_last", "trim_segments"])
def test_a_response_names_segments_whatever_the_order_in_which_they_came(model: InvariantModel, overflow: str) -> None:
    texts = [text * (40 + 10 * i) for i, text in enumerate(TEXTS)]  # together more than the context window
    llm = InvariantLLM(model.with_method(overflow=overflow), max_tokens=4)
    reports = [
        llm.chat([ChatMessage(blocks=[*(SegmentBlock.of(texts[i]) for i in order), TextBlock(text=QUERY)])]).raw
        for order in ORDERS
    ]
    assert all(report == reports[0] for report in reports)
    hashes = {Segment(text).content_hash for text in texts}
    changed = {"drop_last": "dropped", "trim_segments": "trimmed"}[overflow]
    assert reports[0][changed]
    assert set(reports[0]["order"]) | set(reports[0]["dropped"]) == hashes
    assert set(reports[0][changed]) <= hashes


def test_the_ordering_left_open_is_the_one_of_the_method(folder: Path) -> None:
    for method in ("rotor", "sequential"):
        llm = InvariantLLM(folder, method=method)
        assert llm.ordering is None
        assert llm.lm.ordering.name == resolve_method(method).default_ordering == llm.to_payload()["ordering"]
    assert llm.lm.ordering.name == "given"
    assert InvariantLLM(folder, method="sequential", ordering="lexical").lm.ordering.name == "lexical"


def test_predict_goes_through_the_chat_template(llm: InvariantLLM, model: InvariantModel) -> None:
    answer = llm.predict(PromptTemplate("Say {word}."), word="yes")
    assert (
        answer
        == model.generate(model.chat_prompt(messages=[{"role": "user", "content": "Say yes."}]), max_new_tokens=8).text
    )


def test_a_system_prompt_joins_the_system_message(model: InvariantModel) -> None:
    llm = InvariantLLM(model, max_tokens=8, system_prompt="Be brief.")
    template = PromptTemplate("Say yes.")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Say yes."}]
    assert llm.predict(template) == model.generate(model.chat_prompt(messages=messages), max_new_tokens=8).text


def test_the_default_is_the_embedded_model() -> None:
    llm = InvariantLLM(max_tokens=4)
    embedded = InvariantModel.from_pretrained()
    prompt = Prompt(suffix="Hello")
    assert llm.complete("Hello").text == embedded.generate(prompt, max_new_tokens=4).text


def test_a_folder_is_loaded_as_it_says(folder: Path) -> None:
    llm = InvariantLLM(folder, method="pine", ordering="frequency", overflow="drop_last", max_segment_tokens=9)
    model = llm.lm
    assert (model.method.name, model.ordering.name) == ("pine", "frequency")
    assert model.overflow == "drop_last"
    assert model.max_segment_tokens == 9


def test_a_loaded_model_takes_no_loading_options(model: InvariantModel) -> None:
    with pytest.raises(UnsupportedCombination, match="method, backend"):
        InvariantLLM(model, method="pine", backend="sdpa")


def test_a_loaded_model_says_what_it_is(model: InvariantModel) -> None:
    llm = InvariantLLM(model.with_method("pine", ordering="frequency"))
    assert (llm.method, llm.ordering, llm.metadata.context_window) == ("pine", "frequency", 4096)


def test_metadata_needs_no_weights(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    metadata = InvariantLLM(tmp_path, max_tokens=7).metadata
    assert (metadata.context_window, metadata.num_output, metadata.is_chat_model) == (4096, 7, True)
    assert metadata.model_name == str(tmp_path)


def test_nothing_is_loaded_before_the_first_call(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    llm = InvariantLLM(tmp_path)
    with pytest.raises(ModelNotFound, match=str(tmp_path)):
        llm.complete("Hello")


def test_a_model_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="nowhere"):
        assert InvariantLLM(tmp_path / "nowhere").metadata


@pytest.mark.parametrize("kind", ["method", "ordering", "backend"])
def test_unknown_names_are_refused_when_the_llm_is_built(kind: str) -> None:
    with pytest.raises(UnknownName, match=f"unknown {kind} 'foo'; choose from"):
        InvariantLLM(**{kind: "foo"})
    with pytest.raises(ValidationError, match=r"overflow\n.*'drop_last'"):
        InvariantLLM(overflow="foo")


def test_unknown_parameters_are_refused() -> None:
    with pytest.raises(
        UnknownParameter, match=r"'metod'; did you mean 'method'.*\n.*'temprature'; did you mean 'temperature'"
    ) as error:
        InvariantLLM(metod="pine", temprature=0.9)
    assert "`max_new_tokens` is `max_tokens`" in error.value.hint
    with pytest.raises(UnknownParameter, match="max_new_tokens"):
        InvariantLLM(max_new_tokens=3)


def test_a_model_that_is_not_wrapped_is_refused(weights: PreTrainedModel) -> None:
    for given in (weights, 5):
        with pytest.raises(UnsupportedModel, match=f"InvariantModel, got {type(given).__name__}") as error:
            InvariantLLM(given)
        assert "InvariantModel(model, tokenizer)" in error.value.hint


def test_a_prompt_that_is_too_long_is_refused_by_name(llm: InvariantLLM) -> None:
    with pytest.raises(ContextOverflow, match="4096"):
        llm.complete("x" * 5000)


def test_dictionaries_pickles_and_copies_answer_alike(folder: Path) -> None:
    llm = InvariantLLM(folder, method="pine", ordering="frequency", max_tokens=5, stop=["zz"], temperature=0.5, seed=1)
    assert llm.lm is llm.lm
    loaded = pickle.loads(pickle.dumps(llm))
    for other in (InvariantLLM.from_dict(llm.to_dict()), loaded, copy.deepcopy(llm), llm.model_copy()):
        assert other.to_dict() == llm.to_dict()
        assert other.complete(TEXT).text == llm.complete(TEXT).text
    assert len(pickle.dumps(llm)) < 5000  # no weights
    assert copy.deepcopy(llm).lm is llm.lm


def test_a_loaded_model_cannot_be_said_to_be_another(llm: InvariantLLM) -> None:
    assert llm.model_copy(update={"max_tokens": 3}).complete("Hello").raw["usage"]["completion_tokens"] == 3
    with pytest.raises(UnsupportedCombination, match="method, overflow"):
        llm.model_copy(update={"method": "pine", "overflow": "drop_last"})
    with pytest.raises(ValueError, match="frozen"):
        llm.method = "pine"


def test_a_model_in_memory_is_not_rebuilt_from_its_name(llm: InvariantLLM) -> None:
    with pytest.raises(UnsupportedCombination, match="in memory"):
        llm.to_dict()
    with pytest.raises(UnsupportedCombination, match="in memory"):
        pickle.dumps(llm)


@pytest.mark.parametrize("name", ["stream_complete", "stream_chat", "astream_complete", "astream_chat"])
async def test_the_last_piece_of_a_stream_says_what_the_whole_answer_says(llm: InvariantLLM, name: str) -> None:
    asked = [ChatMessage(blocks=[SegmentBlock.of("one"), TextBlock(text="two")])] if "chat" in name else TEXT
    whole = getattr(llm, name.removeprefix("a").removeprefix("stream_"))(asked)
    text = whole.message.content if "chat" in name else whole.text
    for stop in ([], [text[2:4]]):
        stream = getattr(llm, name)(asked, stop=stop)
        pieces = [each async for each in await stream] if name.startswith("a") else list(stream)
        one = getattr(llm, name.removeprefix("a").removeprefix("stream_"))(asked, stop=stop)
        assert pieces[-1].raw == one.raw
        assert pieces[-1].additional_kwargs == one.additional_kwargs
        assert all(piece.raw is None for piece in pieces[:-1])
        assert pieces[-1].raw["usage"]["cached_tokens"] == 0


@pytest.mark.parametrize(("alpha", "branch"), [(2.0, "plain"), (-2.0, "invariant")])
def test_a_routed_model_is_a_model(model: InvariantModel, alpha: float, branch: str) -> None:
    routed = model.with_routing(alpha, plain_order="canonical")
    messages = [ChatMessage(blocks=[*map(SegmentBlock.of, ("b", "a")), TextBlock(text="two")])]
    response = InvariantLLM(routed, max_tokens=8).chat(messages)
    kept = InvariantLLM(getattr(routed, f"{branch}_branch"), max_tokens=8).chat(messages)
    assert response.message.content == kept.message.content
    assert response.raw["routing"]["branch"] == branch
    *_, last = InvariantLLM(routed, max_tokens=8).stream_chat(messages)
    assert (last.message.content, last.raw) == (response.message.content, response.raw)


@pytest.mark.parametrize("count", [1, 3])
async def test_a_text_may_be_nothing_but_its_nodes(llm: InvariantLLM, count: int) -> None:
    @get_dispatcher(__name__).span
    async def ask(order: list[int]) -> set[str]:
        text = "\n".join(each.text for each in ListRetriever(nodes_of(order)).retrieve(QUERY))
        streamed = "".join(each.delta or "" for each in llm.stream_complete(text))
        return {llm.complete(text).text, (await llm.acomplete(text)).text, streamed}

    answers = [await ask(order) for order in (list(range(count)), list(range(count))[::-1])]
    assert answers[0] == answers[1]
    assert len(answers[0]) == 1
