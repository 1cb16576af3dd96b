"""ChatInvariant: what it reports, and how it behaves among threads and coroutines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context
from types import FrameType
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import ContextOverflow, UnsupportedCombination
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_core.runnables import RunnableLambda

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_segment

from .shared import DOCUMENTS, QUESTION
from .tool_models import Writing, joined, said

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
    yield shapes
    handle.remove()


# --- reports --------------------------------------------------------------------------------------------------------


def test_an_answer_says_what_was_read_and_written(chat: ChatInvariant, lm: InvariantModel) -> None:
    answer = chat.invoke(QUESTION, documents=DOCUMENTS)
    generation = lm.generate(
        lm.chat_prompt(messages=[{"role": "user", "content": [*map(to_segment, DOCUMENTS), QUESTION]}]),
        max_new_tokens=8,
    )
    assert answer.content == generation.text
    assert answer.usage_metadata == {
        "input_tokens": generation.usage.prompt_tokens,
        "output_tokens": generation.usage.completion_tokens,
        "total_tokens": generation.usage.total_tokens,
        "input_token_details": {"cache_read": generation.usage.cached_tokens},
    }
    order = [to_segment(DOCUMENTS[index]).content_hash for index in generation.order]
    assert answer.response_metadata["order"] == order
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == lm.name


def test_the_last_chunk_of_a_stream_says_the_same(chat: ChatInvariant) -> None:
    whole = chat.invoke(QUESTION, documents=DOCUMENTS)
    total = joined(list(chat.stream(QUESTION, documents=DOCUMENTS)))
    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata == whole.response_metadata
    assert {"order", "finish_reason", "model_name"} <= set(total.response_metadata)


def test_a_model_that_streams_tells_callbacks_every_token(lm: InvariantModel) -> None:
    tokens: list[str] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            tokens.append(token)

    chat = ChatInvariant(model=lm, max_tokens=8, streaming=True)
    answer = chat.invoke(QUESTION, config={"callbacks": [Handler()]})
    assert "".join(tokens) == answer.content
    assert len(tokens) > 1


def test_segments_that_do_not_fit_are_named(lm: InvariantModel) -> None:
    documents = [f"{number} " * 400 for number in range(6)]
    with pytest.raises(ContextOverflow):
        ChatInvariant(model=lm, max_tokens=4).invoke(QUESTION, documents=documents)
    answer = ChatInvariant(model=lm, max_tokens=4, overflow="drop_last").invoke(QUESTION, documents=documents)
    assert answer.response_metadata["dropped"]
    assert set(answer.response_metadata["dropped"]).isdisjoint(answer.response_metadata["order"])


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
@pytest.mark.parametrize("micro_batching", [False, True])
def test_a_prompt_that_is_too_long_is_an_overflow_for_langchain_too(
    lm: InvariantModel, kind: Any, micro_batching: bool
) -> None:
    model = kind(model=lm, max_tokens=4, micro_batching=micro_batching)
    for call in (model.invoke, lambda text: asyncio.run(model.ainvoke(text)), lambda text: list(model.stream(text))):
        with pytest.raises(ContextOverflow) as error:
            call("long " * 2000)
        assert isinstance(error.value, ContextOverflowError)
        assert "drop_last" in error.value.hint
    spare = RunnableLambda(lambda _: "spare")
    assert model.with_fallbacks([spare], exceptions_to_handle=(ContextOverflowError,)).invoke("long " * 2000) == "spare"


# --- threads and coroutines -----------------------------------------------------------------------------------------

PROMPTS = [f"{QUESTION} {number * 'and '}" for number in range(6)]


@pytest.mark.parametrize("micro_batching", [False, True])
def test_threads_get_their_own_answers(lm: InvariantModel, micro_batching: bool) -> None:
    chat = ChatInvariant(model=lm, max_tokens=8, micro_batching=micro_batching)
    alone = [chat.invoke(prompt, documents=DOCUMENTS).content for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: chat.invoke(prompt, documents=DOCUMENTS).content, PROMPTS))
    assert together == alone
    assert [answer.content for answer in chat.bind(documents=DOCUMENTS).batch(PROMPTS)] == alone


async def test_the_loop_goes_on_while_a_model_generates(chat: ChatInvariant) -> None:
    async def ticks(work: Any) -> int:
        task, count = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            count += 1
        await task
        return count

    async def stream() -> None:
        async for _ in chat.astream(QUESTION, max_tokens=100):
            pass

    assert await ticks(chat.ainvoke(QUESTION, max_tokens=100)) > 10
    assert await ticks(stream()) > 10


async def test_a_cancelled_call_stops_generating(chat: ChatInvariant, lm: InvariantModel) -> None:
    with forwards(lm) as shapes:
        task = asyncio.ensure_future(chat.ainvoke(QUESTION, max_tokens=LONG))
        while len(shapes) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await chat.ainvoke(QUESTION, max_tokens=1)  # waits until the model is free
        assert len(shapes) < LONG / 2


async def test_a_stream_that_nobody_reads_stops_generating(chat: ChatInvariant, lm: InvariantModel) -> None:
    with forwards(lm) as shapes:
        stream = chat.astream(QUESTION, max_tokens=LONG)
        await anext(stream)
        await stream.aclose()
        await chat.ainvoke(QUESTION, max_tokens=1)
        assert len(shapes) < LONG / 2


def test_a_call_may_ask_for_another_model_for_several_answers_and_for_no_usage(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=4)
    other = lm.with_method("pine")
    assert chat.invoke(QUESTION, model=other).response_metadata["method"] == "pine"
    assert ChatInvariant(model=lm).invoke(QUESTION, max_tokens=1).response_metadata["model_provider"] == "invariant-rag"
    (answers,) = chat.generate([[HumanMessage(QUESTION)]], n=3, temperature=2.0, seed=1).generations
    assert len({each.text for each in answers}) == 3
    silent = chat.model_copy(update={"stream_usage": False})
    assert [chunk.usage_metadata for chunk in silent.stream(QUESTION)] == [None] * len(list(silent.stream(QUESTION)))
    assert list(silent.stream(QUESTION, stream_usage=True))[-1].usage_metadata
    assert list(chat.stream(QUESTION))[-1].usage_metadata


def test_one_call_with_three_documents_takes_few_calls_and_reads_the_weights_for_a_cache_alone(
    lm: InvariantModel, monkeypatch: pytest.MonkeyPatch
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


def test_the_most_likely_tokens_are_told_at_each_place(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=5, top_logprobs=3)
    for message in (chat.invoke(QUESTION, documents=DOCUMENTS), [*chat.stream(QUESTION, documents=DOCUMENTS)][-1]):
        told = message.response_metadata["logprobs"]["content"]
        assert len(told) == 5
        for each in told:  # greedy: the first is the chosen one
            best = [top["logprob"] for top in each["top_logprobs"]]
            assert best == sorted(best, reverse=True)
            assert (len(best), best[0]) == (3, each["logprob"])
    plain = chat.model_copy(update={"top_logprobs": None}).invoke(QUESTION)
    assert "logprobs" not in plain.response_metadata
    with pytest.raises(UnsupportedCombination, match="one beam"):
        chat.invoke(QUESTION, num_beams=2)


# --- reasoning and log-probabilities ---


def test_reasoning_stands_apart_from_the_answer(thinker: ChatInvariant) -> None:
    text = "It is early.\n</think>\n\nAt noon.<|im_end|>"
    for model, options in (
        (thinker.model_copy(update={"template_kwargs": {"enable_thinking": True}}), {}),
        (thinker, {"template_kwargs": {"enable_thinking": True}}),
    ):
        bound: Any = model.bind(eos_token_id=thinker.lm.tokenizer.convert_tokens_to_ids("<|im_end|>"), **options)
        answer = bound.invoke(QUESTION, logits_processor=[Writing(model.lm, text)])
        assert (answer.content, answer.additional_kwargs) == ("At noon.", {"reasoning_content": "It is early."})
        assert answer.content_blocks == [
            {"type": "reasoning", "reasoning": "It is early."},
            {"type": "text", "text": "At noon."},
        ]
        chunks = list(bound.stream(QUESTION, logits_processor=[Writing(model.lm, text)]))
        assert said(joined(chunks)) == said(answer)
        assert sum("reasoning_content" in chunk.additional_kwargs for chunk in chunks) > 3


def test_log_probabilities_come_in_the_shape_of_openai(thinker: ChatInvariant) -> None:
    model = thinker.model_copy(update={"logprobs": True, "max_tokens": 12})
    answer = model.invoke(QUESTION)
    listed = answer.response_metadata["logprobs"]["content"]
    messages = [{"role": "user", "content": QUESTION}]
    generation = thinker.lm.generate(thinker.lm.chat_prompt(messages=messages), max_new_tokens=12)
    assert [each["logprob"] for each in listed] == list(generation.logprobs)
    assert "".join(each["token"] for each in listed) == answer.content
    assert b"".join(bytes(each["bytes"]) for each in listed).decode() == answer.content
    assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in listed)
    assert len(listed) == answer.usage_metadata["output_tokens"] == 12
    assert said(joined(list(thinker.bind(logprobs=True, max_tokens=12).stream(QUESTION)))) == said(answer)
    assert "logprobs" not in thinker.invoke(QUESTION, max_tokens=12).response_metadata
    assert "logprobs" not in model.invoke(QUESTION, logprobs=False).response_metadata
    stop = str(answer.content)[4:6]
    stopped = model.invoke(QUESTION, stop=[stop])
    assert "".join(each["token"] for each in stopped.response_metadata["logprobs"]["content"]) == stopped.content
