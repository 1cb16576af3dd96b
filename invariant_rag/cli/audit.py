"""`invariant-rag audit`: does a system depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import options
from invariant_rag.cli.console import (
    handle_errors,
    print_error,
    print_json,
    print_note,
    print_skipped,
    print_table,
    print_text,
)
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import RetrievalError, UnsupportedCombination
from invariant_rag.files import make_folder
from invariant_rag.rag.readers import check_documents
from invariant_rag.shown import counted

if TYPE_CHECKING:
    from invariant_rag.evaluation.audit import Audit, CallEstimate
    from invariant_rag.evaluation.audit.diff import AuditDiff
    from invariant_rag.evaluation.audit.result import Reused
    from invariant_rag.generation.model import InvariantModel


class _RunByDefault(TyperGroup):
    """A group whose first word may be the questions: `audit questions.jsonl` is `audit run questions.jsonl`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the command that is meant; without any, its help."""
        named = bool(args) and args[0] in self.commands
        return super().parse_args(ctx, args if named else ["run", *(args or ["--help"])])


app = typer.Typer(
    cls=_RunByDefault, rich_markup_mode=None, help="Does the order of the documents matter, and what helps?"
)


@app.command(
    "run",
    epilog="`invariant-rag audit QUESTIONS` is `invariant-rag audit run QUESTIONS`. Two audits are compared by "
    "`invariant-rag audit diff BEFORE AFTER`; see `invariant-rag audit diff --help`.",
)
def run(
    questions: Annotated[
        Path,
        typer.Argument(
            help="Questions and their retrieved segments: .jsonl, .csv, files of ragas or promptfoo (.json, .yaml), or "
            "a folder of a saved dataset."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder for answers and report. An audit into the same folder reuses its answers.",
            show_default="needed, but for --dry-run",
        ),
    ] = None,
    model: options.Model = None,
    method: options.Method = "sequential",
    ordering: options.Ordering = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME|URL",
            help="Audit this object instead: a function, a Runnable, a query engine... Or the URL of a server with the "
            "chat completions of OpenAI (http://127.0.0.1:8000/v1); its model is --model, its key $OPENAI_API_KEY.",
        ),
    ] = None,
    docs: Annotated[
        list[Path] | None,
        typer.Option("--docs", help="Documents to retrieve from, for questions without segments. Repeatable."),
    ] = None,
    retriever: options.Retriever = "faiss",
    strict: options.Strict = False,
    k: options.TopK = 10,
    remedy: Annotated[
        list[str] | None,
        typer.Option(
            help="sort, rerank, top-3, long-context-reorder, vote, reverse, plain, or a method. Repeatable.",
            show_default="all that apply but reverse",
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="best_subspan_em, exact_match or token_f1.")] = "best_subspan_em",
    orders: Annotated[
        int, typer.Option(min=2, max=MOST_CALLS, help="Input orders of a question with more than 4 segments.")
    ] = 10,
    slots: Annotated[int, typer.Option(min=2, max=MOST_CALLS, help="Slots through which gold segments are moved.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, max=MOST_CALLS, help="How often the given order is asked.")] = 3,
    all_orders: Annotated[
        bool, typer.Option("--all-orders", help="Ask the first five segments in all 120 orders too: the measure psr.")
    ] = False,
    seed: options.Seed = 0,
    budget: Annotated[int | None, typer.Option(min=0, help="Most calls to make now.", show_default="all")] = None,
    workers: Annotated[int, typer.Option(min=1, max=MOST_CALLS, help="Threads that make calls.")] = 1,
    retries: Annotated[
        int, typer.Option(min=0, max=MOST_CALLS, help="Further tries of a failed call, with growing pauses.")
    ] = 3,
    timeout: Annotated[float | None, typer.Option(help="Seconds after which a try fails.", show_default="none")] = None,
    ray: options.Ray = 0,
    tags: Annotated[
        bool, typer.Option(help="Prefix texts with hashes in salted orders. Turn off if the --system parses its texts.")
    ] = True,
    max_new_tokens: options.MaxNewTokens = 64,
    dtype: options.DType = "auto",
    device_map: options.DeviceMap = "auto",
    overflow: options.Overflow = "error",
    name: Annotated[
        str | None,
        typer.Option(help="Name of the system. Answers stored under it are reused, whatever has changed."),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Set stored answers aside, and ask everything anew.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many calls it takes; make none, and write nothing.")
    ] = False,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help='Exit with 1 if it holds: "flip-rate>5%", "today<80%". Repeatable.'),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Ask QUESTIONS with their documents in many orders; report what changes, and what to do about it.

    Writes answers.jsonl, audit.json, report.html and report.md into the folder. An interrupted audit loses no answer:
    start it again with the same options. A line of QUESTIONS is {"question", "segments", "answers", "gold"}, the last
    two optional; a segment is a string or {"text", "title", "score"}, and gold a list of indices.

    Exit code: 0; 1 if a --fail-on condition holds; 2 for an error.
    """
    from invariant_rag.evaluation.audit.auditing import audit, estimate_calls
    from invariant_rag.evaluation.audit.conditions import Condition
    from invariant_rag.evaluation.audit.questions import parse_questions
    from invariant_rag.methods import check_method_and_ordering

    with handle_errors():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            asked = [question for _, question in parse_questions(questions)]
        if not dry_run:
            _make_out(out, ray)
        conditions = [Condition.parse(each) for each in fail_on or ()]
        _check_names(metric, remedy, docs or (), retriever)
        for warning in caught:
            print_note(f"note: {warning.message}")
        if not any(question.has_gold for question in asked):
            print_note("No gold answers: only changes can be measured.")
        generation: dict[str, Any] = {}
        if system is None:
            check_method_and_ordering(method, ordering)
            loading = {"method": method, "ordering": ordering, "dtype": dtype, "overflow": overflow}
            audited: Any = _load_model(model, device_map=device_map, **loading)
            generation = {"max_new_tokens": max_new_tokens}
        else:
            audited = _named_system(system, model)
        index = None
        if docs:
            from invariant_rag.rag.pipeline import index_documents

            skipped: list[RetrievalError] = []
            index = index_documents(docs, retriever, strict=strict, on_skipped=skipped.append)
            print_skipped(skipped)
        planned: dict[str, Any] = {
            "retriever": index,
            "k": k,
            "remedies": remedy,
            "orders": orders,
            "slots": slots,
            "repeats": repeats,
            "all_orders": all_orders,
            "seed": seed,
            "tags": tags,
            "name": name,
            **generation,
        }
        if dry_run:
            known = None if fresh else out
            _print_estimate(estimate_calls(audited, asked, out=known, workers=workers, **planned), as_json)
            return
        result = audit(
            audited,
            asked,
            metric=metric,
            workers=workers,
            actors=ray,
            retries=retries,
            timeout=timeout,
            budget=budget,
            out=out,
            fresh=fresh,
            progress=progress_bar,
            before_asking=_announce,
            **planned,
        )
        broken = [each for each in conditions if each.holds(result)]
    if as_json:
        print_json(result.as_dict())
    else:
        _print_result(result, out)
    for each in broken:
        print_error(f"{each.text} holds: {each.value(result):.1%}", "")
    if broken:
        raise typer.Exit(1)


