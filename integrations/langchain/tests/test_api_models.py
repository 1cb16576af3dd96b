"""`canonical` and `vote`: what the other model is sent, and what comes back; and audits of all models."""

import re
from collections import Counter
from typing import Any
from unittest.mock import create_autospec

import pytest
from framework_cases import WHO, flips
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.prompts import has_marks
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import BaseModel

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments, canonical, vote

from . import shared
from .shared import DOCUMENTS, ORDERS, PLACEHOLDER, QUESTION, WAYS, Heard, Reader, StreamingReader, collected

both = pytest.mark.parametrize("wrap", [canonical, vote])


class Town(BaseModel):
    """A town."""

    place: str


def prompt(documents=DOCUMENTS):
    return PLACEHOLDER.invoke({"context": documents, "question": QUESTION})


def written(documents):
    """Return documents as models behind an API get them."""
    return "".join(f"Document: {each.page_content}\n" for each in documents)


def text_of(messages):
    return "\n".join(f"{message.type}: {message.content}" for message in messages)


def conversation(order):
    """Return messages that carry a set in every way: marks in texts, blocks, and the result of a tool."""
    call = AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    result = ToolMessage(written(order), tool_call_id="1", artifact=order)
    system, marked = SystemMessage(str(Segments(order))), {"type": "text", "text": str(Segments(order))}
    return [system, HumanMessage([marked, QUESTION]), call, result, *prompt(order).messages]


@both
def test_requests_are_plain_text_and_ignore_the_order(wrap):
    requests = []
    for order in ORDERS:
        reader = Reader()
        wrap(reader).invoke(conversation(order))
        sent = sorted(text_of(messages) for messages, _ in reader.requests)
        assert {text.count(written([each])) for text in sent for each in order} == {4}
        requests.append(sent)
    assert all(each == requests[0] for each in requests)
    assert not any(has_marks(text) for text in requests[0])
    assert len(set(requests[0])) == (5 if wrap is vote else 1)
    assert len({Reader().invoke(written(order)).text for order in ORDERS}) == 3, "the plain model shows the order"


def test_messages_without_segments_are_sent_as_they_are_and_counted_with_them():
    image = {"type": "image", "url": "https://example.org/map.png"}
    cached = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
    uploads = HumanMessage([image, cached, {"type": "text", "text": "!"}])
    messages = [SystemMessage("Be brief."), AIMessage("Yes?"), uploads]
    model = canonical(Reader(custom_get_token_ids=lambda text: list(text.encode())))
    [(request, _)] = model._ballots(messages, {})
    assert request == messages
    [([*_, last], _)] = model._ballots([*messages, HumanMessage([cached, "a", *shared.blocks(), image])], {})
    first, text, third = last.content
    assert (first, text["text"][:11], third, last.additional_kwargs) == (cached, "aDocument: ", image, {})
    asked = [HumanMessage([*shared.blocks(), QUESTION])]
    assert model.get_num_tokens_from_messages(asked) == len(f"Human: {written(DOCUMENTS)}{QUESTION}")


def test_a_vote_takes_what_most_orders_say():
    loved = min(shared.TEXTS)  # canonical order lists it last
    reader = Reader(favourite=loved)
    model, asked = vote(reader, votes=6), prompt()
    assert canonical(reader).invoke(asked).text != loved
    reader.requests.clear()
    answer = model.invoke(asked)
    counts = Counter(Reader(favourite=loved)._read(sent, {}) for sent, _ in reader.requests)
    assert counts == {loved: 4, **dict.fromkeys(set(counts) - {loved}, 1)}
    assert answer.text == loved
    told = vote(Reader(), votes=6, answer_of=lambda message: "Ostra" in message.text).invoke(asked)
    assert answer.response_metadata["vote"] == told.response_metadata["vote"] == {"calls": 6, "agreed": 4}
    for raw in (False, True):  # no two raw answers are equal, but what they say is
        found = model.with_structured_output(Town, include_raw=raw).invoke(asked)
        assert (found["parsed"] if raw else found) == Town(place=loved)


@pytest.mark.parametrize("votes", [0, 3])
async def test_every_call_is_counted_reported_and_waits_for_the_limiter_and_callbacks_see_one(votes):
    limiter, heard = create_autospec(BaseRateLimiter, instance=True), Heard()
    reader, calls = Reader(rate_limiter=limiter, callbacks=[heard]), max(votes, 1)
    model = vote(reader, votes=votes) if votes else canonical(reader)
    for asked, ask in enumerate((model.ainvoke, lambda asked: collected(model.astream(asked))), 1):
        await ask(prompt())
        assert (limiter.aacquire.await_count, heard.ended) == (asked * calls, asked)
    answer = model.invoke(prompt())
    assert (limiter.acquire.call_count, heard.ended) == (calls, 3)
    told = answer.response_metadata
    assert answer.usage_metadata == {name: count * calls for name, count in shared.USAGE.items()}
    assert told["token_usage"] == {"total_tokens": 12 * calls}
    assert (told["model_name"], told["finish_reason"], "vote" in told) == ("reader-1", "stop", bool(votes))
    assert (told["sets"], told["invariant"], told["method"]) == ([3], True, "vote" if votes else "canonical")


