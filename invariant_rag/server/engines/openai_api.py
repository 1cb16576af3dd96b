"""A client of OpenAI-compatible APIs: requests are tried again where that helps, and fail as a server can answer."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import anyio
import httpx

from invariant_rag.errors import ContextOverflow, InvalidChoice
from invariant_rag.generation.answers import Answer, AnswerDelta, CallDelta
from invariant_rag.server.errors import Busy, DeadlineExceeded, UpstreamFailed, UpstreamRefused, encode

_logger = logging.getLogger("invariant_rag.server")

_PAUSES = (0.25, 0.5)
"""Seconds before another try."""
_CONNECT_SECONDS, _CHECK_SECONDS = 10.0, 5.0
_TRY_AGAIN = frozenset({502, 503})
_REFUSED = frozenset({400, 413, 422})
"""Statuses that say what is wrong with a request. Others are about the gateway, whose key may be wrong."""
_LONGEST_MESSAGE = 500

Take = Callable[[Mapping[str, Any]], None]
"""Takes a choice of a reply, or of a chunk of a stream."""


class OpenAIAPI:
    """An API. Its methods run in an event loop.

    Args:
        url: Its address, such as `https://api.openai.com/v1`.
        key: The key for it. None: it needs none.
        timeout: Seconds until a request fails if nothing comes.

    Raises:
        InvalidChoice: The address is none.
    """

    def __init__(self, url: str, key: str | None, timeout: float) -> None:
        if not re.match(r"https?://[^/]", url):
            raise InvalidChoice(
                f"upstream: expected an address with http:// or https://, got {url!r}",
                hint="Such as http://127.0.0.1:8001/v1.",
            )
        headers = {"content-type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        patience = httpx.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout))
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=patience, limits=limits)
        self.close = self._client.aclose

    async def models(self) -> list[str]:
        """Return the names of its models.

        Raises:
            UpstreamFailed: It cannot be reached, or refuses to tell.
            DeadlineExceeded: It does not answer in time.
        """
        response = await self._open("GET", "/models")
        cards = _parsed(await response.aread()).get("data")
        if not isinstance(cards, list):
            raise UpstreamFailed("expected a list of models of the upstream, got something else")
        return [str(card["id"]) for card in cards if isinstance(card, Mapping) and "id" in card]

    async def check_ready(self) -> None:
        """Check that it answers, and takes the key.

        Raises:
            UpstreamFailed: It does not.
        """
        try:
            response = await self._client.get("/models", timeout=_CHECK_SECONDS)
        except httpx.HTTPError as error:
            raise _failure(error) from error
        if response.status_code in (401, 403) or response.status_code >= 500:
            _refuse(response)

    async def ask(
        self, path: str, body: Mapping[str, Any], take: Take, headers: Mapping[str, str]
    ) -> Mapping[str, Any] | None:
        """Send a request, and give its choices away as they come.

        Args:
            path: `/chat/completions` or `/completions`.
            body: The request, with `stream` or without.
            take: Gets the choices.
            headers: Names of the request and of its trace.

        Returns:
            The usage; None if the API does not count.

        Raises:
            Busy: It has too many requests.
            ContextOverflow: The prompt is too long for it.
            DeadlineExceeded: It does not answer in time.
            UpstreamFailed: It cannot be reached, failed, or answered what is no reply.
            UpstreamRefused: The request is wrong, as it says.
        """
        response = await self._open("POST", path, content=encode(body).encode(), headers=headers)
        try:
            if not body.get("stream"):
                return _take_all(_parsed(await response.aread()), take)
            usage = None
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    usage = _take_all(_parsed(data), take) or usage
        except httpx.HTTPError as error:
            raise _failure(error) from error
        else:
            return usage
        finally:
            await response.aclose()

    async def _open(self, verb: str, path: str, **request: Any) -> httpx.Response:
        """Return a response whose body is not received yet. Nothing was answered before: it can be asked for again."""
        for pause in (*_PAUSES, None):
            try:
                response = await self._client.send(self._client.build_request(verb, path, **request), stream=True)
            except httpx.HTTPError as error:
                if pause is None or isinstance(error, httpx.TimeoutException):
                    raise _failure(error) from error
            else:
                if response.is_success:
                    return response
                await response.aread()
                if pause is None or response.status_code not in _TRY_AGAIN:
                    _refuse(response)
            await anyio.sleep(pause)
        raise AssertionError  # the last attempt has returned or raised


class WrittenAnswer:
    """One answer, while it is written. A whole one is a stream of a single piece."""

    def __init__(self) -> None:
        self.finish_reason = ""
        self.logprobs: list[dict[str, Any]] | None = None
        self.deltas: list[AnswerDelta] = []

    @property
    def answer(self) -> Answer:
        """What was written."""
        return Answer.join(self.deltas)

    def feed(self, choice: Mapping[str, Any]) -> list[AnswerDelta]:
        """Return what another piece is.

        Raises:
            UpstreamFailed: It is no piece of an answer.
        """
        try:
            said = choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
            found = list(_deltas(said))
            if logprobs := choice.get("logprobs"):
                self.logprobs = [*(self.logprobs or []), *_tokens(logprobs)]
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UpstreamFailed("expected a choice of OpenAI's API of the upstream, got something else") from error
        self.deltas += found
        return found

    def finish(self) -> list[AnswerDelta]:
        """Return what is known at the end: a call without arguments has empty ones.

        Raises:
            UpstreamFailed: The answer has not ended, or holds a call that is none although there was room.
        """
        if not self.finish_reason:
            raise UpstreamFailed("expected an answer of the upstream to its end, got a part of one")
        found: list[AnswerDelta] = []
        if self.finish_reason != "length":
            arguments: dict[int, str] = {}
            for call in (each.call for each in self.deltas if each.call):
                arguments[call.index] = arguments.get(call.index, "") + call.arguments
            found = [
                AnswerDelta(call=CallDelta(index, arguments="{}")) for index, said in arguments.items() if not said
            ]
            self.deltas += found
            if self.answer.cut_call is not None:
                raise UpstreamFailed("expected calls of tools of the upstream, got one whose arguments are no JSON")
        return found


def _deltas(said: Mapping[str, Any]) -> Iterator[AnswerDelta]:
    if reasoning := said.get("reasoning_content") or said.get("reasoning"):
        yield AnswerDelta(reasoning=reasoning)
    if content := said.get("content") or said.get("refusal"):
        yield AnswerDelta(content + "")
    for place, call in enumerate(said.get("tool_calls") or ()):
        function = call.get("function") or {}
        yield AnswerDelta(
            call=CallDelta(
                call.get("index", place), call.get("id"), function.get("name"), function.get("arguments") or ""
            )
        )


def _tokens(logprobs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return log-probabilities in the shape of chats: completions have one list of tokens and one of numbers."""
    if logprobs.get("content") is not None:
        return list(logprobs["content"])
    tokens, numbers = logprobs["tokens"], logprobs["token_logprobs"]
    tops = logprobs.get("top_logprobs") or [{}] * len(tokens)

    def token(text: str, number: float) -> dict[str, Any]:
        return {"token": text, "logprob": number, "bytes": None}

    return [
        {**token(text, number), "top_logprobs": [token(*each) for each in (top or {}).items()]}
        for text, number, top in zip(tokens, numbers, tops, strict=True)
    ]


