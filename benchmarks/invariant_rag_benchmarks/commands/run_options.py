"""Options that commands with runs share: each defined once, its default that of `BenchmarkConfig`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from invariant_rag.cli import options

from invariant_rag_benchmarks.config import ENSEMBLES, BenchmarkConfig

C = TypeVar("C", bound=Callable[..., None])

Ray = Annotated[
    int, typer.Option("--ray", min=0, metavar="ACTORS", help="Share the work among this many Ray actors; 0: no Ray.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue a run of the same settings.")]
Runs = Annotated[Path, typer.Option("--out", help="Folder of the runs; each gets a folder of its own.")]

Seed = Annotated[int, typer.Option(min=0, help="Seed of everything that is drawn: samples, orders, resamples.")]

_OPTIONS: dict[str, Any] = {
    "model": options.Model,
    "method": options.Method,
    "ordering": options.Ordering,
    "alpha": Annotated[
        float | None,
        typer.Option(help="Margin of selective routing between the plain model and the method; none: no routing."),
    ],
    "intervention": Annotated[
        str | None,
        typer.Option(
            help="See `invariant-rag interventions`; or a file of search-dimension. With the method sequential.",
            show_default="none",
        ),
    ],
    "ensemble": Annotated[str | None, typer.Option(help=f"{', '.join(ENSEMBLES)}.", show_default="none")],
    "data": Annotated[
        Path | None,
        typer.Option(help="The benchmark's file, or a folder that contains it.", show_default="download"),
    ],
    "limit": Annotated[int | None, typer.Option(min=1, help="Largest number of questions.", show_default="all")],
    "seed": Seed,
    "batch_size": Annotated[int, typer.Option(min=1, help="Prompts to decode together.")],
    "max_new_tokens": Annotated[
        int | None,
        typer.Option(min=1, help="Longest output, in tokens.", show_default="the benchmark's default"),
    ],
    "overflow": options.Overflow,
    "dtype": options.DType,
    "device_map": options.DeviceMap,
    "tensor_parallel": Annotated[
        bool,
        typer.Option("--tp", help="Tensor parallelism: split every layer over the processes started by torchrun."),
    ],
}


def with_choices(*left_out: str) -> Callable[[C], C]:
    """Give a command the options of `BenchmarkConfig` in the place of its `**choices`, but for some.

    Args:
        left_out: Names of those that the command does not take, or takes in another form.
    """

    def add(command: C) -> C:
        defaults = {each.name: each.default for each in fields(BenchmarkConfig)}
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        more = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=defaults[name], annotation=kind)
            for name, kind in _OPTIONS.items()
            if name not in left_out
        ]
        command.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own] + more
        )
        return command

    return add
