"""`ClearRefusals`: vLLM's API server says why a request failed, and what it serves.

The connector can fail a request, but not tell its client why: vLLM answers "Internal server error". This middleware
finds the reason again from the request, and answers it in OpenAI's shape.

`--middleware vllm_invariant_rag.middleware.ClearRefusals`
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from invariant_rag.errors import InvariantRAGError
from invariant_rag.files import MAX_DEPTH, parse_json
from invariant_rag.generation.kv_cache import KeyValueCache

from vllm_invariant_rag.errors import EntryUnusable, RequestRefused, UnsupportedServer
from vllm_invariant_rag.parameters import COMPUTES_PROMPT, FIELD, SALT_PREFIX, admit
from vllm_invariant_rag.server_facts import ServerFacts, facts_of
from vllm_invariant_rag.store import open_cache

Message: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[Message]]
Send: TypeAlias = Callable[[Message], Awaitable[None]]
App: TypeAlias = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]

FACTS_PATH = "/v1/invariant_rag"
"""Answers what the server serves, to whom it also answers /v1/models."""

_MARKS = (FIELD.encode(), SALT_PREFIX.encode())
_STATUS = {RequestRefused: 400, EntryUnusable: 424}
_FAILED = 500
_FAILED_LOAD = "Internal server error"  # vLLM's words where the connector fails a request; it has others where it dies
_STREAMED_ERROR = b'data: {"error"'


class ClearRefusals:
    """ASGI middleware. Requests that name no set pass unchanged, but for those nested more than `MAX_DEPTH` deep.

    Args:
        app: The application.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._served: _Served | None = None

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == FACTS_PATH:
            # The application answers /v1/models instead, so that it asks for the key that it asks for there.
            await self._app(
                {**scope, "path": "/v1/models", "raw_path": b"/v1/models"}, receive, self._tell(scope, send)
            )
        elif scope["method"] != "POST":
            await self._app(scope, receive, send)
        else:
            body, replayed = await _read(receive)
            if (refusal := _too_deep(body)) is not None:
                await _answer(send, 400, refusal)
                return
            marked = any(mark in body for mark in _MARKS)
            await self._app(scope, replayed, self._explain(scope, body, send) if marked else send)

    def _tell(self, scope: MutableMapping[str, Any], send: Send) -> Send:
        """Return a `send` that replaces a successful answer by what the server serves."""

        async def answer(_: bytes) -> tuple[int, dict[str, Any]]:
            try:
                return 200, asdict((await self._serves(scope)).facts)
            except UnsupportedServer as error:
                return _described(error, 501)

        return _replacing(200, answer, send)

    def _explain(self, scope: MutableMapping[str, Any], body: bytes, send: Send) -> Send:
        """Return a `send` that replaces the error of a failed request by its reason."""

        async def answer(content: bytes) -> tuple[int, dict[str, Any]]:
            try:
                return await asyncio.to_thread(_reason, body, content, await self._serves(scope))
            except UnsupportedServer as error:
                return _described(error, 501)

        async def in_streams(message: Message) -> None:
            content = message.get("body", b"")
            if message["type"] == "http.response.body" and content.startswith(_STREAMED_ERROR):
                event, _, rest = content.partition(b"\n\n")
                _, error = await answer(event.removeprefix(b"data: "))
                message = {**message, "body": b"data: " + json.dumps(error).encode() + b"\n\n" + rest}
            await send(message)

        return _replacing(_FAILED, answer, in_streams)

    async def _serves(self, scope: MutableMapping[str, Any]) -> _Served:
        if self._served is None:
            self._served = await asyncio.to_thread(_Served.by, scope["app"].state.vllm_config)
        return self._served


@dataclass(frozen=True)
class _Served:
    """What a server serves, and where it reads keys and values."""

    facts: ServerFacts
    cache: KeyValueCache

    @classmethod
    def by(cls, vllm_config: Any) -> _Served:
        facts = facts_of(vllm_config)
        return cls(facts, open_cache(vllm_config.kv_transfer_config.kv_connector_extra_config, 0))


