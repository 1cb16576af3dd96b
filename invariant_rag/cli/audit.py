"""`invariant-rag audit`: does the order of its documents matter to a system, by how much, and what helps?"""

from __future__ import annotations

import pkgutil
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.audit.calls import Endpoint, is_url
from invariant_rag.audit.plan import AuditChoices
from invariant_rag.cli import console, options
from invariant_rag.cli.progress import load_with_progress, progress_bar
from invariant_rag.errors import FieldWarning, InvalidChoice, ToyModelWarning, UnsupportedCombination
from invariant_rag.files import make_folder
from invariant_rag.models.hub import check_model
from invariant_rag.rag.documents import check_documents
from invariant_rag.shown import counted

if TYPE_CHECKING:
    from invariant_rag.audit import Audit
    from invariant_rag.audit.report import Gate


@options.with_fields(AuditChoices)
def audit(
    questions: Annotated[
        Path | None,
        typer.Argument(
            help="Questions and their retrieved segments: .jsonl, .csv, .xlsx, .parquet, or files of ragas, promptfoo, "
            "deepeval or inspect (.json, .yaml).",
            show_default="those of --resume",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="New folder for the answers and the report.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Continue the audit in this folder: same questions, orders and name.")
    ] = None,
    model: options.Model = None,
    method: options.Method = "sequential",
    ordering: options.Ordering = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME|URL",
            help="Audit this object instead: a function, a Runnable, an agent, a query engine... Or the URL of a "
            "server with the chat completions of OpenAI (http://127.0.0.1:8000/v1); its model is --model, its key "
            "$OPENAI_API_KEY.",
        ),
    ] = None,
    docs: Annotated[
        list[Path] | None, typer.Option("--docs", help="File or folder: .txt, .md, .jsonl, .pdf. Repeatable.")
    ] = None,
    retriever: options.Retriever = "bm25",
    strict: options.Strict = False,
    max_new_tokens: options.MaxNewTokens = 64,
    dtype: options.DType = "auto",
    device_map: options.DeviceMap = "auto",
    overflow: options.Overflow = "error",
    name: Annotated[str | None, typer.Option(help="Name of the system in the report.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many calls it takes; make none, and write nothing.")
    ] = False,
    fail_on: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CONDITION",
            help='Exit with 1 if it holds beyond doubt: order-matters, or "net-sensitivity>5%". Repeatable.',
        ),
    ] = None,
    as_json: options.Json = False,
    **choices: Any,
) -> None:
    """Ask QUESTIONS with their documents in several orders: does the order matter, and what helps?

    The screen asks each question five times, and stops as soon as it is clear. Where the order matters, remedies are
    compared with today. Writes audit.json, answers.csv, report.html and report.md into the folder. A line of QUESTIONS
    is {"question", "segments", "answers", "gold"}, the last two optional; a segment is a string or {"text", "title",
    "score"}, and gold a list of indices.

    Exit code: 0; 1 if a --fail-on condition holds; 2 for an error.
    """
    from invariant_rag.audit.report import Gate
    from invariant_rag.audit.run import audit as run_audit
    from invariant_rag.audit.run import check_extras
    from invariant_rag.audit.run_folder import make_new_folder, read_run
    from invariant_rag.rag.retrieval import index_documents, resolve_retriever

    with console.handle_errors(), _warnings_as_notes():
        chosen = _parsed_choices(choices)
        if (resume is None) == (questions is None):
            raise typer.BadParameter("name a file of QUESTIONS, or continue an audit with --resume, which has its own")
        if docs:
            resolve_retriever(retriever)
        check_documents(docs or ())
        gates = [Gate.parse(each) for each in fail_on or ()]
        parsed = read_run(resume)[2] if resume is not None else _parse(questions, chosen.fields)
        if dry_run:
            console.print_json({"questions": len(parsed)}) if as_json else console.print_text(
                _most_calls(len(parsed), chosen.remedies)
            )
            return
        if resume is None:
            if out is None:
                raise typer.BadParameter("--out is missing: name a folder for the report, or ask with --dry-run")
            make_new_folder(make_folder(out))
            with suppress(OSError):  # what fails before the first call leaves no empty folder
                out.rmdir()
        check_extras()
        audited = _checked_system(system, model, chosen.judge, method, ordering, device_map)
        index = index_documents(docs, retriever, strict=strict, on_skipped=console.print_skipped) if docs else None
        if system is None:
            loading = {"method": method, "ordering": ordering, "dtype": dtype, "overflow": overflow}
            audited = load_with_progress(model, device_map=device_map, **loading)
            chosen = chosen.changed({"generation": {"max_new_tokens": max_new_tokens}})
        if chosen.judge is not None and not is_url(chosen.judge):
            chosen = chosen.changed({"judge": load_with_progress(chosen.judge, method="rotor")})
        try:
            display: dict[str, Any] = {"progress": progress_bar, "on_step": console.print_note}
            new = None if resume is not None else parsed
            result = run_audit(audited, new, chosen, retriever=index, out=out, resume=resume, name=name, **display)
        except KeyboardInterrupt:
            console.print_note(f"\nInterrupted. The answers so far are stored: continue with --resume {resume or out}.")
            raise
        broken = [each for each in gates if each.holds(result)]
    _print(result, resume or out, broken, as_json=as_json)
    if broken:
        raise typer.Exit(1)


