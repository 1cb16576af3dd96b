"""Write the report of an audit: a self-contained HTML file, and a Markdown file with its plots beside it."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING

from invariant_rag.evaluation.audit.measures import ABOUT
from invariant_rag.files import make_folder, write_file

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit.auditing import Audit
    from invariant_rag.evaluation.audit.measures import RemedyMeasures

_CAPTIONS = {
    "slots": "Accuracy by the slot of the gold document, with 95% intervals. Left: the slot in the input, which "
    "matters only to a system that keeps the order of its input. Right: the slot in salted canonical orders. A method "
    "that sorts is flat on the left, and a fair one on the right as well.",
    "flips": "Each question's probability that two random orders give different answers.",
    "cost": "Seconds per answer against accuracy in the worst order. Filled: the worst input order; hollow: the worst "
    "salted canonical order, where that was measured.",
}

# Markdown inside a line, and the bare addresses that GitHub links; each character may stand behind a backslash.
_MARKUP = re.compile(r"[\\`*_\[\]()#!|~:@]|(?<=www)\.", re.IGNORECASE)

_NOTES = (
    (
        "Invariant and fair are two things. Sorting makes every input order the same call, so nothing flips; but the "
        "gold document still lands in some slot, and accuracy may depend on which. Only the salted measures show that."
    ),
    (
        "Salted canonical orders sort the documents by a hash of salt and content. A black-box system may re-sort its "
        "input: prefixing each document with its salted hash moves it even then."
    ),
    (
        "Studies disagree on how much order matters: with real retrievers its effect on mean accuracy can be marginal "
        "(arXiv 2505.15561), while single answers change often (arXiv 2601.02993). This report is about these "
        "questions and this system only."
    ),
    (
        "Intervals are 95% percentile intervals of a bootstrap over questions, paired between the columns. They do not "
        "correct for looking at several measures."
    ),
)

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 72rem; margin: 2rem auto;
       padding: 0 1.5rem; }
h1 { font-size: 1.7rem; } h2 { font-size: 1.25rem; margin-top: 2.2rem; }
.advice { border-left: 6px solid #0072b2; background: #f2f7fb; padding: .6rem 1.2rem; }
.advice p { font-weight: 600; font-size: 1.1rem; margin: .4rem 0; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { padding: .35rem .7rem; border-bottom: 1px solid #ddd; text-align: right; vertical-align: top; }
th:first-child, td:first-child { text-align: left; } td { white-space: nowrap; }
td.text { white-space: normal; text-align: left; }
small { color: #555; display: block; } img { max-width: 100%; height: auto; } figure { margin: 1rem 0; }
figcaption, .note { color: #444; font-size: .92rem; }
"""


def write_report(audit: Audit, folder: str | Path) -> None:
    """Write `report.html`, which is self-contained, and `report.md` with `plots/` into a folder."""
    from invariant_rag.evaluation.audit.plots import draw

    target = Path(folder)
    images = draw(audit)
    plots = make_folder(target / "plots")
    for name, image in images.items():
        write_file(plots / f"{name}.png", image)
    shown = [name for name in _CAPTIONS if name in images]
    pages = {"html": _html(audit, {name: images[name] for name in shown}), "md": _markdown(audit, shown)}
    for kind, page in pages.items():  # an answer may contain half of a surrogate pair
        write_file(target / f"report.{kind}", page.encode("utf-8", errors="replace"))


def table(audit: Audit) -> tuple[list[str], list[list[str]]]:
    """Return the names of the remedies, and a row of cells for every measure that one of them has."""
    rows = []
    for name in ABOUT:
        cells = [_cell(each, name) for each in audit.measured]
        if any(cells):
            rows.append([name.replace("_", " "), *cells])
    return [each.name for each in audit.measured], rows


def summary(audit: Audit) -> str:
    """Return a sentence or two on how much was asked."""
    text = (
        f"{audit.complete} of {audit.questions} questions were asked in full, with {audit.calls} different calls; "
        f"accuracy is {audit.metric}, seed {audit.design.seed}."
    )
    if audit.unasked:
        text += (
            f" The budget left {audit.unasked} calls unasked: {audit.questions - audit.complete} questions are not in "
            "these numbers. Start the audit again to go on."
        )
    if audit.out_of_slots:
        text += (
            f" {audit.out_of_slots} of them have no gold document, or too few documents for {audit.design.slots} "
            "slots, and are not in the accuracy by slot."
        )
    return text


