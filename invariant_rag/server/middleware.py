"""What happens to every request, before and after its route: id, log, metrics, key, and the limits of its body."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from invariant_rag.server import errors
from invariant_rag.server.settings import OPERATOR_KEY_VARIABLE, Settings
from invariant_rag.server.telemetry import Metrics

logger = logging.getLogger("invariant_rag.server")

_REQUEST_ID = re.compile(r"[\w.:-]{1,128}", re.ASCII)
OPEN = frozenset({"/", "/health", "/ready", "/version"})
"""Routes that need no key: the page, which prompts for one, and those of load balancers."""
_METRICS = "/metrics"  # the route of the operator


class Guard:
    """Names every request, looks up its tenant by key, receives its body, and logs a line without contents at its end.

    The state of its scope has `noted`, its fields in the log; `tenant`, "" without keys; and `body`. A fault of the
    server is a line of its own, with its traceback, and an answer that has the name of the request.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics
        self._tenants = {_digest(key): tenant for key, tenant in settings.keys.items()}
        self._operator = {} if settings.operator_key is None else {_digest(settings.operator_key): "operator"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application, or refuse."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        client_id = headers.get("x-request-id", "")
        request_id = client_id if _REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex
        noted: dict[str, Any] = {"request_id": request_id}
        state = scope.setdefault("state", {})
        state["noted"] = noted
        status, start = None, time.monotonic()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            state["tenant"] = self._tenant(scope["path"], headers)
            if "transfer-encoding" in headers and "content-length" in headers:
                self._metrics.rejected.labels("body").inc()
                raise errors.Ambiguous("expected Transfer-Encoding or Content-Length, got both")
            has_body = scope["method"] not in {"GET", "HEAD", "OPTIONS"}
            state["body"] = await self._body(headers, receive) if has_body else None
            await self._app(scope, receive, send_with_id)
        except Exception as error:  # noqa: BLE001 - whoever is around would log it again, and not name the request
            if not isinstance(error, errors.Refusal):
                log_fault(error, noted)
            if status is None and not isinstance(error, errors.ClientLeft):  # else it is closed in mid-answer
                await errors.error_response(error)(scope, receive, send_with_id)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            seconds = time.monotonic() - start
            status = status or errors.ClientLeft.status
            self._metrics.requests.labels(route, str(status)).inc()
            self._metrics.seconds.labels(route).observe(seconds)
            fields = {**noted, "method": scope["method"], "route": route, "status": status}
            logger.info("request", extra={"fields": {**fields, "seconds": round(seconds, 4)}})

    def _tenant(self, path: str, headers: Headers) -> str:
        """Return whose key it is, without telling by the time how much of a wrong key is right; "": none is needed."""
        known = self._operator if path == _METRICS else self._tenants
        if path in OPEN or path.startswith("/lab/") or not (known or self._tenants):
            return ""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        presented = _digest(key.strip() if scheme.lower() == "bearer" else "")
        matched = None
        for digest, tenant in known.items():  # all of them, whichever is right
            if hmac.compare_digest(digest, presented):
                matched = tenant
        if matched is None:
            self._metrics.rejected.labels("key").inc()
            if path == _METRICS:
                hint = f"Start the server with a key in the variable {OPERATOR_KEY_VARIABLE}, and send it."
                raise errors.Unauthorized("expected the key of the operator", hint=hint)
            raise errors.Unauthorized("expected a valid key")
        return matched

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        most, seconds = self._settings.max_body_bytes, self._settings.body_timeout
        try:
            length = headers.get("content-length", "")
            body, expected = bytearray(), int(length) if length.isascii() and length.isdigit() else 0
            async with asyncio.timeout(seconds):
                while max(expected, len(body)) <= most:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise errors.ClientLeft("the client has closed the connection")
                    body += message.get("body", b"")
                    if not message.get("more_body") and len(body) <= most:
                        return bytes(body)
            raise errors.TooLarge(f"expected a body of at most {most} bytes")
        except (TimeoutError, errors.TooLarge) as error:
            self._metrics.rejected.labels("body").inc()
            slow = errors.SlowRequest(f"expected a body within {seconds:g} s")
            raise (error if isinstance(error, errors.Refusal) else slow) from None


def log_fault(error: BaseException, noted: MutableMapping[str, Any]) -> None:
    """Log a fault of the server with its traceback, and note it for the line of the request."""
    noted["error"] = type(error).__name__
    logger.error("fault", exc_info=error, extra={"fields": dict(noted)})


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
