"""`invariant-rag bench NAME`: run a benchmark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_table, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar

from invariant_rag_benchmarks import BENCHMARKS, Benchmark
from invariant_rag_benchmarks.commands.measure import speed, vllm
from invariant_rag_benchmarks.config import BenchmarkConfig

Resume = Annotated[bool, typer.Option("--resume", help="Continue a run of the same settings.")]
Runs = Annotated[Path, typer.Option("--out", help="Folder of the runs; each gets a folder of its own.")]

app = typer.Typer(
    no_args_is_help=True, add_completion=False, rich_markup_mode=None, help="Run a benchmark over segment orders."
)


@app.command("list")
def list_benchmarks(as_json: options.Json = False) -> None:
    """List the benchmarks with their settings."""
    rows = []
    for name, each in BENCHMARKS.items():
        settings = {key: field.default for key, field in each.settings.model_fields.items()}
        shown = settings if as_json else ", ".join(f"{key}={value}" for key, value in settings.items())
        rows.append({"benchmark": name, "about": each.about, "settings": shown, "metric": each.metric})
    print_table(rows, as_json)


def _add_command(benchmark: Benchmark[Any]) -> None:
    """Add the command of a benchmark."""

    @options.with_fields(BenchmarkConfig)
    def command(
        *,
        words: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="A setting; see above. Repeatable.", show_default=False),
        ] = None,
        resume: Resume = False,
        out: Runs = Path("runs"),
        as_json: options.Json = False,
        **choices: Any,
    ) -> None:
        with handle_errors():
            names = ("model", "method", "ordering", "device_map")
            options.check_model_options(**{name: choices[name] for name in names})
            from invariant_rag_benchmarks.runner import run_benchmark

            if wrong := [word for word in words or () if "=" not in word]:
                raise typer.BadParameter(f"--set: expected NAME=VALUE, got {wrong[0]!r}")
            settings = {name.strip(): value for name, _, value in (word.partition("=") for word in words or ())}
            config = BenchmarkConfig(benchmark.name, settings=settings, **choices)
            disable_transformers_bars()
            finished = run_benchmark(config, out, resume=resume, progress=progress_bar)
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
app.command("vllm")(vllm)
