"""`invariant-rag bench NAME`: run a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.evaluation.progress import no_progress

from invariant_rag_benchmarks import BENCHMARKS, Benchmark
from invariant_rag_benchmarks.commands.load import load
from invariant_rag_benchmarks.commands.speed import speed
from invariant_rag_benchmarks.commands.vllm import vllm

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Run a benchmark over segment orders."
)


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


@app.command("run")
def run_several(
    tasks: Annotated[list[str], typer.Argument(help="Names of benchmarks; see `bench list`.")],
    model: options.Model = None,
    methods: Annotated[list[str] | None, typer.Option("--method", help="A method. Repeatable.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="BENCHMARK.NAME=VALUE", help="A setting. Repeatable.", show_default=False),
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
    as_json: options.Json = False,
) -> None:
    """Run several benchmarks with several methods, with a model that is loaded once, and print one table.

    The data are a folder with the files of all of them. Everything is checked before the first question is asked.
    """
    with handle_errors():
        from invariant_rag_benchmarks import resolve_benchmark
        from invariant_rag_benchmarks.config import BenchmarkConfig
        from invariant_rag_benchmarks.report import overview
        from invariant_rag_benchmarks.runner import run_several as run_all

        settings: dict[str, dict[str, str]] = {name: {} for name in tasks}
        for word, value in parse_settings(words or ()).items():
            name, dot, setting = word.partition(".")
            if not dot or name not in settings:
                raise typer.BadParameter(f"--set: expected BENCHMARK.NAME=VALUE of {', '.join(tasks)}, got {word!r}")
            settings[name][setting] = value
        configs = [
            BenchmarkConfig(
                resolve_benchmark(name).name,
                settings=settings[name],
                model=model,
                method=method,
                data=data,
                limit=limit,
                seed=seed,
                batch_size=batch_size,
                max_new_tokens=max_new_tokens,
                overflow=overflow,
                dtype=dtype,
                device_map=device_map,
            )
            for name in settings
            for method in dict.fromkeys(methods or ["rotor"])
        ]
        disable_transformers_bars()
        found = run_all(configs, out, resume=resume, progress=progress_bar)
        if as_json:
            print_json([{"folder": str(run.folder), "config": run.config, "summary": run.summary} for run in found])
        else:
            print_text("\n".join(overview([(run.config, run.summary) for run in found])))


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
        intervention: options.Intervention = None,
        ensemble: options.Ensemble = None,
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
                "intervention": intervention,
                "ensemble": ensemble,
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
        from invariant_rag_benchmarks.config import BenchmarkConfig
        from invariant_rag_benchmarks.runner import run_benchmark

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
app.command("serve")(load)
app.command("vllm")(vllm)
