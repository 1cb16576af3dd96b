"""`invariant-rag bench vllm`: measure what order invariance costs on a server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import ExtraRequired, InvalidChoice
from invariant_rag.files import encode_json, make_folder, write_file

from invariant_rag_benchmarks.config import ServingConfig


@options.with_fields(ServingConfig)
def vllm(
    *,
    url: Annotated[str, typer.Argument(help="Address of a vLLM with the plug-in vllm-invariant-rag.")],
    method: options.Method = "rotor",
    ordering: options.Ordering = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Clients at the same time. Repeatable.", show_default="1, 8 and 32")
    ] = None,
    questions: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Questions about each set. Repeatable.", show_default="1, 4 and 16"),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for serve.json.")] = None,
    as_json: options.Json = False,
    **choices: Any,
) -> None:
    """Measure requests with arranged documents against plain ones on the same server.

    Compare ratios, which are medians over rounds in which both are asked in turn, and not seconds. In a cold
    round nothing is known of the documents; a warm one asks the same again.
    """
    with handle_errors():
        from invariant_rag.methods import check_method_and_ordering
        from invariant_rag.server.settings import UPSTREAM_KEY_VARIABLE

        from invariant_rag_benchmarks.speed import environment
        from invariant_rag_benchmarks.vllm import MEASURES, as_data, measure_serving

        check_method_and_ordering(method, ordering)
        try:
            from vllm_invariant_rag import VLLMBackend
        except ImportError as error:
            raise ExtraRequired("vllm-invariant-rag", "vllm") from error
        config = ServingConfig(tuple(clients or (1, 8, 32)), tuple(questions or (1, 4, 16)), **choices)
        if any(config.requests % each for each in config.questions):
            raise InvalidChoice(f"--requests: expected a multiple of {config.questions}, got {config.requests}")
        disable_transformers_bars()
        if out is not None:
            make_folder(out)
        key = os.environ.get(UPSTREAM_KEY_VARIABLE, "").strip() or None
        served = VLLMBackend(url=url, method=method, ordering=ordering, api_key=key)
        rows = measure_serving(served.with_tenant, config, progress_bar)
        measured = as_data(config, rows, environment())
        if out is not None:
            write_file(out / "serve.json", encode_json(measured, indent=1) + b"\n")
    if as_json:
        print_json(measured)
        return
    print_text(
        f"{config.requests} requests, {method}, against plain requests to the same server: median (lowest to highest)"
    )
    print_table(
        [
            {
                "clients": str(each["clients"]),
                "questions per set": str(each["questions"]),
                "state": each["state"],
                **{name: "{:.2f}x ({:.2f} to {:.2f})".format(*each[name]) for name in MEASURES},
            }
            for each in measured["ratios"]
        ],
        as_json=False,
    )
