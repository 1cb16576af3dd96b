"""The order lab in a real browser, before a real server: moves, answers, flips, methods, the history."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from invariant_rag.server.engines.upstream import Upstream
from tests.browsers import needs_chromium
from tests.server.conftest import Opener, serving
from tests.server.lab import EXAMPLE, NAMES, Lab, content_of, post
from tests.server.scripted import Answer, completion, scripted_api

pytestmark = needs_chromium


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
