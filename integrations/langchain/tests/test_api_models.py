"""`canonical` and `vote` around models that know of no segments: what the other model is sent, and what comes back."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from invariant_rag.errors import ContextOverflow
from invariant_rag.prompts import mark
from langchain_core.callbacks import BaseCallbackHandler, UsageMetadataCallbackHandler
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableLambda
from pydantic import BaseModel

from langchain_invariant_rag import ChatInvariant, SegmentsPlaceholder, canonical, vote
from langchain_invariant_rag.documents import to_block, to_segment

from .plain_models import MARKS, USAGE, Reader, StreamingReader
from .shared import DOCUMENTS, ORDERS, QUESTION

TEMPLATE = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])


def prompt(documents: list[Any]) -> Any:
    return TEMPLATE.invoke({"context": documents, "question": QUESTION})


async def every_way(model: Any, messages: Any) -> dict[str, str]:
    """The text of an answer, in all the ways of asking."""
    config = {"max_concurrency": 1}
    return {
        "invoke": model.invoke(messages).text,
        "ainvoke": (await model.ainvoke(messages)).text,
        "batch": model.batch([messages], config)[0].text,
        "abatch": (await model.abatch([messages], config))[0].text,
        "stream": "".join(piece.text for piece in model.stream(messages)),
        "astream": "".join([piece.text async for piece in model.astream(messages)]),
    }


@pytest.mark.parametrize("kind", [Reader, StreamingReader])
@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_answers_ignore_the_order_of_segments(wrap: Any, kind: type[Reader]) -> None:
    plain = {kind().invoke([HumanMessage("".join(f"Document: {d.page_content}\n" for d in order))]).text
             for order in ORDERS}  # fmt: skip
    assert len(plain) == len(DOCUMENTS)
    seen = [await every_way(wrap(kind()), prompt(order)) for order in ORDERS]
    assert len({answer.strip() for answers in seen for answer in answers.values()}) == 1


CARRIERS: dict[str, Any] = {
    "blocks": prompt,
    "marks": lambda order: "\n".join(mark(to_segment(each)) for each in order) + QUESTION,
    "marks in a text block": lambda order: [
        HumanMessage([{"type": "text", "text": "".join(mark(to_segment(each)) for each in order)}, QUESTION])
    ],
    "marks in a system message": lambda order: [
        SystemMessage("".join(mark(to_segment(each)) for each in order)), HumanMessage(QUESTION),
    ],
    "result of a tool": lambda order: [
        HumanMessage(QUESTION),
        AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}]),
        ToolMessage("".join(f"Document: {each.page_content}\n" for each in order), tool_call_id="1", artifact=order),
    ],
}  # fmt: skip


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("wrap", [canonical, vote])
def test_requests_are_plain_text_and_ignore_the_order(wrap: Any, carrier: str) -> None:
    requests = []
    for order in ORDERS:
        reader = Reader()
        wrap(reader).invoke(CARRIERS[carrier](order))
        assert all(f"Document: {each.page_content}\n" in str_of(sent) for sent, _ in reader.requests for each in order)
        requests.append(sorted(str_of(sent) for sent, _ in reader.requests))
    assert all(each == requests[0] for each in requests)
    assert not any(MARKS.search(text) for text in requests[0])
    assert len(set(requests[0])) == (5 if wrap is vote else 1)


def str_of(messages: Any) -> str:
    return "\n".join(f"{message.type}: {message.content}" for message in messages)


def test_messages_without_segments_are_sent_as_they_are() -> None:
    image = {"type": "image", "url": "https://example.org/map.png"}
    cached = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
    messages = [
        SystemMessage("Be brief."),
        AIMessage("Yes?"),
        HumanMessage([image, cached, {"type": "text", "text": "!"}]),
    ]
    [(request, _)] = canonical(Reader())._ballots(messages, {})
    assert request == messages
    messages += [HumanMessage([cached, "a", *blocks(), image])]
    [(request, _)] = canonical(Reader())._ballots(messages, {})
    *_, last = request
    assert last.content[0] == cached
    assert last.content[1]["text"].startswith("aDocument: ")
    assert last.content[2:] == [image]


def blocks() -> list[Any]:
    return [dict(to_block(to_segment(each))) for each in DOCUMENTS]


def test_a_vote_takes_what_most_orders_say() -> None:
    loved = min(each.page_content for each in DOCUMENTS)  # canonical order lists it last
    reader = Reader(favourite=loved)
    assert canonical(reader).invoke(prompt(DOCUMENTS)).text != loved
    reader.requests.clear()
    answer = vote(reader, votes=6).invoke(prompt(DOCUMENTS))
    counts = Counter(Reader(favourite=loved)._read(sent, {}) for sent, _ in reader.requests)
    assert counts == {loved: 4, **dict.fromkeys(set(counts) - {loved}, 1)}
    assert answer.text == loved
    told = vote(Reader(), votes=6, answer_of=lambda message: "Ostra" in message.text).invoke(prompt(DOCUMENTS))
    assert answer.response_metadata["vote"] == told.response_metadata["vote"] == {"calls": 6, "agreed": 4}


async def test_usage_is_that_of_all_calls_together() -> None:
    model = vote(StreamingReader(), votes=4)
    told = [model.invoke(prompt(DOCUMENTS)), await model.ainvoke(prompt(DOCUMENTS)), *model.stream(prompt(DOCUMENTS))]
    assert [message.usage_metadata["total_tokens"] for message in told] == [48, 48, 48]
    assert canonical(Reader()).invoke(prompt(DOCUMENTS)).usage_metadata == USAGE


async def test_canonical_streams_and_a_vote_is_one_piece() -> None:
    model = canonical(StreamingReader())
    pieces = [piece.text for piece in model.stream(prompt(DOCUMENTS)) if piece.text]
    assert len(pieces) == len("".join(pieces).split())
    assert pieces == [piece.text async for piece in model.astream(prompt(DOCUMENTS)) if piece.text]
    assert len([piece for piece in vote(StreamingReader()).stream(prompt(DOCUMENTS)) if piece.text]) == 1


class Told(BaseCallbackHandler):
    def __init__(self) -> None:
        self.names: list[str] = []
        self.on_chat_model_start = lambda *args, **kwargs: self.names.append("start")  # type: ignore[method-assign]
        self.on_llm_new_token = lambda *args, **kwargs: self.names.append("token")  # type: ignore[method-assign]
        self.on_llm_end = lambda *args, **kwargs: self.names.append("end")  # type: ignore[method-assign]


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_callbacks_see_one_call(wrap: Any) -> None:
    told, mine, streamed = Told(), Told(), Told()
    wrap(Reader(callbacks=[mine])).invoke(prompt(DOCUMENTS), {"callbacks": [told, UsageMetadataCallbackHandler()]})
    assert told.names == mine.names == ["start", "end"]
    assert list(wrap(StreamingReader()).stream(prompt(DOCUMENTS), {"callbacks": [streamed]}))
    assert (streamed.names[0], streamed.names[1], streamed.names[-1]) == ("start", "token", "end")


def test_the_same_set_is_a_hit_in_the_cache(llm_cache: Any) -> None:
    for wrap, calls in ((canonical, 1), (vote, 5)):
        reader = Reader()
        for order in ORDERS:
            wrap(reader).invoke(prompt(order))
        assert len(reader.requests) == calls
    reader = Reader()
    for model in (vote(reader, votes=2), vote(reader, votes=2, seed=1), canonical(reader, ordering="frequency")):
        model.invoke(prompt(DOCUMENTS))
    assert len(reader.requests) == 5


class Slow(BaseRateLimiter):
    def __init__(self) -> None:
        self.asked = 0

    def acquire(self, *, blocking: bool = True) -> bool:
        self.asked += 1
        return True

    async def aacquire(self, *, blocking: bool = True) -> bool:
        return self.acquire()


async def test_every_call_waits_for_the_rate_limiter_of_the_model() -> None:
    limiter = Slow()
    for model, calls in ((canonical(Reader(rate_limiter=limiter)), 1), (vote(Reader(rate_limiter=limiter)), 5)):
        limiter.asked = 0
        model.invoke(prompt(DOCUMENTS))
        assert limiter.asked == calls
        await model.ainvoke(prompt(DOCUMENTS))
        assert limiter.asked == 2 * calls


class Town(BaseModel):
    """A town."""

    place: str


@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_tools_and_structured_output_pass_through(wrap: Any) -> None:
    for order in ORDERS:
        model = wrap(Reader()).bind_tools([Town])
        message = model.invoke(prompt(order))
        assert message.tool_calls[0]["args"]["place"] == wrap(Reader()).invoke(prompt(DOCUMENTS)).text
        structured = wrap(Reader()).with_structured_output(Town)
        for found in (structured.invoke(prompt(order)), await structured.ainvoke(prompt(order))):
            assert found == Town(**message.tool_calls[0]["args"])
        raw = wrap(Reader()).with_structured_output(Town, include_raw=True).invoke(prompt(order))
        assert raw["parsed"] == found
    if wrap is vote:
        assert list(structured.stream(prompt(DOCUMENTS))) == [found]


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_what_is_bound_reaches_the_model(wrap: Any) -> None:
    for make in (lambda reader: wrap(reader.bind(user="me")), lambda reader: wrap(reader).bind(user="me")):
        reader = Reader()
        make(reader).invoke(prompt(DOCUMENTS), stop=["."])
        assert all(keywords == {"stop": ["."], "user": "me"} for _, keywords in reader.requests)


def test_it_is_a_fallback_that_gets_segments_as_text(lm: Any) -> None:
    failing = ChatInvariant(model=lm, max_tokens=10_000)
    for model in (failing, failing.with_fallbacks([Reader()])):  # blocks: the fallback fails too
        with pytest.raises(ContextOverflow):
            model.invoke(prompt(DOCUMENTS))
    answers = {failing.with_fallbacks([canonical(Reader())]).invoke(prompt(order)).text for order in ORDERS}
    assert len(answers) == 1


@pytest.mark.parametrize("wrap", [canonical, vote])
async def test_completion_models_and_other_runnables_are_wrapped_too(wrap: Any) -> None:
    texts: list[str] = []

    def first(text: Any) -> str:
        texts.append(text)
        return re.findall(r"Document: (.*)", text)[0]

    model = wrap(RunnableLambda(first))
    inputs = ["".join(mark(to_segment(each)) for each in order) + QUESTION for order in ORDERS]
    found = {model.invoke(each) for each in inputs} | {await model.ainvoke(each) for each in inputs}
    found |= {"".join(model.stream(each)) for each in inputs}
    found |= {model.invoke(QUESTION, documents=order) for order in ORDERS}
    assert len(found) == 1
    assert not any(MARKS.search(text) for text in texts)
    assert wrap(FakeListLLM(responses=["noon"])).invoke(prompt(DOCUMENTS)) == "noon"


class Named(Reader):
    """The same, with what providers report: the model and its tokens for the call, and why the answer ended."""

    def _generate(self, messages: list[Any], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        (generation,) = super()._generate(messages, stop, **kwargs).generations
        return ChatResult(
            generations=[ChatGeneration(message=generation.message, generation_info={"finish_reason": "stop"})],
            llm_output={"model_name": "named-1", "token_usage": {"total_tokens": 12}},
        )

    def _combine_llm_outputs(self, llm_outputs: list[Any], /) -> dict[str, Any]:
        return {"token_usage": {"total_tokens": sum(each["token_usage"]["total_tokens"] for each in llm_outputs)}}


@pytest.mark.parametrize("tools", [[], [Town]], ids=["text", "tools"])
@pytest.mark.parametrize("votes", [0, 3])
async def test_a_stream_in_one_piece_reports_what_invoke_reports(votes: int, tools: list[Any]) -> None:
    model = vote(Named(), votes=votes) if votes else canonical(Named())
    asked = model.bind_tools(tools) if tools else model
    whole = asked.invoke(prompt(DOCUMENTS))
    (streamed,) = asked.stream(prompt(DOCUMENTS))
    (later,) = [piece async for piece in asked.astream(prompt(DOCUMENTS))]
    assert whole.response_metadata["model_name"] == "named-1"
    assert whole.response_metadata["finish_reason"] == "stop"
    assert whole.response_metadata["token_usage"] == {"total_tokens": 12 * max(votes, 1)}
    assert ("vote" in whole.response_metadata) == bool(votes)
    for piece in (streamed, later):
        assert piece.response_metadata == whole.response_metadata
        assert piece.usage_metadata == whole.usage_metadata
        assert (piece.text, piece.tool_calls) == (whole.text, whole.tool_calls)
