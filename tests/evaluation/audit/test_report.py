"""Claims about the report: it holds everything, trusts no document, and opens in a browser without complaint."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Sequence
from fractions import Fraction
from html import escape, unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from invariant_rag.evaluation.audit import Audit, audit
from invariant_rag.segments import Segment
from tests.browsers import CHROMIUM, needs_chromium
from tests.evaluation.audit.known import first, records

ACTIVE = (
    "![x](https://evil.test/1.png) ![x][ref] [link](javascript:alert(1)) <https://evil.test> <img src=//evil.test/2> "
    "https://evil.test/3 www.evil.test `code` *em* __strong__ ~~gone~~ \\![y](http://evil.test/4) &lt;b&gt; "
    "&#33;[z](u) [ref]: https://evil.test/5 $x$ [1, 2](https://evil.test/6) "
    "[1, 2]: //evil.test ![3, 4] a_b_c x_ _y_ :tada: #1"
)
HOSTILE = '</td><script>document.title="taken"</script>| `x` \n# heading'
CONTROLS = "\x00\x07\x08\x1b[31m\x7f\x9b\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069\ud800"


def hostile_first(question: str, segments: Sequence[Segment]) -> str:
    return f"{first(question, segments)} {HOSTILE}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("report")
    questions = records()
    questions[0]["question"] = HOSTILE
    audit(hostile_first, questions, out=target)
    return target


def test_no_answer_and_no_name_of_a_system_becomes_markup_in_markdown(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for start in range(0, len(ACTIVE), 60):  # the report shortens long answers
        questions = records(2)
        for each in questions:
            each["question"] = ACTIVE[start:]

        def answer(question: str, segments: Sequence[Segment], start: int = start) -> str:
            return f"{first(question, segments)[-3:]} {ACTIVE[start:]}"

        answer.__qualname__ = ACTIVE
        audit(answer, questions, out=tmp_path / str(start), remedies=[], repeats=1)
        text = (tmp_path / str(start) / "report.md").read_text()
        tokens = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
        inline = [each for token in tokens for each in token.children or ()]
        images = [each.attrGet("src") for each in inline if each.type == "image"]
        assert images == ["plots/slots.png", "plots/flips.png", "plots/cost.png"]
        harmless = {"text", "text_special", "image", "softbreak", "strong_open", "strong_close"}
        assert {each.type for each in inline} <= harmless
        assert sum(each.type == "strong_open" for each in inline) == 3
        assert "https://" not in text  # which GitHub would link
        assert "www." not in text
        assert not re.search(r"(?<!\\)\$", text)  # which GitHub would set as a formula
        shown = "".join(each.content for each in inline)
        assert " ".join(ACTIVE.split()) in shown  # as the name of the system, to the letter
        request.getfixturevalue("undrawn")  # the plots of the first report are enough


def test_no_control_character_of_a_text_is_in_the_report(tmp_path: Path) -> None:
    questions = records(2)
    for each in questions:
        each["question"] += CONTROLS

    def answer(question: str, segments: Sequence[Segment]) -> str:
        return first(question, segments)[-3:] + CONTROLS

    audit(answer, questions, out=tmp_path, remedies=[], repeats=1, name=f"name{CONTROLS}")
    for kind in ("md", "html"):
        text = (tmp_path / f"report.{kind}").read_bytes().decode()
        assert "[31m" in text
        assert not {*CONTROLS} - {*"[31m"} & {*text}


def refuse_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def test_what_is_no_number_of_json_is_null_in_the_page_and_in_audit_json(tmp_path: Path) -> None:
    questions: list[dict[str, object]] = records(2)
    scores = [math.inf, -math.inf, 0.5, Fraction(1, 3)]
    segments = [{"text": text, "score": score} for text, score in zip(["right0", "b", "c", "d"], scores, strict=True)]
    odd = {"question": "Who?", "segments": segments, "answers": ["right0"], "note": math.nan, "notes": [math.nan]}
    audit(first, [*questions, odd], out=tmp_path, remedies=[], repeats=1)
    embedded = re.search(r'id="asked">(.*?)</script>', (tmp_path / "report.html").read_text())
    assert embedded is not None
    whole = json.loads((tmp_path / "audit.json").read_text(), parse_constant=refuse_constant)
    asked = json.loads(embedded[1], parse_constant=refuse_constant)
    assert asked == whole["asked"]
    assert [each["score"] for each in asked[2]["segments"]] == [None, None, 0.5, 1 / 3]
    assert asked[2]["extra"] == {"note": None, "notes": "[nan]"}


class Page(HTMLParser):
    """Collects tags and what they point at."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.sources: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.sources += [value or "" for name, value in attrs if name in {"src", "href"}]


