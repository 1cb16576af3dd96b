"""`invariant-rag explain`: which document saw which, at what distance, and what the answer owes to each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from invariant_rag.cli import options
from invariant_rag.cli.ask import load_rag
from invariant_rag.cli.console import handle_errors, print_json, print_text
from invariant_rag.cli.example import asked
from invariant_rag.cli.progress import progress_bar
from invariant_rag.files import make_folder


def explain(
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
    out: Annotated[
        Path | None, typer.Option(help="Draw the figure into this file: .png, .svg or .pdf.", show_default="no figure")
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Answer QUESTION, and show which document saw which, at what distance, and what the answer owes to each."""
    wanted = asked(question, [*(docs or []), *(more or [])], retriever)
    with handle_errors():
        if out is not None:
            from invariant_rag.generation.explain import check_figure_file

            check_figure_file(out)
            make_folder(out.parent)
        choices = {"method": method, "ordering": ordering, "overflow": overflow}
        loading_options = {**choices, "dtype": dtype, "device_map": device_map}
        rag, _ = load_rag(wanted, max_chars, strict, k, model, loading_options)
        with progress_bar("Explaining"):
            explanation = rag.model.explain(rag.prompt(wanted.question), max_new_tokens=max_new_tokens)
        if as_json:
            print_json({"question": wanted.question, **explanation.as_dict()})
        else:
            print_text(f"{wanted.question}\n", style="bold")
            print_text(explanation.text())
        if out is not None:
            explanation.save_figure(out)
