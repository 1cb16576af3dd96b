"""The order lab in a real browser, before a real server: moves, answers, flips, methods, the history, any text."""

import json
import re
import shutil
import subprocess

import pytest
from playwright.sync_api import expect

from invariant_rag.server.engines.upstream import Upstream
from tests.browsers import needs_chromium
from tests.server.conftest import serving
from tests.server.lab import CONTRASTS, EXAMPLE, EXAMPLES, HOSTILE, NAMES, READINGS, content_of, post
from tests.server.scripted import Answer, completion, scripted_api

pytestmark = needs_chromium


def test_an_answer_has_its_confidence_and_cost_and_the_ring_is_what_the_server_reports(lab):
    lab.ask()
    for reading in READINGS:
        reply = post(lab.url, " ".join(NAMES), reading)
        expect(lab.answer(reading)).to_have_text(content_of(reply))
        figures = lab.page.locator(f"#{reading} dd").all_inner_texts()
        tokens = reply["choices"][0]["logprobs"]["content"]
        confidence = sum(2.718281828 ** each["logprob"] for each in tokens) / len(tokens)
        assert figures[:2] == [f"{confidence:.2f}", str(reply["usage"]["prompt_tokens"])]
        assert 0 <= int(figures[2]) <= int(figures[1])
        assert re.fullmatch(r"\d+ ms", figures[3])
    read = reply["invariant"]["order"]
    label = f"Ring: {', '.join(read)}, and back to {read[0]}"
    expect(lab.page.get_by_role("img", name=label, exact=True)).to_be_visible()
    sights = [row.inner_text().split() for row in lab.page.locator(".sights tr").all()]
    rows = [[read[place], *read[place + 1 :], *read[: place + 1]] for place in range(6)]
    assert sights == [*rows, ["Question", *read]]
    lab.page.get_by_label("Confidence, from logprobs").uncheck()
    lab.ask()
    expect(lab.page.locator("#plain dd").first).to_have_text("not asked")


def test_dragging_a_document_asks_again_and_shows_what_flipped(lab):
    lab.ask()
    before = lab.answer("plain").inner_text()
    x, y = lab.grip(1)
    lab.drag(lab.grip(0), (x, y + 16))
    assert lab.order == "B A C D E F"
    expect(lab.page.locator("#moves")).to_have_text(f"A, {EXAMPLE['documents'][0]['title']}: moved to place 2 of 6.")
    expect(lab.rows).to_have_count(2)
    expect(lab.page.locator("#plain")).to_contain_text(f"Flipped. The first order got: {before}")
    flipped = ["blue glass\nflipped", "blue glass", "striped wool"]
    assert [cells[1:] for cells in lab.cells()] == [["striped wool", "blue glass", "striped wool"], flipped]
    second, third = (lab.document(name).bounding_box() for name in "AC")  # a mouse drags any of a row, and opens none
    assert second is not None
    assert third is not None
    lab.drag((second["x"] + 40, second["y"] + 8), (third["x"] + 40, third["y"] + third["height"]))
    assert lab.order == "B C A D E F"
    expect(lab.page.locator("#documents details[open]")).to_have_count(0)
    lab.document("A").click()
    expect(lab.page.locator("#documents details[open]")).to_have_count(1)


def test_the_keyboard_goes_through_documents_and_reaches_the_question_in_five_tabs(lab):
    lab.document("C").focus()
    tabs = 0
    while tabs < 5 and not lab.question.evaluate("each => each === document.activeElement"):
        lab.page.keyboard.press("Tab")
        tabs += 1
    expect(lab.question).to_be_focused()
    for _ in range(tabs):
        lab.page.keyboard.press("Shift+Tab")
    expect(lab.document("C")).to_be_focused()
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
    expect(lab.page.locator("#moves")).to_contain_text("moved to place 2 of 5.")


