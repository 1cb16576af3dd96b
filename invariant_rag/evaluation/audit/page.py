"""The report of an audit as one HTML file, which works without a server and on a phone."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from invariant_rag.evaluation.audit.measures import ABOUT
from invariant_rag.evaluation.audit.report_text import CAPTIONS, NOTES, TITLE, differences, opening, summary, table

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.result import Audit

NARROW = "(max-width: 40rem)"
"""Media query of a phone; `page.css` and `page.js` have it too."""

_COLUMNS = (
    ("id", "id"),
    ("question", "question"),
    ("today", "today"),
    ("accuracy", "mean over orders"),
    ("worst", "worst order"),
    ("flips", "flips"),
)


def html_report(audit: Audit, images: Mapping[str, tuple[bytes, bytes]]) -> str:
    """Return the page of an audit, with its plots and every question in it.

    Args:
        audit: The audit.
        images: Its plots by name, as PNG: for a wide screen, and for a narrow one.
    """
    names, rows = table(audit)
    about = {key.replace("_", " "): text for key, text in ABOUT.items()}
    parts = [
        f"<h1>{escape(TITLE)}</h1>",
        f'<section class="advice">{_opening(audit)}</section>',
        _facts(audit),
        *(
            f"<h2>{escape(question)}</h2><ul>{''.join(f'<li>{escape(each)}</li>' for each in answers)}</ul>"
            for question, answers in audit.advice.sections[:-1]
        ),
        "<h2>Plots</h2>",
        *(
            f'<figure><picture><source media="{NARROW}" srcset="{_as_url(narrow)}"><img alt="{name}" '
            f'src="{_as_url(wide)}"></picture><figcaption>{escape(CAPTIONS[name])}</figcaption></figure>'
            for name, (wide, narrow) in images.items()
        ),
        _questions(),
        f"<h2>Measures, with 95% intervals</h2>{_table(['', *names], rows, about)}",
    ]
    if audit.measured[1:]:
        parts.append(f"<h2>Differences from the system as it is</h2>{_table(['', *names[1:]], differences(audit), {})}")
    parts += ["<h2>Notes</h2>", *(f'<p class="note">{escape(note)}</p>' for note in NOTES)]
    here = files("invariant_rag.evaluation.audit")
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>{escape(TITLE)}</title><style>{here.joinpath('page.css').read_text()}</style></head><body>"
        f"{''.join(parts)}"
        f'<script type="application/json" id="asked">{_embedded(audit)}</script>'
        f"<script>{here.joinpath('page.js').read_text()}</script></body></html>\n"
    )


def _as_url(image: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(image).decode()}"


def _embedded(audit: Audit) -> str:
    """Return the questions as JSON that cannot end its script element, whatever a document contains."""
    # ASCII only: an answer may hold half a surrogate pair.
    text = json.dumps([each.as_dict() for each in audit.asked], allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _facts(audit: Audit) -> str:
    facts = {
        "System": audit.system,
        "Date": audit.date.replace("T", " ").replace("+00:00", " UTC"),
        "Versions": ", ".join(f"{name} {version}" for name, version in audit.versions.items()),
        "Asked": summary(audit),
    }
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{escape(text)}</dd>' for name, text in facts.items())}</dl>"


def _opening(audit: Audit) -> str:
    return "".join(f"<p><small>{title}</small>{escape(text)}</p>" for title, text in opening(audit))


def _questions() -> str:
    head = "".join(f'<th><button data-key="{key}">{name}</button></th>' for key, name in _COLUMNS)
    return (
        "<h2>Every question</h2>"
        '<p class="note">Click a question for its documents and answers, and a heading to sort.</p>'
        '<div class="controls"><input id="search" type="search" placeholder="Search" aria-label="Search">'
        '<select id="show" aria-label="Show"><option value="all">all</option>'
        '<option value="flips">with a flip</option><option value="wrong">wrong today</option>'
        '<option value="failed">with failed calls</option></select>'
        '<button id="export">Export as CSV</button><span id="count"></span></div>'
        f'<div class="scroll"><table id="questions"><thead><tr>{head}</tr></thead><tbody></tbody></table></div>'
        '<p><button id="more"></button></p>'
    )


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], about: Mapping[str, str]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in header)
    body = "".join(
        f'<tr><td class="text">{escape(name)}<small>{escape(about.get(name, ""))}</small></td>'
        + "".join(f"<td>{_two_lines(cell)}</td>" for cell in cells)
        + "</tr>"
        for name, *cells in rows
    )
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _two_lines(cell: str) -> str:
    """Put a number above its interval, which keeps wide tables on the page."""
    value, bracket, rest = cell.partition(" [")
    return escape(value) + (f"<small>[{escape(rest)}</small>" if bracket else "")
