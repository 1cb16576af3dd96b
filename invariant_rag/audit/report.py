"""The report of an audit: audit.json, answers.csv, and pages in HTML and Markdown that begin with the answer."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.advice import p_value, percent, points
from invariant_rag.audit.folder import RESULT
from invariant_rag.audit.result import ABOUT
from invariant_rag.files import encode_json, write_file
from invariant_rag.shown import clean

if TYPE_CHECKING:
    from invariant_rag.audit.result import Audit

SHOWN = 100
"""Most questions on a page; those that flip come first."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&])")


def write_report(audit: Audit, folder: Path) -> None:
    """Write audit.json, answers.csv, report.html and report.md."""
    write_file(folder / RESULT, encode_json(audit.as_dict(), indent=1, default=str) + b"\n")
    write_file(folder / "answers.csv", _csv(audit).encode("utf-8", "backslashreplace"))
    for name in ("report.html", "report.md"):
        write_file(folder / name, _page(audit, f"{name}.j2").encode("utf-8", "backslashreplace"))


def measure_rows(audit: Audit) -> list[tuple[str, str, str]]:
    """Return name, value and meaning of each measure that is known."""
    known = {name: audit.measures[name] for name in ABOUT if name in audit.measures}
    special = {"calls": lambda each: f"{each.value:g}", "net_sensitivity": points}
    return [(name.replace("_", " "), special.get(name, percent)(each), ABOUT[name]) for name, each in known.items()]


def remedy_rows(audit: Audit) -> list[tuple[str, str, str, str]]:
    """Return name, accuracy, gain and p-value of each remedy."""
    return [
        (each.name, percent(each.accuracy), points(each.gain).replace(" points", ""), p_value(each.p))
        if each.accuracy and each.gain
        else (each.name, "", "", "")
        for each in audit.comparisons
    ]


def _page(audit: Audit, template: str) -> str:
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("invariant_rag.audit", "pages")
    environment = Environment(
        loader=loader, autoescape=select_autoescape(["html.j2"]), keep_trailing_newline=True, finalize=_cleaned
    )
    environment.filters["listed"] = _listed
    environment.filters["md"] = lambda text: _SPECIAL.sub(r"\\\1", " ".join(clean(str(text)).split()))
    return environment.get_template(template).render(
        audit=audit,
        most=SHOWN,
        measures=measure_rows(audit),
        remedies=remedy_rows(audit),
        percent=percent,
    )


def _cleaned(value: Any) -> Any:
    """Return text without control characters: answers and documents are not trusted."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _listed(order: Sequence[int]) -> str:
    """Return an order of documents as people count them, from 1."""
    return " ".join(str(place + 1) for place in order)


def _csv(audit: Audit) -> str:
    """Return a row for each call of the screen. Cells that a spreadsheet would run as a formula begin with a quote."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["id", "question", "gold", "call", "order", "answer", "outcome", "flips", "tokens", "seconds"])
    for each in audit.asked:
        about = (each.question.id, each.question.text, " | ".join(each.question.answers))
        for (name, order, answer, outcome), said in zip(each.rows, each.answers, strict=True):
            cells = [*about, name, _listed(order), answer, outcome]
            quoted = [f"'{cell}" if cell[:1] in {"=", "+", "-", "@"} else cell for cell in cells]
            rows.writerow([*quoted, each.flips, said.tokens, round(said.seconds, 3)])
    return text.getvalue()
