"""What the order lab says of its server: keys, limits, methods that are not allowed, one that is busy or dead."""

from __future__ import annotations

import re
import time
from threading import Event, Thread
from typing import Any

import httpx
from playwright.sync_api import expect

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess, Settings
from tests.browsers import needs_chromium
from tests.server.conftest import Opener, serving
from tests.server.lab import post

pytestmark = needs_chromium


class Halting(InProcess):
    """The engine, which waits or fails when it is told to."""

    def __init__(self, lm: InvariantModel) -> None:
        super().__init__(lm, "small", caches={"": KeyValueCache()})
        self.halt, self.halted, self.fails = Event(), Event(), False
        self.halt.set()

    def answer_all(self, *arguments: Any) -> Any:
        self.halted.set()
        self.halt.wait(30)
        if self.fails:
            raise RuntimeError("secret")
        return super().answer_all(*arguments)


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(embedded: InvariantModel, open_lab: Opener) -> None:
    with serving(InProcess(embedded, "small"), Settings(keys={"right-key": "ada"})) as url:
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
        command = lab.page.evaluate("navigator.clipboard.readText()")
        assert '"Authorization: Bearer $INVARIANT_RAG_API_KEY"' in command
        assert "right-key" not in command + lab.page.content()
        lab.press("Forget the key")
        expect(notice).to_have_text("This server needs a key.")
        assert lab.page.evaluate("sessionStorage.length + localStorage.length") == 0


def test_what_is_too_long_is_told_in_words_with_what_to_do(embedded: InvariantModel, open_lab: Opener) -> None:
    engine = InProcess(embedded, "small", max_prompt_tokens=900)
    with serving(engine, Settings(max_body_bytes=60_000)) as url:
        lab = open_lab(url)
        for words, expected in ((1500, "a prompt of at most 900 tokens"), (15_000, "a body of at most 60000 bytes")):
            lab.paste("word " * words)
            lab.press("Ask")
            expect(lab.refusal("invariant")).to_contain_text(f"That is too long for this server: expected {expected}")
            expect(lab.refusal("invariant")).to_contain_text("Send fewer or shorter documents.")
        expect(lab.page.locator("#history")).to_be_hidden()


def test_a_plain_model_that_is_not_allowed_is_said_to_be(embedded: InvariantModel, open_lab: Opener) -> None:
    with serving(InProcess(embedded, "small"), Settings(methods=frozenset({"rotor"}))) as url:
        lab = open_lab(url)
        lab.try_orders()
        expect(lab.page.locator("#plain")).to_contain_text("This server does not allow the plain model.")
        assert {plain for _, plain, *_ in lab.cells()} == {"–"}


def test_a_busy_a_failing_and_a_dead_server_are_told_apart(embedded: InvariantModel, open_lab: Opener) -> None:
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
        _wait_until_idle(url)
        lab.press("Ask")
        expect(lab.refusal("invariant")).to_contain_text("The server failed. The request id tells its operator")
        assert "secret" not in lab.page.content()
    lab.press("Ask")
    expect(lab.refusal("invariant")).to_have_text("The server cannot be reached. Is it still running? Then try again.")


def test_what_runs_is_stopped_by_hand_and_when_the_question_changes(embedded: InvariantModel, open_lab: Opener) -> None:
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


def _wait_until_idle(url: str) -> None:
    end = time.monotonic() + 10
    while httpx.get(f"{url}/ready").json()["active"] and time.monotonic() < end:
        time.sleep(0.02)
