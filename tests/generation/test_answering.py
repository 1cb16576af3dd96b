"""One request: whole equals streamed, and an answer is what the model wrote, with citations of the right documents."""

from concurrent.futures import CancelledError
from dataclasses import replace
from itertools import permutations
from threading import Event
from unittest.mock import Mock

import pytest
from transformers import MaxTimeCriteria

from invariant_rag import Prompt, Segment, SegmentSet
from invariant_rag.errors import IncompleteObject, InvalidOption, InvalidPrompt, UnsupportedCombination
from invariant_rag.generation import prepare
from invariant_rag.generation.answering import Answering, reply_all
from invariant_rag.generation.answers import Answer, AnswerRequest, Reply
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.streaming import StopOnEvent
from invariant_rag.prompts import template_format
from invariant_rag.segments import Slot
from tests.generation.test_tools import KINDS, QUESTION, TOOLS, Writing, lm_of

DOCUMENTS = [Segment("The mill grinds barley."), Segment("The ferry leaves at noon."), Segment("Salt is dear.")]
CHAT = [{"role": "user", "content": [SegmentSet(DOCUMENTS), "When does the ferry leave?"]}]
PLAIN = Prompt("Read: ", DOCUMENTS, "When does the ferry leave?")
SCHEMA = {"type": "object", "properties": {"hour": {"type": "integer"}}, "required": ["hour"]}

REQUESTS = {
    "a prompt": AnswerRequest(prompt=PLAIN, max_new_tokens=24, logprobs=True),
    "a conversation": AnswerRequest(messages=CHAT, max_new_tokens=24, citations=True),
    "several sampled answers": AnswerRequest(messages=CHAT, max_new_tokens=12, temperature=1.0, seed=3, n=3),
    "several greedy answers": AnswerRequest(messages=CHAT, max_new_tokens=12, n=2),
    "a forced call": AnswerRequest(messages=QUESTION, tools=TOOLS, tool_choice="required", max_new_tokens=160),
    "a call or text": AnswerRequest(messages=QUESTION, tools=TOOLS, max_new_tokens=40, temperature=1.0, seed=1),
    "an object": AnswerRequest(messages=CHAT, schema=SCHEMA, max_new_tokens=64, temperature=1.0, seed=2),
    "an object or calls": AnswerRequest(messages=CHAT, schema=SCHEMA, tools=TOOLS, max_new_tokens=160),
}


def split(pieces):
    *deltas, reply = pieces
    assert isinstance(reply, Reply)
    return deltas, reply


def without_generations(reply):
    return replace(reply, answers=tuple(replace(each, generation=None) for each in reply.answers))


def test_a_ledger_says_which_branch_was_taken_and_promises_nothing_of_documents_that_are_not_known():
    lm, request = lm_of("hermes"), REQUESTS["a conversation"]
    known, unknown = (Answering(lm, replace(request, recognized=each)).reply().ledger for each in (True, False))
    assert (known["invariant"], unknown) == (True, {**known, "invariant": False})
    routed = Answering(lm.with_routing(), request).reply()
    assert routed.ledger["routing"] == routed.first.generation.details["routing"]


