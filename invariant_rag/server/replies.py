"""Replies in OpenAI's shapes, whole and as chunks of a stream, with their ledgers and citations."""

from __future__ import annotations

import hashlib
import json
import time
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from invariant_rag.api_models import PlainRequest
from invariant_rag.generation.answers import Answer, AnswerDelta, TokenLogprob
from invariant_rag.generation.citations import CitedSpan
from invariant_rag.segments import Prompt, Segment, SegmentSet
from invariant_rag.server.engines.base import Choice, EngineReply

if TYPE_CHECKING:
    from invariant_rag.generation.outputs import Generation

ID = "id"  # key of a segment's metadata under which the id of its document is


@dataclass(frozen=True)
class ChatReplies:
    """Writes answers of a chat."""

    id: str
    model: str
    created: float = field(default_factory=time.time)
    whole_kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    prefix: ClassVar[str] = "chatcmpl"

    def whole(self, replies: Sequence[EngineReply]) -> dict[str, Any]:
        """Return the answers to all prompts of a request, which follow each other."""
        choices: list[dict[str, Any]] = []
        for reply in replies:
            for choice in reply.choices:
                logprobs = None if choice.logprobs is None else self._logprobs(choice.logprobs)
                end = {"logprobs": logprobs, "finish_reason": choice.finish_reason}
                choices.append({"index": len(choices), **self._answer(choice), **end})
        ledgers = replies[0].ledger if len(replies) == 1 else [reply.ledger for reply in replies]
        return self._object(self.whole_kind, choices, usage=_usage(replies), invariant=ledgers)

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield what comes before the first delta of an answer."""
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """Return the chunk of a delta."""
        if delta.call:
            function = {"arguments": delta.call.arguments}
            call: dict[str, Any] = {"index": delta.call.index, "function": function}
            if delta.call.name is not None:
                function["name"] = delta.call.name
                call |= {"id": delta.call.id, "type": "function"}
            return self._chunk(index, {"tool_calls": [call]})
        if delta.reasoning:
            return self._chunk(index, {"reasoning_content": delta.reasoning})
        return self._chunk(index, {"content": delta.content})

    def end(self, index: int, choice: Choice, reply: EngineReply) -> dict[str, Any]:
        """Return the last chunk of an answer: why it ended, its citations, log-probabilities and ledger."""
        delta = {"citations": choice.citations} if choice.citations else {}
        return self._chunk(index, delta, choice, invariant=reply.ledger)

    def usage(self, replies: Sequence[EngineReply]) -> dict[str, Any]:
        """Return the chunk of usage, which has no choices."""
        return self._object(self.chunk_kind, [], usage=_usage(replies))

    def _answer(self, choice: Choice) -> dict[str, Any]:
        answer = choice.answer
        calls = _calls(answer) if answer.tool_calls or answer.cut_call else []
        message: dict[str, Any] = {
            "role": "assistant",
            "content": answer.content or (None if calls else ""),
            "refusal": None,
        }
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": answer.reasoning} if answer.reasoning else {}
        message |= {"citations": choice.citations} if choice.citations else {}
        return {"message": message}

    def _chunk(self, index: int, delta: dict[str, Any], ending: Choice | None = None, **more: Any) -> dict[str, Any]:
        logprobs = None if ending is None or ending.logprobs is None else self._logprobs(ending.logprobs)
        end = {"logprobs": logprobs, "finish_reason": ending.finish_reason if ending else None}
        return self._object(self.chunk_kind, [{"index": index, **self._said(delta), **end}], **more)

    def _said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        return {"content": tokens, "refusal": None}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": int(self.created), "model": self.model}
        return {**head, "choices": choices, **more}


@dataclass(frozen=True)
class TextReplies(ChatReplies):
    """Writes answers of completions."""

    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield nothing: a text begins with its first delta."""
        yield from ()

    def _answer(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.answer.content}

    def _said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}

    def _logprobs(self, tokens: list[dict[str, Any]]) -> dict[str, Any]:
        texts = [each["token"] for each in tokens]
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in tokens]
        return {
            "tokens": texts,
            "token_logprobs": [each["logprob"] for each in tokens],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [*accumulate(map(len, texts), initial=0)][:-1],
        }


