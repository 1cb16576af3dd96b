"""`invariant-rag bench NAME`, and what order invariance costs: `bench speed` here, and `bench vllm` on a server."""

from __future__ import annotations

import os
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from invariant_rag.checks import require_extra
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_json, print_note, print_table, print_text, print_warning
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.cli.serve import check_answers
from invariant_rag.errors import ToyModelWarning
from invariant_rag.files import encode_json, make_folder, write_file

from invariant_rag_benchmarks import BENCHMARKS, Benchmark
from invariant_rag_benchmarks.config import BenchmarkConfig, ServingConfig, SpeedConfig

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


def note_toy(model: str | None) -> None:
    """Say that a toy answered, where no model was named."""
    if model is None:
        print_warning(str(ToyModelWarning()))


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
            from invariant_rag_benchmarks.runner import run_benchmark

            if wrong := [word for word in words or () if "=" not in word]:
                raise typer.BadParameter(f"--set: expected NAME=VALUE, got {wrong[0]!r}")
            settings = {name.strip(): value for name, _, value in (word.partition("=") for word in words or ())}
            config = BenchmarkConfig(benchmark.name, settings=settings, **choices)
            disable_transformers_bars()
            finished = run_benchmark(config, out, resume=resume, progress=progress_bar)
            note_toy(config.model)
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


@app.command()
@options.with_fields(SpeedConfig)
def speed(
    *,
    methods: Annotated[
        list[str] | None, options.option_of("methods", "A method. Repeatable.", "--method", show_default="all")
    ] = None,
    tokens: Annotated[
        list[int] | None, typer.Option(min=100, max=1 << 18, help="Tokens of a prompt. Repeatable.")
    ] = None,
    segments: Annotated[list[int] | None, typer.Option(min=1, help="Segments of a prompt. Repeatable.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for speed.json.")] = None,
    as_json: options.Json = False,
    **choices: Any,
) -> None:
    """Measure prefill, decoding and memory of methods against the plain model, side by side.

    Compare ratios, which are medians over rounds in which everything runs in turn, and not seconds. The floor is the
    least that attention in both directions between segments costs. FLOPs are counted up to the first token, on a CPU;
    peak memory on a GPU.
    """
    with handle_errors():
        from invariant_rag.methods import METHODS, resolve_method

        chosen = methods or [name for name in METHODS if name != "sequential"]
        for name in chosen:
            resolve_method(name)
        sizes = dict.fromkeys(product(tokens or [2500], segments or [20]))
        configs = [SpeedConfig(tokens=length, segments=count, **choices) for length, count in sizes]
        if out is not None:
            make_folder(out)
        from invariant_rag_benchmarks.speed import measure  # imports PyTorch, which takes seconds

        one = configs[0]
        print_note(
            f"measuring {', '.join(chosen)} against the plain model: first token and {one.new_tokens} further tokens, "
            f"{', '.join(f'{each.tokens} tokens in {each.segments} segments' for each in configs)}, shape "
            f"{one.shape}, {one.dtype} on {one.device}, rounds: {one.repeats}; random weights, nothing is downloaded"
        )
        measured = [measure(config, chosen, progress_bar) for config in configs]
        _finish(measured, out, "speed.json", as_json)
    for each in () if as_json else measured:
        setting, machine = each["setting"], each["environment"]
        print_text(
            f"\n{setting['tokens']} tokens in {setting['segments']} segments, shape {setting['shape']}, "
            f"{setting['dtype']}, {machine['device']}, {machine['threads']} threads",
            style="bold",
        )
        print_table([_row(row, each["floor"]) for row in each["rows"]], as_json=False)


def _row(row: dict[str, Any], floor: float) -> dict[str, str]:
    seconds = row["prefill"]["seconds"]
    ratios = {name: "?" if ratio is None else f"{ratio:.2f}x" for name, ratio in row["ratios"].items()}
    return {
        "": row["name"],
        "first token": ratios["prefill"],
        "floor": f"{floor:.2f}x",
        "FLOPs": ratios["flops"],
        "seconds": f"{sorted(seconds)[len(seconds) // 2]:.2f} ({min(seconds):.2f} to {max(seconds):.2f})",
        "each further token": ratios["decode"],
        "all tokens": ratios["whole"],
        "peak memory": ratios["peak"],
    }


def _finish(measured: Any, out: Path | None, name: str, as_json: bool) -> None:
    """Write what was measured into the folder, if there is one, and print it as JSON, if wished for."""
    if out is not None:
        write_file(out / name, encode_json(measured, indent=1) + b"\n")
    if as_json:
        print_json(measured)


@app.command()
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

        check_method_and_ordering(method, ordering)
        each_once = tuple(dict.fromkeys(clients or (1, 8, 32))), tuple(dict.fromkeys(questions or (1, 4, 16)))
        config = ServingConfig(*each_once, **choices)
        if out is not None:
            make_folder(out)
        check_answers(url)
        require_extra("vllm_invariant_rag", "vllm")
        from vllm_invariant_rag import VLLMBackend  # imports PyTorch, as does what follows

        from invariant_rag_benchmarks.speed import MEASURES, environment, measure_serving

        disable_transformers_bars()
        key = os.environ.get(UPSTREAM_KEY_VARIABLE, "").strip() or None
        served = VLLMBackend(url=url, method=method, ordering=ordering, api_key=key)
        measured = {"environment": environment(), **measure_serving(served.with_tenant, config, progress_bar)}
        _finish(measured, out, "serve.json", as_json)
    if not as_json:
        print_text(f"{config.requests} requests, {method}, against plain ones: median (lowest to highest)")
        shown = [
            {
                "clients": str(each["clients"]),
                "questions per set": str(each["questions"]),
                "state": each["state"],
                **{name: "{:.2f}x ({:.2f} to {:.2f})".format(*each[name]) for name in MEASURES},
            }
            for each in measured["ratios"]
        ]
        print_table(shown, as_json=False)