def test_an_example_says_why_it_was_chosen_and_which_answers_are_right(lab):
    for example in EXAMPLES:
        lab.page.get_by_role("combobox", name="Example").select_option(example["name"])
        expect(lab.page.locator("#why")).to_have_text(example["why"])
        marked = lab.page.locator("#documents > li.gold").all()
        assert [each.get_attribute("data-name") for each in marked] == [NAMES[each] for each in example["gold"]]
        lab.ask()
        for reading in READINGS:
            right = content_of(post(lab.url, " ".join(NAMES), reading, example)).lower() == example["answer"].lower()
            said = "✓ right" if right else f"✗ wrong: it is {example['answer']}"
            expect(lab.page.locator(f"#{reading} :is(.right, .wrong)")).to_have_text(said)
    lab.question.fill("Who founded it?")
    expect(lab.page.locator("#why")).to_be_empty()
    expect(lab.page.locator("#documents > li.gold")).to_have_count(0)


def test_a_link_holds_the_state(open_lab, base_url):
    lab = open_lab(base_url, permissions=["clipboard-read", "clipboard-write"])
    lab.paste("# Mill\nThe mill grinds \u201cbarley\u201d.", "The ferry leaves at noon.", "Two bakeries.")
    lab.document("A").press("Delete")
    lab.document("B").press("Alt+ArrowDown")
    lab.question.fill("When does the ferry leave?")
    lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    lab.press("Copy link")
    expect(lab.status).to_have_text("The link is copied.")
    lab.page.goto(lab.clipboard())
    lab.page.reload()
    expect(lab.question).to_have_value("When does the ferry leave?")
    texts = ["Two bakeries.", "The ferry leaves at noon."]
    assert lab.page.locator("#documents details p").all_text_contents() == texts
    expect(lab.page.get_by_role("combobox", name="Method")).to_have_value("isolated")
    lab.page.goto(f"{base_url}/#lab=bm8")
    lab.page.reload()
    expect(lab.question).to_have_value(EXAMPLE["question"])


def test_five_orders_show_flips_that_the_server_confirms_and_can_be_listed_again(lab):
    lab.try_orders()
    cells = lab.cells()
    orders = [order for order, *_ in cells]
    assert orders[0] == lab.order
    assert len({*orders}) == 6
    for column, reading in enumerate(READINGS, 1):
        answers = [content_of(post(lab.url, order, reading)) for order in orders]
        flips = [answer != answers[0] for answer in answers]
        shown = [f"{each}\nflipped" if flipped else each for each, flipped in zip(answers, flips, strict=True)]
        assert [row[column] for row in cells] == shown
        rate = lab.page.locator(f"[data-reading={reading}]")
        expect(rate).to_contain_text(f"flipped {20 * sum(flips)} % in {sum(flips)} of 5 other orders")
        assert any(flips) == (reading == "plain")
    expect(lab.page.get_by_text("Every order that you asked was read like this.")).to_be_visible()
    order, plain, *_ = cells[3]
    row = lab.page.get_by_role("button", name=f"List the documents in order 4: {order}")
    row.press("Enter")
    assert lab.order == order
    expect(lab.answer("plain")).to_have_text(plain.split("\n")[0])
    expect(row).to_be_focused()


