"""ChatInvariant: what it reports, and how it behaves among threads and coroutines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import ContextOverflow, UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_segment

from .shared import DOCUMENTS, ORDERS, QUESTION
from .tool_models import Writing, awaited_stream, distinct, ended, joined, said, search

LONG = 1500
MOST_CALLS, MOST_FRAMES = 350, 3900
"""Python calls of one `invoke`, of this package and the core, and of all packages. Never raised."""


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=8)


@contextmanager
def forwards(lm: InvariantModel) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the input ids of every pass of the model."""
    shapes: list[tuple[int, ...]] = []
    handle = lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    try:
        yield shapes
    finally:
        handle.remove()


# --- reports --------------------------------------------------------------------------------------------------------


def test_an_answer_says_what_was_read_and_written_and_so_does_the_last_chunk_of_a_stream(
    chat: ChatInvariant, lm: InvariantModel
) -> None:
    answer = chat.invoke(QUESTION, documents=DOCUMENTS)
    messages = [{"role": "user", "content": [*map(to_segment, DOCUMENTS), QUESTION]}]
    generation = lm.generate(lm.chat_prompt(messages=messages), max_new_tokens=8)
    assert answer.content == generation.text
    assert answer.usage_metadata == {
        "input_tokens": generation.usage.prompt_tokens,
        "output_tokens": generation.usage.completion_tokens,
        "total_tokens": generation.usage.total_tokens,
        "input_token_details": {"cache_read": generation.usage.cached_tokens},
    }
    told = answer.response_metadata
    assert told["order"] == [to_segment(DOCUMENTS[index]).content_hash for index in generation.order]
    assert (told["finish_reason"], told["model_name"], told["model_provider"]) == ("length", lm.name, "invariant-rag")
    assert said(joined(chat.stream(QUESTION, documents=DOCUMENTS))) == said(answer)


def test_a_model_that_streams_tells_callbacks_every_token(lm: InvariantModel) -> None:
    tokens: list[str] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            tokens.append(token)

    answer = ChatInvariant(model=lm, max_tokens=8, streaming=True).invoke(QUESTION, {"callbacks": [Handler()]})
    assert "".join(tokens) == answer.content
    assert len(tokens) > 1


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
@pytest.mark.parametrize("micro_batching", [False, True])
def test_what_does_not_fit_is_an_overflow_for_langchain_too_or_named(
    lm: InvariantModel, kind: Any, micro_batching: bool
) -> None:
    model, long = kind(model=lm, max_tokens=4, micro_batching=micro_batching), "long " * 2000
    for call in (model.invoke, lambda text: asyncio.run(model.ainvoke(text)), lambda text: list(model.stream(text))):
        with pytest.raises(ContextOverflow) as error:
            call(long)
        assert isinstance(error.value, ContextOverflowError)
        assert "drop_last" in error.value.hint
    spare = RunnableLambda(lambda _: "spare")
    assert model.with_fallbacks([spare], exceptions_to_handle=(ContextOverflowError,)).invoke(long) == "spare"
    documents = [f"{number} " * 400 for number in range(6)]
    told = ChatInvariant(model=lm, max_tokens=4, overflow="drop_last").invoke(QUESTION, documents=documents)
    assert told.response_metadata["dropped"]
    assert set(told.response_metadata["dropped"]).isdisjoint(told.response_metadata["order"])
    with pytest.raises(ContextOverflow):
        ChatInvariant(model=lm, max_tokens=4).invoke(QUESTION, documents=documents)


def test_a_call_may_ask_for_another_model_for_several_answers_and_for_no_usage(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=4)
    assert chat.invoke(QUESTION, model=lm.with_method("pine")).response_metadata["method"] == "pine"
    (answers,) = chat.generate([[HumanMessage(QUESTION)]], n=3, temperature=2.0, seed=1).generations
    assert len({each.text for each in answers}) == 3
    silent = chat.model_copy(update={"stream_usage": False})
    assert {chunk.usage_metadata is None for chunk in silent.stream(QUESTION)} == {True}
    for chunks in (silent.stream(QUESTION, stream_usage=True), chat.stream(QUESTION)):
        assert [*chunks][-1].usage_metadata