def _check_names(metric: str, remedies: Sequence[str] | None, docs: Sequence[Path], retriever: str) -> None:
    """Check what takes no time to check, before a model is loaded."""
    from invariant_rag.evaluation.audit.answer_metrics import resolve_metric
    from invariant_rag.evaluation.audit.remedies import check_remedies
    from invariant_rag.rag.retrieval import resolve_retriever

    resolve_metric(metric)
    check_remedies(remedies)
    check_documents(docs)
    if docs:
        resolve_retriever(retriever)


def _make_out(out: Path | None, actors: int) -> None:
    """Make the folder of the report, and check that what makes it is installed."""
    from invariant_rag.evaluation.audit.auditing import check_extras

    if out is None:
        raise typer.BadParameter("--out is missing: name a folder for answers and report, or ask with --dry-run")
    make_folder(out)
    check_extras(writes=True, actors=actors)


def _announce(estimate: CallEstimate, reused: Reused) -> None:
    if str(reused):
        print_note(str(reused))
    if estimate.calls:
        print_note(f"To ask: {estimate}.")


def _print_estimate(estimate: CallEstimate, as_json: bool) -> None:
    if as_json:
        print_json(estimate.__dict__)
        return
    known = f" Answered already: {counted(estimate.answered, 'call')}." if estimate.answered else ""
    print_text(f"To ask: {estimate}.{known} Nothing was asked.")