def _cell(measured: RemedyMeasures, name: str) -> str:
    estimate = measured.measures.get(name)
    if estimate is None:
        return ""
    digits = 1 if name in {"calls", "tokens"} else 3
    value, low, high = (f"{each:.{digits}f}" for each in (estimate.value, estimate.low, estimate.high))
    return value if low == high == value else f"{value} [{low}, {high}]"


def _versus(audit: Audit) -> list[list[str]]:
    """Return the rows of paired differences from the system as it is, of the measures that `advise` uses."""
    rows = []
    for name in ("flip_rate", "sensitivity", "psr", "expected_accuracy", "worst", "salted_worst", "salted_spread"):
        estimates = [each.versus.get(name) for each in audit.measured[1:]]
        if any(estimates):
            cells = (f"{e.value:+.3f} [{e.low:+.3f}, {e.high:+.3f}]" if e else "" for e in estimates)
            rows.append([name.replace("_", " "), *cells])
    return rows


def _markdown(audit: Audit, images: Sequence[str]) -> str:
    names, rows = table(audit)
    parts = [
        "# Does the order of the documents matter?",
        f"System: {_one_line(audit.system)}",
        summary(audit),
        f"**{audit.advice.headline}**",
        "\n".join(f"- {_one_line(each)}" for each in audit.advice.reasons),
        "## Measures",
        "Each with its 95% interval.",
        _markdown_table(["", *names], rows),
    ]
    if audit.measured[1:]:
        parts += ["## Differences from the system as it is", _markdown_table(["", *names[1:]], _versus(audit))]
    parts += [f"![{name}](plots/{name}.png)\n\n{_CAPTIONS[name]}" for name in images]
    if audit.flips:
        flips = [[_one_line(flip.question), _one_line(_answers(flip.answers))] for flip in audit.flips]
        parts += ["## Questions that change most", _markdown_table(["question", "answers"], flips)]
    parts += [
        "## What the measures mean",
        "\n".join(f"- {key.replace('_', ' ')}: {text}" for key, text in ABOUT.items()),
    ]
    parts += ["## Notes", "\n".join(f"- {note}" for note in _NOTES)]
    return "\n\n".join(parts) + "\n"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _one_line(text: str) -> str:
    """Escape text for a line or a table cell: it cannot end the row or become markup, whatever a document contains."""
    return escape(_MARKUP.sub(r"\\\g<0>", " ".join(text.split())), quote=False)


def _answers(answers: Sequence[tuple[str, int]]) -> str:
    shown = "; ".join(f"{count} x {shorten(text, 80) or '(nothing)'}" for text, count in answers[:5])
    return shown + (f"; and {len(answers) - 5} others" if len(answers) > 5 else "")


def _html(audit: Audit, images: dict[str, bytes]) -> str:
    names, rows = table(audit)
    about = {key.replace("_", " "): text for key, text in ABOUT.items()}
    reasons = "".join(f"<li>{escape(each)}</li>" for each in audit.advice.reasons)
    figures = "".join(
        f'<figure><img alt="{name}" src="data:image/png;base64,{base64.b64encode(image).decode()}">'
        f"<figcaption>{escape(_CAPTIONS[name])}</figcaption></figure>"
        for name, image in images.items()
    )
    versus = ""
    if audit.measured[1:]:
        versus = f"<h2>Differences from the system as it is</h2>{_html_table(['', *names[1:]], _versus(audit), {})}"
    flips = ""
    if audit.flips:
        texts = ((escape(each.question), escape(_answers(each.answers))) for each in audit.flips)
        cells = "".join(
            f'<tr><td class="text">{text}</td><td class="text">{answers}</td></tr>' for text, answers in texts
        )
        flips = f"<h2>Questions that change most</h2><table><tr><th>question</th><th>answers</th></tr>{cells}</table>"
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in _NOTES)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f"<title>Does the order of the documents matter?</title><style>{_STYLE}</style></head><body>"
        f"<h1>Does the order of the documents matter?</h1><p>System: <code>{escape(audit.system)}</code></p>"
        f"<p>{escape(summary(audit))}</p>"
        f'<section class="advice"><p>{escape(audit.advice.headline)}</p><ul>{reasons}</ul></section>'
        f"<h2>Plots</h2>{figures}"
        f"<h2>Measures, with 95% intervals</h2>{_html_table(['', *names], rows, about)}"
        f"{versus}{flips}<h2>Notes</h2>{notes}</body></html>\n"
    )


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]], about: dict[str, str]) -> str:
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