def _checked_system(system: str | None, model: str | None, judge: str | None, *choices: Any) -> Any:
    """Check the judge, and the system or the model; return the system. None: a model, which is loaded last."""
    if is_url(judge):
        _ = Endpoint(str(judge)).served  # it lists a model
    else:
        check_model(judge)
    if system is not None:
        return _named_system(system, model)
    options.check_model_options(model, *choices)
    if model is None:
        console.print_warning(str(ToyModelWarning()))
    return None


def _most_calls(questions: int, remedies: Sequence[str] | None) -> str:
    from invariant_rag.audit.plan import most_calls
    from invariant_rag.audit.run import PROBED
    from invariant_rag.audit.sequential_test import CALLS

    extra = "remedies only if the order matters, 2 calls a question each"
    if remedies is not None:
        listed = ", ".join(remedies)
        extra = f"{listed}, at most {most_calls(remedies)} calls a question" if remedies else "no remedies"
    return (
        f"The screen takes at most {counted(CALLS * questions, 'call')} ({CALLS} a question, and "
        f"{PROBED} more where all answers are one), and stops early where it can; then {extra}."
    )


def _parsed_choices(values: Mapping[str, Any]) -> AuditChoices:
    """Return choices as the options give them, with those that are repeatable in the form of a choice."""
    pairs = [each.partition("=") for each in values["fields"] or ()]
    if any(not theirs for _, _, theirs in pairs):
        raise InvalidChoice("--field: expected OURS=YOURS, such as question=frage")
    remedies = None if values["remedies"] is None else tuple(values["remedies"])
    return AuditChoices(**{**values, "fields": {ours: theirs for ours, _, theirs in pairs}, "remedies": remedies})


def _parse(questions: Path | None, fields: Mapping[str, str]) -> list[Any]:
    """Return the questions of a file, and say what is odd about them."""
    from invariant_rag.audit.questions import parse_questions

    parsed = parse_questions(str(questions), fields)
    if not any(question.answers or question.rubrics for question in parsed):
        console.print_note("No gold answers: only changes can be measured.")
    return parsed


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print warnings about questions, with what to do, and of a toy."""
    with warnings.catch_warnings():
        for kind in (FieldWarning, ToyModelWarning):
            warnings.simplefilter("always", kind)
        others = warnings.showwarning

        def show(message: Warning | str, *where: Any) -> None:
            if isinstance(message, FieldWarning):
                console.print_note(f"note: {str(message).removesuffix('.')}. {message.hint}")
            elif isinstance(message, ToyModelWarning):
                console.print_warning(str(message))
            else:
                others(message, *where)

        warnings.showwarning = show  # type: ignore[assignment]
        yield


def _print(result: Audit, folder: Path | None, broken: Sequence[Gate], *, as_json: bool) -> None:
    """Print one screen: the answer, the measures, the remedies."""
    from invariant_rag.audit.report import measure_rows, remedy_rows

    if as_json:
        console.print_json(result.as_dict())
    else:
        for title, text in result.advice:
            console.print_text(f"{title}: {text}", style="bold" if title in {"Finding", "Recommendation"} else "")
        console.print_text("")
        measures = [{"measure": name, "value": value} for name, value, _ in measure_rows(result)]
        console.print_table(measures, as_json=False)
        if result.comparisons:
            console.print_text("")
            names = ("remedy", "accuracy", "gain, points", "significance")
            console.print_table([dict(zip(names, row, strict=True)) for row in remedy_rows(result)], as_json=False)
        report = folder and folder / "report.html"
        console.print_text(f"\n{counted(result.calls, 'call')}. Report: {report}", style="dim")
    for each in broken:
        console.print_error(f"--fail-on {each.text} holds", "")


def _named_system(system: str, model: str | None) -> Any:
    """Return the system that --system names: a server with the model of --model, or an object, imported from here."""
    if is_url(system):
        return Endpoint(system, model)
    if model is not None:
        raise UnsupportedCombination("--system and --model are two systems")
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does
    try:
        return pkgutil.resolve_name(system)
    except (Exception, SystemExit) as error:  # a module may raise anything when it is imported
        raise UnsupportedCombination(
            f"--system {system}: {type(error).__name__}: {error}",
            hint="Give MODULE:NAME of an object that can be imported from here; MODULE is no path, and has no .py.",
        ) from error
