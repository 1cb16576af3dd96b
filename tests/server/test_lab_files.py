"""The files of the order lab over HTTP: open, strict, cached, small, and nothing beside them."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

import invariant_rag.server
from invariant_rag import InvariantModel
from invariant_rag.server import InProcess, Settings
from tests.server.conftest import serving

PAGE = Path(invariant_rag.server.__file__).parent / "page"
FILES = {each.name: each.read_text("utf-8") for each in PAGE.iterdir()}
PATHS = ["/", *(f"/lab/{name}" for name in FILES if name != "index.html")]


@pytest.mark.parametrize("path", PATHS)
def test_a_file_has_strict_headers_and_is_not_sent_twice(path: str, http: httpx.Client) -> None:
    page, head = http.get(path), http.head(path)
    assert page.status_code == head.status_code == 200
    assert page.text == FILES["index.html" if path == "/" else path.removeprefix("/lab/")]
    assert head.content == b""
    assert head.headers["content-length"] == str(len(page.content))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["cache-control"] == "no-cache"
    again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("path", ["/lab/none.js", "/lab/%2e%2e/app.py", "/lab/..%2fapp.py", "/lab/", "/lab/%00"])
def test_nothing_else_is_served(path: str, http: httpx.Client) -> None:
    response = http.get(path)
    assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_the_page_needs_no_key_and_the_api_does(embedded: InvariantModel) -> None:
    with serving(InProcess(embedded), Settings(keys={"key": "ada"})) as url, httpx.Client(base_url=url) as http:
        assert http.get("/").status_code == http.get("/lab/lab.js").status_code == 200
        for path in ("/v1/models", "/metrics", "/lab", "/none"):
            assert http.get(path).status_code == 401
        assert http.get("/lab/%2e%2e/v1/models").status_code == 404


def test_the_files_are_small_and_name_no_other_host() -> None:
    assert {"index.html", "lab.css", "lab.js", "examples.json"} <= FILES.keys()
    assert all(text.count("\n") <= 300 for text in FILES.values())
    text = "".join(FILES.values())
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text)) == {"http://www.w3.org"}
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+=", text)