def test_the_page_is_one_file_with_three_plots_in_it(folder: Path) -> None:
    page = Page((folder / "report.html").read_text())
    assert page.tags.count("img") == 3
    assert page.sources
    assert all(source.startswith("data:") for source in page.sources)


def test_nothing_in_a_document_or_an_answer_becomes_markup(folder: Path) -> None:
    assert Page((folder / "report.html").read_text()).tags.count("script") == 2  # the questions as data, and ours
    markdown = (folder / "report.md").read_text()
    assert "<script" not in markdown
    assert "\n# heading" not in markdown
    tables = [line for line in markdown.splitlines() if line.startswith("| ") and "document.title" in line]
    assert tables
    for line in tables:
        assert len(re.findall(r"(?<!\\)\|", line)) == 3  # two cells


def test_the_markdown_shows_its_plots_and_the_numbers_of_the_audit(folder: Path) -> None:
    markdown = (folder / "report.md").read_text()
    shown = re.findall(r"!\[\w+\]\((.*?)\)", markdown)
    assert len(shown) == 3
    assert all((folder / path).read_bytes().startswith(b"\x89PNG") for path in shown)
    found = json.loads((folder / "audit.json").read_text())
    assert unescape(MarkdownIt().render(markdown)).count(found["advice"]["headline"]) == 1
    assert unescape(MarkdownIt().render(markdown)).index(found["advice"]["headline"]) < 1500
    for needless in (r"\:", r"\(", r"\)", r"\!", r"\[0.", r"\[+", r"hostile\_first"):
        assert needless not in markdown.partition("## Questions that change most")[0]
    assert re.search(r"\d\d:\d\d:\d\d", markdown)
    assert re.search(r"\(p (=|&lt;) 0\.\d{3}\)", markdown)
    spread = next(each for each in found["measured"] if each["name"] == "sort")["measures"]["salted_spread"]["value"]
    assert re.search(rf"\| salted spread \|[^|]*\| {spread:.3f} ", markdown)


def test_without_gold_answers_there_is_no_plot_of_accuracy_by_slot(tmp_path: Path) -> None:
    bare = [{"question": each["question"], "segments": each["segments"]} for each in records(3)]
    result: Audit = audit(first, bare, remedies=[], out=tmp_path)
    assert "accuracy" not in result["as it is"].measures
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["cost.png", "flips.png"]


def test_the_report_names_system_date_versions_and_answers_in_the_order_in_which_people_ask(folder: Path) -> None:
    page, markdown = ((folder / f"report.{kind}").read_text() for kind in ("html", "md"))
    asked = ("What do you get today?", "other orders", "more than noise", "each remedy give, against today?")
    for text in (page, markdown):
        places = [text.index(question) for question in asked]
        assert places == sorted(places)
        for fact in (
            "hostile",
            "invariant-rag 0.",
            "python 3.",
            json.loads((folder / "audit.json").read_text())["date"][:10],
        ):
            assert fact in text


def test_the_page_holds_every_question_with_its_documents_and_answers(folder: Path) -> None:
    embedded = re.search(r'id="asked">(.*?)</script>', (folder / "report.html").read_text())
    assert embedded is not None
    asked = json.loads(embedded[1])
    assert asked == json.loads((folder / "audit.json").read_text())["asked"]
    assert len(asked) == len(records())
    assert asked[0]["question"] == HOSTILE
    assert [each["text"] for each in asked[3]["segments"]] == records()[3]["segments"]
    assert {each["remedy"] for each in asked[3]["asked"]} == {"as it is", "sort", "vote"}


