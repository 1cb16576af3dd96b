"""`invariant-rag audit`: does a system depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_skipped, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import RetrievalError, UnsupportedCombination
from invariant_rag.files import make_folder

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel


def audit(
    questions: Annotated[Path, typer.Argument(help="A .jsonl or .csv file of questions and their retrieved segments.")],
    out: Annotated[
        Path, typer.Option(help="Folder for answers and report. An audit into the same folder reuses its answers.")
    ],
    model: options.Model = None,
    method: options.Method = "sequential",
    ordering: options.Ordering = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="Audit this object instead: a function, a Runnable, a query engine..."
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
            help="sort, rerank, top-3, long-context-reorder, vote, plain, or a method. Repeatable.",
            show_default="all that apply",
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="best_subspan_em, exact_match or token_f1.")] = "best_subspan_em",
    orders: Annotated[
        int, typer.Option(min=2, max=MOST_CALLS, help="Input orders of a question with more than 4 segments.")
    ] = 10,
    slots: Annotated[int, typer.Option(min=2, max=MOST_CALLS, help="Slots through which gold segments are moved.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, max=MOST_CALLS, help="How often the given order is asked.")] = 2,
    all_orders: Annotated[
        bool, typer.Option("--all-orders", help="Ask the first five segments in all 120 orders too: the measure psr.")
    ] = False,
    seed: options.Seed = 0,
    budget: Annotated[int | None, typer.Option(min=0, help="Most calls to make now.", show_default="all")] = None,
    workers: Annotated[int, typer.Option(min=1, max=MOST_CALLS, help="Threads that make calls.")] = 1,
    ray: options.Ray = 0,
    tags: Annotated[
        bool, typer.Option(help="Prefix texts with hashes in salted orders. Turn off if the --system parses its texts.")
    ] = True,
    max_new_tokens: options.MaxNewTokens = 64,
    dtype: options.DType = "auto",
    device_map: options.DeviceMap = "auto",
    overflow: options.Overflow = "error",
    as_json: options.Json = False,
) -> None:
    """Ask QUESTIONS with their documents in many orders; report what changes, and what to do about it.

    Writes answers.jsonl, audit.json, report.html and report.md into the folder. An interrupted audit loses no answer:
    start it again with the same options. A line of QUESTIONS is {"question", "segments", "answers", "gold"}, the last
    two optional; a segment is a string or {"text", "title", "score"}, and gold a list of indices.

    Exit code: 0; 2 for an error.
    """
    from invariant_rag.evaluation.audit.auditing import audit as run_audit
    from invariant_rag.evaluation.audit.report import summary, table

    with handle_errors():
        make_folder(out)
        if system is None:
            loading = {"method": method, "ordering": ordering, "dtype": dtype, "overflow": overflow}
            audited: Any = _load_model(model, device_map=device_map, **loading)
            generation: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        elif model is None:
            audited, generation = _import_object(system), {}
        else:
            raise UnsupportedCombination("--system and --model are two systems")
        index = None
        if docs:
            from invariant_rag.rag.pipeline import index_documents

            skipped: list[RetrievalError] = []
            index = index_documents(docs, retriever, strict=strict, on_skipped=skipped.append)
            print_skipped(skipped)
        result = run_audit(
            audited,
            questions,
            retriever=index,
            k=k,
            remedies=remedy,
            metric=metric,
            orders=orders,
            slots=slots,
            repeats=repeats,
            all_orders=all_orders,
            seed=seed,
            workers=workers,
            actors=ray,
            budget=budget,
            out=out,
            progress=progress_bar,
            tags=tags,
            **generation,
        )
    if as_json:
        print_json(result.as_dict())
        return
    names, rows = table(result)
    print_table([dict(zip(["measure", *names], row, strict=True)) for row in rows], as_json=False)
    print_text(f"\n{result.advice.headline}", style="bold")
    for reason in result.advice.reasons:
        print_text(f"- {reason}")
    print_text(f"\n{summary(result)}\nReport: {out / 'report.html'}", style="dim")


def _load_model(model: str | None, **loading: Any) -> InvariantModel:
    with progress_bar("Loading model"):
        from invariant_rag.generation.model import InvariantModel

        disable_transformers_bars()
        return InvariantModel.from_pretrained(model, **loading)


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
