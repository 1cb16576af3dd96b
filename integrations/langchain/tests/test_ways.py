"""However a model is asked, about whatever order, among what other calls: one answer, and one call for callbacks."""

import asyncio
import re
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
from framework_cases import call_text, ended
from invariant_rag.prompts import mark_set, parse_marked
from langchain_core.runnables import RunnableLambda

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote
from langchain_invariant_rag.documents import to_segment

from . import shared
from .shared import DOCUMENTS, ORDERS, QUESTION, TEXTS, WAYS, Departure, forwards, now, said, search, text

Given = namedtuple("Given", "lm spoken url")
"""What models are made of: two of their kind in memory, and the address of a third one."""


def chat(given, **options):
    return ChatInvariant(**{"model": given.lm, "max_tokens": 8, **options})


def talks(given, text, **options):
    """Return a chat model that writes a text."""
    return chat(given, model=given.spoken, **{"max_tokens": 160, **options}).bind(**ended(given.spoken, text))


def calls(given, **options):
    return talks(given, "", **options).bound.bind_tools([search, now], tool_choice="any")


def an_object(given):
    call = call_text("Departure", {"vessel": "ferry", "hour": 12})
    return talks(given, "").bound.bind_tools([search], response_format=Departure, **ended(given.spoken, call))


CITED = f"{TEXTS[1]} {TEXTS[0]}"
THOUGHT = "It is early.\n</think>\n\nAt noon."
SERVED = {
    "chat": lambda **where: ChatInvariant(max_tokens=16, method="set-based", citations=True, **where),
    "calls": lambda **where: ChatInvariant(max_tokens=96, **where).bind_tools([now, search], tool_choice="any"),
    "an object": lambda **where: ChatInvariant(max_tokens=96, **where).bind_tools([], response_format=Departure),
    "completion": lambda **where: InvariantLLM(max_tokens=8, **where),
}
OURS = {
    "chat": chat,
    "chat that streams": lambda given: chat(given, streaming=True),
    "micro-batched chat": lambda given: chat(given, micro_batching=True),
    "log-probabilities": lambda given: chat(given, top_logprobs=2),
    "reasoning": lambda given: talks(given, THOUGHT, template_kwargs={"enable_thinking": True}),
    "citations": lambda given: talks(given, CITED, citations=True),
    "calls": calls,
    "calls that are cut off": lambda given: calls(given, max_tokens=40),
    "two calls of which one is cut off": lambda given: calls(given, max_tokens=150).bind(
        **ended(given.spoken, 2 * call_text("search", {"query": "ferry", "limit": 3}))
    ),
    "calls that stream and are cut off": lambda given: calls(given, max_tokens=40, streaming=True),
    "an object beside tools": an_object,
    "plain branch": lambda given: chat(given, model=given.lm.with_routing(2.0, plain_order="canonical")),
    "invariant branch": lambda given: chat(given, model=given.lm.with_routing(-2.0, plain_order="canonical")),
    "completion": lambda given: InvariantLLM(model=given.lm, max_tokens=8),
    "log-probabilities of a server": lambda given: ChatInvariant(base_url=given.url, max_tokens=16, logprobs=True),
    **{f"{name} of a server": lambda given, make=make: make(base_url=given.url) for name, make in SERVED.items()},
    "canonical of one of ours": lambda given: canonical(chat(given)),
    "canonical of calls": lambda given: canonical(calls(given)),
    "canonical of calls that are cut off": lambda given: canonical(calls(given, max_tokens=40)),
    "vote of one of ours": lambda given: vote(chat(given)),
}
WRAPPED = {
    "a chat model": shared.Reader,
    "one that streams": shared.StreamingReader,
    "one with tools": lambda: shared.Reader().bind_tools([Departure]),
    "a completion model": shared.TextReader,
    "a function": lambda: RunnableLambda(lambda asked: re.findall(r"Document: (.*)", asked)[0]),
}
OTHERS = {
    f"{wrap.__name__} of {name}": lambda _, wrap=wrap, make=make: wrap(make())
    for wrap in (canonical, vote)
    for name, make in WRAPPED.items()
}
MODELS = {**OURS, **OTHERS}
STREAMS = ("chat that streams", "calls that stream and are cut off", "canonical of one that streams")
"""Models that tell callbacks the text as it comes however they are asked."""
ONE_BY_ONE = [(name, 1) for name in MODELS]
AT_ONCE = [(name, None) for name in OTHERS if name not in STREAMS]  # ours would take turns in writing a given text