def test_the_method_that_is_chosen_is_the_one_that_is_named(lab):
    expect(lab.page.locator("#toy")).to_contain_text("A toy answers here")
    expect(lab.lead).to_contain_text("; rotor reads the documents as a set.")
    lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    expect(lab.lead).to_contain_text("; isolated reads the documents as a set.")
    lab.try_orders()
    expect(lab.page.get_by_role("article", name="isolated", exact=True)).to_be_visible()
    expect(lab.page.locator("[data-reading=invariant]")).to_contain_text("isolated: flipped 0 %")
    expect(lab.page.get_by_role("columnheader", name="isolated", exact=True)).to_be_visible()
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
def test_a_gateway_is_said_to_do_what_its_method_does(method, words, open_lab):
    with scripted_api() as api, serving(Upstream(api.url, "far", method=method)) as url:
        api.plan(Answer(body=completion("All the\nwool. " * 64)))
        lab = open_lab(url)
        expect(lab.page.locator("#toy")).to_be_hidden()
        expect(lab.lead).to_contain_text(f"; {method} {words}")
        expect(lab.page.get_by_role("article", name=method, exact=True)).to_be_visible()
        if method != "canonical":
            return
        lab.page.get_by_label("Confidence, from logprobs").uncheck()
        lab.ask()
        start = ("All the wool. " * 64)[:59] + "…"  # the status is one short line however long the answers are
        expect(lab.status).to_have_text(f"Plain: “{start}”; canonical: “{start}”")
        lab.try_orders()
        flips = "flipped in 0 of 5 other orders"
        expect(lab.status).to_have_text(f"Plain: {flips}; canonical: {flips}")


def test_of_many_documents_the_first_are_shown_and_it_is_said_what_is_not_drawn(lab):
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


@pytest.mark.skipif(shutil.which("curl") is None, reason="no curl on this machine")
def test_hostile_documents_and_questions_are_text_also_in_the_copied_command(open_lab, base_url):
    lab = open_lab(base_url, permissions=["clipboard-read", "clipboard-write"])
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
    lab.page.locator("#plain").get_by_role("button", name="Copy as curl").click()
    expect(lab.status).to_have_text("The command is copied.")
    command = lab.clipboard()
    assert command.replace("\n", "").isprintable()
    run = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert content_of(json.loads(run.stdout)) == lab.answer("plain").text_content()


def test_without_a_clipboard_the_command_is_shown_and_what_is_no_text_is_refused_by_name(open_lab, base_url, tmp_path):
    lab = open_lab(base_url.replace("127.0.0.1", "lab.test"))  # no secure context, so no access to the clipboard
    lab.ask()
    lab.page.locator("#invariant").get_by_role("button", name="Copy as curl").click()
    dialog = lab.page.get_by_role("dialog", name="Copy this command")
    assert dialog.get_by_role("textbox").input_value().startswith(f"curl '{lab.url}/v1/chat/completions'")
    lab.page.keyboard.press("Escape")
    (tmp_path / "ferry.txt").write_text("The ferry leaves at noon.\n\nNot in winter.", "utf-8")
    (tmp_path / "scan.txt").write_bytes(b"%PDF \xff\xfe")
    lab.press("Remove all")
    lab.page.locator("#files").set_input_files([tmp_path / "ferry.txt", tmp_path / "scan.txt"])
    expect(lab.page.locator("#documents strong")).to_have_text("ferry")
    expect(lab.page.locator("#documents > li")).to_have_count(1)
    expect(lab.page.locator("#notice")).to_have_text("scan.txt: expected text in UTF-8. Save it as text, or paste it.")


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
    for region in ("Documents", "Question", "Orders asked", "What was read where"):
        expect(lab.page.get_by_role("region", name=region)).to_be_visible()
    for name in ("Plain", "Plain, sorted", "rotor"):
        expect(lab.page.get_by_role("article", name=name, exact=True)).to_contain_text("Confidence")
    expect(lab.page.get_by_role("heading", level=1, name="Order lab")).to_be_visible()
    controls = lab.page.get_by_role("main").locator("button:visible, input:visible, select:visible")
    assert controls.count() > 25
    described = [each.aria_snapshot() for each in controls.all()]
    assert not [each for each in described if not re.match(r"""- '?\w+ ".""", each)]
    lab.page.locator("h1").click()
    seen = set()
    for _ in range(12):
        lab.page.keyboard.press("Tab")
        focused = "document.activeElement"
        name, outline = lab.page.evaluate(f"[{focused}.outerHTML, getComputedStyle({focused}).outline]")
        assert "solid 3px" in outline, name
        seen.add(name)
    assert len(seen) == 12
