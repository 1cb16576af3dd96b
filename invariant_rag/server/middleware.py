"""What happens to every request, before and after its route: id, log, metrics, key, and the limits of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from invariant_rag.server.errors import Ambiguous, Refusal, SlowRequest, TooLarge, Unauthorized, error_response
from invariant_rag.server.metrics import Metrics
from invariant_rag.server.settings import OPERATOR_KEY_VARIABLE, Settings

logger = logging.getLogger("invariant_rag.server")

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
OPEN = frozenset({"/", "/health", "/ready", "/version"})
"""Routes that need no key: the page, which asks for one, and what load balancers ask."""
_OPEN_FOLDER = "/lab/"
"""What the page is made of."""
_METRICS = "/metrics"
"""The route of the operator."""
_LEFT = 499
"""Status of a request whose client has left before it was answered."""


class RequestLog:
    """Names every request, and logs one line when it ends: no contents, only what was counted.

    A fault of the server is a line of its own, with its place, and an answer that has the name of the request.
    """

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        noted: dict[str, Any] = {"request_id": request_id}
        scope.setdefault("state", {})["noted"] = noted
        status, start = None, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - whoever is around would log it again, and not name the request
            log_fault(error, noted)
            if status is None:  # else the server closes the connection in the middle of the answer
                await error_response(error)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - start
            status = _LEFT if status is None else status
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            fields = {**noted, "method": scope["method"], "route": route, "status": status}
            logger.info("request", extra={"fields": {**fields, "seconds": round(seconds, 4)}})


def log_fault(error: BaseException, noted: MutableMapping[str, Any]) -> None:
    """Log a fault of the server with its place, and note it for the line of the request."""
    noted["error"] = type(error).__name__
    logger.error("fault", exc_info=error, extra={"fields": dict(noted)})


class Keys:
    """Finds the tenant of the bearer key, without telling by its time how much of a wrong key is right."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._tenants = {_digest(key): tenant for key, tenant in settings.keys.items()}
        self._operator = {} if settings.operator_key is None else {_digest(settings.operator_key): "operator"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or refuse."""
        path = scope.get("path", "")
        known = self._operator if path == _METRICS else self._tenants
        is_open = path in OPEN or path.startswith(_OPEN_FOLDER) or not (known or self._tenants)
        if scope["type"] == "http" and not is_open:
            tenant = _tenant(known, Headers(scope=scope).get("authorization", ""))
            if tenant is None:
                hint = f"Start the server with a key in the variable {OPERATOR_KEY_VARIABLE}, and send it."
                refusal = Unauthorized("expected a valid key")
                if path == _METRICS:
                    refusal = Unauthorized("expected the key of the operator", hint=hint)
                self._metrics.rejected.labels("key").inc()
                await error_response(refusal)(scope, receive, send)
                return
            scope["state"]["tenant"] = tenant
        await self._app(scope, receive, send)


def _tenant(known: Mapping[bytes, str], header: str) -> str | None:
    scheme, _, key = header.partition(" ")
    given = _digest(key.strip() if scheme.lower() == "bearer" else "")
    found = None
    for digest, tenant in known.items():  # all of them, whichever is right
        if hmac.compare_digest(digest, given):
            found = tenant
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


class BodyLimit:
    """Refuses bodies that are too long or come too slowly, before they are held in memory."""

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._metrics = app, metrics
        self._most, self._seconds = settings.max_body_bytes, settings.body_timeout

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Receive the body, and run the application with it, or refuse."""
        if scope["type"] != "http" or scope["method"] in {"GET", "HEAD", "OPTIONS"}:
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._body(Headers(scope=scope), receive)
        except (TimeoutError, Refusal) as error:
            slow = SlowRequest(f"expected a body within {self._seconds:g} s")
            self._metrics.rejected.labels("body").inc()
            await error_response(error if isinstance(error, Refusal) else slow)(scope, receive, send)
            return
        if body is None:  # the client has left
            return
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return messages.pop() if messages else await receive()

        await self._app(scope, replay, send)

    async def _body(self, headers: Headers, receive: Receive) -> bytes | None:
        if {"transfer-encoding", "content-length"} <= set(headers.keys()):
            raise Ambiguous("expected Transfer-Encoding or Content-Length, got both")
        length = headers.get("content-length", "")
        body, expected = bytearray(), int(length) if length.isascii() and length.isdigit() else 0
        while max(expected, len(body)) <= self._most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            if not message.get("more_body") and len(body) <= self._most:
                return bytes(body)
        raise TooLarge(f"expected a body of at most {self._most} bytes")
