"""`invariant-rag bench NAME`: run a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from invariant_rag.cli.console import errors_in_red, print_json, print_table, say
from invariant_rag.cli.speed import speed
from invariant_rag.evaluation.benchmarks import BENCHMARKS, Benchmark

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Run a benchmark on real data, over orders.")

Model = Annotated[str | None, typer.Option(help="Model id or folder.", show_default="the embedded model")]
Data = Annotated[
    Path | None,
    typer.Option(help="The benchmark's file, or a folder that holds it.", show_default="the public source"),
]
Limit = Annotated[int | None, typer.Option(min=1, help="The most questions.", show_default="all")]
Seed = Annotated[int, typer.Option(help="Seed of the sample of questions, and of what is drawn.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on with a run of the same settings.")]
Out = Annotated[Path, typer.Option(help="Folder of the runs; each gets a folder of its own.")]
Actors = Annotated[
    int,
    typer.Option("--ray", min=0, metavar="ACTORS", help="Share the cases out among Ray actors."),
]
BatchSize = Annotated[int, typer.Option(min=1, help="Prompts that are decoded together.")]
DType = Annotated[str, typer.Option(help="As in transformers: auto, float32, bfloat16...")]
DeviceMap = Annotated[str, typer.Option(help="As in transformers: auto spreads a large model over all devices.")]
TensorParallel = Annotated[
    bool, typer.Option("--tp", help="Split every layer over the processes that torchrun started: tensor parallelism.")
]
TooLong = Annotated[
    Literal["error", "drop_last", "trim_segments"], typer.Option("--overflow", help="What happens to long prompts.")
]


@contextmanager
def counting(label: str, *, shown: bool = True) -> Iterator[tuple[Callable[[str, int, int], None], Callable[[], None]]]:
    """Show a progress bar on stderr. Yield what starts a count (label, all, done), and what moves it one step."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as bar:
        task = bar.add_task(label, total=None)

        def start(text: str, total: int, done: int) -> None:
            bar.reset(task, total=total, completed=done, description=text)

        yield start, lambda: bar.advance(task)


def parse_settings(words: Iterable[str]) -> dict[str, str]:
    """Read `NAME=VALUE` words."""
    settings = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise typer.BadParameter(f"--set: expected NAME=VALUE, got {word!r}")
        settings[name.strip()] = value
    return settings


@app.command("list")
def list_benchmarks(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the benchmarks with their settings."""
    rows = []
    for name, each in BENCHMARKS.items():
        settings = each.described_settings()
        shown = settings if as_json else ", ".join(f"{key}={value}" for key, value in settings.items())
        rows.append({"benchmark": name, "about": each.about, "settings": shown, "metric": each.metric})
    print_table(rows, as_json)


def _add(benchmark: Benchmark) -> None:
    """Add the command of a benchmark."""
    settings = ", ".join(f"{name}={value}" for name, value in benchmark.described_settings().items())

    def command(
        model: Model = None,
        method: Annotated[str, typer.Option(help="See `invariant-rag methods`.")] = "rotor",
        ordering: Annotated[
            str | None, typer.Option(help="See `invariant-rag orderings`.", show_default="the method's own")
        ] = None,
        alpha: Annotated[
            float | None,
            typer.Option(help="Route between the plain model and the method: margin of selective routing."),
        ] = None,
        words: Annotated[
            list[str] | None,
            typer.Option("--set", metavar="NAME=VALUE", help="A setting; see above. Repeatable.", show_default=False),
        ] = None,
        data: Data = None,
        limit: Limit = None,
        seed: Seed = 0,
        resume: Resume = False,
        out: Out = Path("runs"),
        batch_size: BatchSize = 8,
        max_new_tokens: Annotated[
            int | None, typer.Option(min=1, help="Longest output, in tokens.", show_default="the benchmark's own")
        ] = None,
        overflow: TooLong = "error",
        dtype: DType = "auto",
        device_map: DeviceMap = "auto",
        tensor_parallel: TensorParallel = False,
        ray: Actors = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
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


def _run(planned: dict[str, Any], out: Path, *, resume: bool, actors: int, as_json: bool) -> None:
    with errors_in_red():
        from invariant_rag.evaluation.benchmarks.runner import Plan, run

        plan = Plan(**planned)
        with counting("Loading", shown=plan.leads) as (start, step):
            from transformers.utils.logging import disable_progress_bar

            disable_progress_bar()  # ours is on screen already
            finished = run(
                plan,
                out,
                resume=resume,
                actors=actors,
                on_start=lambda cases, done: start("Asking", cases, done),
                on_record=step,
            )
        if not plan.leads:
            return
        if as_json:
            print_json({"folder": str(finished.folder), "config": finished.config, "summary": finished.summary})
        else:
            say(finished.markdown(), end="")
            say(f"\n{finished.folder}", style="dim")


for _benchmark in BENCHMARKS.values():
    _add(_benchmark)
app.command("speed")(speed)
