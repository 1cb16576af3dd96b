"""`invariant-rag bench NAME`: run a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.cli.speed import speed
from invariant_rag.evaluation.benchmarks import BENCHMARKS, Benchmark
from invariant_rag.evaluation.progress import no_progress

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a benchmark over segment orders.")


def parse_settings(words: Iterable[str]) -> dict[str, str]:
    """Parse `NAME=VALUE` words."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set: expected NAME=VALUE, got {word!r}")
        settings[name.strip()] = value
    return settings


@app.command("list")
def list_benchmarks(as_json: options.Json = False) -> None:
    """List the benchmarks with their settings."""
    rows = []
    for name, each in BENCHMARKS.items():
        settings = each.default_settings()
        shown = settings if as_json else ", ".join(f"{key}={value}" for key, value in settings.items())
        rows.append({"benchmark": name, "about": each.about, "settings": shown, "metric": each.metric})
    print_table(rows, as_json)


def _add_command(benchmark: Benchmark) -> None:
    """Add the command of a benchmark."""
    settings = ", ".join(f"{name}={value}" for name, value in benchmark.default_settings().items())

    def command(
        model: options.Model = None,
        method: options.Method = "rotor",
        ordering: options.Ordering = None,
        alpha: Annotated[
            float | None,
            typer.Option(help="Margin of selective routing between the plain model and the method; none: no routing."),
        ] = None,
        words: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="A setting; see above. Repeatable.", show_default=False),
        ] = None,
        data: options.Data = None,
        limit: options.Limit = None,
        seed: options.Seed = 0,
        resume: options.Resume = False,
        out: options.Runs = Path("runs"),
        batch_size: options.BatchSize = 8,
        max_new_tokens: options.MaxOutputTokens = None,
        overflow: options.Overflow = "error",
        dtype: options.DType = "auto",
        device_map: options.DeviceMap = "auto",
        tensor_parallel: Annotated[
            bool,
            typer.Option("--tp", help="Tensor parallelism: split every layer over the processes started by torchrun."),
        ] = False,
        ray: options.Ray = 0,
        as_json: options.Json = False,
    ) -> None:
        _run(
            {
                "benchmark": benchmark.name,
                "settings": parse_settings(words or ()),
                "model": model,
                "method": method,
                "ordering": ordering,
                "alpha": alpha,
                "overflow": overflow,
                "data": data,
                "limit": limit,
                "seed": seed,
                "batch_size": batch_size,
                "max_new_tokens": max_new_tokens,
                "dtype": dtype,
                "device_map": device_map,
                "tensor_parallel": tensor_parallel,
            },
            out,
            resume=resume,
            actors=ray,
            as_json=as_json,
        )

    about = (
        f"{benchmark.about}\n\nSource: {benchmark.paper}. Variants: {benchmark.variants}. "
        f"Settings: {settings}; the README in the benchmark's folder explains them."
    )
    app.command(benchmark.name, help=about, short_help=benchmark.about)(command)


def _run(chosen: dict[str, Any], out: Path, *, resume: bool, actors: int, as_json: bool) -> None:
    with handle_errors():
        from invariant_rag.evaluation.benchmarks.config import BenchmarkConfig
        from invariant_rag.evaluation.benchmarks.runner import run_benchmark

        config = BenchmarkConfig(**chosen)
        disable_transformers_bars()
        progress = progress_bar if config.is_main_process else no_progress
        finished = run_benchmark(config, out, resume=resume, actors=actors, progress=progress)
        if not config.is_main_process:
            return
        if as_json:
            print_json({"folder": str(finished.folder), "config": finished.config, "summary": finished.summary})
        else:
            print_text(finished.markdown(), end="")
            print_text(f"\n{finished.folder}", style="dim")


for _benchmark in BENCHMARKS.values():
    _add_command(_benchmark)
app.command("speed")(speed)
