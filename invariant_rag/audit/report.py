"""What follows from an audit, in sentences and tables; its pages, CSV and JSON; and conditions that fail a build."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.grading import RIGHT, SAME_MEANING
from invariant_rag.audit.result import ABOUT
from invariant_rag.audit.run_folder import RESULT
from invariant_rag.audit.sequential_test import CALLS
from invariant_rag.errors import InvalidChoice, ToyModelWarning
from invariant_rag.files import encode_json, write_file
from invariant_rag.shown import clean, counted, shown

if TYPE_CHECKING:
    from invariant_rag.audit.result import Audit, Comparison
    from invariant_rag.audit.statistics import Estimate

SHOWN = 100  # most questions on a page; those that flip come first
LONG_GOLD = 12  # words of a gold answer that no answer is likely to repeat
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>|#~&])")


def percent(estimate: Estimate) -> str:
    """Return an estimate in per cent, with its interval, such as `25.0% [20.0%, 31.0%]`."""
    return f"{estimate.value:.1%} [{estimate.low:.1%}, {estimate.high:.1%}]"


def points(estimate: Estimate, unit: str = " points") -> str:
    """Return a difference, with its interval."""
    value, low, high = (f"{100 * each:+.1f}" for each in (estimate.value, estimate.low, estimate.high))
    return f"{value}{unit} [{low}, {high}]"


def p_value(p: float) -> str:
    """Return a p-value as people write it."""
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}"


def advise(audit: Audit) -> list[tuple[str, str]]:
    """Return title and text of each paragraph that a report begins with."""
    paragraphs = [("Finding", _finding(audit)), ("Today", _today(audit)), ("Recommendation", _recommendation(audit))]
    paragraphs += [("First call", audit.sent)] if audit.screen.alike else []
    toy = [f"This audit was {ToyModelWarning()}"] if audit.toy else []
    notes = " ".join([*toy, *_about_grading(audit), *_about_calls(audit)])
    return [*paragraphs, ("To know", notes)] if notes else paragraphs


def _finding(audit: Audit) -> str:
    screen, margin = audit.screen, 100 * audit.screen.margin
    asked = counted(screen.asked, "question")
    early = f" The audit stopped after {asked} of {audit.planned:,}." if screen.asked < audit.planned else ""
    differ = f"between orders {screen.between:.1%} of the outcomes differ, in one order {screen.within:.1%}"
    measured = f"{differ}, net sensitivity {points(screen.net)} ({p_value(screen.p)}, {asked})."
    if screen.outcome == "order matters":
        return f"The order matters: {measured}{early}"
    if screen.outcome == "order does not matter":
        net = f"net sensitivity is {100 * screen.net.value:+.1f} points, and below {100 * screen.bound:.1f}"
        return f"The order does not matter: {net} with 95% confidence; the margin is {margin:g} ({asked}).{early}"
    if screen.alike:
        alike = f"all answers are the same, with other texts in the documents, too ({asked})"
        return f"Cannot tell yet: {alike}. A system that does not read its documents answers like that."
    if not screen.more:
        return f"Cannot tell yet: answers change, and none is right in any order ({asked})."
    more = f"{screen.more:,} questions more, {counted(CALLS * screen.more, 'call')}"
    return f"Cannot tell yet: {measured} Ask about {more}, or set a wider margin than {margin:g} points."


def _today(audit: Audit) -> str:
    measures = audit.measures
    if "accuracy_today" not in measures:
        return "No gold answers are known, so no answer is right or wrong: only what changes was measured."
    today, orders, worst = measures["accuracy_today"], measures["accuracy_over_orders"], measures.get("worst_slot")
    slot = f"; with the answer in the worst part of the prompt {percent(worst)}" if worst else ""
    others = f"in random orders {percent(orders)}{slot}"
    return f"In the order that your retriever gives, {percent(today)} of the answers are right; {others}."


def _recommendation(audit: Audit) -> str:
    """Return the one thing to do: look at the call, use a remedy, leave it, or ask more questions."""
    compared = sorted(((each.gain, each) for each in audit.comparisons if each.gain), key=lambda pair: -pair[0].value)
    if audit.screen.alike:
        answer = shown(audit.asked[0].answers[0].text)
        return f"Look at the call first, below: every answer was the same, {answer}. Does it hold the documents?"
    if compared and compared[0][1].is_better:
        return f"Use {_named(*compared[0])}."
    if audit.screen.outcome == "order does not matter":
        return "Leave it: change nothing for the sake of the order."
    if not audit.screen.more and audit.screen.outcome == "cannot tell yet":
        return "Look at answers.csv first: do gold answers say what answers say? If they do, grade with --judge."
    if audit.screen.outcome == "cannot tell yet":
        return f"Decide nothing yet: ask about {audit.screen.more:,} questions more."
    return _where_it_matters(audit, compared, audit.choices.margin)


def _where_it_matters(audit: Audit, compared: Sequence[tuple[Estimate, Comparison]], margin: float) -> str:
    """Return what to do where no remedy was shown to be right more often."""
    safe = [(gain, each) for gain, each in compared if each.fixes and gain.low > -margin]
    if safe:
        steadiest = max(safe, key=lambda pair: pair[0].low)
        return f"For steadier answers use {_named(*steadiest)}, no loss beyond the margin."
    if not compared:
        how = "name some (--remedy)" if audit.scored else "that takes gold answers"
        always = "`sort` gives every order the same answer, at no cost but perhaps accuracy."
        return f"The order matters, and no remedy was compared: {how}. {always}"
    listed = "; ".join(f"{each.name} {points(gain)}" for gain, each in compared)
    if all(gain.high < margin for gain, _ in compared):
        leave = "Leave it" if "vote" in {each.name for _, each in compared} else "Leave it, or try --remedy vote"
        return f"{leave}: no remedy that was compared gains {100 * margin:g} points. Against today: {listed}."
    return f"Cannot tell yet which remedy helps: ask more questions. Against today: {listed}."


def _named(gain: Estimate, each: Comparison) -> str:
    """Return what a remedy is, and what it gains."""
    fixes = "; the order in which documents arrive then changes nothing" if each.fixes else ""
    return f"`{each.name}` ({each.about}{fixes}): {points(gain)} of accuracy against today ({p_value(each.p)})"


def _about_grading(audit: Audit) -> list[str]:
    """Return what a right answer is, and how far that can be trusted."""
    sentences, judge, metric, scored = [], audit.judge, audit.choices.metric, audit.scored
    if scored and judge is None:
        name = getattr(metric, "__name__", "the metric")
        how = f"{name} gives it at least 0.5" if metric else "it gives a gold answer, as whole tokens"
        sentences.append(f"An answer is right if {how}.")
        long = sum(all(len(gold.split()) >= LONG_GOLD for gold in each.question.answers) for each in scored)
        if 2 * long > len(scored) and metric is None:
            sentences.append("Most gold answers are whole sentences, which no answer repeats: grade with --judge.")
    if scored and not any(RIGHT in each.classes for each in scored):
        sentences.append("No answer was right: do gold answers say what answers say? See answers.csv, or use --judge.")
    if len(scored) < len(audit.asked):
        how = f"by embeddings, from a similarity of {SAME_MEANING} on" if audit.embeds else "only if their words are"
        sentences.append(f"Without gold answers, two answers count as the same {'by the judge' if judge else how}.")
    if judge is None:
        unused = sum(bool(each.question.rubrics) for each in audit.asked)
        note = f"{counted(unused, 'question')} with checks that take a judge: without --judge, they were not made."
        return [*sentences, note] if unused else sentences
    sentences.append(f"The judge was asked {judge.calls:,} times.")
    if judge.pairs:
        sentences.append(f"Asked in both orders, it contradicted itself on {judge.divided:,} of {judge.pairs:,} pairs.")
    if judge.errors is not None:
        sentences.append(f"It misses {percent(judge.errors)} of the verdicts that are known.")
    return sentences


def _about_calls(audit: Audit) -> list[str]:
    notes, screen, errors = [], audit.screen, audit.measures["errors"]
    if not screen.repeated and screen.within:
        changed = f"{screen.within:.1%} of the outcomes change with a space that cannot matter"
        hides = "a cache or a fixed seed hides noise, or a space is enough; it was counted as noise"
        notes.append(f"Equal calls came back equal, but {changed}: {hides}.")
    if errors.value:
        notes.append(f"Of the calls, {percent(errors)} failed after all retries: {audit.errors[-1]}")
    if audit.unordered:
        notes.append(f"{counted(audit.unordered, 'question')} with fewer than two different documents were not asked.")
    return notes


_BOUND = re.compile(r"\s*net-sensitivity\s*>\s*(\d{1,3}(?:\.\d+)?)\s*%\s*")


@dataclass(frozen=True)
class Gate:
    """A condition that fails a build: the order matters (no bound), or net sensitivity is above a bound, a share."""

    text: str
    bound: float | None = None

    @classmethod
    def parse(cls, text: str) -> Gate:
        """Parse a condition: `order-matters`, or one such as `net-sensitivity>5%`."""
        matched = _BOUND.fullmatch(text)
        if not matched and text.strip() != "order-matters":
            expected = "order-matters, or a bound such as net-sensitivity>5%"
            hint = "A flip rate or an accuracy is no gate: it moves with noise. The measures are in audit.json."
            raise InvalidChoice(f"fail-on: expected {expected}, got {text!r}", hint=hint)
        return cls(text, float(matched[1]) / 100 if matched else None)

    def holds(self, audit: Audit) -> bool:
        """Return whether it holds beyond doubt: the whole interval is above the bound."""
        return audit.order_matters if self.bound is None else audit.screen.net.low > self.bound


def write_report(audit: Audit, folder: Path) -> None:
    """Write audit.json, answers.csv, report.html and report.md."""
    write_file(folder / RESULT, encode_json(audit.as_dict(), indent=1, default=str) + b"\n")
    pages = {"answers.csv": _csv(audit)} | {name: _page(audit, f"{name}.j2") for name in ("report.html", "report.md")}
    for name, text in pages.items():
        write_file(folder / name, text.encode("utf-8", "backslashreplace"))


def measure_rows(audit: Audit) -> list[tuple[str, str, str]]:
    """Return name, value and meaning of each measure that is known."""
    special = {"calls": lambda each: f"{each.value:g}", "net_sensitivity": points}
    known = [(name, about) for name, about in ABOUT.items() if name in audit.measures]
    return [(name.replace("_", " "), special.get(name, percent)(audit.measures[name]), about) for name, about in known]


def remedy_rows(audit: Audit) -> list[tuple[str, str, str, str]]:
    """Return name, accuracy, gain and p-value of each remedy."""
    return [
        (each.name, percent(each.accuracy), points(each.gain, ""), p_value(each.p))
        if each.accuracy and each.gain
        else (each.name, "", "", "")
        for each in audit.comparisons
    ]


def _page(audit: Audit, template: str) -> str:
    from jinja2 import Environment, PackageLoader, select_autoescape

    def cleaned(value: Any) -> Any:  # answers and documents are not trusted
        return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value

    loader = PackageLoader("invariant_rag.audit", "pages")
    environment = Environment(loader=loader, autoescape=select_autoescape(["html.j2"]), keep_trailing_newline=True)
    environment.finalize = cleaned
    environment.filters["listed"] = _listed
    environment.filters["md"] = lambda text: _SPECIAL.sub(r"\\\1", " ".join(clean(str(text)).split()))
    tables = {"measures": measure_rows(audit), "remedies": remedy_rows(audit)}
    return environment.get_template(template).render(audit=audit, most=SHOWN, percent=percent, **tables)


def _listed(order: Sequence[int]) -> str:  # as people count, from 1
    return " ".join(str(place + 1) for place in order)


def _csv(audit: Audit) -> str:
    """Return a row for each call of the screen. Cells that a spreadsheet would run as a formula begin with a quote."""
    rows = csv.writer(text := io.StringIO())
    rows.writerow(["id", "question", "gold", "call", "order", "answer", "outcome", "flips", "tokens", "seconds"])
    for each in audit.asked:
        about = (each.question.id, each.question.text, " | ".join(each.question.answers))
        for (name, order, answer, outcome), said in zip(each.rows, each.answers, strict=True):
            cells = [*about, name, _listed(order), answer, outcome]
            quoted = [f"'{cell}" if cell[:1] in {"=", "+", "-", "@"} else cell for cell in cells]
            rows.writerow([*quoted, each.flips, said.tokens, round(said.seconds, 3)])
    return text.getvalue()
