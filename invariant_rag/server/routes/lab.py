"""`GET /`: the order lab, a page that asks the same documents in several orders. It uses the public API alone."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

_FOLDER = Path(__file__).parents[1] / "page"
_HEADERS = {
    "Cache-Control": "no-cache",  # ask whether it has changed, which costs no contents: an upgrade is seen at once
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "form-action 'none'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class PageFiles(StaticFiles):
    """Files that a browser may only use with each other."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file, or that it has not changed."""
        response = await super().get_response(path, scope)
        response.headers.update(_HEADERS)
        if path.endswith(".js"):  # some systems have another type for it, with which browsers run no module
            response.headers["Content-Type"] = "text/javascript; charset=utf-8"
        return response


def add_lab(app: FastAPI) -> None:
    """Serve the page at `/`, and what it is made of at `/lab`."""
    files = PageFiles(directory=_FOLDER)

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def page(request: Request) -> Response:
        return await files.get_response("index.html", request.scope)

    app.mount("/lab", files)
