"""`invariant-rag ask`: answer a question from documents, and check that their order does not matter."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import typer

from invariant_rag.cli import options
from invariant_rag.cli.console import print_error, print_json, print_skipped, print_text, print_warning
from invariant_rag.cli.progress import load_with_progress, progress_bar
from invariant_rag.errors import InvalidChoice, ToyModelWarning
from invariant_rag.models.embedded import is_toy
from invariant_rag.rag.documents import check_documents, load_chunks
from invariant_rag.rag.text_splitting import truncate
from invariant_rag.segments import Segment, SegmentSet
from invariant_rag.shown import counted

EXAMPLE_QUESTION = "What colour is the flag of Gesthaven?"
EXAMPLE_DOCUMENTS = Path(__file__).parent / "example_documents"

if TYPE_CHECKING:
    from invariant_rag.audit.order_check import OrderCheck
    from invariant_rag.rag.citations import Citation
    from invariant_rag.rag.pipeline import Answer
    from invariant_rag.rag.retrieval import RetrieverFactory


def ask(
    question: options.Question = None,
    docs: options.Documents = None,
    more: options.MoreDocuments = None,
    model: options.Model = None,
    method: options.Method = "rotor",
    ordering: options.Ordering = None,
    dtype: options.DType = "auto",
    device_map: options.DeviceMap = "auto",
    k: options.TopK = 10,
    retriever: options.Retriever = "bm25",
    strict: options.Strict = False,
    max_chars: options.MaxChars = 1000,
    max_new_tokens: options.MaxNewTokens = 64,
    overflow: options.Overflow = "error",
    as_json: options.Json = False,
    check_order: options.CheckOrder = 0,
) -> None:
    """Answer QUESTION from documents, and cite the chunks that hold the answer. Without both, an example runs.

    Exit code: 0; 1 if --check-order got different outputs of an order-invariant method; 2 for an error.

    \b
    --json prints one object:
      question, answer   strings
      model              {name, method, ordering, backend}
      citations          [{index, exact}], index into segments; exact: the chunk contains the answer word for word
      segments           [{title, text, score, metadata}], the retrieved chunks, best first
      order              physical order of the chunks in the prompt, farthest from the question first
      dropped, trimmed   chunks that --overflow left out, or shortened
      finish_reason      why generation stopped
      usage              {prompt_tokens, completion_tokens}
      timings            seconds: {load, index, retrieve, generate}
      order_check        null, or {orders, seed, promised, identical, distinct,
                         answers: [{text, count}], plain_distinct, plain_answers: [{text, count}]}
    """  # noqa: D301
    question, paths = _question_and_paths(question, [*(docs or []), *(more or [])])
    loading = {"method": method, "ordering": ordering, "overflow": overflow, "dtype": dtype, "device_map": device_map}
    chunks, build_index = _read_chunks(paths, retriever, model, loading, max_chars=max_chars, strict=strict)
    with progress_bar("Indexing documents"):
        start = perf_counter()
        index = build_index(chunks)
        indexed = perf_counter()
    if overflow == "error":
        with progress_bar("Loading tokenizer"):
            _check_fits(question, index.retrieve(question, k), model, method, max_new_tokens)
    from invariant_rag.rag.pipeline import RAG

    ready = perf_counter()
    rag = RAG(load_with_progress(model, **loading), index, k)
    seconds = {"index": indexed - start, "load": perf_counter() - ready}
    if paths == [EXAMPLE_DOCUMENTS] and not as_json:
        print_text(f"{question}\n", style="bold")
    with progress_bar("Generating"):
        answer = rag.ask(question, max_new_tokens=max_new_tokens)
    if not as_json:
        _print_answer(answer)
    lm, check = rag.model, None
    one_order = bool(check_order) and len(answer.segments) < 2 and not as_json
    if check_order and not one_order:
        from invariant_rag.audit.order_check import check_order as compare

        check = compare(lm, rag.prompt(question), check_order, progress=progress_bar, max_new_tokens=max_new_tokens)
    described = {"name": lm.name, **{each: getattr(lm, each).name for each in ("method", "ordering", "backend")}}
    if as_json:
        document = {"question": question, "model": described, **answer.as_dict()}
        document["timings"] = {**seconds, **document["timings"]}
        print_json({**document, "order_check": check and check.as_dict()})
    else:
        toy = {"name": "of the embedded toy, which knows only made-up places"} if is_toy(described["name"]) else {}
        print_text(", ".join(f"{key} {value}" for key, value in {**described, **toy}.items()), style="dim")
        if one_order:
            print_text("\nOrder check: one chunk has one order, so there is nothing to compare", style="bold")
        if check:
            _print_check(check, described["method"])
    if check and check.broken:
        print_error(
            f"{described['method']} with ordering {described['ordering']} promises one output for every order, "
            f"and gave {check.distinct}",
            hint="This is a bug. Please report it with the documents and the question.",
        )
        raise typer.Exit(1)


def _question_and_paths(question: str | None, paths: list[Path]) -> tuple[str, list[Path]]:
    """Return a question and its documents: those given, or the example."""
    if question is None and not paths:
        return EXAMPLE_QUESTION, [EXAMPLE_DOCUMENTS]
    if question and question.strip() and paths:
        return question, paths
    no_question = "a question, got none" if question is None else "a question, got blank text"
    missing = "documents, got none: --docs is missing" if (question or "").strip() else no_question
    hint = 'Such as: invariant-rag ask "Who approves travel?" --docs FOLDER --model MODEL. Without both: an example.'
    raise InvalidChoice(f"expected {missing}", hint=hint)


def _read_chunks(
    paths: list[Path], retriever: str, model: str | None, loading: Mapping[str, Any], *, max_chars: int, strict: bool
) -> tuple[list[Segment], RetrieverFactory]:
    """Return the chunks, and what indexes them; find out what can be wrong before transformers is imported."""
    from invariant_rag.rag.retrieval import resolve_retriever

    build_index = resolve_retriever(retriever)
    check_documents(paths)
    options.check_model_options(model, loading["method"], loading["ordering"], loading["device_map"])
    with progress_bar("Reading documents"):
        chunks = load_chunks(paths, max_chars=max_chars, strict=strict, on_skipped=print_skipped)
    if model is None and paths != [EXAMPLE_DOCUMENTS]:
        print_warning(str(ToyModelWarning()))
    return chunks, build_index


def _check_fits(question: str, chunks: list[Segment], model: str | None, method: str, new_tokens: int) -> None:
    """Refuse a prompt that is longer than the context window, before the weights of the model are loaded."""
    from invariant_rag.generation.prepare import fit_segments
    from invariant_rag.methods import resolve_method
    from invariant_rag.models.loading import context_window, load_config, load_tokenizer
    from invariant_rag.prompts import question_messages, render_chat, tokenize_prompt

    room: dict[str, Any] = {"window": context_window(load_config(model)), "new_tokens": new_tokens}
    tokenizer, messages = load_tokenizer(model), question_messages(question, SegmentSet(chunks), None)
    tokens = tokenize_prompt(render_chat(messages, tokenizer, question), tokenizer)
    lengths = [[len(each.token_ids) for each in segments] for segments in tokens.sets]
    is_shared = resolve_method(method).shares_positions
    fit_segments(lengths, "error", text_tokens=sum(map(len, tokens.texts)), shares_positions=is_shared, **room)


def _print_answer(answer: Answer) -> None:
    print_text(answer.text)
    _print_citations(answer.citations)
    usage, spent = answer.generation.usage, answer.timings
    print_text(f"\nchunks in the prompt, farthest first: {' '.join(map(str, answer.order))}", style="dim")
    tokens = f"{usage.prompt_tokens} prompt tokens, {usage.completion_tokens} completion tokens"
    seconds = f"retrieval {spent.retrieve:.2f} s, generation {spent.generate:.2f} s"
    print_text(f"{tokens}, {seconds}", style="dim")


def _print_citations(citations: Iterable[Citation]) -> None:
    listed = list(citations)
    if not listed:
        print_text("\nThe words of the answer were found in none of the chunks.", style="dim")
        return
    print_text("\nFound word for word in" if listed[0].exact else "\nMost of its words are in", style="bold")
    for citation in listed:
        segment = citation.segment
        source = " ".join(str(segment.metadata[key]) for key in ("source", "page") if key in segment.metadata)
        print_text(f"[{citation.index}] {segment.title or ''} ({source})")
        print_text(f"    {truncate(segment.text, 200)}", style="dim")


def _print_check(check: OrderCheck, method: str) -> None:
    print_text(f"\nOrder check: the order given and {check.orders} random ones (seed {check.seed})", style="bold")
    styles = ("red" if check.promised else "yellow", "yellow")
    sides = ((method, check.answers, check.distinct), ("plain model", check.plain_answers, check.plain_distinct))
    for (name, answers, outputs), style in zip(sides, styles, strict=True):
        bits = ", bit for bit" if outputs == 1 else f"; {outputs} log-probabilities" if outputs > len(answers) else ""
        line = f"  {name}: {counted(len(answers), 'answer')} in {counted(check.orders + 1, 'order')}{bits}"
        print_text(line, style="green" if outputs == 1 else style)
        for text, count in answers:
            print_text(f'    {count:3} x "{truncate(text, 100)}"')
    # The number of orders whose answer is not the most frequent one.
    plain, ours = (sum(count for _, count in each[1:]) or "none" for each in (check.plain_answers, check.answers))
    summary = f"The plain model changed its answer in {plain} of {check.orders + 1} orders; {method} in {ours}."
    print_text(f"\n{summary}", style="bold")