def _take_all(reply: Mapping[str, Any], take: Take) -> Mapping[str, Any] | None:
    if "error" in reply:  # within a stream, whose status was sent before
        raise UpstreamFailed("the upstream failed in the middle of its answer")
    choices, usage = reply.get("choices"), reply.get("usage")
    if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
        raise UpstreamFailed("expected a reply with choices of the upstream, got something else")
    for choice in choices:
        take(choice)
    return usage if isinstance(usage, Mapping) else None


def _parsed(content: str | bytes) -> Mapping[str, Any]:
    try:
        reply = json.loads(content)
    except ValueError as error:
        raise UpstreamFailed("expected JSON of the upstream, got something else") from error
    if not isinstance(reply, Mapping):
        raise UpstreamFailed("expected an object of the upstream, got something else")
    return reply


def _refuse(response: httpx.Response) -> NoReturn:
    """Raise what a response says. Only what is about the request is repeated: other messages may name an account."""
    status = response.status_code
    try:
        described = _parsed(response.content)
    except UpstreamFailed:
        described = {}
    error = described.get("error", described)
    fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
    message = str(fields.get("message") or "no reason")[:_LONGEST_MESSAGE]
    if fields.get("code") == "context_length_exceeded":
        raise ContextOverflow(message)
    if status in _REFUSED:
        param = fields.get("param")
        raise UpstreamRefused(f"the upstream says: {message}", param=None if param is None else str(param))
    _logger.warning("the upstream failed", extra={"fields": {"status": status, "code": fields.get("code")}})
    wait = response.headers.get("retry-after", "")
    retry_after = int(wait) if re.fullmatch(r"\d{1,6}", wait) else None
    if status == 429:
        raise Busy("the upstream takes no more requests now", retry_after=retry_after)
    if status in (408, 504):
        raise DeadlineExceeded(f"the upstream answered {status}: it took too long", retry_after=retry_after)
    raise UpstreamFailed(f"the upstream answered {status}", retry_after=retry_after)


def _failure(error: httpx.HTTPError) -> UpstreamFailed | DeadlineExceeded:
    """Return what a request that got no answer is for clients; only the log says more."""
    fields = {"error": type(error).__name__, "reason": repr(error)}
    if isinstance(error, httpx.TimeoutException):
        _logger.warning("the upstream is too slow", extra={"fields": fields})
        return DeadlineExceeded("expected an answer of the upstream in time")
    _logger.warning("the upstream cannot be reached", extra={"fields": fields})
    return UpstreamFailed("expected an answer of the upstream, which cannot be reached", hint="Try again later.")
