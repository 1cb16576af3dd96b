"""Command-line options that several commands share, each defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

# --- the model --------------------------------------------------------------------------------------------------------

Model = Annotated[str | None, typer.Option(help="Model id or folder.", show_default="the embedded model")]
Method = Annotated[str, typer.Option(help="See `invariant-rag methods`.")]
Ordering = Annotated[
    str | None, typer.Option(help="See `invariant-rag orderings`.", show_default="the method's default")
]
DType = Annotated[str, typer.Option(help="As in transformers: auto, float32, bfloat16...")]
DeviceMap = Annotated[str, typer.Option(help="As in transformers: auto spreads a large model over all devices.")]
Overflow = Annotated[
    Literal["error", "drop_last", "trim_segments"],
    typer.Option(help="What to do with prompts that are longer than the context window."),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, help="Longest answer of a model, in tokens.")]

# --- documents --------------------------------------------------------------------------------------------------------

Strict = Annotated[
    bool, typer.Option("--strict", help="Stop at a document that cannot be read, instead of skipping it.")
]
Retriever = Annotated[str, typer.Option(help="faiss or bm25, for --docs.")]
ExampleRetriever = Annotated[
    str | None, typer.Option("--retriever", help="faiss or bm25.", show_default="faiss; for the example, bm25")
]
Question = Annotated[
    str | None, typer.Argument(help="The question. It is also the search query.", show_default="an example")
]
Documents = Annotated[
    list[Path] | None,
    typer.Option("--docs", help="File or folder: .txt, .md, .jsonl, .pdf. Repeatable.", show_default="an example"),
]
MoreDocuments = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[PATH]...", help="More documents, as in --docs atlas/*.md.", show_default=False),
]
MaxChars = Annotated[int, typer.Option(min=1, help="Longest chunk, in characters.")]
TopK = Annotated[int, typer.Option("--k", min=1, help="Segments to retrieve.")]

# --- any command ------------------------------------------------------------------------------------------------------

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
