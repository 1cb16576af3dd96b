"""Run a benchmark: ask every case once, and write the records of a batch before the next batch is asked.

A run is a folder: `config.json` (what decides the records, versions, and the attention backend), `records.jsonl`
(append-only, one line per case) and `summary.json`. Its name ends with a key of the config, so that
another config is another run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.audit.folder import LineFile
from invariant_rag.checks import require_extra
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.files import encode_json, make_folder, write_file
from invariant_rag.orderings import Relevance
from invariant_rag.prompts import tokenize_prompt
from pydantic import ConfigDict

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.base import Benchmark, Case, Example, Record, Selection, Text, parse_example
from invariant_rag_benchmarks.config import BenchmarkConfig, package_versions, resolve_config, run_folder_name
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.errors import InvalidDataset, InvalidRun, RunExists
from invariant_rag_benchmarks.report import markdown, summarize

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt

_ROUTING_FIELDS = ("branch", "plain_confidence", "invariant_confidence")
"""Attributes of a routed result that go into its record."""


@dataclass(frozen=True)
class BenchmarkRun:
    """A finished run."""

    folder: Path
    config: Mapping[str, Any]  # everything that decides the records, as of `resolve_config`
    records: Sequence[Record]  # in the order of the cases
    summary: Mapping[str, Any]  # its figures

    def markdown(self) -> str:
        """Return the run as Markdown."""
        return markdown(self.config, self.summary)


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
    progress: Progress = no_progress,
) -> BenchmarkRun:
    """Run a benchmark, and write it into a folder of its own below `out`; see `run_several`."""
    return run_several([config], out, resume=resume, model=model, progress=progress)[0]


def run_several(
    configs: Sequence[BenchmarkConfig],
    out: Path,
    *,
    resume: bool = False,
    model: InvariantModel | None = None,
    progress: Progress = no_progress,
) -> list[BenchmarkRun]:
    """Run benchmarks one after the other with a model that is loaded once, after the data of all of them are read.

    Args:
        configs: What to run; they differ in anything but the model, its dtype and its devices.
        out: Folder of the runs; each gets a folder of its own.
        resume: Continue runs of the same config, or start them if there are none.
        model: The model, if it is loaded already; it is used with the choices of each config.
        progress: Shows a progress bar for each run; one step per record.

    Raises:
        RunExists: There is a run of a config, and `resume` is false.
        InvalidDataset: A record is not in the format of the benchmark's page.
        InvalidRun: A file of the run is not one that a run writes.
        UnusableFile: The folder cannot be written, or another process continues the run.
        DatasetUnavailable: The benchmark's data cannot be found or downloaded.
        ContextOverflow: A prompt is too long, and `overflow` is `error`.
        UnsupportedCombination: A benchmark asks for texts, and the ensemble only scores candidates.
        ExtraRequired: SciPy is not installed.
    """
    require_extra("scipy", "evaluation")
    make_folder(out)
    plans = [_plan(config, out, model, resume=resume) for config in configs]
    if model is None and plans:
        with progress("Loading"):
            model = configs[0].load_model()
    return [_run(plan, model, progress) for plan in plans if model is not None]


def _plan(config: BenchmarkConfig, out: Path, model: InvariantModel | None, *, resume: bool) -> _Plan:
    """Read the data of a run, before a model is loaded, which may take minutes."""
    from invariant_rag.models.loading import load_tokenizer

    benchmark, source = resolve_benchmark(config.benchmark), DataSource(config.data)
    settings = benchmark.parse_settings(config.settings)
    tokenizer = cache(lambda: load_tokenizer(config.model) if model is None else model.tokenizer)
    cases = benchmark.load(source, settings, Selection(config.limit, config.seed, tokenizer))
    if not cases:
        raise InvalidChoice(f"{config.benchmark}: these settings leave no case to ask")
    resolved = resolve_config(config, benchmark, settings, source, model)
    folder = out / run_folder_name(resolved)
    if folder.exists() and not resume:
        raise RunExists(f"{str(folder)!r} exists")
    return _Plan(config, benchmark, cases, resolved, folder)


def _run(plan: _Plan, model: InvariantModel, progress: Progress) -> BenchmarkRun:
    from invariant_rag.attention import backend_label

    config, cases, folder, key = plan.config, plan.cases, plan.folder, plan.resolved["key"]
    lm = config.configure(model)
    computed_with = {"versions": package_versions(), "attention": backend_label(lm.backend, lm.model)}
    make_folder(folder)
    if not (folder / "config.json").exists():
        _write_json(folder / "config.json", {**plan.resolved, **computed_with})
    answerer = Answerer(config, lm)
    with open_records(folder / "records.jsonl", key) as file:
        known = {record["id"]: record for record in file.lines}
        batches = [
            [case for case in cases[start : start + config.batch_size] if case.id not in known]
            for start in range(0, len(cases), config.batch_size)
        ]
        label = f"{config.benchmark}, {config.method} {plan.resolved['ordering']}"
        with progress(label, len(cases), len({case.id for case in cases} & known.keys())) as advance:
            for batch in filter(None, batches):
                records = [{**record, "run": key} for record in answerer(batch)]
                file.append(records)
                known |= {record["id"]: record for record in records}
                for _ in records:
                    advance()
    found = [known[case.id] for case in cases]
    summary = summarize(plan.benchmark, found, config.seed)
    _write_json(folder / "summary.json", {**summary, "limit": config.limit, "config": plan.resolved, **computed_with})
    return BenchmarkRun(folder, plan.resolved, found, summary)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_file(path, encode_json(document, indent=2) + b"\n")


class _Rejected(Example):
    answer: Text
    scores: dict[str, float]


class _Line(Example):
    """The fields of a record that reports read."""

    model_config = ConfigDict(strict=True)

    id: Text
    run: Text
    question: Text
    variant: Text
    group: Text
    answer: Text
    scores: dict[str, float]
    dropped: int
    trimmed: int
    perplexity: float | None = None
    collisions: float | None = None
    branch: str | None = None
    rejected: _Rejected | None = None


def open_records(path: Path, key: str) -> LineFile[Record]:
    """Open `records.jsonl` of the run with this key for appending; an incomplete last line is removed, and asked again.

    Raises:
        InvalidRun: A line other than the last cannot be read, is no record, or belongs to another config.
        FileInUse: Another process continues the run.
        UnusableFile: The file cannot be opened.
    """

    def check(record: Any, where: str) -> Record:
        try:
            line = parse_example(_Line, record, where)
        except InvalidDataset as error:
            raise InvalidRun(str(error)) from None
        if line.run != key:
            raise InvalidRun(f"{where}: expected a record of run {key}, got one of {line.run!r}")
        parsed: Record = record
        return parsed

    return LineFile(path, check, InvalidRun)


class Answerer:
    """Answers batches of cases with a model, as of `BenchmarkConfig.configure`, and returns their records."""

    def __init__(self, config: BenchmarkConfig, lm: InvariantModel) -> None:
        self._benchmark = resolve_benchmark(config.benchmark)
        self._lm, self._source = lm, config.answering(lm)
        self._max_new_tokens = config.max_new_tokens or self._benchmark.max_new_tokens
        # PINE's places differ by token, and a model of relevance is not asked again.
        ordering = lm.ordering
        self._counts_collisions = (
            ordering.invariant and lm.method.stock_decoding and not isinstance(ordering, Relevance)
        )

    def __call__(self, batch: Sequence[Case]) -> list[Record]:
        """Generate or choose the outputs of a batch of cases, and return their records."""
        prompts = [case.prompt(self._lm) for case in batch]
        if all(case.candidates for case in batch):
            return [self._choose(case, prompt) for case, prompt in zip(batch, prompts, strict=True)]
        if not hasattr(self._source, "generate"):
            raise UnsupportedCombination(
                f"expected a benchmark with candidates for {type(self._source).__name__}, which generates no text; "
                f"got {self._benchmark.name!r}",
                hint="Some benchmarks have a setting with candidates: see `invariant-rag bench list`.",
            )
        generations: list[Any] = []
        for limit, same in groupby(zip(batch, prompts, strict=True), key=lambda each: self._limit(each[0])):
            generations += self._source.generate([prompt for _, prompt in same], max_new_tokens=limit)
        return [
            {**self._record(case, prompt, each.text, each, each), "perplexity": perplexity(each.logprobs)}
            for case, prompt, each in zip(batch, prompts, generations, strict=True)
        ]

    def _limit(self, case: Case) -> int:
        return min(case.max_new_tokens or self._max_new_tokens, self._max_new_tokens)

    def _choose(self, case: Case, prompt: Prompt) -> Record:
        logprobs = self._source.score(prompt, case.candidates)
        prepared = self._lm.prepare(prompt, new_tokens=1)
        record = self._record(case, prompt, _likeliest(case, logprobs), logprobs, prepared)
        return {**record, "logprobs": list(logprobs)}

    def _record(self, case: Case, prompt: Prompt, output: str, result: Any, prepared: Any) -> Record:
        """Score an output. `result` is a generation or scores, `prepared` says what was dropped and trimmed."""
        scored = self._benchmark.score(case, output)
        asked = {name: getattr(case, name) for name in ("system", "prefix", "segments", "suffix")}
        record = {
            **{name: getattr(case, name) for name in ("id", "question", "variant", "group")},
            "prompt": {**asked, "segments": list(case.segments)},
            "gold": list(case.gold),
            "output": output,
            "answer": scored.answer,
            "scores": dict(scored.scores),
            "dropped": len(prepared.dropped),
            "trimmed": len(prepared.trimmed),
            **{name: getattr(result, name) for name in _ROUTING_FIELDS if hasattr(result, name)},
        }
        if self._counts_collisions:
            record["collisions"] = collisions(self._lm, prompt)
        if (rejected := getattr(result, "rejected", None)) is not None:
            text = _likeliest(case, rejected) if isinstance(rejected, list) else rejected.text
            other = self._benchmark.score(case, text)
            record["rejected"] = {"output": text, "answer": other.answer, "scores": dict(other.scores)}
        return record


def perplexity(logprobs: Sequence[float]) -> float:
    """Return the perplexity of generated tokens, given their log-probabilities; 1 for none."""
    return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else 1.0


def collisions(lm: InvariantModel, prompt: Prompt) -> float:
    """Return the share of a prompt's segments beyond the distinct sort keys (RoToR, Table 4c): 0 if all keys differ.

    Segments with equal keys are placed by their content, so that only exact duplicates are interchanged.
    """
    sets = [lm.ordering.sort_keys(each, prompt.query or "") for each in tokenize_prompt(prompt, lm.tokenizer).sets]
    count = sum(map(len, sets))
    return 1 - sum(len(set(keys)) for keys in sets) / count if count else 0.0


def _likeliest(case: Case, logprobs: Sequence[float]) -> str:
    return case.candidates[logprobs.index(max(logprobs))]