async def test_canonical_streams_and_a_vote_is_one_piece():
    model = canonical(StreamingReader())
    pieces = [piece.text for piece in model.stream(prompt()) if piece.text]
    assert len(pieces) == len("".join(pieces).split()) > 3
    assert pieces == [piece.text for piece in await collected(model.astream(prompt())) if piece.text]
    assert len([piece for piece in vote(StreamingReader()).stream(prompt()) if piece.text]) == 1


@both
def test_tools_structured_output_and_what_is_bound_pass_through(wrap):
    expected = Town(place=wrap(Reader()).invoke(prompt()).text)
    structured, raw = (wrap(Reader()).with_structured_output(Town, include_raw=raw) for raw in (False, True))
    for order in ORDERS:
        call = wrap(Reader()).bind_tools([Town]).invoke(prompt(order)).tool_calls[0]
        assert (call["name"], call["args"]) == ("Town", expected.model_dump())
        assert raw.invoke(prompt(order))["parsed"] == expected
    for way, ask in list(WAYS.items())[: None if wrap is vote else 4]:  # a parser of LangChain streams parts
        assert ask(structured, prompt()) == expected, way
    for make in (lambda reader: wrap(reader.bind(user="me")), lambda reader: wrap(reader).bind(user="me")):
        reader = Reader()
        make(reader).invoke(prompt(), stop=["."])
        assert [keywords for _, keywords in reader.requests] == [{"stop": ["."], "user": "me"}] * len(reader.requests)


def test_it_is_a_fallback_that_gets_segments_as_text(lm):
    model = ChatInvariant(model=lm, max_tokens=10_000).with_fallbacks([canonical(Reader())])  # there is no room for it
    assert len({model.invoke(prompt(order)).text for order in ORDERS}) == 1


@both
def test_a_runnable_that_takes_text_gets_text_and_another_one_messages(wrap):
    given = []

    def first(value):
        given.append(value if isinstance(value, str) else text_of(value))
        return str(re.findall(r"Document: (.*)", given[-1])[0])

    model = wrap(RunnableLambda(first))
    found = set()
    for way, order in zip(WAYS.values(), ORDERS, strict=True):
        asked = f"{Segments(order)}{QUESTION}"
        for value in (asked, StringPromptValue(text=asked), prompt(order)):
            found.add(way(model, value))
    assert len(found) == 1
    assert not any(has_marks(text) for text in given)
    assert {text.startswith("human: ") for text in given} == {True, False}


# --- audits -----------------------------------------------------------------------------------------------------------


def said(system, **options):
    return as_system(system, **options).ask(WHO, WHO.segments).text


def of_mapping(given: dict[str, Any]) -> AIMessage:
    return AIMessage(f"{given['question']} {given['context'][0].page_content}")


def of_text(text: str) -> str:
    return text


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"Seen: {state['messages'][-1].content}")]}


TO_TEXT = RunnableLambda(lambda value: value.to_string())
CHAINS = [
    *map(RunnableLambda, (of_text, of_mapping, lambda given: {"answer": of_mapping(given)}, lambda text: text.strip())),
    *(ChatPromptTemplate.from_template(each) | TO_TEXT for each in ("{context} Question: {question}", "{text}")),
    StateGraph(MessagesState).add_node("reply", reply).add_edge(START, "reply").compile(),
]


@pytest.mark.parametrize("reader", [Reader(), shared.TextReader()])
def test_wrapped_models_are_given_marked_documents(reader):
    assert (flips(reader), flips(canonical(reader)), flips(vote(reader))) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_our_models_keep_every_answer_with_their_own_parameters(kind, lm):
    assert flips(kind(model=lm, max_tokens=4)) == 0.0
    model = kind(model=lm, max_tokens=3, temperature=0.9, seed=1, stop=["x"], generation_kwargs={"top_k": 5})
    system = as_system(model)
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1, "top_k": 5}
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.name != as_system(model.model_copy(update={"temperature": 0.8})).name
    assert as_system(model, generation={"max_new_tokens": 2}).generation["max_new_tokens"] == 2


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_get_what_their_input_schema_says_and_agents_a_message(chain):
    assert "Who?" in said(chain)
    assert "It was Ann." in said(chain)


def test_a_chain_that_never_sees_the_documents_or_asks_for_more_is_refused():
    with pytest.raises(AuditFailed, match="does not read the documents it is given") as refused:
        flips(RunnableLambda(lambda given: {"answer": given["question"]}))
    assert "behind the retriever" in refused.value.hint
    assert flips(RunnableLambda(lambda given: f"{given['input']} {given['context'][0].page_content}")) == 1.0
    with pytest.raises(UnsupportedCombination, match="nothing is known of tone"):
        as_system(ChatPromptTemplate.from_template("{context} {question} {tone}") | RunnableLambda(str))
    assert said(RunnableLambda(of_text), to_input=lambda question, segments: question) == "Who?"
