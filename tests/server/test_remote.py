"""`RemoteModel`, the client of both integrations, against a real server."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import permutations

import pytest

from invariant_rag import InvariantModel, Prompt, RemoteModel, Segment, SegmentSet
from invariant_rag.errors import (
    ContextOverflow,
    InvalidChoice,
    InvalidSegment,
    InvalidTool,
    RemoteError,
    UnsupportedCombination,
)
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.segments import Slot, document_rendering
from invariant_rag.testing.rounding import rounding
from tests.server.conftest import FLAGS, QUESTION

TOOL = {"type": "function", "function": {"name": "search", "parameters": {"type": "object", "properties": {}}}}
NUMBERS = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
SEGMENTS = [Segment(text, title=f"Sheet {number}") for number, text in enumerate(FLAGS)]


@pytest.fixture(scope="module")
def remote(base_url: str) -> RemoteModel:
    return RemoteModel(f"{base_url}/v1")


READ = Prompt.of("Read:\n", SegmentSet(FLAGS), f"\n{QUESTION}", rendering=document_rendering)
REQUESTS = {
    "a conversation": AnswerRequest(
        messages=[{"role": "user", "content": [SegmentSet(SEGMENTS), QUESTION]}], citations=True, logprobs=True
    ),
    "several sampled answers": AnswerRequest(
        messages=[{"role": "user", "content": QUESTION}], temperature=1.0, top_p=0.9, seed=1, n=3
    ),
    "a completion": AnswerRequest(prompt=READ, logprobs=True, stop=(".",)),
    "an object": AnswerRequest(
        messages=[{"role": "user", "content": QUESTION}], schema=NUMBERS, temperature=1.0, seed=2
    ),
    "calls": AnswerRequest(messages=[{"role": "user", "content": QUESTION}], tools=[TOOL], tool_choice="required"),
}


def test_a_conversation_has_the_same_reply_in_every_order(remote: RemoteModel, embedded: InvariantModel) -> None:
    for order in permutations(SEGMENTS, 3):
        messages = [{"role": "user", "content": [SegmentSet(order), f"\n{QUESTION}"]}]
        reply = remote.chat(messages, max_tokens=16)
        local = embedded.generate(embedded.chat_prompt(messages=messages), max_new_tokens=16)
        assert reply["choices"][0]["message"]["content"] == local.text
        assert reply["invariant"]["order"] == [order[index].content_hash for index in local.order]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_has_the_same_reply_here_and_there(name: str, remote: RemoteModel, embedded: InvariantModel) -> None:
    request = replace(REQUESTS[name], max_new_tokens=48)
    local = Answering(embedded, request).reply()
    bound = 2 * rounding(embedded.logits, embedded.chat_prompt(QUESTION, FLAGS))  # a logit less a sum of logits
    *deltas, streamed = remote.stream_reply(request)
    for reply in (remote.reply(request), streamed):
        for own, other in zip(local.answers, reply.answers, strict=True):
            assert replace(own, generation=None, logprobs=None) == replace(other, logprobs=None)
            logprobs = [[each.logprob for each in side.logprobs or ()] for side in (own, other)]
            assert logprobs[0] == pytest.approx(logprobs[1], abs=bound)
        assert reply.usage == replace(local.usage, cached_tokens=reply.usage.cached_tokens)
        kept = reply.ledger.keys() - {"cached_tokens"}
        assert {key: reply.ledger[key] for key in kept} == {key: local.ledger[key] for key in kept}
    for index, answer in enumerate(streamed.answers):
        assert "".join(each.content for each in deltas if each.index == index) == answer.content


def test_options_that_a_server_does_not_take_are_refused(remote: RemoteModel) -> None:
    with pytest.raises(UnsupportedCombination, match="num_beams"):
        remote.reply(replace(REQUESTS["a completion"], options={"num_beams": 2}))


def test_numbers_around_documents_stay_where_they_are(remote: RemoteModel, embedded: InvariantModel) -> None:
    def content(order: list[Segment]) -> list[object]:
        slots = [Slot(f"[{n}] ", "\n", number=str(n)) for n in range(1, 4)]
        return [SegmentSet(order, slots=slots), f"\n{QUESTION}"]

    replies = []
    for order in permutations(SEGMENTS[:3]):
        messages = [{"role": "user", "content": content(list(order))}]
        reply = remote.chat(messages, max_tokens=16)
        local = embedded.generate(embedded.chat_prompt(messages=messages), max_new_tokens=16)
        assert reply["usage"]["prompt_tokens"] == local.usage.prompt_tokens
        assert reply["invariant"]["sets"] == [3]
        replies.append(reply["choices"][0]["message"]["content"])
    assert len(set(replies)) == 1


def test_errors_of_the_server_are_those_of_the_library(remote: RemoteModel, base_url: str) -> None:
    asked = [{"role": "user", "content": QUESTION}]
    with pytest.raises(ContextOverflow, match="4096"):
        remote.chat(asked, max_tokens=4096)
    with pytest.raises(InvalidTool):
        remote.chat(asked, tools=[{"type": "function", "function": {"name": "f"}}] * 2)
    with pytest.raises(RemoteError, match="colour: unknown field"):
        remote.chat(asked, colour="red")
    with pytest.raises(RemoteError, match="small"):
        list(RemoteModel(f"{base_url}/v1", model="large").stream_chat(asked))
    with pytest.raises(RemoteError, match="cannot be reached"):
        RemoteModel("http://127.0.0.1:9/v1", max_retries=0).chat(asked)
    with pytest.raises(InvalidSegment):
        remote.complete([SegmentSet([[1, 2]])])
    with pytest.raises(InvalidChoice, match="base_url"):
        RemoteModel("localhost:8000")
    assert remote.context_window() == 4096


def test_it_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; sys.modules['transformers'] = None; import invariant_rag.remote"
    subprocess.run([sys.executable, "-c", code], check=True)
