"""The command line: ask documents a question, check that their order does not matter, list what there is."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from invariant_rag import __version__
from invariant_rag.cli import bench, registries
from invariant_rag.cli.audit import audit
from invariant_rag.cli.bench import TooLong
from invariant_rag.cli.console import complain, errors_in_red, print_json, print_table, progress, say
from invariant_rag.cli.reproduce import reproduce
from invariant_rag.cli.search_dimension import search_dimension
from invariant_rag.rag.text import truncate

if TYPE_CHECKING:
    from invariant_rag.evaluation.order_check import OrderCheck
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.rag.citations import Citation
    from invariant_rag.rag.pipeline import RAG, Answer

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
app.command("search-dimension")(search_dimension)
app.add_typer(bench.app, name="bench")
app.command("reproduce")(reproduce)
app.command("audit")(audit)
for _listing in (registries.methods, registries.interventions, registries.orderings):
    app.command()(_listing)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"invariant-rag {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    """Answers from documents that do not depend on the order in which the documents are listed."""


@app.command()
def ask(
    question: Annotated[str, typer.Argument(help="The question. It is also what is searched for.")],
    docs: Annotated[list[Path], typer.Option("--docs", help="File or folder: .txt, .md, .jsonl, .pdf. Repeatable.")],
    more: Annotated[
        list[Path] | None, typer.Argument(metavar="[PATH]...", help="More documents, as in --docs atlas/*.md.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Model id or folder.", show_default="the embedded model")] = None,
    method: Annotated[str, typer.Option(help="See `invariant-rag methods`.")] = "rotor",
    ordering: Annotated[
        str | None, typer.Option(help="See `invariant-rag orderings`.", show_default="the method's own")
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Chunks to retrieve.")] = 10,
    retriever: Annotated[str, typer.Option(help="faiss or bm25.")] = "faiss",
    max_chars: Annotated[int, typer.Option(min=1, help="Longest chunk, in characters.")] = 1000,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 64,
    overflow: TooLong = "error",
    stream: Annotated[bool, typer.Option("--stream", help="Print the answer while it is generated.")] = False,
    as_json: AsJson = False,
    check_order: Annotated[
        int, typer.Option(min=0, metavar="N", help="Ask again in N random document orders, and compare.")
    ] = 0,
) -> None:
    """Answer QUESTION from documents, and say where the answer was found.

    Exit code: 0; 1 if --check-order found that an order-invariant method's outputs differ; 2 for an error.

    \b
    --json prints one object:
      question, answer   strings
      model              {name, method, ordering, backend}
      citations          [{index, exact}], index into segments; exact: the chunk holds the answer word for word
      segments           [{title, text, score, metadata}], the retrieved chunks, best first
      order              physical order in which they were read, farthest from the question first
      dropped, trimmed   chunks that --overflow left out, or shortened
      finish_reason      why generation stopped
      usage              {prompt_tokens, completion_tokens}
      timings            seconds: {load, index, retrieve, generate}
      order_check        null, or {orders, seed, promised, identical, distinct,
                         answers: [{text, count}], plain_distinct, plain_answers: [{text, count}]}
    """  # noqa: D301
    if stream and as_json:
        raise typer.BadParameter("choose one of --stream and --json")
    with errors_in_red():
        options = {"method": method, "ordering": ordering, "overflow": overflow}
        rag, loading = _load([*docs, *(more or [])], retriever, max_chars, k, model, options)
        if stream:
            _stream_answer(rag, question, max_new_tokens)
        else:
            with progress("Generating"):
                answer = rag.ask(question, max_new_tokens=max_new_tokens)
            if not as_json:
                _print_answer(answer)
        check = _check(rag, question, check_order, max_new_tokens) if check_order else None
    described = _described(rag.model)
    if as_json:
        document = {"question": question, "model": described, **answer.as_dict(), "order_check": None}
        document["timings"] = {**loading, **document["timings"]}
        if check:
            document["order_check"] = check.as_dict()
        print_json(document)
    else:
        say(", ".join(f"{key} {value}" for key, value in described.items()), style="dim")
        if check:
            _print_check(check)
    if check and check.broken:
        complain(
            f"{described['method']} with ordering {described['ordering']} promises one output for every order, "
            f"and gave {check.distinct}",
            hint="This is a bug. Please report it with the documents and the question.",
        )
        raise typer.Exit(1)


@app.command()
def models(
    embedded: Annotated[
        bool, typer.Option("--embedded", help="Print the cards of the models that come with the package instead.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Probe a tiny model of every known family, and say which can be run order-invariantly."""
    if embedded:
        _print_cards(as_json)
        return
    from transformers.utils.logging import set_verbosity_error

    from invariant_rag.testing.families import FAMILIES, probe_families

    set_verbosity_error()  # what transformers has to say about tiny models concerns nobody
    with errors_in_red(), progress("Probing", len(FAMILIES)) as advance:
        reports = []
        for report in probe_families():
            reports.append({"family": report.family, "supported": report.supported, "detail": report.detail})
            advance()
    print_table(reports, as_json)


