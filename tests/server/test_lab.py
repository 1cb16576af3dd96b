"""The order lab in a real browser, before real servers: moves, answers, flips, errors, hostile documents, screens."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import pytest
from playwright.sync_api import Browser, expect, sync_playwright

import invariant_rag.server
from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.upstream import Upstream
from tests.browsers import CHROMIUM, needs_chromium
from tests.server.conftest import serving
from tests.server.lab import CONTRASTS, Lab
from tests.server.scripted import Answer, completion, scripted_api

pytestmark = needs_chromium
Opener = Callable[..., Lab]

PAGE = Path(invariant_rag.server.__file__).parent / "page"
EXAMPLE = json.loads((PAGE / "example.json").read_text("utf-8"))
NAMES = "ABCDEF"[: len(EXAMPLE["documents"])]
HOSTILE = [
    '<img src="https://evil.test/1.png" onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "# <b onclick=alert(3)>Title</b>\n<iframe src=javascript:alert(4)></iframe>",
    "{{constructor.constructor('alert(5)')()}} ${alert(6)} 'it''s' \"$(touch /tmp/no)\" `id` !! \\",
    "nul \x00 escape \x1b[31m back \u202egnp.exe\u202c tag \U000e0041 end",
    "W" * 400,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--host-resolver-rules=MAP lab.test 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def open_lab(browser: Browser) -> Iterator[Opener]:
    """Open the page of a server. When the test ends, it has asked no other host, and complained of nothing."""
    opened: list[Lab] = []

    def at(url: str, **options: Any) -> Lab:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        context.set_default_timeout(20_000)
        lab = Lab(context.new_page(), url)
        opened.append(lab)
        lab.page.goto(url)
        expect(lab.page.locator("#documents > li")).to_have_count(len(NAMES))
        return lab

    yield at
    assert opened
    for lab in opened:
        lab.page.context.close()
        assert not [each for each in lab.requests if not each.startswith(lab.url)]
        # Chromium itself writes a line for every status from 400 on.
        assert not [each for each in lab.complaints if not each.startswith("Failed to load resource")]


@pytest.fixture
def lab(open_lab: Opener, base_url: str) -> Lab:
    """The page of the server that most tests share."""
    found = open_lab(base_url)
    expect(found.page.locator("#model")).to_have_text("Model: small")
    return found


def body(order: str, reading: str) -> dict[str, Any]:
    """Return the request of the page in one order of the example: `A B C`."""
    documents = [{"id": name, **EXAMPLE["documents"][NAMES.index(name)]} for name in order.split()]
    invariant = {"method": "sequential", "ordering": "given"} if reading == "plain" else {}
    messages = [{"role": "user", "content": EXAMPLE["question"]}]
    return {"messages": messages, "documents": documents, "invariant": invariant, "logprobs": True}


def post(url: str, order: str, reading: str) -> dict[str, Any]:
    """Ask a server without the page."""
    response = httpx.post(f"{url}/v1/chat/completions", json=body(order, reading), timeout=60).raise_for_status()
    reply: dict[str, Any] = response.json()
    return reply


def content_of(reply: dict[str, Any]) -> str:
    """Return the text of an answer."""
    text: str = reply["choices"][0]["message"]["content"]
    return text


@pytest.mark.parametrize("reading", ["plain", "invariant"])
def test_an_answer_has_its_confidence_and_cost(reading: str, lab: Lab) -> None:
    lab.ask()
    reply = post(lab.url, " ".join(NAMES), reading)
    expect(lab.answer(reading)).to_have_text(content_of(reply))
    figures = lab.page.locator(f"#{reading} dd").all_inner_texts()
    tokens = reply["choices"][0]["logprobs"]["content"]
    confidence = sum(2.718281828 ** each["logprob"] for each in tokens) / len(tokens)
    assert figures[:2] == [f"{confidence:.2f}", str(reply["usage"]["prompt_tokens"])]
    assert 0 <= int(figures[2]) <= int(figures[1])
    assert re.fullmatch(r"\d+ ms", figures[3])


def test_without_logprobs_there_is_no_confidence(lab: Lab) -> None:
    lab.page.get_by_label("Confidence, from logprobs").uncheck()
    lab.ask()
    expect(lab.page.locator("#invariant dd").first).to_have_text("not asked")


def test_dragging_a_document_asks_again_and_shows_what_flipped(lab: Lab) -> None:
    lab.ask()
    before = lab.answer("plain").inner_text()
    x, y = lab.grip(1)
    lab.page.mouse.move(*lab.grip(0))
    lab.page.mouse.down()
    lab.page.mouse.move(x, y + 16, steps=5)
    lab.page.mouse.up()
    assert lab.order == "B A C D E F"
    expect(lab.page.locator("#moves")).to_have_text(f"A, {EXAMPLE['documents'][0]['title']}: moved to place 2 of 6.")
    expect(lab.rows).to_have_count(2)
    expect(lab.page.locator("#plain")).to_contain_text(f"Flipped. The first order got: {before}")
    assert [cells[1:] for cells in lab.cells()] == [
        ["striped wool", "striped wool"],
        ["blue glass\nflipped", "striped wool"],
    ]


def test_a_finger_drags_on_a_phone(open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url, viewport={"width": 360, "height": 740}, has_touch=True, is_mobile=True)
    session = lab.page.context.new_cdp_session(lab.page)
    (x, start), (_, end) = lab.grip(0), lab.grip(2)
    steps = [start + (end + 6 - start) * step / 8 for step in range(9)]
    for index, y in enumerate(steps):
        kind = "touchMove" if index else "touchStart"
        session.send("Input.dispatchTouchEvent", {"type": kind, "touchPoints": [{"x": x, "y": y}]})
    session.send("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    expect(lab.page.locator("#moves")).to_contain_text("moved to place 3 of 6.")
    assert lab.order == "B C A D E F"


def test_escape_gives_a_drag_up(lab: Lab) -> None:
    lab.page.mouse.move(*lab.grip(0))
    lab.page.mouse.down()
    lab.page.mouse.move(*lab.grip(3), steps=5)
    assert lab.order != "A B C D E F"
    lab.page.keyboard.press("Escape")
    lab.page.mouse.up()
    assert lab.order == "A B C D E F"
    expect(lab.page.locator("#moves")).to_be_empty()


def test_the_keyboard_moves_a_document_and_keeps_the_focus(lab: Lab) -> None:
    button = lab.page.get_by_role("button", name=re.compile("^Move A, .* down$"))
    button.focus()
    for key, order in (
        ("Enter", "B A C D E F"),
        ("ArrowDown", "B C A D E F"),
        ("ArrowUp", "B A C D E F"),
        ("End", "B C D E F A"),
        ("Enter", "B C D E F A"),
        ("Home", "A B C D E F"),
    ):
        lab.page.keyboard.press(key)
        assert lab.order == order
        expect(button).to_be_focused()
    expect(lab.page.locator("#moves")).to_contain_text("moved to place 1 of 6.")
    expect(button).to_have_attribute("aria-disabled", "false")


def test_a_removed_document_gives_the_focus_to_the_next(lab: Lab) -> None:
    lab.page.get_by_role("button", name=re.compile("^Remove B, ")).press("Enter")
    assert lab.order == "A C D E F"
    expect(lab.page.get_by_role("button", name=re.compile("^Move C, .* up$"))).to_be_focused()


def test_five_orders_show_flips_that_the_server_confirms(lab: Lab) -> None:
    lab.try_orders()
    cells = lab.cells()
    orders = [order for order, _, _ in cells]
    assert orders[0] == lab.order
    assert len({*orders}) == 6
    for column, reading in ((1, "plain"), (2, "invariant")):
        answers = [content_of(post(lab.url, order, reading)) for order in orders]
        flips = [answer != answers[0] for answer in answers]
        assert [row[column] for row in cells] == [
            f"{answer}\nflipped" if flipped else answer for answer, flipped in zip(answers, flips, strict=True)
        ]
        rate = lab.page.locator(f"[data-reading={reading}]")
        expect(rate).to_contain_text(f"flipped {20 * sum(flips)} % in {sum(flips)} of 5 other orders")
        assert any(flips) == (reading == "plain")
    expect(lab.page.get_by_text("Every order that you asked was read like this.")).to_be_visible()


def test_a_row_of_the_history_lists_its_order_again(lab: Lab) -> None:
    lab.try_orders()
    order, plain, _ = lab.cells()[3]
    row = lab.page.get_by_role("button", name=f"List the documents in order 4: {order}")
    row.press("Enter")
    assert lab.order == order
    expect(lab.answer("plain")).to_have_text(plain.split("\n")[0])
    expect(row).to_be_focused()


def test_the_ring_is_what_the_server_reports(lab: Lab) -> None:
    lab.ask()
    read = post(lab.url, "A B C D E F", "invariant")["invariant"]["order"]
    label = f"Ring: {', '.join(read)}, and back to {read[0]}"
    expect(lab.page.get_by_role("img", name=label, exact=True)).to_be_visible()
    sights = [row.inner_text().split() for row in lab.page.locator(".sights tr").all()]
    assert sights == [
        *([read[place], *read[place + 1 :], *read[: place + 1]] for place in range(6)),
        ["Question", *read],
    ]


def test_another_method_is_asked_and_shown_without_a_ring(lab: Lab) -> None:
    lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    lab.try_orders()
    expect(lab.page.locator("#ring")).to_contain_text("Method isolated, ordering ")
    expect(lab.page.get_by_role("img")).to_have_count(0)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        ("canonical", "also reads one document after another, in one order that is made from their contents."),
        ("vote", "asks about several orders that are made from their contents, and keeps the most frequent answer."),
        ("sequential", "also reads one document after another."),
    ],
)
def test_a_gateway_is_said_to_do_what_its_method_does(method: str, words: str, open_lab: Opener) -> None:
    with serving(Upstream("http://127.0.0.1:9/v1", "far", method=method)) as url:
        lab = open_lab(url)
        expect(lab.lead).to_contain_text(f"reads your list from top to bottom; {method} {words}")
        expect(lab.page.get_by_role("article", name=method, exact=True)).to_be_visible()


def test_the_method_that_is_chosen_is_the_one_that_is_named(lab: Lab) -> None:
    expect(lab.lead).to_contain_text("; rotor reads the documents as a set.")
    lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    expect(lab.lead).to_contain_text("; isolated reads the documents as a set.")
    lab.try_orders()
    expect(lab.page.get_by_role("article", name="isolated", exact=True)).to_be_visible()
    expect(lab.page.locator("[data-reading=invariant]")).to_contain_text("isolated: flipped 0 %")
    expect(lab.page.get_by_role("columnheader", name="isolated", exact=True)).to_be_visible()


def test_the_status_is_one_short_line_however_long_the_answers_are(open_lab: Opener) -> None:
    with scripted_api() as api, serving(Upstream(api.url, "far")) as url:
        api.plan(Answer(body=completion("All the\nwool. " * 64)))
        lab = open_lab(url)
        lab.page.get_by_label("Confidence, from logprobs").uncheck()
        lab.ask()
        start = ("All the wool. " * 64)[:59] + "…"
        expect(lab.status).to_have_text(f"Plain: “{start}”; canonical: “{start}”")
        lab.try_orders()
        expect(lab.status).to_have_text(
            "Plain: flipped in 0 of 5 other orders; canonical: flipped in 0 of 5 other orders"
        )


@pytest.mark.parametrize("change", ["question", "method", "documents", "order"])
def test_the_status_goes_with_what_it_was_about(change: str, lab: Lab) -> None:
    lab.page.get_by_label("Ask again after every move").uncheck()
    lab.ask()
    expect(lab.status).to_contain_text("striped wool")
    if change == "question":
        lab.question.press_sequentially("?")
    elif change == "method":
        lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    elif change == "documents":
        lab.page.get_by_role("button", name=re.compile("^Remove F, ")).click()
    else:
        lab.page.get_by_role("button", name=re.compile("^Move A, .* down$")).click()
    expect(lab.status).to_be_empty()


def test_of_many_documents_the_first_are_shown_and_it_is_said_what_is_not_drawn(lab: Lab) -> None:
    lab.paste(*(f"Mill {number} grinds barley." for number in range(30)), line="--- \t")
    lab.ask()
    row = lab.page.locator("#invariant .chips").first
    read = (row.get_attribute("title") or "").split()
    assert sorted(read) == sorted(lab.order.split())
    expect(row).to_have_text(" ".join(read[:12]) + " … and 18 more")
    expect(lab.page.locator("#history .chips")).to_contain_text("… and 18 more")
    ring = lab.page.locator("#ring")
    expect(ring).to_contain_text("and the ring is drawn for up to 24; here are 30.")
    ring.get_by_text("All 30, from far to near").click()
    expect(ring.locator("details .chips")).to_have_text(" ".join(read))


def test_another_question_begins_another_history(lab: Lab) -> None:
    lab.ask()
    lab.question.fill("What does Kellstead export?")
    expect(lab.page.locator("#history")).to_be_hidden()
    expect(lab.page.locator("#invariant")).to_contain_text("Ask to see the answer.")
    lab.ask()
    expect(lab.rows).to_have_count(1)


def test_hostile_documents_and_questions_are_text(lab: Lab) -> None:
    lab.paste(*HOSTILE)
    lab.question.fill('<img src=x onerror="alert(7)">')
    lab.ask()
    texts = lab.page.locator("#documents details p").all_text_contents()
    assert [*texts[:2], texts[5]] == [*HOSTILE[:2], HOSTILE[5]]
    assert lab.page.locator("#documents strong").text_content() == "<b onclick=alert(3)>Title</b>"
    assert texts[2] == "<iframe src=javascript:alert(4)></iframe>"
    assert texts[4].startswith("nul \u2400 escape \u241b[31m back \ufffdgnp.exe\ufffd tag ")
    assert lab.page.locator("img, iframe, main b").count() == 0
    assert lab.page.locator("script").count() == 1


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_the_copied_command_gets_the_same_answer(open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url, permissions=["clipboard-read", "clipboard-write"])
    lab.paste(*HOSTILE)
    lab.ask()
    lab.page.locator("#plain").get_by_role("button", name="Copy as curl").click()
    expect(lab.status).to_have_text("The command is copied.")
    command = lab.page.evaluate("navigator.clipboard.readText()")
    assert command.replace("\n", "").isprintable()
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert content_of(json.loads(run.stdout)) == lab.answer("plain").text_content()


def test_without_a_clipboard_the_command_is_shown(open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url.replace("127.0.0.1", "lab.test"))  # no secure context, so no access to the clipboard
    lab.ask()
    lab.page.locator("#invariant").get_by_role("button", name="Copy as curl").click()
    dialog = lab.page.get_by_role("dialog", name="Copy this command")
    assert dialog.get_by_role("textbox").input_value().startswith(f"curl '{lab.url}/v1/chat/completions'")


def test_files_are_read_and_what_is_no_text_is_refused_by_name(lab: Lab, tmp_path: Path) -> None:
    (tmp_path / "ferry.txt").write_text("The ferry leaves at noon.\n\nNot in winter.", "utf-8")
    (tmp_path / "scan.txt").write_bytes(b"%PDF \xff\xfe")
    lab.press("Remove all")
    lab.page.locator("#files").set_input_files([tmp_path / "ferry.txt", tmp_path / "scan.txt"])
    expect(lab.page.locator("#documents strong")).to_have_text("ferry")
    expect(lab.page.locator("#documents > li")).to_have_count(1)
    expect(lab.page.locator("#notice")).to_have_text("scan.txt: expected text in UTF-8. Save it as text, or paste it.")


class Halting(InProcess):
    """The engine, which waits or fails when it is told to."""

    def __init__(self, lm: InvariantModel) -> None:
        super().__init__(lm, "small", caches={"": KeyValueCache()})
        self.halt, self.halted, self.fails = Event(), Event(), False
        self.halt.set()

    def answer(self, *arguments: Any) -> Any:
        self.halted.set()
        self.halt.wait(30)
        if self.fails:
            raise RuntimeError("secret")
        return super().answer(*arguments)


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
        assert {plain for _, plain, _ in lab.cells()} == {"–"}


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


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_everything_fits_and_has_contrast(width: int, scheme: str, open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    ground = lab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 120) == (scheme == "dark")
    lab.page.get_by_text("Add documents", exact=True).click()
    lab.try_orders()
    texts, faint = lab.page.evaluate(CONTRASTS)
    assert texts > 100
    assert faint == []
    lab.paste(*HOSTILE)
    lab.ask()
    assert lab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_screen_reader_finds_names_and_roles(lab: Lab) -> None:
    lab.ask()
    for region, snapshot in SNAPSHOTS.items():
        expect(lab.page.get_by_role("region", name=region)).to_match_aria_snapshot(snapshot)
    for name in ("Plain", "rotor"):
        expect(lab.page.get_by_role("article", name=name)).to_contain_text("Confidence")
    expect(lab.page.get_by_role("heading", level=1, name="Order lab")).to_be_visible()
    controls = lab.page.get_by_role("main").locator("button:visible, input:visible, select:visible")
    assert controls.count() > 25
    assert not [
        each.aria_snapshot() for each in controls.all() if not re.match(r"""- '?\w+ ".""", each.aria_snapshot())
    ]