@pytest.mark.parametrize("batcher", [None, MicroBatcher()], ids=["alone", "queued"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_streamed_reply_is_the_whole_one(name, batcher):
    lm, request = lm_of("hermes"), REQUESTS[name]
    whole = Answering(lm, request).reply(batcher)
    deltas, streamed = split(Answering(lm, request).stream(batcher))
    assert (without_generations(streamed), streamed.ledger) == (without_generations(whole), whole.ledger)
    assert len(whole.answers) == request.n
    for index, answer in enumerate(whole.answers):
        joined = Answer.join(delta for delta in deltas if delta.index == index)
        assert joined == Answer(answer.content, answer.reasoning, answer.tool_calls, answer.cut_call)
    assert whole.usage.completion_tokens == sum(each.generation.usage.completion_tokens for each in whole.answers)


def test_several_answers_and_several_requests_are_those_of_each_alone():
    lm, several = lm_of("hermes"), REQUESTS["several sampled answers"]
    requests = [replace(several, seed=3 + index, n=1) for index in range(3)]
    alone = [Answering(lm, each).reply().first.content for each in requests]
    assert len(set(alone)) == 3
    assert [each.content for each in Answering(lm, several).reply().answers] == alone
    assert [each.first.content for each in reply_all([Answering(lm, each) for each in requests])] == alone
    others = [replace(REQUESTS["a prompt"], prompt=Prompt("Read: ", DOCUMENTS[:n], "And?")) for n in (1, 2, 3)]
    texts = [Answering(lm, each).reply().first.content for each in others]
    assert [each.first.content for each in reply_all([Answering(lm, each) for each in others])] == texts
    assert reply_all([]) == []


WRITTEN = "At noon [2], as `row[1]` says; see [1] and [3]."


def test_an_answer_stays_as_written_and_its_numbers_lead_to_the_documents():
    lm = lm_of("hermes")
    slots = [Slot(f"[{number}] ", "\n", number=str(number)) for number in (1, 2, 3)]
    cited = set()
    for order in permutations(DOCUMENTS):
        messages = [{"role": "user", "content": [SegmentSet(order, slots=slots), "When?"]}]
        answering = Answering(lm, AnswerRequest(messages=messages, citations=True, max_new_tokens=47))
        read = answering.prepared.order
        writing = {"logits_processor": [Writing(lm, WRITTEN)]}
        reply = Answering(lm, replace(answering.request, options=writing)).reply()
        assert reply.first.content == WRITTEN
        found = {(WRITTEN[each.start : each.end], each.segment.text) for each in reply.first.citations or ()}
        assert found >= {(f"[{place + 1}]", order[index].text) for place, index in enumerate(read)}
        cited.add(frozenset(found))
    assert len(cited) == 1


def test_a_stop_string_ends_text_and_neither_calls_nor_objects_also_those_that_ran_out_of_tokens():
    lm, of_both = lm_of("hermes"), replace(REQUESTS["an object or calls"], stop=('"', "{"))
    free = AnswerRequest(messages=QUESTION, tools=TOOLS, max_new_tokens=30)
    for request in (REQUESTS["a prompt"], free):
        writing = {"logits_processor": [Writing(lm, "one. two. three")]}
        stopped = Answering(lm, replace(request, stop=(". t",), options=writing)).reply().first
        assert (stopped.content, stopped.finish_reason) == ("one", "stop")
    assert Answering(lm, replace(REQUESTS["an object"], stop=("{",))).reply().first.content.startswith("{")
    whole = Answering(lm, of_both).reply().first
    assert whole.tool_calls or whole.content.startswith("{")
    for limit in (len(whole.generation.token_ids) // 2, len(whole.generation.token_ids) - 1):
        cut = Answering(lm, replace(of_both, max_new_tokens=limit)).reply().first
        assert (cut.finish_reason, cut.generation.finish_reason) == ("length", "length")


@pytest.mark.parametrize("kind", KINDS)
def test_a_stop_string_in_the_opening_of_a_call_that_ran_out_of_tokens_leaves_length(kind):
    lm = lm_of(kind)
    written = template_format(lm.tokenizer).call_format
    before, stop = "" if written.anchored else "Well. ", ('"', "{", "[", "n", "s")
    opening = before + written.begin[written.begin.index(written.trigger) :] + "now" + written.middle
    first, last = (len(lm.tokenizer.encode(each)) for each in (before + written.trigger, opening))
    for limit in (first, (first + last) // 2, last):
        options = {"logits_processor": [Writing(lm, opening)]}
        request = AnswerRequest(messages=QUESTION, tools=TOOLS, stop=stop, max_new_tokens=limit, options=options)
        pieces, streamed = split(Answering(lm, request).stream())
        cut = Answering(lm, replace(request, options={"logits_processor": [Writing(lm, opening)]})).reply()
        assert (without_generations(streamed), streamed.ledger) == (without_generations(cut), cut.ledger)
        assert (cut.first.content, cut.first.finish_reason, cut.first.tool_calls) == (before.strip(), "length", ())
        assert cut.first.cut_call == Answer.join(pieces).cut_call != None  # noqa: E711


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [1, -1])
def test_a_call_that_something_else_than_room_cuts_off_is_an_error(order, kind):
    criteria = [MaxTimeCriteria(0.0), StopOnEvent(Event())][::order]
    request = replace(REQUESTS["a forced call"], options={"stopping_criteria": criteria})
    with pytest.raises(IncompleteObject, match=r"ends within call 0|expected a call of a tool"):
        Answering(lm_of(kind), request).reply()


def test_an_abandoned_request_has_no_reply():
    abandoned = Event()
    answering = Answering(lm_of("hermes"), replace(REQUESTS["a prompt"], max_new_tokens=1000))
    pieces = answering.stream(abandoned=abandoned)
    next(pieces)
    abandoned.set()
    with pytest.raises(CancelledError):
        list(pieces)
    with pytest.raises(CancelledError):
        answering.reply(abandoned=abandoned)


def test_a_wrong_request_is_refused():
    for wrong, error in (
        *(({"messages": None}, InvalidPrompt), ({"prompt": PLAIN}, InvalidPrompt), ({"n": 0}, InvalidOption)),
        ({"messages": None, "prompt": PLAIN, "tools": TOOLS}, UnsupportedCombination),
    ):
        with pytest.raises(error):
            Answering(lm_of("hermes"), replace(REQUESTS["a conversation"], **wrong))


def test_what_was_prepared_to_be_measured_is_not_tokenized_again(monkeypatch):
    answering, tokenize = Answering(lm_of("hermes"), REQUESTS["a conversation"]), Mock(wraps=prepare.tokenize_prompt)
    expected = answering.reply()
    monkeypatch.setattr(prepare, "tokenize_prompt", tokenize)
    assert answering.prepared.input_ids
    assert answering.reply() == expected
    assert tokenize.call_count == 1