def test_the_numbers_of_the_questions_are_those_of_the_report_which_counts_the_given_order_once(tmp_path: Path) -> None:
    found = audit(first, records(12), out=tmp_path, remedies=[], repeats=3)
    asked = json.loads((tmp_path / "audit.json").read_text())["asked"]
    for name in ("today", "accuracy", "worst"):
        mean = sum(each["accuracy"][name] for each in asked) / len(asked)
        assert mean == pytest.approx(found["as it is"].measures[name].value)
    # Each of four segments is first in a quarter of the 24 orders.
    rows = [line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| What is number")]
    assert len(rows) == 10
    for row in rows:
        assert [int(each) for each in re.findall(r"(\d+) x ", row)] == [6, 6, 6, 6]


# A script of ours at the end of a copy of the page, which uses it and says what it saw where --dump-dom shows it.
PROBE = """<script>
const lines = () => document.querySelectorAll("#questions tr.question").length;
const saw = { rows: lines() };
const type = (id, value, event) => {
  const box = document.getElementById(id); box.value = value; box.dispatchEvent(new Event(event));
};
type("search", "what is number 7?", "input"); saw.searched = lines();
document.querySelector("#questions tr.question").click();
saw.documents = document.querySelectorAll("tr.detail .document").length;
saw.gold = document.querySelector("tr.detail .gold").textContent;
saw.answers = document.querySelectorAll("tr.detail table tr").length - 1;
type("search", "", "input"); type("show", "wrong", "change"); saw.wrong = lines(); type("show", "all", "change");
document.querySelector("[data-key=today]").click(); document.querySelector("[data-key=today]").click();
saw.best = document.querySelector("#questions tr.question td:nth-child(3)").textContent;
saw.mean = document.querySelector("#questions tr.question td:nth-child(4)").textContent;
saw.csv = csv().split("\\r\\n").length;
saw.formula = csv().includes('"=');
onload = () => {
  saw.more = !document.getElementById("more").hidden;
  if (saw.more) { document.getElementById("more").click(); saw.rowsThen = lines(); }
  saw.text = [...document.images].map((each) => each.naturalHeight / each.naturalWidth);
  saw.images = [...document.images].map((each) => each.naturalWidth);
  saw.width = document.documentElement.scrollWidth; saw.window = innerWidth;
  top.document.title = JSON.stringify(saw);
};
</script></body>"""


@needs_chromium
@pytest.mark.parametrize("width", [1280, 360])
def test_a_browser_sorts_filters_and_exports_and_logs_no_error(width: int, folder: Path, tmp_path: Path) -> None:
    assert CHROMIUM is not None
    page = tmp_path / "probed.html"
    probed = (folder / "report.html").read_text().replace("</body>", PROBE)
    # In a frame, since some browsers make no window as narrow as a phone.
    page.write_text(f'<title></title><iframe width="{width}" height="2000" srcdoc="{escape(probed)}"></iframe>')
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--window-size=1400,2000", "--enable-logging=stderr"]
    run = subprocess.run(
        [CHROMIUM, *options, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    title = re.search(r"<title>(.*?)</title>", run.stdout, re.DOTALL)
    assert title is not None
    saw = json.loads(unescape(title[1]))
    answers = sum(len(each["asked"]) for each in json.loads((folder / "audit.json").read_text())["asked"])
    phone = width < 640
    assert (saw["rows"], saw["searched"], saw["wrong"]) == ((10, 1, 10) if phone else (24, 1, 18))
    assert (saw["more"], saw.get("rowsThen")) == ((True, 20) if phone else (False, None))
    assert all((each > 0.9) is phone for each in saw["text"])  # high plots for a phone, with letters as large
    assert (saw["documents"], saw["best"], saw["csv"], saw["formula"]) == (4, "1.00", answers + 2, False)
    assert saw["mean"] == "0.25"
    assert "right7" in saw["gold"]
    assert saw["answers"] == answers / 24
    assert [each > 600 for each in saw["images"]] == [True] * 3
    assert saw["width"] <= saw["window"]  # nothing sticks out sideways
    assert "CONSOLE" not in run.stderr