def _load(
    paths: list[Path], retriever: str, max_chars: int, k: int, model: str | None, options: dict[str, Any]
) -> tuple[RAG, dict[str, float]]:
    """Index the documents, load the model, and return both with the seconds that each took."""
    with progress("Indexing documents"):
        # Both bring in torch, which takes seconds: that is part of the wait.
        from transformers.utils.logging import disable_progress_bar

        from invariant_rag.generation.model import InvariantModel
        from invariant_rag.rag.pipeline import RAG, index_documents

        disable_progress_bar()  # ours is on screen already
        start = perf_counter()
        index = index_documents(paths, retriever, max_chars=max_chars)
        indexed = perf_counter()
    with progress("Loading model"):
        loaded = InvariantModel.from_pretrained(model, **options)
    return RAG(loaded, index, k), {"index": indexed - start, "load": perf_counter() - indexed}


def _stream_answer(rag: RAG, question: str, max_new_tokens: int) -> None:
    from invariant_rag.rag.citations import cite

    prompt = rag.prompt(question)
    stream = rag.model.stream(prompt, max_new_tokens=max_new_tokens)
    pieces = []
    for piece in stream:
        say(piece, end="")
        pieces.append(piece)
    say("")
    read = None if stream.generation is None else stream.generation.order
    _print_citations(cite("".join(pieces), question, prompt.segments, read))


def _check(rag: RAG, question: str, orders: int, max_new_tokens: int) -> OrderCheck:
    from invariant_rag.evaluation.order_check import check_order

    prompt = rag.prompt(question)
    with progress(f"Asking in {orders} orders", 2 * (orders + 1)) as advance:
        return check_order(rag.model, prompt, orders, on_answer=advance, max_new_tokens=max_new_tokens)


def _described(model: InvariantModel) -> dict[str, str]:
    return {
        "name": model.name,
        "method": model.method.name,
        "ordering": model.ordering.name,
        "backend": model.backend.name,
    }


def _print_answer(answer: Answer) -> None:
    say(answer.text)
    _print_citations(answer.citations)
    usage, spent = answer.generation.usage, answer.timings
    say(f"\nchunks as read, farthest first: {' '.join(map(str, answer.order))}", style="dim")
    say(
        f"{usage.prompt_tokens} tokens read, {usage.completion_tokens} written, "
        f"retrieval {spent.retrieve:.2f} s, generation {spent.generate:.2f} s",
        style="dim",
    )


def _print_citations(citations: Iterable[Citation]) -> None:
    listed = list(citations)
    if not listed:
        say("\nThe words of the answer were found in none of the chunks.", style="dim")
        return
    say("\nFound word for word in" if listed[0].exact else "\nMost of its words are in", style="bold")
    for citation in listed:
        segment = citation.segment
        source = " ".join(str(segment.metadata[key]) for key in ("source", "page") if key in segment.metadata)
        say(f"[{citation.index}] {segment.title or ''} ({source})")
        say(f"    {truncate(segment.text, 200)}", style="dim")


def _print_check(check: OrderCheck) -> None:
    say(f"\nOrder check: the order given and {check.orders} random ones (seed {check.seed})", style="bold")
    if check.identical:
        say(f"  this method: {check.orders + 1} of {check.orders + 1} outputs identical, bit for bit", style="green")
    else:
        say(f"  this method: {check.distinct} different outputs", style="red" if check.promised else "yellow")
        _print_counts(check.answers)
    say(f"  plain model: {check.plain_distinct} different outputs, with these answers", style="yellow")
    _print_counts(check.plain_answers)


def _print_counts(answers: Iterable[tuple[str, int]]) -> None:
    for text, count in answers:
        say(f"    {count:3} x {truncate(text, 100)!r}")


def _print_cards(as_json: bool) -> None:
    from invariant_rag.models.embedded import EMBEDDED, model_card

    if as_json:
        print_json({name: {"folder": str(folder), "card": model_card(name)} for name, folder in EMBEDDED.items()})
        return
    for name in EMBEDDED:
        Console().print(Markdown(model_card(name)))