def test_one_call_with_three_documents_takes_few_calls_and_reads_the_weights_for_a_cache_alone(
    lm: InvariantModel,
) -> None:
    """Python calls of `invoke` behind a first one: those of this package and the core, and those of all packages."""
    chat = ChatInvariant(model=lm, max_tokens=2)
    chat.invoke(QUESTION, documents=DOCUMENTS)
    ours: list[str] = []
    every: list[str] = []

    def record(frame: FrameType, event: str, argument: object) -> None:
        # What transformers 5.24 and later wrap around every layer and output to rename an argument is nobody's call.
        renames = ("wrap_func", "wrapped_func", "_replace_old_cache_name", "_rename_kwargs_for_bc", "is_tracing")
        if event == "call" and not (frame.f_code.co_name in renames and "transformers" in frame.f_code.co_filename):
            every.append(frame.f_code.co_qualname)
            if "invariant_rag" in frame.f_code.co_filename:
                ours.append(frame.f_code.co_qualname)

    def measure() -> None:
        sys.setprofile(record)
        try:
            chat.invoke(QUESTION, documents=DOCUMENTS)
        finally:
            sys.setprofile(None)

    Context().run(measure)  # in which no other test has retrieved anything
    assert len(ours) <= MOST_CALLS, ours
    assert len(every) <= MOST_FRAMES
    assert "model_digest" not in ours


# --- threads and coroutines -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("micro_batching", [False, True])
def test_threads_get_their_own_answers(lm: InvariantModel, micro_batching: bool) -> None:
    chat = ChatInvariant(model=lm, max_tokens=8, micro_batching=micro_batching).bind(documents=DOCUMENTS)
    prompts = [f"{QUESTION} {number * 'and '}" for number in range(6)]
    alone = [chat.invoke(prompt).content for prompt in prompts]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda prompt: chat.invoke(prompt).content, prompts)) == alone
    assert [answer.content for answer in chat.batch(prompts)] == alone


async def test_the_loop_goes_on_while_a_model_generates(chat: ChatInvariant) -> None:
    async def stream() -> None:
        async for _ in chat.astream(QUESTION, max_tokens=100):
            pass

    for work in (chat.ainvoke(QUESTION, max_tokens=100), stream()):
        task, ticks = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await task
        assert ticks > 10


@pytest.mark.parametrize("streams", [False, True])
async def test_a_call_that_is_cancelled_and_a_stream_that_nobody_reads_stop_generating(
    chat: ChatInvariant, lm: InvariantModel, streams: bool
) -> None:
    with forwards(lm) as shapes:
        if streams:
            stream = chat.astream(QUESTION, max_tokens=LONG)
            await anext(stream)
            await stream.aclose()
        else:
            task = asyncio.ensure_future(chat.ainvoke(QUESTION, max_tokens=LONG))
            while len(shapes) < 5:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await chat.ainvoke(QUESTION, max_tokens=1)  # waits until the model is free
        assert len(shapes) < LONG / 2


async def test_a_stream_that_is_cancelled_while_text_is_held_back_stops_generating(
    chat: ChatInvariant, lm: InvariantModel
) -> None:
    whole = (await chat.ainvoke(QUESTION, max_tokens=300)).text
    with forwards(lm) as shapes:
        # Every text so far may become the stop sequence, so the first piece comes when nearly all is written.
        stream = asyncio.ensure_future(anext(chat.astream(QUESTION, max_tokens=300, stop=[f"{whole}never"])))
        while len(shapes) < 5:
            await asyncio.sleep(0.001)
        stream.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stream
        await chat.ainvoke(QUESTION, max_tokens=1)
        assert len(shapes) < 150


# --- keys and values that are kept ---

