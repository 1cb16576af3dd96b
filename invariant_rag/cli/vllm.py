"""`invariant-rag bench vllm`: measure what order invariance costs on a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import ExtraRequired, InvalidChoice
from invariant_rag.files import encode_json, make_folder, write_file


def vllm(
    url: Annotated[str, typer.Argument(help="Address of a vLLM with the connector of vllm-invariant-rag.")],
    method: options.Method = "rotor",
    ordering: options.Ordering = None,
    clients: Annotated[
        list[int] | None, typer.Option(min=1, help="Clients at the same time. Repeatable.", show_default="1, 8 and 32")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of a round.")] = 64,
    sets: Annotated[int, typer.Option(min=1, help="Different sets that they are about.")] = 16,
    segments: Annotated[int, typer.Option(min=1, help="Segments of a set.")] = 16,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens of an answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; each asks every system.")] = 3,
    out: Annotated[Path | None, typer.Option(help="Folder for serve.json.")] = None,
    as_json: options.Json = False,
) -> None:
    """Measure requests with arranged documents against plain ones on the same server, and against our own engine.

    Compare ratios, which are medians over rounds in which every system is asked in turn, and not seconds. In a cold
    round nothing is known of the documents; a warm one asks the same again.
    """
    with handle_errors():
        from invariant_rag.evaluation.benchmarks.speed_setup import SpeedConfig, environment
        from invariant_rag.evaluation.benchmarks.vllm import ServingConfig, as_data, measure_serving
        from invariant_rag.generation import InvariantModel
        from invariant_rag.methods import check_method_and_ordering

        check_method_and_ordering(method, ordering)
        try:
            from vllm_invariant_rag import VLLMBackend
        except ImportError as error:
            raise ExtraRequired("vllm-invariant-rag", "vllm") from error
        if requests % sets:
            raise InvalidChoice(f"--requests: expected a multiple of {sets} sets, got {requests}")
        disable_transformers_bars()
        if out is not None:
            make_folder(out)
        served = VLLMBackend(url=url, method=method, ordering=ordering)

        def connect(tenant: str) -> InvariantModel:
            local = InvariantModel(served.model, served.tokenizer, method=served.method, ordering=served.ordering)
            backend: InvariantModel = VLLMBackend(local, url=url, tenant=tenant)
            return backend

        config = ServingConfig(tuple(clients or (1, 8, 32)), requests, sets, segments, new_tokens, rounds=rounds)
        measured = as_data(config, measure_serving(connect, config, progress_bar), environment(SpeedConfig()))
        if out is not None:
            write_file(out / "serve.json", encode_json(measured, indent=1) + b"\n")
    if as_json:
        print_json(measured)
        return
    print_text(f"{requests} requests about {sets} sets, {method}, against plain requests to the same server")
    print_table(
        [
            {
                "clients": str(each["clients"]),
                "system": f"{each['system']}, {each['state']}",
                "throughput": f"{each['throughput']:.2f}x ({each['lowest']:.2f} to {each['highest']:.2f})",
                "first token": f"{each['first token']:.2f}x",
            }
            for each in measured["ratios"]
        ],
        as_json=False,
    )
