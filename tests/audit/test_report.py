"""Claims about the report: the answer first, then what flips; readable by everybody, and safe."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

from invariant_rag.audit import audit
from invariant_rag.segments import Segment
from tests.audit.known import first, records


def test_the_page_begins_with_the_answer_is_dark_read_aloud_and_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    audit(first, records(30), out=tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    places = [page.index(each) for each in ("Finding:", "Recommendation:", "Questions whose outcome", ">Measures<")]
    assert places == sorted(places)
    assert page.rindex("flips: What is") < page.index("same: What is")
    for each in ("prefers-color-scheme: dark", '<html lang="en">', 'scope="col"', 'scope="row"'):
        assert each in page
    assert page.count("<caption>") == page.count("<table>") > 0
    assert re.findall(r'<svg role="img"[^>]*><title>[^<]*net sensitivity \S+%[^<]*</title>', page)
    assert not re.findall(r"(?:src|href)=", page)


def test_markup_and_control_characters_of_answers_stay_text_and_the_table_runs_no_formula(tmp_path: Path) -> None:
    def hostile(question: str, segments: Sequence[Segment]) -> str:
        return "=1+1 <script>alert(1)</script> {{ 7 * 7 }} \x1b[31m \ud83d | a" + segments[0].text[:3]

    audit(hostile, records(4), out=tmp_path / "out", name="<script> *me*")
    page, text, table = ((tmp_path / "out" / name).read_text() for name in ("report.html", "report.md", "answers.csv"))
    assert "<script>" not in page + text
    assert "&lt;script&gt;" in page
    assert "49" not in re.sub(r"\d{2,}", "", page)
    assert "\x1b" not in page + text
    rows = list(csv.DictReader(table.splitlines()))
    assert len(rows) == 20
    assert {each["answer"][:5] for each in rows} == {"'=1+1"}
    assert [each["call"] for each in rows[:5]] == ["today", "today again", "placebo", "another order", "a third order"]
