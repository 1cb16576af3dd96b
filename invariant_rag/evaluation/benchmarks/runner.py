"""Run a benchmark: ask every case once, and write the records of a batch before the next batch is asked.

A run is a folder: `config.json` (everything that decides the records, and versions), `records.jsonl` (append-only, one
line per case) and `summary.json`. Its name ends with a key of the config, so that another config is another run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import InvalidChoice, RunExists, UnsupportedCombination
from invariant_rag.evaluation.benchmarks import resolve_benchmark
from invariant_rag.evaluation.benchmarks.base import Benchmark, Case, Record, Selection
from invariant_rag.evaluation.benchmarks.config import (
    BenchmarkConfig,
    package_versions,
    resolve_config,
    run_folder_name,
)
from invariant_rag.evaluation.benchmarks.record_file import RecordFile
from invariant_rag.evaluation.benchmarks.report import markdown, summarise
from invariant_rag.evaluation.benchmarks.sources import DataSource
from invariant_rag.evaluation.progress import Progress, no_progress
from invariant_rag.methods import resolve_method

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_ROUTING_FIELDS = ("branch", "plain_confidence", "invariant_confidence")
"""Attributes of a routed generation that go into its record."""


@dataclass(frozen=True)
class BenchmarkRun:
    """A finished run.

    Attributes:
        folder: Its folder.
        config: Everything that decides the records, as of `resolve_config`.
        records: One per case, in the order of the cases.
        summary: Its figures.
    """

    folder: Path
    config: Mapping[str, Any]
    records: Sequence[Record]
    summary: Mapping[str, Any]

    def markdown(self) -> str:
        """Return the run as Markdown, with published numbers if there are any."""
        return markdown(self.config, self.summary, self.records)


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
        DatasetUnavailable: The benchmark's data cannot be found or downloaded.
        ContextOverflow: A prompt is too long, and `overflow` is `error`.
        ExtraRequired: Actors were requested, and Ray is not installed.
        UnsupportedCombination: Both actors and tensor parallelism were requested.
    """
    benchmark = resolve_benchmark(config.benchmark)
    settings = benchmark.parse_settings(config.settings)
    resolve_method(config.method)
    if actors and config.tensor_parallel:
        raise UnsupportedCombination("actors hold a model each, and tensor parallelism splits one over all processes")
    lm = _load(config, model, actors, progress)
    source = DataSource(config.data)
    tokenizer = config.load_tokenizer() if lm is None else lm.tokenizer
    cases = benchmark.load(source, settings, Selection(config.limit, config.seed, tokenizer))
    if not cases:
        raise InvalidChoice(f"{config.benchmark}: these settings leave no case to ask")
    resolved = resolve_config(config, benchmark, settings, source, lm)
    folder = out / run_folder_name(resolved)
    if config.is_main_process:
        _create_folder(folder, resolved, resume)
    ids = {case.id for case in cases}
    with RecordFile(folder / "records.jsonl", resolved["key"], writes=config.is_main_process) as file:
        known = ids & file.records.keys()
        batches = [
            [case for case in cases[start : start + config.batch_size] if case.id not in known]
            for start in range(0, len(cases), config.batch_size)
        ]
        batches = [batch for batch in batches if batch]
        max_new_tokens = resolved["max_new_tokens"]
        results: Iterator[list[Record]]
        if lm is not None:
            routed = config.with_routing(lm)
            results = (answer_cases(routed, benchmark, batch, max_new_tokens) for batch in batches)
        else:
            from invariant_rag.evaluation.ray_map import ray_map

            results = ray_map(lambda: ActorModel(config, max_new_tokens), batches, actors)
        label = f"{config.benchmark}, {resolved['method']} {resolved['ordering']}"
        with progress(label, len(cases), len(known)) as advance:
            for batch_records in results:
                file.append(batch_records)
                for _ in batch_records:
                    advance()
        records = [file.records[case.id] for case in cases]
    summary = summarise(benchmark, records, config.seed)
    if config.is_main_process:
        document = {**summary, "limit": config.limit, "config": resolved, "versions": package_versions()}
        _write_json(folder / "summary.json", document)
    return BenchmarkRun(folder, resolved, records, summary)


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


def _create_folder(folder: Path, resolved: Mapping[str, Any], resume: bool) -> None:
    if folder.exists() and not resume:
        raise RunExists(f"{str(folder)!r} exists")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        _write_json(folder / "config.json", {**resolved, "versions": package_versions()})


class ActorModel:
    """A model that answers batches of cases within a Ray actor.

    Args:
        config: The config of the run.
        max_new_tokens: Longest output.
    """

    def __init__(self, config: BenchmarkConfig, max_new_tokens: int) -> None:
        self._benchmark = resolve_benchmark(config.benchmark)
        self._lm = config.with_routing(config.load_model())
        self._max_new_tokens = max_new_tokens

    def __call__(self, batch: Sequence[Case]) -> list[Record]:
        """Return the records of a batch."""
        return answer_cases(self._lm, self._benchmark, batch, self._max_new_tokens)


def answer_cases(lm: InvariantModel, benchmark: Benchmark, batch: Sequence[Case], max_new_tokens: int) -> list[Record]:
    """Generate or choose the outputs of a batch of cases, and return their records."""
    if all(case.candidates for case in batch):
        return [_choose_candidate(lm, benchmark, case) for case in batch]
    generations = lm.generate([case.prompt(lm) for case in batch], max_new_tokens=max_new_tokens)
    return [
        _record(benchmark, case, each.text, each, dropped=len(each.dropped), trimmed=len(each.trimmed))
        for case, each in zip(batch, generations, strict=True)
    ]


def _choose_candidate(lm: InvariantModel, benchmark: Benchmark, case: Case) -> Record:
    prompt = case.prompt(lm)
    logprobs = lm.score(prompt, case.candidates)
    prepared = lm.prepare(prompt, new_tokens=1)
    likeliest = case.candidates[logprobs.index(max(logprobs))]
    record = _record(benchmark, case, likeliest, logprobs, dropped=len(prepared.dropped), trimmed=len(prepared.trimmed))
    return {**record, "logprobs": list(logprobs)}


def _record(benchmark: Benchmark, case: Case, output: str, result: Any, *, dropped: int, trimmed: int) -> Record:
    """Score an output, and return its record. `result` is the generation or the scores, with fields of routing."""
    scored = benchmark.score(case, output)
    routing = {name: getattr(result, name) for name in _ROUTING_FIELDS if hasattr(result, name)}
    return {
        "id": case.id,
        "question": case.question,
        "variant": case.variant,
        "group": case.group,
        "output": output,
        "answer": scored.answer,
        "scores": dict(scored.scores),
        "dropped": dropped,
        "trimmed": trimmed,
        **routing,
    }


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON atomically, so that nobody reads half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
