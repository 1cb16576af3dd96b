"""A client of OpenAI-compatible APIs: requests are tried again where that helps, and fail as a server can answer."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import anyio
import httpx

from invariant_rag.errors import ContextOverflow, InvalidChoice
from invariant_rag.server.errors import Busy, DeadlineExceeded, UpstreamFailed, UpstreamRefused
from invariant_rag.server.json_text import encode

_logger = logging.getLogger("invariant_rag.server")

_ATTEMPTS = 3
_FIRST_PAUSE = 0.25
_CONNECT_SECONDS = 10.0
_CHECK_SECONDS = 5.0
_JSON = {"content-type": "application/json"}
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
            raise InvalidChoice(f"upstream: expected an address with http:// or https://, got {url!r}")
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        patience = httpx.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout))
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=url.rstrip("/"), headers=headers, timeout=patience, limits=limits)

    async def models(self) -> list[str]:
        """Return the names of its models.

        Raises:
            UpstreamFailed: It cannot be reached, or refuses to tell.
            DeadlineExceeded: It does not answer in time.
        """
        response = await self._open("GET", "/models", None)
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
            raise _unreachable(error) from error
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
        response = await self._open("POST", path, body, headers)
        try:
            if not body.get("stream"):
                return _take_all(_parsed(await response.aread()), take)
            usage = None
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if line.startswith("data:") and data != "[DONE]":
                    usage = _take_all(_parsed(data), take) or usage
        except httpx.TimeoutException as error:
            raise _too_late(error) from error
        except httpx.HTTPError as error:
            raise _unreachable(error) from error
        else:
            return usage
        finally:
            await response.aclose()

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def _open(
        self, verb: str, path: str, body: Mapping[str, Any] | None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        """Return a response whose body is not read yet. Nothing was answered before: it can be asked for again."""
        content = None if body is None else encode(body).encode()
        pause = _FIRST_PAUSE
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                request = self._client.build_request(verb, path, content=content, headers={**(headers or {}), **_JSON})
                response = await self._client.send(request, stream=True)
            except httpx.TimeoutException as error:
                raise _too_late(error) from error
            except httpx.HTTPError as error:
                if attempt == _ATTEMPTS:
                    raise _unreachable(error) from error
            else:
                if response.is_success:
                    return response
                await response.aread()
                if attempt == _ATTEMPTS or response.status_code not in _TRY_AGAIN:
                    _refuse(response)
            await anyio.sleep(pause)
            pause *= 2
        raise AssertionError  # the last attempt has returned or raised


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
    error = described.get("error")
    fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {}
    message = _message(described)
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


def _message(described: Mapping[str, Any]) -> str:
    error = described.get("error", described)
    message = error.get("message") if isinstance(error, Mapping) else error
    return str(message or "no reason")[:_LONGEST_MESSAGE]


def _unreachable(error: httpx.HTTPError) -> UpstreamFailed:
    _logger.warning(
        "the upstream cannot be reached: %s", type(error).__name__, extra={"fields": {"reason": repr(error)}}
    )
    return UpstreamFailed("expected an answer of the upstream, which cannot be reached", hint="Try again later.")


def _too_late(error: httpx.HTTPError) -> DeadlineExceeded:
    _logger.warning("the upstream is too slow: %s", type(error).__name__, extra={"fields": {"reason": repr(error)}})
    return DeadlineExceeded("expected an answer of the upstream in time")