def test_the_focus_is_seen_on_every_control(lab: Lab) -> None:
    seen = set()
    for _ in range(12):
        lab.page.keyboard.press("Tab")
        focused = "document.activeElement"
        name, outline = lab.page.evaluate(f"[{focused}.outerHTML, getComputedStyle({focused}).outline]")
        assert "solid 3px" in outline, name
        seen.add(name)
    assert len(seen) == 12


SNAPSHOTS = {
    "Documents": """
      - heading "Documents" [level=2]
      - list:
        - listitem:
          - button /Move A, .+ up/
          - button /Move A, .+ down/
          - button /Remove A, .+/
      - button "Example"
      - button "Remove all"
    """,
    "Question": """
      - textbox "Question"
      - button "Ask"
      - button "Try 5 random orders"
      - combobox "Method"
      - checkbox "Ask again after every move" [checked]
      - checkbox "Confidence, from logprobs" [checked]
      - status: "Plain: “striped wool”; rotor: “striped wool”"
    """,
    "Orders asked": """
      - table:
        - rowgroup:
          - row "Order Plain rotor"
        - rowgroup:
          - row:
            - rowheader:
              - button /List the documents in order 1. A B C D E F/
            - cell /.+/
            - cell /.+/
    """,
    "What was read where": """
      - img /Ring. .+/
      - table "What each sees, from far to near"
    """,
}


def _wait_until_idle(url: str) -> None:
    end = time.monotonic() + 10
    while httpx.get(f"{url}/ready").json()["active"] and time.monotonic() < end:
        time.sleep(0.02)