Case = tuple[Callable[[InvariantModel], dict[str, Any]], Callable[[Any], Any]]
KEPT: dict[str, Case] = {
    "the model's own, invoked": (
        lambda lm: {"model": lm.with_cache(KeyValueCache())}, lambda model: model.invoke(QUESTION),
    ),
    "given, awaited": (
        lambda lm: {"model": lm, "key_value_cache": KeyValueCache()},
        lambda model: asyncio.run(model.ainvoke(QUESTION)),
    ),
    "given with a method, in a batch": (
        lambda lm: {"model": lm, "method": "pine", "key_value_cache": KeyValueCache()},
        lambda model: model.batch([QUESTION])[0],
    ),
    "given to a routed model, streamed": (
        lambda lm: {"model": lm.with_routing(-2.0, plain_order="canonical"), "key_value_cache": KeyValueCache()},
        lambda model: joined(model.stream(QUESTION)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", KEPT)
def test_documents_that_were_read_before_are_not_read_again_in_any_order(lm: InvariantModel, name: str) -> None:
    make, ask = KEPT[name]
    chat = ChatInvariant(**make(lm), max_tokens=6, sort_segments=False)
    plain = ChatInvariant(**{**make(lm), "model": lm, "key_value_cache": None}, max_tokens=6)
    cold = plain.invoke(QUESTION, documents=ORDERS[0])
    answers = [ask(chat.bind(documents=documents)) for documents in ORDERS[::2]]
    assert {each.content for each in answers} == {cold.content}
    assert {each.usage_metadata["input_tokens"] for each in answers} == {cold.usage_metadata["input_tokens"]}
    first, second, third = [each.usage_metadata["input_token_details"]["cache_read"] for each in answers]
    assert first == cold.usage_metadata["input_token_details"]["cache_read"] == 0
    assert second == third
    question, suffix = 1 + len(f"\n\n{QUESTION}"), cold.usage_metadata["input_tokens"] - second
    assert question <= suffix < 2 * question, "all but the text behind the documents"
    assert "key_value_cache" not in chat.model_dump()


# --- reasoning, log-probabilities, citations ---


def test_reasoning_stands_apart_from_the_answer(thinker: ChatInvariant) -> None:
    text = "It is early.\n</think>\n\nAt noon.<|im_end|>"
    variables = {"template_kwargs": {"enable_thinking": True}}
    end = {"eos_token_id": thinker.lm.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    for bound in (thinker.model_copy(update=variables).bind(**end), thinker.bind(**end, **variables)):
        answer = bound.invoke(QUESTION, logits_processor=[Writing(thinker.lm, text)])
        assert (answer.content, answer.additional_kwargs) == ("At noon.", {"reasoning_content": "It is early."})
        assert answer.content_blocks == [
            {"type": "reasoning", "reasoning": "It is early."},
            {"type": "text", "text": "At noon."},
        ]
        chunks = list(bound.stream(QUESTION, logits_processor=[Writing(thinker.lm, text)]))
        assert said(joined(chunks)) == said(answer)
        assert sum("reasoning_content" in chunk.additional_kwargs for chunk in chunks) > 3


def test_log_probabilities_come_in_the_shape_of_openai(thinker: ChatInvariant) -> None:
    model = thinker.model_copy(update={"logprobs": True, "max_tokens": 12})
    answer = model.invoke(QUESTION)
    listed = answer.response_metadata["logprobs"]["content"]
    prompt = thinker.lm.chat_prompt(messages=[{"role": "user", "content": QUESTION}])
    assert [each["logprob"] for each in listed] == list(thinker.lm.generate(prompt, max_new_tokens=12).logprobs)
    assert "".join(each["token"] for each in listed) == answer.content
    assert b"".join(bytes(each["bytes"]) for each in listed).decode() == answer.content
    assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in listed)
    assert len(listed) == answer.usage_metadata["output_tokens"] == 12
    assert said(joined(thinker.bind(logprobs=True, max_tokens=12).stream(QUESTION))) == said(answer)
    for silent in (thinker.invoke(QUESTION, max_tokens=2), model.invoke(QUESTION, logprobs=False, max_tokens=2)):
        assert "logprobs" not in silent.response_metadata
    stopped = model.invoke(QUESTION, stop=[str(answer.content)[4:6]])
    assert "".join(each["token"] for each in stopped.response_metadata["logprobs"]["content"]) == stopped.content
    top = model.model_copy(update={"top_logprobs": 3, "max_tokens": 5})
    for message in (top.invoke(QUESTION, documents=DOCUMENTS), [*top.stream(QUESTION, documents=DOCUMENTS)][-1]):
        told = message.response_metadata["logprobs"]["content"]
        assert len(told) == 5
        for each in told:  # greedy: the first is the chosen one
            best = [one["logprob"] for one in each["top_logprobs"]]
            assert best == sorted(best, reverse=True)
            assert (len(best), best[0]) == (3, each["logprob"])
    with pytest.raises(UnsupportedCombination, match="one beam"):
        top.invoke(QUESTION, num_beams=2)


FOUND = [
    Document("It leaves at noon.", id="f-17", metadata={"source": "https://ostra.example/ferry", "page": 3}),
    Document("Or so they say.", metadata={"source": "town.txt"}),
    Document("Who knows.", metadata={"title": "Doubts"}),
]
TEXT = "It leaves at noon. Or so they say. Who knows. See [2]."


def test_sentences_are_cited_with_their_documents_and_the_answer_stays_as_it_is_written(lm: InvariantModel) -> None:
    cites = ChatInvariant(model=lm, max_tokens=80, citations=True, sort_segments=False)

    def asked(documents: list[Any] = FOUND, **options: Any) -> AIMessage:
        return cites.invoke(QUESTION, documents=documents, **ended(lm, TEXT), **options)

    answer = asked()
    assert StrOutputParser().invoke(answer) == answer.text == asked(citations=False).content == TEXT
    first, second, third = answer.content_blocks[0]["annotations"]
    url = "https://ostra.example/ferry"
    assert first == {
        "type": "citation", "start_index": 0, "end_index": 18, "cited_text": "It leaves at noon.",
        "url": url, "title": url,
        "extras": {
            "id": to_segment(FOUND[0]).content_hash, "metadata": {"source": url, "page": 3}, "document_id": "f-17",
        },
    }  # fmt: skip
    assert ("url" in second, second["title"], "document_id" in second["extras"]) == (False, "town.txt", False)
    assert ("url" in third, third["title"]) == (False, "Doubts")
    assert distinct(lambda documents: asked(documents).content, [FOUND, FOUND[::-1]]) == 1
    for chunks in (
        list(cites.stream(QUESTION, documents=FOUND, **ended(lm, TEXT))),
        awaited_stream(cites.astream(QUESTION, documents=FOUND, **ended(lm, TEXT))),
    ):
        joint = joined(chunks)
        (block,) = joint.content
        assert [{name: block[name] for name in block if name != "index"}] == answer.content  # type: ignore[index]
        assert {**said(joint), "content": ""} == {**said(answer), "content": ""}
        assert [chunk for chunk in chunks if any("annotations" in each for each in chunk.content)] == [chunks[-1]]
    again, plain = ([HumanMessage("a"), each, HumanMessage("b")] for each in (answer, AIMessage(answer.text)))
    assert cites.invoke(again, max_tokens=8).text == cites.invoke(plain, max_tokens=8).text
    called = cites.bind_tools([search], tool_choice="any", max_tokens=160).invoke(QUESTION)
    assert (called.content, [block["type"] for block in called.content_blocks]) == ([], ["tool_call"])
    off = cites.model_copy(update={"citations": False})
    assert off.invoke(QUESTION, documents=FOUND, **ended(lm, TEXT)).content == TEXT
    assert off.invoke(QUESTION, documents=FOUND, **ended(lm, TEXT), citations=True).content == answer.content


def test_a_cache_of_keys_and_values_is_no_part_of_the_cache_key(lm: InvariantModel, llm_cache: Any) -> None:
    for cache in (None, KeyValueCache()):
        ChatInvariant(model=lm, key_value_cache=cache, max_tokens=2).invoke(QUESTION)
        assert len(llm_cache._cache) == 1
