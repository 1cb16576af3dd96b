"""`invariant-rag bench NAME`: run a benchmark."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.audit.progress import no_progress
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar

from invariant_rag_benchmarks import BENCHMARKS, Benchmark
from invariant_rag_benchmarks.commands.load import load
from invariant_rag_benchmarks.commands.run_options import Ray, Resume, Runs, with_choices
from invariant_rag_benchmarks.commands.speed import speed
from invariant_rag_benchmarks.commands.vllm import vllm
from invariant_rag_benchmarks.config import BenchmarkConfig

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
@with_choices("method", "ordering", "alpha", "intervention", "ensemble", "tensor_parallel")
def run_several(
    tasks: Annotated[list[str], typer.Argument(help="Names of benchmarks; see `bench list`.")],
    methods: Annotated[list[str] | None, typer.Option("--method", help="A method. Repeatable.")] = None,
    words: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="BENCHMARK.NAME=VALUE", help="A setting. Repeatable.", show_default=False),
    ] = None,
    resume: Resume = False,
    out: Runs = Path("runs"),
    as_json: options.Json = False,
    **choices: Any,
) -> None:
    """Run several benchmarks with several methods, with a model that is loaded once, and print one table.

    The data are a folder with the files of all of them. Everything is checked before the first question is asked.
    """
    with handle_errors():
        from invariant_rag_benchmarks import resolve_benchmark
        from invariant_rag_benchmarks.report import overview
        from invariant_rag_benchmarks.runner import run_several as run_all

        settings: dict[str, dict[str, str]] = {resolve_benchmark(name).name: {} for name in tasks}
        for word, value in parse_settings(words or ()).items():
            name, dot, setting = word.partition(".")
            if not dot or name not in settings:
                raise typer.BadParameter(f"--set: expected BENCHMARK.NAME=VALUE of {', '.join(tasks)}, got {word!r}")
            settings[name][setting] = value
        configs = [
            BenchmarkConfig(name, settings=settings[name], method=method, **choices)
            for name in settings
            for method in dict.fromkeys(methods or ["rotor"])
        ]
        disable_transformers_bars()
        found = run_all(configs, out, resume=resume, progress=progress_bar)
        if as_json:
            print_json([{"folder": str(run.folder), "config": run.config, "summary": run.summary} for run in found])
        else:
            print_text("\n".join(overview([(run.config, run.summary) for run in found])))


def _add_command(benchmark: Benchmark[Any]) -> None:
    """Add the command of a benchmark."""

    @with_choices()
    def command(
        words: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="A setting; see above. Repeatable.", show_default=False),
        ] = None,
        resume: Resume = False,
        out: Runs = Path("runs"),
        ray: Ray = 0,
        as_json: options.Json = False,
        **choices: Any,
    ) -> None:
        with handle_errors():
            from invariant_rag_benchmarks.runner import run_benchmark

            config = BenchmarkConfig(benchmark.name, settings=parse_settings(words or ()), **choices)
            disable_transformers_bars()
            progress = progress_bar if config.is_main_process else no_progress
            finished = run_benchmark(config, out, resume=resume, actors=ray, progress=progress)
            if not config.is_main_process:
                return
            if as_json:
                print_json({"folder": str(finished.folder), "config": finished.config, "summary": finished.summary})
            else:
                print_text(finished.markdown(), end="")
                print_text(f"\n{finished.folder}", style="dim")

    settings = "\n\n".join(
        f"{name}={each.default}: {each.description}" for name, each in benchmark.settings.model_fields.items()
    )
    about = f"{benchmark.about}\n\nSource: {benchmark.paper}. Variants: {benchmark.variants}. Settings:\n\n{settings}"
    app.command(benchmark.name, help=about, short_help=benchmark.about)(command)


for _benchmark in BENCHMARKS.values():
    _add_command(_benchmark)
app.command("speed")(speed)
app.command("serve")(load)
app.command("vllm")(vllm)
