"""Run a benchmark: ask every case once, and write the records of a batch before the next batch is asked.

A run is a folder: `config.json` (what decides the records, versions, and the attention backend), `records.jsonl`
(append-only, one line per case), `summary.json` and `timing.json`. Its name ends with a key of the config, so that
another config is another run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.progress import Progress, no_progress
from invariant_rag.checks import check_real, require_extra
from invariant_rag.errors import InvalidChoice, InvalidRun, RunExists, UnsupportedCombination
from invariant_rag.files import encode_json, make_folder, parse_json, read_bytes, write_file

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.base import Benchmark, Case, Record, Selection
from invariant_rag_benchmarks.config import BenchmarkConfig, package_versions, resolve_config, run_folder_name
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.record_file import RecordFile
from invariant_rag_benchmarks.report import markdown, summarise

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel


@dataclass(frozen=True)
class BenchmarkRun:
    """A finished run.

    Attributes:
        folder: Its folder.
        config: Everything that decides the records, as of `resolve_config`.
        records: One per case, in the order of the cases.
        summary: Its figures.
        seconds: Mean time per record, over every session of the run in one process; None if no session was.
    """

    folder: Path
    config: Mapping[str, Any]
    records: Sequence[Record]
    summary: Mapping[str, Any]
    seconds: float | None = None

    def markdown(self) -> str:
        """Return the run as Markdown, with published numbers if there are any."""
        return markdown(self.config, self.summary, self.records, self.seconds)


@dataclass(frozen=True)
class _Plan:
    """A run whose data are read, and whose folder is known."""

    config: BenchmarkConfig
    benchmark: Benchmark[Any]
    cases: Sequence[Case]
    resolved: Mapping[str, Any]
    folder: Path


def run_benchmark(
    config: BenchmarkConfig,
    out: Path,
    *,
    resume: bool = False,
    model: InvariantModel | None = None,
    actors: int = 0,
    progress: Progress = no_progress,
) -> BenchmarkRun:
    """Run a benchmark, and write it into a folder of its own below `out`; see `run_several`."""
    return run_several([config], out, resume=resume, model=model, actors=actors, progress=progress)[0]


def run_several(
    configs: Sequence[BenchmarkConfig],
    out: Path,
    *,
    resume: bool = False,
    model: InvariantModel | None = None,
    actors: int = 0,
    progress: Progress = no_progress,
) -> list[BenchmarkRun]:
    """Run benchmarks one after the other with a model that is loaded once, after the data of all of them are read.

    Args:
        configs: What to run; they differ in anything but the model, its dtype and its devices.
        out: Folder of the runs; each gets a folder of its own.
        resume: Continue runs of the same config, or start them if there are none.
        model: The model, if it is loaded already; it is used with the choices of each config.
        actors: Number of Ray actors that share the cases, each with a model of its own. 0: run in this process.
        progress: Shows a progress bar for each run; one step per record.

    Raises:
        RunExists: There is a run of a config, and `resume` is false.
        InvalidDataset: A record is not in the format of the benchmark's page.
        InvalidRun: A file of the run is not one that a run writes.
        UnusableFile: The folder cannot be written, or another process continues the run.
        DatasetUnavailable: The benchmark's data cannot be found or downloaded.
        ContextOverflow: A prompt is too long, and `overflow` is `error`.
        ExtraRequired: SciPy is not installed, or actors were requested, and Ray is not.
        UnsupportedCombination: Both actors and tensor parallelism were requested.
    """
    require_extra("scipy", "evaluation")
    if actors:
        require_extra("ray", "ray")
    if any(actors and config.tensor_parallel for config in configs):
        raise UnsupportedCombination("actors hold a model each, and tensor parallelism splits one over all processes")
    if any(config.is_main_process for config in configs):
        make_folder(out)
    plans = [_plan(config, out, model, resume=resume) for config in configs]
    if model is None and not actors and plans:
        with progress("Loading"):
            model = configs[0].load_model()
    return [_run(plan, model, actors=actors, progress=progress) for plan in plans]


def _plan(config: BenchmarkConfig, out: Path, model: InvariantModel | None, *, resume: bool) -> _Plan:
    """Read the data of a run, before a model is loaded, which may take minutes."""
    benchmark, source = resolve_benchmark(config.benchmark), DataSource(config.data)
    settings = benchmark.parse_settings(config.settings)
    tokenizer = cache(config.load_tokenizer if model is None else lambda: model.tokenizer)
    cases = benchmark.load(source, settings, Selection(config.limit, config.seed, tokenizer))
    if not cases:
        raise InvalidChoice(f"{config.benchmark}: these settings leave no case to ask")
    resolved = resolve_config(config, benchmark, settings, source, model)
    folder = out / run_folder_name(resolved)
    if config.is_main_process and folder.exists() and not resume:
        raise RunExists(f"{str(folder)!r} exists")
    return _Plan(config, benchmark, cases, resolved, folder)


def _run(plan: _Plan, model: InvariantModel | None, *, actors: int, progress: Progress) -> BenchmarkRun:
    from invariant_rag_benchmarks.answering import Answerer

    config, cases, folder = plan.config, plan.cases, plan.folder
    lm = None if model is None or actors else config.configure(model)
    computed_with = _computed_with(lm)
    if config.is_main_process:
        make_folder(folder)
        if not (folder / "config.json").exists():
            _write_json(folder / "config.json", {**plan.resolved, **computed_with})
    ids = {case.id for case in cases}
    with RecordFile(folder / "records.jsonl", plan.resolved["key"], writes=config.is_main_process) as file:
        known = ids & file.records.keys()
        batches = [
            [case for case in cases[start : start + config.batch_size] if case.id not in known]
            for start in range(0, len(cases), config.batch_size)
        ]
        batches = [batch for batch in batches if batch]
        results: Iterable[list[Record]]
        if lm is not None:
            results = map(Answerer(config, lm), batches)
        else:
            from invariant_rag_benchmarks.ray_map import ray_map

            results = ray_map(lambda: Answerer(config, config.load_model()), batches, actors)
        start = perf_counter()
        label = f"{config.benchmark}, {config.method} {plan.resolved['ordering']}"
        with progress(label, len(cases), len(known)) as advance:
            for batch_records in results:
                file.append(batch_records)
                for _ in batch_records:
                    advance()
        elapsed = perf_counter() - start
        records = [file.records[case.id] for case in cases]
    summary = summarise(plan.benchmark, records, config.seed)
    if config.is_main_process:
        document = {**summary, "limit": config.limit, "config": plan.resolved, **computed_with}
        _write_json(folder / "summary.json", document)
    answered = 0 if lm is None else sum(map(len, batches))
    seconds = _add_timing(folder / "timing.json", answered, elapsed, writes=config.is_main_process)
    return BenchmarkRun(folder, plan.resolved, records, summary, seconds)


def _computed_with(lm: InvariantModel | None) -> dict[str, Any]:
    """Return versions, and the backend with its kernel; not if Ray actors load the model, each on its machine."""
    from invariant_rag.attention import backend_label

    attention = {} if lm is None else {"attention": backend_label(lm.backend, lm.model)}
    return {"versions": package_versions(), **attention}


def _add_timing(path: Path, records: int, seconds: float, *, writes: bool) -> float | None:
    """Add a session to the timing of a run, and return its mean time per record; None if nothing was timed.

    It is no part of the records or of the summary, which are the same however often a run was interrupted.
    """
    timing = _read_timing(path) if path.exists() else {"records": 0, "seconds": 0.0}
    if records:
        timing = {"records": timing["records"] + records, "seconds": timing["seconds"] + seconds}
        if writes:
            _write_json(path, timing)
    return timing["seconds"] / timing["records"] if timing["records"] else None


def _read_timing(path: Path) -> dict[str, float]:
    try:
        timing = parse_json(read_bytes(path))
        return {name: check_real(name, timing[name]) for name in ("records", "seconds")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        hint = "Remove it: it holds nothing but the time that the run took."
        raise InvalidRun(f"{path}: expected the numbers records and seconds: {error}", hint=hint) from error


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_file(path, encode_json(document, indent=2) + b"\n")
