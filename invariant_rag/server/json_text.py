"""JSON of requests within bounds, and replies as JSON in UTF-8, whatever texts they repeat."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute
from starlette.responses import JSONResponse

from invariant_rag.files import parse_json


def encode(content: Any) -> str:
    """Return JSON. Lone surrogates, which a request may hold as escapes and UTF-8 cannot, are replaced."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


class JsonReply(JSONResponse):
    """A response of JSON."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode(content).encode()


class JsonRoute(APIRoute):
    """A route whose requests are JSON: without NaN, too many levels, and numbers of thousands of digits."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return what answers a request."""
        handle = super().get_route_handler()

        async def handle_bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request.scope, request.receive))

        return handle_bounded


class _BoundedRequest(Request):
    async def json(self) -> Any:
        try:
            return parse_json(await self.body(), finite=True)
        except json.JSONDecodeError:
            raise
        except ValueError as error:
            raise HTTPException(400, f"expected a body of JSON: {error}") from error