def _usage(replies: Sequence[EngineReply]) -> dict[str, Any]:
    prompt = written = cached = 0
    for each in replies:
        prompt += each.usage.prompt_tokens
        written += each.usage.completion_tokens
        cached += each.usage.cached_tokens
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written, **details}


def _calls(answer: Answer) -> list[dict[str, Any]]:
    calls = [(each.id, each.name, json.dumps(dict(each.arguments), ensure_ascii=False)) for each in answer.tool_calls]
    if cut := answer.cut_call:  # as far as it came: `finish_reason` is `length`
        calls.append((cut.id or "", cut.name or "", cut.arguments))
    return [
        {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identifier, name, arguments in calls
    ]


def document_id(segment: Segment) -> str:
    """Return the id of a document: its own, or one that follows from its contents."""
    return str(segment.metadata.get(ID, f"doc:{segment.content_hash[:12]}"))


def set_key(sets: Iterable[SegmentSet]) -> str:
    """Return a name of sets that does not depend on the order of their documents, equal on every machine.

    >>> set_key([SegmentSet(["a", "b"])]) == set_key([SegmentSet(["b", "a"])]) != set_key([SegmentSet(["a"])])
    True
    """
    hashes = [sorted(map(attrgetter("content_hash"), each)) for each in sets]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:32]


def ledger_of(generation: Generation, prompt: Prompt, ordering: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return the ledger of an answer, the same for every order in which the documents were listed.

    Returns:
        `method` and `ordering`; `sets`: their sizes; `set_key`; `order`: ids of all documents in physical order,
        farthest from the question first; `dropped` and `trimmed`: ids of those that did not fit; `invariant`: whether
        the order given could not change the answer; `warnings`: why it could all the same.
    """
    ids = list(map(document_id, prompt.segments))
    return {
        "method": generation.method,
        "ordering": ordering,
        "sets": list(generation.sets),
        "set_key": set_key(prompt.sets) if ids else None,
        "order": list(map(ids.__getitem__, generation.order)),
        "dropped": sorted(map(ids.__getitem__, generation.dropped)),
        "trimmed": sorted(map(ids.__getitem__, generation.trimmed)),
        "invariant": generation.invariant and not warnings,
        "warnings": list(warnings),
    }


def ledger_of_request(request: PlainRequest, method: str, ordering: str, warnings: Sequence[str]) -> dict[str, Any]:
    """Return the ledger of a model behind an API, with the keys of `ledger_of`."""
    ledger = request.ledger(method, recognized=ordering != "given" and not warnings)
    order = [document_id(segment) for each in request.sets for segment in each]
    own = {name: ledger[name] for name in ("method", "sets", "dropped", "trimmed", "invariant")}
    named = {"ordering": ordering, "order": order, "set_key": set_key(request.sets) if order else None}
    return {**own, **named, "warnings": list(warnings)}


def citations_of(text: str, spans: Iterable[CitedSpan], prompt: Prompt) -> list[dict[str, Any]]:
    """Return the parts of an answer that have a source, in Cohere v2's shape, with the number of its set from 0."""
    cited_spans: dict[tuple[int, int], dict[str, Any]] = {}
    ends = list(accumulate(map(len, prompt.sets)))
    for span in spans:
        start, end, segment = span.start, span.end, span.segment
        cited = {"start": start, "end": end, "text": text[start:end], "sources": [], "type": "TEXT_CONTENT"}
        document = {**segment.metadata, "id": document_id(segment), "text": segment.text}
        if segment.title is not None:
            document["title"] = segment.title
        source = {"type": "document", "id": document["id"], "set": bisect(ends, span.index), "document": document}
        cited_spans.setdefault((start, end), cited)["sources"].append(source)
    return list(cited_spans.values())


def token_of(token: TokenLogprob) -> dict[str, Any]:
    """Return a token in OpenAI's shape."""
    named, *tops = (
        {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}
        for name, value in ((token.token, token.logprob), *token.top)
    )
    return {**named, "top_logprobs": tops}
