"""Replies in OpenAI's shapes: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, ClassVar

from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.server.engines.base import Choice, EngineReply


@dataclass(frozen=True)
class ChatReplies:
    """Writes answers of a chat.

    Attributes:
        id: Id of the request.
        model: Name of the model.
        created: Seconds since 1970.
    """

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
