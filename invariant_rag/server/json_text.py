"""Replies as JSON in UTF-8, whatever texts they repeat."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse


def encode(content: Any) -> str:
    """Return JSON. Lone surrogates, which a request may hold as escapes and UTF-8 cannot, are replaced."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


class JsonReply(JSONResponse):
    """A response of JSON."""

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return encode(content).encode()