@pytest.mark.parametrize(("name", "most"), [*ONE_BY_ONE, *AT_ONCE])
def test_an_answer_is_the_same_in_every_way_of_asking_and_every_order(name, most, lm, spoken, base_url):
    model, found = MODELS[name](Given(lm, spoken, base_url)), {}
    for (way, ask), order in zip(WAYS.items(), ORDERS, strict=True):
        heard = shared.Heard()
        answer = ask(model, QUESTION, {"callbacks": [heard], "max_concurrency": most}, documents=order)
        found[way] = said(answer)
        written = text(answer)
        assert written or answer.tool_calls or answer.invalid_tool_calls, way
        if not name.endswith((" of a completion model", " of a function")):  # which are called as what they are
            count = 2 if "batch" in way else 1
            streams = "stream" in way or name in STREAMS
            assert (heard.begun, heard.ended, heard.text) == (count, count, count * written if streams else ""), way
        if "cut off" in name:  # how many are complete is the core's
            assert (answer.response_metadata["finish_reason"], bool(answer.invalid_tool_calls)) == ("length", True)
        if name.startswith("two calls"):
            assert [each["args"] for each in answer.tool_calls] == [{"query": "ferry", "limit": 3}]
    assert found == dict.fromkeys(WAYS, found["invoke"])
    if name == "calls":
        assert sum(len(piece.tool_call_chunks) for piece in model.stream(QUESTION)) > 3, "they come as they are written"
    if (kind := name.removesuffix(" of a server")) in SERVED and kind != name:
        local = SERVED[kind]().invoke(QUESTION, documents=ORDERS[0])
        assert found["invoke"] == said(local), "a server answers as a model in memory"


# --- among other calls ----------------------------------------------------------------------------------------------

PROMPTS = [f"{QUESTION} {number * 'and '}" for number in range(6)]


@pytest.mark.parametrize("micro_batching", [False, True])
@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
@pytest.mark.parametrize("way", ["invoke", "stream"])
def test_concurrent_calls_answer_as_they_do_alone_and_micro_batches_are_decoded_together(lm, kind, way, micro_batching):
    model = kind(model=lm, max_tokens=12, micro_batching=micro_batching)

    def ask(prompt):
        return WAYS[way](model, prompt, documents=DOCUMENTS)

    alone = list(map(ask, PROMPTS))
    shapes, pause = [], lm.model.register_forward_hook(lambda *_: time.sleep(0.005))  # for the others to get in line
    with pause, forwards(lm, shapes), ThreadPoolExecutor(6) as pool:
        together = list(pool.map(ask, PROMPTS))
    assert list(map(text, together)) == list(map(text, alone))
    assert (max(rows for rows, _ in shapes) > 1) == micro_batching
    if kind is ChatInvariant:
        assert (False in {each.response_metadata.get("bitwise") for each in together}) == micro_batching


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_prompts_of_one_call_are_decoded_in_batches_of_a_size_and_are_the_same_texts(lm, size):
    prompts = [f"{mark_set(map(to_segment, DOCUMENTS))}{QUESTION}", "a", f"{mark_set('ab')}Who?", "What is it?", "b"]
    alone = [lm.generate(parse_marked(prompt), max_new_tokens=8).text for prompt in prompts]
    llm, shapes = InvariantLLM(model=lm, max_tokens=8, batch_size=size), []
    with forwards(lm, shapes):
        assert llm.batch(prompts) == alone
    assert max(rows for rows, _ in shapes) == min(size, len(prompts))
    assert asyncio.run(llm.abatch(prompts)) == alone


async def test_the_loop_goes_on_while_a_model_generates(lm):
    chat = ChatInvariant(model=lm, max_tokens=100)
    for work in (chat.ainvoke(QUESTION), shared.collected(chat.astream(QUESTION))):
        task, ticks = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            ticks += 1
        await task
        assert ticks > 10


@pytest.mark.parametrize("leaves", ["a call", "a stream", "a stream whose text is held back"])
async def test_who_leaves_stops_the_model(lm, leaves):
    chat, shapes = ChatInvariant(model=lm, max_tokens=1500), []
    whole = (await chat.ainvoke(QUESTION, max_tokens=300)).text
    with forwards(lm, shapes):
        if leaves == "a stream":
            stream = chat.astream(QUESTION)
            await anext(stream)
            await stream.aclose()
        else:
            # Every text so far may become the stop sequence, so the first piece comes when nearly all is written.
            held_back = chat.astream(QUESTION, max_tokens=300, stop=[f"{whole}never"])
            task = asyncio.ensure_future(chat.ainvoke(QUESTION) if leaves == "a call" else anext(held_back))
            while len(shapes) < 5:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await chat.ainvoke(QUESTION, max_tokens=1)  # waits until the model is free
        assert len(shapes) < 150
