"""`invariant-rag bench speed`: measure what order invariance costs on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_note, print_table, print_text
from invariant_rag.cli.progress import progress_bar
from invariant_rag.files import encode_json, make_folder, write_file

from invariant_rag_benchmarks.config import SpeedConfig


@options.with_fields(SpeedConfig)
def speed(
    *,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", help="A method. Repeatable.", show_default="all"),
    ] = None,
    tokens: Annotated[list[int] | None, typer.Option(min=100, help="Tokens of a prompt. Repeatable.")] = None,
    segments: Annotated[list[int] | None, typer.Option(min=1, help="Segments of a prompt. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for speed.json.")] = None,
    as_json: options.Json = False,
    **choices: Any,
) -> None:
    """Measure prefill, decoding and memory of methods against the plain model, side by side.

    Compare ratios, which are medians over rounds in which everything runs in turn, and not seconds. The floor is the
    least that attention in both directions between segments costs; FLOPs are counted up to the first token, on a CPU.
    """
    with handle_errors():
        from invariant_rag.methods import METHODS, resolve_method

        from invariant_rag_benchmarks.speed import measure

        chosen = methods or [name for name in METHODS if name != "sequential"]
        for name in chosen:
            resolve_method(name)
        configs = [
            SpeedConfig(tokens=length, segments=count, **choices)
            for length in tokens or [2500]
            for count in segments or [20]
        ]
        if out is not None:
            make_folder(out)
        one = configs[0]
        print_note(
            f"measuring {', '.join(chosen)} against the plain model: first token, {one.new_tokens} further tokens and "
            f"peak memory, {', '.join(f'{each.tokens} tokens in {each.segments} segments' for each in configs)}, shape "
            f"{one.shape}, {one.dtype} on {one.device}, rounds: {one.repeats}; random weights, nothing is downloaded"
        )
        measured = [measure(config, chosen, progress_bar) for config in configs]
        if out is not None:
            write_file(out / "speed.json", encode_json(measured, indent=1) + b"\n")
    if as_json:
        print_json(measured)
        return
    for each in measured:
        setting, machine = each["setting"], each["environment"]
        print_text(
            f"\n{setting['tokens']} tokens in {setting['segments']} segments, shape {setting['shape']}, "
            f"{setting['dtype']}, {machine['device']}, {machine['threads']} threads",
            style="bold",
        )
        print_table([_table_row(row, each["floor"]) for row in each["rows"]], as_json=False)
        print_text(
            f"{setting['batch']} prompts as one batch, against one after the other: first tokens "
            f"{_gains(each['batched_prefill'])}; further tokens {_gains(each['batched'])}"
        )


def _gains(by_method: dict[str, float]) -> str:
    return ", ".join(f"{name} {gain:.1f}x" for name, gain in by_method.items())


def _table_row(row: dict[str, Any], floor: float) -> dict[str, str]:
    seconds = row["prefill"]["seconds"]
    ratios = row["ratios"]
    return {
        "": row["name"],
        "first token": f"{ratios['prefill']:.2f}x",
        "floor": f"{floor:.2f}x",
        "FLOPs": "?" if ratios["flops"] is None else f"{ratios['flops']:.2f}x",
        "seconds": f"{sorted(seconds)[len(seconds) // 2]:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
        "each further token": f"{ratios['decode']:.2f}x",
        "all tokens": f"{ratios['whole']:.2f}x",
        "peak memory": "?" if ratios["peak"] is None else f"{ratios['peak']:.2f}x",
    }
