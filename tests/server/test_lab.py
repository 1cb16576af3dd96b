"""The order lab in a real browser, before a real server: moves, answers, flips, methods, the history."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from invariant_rag.server.engines.upstream import Upstream
from tests.browsers import needs_chromium
from tests.server.conftest import Opener, serving
from tests.server.lab import EXAMPLE, EXAMPLES, NAMES, Lab, content_of, post
from tests.server.scripted import Answer, completion, scripted_api

pytestmark = needs_chromium


@pytest.mark.parametrize("reading", ["plain", "sorted", "invariant"])
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
    lab.page.get_by_label("Confidence, from logprobs").uncheck()
    lab.ask()
    expect(lab.page.locator(f"#{reading} dd").first).to_have_text("not asked")


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
        ["striped wool", "blue glass", "striped wool"],
        ["blue glass\nflipped", "blue glass", "striped wool"],
    ]


def test_a_mouse_drags_a_document_by_any_of_its_row_and_does_not_open_it(lab: Lab) -> None:
    first, third = (lab.document(name).bounding_box() for name in "AC")
    assert first is not None
    assert third is not None
    lab.page.mouse.move(first["x"] + 40, first["y"] + 8)
    lab.page.mouse.down()
    lab.page.mouse.move(third["x"] + 40, third["y"] + third["height"], steps=6)
    lab.page.mouse.up()
    assert lab.order == "B C A D E F"
    expect(lab.page.locator("#documents details[open]")).to_have_count(0)
    lab.document("A").click()
    expect(lab.page.locator("#documents details[open]")).to_have_count(1)


def test_the_keyboard_goes_through_documents_moves_them_and_keeps_the_focus(lab: Lab) -> None:
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


def test_from_a_document_to_the_question_are_at_most_five_tabs(lab: Lab) -> None:
    lab.document("C").focus()
    tabs = 0
    while tabs < 5 and not lab.question.evaluate("each => each === document.activeElement"):
        lab.page.keyboard.press("Tab")
        tabs += 1
    expect(lab.question).to_be_focused()
    for _ in range(tabs):
        lab.page.keyboard.press("Shift+Tab")
    expect(lab.document("C")).to_be_focused()


@pytest.mark.parametrize("place", range(len(EXAMPLES)))
def test_an_example_says_why_it_was_chosen_and_which_answers_are_right(place: int, lab: Lab) -> None:
    example = EXAMPLES[place]
    lab.page.get_by_role("combobox", name="Example").select_option(example["name"])
    expect(lab.page.locator("#why")).to_have_text(example["why"])
    gold = [NAMES[each] for each in example["gold"]]
    marked = lab.page.locator("#documents > li.gold").all()
    assert [each.get_attribute("data-name") for each in marked] == gold
    lab.ask()
    for reading in ("plain", "sorted", "invariant"):
        right = content_of(post(lab.url, " ".join(NAMES), reading, example)).lower() == example["answer"].lower()
        said = "✓ right" if right else f"✗ wrong: it is {example['answer']}"
        expect(lab.page.locator(f"#{reading} :is(.right, .wrong)")).to_have_text(said)
    lab.question.fill("Who founded it?")
    expect(lab.page.locator("#why")).to_be_empty()
    expect(lab.page.locator("#documents > li.gold")).to_have_count(0)


def test_a_link_holds_the_state(open_lab: Opener, base_url: str) -> None:
    lab = open_lab(base_url, permissions=["clipboard-read", "clipboard-write"])
    lab.paste("# Mill\nThe mill grinds \u201cbarley\u201d.", "The ferry leaves at noon.", "Two bakeries.")
    lab.document("A").press("Delete")
    lab.document("B").press("Alt+ArrowDown")
    lab.question.fill("When does the ferry leave?")
    lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    lab.press("Copy link")
    expect(lab.status).to_have_text("The link is copied.")
    lab.page.goto(lab.page.evaluate("navigator.clipboard.readText()"))
    lab.page.reload()
    expect(lab.question).to_have_value("When does the ferry leave?")
    assert lab.page.locator("#documents details p").all_text_contents() == [
        "Two bakeries.",
        "The ferry leaves at noon.",
    ]
    expect(lab.page.get_by_role("combobox", name="Method")).to_have_value("isolated")
    lab.page.goto(f"{base_url}/#lab=bm8")
    lab.page.reload()
    expect(lab.question).to_have_value(EXAMPLE["question"])


def test_five_orders_show_flips_that_the_server_confirms(lab: Lab) -> None:
    lab.try_orders()
    cells = lab.cells()
    orders = [order for order, *_ in cells]
    assert orders[0] == lab.order
    assert len({*orders}) == 6
    for column, reading in ((1, "plain"), (2, "sorted"), (3, "invariant")):
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
    order, plain, *_ = lab.cells()[3]
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


def test_a_toy_is_said_to_be_one_and_no_other_model_is(lab: Lab, open_lab: Opener) -> None:
    expect(lab.page.locator("#toy")).to_contain_text("A toy answers here")
    with serving(Upstream("http://127.0.0.1:9/v1", "far")) as url:
        expect(open_lab(url).page.locator("#toy")).to_be_hidden()


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
        expect(lab.lead).to_contain_text(f"; {method} {words}")
        expect(lab.page.get_by_role("article", name=method, exact=True)).to_be_visible()


def test_the_method_that_is_chosen_is_the_one_that_is_named(lab: Lab) -> None:
    expect(lab.lead).to_contain_text("; rotor reads the documents as a set.")
    lab.page.get_by_role("combobox", name="Method").select_option("isolated")
    expect(lab.lead).to_contain_text("; isolated reads the documents as a set.")
    lab.try_orders()
    expect(lab.page.get_by_role("article", name="isolated", exact=True)).to_be_visible()
    expect(lab.page.locator("[data-reading=invariant]")).to_contain_text("isolated: flipped 0 %")
    expect(lab.page.get_by_role("columnheader", name="isolated", exact=True)).to_be_visible()
    expect(lab.page.locator("#ring")).to_contain_text("Method isolated, ordering ")
    expect(lab.page.get_by_role("img")).to_have_count(0)


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
