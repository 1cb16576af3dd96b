"""Write the report of an audit: a self-contained HTML file, and a Markdown file with its plots beside it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from invariant_rag.checks import check_path
from invariant_rag.evaluation.audit.measures import ABOUT
from invariant_rag.evaluation.audit.page import html_report
from invariant_rag.evaluation.audit.report_text import CAPTIONS, NOTES, TITLE, differences, opening, summary, table
from invariant_rag.files import make_folder, write_file
from invariant_rag.shown import clean

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.result import AskedQuestion, Audit

MOST_FLIPS = 10
"""Questions with flips in the Markdown file; the page has all."""

# An interval in brackets is no link. The rest is Markdown inside a line, and what GitHub makes of bare addresses,
# names, numbers of issues, formulas and emojis; each character may stand behind a backslash. Where brackets are
# escaped, parentheses and exclamation marks are no markup; neither are underscores inside a word.
_MARKUP = re.compile(
    r"(?P<interval>\[[+-]?[\d.]+%?, [+-]?[\d.]+%?\](?![(\[:]))|"
    r"[\\`*\[\]|~@$]|(?<![^\W_])_|_(?![^\W_])|^#|#(?=\d)|:(?=//|[+-]1:|[\w+-]*[a-z][\w+-]*:)|(?<=www)\.",
    re.IGNORECASE,
)


def write_report(audit: Audit, folder: str | Path) -> None:
    """Write `report.html`, which is self-contained, and `report.md` with `plots/` into a folder."""
    from invariant_rag.evaluation.audit.plots import NARROW, draw

    target = check_path("folder", folder)
    images, narrow = draw(audit), draw(audit, NARROW)
    plots = make_folder(target / "plots")
    for name, image in images.items():
        write_file(plots / f"{name}.png", image)
    shown = [name for name in CAPTIONS if name in images]
    both = {name: (images[name], narrow[name]) for name in shown}
    pages = {"html": html_report(audit, both), "md": _markdown(audit, shown)}
    for kind, page in pages.items():
        write_file(target / f"report.{kind}", clean(page).encode())


def _markdown(audit: Audit, images: Sequence[str]) -> str:
    names, rows = table(audit)
    versions = ", ".join(f"{name} {version}" for name, version in audit.versions.items())
    parts = [
        f"# {TITLE}",
        f"System: {_one_line(audit.system)}",
        f"{_one_line(audit.date)}, {_one_line(versions)}",
        _one_line(summary(audit)),
        *(f"**{title}: {_one_line(text)}**" for title, text in opening(audit)),
    ]
    for question, answers in audit.advice.sections[:-1]:
        parts += [f"## {question}", "\n".join(f"- {_one_line(each)}" for each in answers)]
    parts += ["## Measures", "Each with its 95% interval.", _markdown_table(["", *names], rows)]
    if audit.measured[1:]:
        parts += ["## Differences from the system as it is", _markdown_table(["", *names[1:]], differences(audit))]
    parts += [f"![{name}](plots/{name}.png)\n\n{CAPTIONS[name]}" for name in images]
    if audit.flips:
        flips = [[_one_line(flip.question.text), _one_line(_answers(flip))] for flip in audit.flips[:MOST_FLIPS]]
        parts += ["## Questions that change most", _markdown_table(["question", "answers"], flips)]
    parts += [
        "## What the measures mean",
        "\n".join(f"- {key.replace('_', ' ')}: {text}" for key, text in ABOUT.items()),
    ]
    parts += ["## Notes", "\n".join(f"- {note}" for note in NOTES)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _one_line(text: str) -> str:
    """Escape text for a line or a table cell: it cannot end the row or become markup, whatever a document contains."""

    def escaped(found: re.Match[str]) -> str:
        return found[0] if found["interval"] else f"\\{found[0]}"

    return escape(_MARKUP.sub(escaped, " ".join(text.split())), quote=False)


def _answers(flip: AskedQuestion) -> str:
    """Return the answers of the system as it is, one for each input order, with their counts, as it wrote them."""
    texts = [each.text for each in flip.by_order if each.text is not None]
    answers = Counter(texts).most_common()
    shown = "; ".join(f"{count} x {shorten(text, 80) or '(nothing)'}" for text, count in answers[:5])
    return shown + (f"; and {len(answers) - 5} others" if len(answers) > 5 else "")