def _print_result(result: Audit, out: Path | None) -> None:
    from invariant_rag.evaluation.audit.report_text import opening, summary, table

    for title, text in opening(result):
        print_text(f"{title}: {text}", style="bold")
    for question, answers in result.advice.sections[:-1]:
        print_text(f"\n{question}", style="bold")
        for answer in answers:
            print_text(f"- {answer}")
    names, rows = table(result)
    print_text("")
    print_table([dict(zip(["measure", *names], row, strict=True)) for row in rows], as_json=False)
    print_text(f"\n{summary(result)}", style="dim")
    if out is not None:
        print_text(f"Report: {out / 'report.html'}", style="dim")


@app.command("diff")
def diff(
    before: Annotated[Path, typer.Argument(help="Folder of an audit.")],
    after: Annotated[Path, typer.Argument(help="Folder of another audit of the same questions.")],
    as_json: options.Json = False,
) -> None:
    """Compare two audits question by question: what got better, what got worse, and is that more than noise?"""
    from invariant_rag.evaluation.audit.diff import diff_audits

    with handle_errors():
        found = diff_audits(before, after)
    if as_json:
        print_json(found.as_dict())
    else:
        _print_diff(found)


def _print_diff(found: AuditDiff) -> None:
    apart = f"; {found.only_before} only before, {found.only_after} only after" * bool(
        found.only_before + found.only_after
    )
    print_text(f"{found.before} -> {found.after}\n{counted(found.common, 'question')} of both{apart}.\n")
    rows = [
        {
            "measure": each.measure.replace("_", " "),
            "before": str(each.before),
            "after": str(each.after),
            "difference": str(each.difference),
            "p": "< 0.001" if each.p < 0.001 else f"{each.p:.3f}",
        }
        for each in found.changes
    ]
    print_table(rows, as_json=False)
    listed = {
        "right now, wrong before": found.fixed,
        "wrong now, right before": found.broken,
        "no longer flips": found.steadied,
        "flips now": found.unsettled,
    }
    for what, asked in listed.items():
        if asked:
            print_text(f"\n{what}: {len(asked)}", style="bold")
            for each in asked[:10]:
                print_text(f"- {each}")


def _load_model(model: str | None, **loading: Any) -> InvariantModel:
    with progress_bar("Loading model"):
        from invariant_rag.generation.model import InvariantModel

        disable_transformers_bars()
        return InvariantModel.from_pretrained(model, **loading)


def _named_system(system: str, model: str | None) -> Any:
    """Return the system that --system names: an object, or a server with the model of --model."""
    if system.startswith(("http://", "https://")):
        from invariant_rag.evaluation.audit import Endpoint

        return Endpoint(system, model)
    if model is not None:
        raise UnsupportedCombination("--system and --model are two systems")
    return _import_object(system)


def _import_object(name: str) -> Any:
    """Import the object that `MODULE:NAME` names, from the current folder if it is there."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return pkgutil.resolve_name(name)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise UnsupportedCombination(
            f"--system {name}: {type(error).__name__}: {error}",
            hint="Give MODULE:NAME of an object that can be imported from here.",
        ) from error
