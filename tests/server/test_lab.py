"""The order lab in a real browser, before a real server: moves, answers, flips, any text; keys, limits, faults."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from threading import Event

import httpx
import pytest
from playwright.sync_api import expect, sync_playwright

import invariant_rag.server
from invariant_rag.server import InProcess, Settings
from invariant_rag.server.engines.upstream import Upstream
from tests.server.conftest import CHAT, body, client_of, leaving, serving, wait_until
from tests.server.scripted import Answer, completion, scripted_api

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FILES = {each.name: each.read_text("utf-8") for each in (Path(invariant_rag.server.__file__).parent / "page").iterdir()}
EXAMPLES = json.loads(FILES["examples.json"])
EXAMPLE = EXAMPLES[0]
NAMES = "ABCDEF"[: len(EXAMPLE["documents"])]
LISTED = " ".join(NAMES)
SORTED = {"method": "sequential", "ordering": "lexical"}
READINGS = {"plain": {**SORTED, "ordering": "given"}, "sorted": SORTED, "invariant": {}}
CONTRASTS = Path(__file__).with_name("contrasts.js").read_text("utf-8")
"""How many texts are seen, and those with less contrast than WCAG AA asks for."""
HOSTILE = [
    '<img src="https://evil.test/1.png" onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "# <b onclick=alert(3)>Title</b>\n<iframe src=javascript:alert(4)></iframe>",
    "{{constructor.constructor('alert(5)')()}} ${alert(6)} 'it''s' \"$(touch /tmp/no)\" `id` !! \\",
    "nul \x00 escape \x1b[31m back \u202egnp.exe\u202c tag \U000e0041 end",
    "W" * 400,
]


class Lab:
    """One open page, and what went wrong in it: addresses elsewhere, errors, dialogs and lines of the console."""

    def __init__(self, page, url):
        self.page, self.url, self.at, self.role, self.wrong = page, url, page.locator, page.get_by_role, []
        self.question, self.method = self.role("textbox", name="Question"), self.role("combobox", name="Method")
        self.status, self.notice, self.rows = map(self.at, ("#status", "#notice", "#history tbody tr"))
        page.on("request", lambda request: request.url.startswith(url) or self.wrong.append(request.url))
        page.on("pageerror", lambda error: self.wrong.append(str(error)))
        page.on("dialog", lambda dialog: (self.wrong.append(dialog.message), dialog.dismiss()))
        # Chromium itself writes a line for every status from 400 on.
        page.on("console", lambda each: each.text.startswith("Failed to load resource") or self.wrong.append(each.text))

    @property
    def order(self):
        return " ".join(each.get_attribute("data-name") for each in self.at("#documents > li").all())

    @property
    def cells(self):
        """Order, and the plain, sorted and invariant answer of each row of the history."""
        return [row.locator("th, td").all_inner_texts() for row in self.rows.all()]

    def answer(self, reading):
        return self.at(f"#{reading} .answer")

    def document(self, name):
        """The row of a document, where Tab stops."""
        return self.at(f"#documents > li[data-name={name}] summary")

    def press(self, name):
        self.role("button", name=name, exact=True).click()

    def ask(self):
        """Ask, and wait for the answers."""
        self.press("Ask")
        expect(self.answer("invariant")).to_be_visible()

    def try_orders(self):
        """Try the order that is listed and five others, and wait for the answers."""
        self.press("Try 5 random orders")
        expect(self.rows).to_have_count(6)
        expect(self.at("#stop")).to_be_hidden()

    def paste(self, *documents, line="---"):
        """Put documents in the place of those that are there; in the form, `line` stands between two."""
        form = self.page.get_by_label("Paste documents")
        self.press("Remove all")
        if not form.is_visible():
            self.page.get_by_text("Add documents", exact=True).click()
        form.fill(f"\n{line}\n".join(documents))
        self.press("Add these")
        expect(self.at("#documents > li")).to_have_count(len(documents))

    def copied(self, reading):
        """Copy a request as a command, and return it."""
        self.at(f"#{reading}").get_by_role("button", name="Copy as curl").click()
        expect(self.status).to_have_text("The command is copied.")
        return self.page.evaluate("navigator.clipboard.readText()")


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium, chromium-browser or google-chrome here: install one (`apt install chromium`)")
    expect.set_options(timeout=20_000)  # others compute here, too
    with sync_playwright() as playwright:
        options = ["--no-sandbox", "--host-resolver-rules=MAP lab.test 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=options)
        yield browser
        browser.close()


@pytest.fixture
def open_lab(browser):
    """Open the page of a server. When the test ends, it has asked no other host, and complained of nothing."""
    opened = []

    def at(url, **options):
        page = browser.new_page(permissions=["clipboard-read", "clipboard-write"], **options)
        page.set_default_timeout(20_000)
        opened.append(Lab(page, url))
        page.goto(url)
        expect(opened[-1].at("#documents > li")).to_have_count(len(NAMES))
        return opened[-1]

    yield at
    for lab in opened:
        lab.page.close()
    assert [lab.wrong for lab in opened] == [[]] * max(1, len(opened))


@pytest.fixture
def lab(open_lab, base_url):
    """The page of the server that most tests share."""
    found = open_lab(base_url)
    expect(found.at("#model")).to_have_text("Model: small")
    return found


def post(url, order, reading, example=EXAMPLE):
    """Send what the page sends in one order of the example (`A B C`), and return the text and the reply."""
    documents = [{"id": name, **example["documents"][NAMES.index(name)]} for name in order.split()]
    messages = [{"role": "user", "content": example["question"]}]
    sent = body(messages=messages, documents=documents, invariant=READINGS[reading], logprobs=True)
    reply = httpx.post(f"{url}{CHAT}", json=sent, timeout=60).raise_for_status().json()
    return reply["choices"][0]["message"]["content"], reply


def test_an_answer_has_its_confidence_and_cost_and_the_ring_is_what_the_server_reports(lab):
    lab.ask()
    for reading in READINGS:
        content, reply = post(lab.url, LISTED, reading)
        expect(lab.answer(reading)).to_have_text(content)
        figures = lab.at(f"#{reading} dd").all_inner_texts()
        tokens = reply["choices"][0]["logprobs"]["content"]
        confidence = sum(2.718281828 ** each["logprob"] for each in tokens) / len(tokens)
        assert figures[:2] == [f"{confidence:.2f}", str(reply["usage"]["prompt_tokens"])]
        assert 0 <= int(figures[2]) <= int(figures[1])
        assert re.fullmatch(r"\d+ ms", figures[3])
    read = reply["invariant"]["order"]
    ring = lab.role("img", name=f"Ring: {', '.join(read)}, and back to {read[0]}", exact=True)
    expect(ring).to_be_visible()
    sights = [row.inner_text().split() for row in lab.at(".sights tr").all()]
    rows = [[read[place], *read[place + 1 :], *read[: place + 1]] for place in range(6)]
    assert sights == [*rows, ["Question", *read]]
    lab.page.get_by_label("Confidence, from logprobs").uncheck()
    lab.ask()
    expect(lab.at("#plain dd").first).to_have_text("not asked")


def test_dragging_a_document_asks_again_and_shows_what_flipped(lab):
    lab.ask()
    before = lab.answer("plain").inner_text()
    second = lab.at("#documents > li").nth(1)
    lab.at("#documents .grip").first.drag_to(second, target_position={"x": 9, "y": 40}, steps=6)
    assert lab.order == "B A C D E F"
    expect(lab.at("#moves")).to_have_text(f"A, {EXAMPLE['documents'][0]['title']}: moved to place 2 of 6.")
    expect(lab.rows).to_have_count(2)
    expect(lab.at("#plain")).to_contain_text(f"Flipped. The first order got: {before}")
    flipped = ["blue glass\nflipped", "blue glass", "striped wool"]
    assert [cells[1:] for cells in lab.cells] == [["striped wool", "blue glass", "striped wool"], flipped]
    below = {"x": 40, "y": 30}
    lab.document("A").drag_to(lab.document("C"), target_position=below, steps=6)  # any of a row, and opens none
    assert lab.order == "B C A D E F"
    expect(lab.at("#documents details[open]")).to_have_count(0)
    lab.document("A").click()
    expect(lab.at("#documents details[open]")).to_have_count(1)


def test_the_keyboard_goes_through_documents_and_reaches_the_question_in_four_tabs(lab):
    lab.document("C").focus()
    for key, focused in (("Tab", lab.question), ("Shift+Tab", lab.document("C"))):
        for _ in range(4):
            lab.page.keyboard.press(key)
        expect(focused).to_be_focused()
    lab.document("A").focus()
    for key, focused, order in (
        ("ArrowDown", "B", "A B C D E F"),
        ("Alt+ArrowDown", "B", "A C B D E F"),
        ("Alt+ArrowUp", "B", "A B C D E F"),
        ("Alt+End", "B", "A C D E F B"),
        ("Home", "A", "A C D E F B"),
        ("Delete", "C", "C D E F B"),
    ):
        lab.page.keyboard.press(key)
        assert lab.order == order
        expect(lab.document(focused)).to_be_focused()
    lab.page.keyboard.press("Alt+ArrowDown")
    expect(lab.at("#moves")).to_contain_text("moved to place 2 of 5.")


def test_an_example_says_why_it_was_chosen_and_which_answers_are_right(lab):
    for example in EXAMPLES:
        lab.role("combobox", name="Example").select_option(example["name"])
        expect(lab.at("#why")).to_have_text(example["why"])
        marked = lab.at("#documents > li.gold").all()
        assert [each.get_attribute("data-name") for each in marked] == [NAMES[each] for each in example["gold"]]
        lab.ask()
        for reading in READINGS:
            content, _ = post(lab.url, LISTED, reading, example)
            is_right = content.lower() == example["answer"].lower()
            said = "✓ right" if is_right else f"✗ wrong: it is {example['answer']}"
            expect(lab.at(f"#{reading} :is(.right, .wrong)")).to_have_text(said)
    lab.question.fill("Who founded it?")
    expect(lab.at("#why")).to_be_empty()
    expect(lab.at("#documents > li.gold")).to_have_count(0)


def test_a_link_holds_the_state(lab):
    lab.paste("# Mill\nThe mill grinds \u201cbarley\u201d.", "The ferry leaves at noon.", "Two bakeries.")
    lab.document("A").press("Delete")
    lab.document("B").press("Alt+ArrowDown")
    lab.question.fill("When does the ferry leave?")
    lab.method.select_option("isolated")
    lab.press("Copy link")
    expect(lab.status).to_have_text("The link is copied.")
    lab.page.goto(lab.page.evaluate("navigator.clipboard.readText()"))
    lab.page.reload()
    expect(lab.question).to_have_value("When does the ferry leave?")
    texts = lab.at("#documents details p").all_text_contents()
    assert texts == ["Two bakeries.", "The ferry leaves at noon."]
    expect(lab.method).to_have_value("isolated")
    lab.page.goto(f"{lab.url}/#lab=bm8")
    lab.page.reload()
    expect(lab.question).to_have_value(EXAMPLE["question"])


def test_five_orders_show_flips_that_the_server_confirms_and_can_be_listed_again(lab):
    lab.try_orders()
    cells, orders = lab.cells, [order for order, *_ in lab.cells]
    assert (orders[0], len({*orders})) == (lab.order, 6)
    for column, reading in enumerate(READINGS, 1):
        answers = [post(lab.url, order, reading)[0] for order in orders]
        flips = [answer != answers[0] for answer in answers]
        shown = [f"{each}\nflipped" if flipped else each for each, flipped in zip(answers, flips, strict=True)]
        assert [row[column] for row in cells] == shown
        told = f"flipped {20 * sum(flips)} % in {sum(flips)} of 5 other orders"
        expect(lab.at(f"[data-reading={reading}]")).to_contain_text(told)
        assert any(flips) == (reading == "plain")
    expect(lab.page.get_by_text("All requested orders gave this arrangement.")).to_be_visible()
    order, plain, *_ = cells[3]
    row = lab.role("button", name=f"List the documents in order 4: {order}")
    row.press("Enter")
    assert lab.order == order
    expect(lab.answer("plain")).to_have_text(plain.split("\n")[0])
    expect(row).to_be_focused()


def test_the_method_that_is_chosen_is_the_one_that_is_named(lab):
    expect(lab.at("#toy")).to_contain_text("A toy answers here")
    expect(lab.at(".lead")).to_contain_text("; rotor attends to the documents as a set.")
    lab.method.select_option("isolated")
    expect(lab.at(".lead")).to_contain_text("; isolated attends to the documents as a set.")
    lab.try_orders()
    expect(lab.role("article", name="isolated", exact=True)).to_be_visible()
    expect(lab.at("[data-reading=invariant]")).to_contain_text("isolated: flipped 0 %")
    expect(lab.role("columnheader", name="isolated", exact=True)).to_be_visible()
    expect(lab.at("#ring")).to_contain_text("Method isolated, ordering ")
    expect(lab.role("img")).to_have_count(0)


def test_a_gateway_is_said_to_do_what_its_method_does(open_lab):
    for method, words in {
        "vote": "asks about several orders that are made from their contents, and keeps the most frequent answer.",
        "sequential": "attends to the documents in sequence, too.",
        "canonical": "attends to the documents in sequence, too, in one order that is made from their contents.",
    }.items():
        with scripted_api() as api, serving(Upstream(api.url, "far", method=method)) as url:
            lab = open_lab(url)
            expect(lab.at("#toy")).to_be_hidden()
            expect(lab.at(".lead")).to_contain_text(f"; {method} {words}")
            expect(lab.role("article", name=method, exact=True)).to_be_visible()
            if method == "canonical":
                api.plan(Answer(body=completion("All the\nwool. " * 64)))
                lab.page.get_by_label("Confidence, from logprobs").uncheck()
                lab.ask()
                start = f"“{('All the wool. ' * 64)[:59]}…”"  # the status is one short line however long answers are
                expect(lab.status).to_have_text(f"Plain: {start}; canonical: {start}")
                lab.try_orders()
                flips = "flipped in 0 of 5 other orders"
                expect(lab.status).to_have_text(f"Plain: {flips}; canonical: {flips}")


def test_of_many_documents_the_first_are_shown_and_it_is_said_what_is_not_drawn(lab):
    lab.paste(*(f"Mill {number} grinds barley." for number in range(30)), line="--- \t")
    lab.ask()
    row, ring = lab.at("#invariant .chips").first, lab.at("#ring")
    read = row.get_attribute("title").split()
    assert sorted(read) == sorted(lab.order.split())
    expect(row).to_have_text(" ".join(read[:12]) + " … and 18 more")
    expect(lab.at("#history .chips")).to_contain_text("… and 18 more")
    expect(ring).to_contain_text("and the ring is drawn for up to 24; here are 30.")
    ring.get_by_text("All 30, from far to near").click()
    expect(ring.locator("details .chips")).to_have_text(" ".join(read))


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_hostile_documents_and_questions_are_text_also_in_the_copied_command(lab):
    lab.paste(*HOSTILE)
    lab.question.fill('<img src=x onerror="alert(7)">')
    lab.ask()
    texts = lab.at("#documents details p").all_text_contents()
    assert [*texts[:2], texts[5]] == [*HOSTILE[:2], HOSTILE[5]]
    assert lab.at("#documents strong").text_content() == "<b onclick=alert(3)>Title</b>"
    assert texts[2] == "<iframe src=javascript:alert(4)></iframe>"
    assert texts[4].startswith("nul \u2400 escape \u241b[31m back \ufffdgnp.exe\ufffd tag ")
    assert [lab.at(css).count() for css in ("img, iframe, main b", "script")] == [0, 1]
    command = lab.copied("plain")
    assert command.replace("\n", "").isprintable()
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(run.stdout)["choices"][0]["message"]["content"] == lab.answer("plain").text_content()


def test_without_a_clipboard_the_command_is_shown_and_what_is_no_text_is_refused_by_name(open_lab, base_url, tmp_path):
    lab = open_lab(base_url.replace("127.0.0.1", "lab.test"))  # no secure context, so no access to the clipboard
    lab.ask()
    lab.at("#invariant").get_by_role("button", name="Copy as curl").click()
    shown = lab.role("dialog", name="Copy this command").get_by_role("textbox").input_value()
    assert shown.startswith(f"curl '{lab.url}{CHAT}'")
    lab.page.keyboard.press("Escape")
    (tmp_path / "ferry.txt").write_text("The ferry leaves at noon.\n\nNot in winter.", "utf-8")
    (tmp_path / "scan.txt").write_bytes(b"%PDF \xff\xfe")
    lab.press("Remove all")
    lab.at("#files").set_input_files([tmp_path / "ferry.txt", tmp_path / "scan.txt"])
    expect(lab.at("#documents strong")).to_have_text("ferry")
    expect(lab.at("#documents > li")).to_have_count(1)
    expect(lab.notice).to_have_text("scan.txt: expected text in UTF-8. Save it as text, or paste it.")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (360, "dark")])
def test_everything_fits_and_has_contrast(width, scheme, open_lab, base_url):
    lab = open_lab(base_url, viewport={"width": width, "height": 800}, color_scheme=scheme)
    ground = lab.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", ground))) < 120) == (scheme == "dark")
    lab.page.get_by_text("Add documents", exact=True).click()
    lab.try_orders()
    texts, faint = lab.page.evaluate(CONTRASTS)
    assert (texts > 100, faint) == (True, [])
    lab.paste(*HOSTILE)
    lab.ask()
    assert lab.page.evaluate("document.documentElement.scrollWidth") <= width


def test_a_screen_reader_finds_names_and_roles_and_the_focus_is_seen_on_every_control(lab):
    lab.ask()
    for region in ("Documents", "Question", "Orders asked", "Physical order"):
        expect(lab.role("region", name=region)).to_be_visible()
    for name in ("Plain", "Plain, sorted", "rotor"):
        expect(lab.role("article", name=name, exact=True)).to_contain_text("Confidence")
    expect(lab.role("heading", level=1, name="Order lab")).to_be_visible()
    controls = lab.role("main").locator("button:visible, input:visible, select:visible").all()
    assert len(controls) > 25
    described = [each.aria_snapshot() for each in controls]
    assert not [each for each in described if not re.match(r"""- '?\w+ ".""", each)]
    lab.at("h1").click()
    outlines = {}
    for _ in range(12):
        lab.page.keyboard.press("Tab")
        name, outline = lab.at(":focus").evaluate("each => [each.outerHTML, getComputedStyle(each).outline]")
        outlines[name] = outline
    assert ["solid 3px" in each for each in outlines.values()] == [True] * 12, outlines


