"""Replies in OpenAI's shapes: whole objects, and the chunks of a stream."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from invariant_rag.generation.answers import Answer, AnswerDelta
from invariant_rag.generation.outputs import Usage
from invariant_rag.prompts import ToolCall
from invariant_rag.server.engines.base import Choice, Reply


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

    def whole(self, reply: Reply) -> dict[str, Any]:
        """Return a `chat.completion`."""
        return self._object(
            "chat.completion",
            [
                {
                    "index": index,
                    "message": _message(each),
                    "logprobs": _logprobs(each),
                    "finish_reason": each.finish_reason,
                }
                for index, each in enumerate(reply.choices)
            ],
            usage=usage_object(reply.usage),
            invariant=reply.report,
        )

    def begin(self, index: int) -> dict[str, Any]:
        """Return the first chunk of an answer."""
        return self._chunk(index, {"role": "assistant", "content": ""})

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

    def end(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        """Return the last chunk of an answer: why it ended, its citations and log-probabilities, what was read."""
        delta = {"citations": choice.citations} if choice.citations else {}
        return self._chunk(index, delta, choice.finish_reason, _logprobs(choice), invariant=reply.report)

    def usage(self, reply: Reply) -> dict[str, Any]:
        """Return the chunk of usage, which has no choices."""
        return self._object("chat.completion.chunk", [], usage=usage_object(reply.usage))

    def _chunk(
        self, index: int, delta: dict[str, Any], reason: str | None = None, logprobs: Any = None, **more: Any
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._object("chat.completion.chunk", [choice], **more)

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": f"chatcmpl-{self.id}", "object": kind, "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


@dataclass(frozen=True)
class TextReplies:
    """Writes answers of completions; the attributes are those of `ChatReplies`."""

    id: str
    model: str
    created: int = field(default_factory=lambda: int(time.time()))

    def whole(self, replies: list[Reply]) -> dict[str, Any]:
        """Return a `text_completion` of several prompts, whose answers follow each other."""
        choices = [choice for reply in replies for choice in reply.choices]
        reports = [reply.report for reply in replies]
        return self._object(
            [self._choice(index, each.answer.content, each) for index, each in enumerate(choices)],
            usage=usage_object(_sum([reply.usage for reply in replies])),
            invariant=reports[0] if len(reports) == 1 else reports,
        )

    def piece(self, index: int, delta: AnswerDelta) -> dict[str, Any]:
        """Return the chunk of a piece."""
        return self._object([{"index": index, "text": delta.content, "logprobs": None, "finish_reason": None}])

    def end(self, index: int, choice: Choice, reply: Reply) -> dict[str, Any]:
        """Return the last chunk of an answer."""
        return self._object([self._choice(index, "", choice)], invariant=reply.report)

    def usage(self, replies: list[Reply]) -> dict[str, Any]:
        """Return the chunk of usage, which has no choices."""
        return self._object([], usage=usage_object(_sum([reply.usage for reply in replies])))

    def _choice(self, index: int, text: str, choice: Choice) -> dict[str, Any]:
        logprobs = None
        if choice.logprobs is not None:
            tokens = [each["token"] for each in choice.logprobs]
            logprobs = {
                "tokens": tokens,
                "token_logprobs": [each["logprob"] for each in choice.logprobs],
                "top_logprobs": _top(choice.logprobs),
                "text_offset": [*accumulate(map(len, tokens), initial=0)][:-1],
            }
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish_reason}

    def _object(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        head = {"id": f"cmpl-{self.id}", "object": "text_completion", "created": self.created, "model": self.model}
        return {**head, "choices": choices, **more}


def usage_object(usage: Usage) -> dict[str, Any]:
    """Return token counts as OpenAI names them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def _message(choice: Choice) -> dict[str, Any]:
    answer: Answer = choice.answer
    calls = [_call(each) for each in answer.tool_calls]
    if cut := answer.cut_call:  # as far as it came: `finish_reason` is `length`
        function = {"name": cut.name, "arguments": cut.arguments}
        calls.append({"id": cut.id, "type": "function", "function": function})
    message: dict[str, Any] = {"role": "assistant", "content": answer.content or (None if calls else "")}
    message["refusal"] = None
    if calls:
        message["tool_calls"] = calls
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if choice.citations:
        message["citations"] = choice.citations
    return message


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.dumps(dict(call.arguments), ensure_ascii=False)
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _logprobs(choice: Choice) -> dict[str, Any] | None:
    return None if choice.logprobs is None else {"content": choice.logprobs, "refusal": None}


def _top(logprobs: list[dict[str, Any]]) -> list[dict[str, float]] | None:
    """Return the likeliest tokens of each place, if there are any."""
    found = [{top["token"]: top["logprob"] for top in each["top_logprobs"]} for each in logprobs]
    return found if any(found) else None


def _sum(usages: list[Usage]) -> Usage:
    return Usage(
        sum(each.prompt_tokens for each in usages),
        sum(each.completion_tokens for each in usages),
        sum(each.cached_tokens for each in usages),
    )
