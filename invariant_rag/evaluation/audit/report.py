"""The report of an audit: audit.json, answers.csv, and pages in HTML and Markdown that begin with the answer."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.evaluation.audit.advice import percent, points
from invariant_rag.evaluation.audit.folder import RESULT
from invariant_rag.evaluation.audit.measures import ABOUT, flips
from invariant_rag.files import encode_json, write_file
from invariant_rag.shown import clean

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.result import Audit
    from invariant_rag.evaluation.statistics import Estimate

SHOWN = 100
"""Most questions on a page; those that flip come first."""

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&])")


def write_report(audit: Audit, folder: Path) -> None:
    """Write audit.json, answers.csv, report.html and report.md.

    Raises:
        UnusableFile: They cannot be written.
    """
    write_file(folder / RESULT, encode_json(audit.as_dict(), indent=1, default=str) + b"\n")
    write_file(folder / "answers.csv", _csv(audit).encode("utf-8", "backslashreplace"))
    for name in ("report.html", "report.md"):
        write_file(folder / name, _page(audit, f"{name}.j2").encode("utf-8", "backslashreplace"))


def measure_rows(audit: Audit) -> list[tuple[str, str, str]]:
    """Return name, value and meaning of each measure that is known."""
    rows = []
    for name, about in ABOUT.items():
        estimate = audit.measures.get(name)
        if estimate is not None:
            rows.append((name.replace("_", " "), _shown(name, estimate), about))
    return rows


def remedy_rows(audit: Audit) -> list[dict[str, Any]]:
    """Return the figures of each remedy as text."""
    return [
        {
            "name": each.name,
            "about": each.about,
            "accuracy": "" if each.accuracy is None else percent(each.accuracy),
            "gain": "" if each.gain is None else points(each.gain).replace(" points", ""),
            "p": "" if each.gain is None else "< 0.001" if each.p < 0.001 else f"{each.p:.3f}",
            "fixes": each.fixes,
            "calls": each.calls,
        }
        for each in audit.comparisons
    ]


def described(audit: Audit) -> str:
    """Return what describes this system alone, and is not to be compared with another."""
    rate, always = flips(audit.asked)
    text = f"Of the questions, {percent(rate)} flip in one of the three orders asked"
    text += "" if always is None else f", and {percent(always)} are right in all three"
    return f"{text}. Both grow with noise and with the number of orders: compare net sensitivity instead."


def _shown(name: str, estimate: Estimate) -> str:
    if name == "calls":
        return f"{estimate.value:g}"
    return points(estimate) if name == "net_sensitivity" else percent(estimate)


def _page(audit: Audit, template: str) -> str:
    from jinja2 import Environment, PackageLoader, select_autoescape

    loader = PackageLoader("invariant_rag.evaluation.audit", "pages")
    environment = Environment(
        loader=loader, autoescape=select_autoescape(["html.j2"]), keep_trailing_newline=True, finalize=_cleaned
    )
    environment.filters["md"] = lambda text: _SPECIAL.sub(r"\\\1", " ".join(clean(str(text)).split()))
    from markupsafe import Markup

    return environment.get_template(template).render(
        audit=audit,
        most=SHOWN,
        measures=measure_rows(audit),
        remedies=remedy_rows(audit),
        described=described(audit),
        figure=Markup(_figure(audit)),  # noqa: S704 - numbers and our own words
    )


def _cleaned(value: Any) -> Any:
    """Return text without control characters: answers and documents are not trusted."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _figure(audit: Audit) -> str:
    """Return the accuracies and net sensitivity with their intervals as inline SVG, described in words."""
    rows = [
        (name.replace("_", " "), estimate)
        for name, estimate in audit.measures.items()
        if name in {"accuracy_today", "accuracy_over_orders", "worst_slot", "net_sensitivity"}
    ]
    left, width, step = 170, 420, 26
    height = step * len(rows) + 30
    what = "; ".join(f"{name} {percent(each)}" for name, each in rows)
    parts = [f'<svg role="img" viewBox="0 0 640 {height}" width="100%"><title>{what}</title>']
    for share in (0, 0.25, 0.5, 0.75, 1):
        x = left + width * share
        parts.append(f'<line class="axis" x1="{x}" x2="{x}" y1="0" y2="{height - 22}"/>')
        parts.append(f'<text x="{x}" y="{height - 6}" text-anchor="middle">{share:.0%}</text>')
    for number, (name, each) in enumerate(rows):
        y = step * number + 14
        low, value, high = (left + width * min(1.0, max(0.0, one)) for one in (each.low, each.value, each.high))
        parts.append(f'<text x="0" y="{y + 4}">{name}</text>')
        parts.append(f'<line class="mark" x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke-width="2"/>')
        parts.append(f'<circle class="mark" cx="{value:.1f}" cy="{y}" r="4"/>')
    return "".join([*parts, "</svg>"])


def _csv(audit: Audit) -> str:
    """Return a row for each call of the screen. Cells that a spreadsheet would run as a formula begin with a quote."""
    text = io.StringIO()
    rows = csv.writer(text)
    rows.writerow(["id", "question", "gold", "call", "order", "answer", "outcome", "flips", "tokens", "seconds"])
    for each in audit.asked:
        question = each.question
        for (name, order, answer, outcome), said in zip(each.rows, each.answers, strict=True):
            cells = [question.id, question.text, " | ".join(question.answers), name, order, answer, outcome]
            rows.writerow([*map(_cell, cells), each.flips, said.tokens, round(said.seconds, 3)])
    return text.getvalue()


def _cell(value: str) -> str:
    return f"'{value}" if value[:1] in {"=", "+", "-", "@"} else value
