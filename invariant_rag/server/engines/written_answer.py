"""Answers as an OpenAI-compatible API writes them, whole or in pieces, taken apart as answers of ours are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from invariant_rag.errors import InvalidTool
from invariant_rag.generation.answers import Answer, AnswerDelta, CallDelta
from invariant_rag.prompts import ToolCall
from invariant_rag.server.errors import UpstreamFailed

_REASONING_FIELDS = ("reasoning_content", "reasoning")


class WrittenAnswer:
    """One answer, while it is written. A whole one is a stream of a single piece."""

    def __init__(self) -> None:
        self.finish_reason = ""
        self.logprobs: list[dict[str, Any]] | None = None
        self._calls: dict[int, dict[str, str]] = {}
        self.deltas: list[AnswerDelta] = []

    @property
    def answer(self) -> Answer:
        """What was written."""
        return Answer.join(self.deltas)

    def feed(self, choice: Mapping[str, Any]) -> list[AnswerDelta]:
        """Return what is known after another piece.

        Raises:
            UpstreamFailed: It is no piece of an answer.
        """
        try:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            reasoning = next((said[name] for name in _REASONING_FIELDS if said.get(name)), "")
            content = said.get("content") or said.get("refusal") or ""
            for place, call in enumerate(said.get("tool_calls") or ()):
                self._add_call(call.get("index", place), call)
            self._add_logprobs(choice.get("logprobs"))
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
            return self._keep(reasoning, content)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UpstreamFailed("expected a choice of OpenAI's API of the upstream, got something else") from error

    def finish(self) -> list[AnswerDelta]:
        """Return what is known at the end: calls, whose arguments are complete only now, unless room forced the end.

        Raises:
            UpstreamFailed: The answer has not ended, or holds a call that is none.
        """
        if not self.finish_reason:
            raise UpstreamFailed("expected an answer of the upstream to its end, got a part of one")
        calls = [AnswerDelta(call=self._call(index, call)) for index, call in enumerate(self._calls.values())]
        self.deltas += calls
        return calls

    def _keep(self, reasoning: str, content: str) -> list[AnswerDelta]:
        found = [each for each in (AnswerDelta(reasoning=reasoning), AnswerDelta(content)) if each != AnswerDelta()]
        self.deltas += found
        return found

    def _add_call(self, index: int, piece: Mapping[str, Any]) -> None:
        call = self._calls.setdefault(index, {"id": "", "name": "", "arguments": ""})
        function = piece.get("function") or {}
        call["id"] = call["id"] or piece.get("id") or ""
        call["name"] += function.get("name") or ""
        call["arguments"] += function.get("arguments") or ""

    def _call(self, index: int, call: Mapping[str, str]) -> CallDelta:
        if self.finish_reason != "length":  # else it may be cut
            try:
                ToolCall.of({"id": call["id"], "function": call})
            except InvalidTool as error:
                raise UpstreamFailed(f"expected a call of a tool of the upstream: {error}") from error
        whole = "" if self.finish_reason == "length" else "{}"
        return CallDelta(index, call["id"], call["name"], call["arguments"] or whole)

    def _add_logprobs(self, logprobs: Mapping[str, Any] | None) -> None:
        """Keep log-probabilities, in the shape of chats: completions have one list of tokens and one of numbers."""
        if not logprobs:
            return
        found = logprobs.get("content")
        if found is None:
            tops = logprobs.get("top_logprobs") or [None] * len(logprobs["tokens"])
            found = [
                {
                    "token": token,
                    "logprob": value,
                    "bytes": None,
                    "top_logprobs": [
                        {"token": name, "logprob": each, "bytes": None} for name, each in (top or {}).items()
                    ],
                }
                for token, value, top in zip(logprobs["tokens"], logprobs["token_logprobs"], tops, strict=True)
            ]
        self.logprobs = [*(self.logprobs or []), *found]
