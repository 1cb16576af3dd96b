"""`RemoteModel`, the client of both integrations, against a real server."""

import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import pytest

from invariant_rag import Prompt, RemoteModel, Segment, SegmentSet, errors
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.segments import Slot, document_rendering
from invariant_rag.testing.rounding import rounding
from tests.server.conftest import FLAGS, QUESTION

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SEGMENTS = [Segment(text, title=f"Sheet {number}") for number, text in enumerate(FLAGS)]
ASKED = {"messages": [{"role": "user", "content": QUESTION}]}
READ = {"messages": [{"role": "user", "content": [SegmentSet(SEGMENTS), QUESTION]}]}
SLOTS = [Slot(f"[{n}] ", "\n", number=str(n)) for n in range(1, 5)]
NUMBERED = {"messages": [{"role": "user", "content": [SegmentSet(SEGMENTS, slots=SLOTS), QUESTION]}]}
TEXT = Prompt.of("Read:\n", SegmentSet(FLAGS), f"\n{QUESTION}", rendering=document_rendering)
CALLED = {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "name": "search", "arguments": {}}]}
RESULT = {"role": "tool", "tool_call_id": "1", "content": SegmentSet(SEGMENTS)}
RETRIEVED = {"messages": [*ASKED["messages"], CALLED, RESULT], "tools": [TOOL]}
SCORED = SegmentSet(Segment(text, score=score) for text, score in zip(FLAGS, (3.0, 1.0, 2.0, -1.0), strict=True))
REQUESTS = {
    "a conversation": AnswerRequest(**READ, citations=True, logprobs=True, top_logprobs=3),
    "numbered documents": AnswerRequest(**NUMBERED, citations=True),
    "several sampled answers": AnswerRequest(**READ, temperature=2.0, top_p=0.9, top_k=90, min_p=0.001, seed=1, n=3),
    "up to a stop string": AnswerRequest(**READ, stop=("ite",)),
    "a completion": AnswerRequest(prompt=TEXT, logprobs=True, top_logprobs=2, stop=(".",)),
    "an object": AnswerRequest(**ASKED, schema=NUMBERS, temperature=1.0, seed=2),
    "calls": AnswerRequest(**ASKED, tools=[TOOL], tool_choice="required"),
    "one tool": AnswerRequest(**READ, tools=[TOOL], tool_choice="search", parallel=False, max_new_tokens=200),
    "results of tools": AnswerRequest(**RETRIEVED),
    "too short for an object": AnswerRequest(**ASKED, schema=NUMBERS, max_new_tokens=5),
    "too short for calls": AnswerRequest(**ASKED, tools=[TOOL], tool_choice="required", max_new_tokens=10),
    "scores": AnswerRequest(messages=[{"role": "user", "content": [SCORED, QUESTION]}]),
    "another method": AnswerRequest(**READ),
}
ENDS = {"one tool": "tool_calls", "too short for an object": "length", "too short for calls": "length"}
CHOICES = {"another method": {"method": "sequential", "ordering": "given"}, "scores": {"ordering": "score"}}


@pytest.fixture(scope="module")
def remote(base_url):
    return RemoteModel(f"{base_url}/v1")


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_the_same_reply_here_and_there(name, remote, embedded):
    request, choices = REQUESTS[name], CHOICES.get(name, {})
    request = replace(request, max_new_tokens=request.max_new_tokens or 48)
    local = Answering(embedded.with_method(**choices), request).reply()
    bound = 2 * rounding(embedded.logits, embedded.chat_prompt(QUESTION, FLAGS))  # a logit less a sum of logits
    *deltas, streamed = remote.stream_reply(request, choices=choices)
    for reply in (remote.reply(request, choices=choices), streamed):
        for own, other in zip(local.answers, reply.answers, strict=True):
            assert replace(own, generation=None, logprobs=None) == replace(other, logprobs=None)
            logprobs = [
                [value for each in side.logprobs or () for value in (each.logprob, *(top for _, top in each.top))]
                for side in (own, other)
            ]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=bound)
        assert reply.usage == replace(local.usage, cached_tokens=reply.usage.cached_tokens)
        kept = reply.ledger.keys() - {"cached_tokens"}
        assert {key: reply.ledger[key] for key in kept} == {key: local.ledger[key] for key in kept}
    assert not request.segments or (local.ledger["sets"], local.ledger["invariant"]) == ([4], name != "another method")
    assert local.first.finish_reason == ENDS.get(name, local.first.finish_reason)
    for index, answer in enumerate(streamed.answers):
        assert "".join(each.content for each in deltas if each.index == index) == answer.content


@pytest.mark.parametrize("slots", [None, SLOTS[:3]])
def test_every_order_has_one_reply(slots, remote):
    texts = set()
    for order in permutations(SEGMENTS[:3]):
        messages = [{"role": "user", "content": [SegmentSet(order, slots=slots), f"\n{QUESTION}"]}]
        reply = remote.chat(messages, max_tokens=16)
        assert reply["invariant"]["sets"] == [3]
        texts.add((reply["choices"][0]["message"]["content"], *reply["invariant"]["order"]))
    assert len(texts) == 1


def test_errors_of_the_server_are_those_of_the_library(remote, base_url):
    asked, url = ASKED["messages"], f"{base_url}/v1"
    beams = replace(REQUESTS["a completion"], options={"num_beams": 2})
    away = RemoteModel("http://127.0.0.1:9/v1", max_retries=0)
    for error, told, call in (
        (errors.ContextOverflow, "4096", lambda: remote.chat(asked, max_tokens=4096)),
        (errors.InvalidTool, "names", lambda: remote.chat(asked, tools=[TOOL, TOOL])),
        (errors.RemoteError, "colour: unknown field", lambda: remote.chat(asked, colour="red")),
        (errors.RemoteError, "small", lambda: list(RemoteModel(url, model="large").stream_chat(asked))),
        (errors.RemoteError, "cannot be reached", lambda: away.chat(asked)),
        (errors.InvalidSegment, "text", lambda: remote.complete([SegmentSet([[1, 2]])])),
        (errors.InvalidChoice, "base_url", lambda: RemoteModel("localhost:8000")),
        (errors.UnsupportedCombination, "num_beams", lambda: remote.reply(beams)),
    ):
        with pytest.raises(error, match=told):
            call()
    assert remote.context_window() == 4096


def test_it_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; import invariant_rag.remote"
    subprocess.run([sys.executable, "-c", code], check=True)
