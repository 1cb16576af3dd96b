"""`invariant-rag audit`: does a system depend on the order of its documents, by how much, and what helps?"""

from __future__ import annotations

import pkgutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.cli.bench import DeviceMap, DType, TooLong
from invariant_rag.cli.console import errors_in_red, print_json, print_table, say
from invariant_rag.errors import UnsupportedCombination

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel


def audit(
    questions: Annotated[Path, typer.Argument(help="A .jsonl or .csv file of questions and their retrieved segments.")],
    out: Annotated[
        Path, typer.Option(help="Folder for answers and report. Given again, the audit goes on from there.")
    ],
    model: Annotated[str | None, typer.Option(help="Model id or folder.", show_default="the embedded model")] = None,
    method: Annotated[str, typer.Option(help="The method under audit; see `invariant-rag methods`.")] = "sequential",
    ordering: Annotated[
        str | None, typer.Option(help="See `invariant-rag orderings`.", show_default="the method's own")
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME", help="Audit this object instead: a function, a Runnable, a query engine..."
        ),
    ] = None,
    docs: Annotated[
        list[Path] | None, typer.Option("--docs", help="Retrieve segments from here for questions without. Repeatable.")
    ] = None,
    retriever: Annotated[str, typer.Option(help="faiss or bm25, for --docs.")] = "faiss",
    k: Annotated[int, typer.Option("--k", min=1, help="Segments to retrieve.")] = 10,
    remedy: Annotated[
        list[str] | None,
        typer.Option(
            help="sort, rerank, top-3, long-context-reorder, vote, plain, or a method. Repeatable.",
            show_default="all that apply",
        ),
    ] = None,
    metric: Annotated[str, typer.Option(help="best_subspan_em, exact_match or token_f1.")] = "best_subspan_em",
    orders: Annotated[int, typer.Option(min=2, help="Input orders of a question with more than 4 segments.")] = 10,
    slots: Annotated[int, typer.Option(min=2, help="Slots through which gold segments are moved.")] = 5,
    repeats: Annotated[int, typer.Option(min=1, help="How often the order given is asked.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of orders, salts and intervals.")] = 0,
    budget: Annotated[int | None, typer.Option(min=0, help="Most calls to make now.", show_default="all")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Calls at a time.")] = 1,
    ray: Annotated[
        int, typer.Option("--ray", min=0, metavar="ACTORS", help="Share the calls out among Ray actors.")
    ] = 0,
    tags: Annotated[
        bool, typer.Option(help="Put hashes before the texts in salted orders; not for a --system that parses them.")
    ] = True,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer of a model of ours, in tokens.")] = 64,
    dtype: DType = "auto",
    device_map: DeviceMap = "auto",
    overflow: TooLong = "error",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Ask QUESTIONS again with their documents in other orders; report what changes, and what to do about it.

    Writes answers.jsonl, audit.json, report.html and report.md into the folder. Killed, it loses no answer: start it
    again with the same options. A line of QUESTIONS is {"question", "segments", "answers", "gold"}, the last two
    optional; a segment is a string or {"text", "title", "score"}, and gold a list of indices.

    Exit code: 0; 2 for an error.
    """
    from invariant_rag.evaluation.audit.auditing import audit as run_audit
    from invariant_rag.evaluation.audit.report import summary, table

    with errors_in_red():
        if system is None:
            loading = {"method": method, "ordering": ordering, "dtype": dtype, "overflow": overflow}
            found: Any = _own(model, device_map=device_map, **loading)
            generation: dict[str, Any] = {"max_new_tokens": max_new_tokens}
        elif model is None:
            found, generation = _named(system), {}
        else:
            raise UnsupportedCombination("--system and --model are two systems")
        index = None
        if docs:
            from invariant_rag.rag.pipeline import index_documents

            index = index_documents(docs, retriever)
        result = run_audit(
            found,
            questions,
            retriever=index,
            k=k,
            remedies=remedy,
            metric=metric,
            orders=orders,
            slots=slots,
            repeats=repeats,
            seed=seed,
            workers=workers,
            actors=ray,
            budget=budget,
            out=out,
            progress=True,
            tags=tags,
            **generation,
        )
    if as_json:
        print_json(result.as_dict())
        return
    names, rows = table(result)
    print_table([dict(zip(["measure", *names], row, strict=True)) for row in rows], as_json=False)
    say(f"\n{result.advice.headline}", style="bold")
    for reason in result.advice.reasons:
        say(f"- {reason}")
    say(f"\n{summary(result)}\nReport: {out / 'report.html'}", style="dim")


def _own(model: str | None, **loading: Any) -> InvariantModel:
    from transformers.utils.logging import disable_progress_bar

    from invariant_rag.generation.model import InvariantModel

    disable_progress_bar()  # ours is the one to watch
    return InvariantModel.from_pretrained(model, **loading)


def _named(name: str) -> Any:
    """Return the object of the user that `MODULE:NAME` means."""
    sys.path.insert(0, str(Path.cwd()))  # as `python -m` does: the object is the user's own code
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UnsupportedCombination(
            f"--system {name}: {error}", hint="Give MODULE:NAME of an object that Python can import from here."
        ) from error
