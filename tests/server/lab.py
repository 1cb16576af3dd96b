"""The order lab as a person uses it in a browser, what went wrong in it, and what its server says without it."""

import json
from pathlib import Path

import httpx
from playwright.sync_api import expect

import invariant_rag.server


class Lab:
    """One open page: the addresses that it asked for, and its errors, dialogs and lines of the console."""

    def __init__(self, page, url):
        self.page, self.url = page, url
        self.requests = []
        self.complaints = []
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("dialog", lambda dialog: (self.complaints.append(dialog.message), dialog.dismiss()))
        page.on("console", lambda message: self.complaints.append(message.text))

    @property
    def order(self):
        """The documents as they are listed: `A B C`."""
        return " ".join(each.get_attribute("data-name") or "" for each in self.page.locator("#documents > li").all())

    @property
    def lead(self):
        return self.page.locator(".lead")

    @property
    def question(self):
        return self.page.get_by_role("textbox", name="Question")

    @property
    def status(self):
        """The line that says what came of it."""
        return self.page.locator("#status")

    @property
    def rows(self):
        """The rows of the history."""
        return self.page.locator("#history tbody tr")

    def cells(self):
        """Order, and the plain, sorted and invariant answer of each row."""
        return [row.locator("th, td").all_inner_texts() for row in self.rows.all()]

    def answer(self, reading):
        return self.page.locator(f"#{reading} .answer")

    def refusal(self, reading):
        return self.page.locator(f"#{reading}").get_by_role("alert")

    def press(self, name):
        self.page.get_by_role("button", name=name, exact=True).click()

    def ask(self):
        """Ask, and wait for the answers."""
        self.press("Ask")
        expect(self.answer("invariant")).to_be_visible()

    def try_orders(self):
        """Try the order that is listed and five others, and wait for the answers."""
        self.press("Try 5 random orders")
        expect(self.rows).to_have_count(6)
        expect(self.page.locator("#stop")).to_be_hidden()

    def paste(self, *documents, line="---"):
        """Put documents in the place of those that are there; in the form, `line` stands between two."""
        self.press("Remove all")
        if not self.page.get_by_label("Paste documents").is_visible():
            self.page.get_by_text("Add documents", exact=True).click()
        self.page.get_by_label("Paste documents").fill(f"\n{line}\n".join(documents))
        self.press("Add these")
        expect(self.page.locator("#documents > li")).to_have_count(len(documents))

    def drag(self, start, end):
        """Drag with the mouse, between places in pixels."""
        self.page.mouse.move(*start)
        self.page.mouse.down()
        self.page.mouse.move(*end, steps=6)
        self.page.mouse.up()

    def clipboard(self):
        return str(self.page.evaluate("navigator.clipboard.readText()"))

    def document(self, name):
        """The row of a document, where Tab stops."""
        return self.page.locator(f"#documents > li[data-name={name}] summary")

    def grip(self, place):
        """The middle of the grip of a document, in pixels."""
        box = self.page.locator("#documents .grip").nth(place).bounding_box()
        assert box is not None
        return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


PAGE = Path(invariant_rag.server.__file__).parent / "page"
EXAMPLES = json.loads((PAGE / "examples.json").read_text("utf-8"))
EXAMPLE = EXAMPLES[0]
READINGS = ("plain", "sorted", "invariant")
NAMES = "ABCDEF"[: len(EXAMPLE["documents"])]
HOSTILE = [
    '<img src="https://evil.test/1.png" onerror="alert(1)">',
    "</script><script>alert(2)</script>",
    "# <b onclick=alert(3)>Title</b>\n<iframe src=javascript:alert(4)></iframe>",
    "{{constructor.constructor('alert(5)')()}} ${alert(6)} 'it''s' \"$(touch /tmp/no)\" `id` !! \\",
    "nul \x00 escape \x1b[31m back \u202egnp.exe\u202c tag \U000e0041 end",
    "W" * 400,
]


def body(order, reading, example=EXAMPLE):
    """Return the request of the page in one order of the example: `A B C`."""
    documents = [{"id": name, **example["documents"][NAMES.index(name)]} for name in order.split()]
    orderings = {"plain": "given", "sorted": "lexical"}
    invariant = {"method": "sequential", "ordering": orderings[reading]} if reading in orderings else {}
    messages = [{"role": "user", "content": example["question"]}]
    return {"messages": messages, "documents": documents, "invariant": invariant, "logprobs": True}


def post(url, order, reading, example=EXAMPLE):
    """Ask a server without the page."""
    response = httpx.post(f"{url}/v1/chat/completions", json=body(order, reading, example), timeout=60)
    return dict(response.raise_for_status().json())


def content_of(reply):
    """Return the text of an answer."""
    return str(reply["choices"][0]["message"]["content"])


CONTRASTS = Path(__file__).with_name("contrasts.js").read_text("utf-8")
"""How many texts are seen, and those with less contrast than WCAG AA asks for."""
