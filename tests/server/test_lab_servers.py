"""What the order lab says of its server: its files, keys, limits, methods not allowed, one that is busy or dead."""

import re
from threading import Event, Thread

import httpx
import pytest
from playwright.sync_api import expect

from invariant_rag import KeyValueCache
from invariant_rag.server import InProcess, Settings
from tests.browsers import needs_chromium
from tests.server.conftest import serving, wait_until
from tests.server.lab import PAGE, post

FILES = {each.name: each.read_text("utf-8") for each in PAGE.iterdir()}


@pytest.mark.parametrize("name", FILES)
def test_a_file_has_strict_headers_and_is_not_sent_twice(name, http):
    path = "/" if name == "index.html" else f"/lab/{name}"
    page, head = http.get(path), http.head(path)
    assert (page.status_code, head.status_code, head.content, page.text) == (200, 200, b"", FILES[name])
    assert head.headers["content-length"] == str(len(page.content))
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert {"x-content-type-options": "nosniff", "cache-control": "no-cache"}.items() <= dict(page.headers).items()
    again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert FILES[name].count("\n") <= 300


def test_nothing_else_is_served_and_the_files_name_no_other_host(http):
    for path in ("none.js", "%2e%2e/app.py", "..%2fapp.py", "", "%00"):
        response = http.get(f"/lab/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
    text = "".join(FILES.values())
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", text)) == {"http://www.w3.org"}
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+=", text)


@needs_chromium
def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(embedded, open_lab):
    with serving(InProcess(embedded, "small"), Settings(keys={"right-key": "ada"})) as url:
        assert [httpx.get(f"{url}{path}").status_code for path in ("/", "/lab/lab.js")] == [200, 200]
        closed = [httpx.get(f"{url}{path}").status_code for path in ("/v1/models", "/metrics", "/lab", "/none")]
        assert (closed, httpx.get(f"{url}/lab/%2e%2e/v1/models").status_code) == ([401] * 4, 404)
        lab = open_lab(url, permissions=["clipboard-read", "clipboard-write"])
        notice, key = lab.page.locator("#notice"), lab.page.get_by_label("Key of this server")
        expect(notice).to_have_text("This server needs a key.")
        key.fill("wrong-key")
        lab.press("Use this key")
        expect(notice).to_contain_text("This server needs a valid key: expected a valid key.")
        key.fill("right-key")
        lab.press("Use this key")
        expect(lab.page.locator("#model")).to_have_text("Model: small")
        lab.page.reload()
        expect(lab.page.locator("#model")).to_have_text("Model: small")
        lab.ask()
        lab.page.locator("#plain").get_by_role("button", name="Copy as curl").click()
        expect(lab.status).to_have_text("The command is copied.")
        assert '"Authorization: Bearer $INVARIANT_RAG_API_KEY"' in lab.clipboard()
        assert "right-key" not in lab.clipboard() + lab.page.content()
        lab.press("Forget the key")
        expect(notice).to_have_text("This server needs a key.")
        assert lab.page.evaluate("sessionStorage.length + localStorage.length") == 0


@needs_chromium
def test_what_is_too_long_or_not_allowed_is_told_in_words_with_what_to_do(embedded, open_lab):
    engine = InProcess(embedded, "small", max_prompt_tokens=900)
    with serving(engine, Settings(max_body_bytes=60_000, methods=frozenset({"rotor"}))) as url:
        lab = open_lab(url)
        lab.try_orders()
        expect(lab.page.locator("#plain")).to_contain_text("This server does not allow the plain model.")
        assert {plain for _, plain, *_ in lab.cells()} == {"–"}
        for words, expected in ((1500, "a prompt of at most 900 tokens"), (15_000, "a body of at most 60000 bytes")):
            lab.paste("word " * words)
            lab.press("Ask")
            expect(lab.refusal("invariant")).to_contain_text(f"That is too long for this server: expected {expected}")
            expect(lab.refusal("invariant")).to_contain_text("Send fewer or shorter documents.")
        expect(lab.page.locator("#history")).to_be_hidden()


class Halting(InProcess):
    """The engine, which waits or fails when it is told to."""

    def __init__(self, lm):
        super().__init__(lm, "small", caches={"": KeyValueCache()})
        self.halt, self.halted, self.fails = Event(), Event(), False
        self.halt.set()

    def answer_all(self, *arguments):
        self.halted.set()
        self.halt.wait(30)
        if self.fails:
            raise RuntimeError("secret")
        return super().answer_all(*arguments)


@needs_chromium
def test_a_busy_a_failing_and_a_dead_server_are_told_apart(embedded, open_lab):
    engine = Halting(embedded)
    with serving(engine, Settings(max_requests=1)) as url:
        lab = open_lab(url)
        engine.halt.clear()
        other = Thread(target=post, args=(url, "A B", "plain"))
        other.start()
        assert engine.halted.wait(10)
        lab.press("Ask")
        expect(lab.refusal("invariant")).to_have_text(re.compile(r"^This server is busy: .* Try again in \d+ s\.$"))
        engine.halt.set()
        other.join()
        engine.fails = True
        wait_until(lambda: not httpx.get(f"{url}/ready").json()["active"])
        lab.press("Ask")
        expect(lab.refusal("invariant")).to_contain_text("The server failed. The request id tells its operator")
        assert "secret" not in lab.page.content()
    lab.press("Ask")
    expect(lab.refusal("invariant")).to_have_text("The server cannot be reached. Is it still running? Then try again.")


@needs_chromium
def test_what_runs_is_stopped_by_hand_and_when_the_question_changes(embedded, open_lab):
    engine = Halting(embedded)
    with serving(engine) as url:
        lab = open_lab(url)
        engine.halt.clear()
        lab.press("Ask")
        lab.press("Stop")
        expect(lab.status).to_have_text("Stopped.")
        expect(lab.page.locator("#stop")).to_be_hidden()
        lab.press("Try 5 random orders")
        lab.question.fill("What does Kellstead export?")
        engine.halt.set()
        expect(lab.status).to_have_text("Stopped: what is asked has changed.")
        expect(lab.page.locator("#history")).to_be_hidden()
        lab.ask()
        expect(lab.rows).to_have_count(1)
