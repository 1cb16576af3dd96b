"""Run a benchmark: ask every case once, and write the records of a batch before the next batch is asked.

A run is a folder: `config.json` (what decides the records, versions, and the attention backend), `records.jsonl`
(append-only, one line per case), `summary.json` and `timing.json`. Its name ends with a key of the config, so that
another config is another run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.attention import backend_label
from invariant_rag.checks import check_real, require_extra
from invariant_rag.errors import InvalidChoice, InvalidRun, RunExists, UnsupportedCombination
from invariant_rag.evaluation.progress import Progress, no_progress
from invariant_rag.files import encode_json, make_folder, parse_json, read_bytes, write_file

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.answering import Answerer
from invariant_rag_benchmarks.base import Record, Selection
from invariant_rag_benchmarks.case_loading import load_cases
from invariant_rag_benchmarks.config import (
    BenchmarkConfig,
    package_versions,
    resolve_config,
    run_folder_name,
)
from invariant_rag_benchmarks.record_file import RecordFile
from invariant_rag_benchmarks.report import markdown, summarise
from invariant_rag_benchmarks.sources import DataSource

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


def run_benchmark(
    config: BenchmarkConfig,
    out: Path,
    *,
    resume: bool = False,
    model: InvariantModel | None = None,
    actors: int = 0,
    progress: Progress = no_progress,
) -> BenchmarkRun:
    """Run a benchmark, and write it into a folder of its own below `out`.

    Args:
        config: What to run.
        out: Folder of the runs.
        resume: Continue a run of the same config, or start it if there is none.
        model: The model, if it is loaded already; it is used with the config's method, ordering and overflow.
        actors: Number of Ray actors that share the cases, each with a model of its own. 0: run in this process.
        progress: Shows a progress bar; one step per record.

    Raises:
        RunExists: There is a run of this config, and `resume` is false.
        InvalidDataset: A record is not in the format of the benchmark's README.
        InvalidRun: A file of the run is not one that a run writes.
        UnusableFile: The folder cannot be written, or another process continues the run.
        DatasetUnavailable: The benchmark's data cannot be found or downloaded.
        ContextOverflow: A prompt is too long, and `overflow` is `error`.
        ExtraRequired: SciPy is not installed, or actors were requested, and Ray is not.
        UnsupportedCombination: Both actors and tensor parallelism were requested.
    """
    check_extras(actors)
    benchmark = resolve_benchmark(config.benchmark)
    settings = benchmark.parse_settings(config.settings)
    if actors and config.tensor_parallel:
        raise UnsupportedCombination("actors hold a model each, and tensor parallelism splits one over all processes")
    if config.is_main_process:
        make_folder(out)
    source = DataSource(config.data)
    # Before the model, which may take minutes to load: a missing file is found at once.
    tokenizer = config.load_tokenizer() if model is None else model.tokenizer
    cases = load_cases(benchmark, source, settings, Selection(config.limit, config.seed, tokenizer))
    if not cases:
        raise InvalidChoice(f"{config.benchmark}: these settings leave no case to ask")
    lm = _load(config, model, actors, progress)
    resolved = resolve_config(config, benchmark, settings, source, lm)
    folder = out / run_folder_name(resolved)
    if config.is_main_process:
        _create_folder(folder, {**resolved, **_computed_with(lm)}, resume)
    ids = {case.id for case in cases}
    with RecordFile(folder / "records.jsonl", resolved["key"], writes=config.is_main_process) as file:
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
        label = f"{config.benchmark}, {resolved['method']} {resolved['ordering']}"
        start = perf_counter()
        with progress(label, len(cases), len(known)) as advance:
            for batch_records in results:
                file.append(batch_records)
                for _ in batch_records:
                    advance()
        elapsed = perf_counter() - start
        records = [file.records[case.id] for case in cases]
    summary = summarise(benchmark, records, config.seed)
    if config.is_main_process:
        document = {**summary, "limit": config.limit, "config": resolved, **_computed_with(lm)}
        _write_json(folder / "summary.json", document)
    answered = 0 if lm is None else sum(map(len, batches))
    seconds = _add_timing(folder / "timing.json", answered, elapsed, writes=config.is_main_process)
    return BenchmarkRun(folder, resolved, records, summary, seconds)


def run_several(
    configs: Sequence[BenchmarkConfig], out: Path, *, resume: bool = False, progress: Progress = no_progress
) -> list[BenchmarkRun]:
    """Run benchmarks one after the other with a model that is loaded once: that of the first config.

    Args:
        configs: What to run; they differ in anything but the model, its dtype and its devices.
        out: Folder of the runs.
        resume: Continue runs of the same config.
        progress: Shows a progress bar for each run.

    Raises:
        InvariantRAGError: As `run_benchmark`; wrong settings, methods and data before the model is loaded.
    """
    check_extras()
    tokenizer = configs[0].load_tokenizer()
    for config in configs:
        benchmark = resolve_benchmark(config.benchmark)
        selection = Selection(config.limit, config.seed, tokenizer)
        load_cases(benchmark, DataSource(config.data), benchmark.parse_settings(config.settings), selection)
    with progress("Loading"):
        model = configs[0].load_model()
    return [run_benchmark(config, out, resume=resume, model=model, progress=progress) for config in configs]


def check_extras(actors: int = 0) -> None:
    """Check that the packages are installed that a run needs, before data or a model are loaded.

    Args:
        actors: Number of Ray actors.

    Raises:
        ExtraRequired: One is not.
    """
    require_extra("scipy", "evaluation")
    if actors:
        require_extra("ray", "ray")


def _load(
    config: BenchmarkConfig, model: InvariantModel | None, actors: int, progress: Progress
) -> InvariantModel | None:
    """Return the model of a run in this process; None if actors load it."""
    if model is not None:
        return config.configure(model)
    if actors:
        return None
    with progress("Loading"):
        return config.load_model()


def _computed_with(lm: InvariantModel | None) -> dict[str, Any]:
    """Return versions, and the backend with its kernel; not if Ray actors load the model, each on its machine."""
    attention = {} if lm is None else {"attention": backend_label(lm.backend, lm.model)}
    return {"versions": package_versions(), **attention}


def _create_folder(folder: Path, config: Mapping[str, Any], resume: bool) -> None:
    if folder.exists() and not resume:
        raise RunExists(f"{str(folder)!r} exists")
    make_folder(folder)
    if not (folder / "config.json").exists():
        _write_json(folder / "config.json", config)


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