def _too_deep(body: bytes) -> dict[str, Any] | None:
    """Return the error object of a request that is nested too deeply: vLLM passes `kv_transfer_params` on as they are.

    Its engine, which reads them in another process, ends where they are nested more deeply than it can read.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return None
    try:
        parse_json(body)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return None  # vLLM says what is wrong with it
    except ValueError as error:
        return _described(RequestRefused(str(error), hint="Send fewer levels."), 400)[1]
    return None


def _reason(body: bytes, content: bytes, served: _Served) -> tuple[int, dict[str, Any]]:
    """Return status and error object of a request that failed.

    Args:
        body: The request.
        content: The error that vLLM answered.
        served: What the server serves.
    """
    original: dict[str, Any] = json.loads(content)
    if original["error"].get("message") != _FAILED_LOAD:
        return int(original["error"].get("code") or _FAILED), original
    try:
        request = json.loads(body)
        _check(request, served)
    except (RequestRefused, EntryUnusable) as error:
        return _described(error, _STATUS[type(error)])
    return _FAILED, original


def _described(error: InvariantRAGError, status: int) -> tuple[int, dict[str, Any]]:
    """Return status and error object of an error."""
    return status, {"error": {"message": str(error), "type": type(error).__name__, "param": None, "code": status}}


def _check(request: dict[str, Any], served: _Served) -> None:
    """Raise the reason for which the connector failed a request, if it did."""
    transfer = request.get("kv_transfer_params")
    transfer = transfer if isinstance(transfer, dict) else {}
    if FIELD not in transfer and not str(request.get("cache_salt")).startswith(SALT_PREFIX):
        return
    ids = transfer.get("prompt_token_ids", request.get("prompt"))
    if not isinstance(ids, list) or not all(isinstance(each, int) for each in ids):
        raise RequestRefused(
            "expected the token ids of one prompt beside the set that a request names, got another form"
        )
    admitted = admit(transfer.get(FIELD), served.facts.model, ids, request.get("cache_salt"))
    if admitted is None:
        return
    if request.get("prompt_logprobs") is not None or request.get("echo"):
        raise RequestRefused(COMPUTES_PROMPT)
    for name in ("use_beam_search", "truncate_prompt_tokens"):
        if request.get(name):
            raise RequestRefused(f"expected no {name}, with which vLLM starts from other tokens than those of the set")
    if not served.cache.is_stored(admitted.key):
        raise EntryUnusable(
            f"no keys and values {admitted.key[:16]}... where vLLM reads them: never written, removed for space, or "
            "damaged; or Redis does not answer. Prefill the prompt again"
        )
    raise EntryUnusable(f"the keys and values {admitted.key[:16]}... could not be loaded; the log of vLLM says why")


def _replacing(status: int, answer: Callable[[bytes], Awaitable[tuple[int, dict[str, Any]]]], send: Send) -> Send:
    """Return a `send` that replaces answers of a status by another status and body; others pass."""
    held: list[bytes] | None = None

    async def replaced(message: Message) -> None:
        nonlocal held
        if message["type"] == "http.response.start" and message["status"] == status and _is_json(message):
            held = []
        elif message["type"] == "http.response.body" and held is not None:
            held.append(message.get("body", b""))
            if not message.get("more_body"):
                await _answer(send, *await answer(b"".join(held)))
        else:
            await send(message)

    return replaced


async def _answer(send: Send, status: int, body: dict[str, Any]) -> None:
    content = json.dumps(body).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(content)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": content})


def _is_json(message: Message) -> bool:
    return any(name.lower() == b"content-type" and b"json" in value for name, value in message.get("headers", ()))


async def _read(receive: Receive) -> tuple[bytes, Receive]:
    """Return the body of a request, and a `receive` that gives it once more."""
    messages: list[Message] = []
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
        if messages[-1]["type"] != "http.request":
            break
    body = b"".join(message.get("body", b"") for message in messages)
    waiting = iter(messages)

    async def replayed() -> Message:
        for message in waiting:
            return message
        return await receive()

    return body, replayed
