"""Replies in OpenAI's shapes, whole and as chunks of a stream; what was read for them, and what they cite."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar

from invariant_rag.api_models import PlainRequest
from invariant_rag.generation.answers import AnswerDelta, TokenLogprob
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
    created: int = field(default_factory=lambda: int(time.time()))
    whole_kind: ClassVar[str] = "chat.completion"
    chunk_kind: ClassVar[str] = "chat.completion.chunk"
    prefix: ClassVar[str] = "chatcmpl"

    def whole(self, replies: Sequence[EngineReply]) -> dict[str, Any]:
        """Return the answers to all prompts of a request, which follow each other."""
        choices = [choice for reply in replies for choice in reply.choices]
        reports = [reply.report for reply in replies]
        return self._object(
            self.whole_kind,
            [self._whole_choice(index, each) for index, each in enumerate(choices)],
            usage=_usage(replies),
            invariant=reports[0] if len(reports) == 1 else reports,
        )

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield what comes before the first piece of an answer."""
        yield self._chunk(index, {"role": "assistant", "content": ""})

    def piece(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """Return the chunk of a piece."""
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
        """Return the last chunk of an answer: why it ended, its citations and log-probabilities, what was read."""
        delta = {"citations": choice.citations} if choice.citations else {}
        return self._chunk(index, delta, choice, invariant=reply.report)

    def usage(self, replies: Sequence[EngineReply]) -> dict[str, Any]:
        """Return the chunk of usage, which has no choices."""
        return self._object(self.chunk_kind, [], usage=_usage(replies))

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        end = {"logprobs": self._logprobs(choice), "finish_reason": choice.finish_reason}
        return {"index": index, "message": _message(choice), **end}

    def _chunk(self, index: int, delta: dict[str, Any], ending: Choice | None = None, **more: Any) -> dict[str, Any]:
        end = {
            "logprobs": self._logprobs(ending) if ending else None,
            "finish_reason": ending.finish_reason if ending else None,
        }
        return self._object(self.chunk_kind, [{"index": index, **self._said(delta), **end}], **more)

    def _said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"delta": delta}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": f"{self.prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


@dataclass(frozen=True)
class TextReplies(ChatReplies):
    """Writes answers of completions."""

    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def begin(self, index: int) -> Iterator[dict[str, Any]]:
        """Yield nothing: a text begins with its first piece."""
        yield from ()

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        end = {"logprobs": self._logprobs(choice), "finish_reason": choice.finish_reason}
        return {"index": index, "text": choice.answer.content, **end}

    def _said(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"text": delta.get("content", "")}

    def _logprobs(self, choice: Choice) -> dict[str, Any] | None:
        if choice.logprobs is None:
            return None
        tokens = [each["token"] for each in choice.logprobs]
        tops = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in choice.logprobs]
        return {
            "tokens": tokens,
            "token_logprobs": [each["logprob"] for each in choice.logprobs],
            "top_logprobs": tops if any(tops) else None,
            "text_offset": [*accumulate(map(len, tokens), initial=0)][:-1],
        }


def _usage(replies: Sequence[EngineReply]) -> dict[str, Any]:
    prompt = written = cached = 0
    for each in replies:
        prompt += each.usage.prompt_tokens
        written += each.usage.completion_tokens
        cached += each.usage.cached_tokens
    details = {"prompt_tokens_details": {"cached_tokens": cached}}
    return {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written, **details}


def _message(choice: Choice) -> dict[str, Any]:
    answer = choice.answer
    said = [(each.id, each.name, json.dumps(dict(each.arguments), ensure_ascii=False)) for each in answer.tool_calls]
    if cut := answer.cut_call:  # as far as it came: `finish_reason` is `length`
        said.append((cut.id or "", cut.name or "", cut.arguments))
    calls = [
        {"id": identifier, "type": "function", "function": {"name": name, "arguments": arguments}}
        for identifier, name, arguments in said
    ]
    more = {"tool_calls": calls, "reasoning_content": answer.reasoning, "citations": choice.citations}
    message = {"role": "assistant", "content": answer.content or (None if calls else ""), "refusal": None}
    return message | {name: value for name, value in more.items() if value}


def document_id(segment: Segment) -> str:
    """Return the id of a document: its own, or one that follows from its contents."""
    return str(segment.metadata.get(ID, f"doc:{segment.content_hash[:12]}"))


def set_key(sets: Iterable[SegmentSet]) -> str:
    """Return a name of sets that does not depend on the order of their documents, equal on every machine.

    >>> set_key([SegmentSet(["a", "b"])]) == set_key([SegmentSet(["b", "a"])]) != set_key([SegmentSet(["a"])])
    True
    """
    hashes = [sorted([segment.content_hash for segment in each]) for each in sets]
    return hashlib.sha256(json.dumps(hashes).encode()).hexdigest()[:32]


def report_of(generation: Generation, prompt: Prompt, ordering: str, warnings: Sequence[str] = ()) -> dict[str, Any]:
    """Return what was read for an answer, the same for every order in which the documents were listed.

    Returns:
        `method` and `ordering`; `sets`: their sizes; `set_key`; `order`: ids of all documents in physical order,
        farthest from the question first; `dropped` and `trimmed`: ids of those that did not fit; `invariant`: whether
        the order given could not change the answer; `warnings`: why it could all the same.
    """
    ids = [document_id(each) for each in prompt.segments]
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


def report_of_request(request: PlainRequest, method: str, ordering: str, warnings: Sequence[str]) -> dict[str, Any]:
    """Return what was written for a model behind an API, in the words of `report_of`."""
    ledger = request.ledger(method, recognized=ordering != "given" and not warnings)
    order = [document_id(segment) for each in request.sets for segment in each]
    kept = {name: ledger[name] for name in ("method", "sets", "dropped", "trimmed", "invariant")}
    named = {"ordering": ordering, "order": order, "set_key": set_key(request.sets) if order else None}
    return {**kept, **named, "warnings": list(warnings)}


def citations_of(text: str, spans: Iterable[CitedSpan], prompt: Prompt) -> list[dict[str, Any]]:
    """Return the parts of an answer that have a source, in Cohere v2's shape, with the number of its set from 0."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    set_of_segment = [number for number, each in enumerate(prompt.sets) for _ in each]
    for span in spans:
        found.setdefault((span.start, span.end), []).append(_source(span.segment, set_of_segment[span.index]))
    return [
        {"start": start, "end": end, "text": text[start:end], "sources": sources, "type": "TEXT_CONTENT"}
        for (start, end), sources in found.items()
    ]


def _source(segment: Segment, number: int) -> dict[str, Any]:
    identifier = document_id(segment)
    document = {**segment.metadata, "id": identifier, "text": segment.text}
    if segment.title is not None:
        document["title"] = segment.title
    return {"type": "document", "id": identifier, "set": number, "document": document}


def token_of(token: TokenLogprob) -> dict[str, Any]:
    """Return a token in OpenAI's shape."""
    named, *tops = (
        {"token": name, "logprob": value, "bytes": list(name.encode("utf-8", "replace"))}
        for name, value in ((token.token, token.logprob), *token.top)
    )
    return {**named, "top_logprobs": tops}
