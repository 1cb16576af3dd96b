"""The order lab in a real browser, against real servers: moves, answers, flips, errors, hostile documents, every screen."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

import invariant_rag.server
from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess, Settings
from tests.browsers import CHROMIUM, needs_chromium
from tests.server.conftest import FLAGS, QUESTION, serving

PAGE = Path(invariant_rag.server.__file__).parent / "page"
EXAMPLE = json.loads((PAGE / "example.json").read_text("utf-8"))
COUNT = len(EXAMPLE["documents"])
HOSTILE = [
    '<img src="https://evil.test/1.png" onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "# <b onclick=alert(3)>Title</b>\n<iframe src=javascript:alert(4)></iframe>",
    "{{constructor.constructor('alert(5)')()}} ${alert(6)} 'it''s' \"$(touch /tmp/no)\" `id`",
    "nul \x00 escape \x1b[31m back \u202egnp.exe\u202c end",
    "W" * 400,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Lab:
    """The page as a person uses it, and what went wrong in it."""

    def __init__(self, page: Page, url: str) -> None:
        self.page, self.url = page, url
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda message: self.complaints.append(message.text))

    @property
    def order(self) -> str:
        names = [each.get_attribute("data-name") or "" for each in self.page.locator("#documents > li").all()]
        return " ".join(names)

    def answer(self, reading: str) -> Locator:
        return self.page.locator(f"#{reading} .answer")

    def ask(self) -> None:
        self.page.get_by_role("button", name="Ask", exact=True).click()

    def paste(self, *documents: str) -> None:
        self.page.get_by_role("button", name="Remove all").click()
        if not self.page.get_by_label("Paste documents").is_visible():
            self.page.get_by_text("Add documents", exact=True).click()
        self.page.get_by_label("Paste documents").fill("\n---\n".join(documents))
        self.page.get_by_role("button", name="Add these").click()
        expect(self.page.locator("#documents > li")).to_have_count(len(documents))

    def rows(self) -> list[tuple[str, str, str]]:
        found = self.page.locator("#history tbody tr").all()
        return [tuple(each.inner_text() for each in row.locator("th, td").all()) for row in found]  # type: ignore[misc]


@pytest.fixture
def open_lab(browser: Browser) -> Iterator[Any]:
    """Open the page of a server; what it must not do is looked at when the test ends."""
    opened: list[Lab] = []

    def at(url: str, **options: Any) -> Lab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(10_000)
        lab = Lab(context.new_page(), url)
        opened.append(lab)
        lab.page.goto(url)
        expect(lab.page.locator("#documents > li")).to_have_count(COUNT)
        return lab

    yield at
    for lab in opened:
        lab.page.context.close()
        elsewhere = [each for each in lab.requests if not each.startswith(lab.url)]
        assert not elsewhere
        # Chromium itself logs every status from 400 on.
        assert not [each for each in lab.complaints if not each.startswith("Failed to load resource")]


@pytest.fixture
def lab(open_lab: Any, base_url: str) -> Lab:
    found: Lab = open_lab(base_url)
    expect(found.page.locator("#model")).to_have_text("Model: small")
    return found


@needs_chromium
class TestInABrowser:
    def test_a_question_gets_both_answers_with_what_they_cost(self, lab: Lab) -> None:
        lab.ask()
        for reading in ("plain", "invariant"):
            card = lab.page.locator(f"#{reading}")
            expect(lab.answer(reading)).not_to_be_empty()
            expect(card.get_by_text("Confidence")).to_be_visible()
            assert 0 < float(card.locator("dd").first.inner_text()) <= 1
            assert re.search(r"\d+ tokens", card.inner_text())
            assert re.search(r"\d+ ms", card.inner_text())
        expect(lab.page.get_by_role("status").first).to_contain_text("Invariant: ")

    def test_dragging_a_document_asks_again_in_the_new_order(self, lab: Lab) -> None:
        lab.ask()
        expect(lab.answer("invariant")).to_be_visible()
        before = lab.answer("invariant").inner_text()
        grips = lab.page.locator("#documents .grip")
        lab.page.mouse.move(*_middle(grips.nth(0)))
        lab.page.mouse.down()
        x, y = _middle(grips.nth(3))
        lab.page.mouse.move(x, y - 10, steps=5)
        lab.page.mouse.move(x, y + 14, steps=3)
        lab.page.mouse.up()
        assert lab.order.startswith("B C D A")
        expect(lab.page.locator("#history tbody tr")).to_have_count(2)
        expect(lab.page.locator("#moves")).to_contain_text(f"moved to place 4 of {COUNT}.")
        assert lab.answer("invariant").inner_text() == before
        assert lab.rows()[1][0].startswith("B C D A")

    def test_escape_gives_a_drag_up(self, lab: Lab) -> None:
        before = lab.order
        grips = lab.page.locator("#documents .grip")
        lab.page.mouse.move(*_middle(grips.nth(0)))
        lab.page.mouse.down()
        lab.page.mouse.move(*_middle(grips.nth(2)), steps=5)
        assert lab.order != before
        lab.page.keyboard.press("Escape")
        lab.page.mouse.up()
        assert lab.order == before

    def test_the_keyboard_moves_documents_and_keeps_the_focus(self, lab: Lab) -> None:
        button = lab.page.get_by_role("button", name=re.compile("^Move A, .* down$"))
        button.focus()
        lab.page.keyboard.press("Enter")
        assert lab.order.startswith("B A C")
        lab.page.keyboard.press("ArrowDown")
        assert lab.order.startswith("B C A")
        expect(button).to_be_focused()
        expect(lab.page.locator("#moves")).to_contain_text(f"moved to place 3 of {COUNT}.")
        lab.page.keyboard.press("End")
        assert lab.order.endswith("A")
        expect(button).to_have_attribute("aria-disabled", "true")
        lab.page.keyboard.press("Home")
        assert lab.order.startswith("A B C")
        expect(button).to_be_focused()

    def test_five_orders_show_a_flip_that_the_server_confirms(self, lab: Lab) -> None:
        lab.page.get_by_role("button", name="Try 5 random orders").click()
        expect(lab.page.locator("#history tbody tr")).to_have_count(6)
        expect(lab.page.locator("#stop")).to_be_hidden()
        rows = lab.rows()
        assert len({order for order, _, _ in rows}) == 6
        answers = {reading: _answers(lab.url, [row[0] for row in rows], reading) for reading in ("plain", "invariant")}
        for column, reading in enumerate(("plain", "invariant"), 1):
            flipped = [text != answers[reading][0] for text in answers[reading]]
            shown = [(row[column].removesuffix(" flipped").strip(), "flipped" in row[column]) for row in rows]
            assert shown == list(zip(answers[reading], flipped, strict=True))
            rate = lab.page.locator(f"[data-reading={reading}]")
            expect(rate.locator("strong")).to_have_text(f"{round(100 * sum(flipped) / 5)} %")
        assert len(set(answers["plain"])) > 1
        assert len(set(answers["invariant"])) == 1
        expect(lab.page.get_by_text("Every order that you asked was read like this.")).to_be_visible()

    def test_a_row_of_the_history_lists_its_order_again(self, lab: Lab) -> None:
        before = lab.order
        lab.page.get_by_role("button", name="Try 5 random orders").click()
        expect(lab.page.locator("#history tbody tr")).to_have_count(6)
        order, plain, _ = lab.rows()[3]
        lab.page.get_by_role("button", name="List the documents in order 4").click()
        assert lab.order == order != before
        assert lab.answer("plain").inner_text() == plain.removesuffix("flipped").strip()

    def test_the_ring_is_the_order_that_the_server_reports(self, lab: Lab) -> None:
        lab.ask()
        ring = lab.page.get_by_role("img", name=re.compile("^Ring: "))
        expect(ring).to_be_visible()
        reply = _post(lab.url, _body(EXAMPLE["documents"], [*range(COUNT)], "invariant"))
        read = [name.removeprefix("d") for name in reply["invariant"]["order"]]
        letters = ["ABCDEFGHIJ"[int(each)] for each in read]
        assert ring.get_attribute("aria-label") == f"Ring: {', '.join(letters)}, and back to {letters[0]}"
        first = lab.page.locator(".sights tr").first
        assert first.inner_text().split() == [letters[0], *letters[1:], letters[0]]

    def test_another_question_begins_another_history(self, lab: Lab) -> None:
        lab.ask()
        expect(lab.page.locator("#history tbody tr")).to_have_count(1)
        lab.page.get_by_label("Question").fill("What colour is the sea?")
        expect(lab.page.locator("#history")).to_be_hidden()
        lab.ask()
        expect(lab.page.locator("#history tbody tr")).to_have_count(1)

    def test_hostile_documents_are_text(self, lab: Lab) -> None:
        lab.paste(*HOSTILE)
        lab.page.get_by_label("Question").fill('<img src=x onerror="alert(7)">')
        lab.ask()
        expect(lab.answer("invariant")).to_be_visible()
        texts = [each.text_content() or "" for each in lab.page.locator("#documents details p").all()]
        assert texts[:2] == HOSTILE[:2]
        assert texts[2] == "<iframe src=javascript:alert(4)></iframe>"
        assert texts[4] == "nul \u2400 escape \u241b[31m back \ufffdgnp.exe\ufffd end"
        assert lab.page.locator("img, iframe, b").count() == 0
        assert lab.page.evaluate("document.scripts.length") == 1

    def test_the_copied_command_gets_the_same_answer(self, open_lab: Any, base_url: str) -> None:
        lab = open_lab(base_url, permissions=["clipboard-read", "clipboard-write"])
        lab.paste(*HOSTILE)
        lab.ask()
        expect(lab.answer("plain")).to_be_visible()
        lab.page.locator("#plain").get_by_role("button", name="Copy as curl").click()
        expect(lab.page.locator("#status")).to_have_text("The command is copied.")
        command = lab.page.evaluate("navigator.clipboard.readText()")
        assert command.replace("\n", "").isprintable()
        if shutil.which("curl"):
            run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
            shown = lab.page.locator("#plain .answer").text_content()
            assert json.loads(run.stdout)["choices"][0]["message"]["content"] == shown

    def test_without_a_clipboard_the_command_is_shown(self, lab: Lab) -> None:
        lab.page.evaluate("navigator.clipboard.writeText = () => Promise.reject(new Error('refused'))")
        lab.ask()
        lab.page.locator("#invariant").get_by_role("button", name="Copy as curl").click()
        dialog = lab.page.get_by_role("dialog", name="Copy this command")
        assert dialog.get_by_role("textbox").input_value().startswith(f"curl '{lab.url}/v1/chat/completions'")

    def test_files_are_read_and_what_is_no_text_is_refused_by_name(self, lab: Lab, tmp_path: Path) -> None:
        (tmp_path / "ferry.txt").write_text("The ferry leaves at noon.\n\nNot in winter.", "utf-8")
        (tmp_path / "scan.txt").write_bytes(b"%PDF \xff\xfe")
        lab.page.get_by_role("button", name="Remove all").click()
        lab.page.locator("#files").set_input_files([tmp_path / "ferry.txt", tmp_path / "scan.txt"])
        expect(lab.page.locator("#documents > li")).to_have_count(1)
        expect(lab.page.locator("#documents strong")).to_have_text("ferry")
        expect(lab.page.get_by_role("alert")).to_have_text(
            "scan.txt: expected text in UTF-8. Save it as text, or paste it."
        )


@needs_chromium
class TestErrors:
    def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(self, embedded: InvariantModel, open_lab: Any) -> None:
        settings = Settings(keys={"right-key": "ada"})
        with serving(InProcess(embedded, "small"), settings) as url:
            lab = open_lab(url)
            expect(lab.page.get_by_role("alert")).to_have_text("This server needs a key.")
            lab.page.get_by_label("Key of this server").fill("wrong-key")
            lab.page.get_by_role("button", name="Use this key").click()
            expect(lab.page.get_by_role("alert")).to_contain_text("needs a valid key: expected a valid key.")
            lab.page.get_by_label("Key of this server").fill("right-key")
            lab.page.get_by_role("button", name="Use this key").click()
            expect(lab.page.locator("#model")).to_have_text("Model: small")
            lab.page.reload()
            expect(lab.page.locator("#model")).to_have_text("Model: small")
            lab.ask()
            expect(lab.answer("invariant")).to_be_visible()
            lab.page.get_by_role("button", name="Forget the key").click()
            expect(lab.page.get_by_role("alert")).to_have_text("This server needs a key.")
            assert lab.page.evaluate("JSON.stringify({...sessionStorage, ...localStorage})") == "{}"

    def test_refusals_are_told_in_words_with_what_to_do(self, embedded: InvariantModel, open_lab: Any) -> None:
        settings = Settings(methods=frozenset({"rotor", "sequential"}), max_body_bytes=60_000)
        with serving(InProcess(embedded, "small", max_prompt_tokens=900), settings) as url:
            lab = open_lab(url)
            card = lab.page.locator("#invariant").get_by_role("alert")
            lab.paste("word " * 1500)
            lab.ask()
            expect(card).to_contain_text("That is too long for this server: expected a prompt of at most 900 tokens")
            expect(card).to_contain_text("Send fewer or shorter documents.")
            lab.paste("word " * 15_000)
            lab.ask()
            expect(card).to_contain_text("expected a body of at most 60000 bytes")
            assert lab.page.locator("#history").is_hidden()

    def test_a_plain_model_that_is_not_allowed_is_said_to_be(self, embedded: InvariantModel, open_lab: Any) -> None:
        with serving(InProcess(embedded, "small"), Settings(methods=frozenset({"rotor"}))) as url:
            lab = open_lab(url)
            lab.page.get_by_role("button", name="Try 5 random orders").click()
            expect(lab.page.locator("#history tbody tr")).to_have_count(6)
            expect(lab.page.locator("#plain")).to_contain_text("This server does not allow the plain model.")
            assert {plain for _, plain, _ in lab.rows()} == {"–"}

    def test_a_busy_a_failing_and_a_dead_server_are_told_apart(self, embedded: InvariantModel, open_lab: Any) -> None:
        engine = Halting(embedded, "small")
        with serving(engine, Settings(max_requests=1)) as url:
            lab = open_lab(url)
            card = lab.page.locator("#invariant").get_by_role("alert")
            engine.halt.clear()
            other = Thread(target=httpx.post, args=(f"{url}/v1/chat/completions",), kwargs={"json": _body(FLAGS)})
            other.start()
            engine.halted.wait(10)
            lab.ask()
            expect(card).to_have_text(re.compile(r"^This server is busy: .* Try again in \d+ s\.$"))
            engine.halt.set()
            other.join()
            _wait_until_idle(url)
            engine.fails = True
            lab.ask()
            expect(card).to_contain_text("The server failed: ")
            assert "secret" not in lab.page.content()
        lab.ask()
        expect(card).to_have_text("The server cannot be reached. Is it still running? Then try again.")

    def test_what_runs_can_be_stopped(self, embedded: InvariantModel, open_lab: Any) -> None:
        engine = Halting(embedded, "small")
        with serving(engine) as url:
            lab = open_lab(url)
            engine.halt.clear()
            lab.ask()
            lab.page.get_by_role("button", name="Stop").click()
            expect(lab.page.locator("#status")).to_have_text("Stopped.")
            expect(lab.page.locator("#stop")).to_be_hidden()
            engine.halt.set()
            lab.ask()
            expect(lab.answer("invariant")).to_be_visible()


@needs_chromium
class TestScreens:
    @pytest.mark.parametrize("scheme", ["light", "dark"])
    @pytest.mark.parametrize("width", [1280, 360])
    def test_everything_fits_and_has_contrast(self, width: int, scheme: str, open_lab: Any, base_url: str) -> None:
        lab = open_lab(base_url, viewport={"width": width, "height": 800}, color_scheme=scheme)
        ground = lab.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", ground))) < 120) == (scheme == "dark")
        lab.page.get_by_role("button", name="Try 5 random orders").click()
        expect(lab.page.locator("#history tbody tr")).to_have_count(6)
        expect(lab.page.locator("#stop")).to_be_hidden()
        lab.page.get_by_text("Add documents", exact=True).click()
        assert lab.page.evaluate(CONTRASTS) == []
        lab.paste(*HOSTILE)
        lab.ask()
        expect(lab.answer("invariant")).to_be_visible()
        assert lab.page.evaluate("document.documentElement.scrollWidth") <= width

    def test_a_screen_reader_finds_names_and_roles(self, lab: Lab) -> None:
        lab.ask()
        expect(lab.answer("invariant")).to_be_visible()
        expect(lab.page.locator("header")).to_match_aria_snapshot("""
            - heading "Order lab" [level=1]
            - paragraph: "Model: small"
            - paragraph
        """)
        expect(lab.page.get_by_role("region", name="Documents")).to_match_aria_snapshot("""
            - heading "Documents" [level=2]
            - list:
              - listitem:
                - button /Move A, .+ up/
                - button /Move A, .+ down/
                - button /Remove A, .+/
        """)
        expect(lab.page.get_by_role("region", name="Question")).to_match_aria_snapshot("""
            - textbox "Question"
            - button "Ask"
            - button "Try 5 random orders"
            - combobox "Invariant method"
            - checkbox "Ask again after every move" [checked]
            - status: /Plain/
        """)
        expect(lab.page.get_by_role("region", name="Orders asked")).to_match_aria_snapshot("""
            - table:
              - rowgroup:
                - row "Order Plain Invariant"
              - rowgroup:
                - row:
                  - rowheader /.+/:
                    - button /List the documents in order 1/
        """)
        expect(lab.page.get_by_role("article", name="Plain")).to_be_visible()
        unnamed = lab.page.evaluate(
            """() => [...document.querySelectorAll("button, input, select, textarea, summary")]
              .filter((each) => !(each.labels?.length || each.ariaLabel || each.textContent.trim() ||
                each.getAttribute("aria-labelledby"))).map((each) => each.outerHTML)"""
        )
        assert unnamed == []

    def test_the_focus_is_seen_on_every_control(self, lab: Lab) -> None:
        seen = set()
        for _ in range(12):
            lab.page.keyboard.press("Tab")
            name, outline = lab.page.evaluate(
                "[document.activeElement.outerHTML, getComputedStyle(document.activeElement).outlineWidth]"
            )
            assert outline == "3px", name
            seen.add(name)
        assert len(seen) == 12


class TestFiles:
    def test_the_page_has_strict_headers_and_is_not_sent_twice(self, http: httpx.Client) -> None:
        for path in ("/", *(f"/lab/{each.name}" for each in PAGE.iterdir() if each.name != "index.html")):
            page, head = http.get(path), http.head(path)
            assert page.status_code == head.status_code == 200
            assert head.content == b""
            assert head.headers["content-length"] == page.headers["content-length"]
            policy = page.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "unsafe" not in policy
            assert page.headers["x-content-type-options"] == "nosniff"
            assert page.headers["cache-control"] == "no-cache"
            again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")

    def test_nothing_else_is_served(self, http: httpx.Client) -> None:
        for path in ("/lab/none.js", "/lab/%2e%2e/app.py", "/lab/..%2fapp.py", "/lab/", "/lab/%00"):
            response = http.get(path)
            assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        assert http.post("/").status_code == 405
        assert http.get("/v1/chat/completions").status_code == 405

    def test_the_page_needs_no_key_and_the_api_does(self, embedded: InvariantModel) -> None:
        with serving(InProcess(embedded), Settings(keys={"key": "ada"})) as url:
            assert httpx.get(url).status_code == httpx.get(f"{url}/lab/lab.js").status_code == 200
            for path in ("/v1/models", "/lab/../v1/models", "/metrics", "/lab", "//lab/lab.js"):
                assert httpx.get(url + path).status_code == 401

    def test_the_files_are_few_small_and_name_no_other_host(self) -> None:
        files = {each.name: each.read_text("utf-8") for each in PAGE.iterdir()}
        assert {"index.html", "lab.css", "lab.js", "example.json"} <= files.keys()
        assert all(text.count("\n") < 300 for text in files.values())
        addresses = {address for text in files.values() for address in re.findall(r"(?:https?:)?//[\w.]+\.\w+", text)}
        assert addresses == {"http://www.w3.org"}
        assert "innerHTML" not in "".join(files.values())


# Texts with less contrast than WCAG AA asks for.
CONTRASTS = """() => {
  const channels = (colour) => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d");
    canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (colour) => channels(colour).slice(0, 3).map((each) => each / 255)
    .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
    .reduce((sum, each, place) => sum + each * [0.2126, 0.7152, 0.0722][place], 0);
  const groundOf = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const style = getComputedStyle(each);
      const ground = each instanceof SVGGElement && style.getPropertyValue("--colour") || style.backgroundColor;
      if (channels(ground)[3] === 255) return ground;
    }
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !node.checkVisibility() || node.closest("[aria-disabled=true], .hidden")) continue;
    const style = getComputedStyle(node);
    const pair = [luminance(node instanceof SVGElement ? style.fill : style.color), luminance(groundOf(node))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    const large = parseFloat(style.fontSize) >= 24;
    if (ratio < (large ? 3 : 4.5)) found.push(`${ratio.toFixed(2)} ${node.outerHTML.slice(0, 100)}`);
  }
  return found;
}"""


class Halting(InProcess):
    """The engine, which waits or fails when it is told to."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments, caches={"": KeyValueCache()})
        self.halt, self.halted, self.fails = Event(), Event(), False
        self.halt.set()

    def answer(self, *arguments: Any) -> Any:
        self.halted.set()
        self.halt.wait(30)
        if self.fails:
            raise RuntimeError("secret")
        return super().answer(*arguments)


def _middle(element: Locator) -> tuple[float, float]:
    box = element.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


def _body(documents: list[Any], order: list[int] | None = None, reading: str = "plain") -> dict[str, Any]:
    order = [*range(len(documents))] if order is None else order
    named = [{"id": f"d{place}", **documents[place]} for place in order if isinstance(documents[place], dict)]
    invariant = {"method": "sequential", "ordering": "given"} if reading == "plain" else {}
    question = EXAMPLE["question"] if named else QUESTION
    messages = [{"role": "user", "content": question}]
    return {"messages": messages, "documents": named or documents, "invariant": invariant}


def _post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply: dict[str, Any] = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).raise_for_status().json()
    return reply


def _answers(url: str, orders: list[str], reading: str) -> list[str]:
    """Return the server's answers in orders that are written as on the page."""
    places = [["ABCDEFGHIJ".index(name) for name in order.split()] for order in orders]
    replies = [_post(url, _body(EXAMPLE["documents"], each, reading)) for each in places]
    return [reply["choices"][0]["message"]["content"] for reply in replies]


def _wait_until_idle(url: str) -> None:
    end = time.monotonic() + 10
    while httpx.get(f"{url}/ready").json()["active"] and time.monotonic() < end:
        time.sleep(0.02)