def test_the_files_alone_are_served_with_strict_headers_once_and_name_no_other_host(http):
    for name, text in FILES.items():
        path = "/" if name == "index.html" else f"/lab/{name}"
        page, head = http.get(path), http.head(path)
        assert (page.status_code, head.status_code, head.content, page.text) == (200, 200, b"", text)
        assert head.headers["content-length"] == str(len(page.content))
        policy = page.headers["content-security-policy"]
        assert ("default-src 'none'" in policy, "unsafe" in policy) == (True, False)
        assert {"x-content-type-options": "nosniff", "cache-control": "no-cache"}.items() <= dict(page.headers).items()
        again = http.get(path, headers={"If-None-Match": page.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert text.count("\n") <= 300
        assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(| style=| on\w+=", text)
    assert set(re.findall(r"(?:https?:)?//[\w.]+\.\w+", "".join(FILES.values()))) == {"http://www.w3.org"}
    for path in ("none.js", "%2e%2e/app.py", "..%2fapp.py", "", "%00"):
        response = http.get(f"/lab/{path}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")


def test_a_key_is_asked_for_kept_for_the_tab_and_forgotten(embedded, open_lab):
    with serving(InProcess(embedded, "small"), Settings(keys={"right-key": "ada"})) as url:
        assert httpx.get(f"{url}/metrics").status_code == 401, "which no tenant may see"
        lab = open_lab(url)
        expect(lab.notice).to_have_text("This server needs a key.")
        for key, where, told in (
            ("wrong-key", lab.notice, "This server needs a valid key: expected a valid key."),
            ("right-key", lab.at("#model"), "Model: small"),
        ):
            lab.page.get_by_label("Key of this server").fill(key)
            lab.press("Use this key")
            expect(where).to_contain_text(told)
        lab.page.reload()
        expect(lab.at("#model")).to_have_text("Model: small")
        lab.ask()
        command = lab.copied("plain")
        assert '"Authorization: Bearer $INVARIANT_RAG_API_KEY"' in command
        assert "right-key" not in command + lab.page.content()
        lab.press("Forget the key")
        expect(lab.notice).to_have_text("This server needs a key.")
        assert lab.page.evaluate("sessionStorage.length + localStorage.length") == 0


def test_what_is_too_long_or_not_allowed_is_told_in_words_with_what_to_do(embedded, open_lab):
    engine = InProcess(embedded, "small", max_prompt_tokens=900)
    with serving(engine, Settings(max_body_bytes=60_000, methods=frozenset({"rotor"}))) as url:
        lab = open_lab(url)
        lab.try_orders()
        expect(lab.at("#plain")).to_contain_text("This server does not allow the plain model.")
        assert {plain for _, plain, *_ in lab.cells} == {"–"}
        refusal = lab.at("#invariant").get_by_role("alert")
        for words, expected in ((1500, "a prompt of at most 900 tokens"), (15_000, "a body of at most 60000 bytes")):
            lab.paste("word " * words)
            lab.press("Ask")
            expect(refusal).to_contain_text(f"That is too long for this server: expected {expected}")
            expect(refusal).to_contain_text("Send fewer or shorter documents.")
        expect(lab.at("#history")).to_be_hidden()


def test_a_busy_a_failing_and_a_dead_server_are_told_apart(model, open_lab):
    def failing(*_):
        raise RuntimeError("secret")

    engine = InProcess(model, "small")  # whose answers never end by themselves
    with client_of(engine, Settings(max_requests=1)) as http:
        lab = open_lab(str(http.base_url))
        refusal = lab.at("#invariant").get_by_role("alert")
        with leaving(http, CHAT, body(max_tokens=3000)):
            lab.press("Ask")
            expect(refusal).to_have_text(re.compile(r"^This server is busy: .* Try again in \d+ s\.$"))
        wait_until(lambda: not http.get("/ready").json()["active"])
        engine.answer_all = failing
        lab.press("Ask")
        expect(refusal).to_contain_text("The server failed. The request id tells its operator")
        assert "secret" not in lab.page.content()
    lab.press("Ask")
    expect(refusal).to_have_text("The server cannot be reached. Is it still running? Then try again.")


def test_what_runs_is_stopped_by_hand_and_when_the_question_changes(embedded, open_lab):
    engine, going_on = InProcess(embedded, "small"), Event()
    answer_all = engine.answer_all
    engine.answer_all = lambda *given: going_on.wait(30) and answer_all(*given)
    with serving(engine) as url:
        lab = open_lab(url)
        lab.press("Ask")
        lab.press("Stop")
        expect(lab.status).to_have_text("Stopped.")
        expect(lab.at("#stop")).to_be_hidden()
        lab.press("Try 5 random orders")
        lab.question.fill("What does Kellstead export?")
        going_on.set()
        expect(lab.status).to_have_text("Stopped: what is asked has changed.")
        expect(lab.at("#history")).to_be_hidden()
        lab.ask()
        expect(lab.rows).to_have_count(1)
