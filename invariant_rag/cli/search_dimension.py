"""`invariant-rag search-dimension`: find the hidden dimension of a model that hidden scaling should scale."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from invariant_rag.checks import MOST_CALLS, require_extra
from invariant_rag.cli import options
from invariant_rag.cli.console import print_json, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.files import make_folder
from invariant_rag.models.hub import check_model


def search_dimension(
    model: Annotated[str, typer.Argument(help="Model id or folder, of a model with at least five layers.")],
    *,
    out: Annotated[Path, typer.Option("--out", help="Folder for search.json and dimension.png.")],
    examples: Annotated[
        int, typer.Option(min=1, max=MOST_CALLS, help="Key-value retrieval prompts to validate with.")
    ] = 100,
    pairs: Annotated[int, typer.Option(min=2, max=MOST_CALLS, help="Most keys in each of them.")] = 50,
    keep: Annotated[int, typer.Option(min=1, help="Dimensions to validate.")] = 10,
    as_json: options.Json = False,
) -> None:
    """Find the hidden dimension and the factor with which a model depends least on the position of a fact.

    Use the result with InvariantModel(..., method="sequential", intervention=HiddenScaling.load("search.json")).
    """
    require_extra("scipy", "evaluation")
    require_extra("matplotlib", "plots")
    make_folder(out)
    check_model(model)
    with progress_bar("Loading model"):
        from invariant_rag.errors import TokenizerRequired
        from invariant_rag.interventions.search import search_dimension as search
        from invariant_rag.interventions.search import uuid_examples
        from invariant_rag.models.loading import context_window, load_model

        disable_transformers_bars()
        loaded, tokenizer = load_model(model, dtype="auto", device_map="auto")
    if tokenizer is None:
        raise TokenizerRequired(f"expected a model with a tokenizer, got {model!r}", hint="Save one next to it.")
    prompts = uuid_examples(tokenizer, examples, pairs=pairs, window=context_window(loaded.config))
    result = search(loaded, tokenizer, prompts, keep=keep, progress=progress_bar)
    result.save(out / "search.json")
    result.draw(out / "dimension.png")
    if as_json:
        print_json({**result.found.as_dict(), "loss": result.loss, "plain_loss": result.plain_loss})
        return
    found = result.found
    print_text(
        f"dimension {found.dimensions[0]}, factor {found.factor}, layers {found.layers[0]} to {found.layers[-1]}"
    )
    print_text(f"validation loss {result.loss:.4f}, and {result.plain_loss:.4f} without scaling")
    if result.loss >= result.plain_loss:
        print_text("Scaling does not lower the loss of this model: it is better left alone.", style="yellow")
    print_text(f"written to {out / 'search.json'} and {out / 'dimension.png'}", style="dim")
