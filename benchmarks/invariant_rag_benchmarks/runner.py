"""Run a benchmark: every case once; the records of a batch are written before the next batch runs.

A run is a folder: `config.json` (what decides the records, and versions), `records.jsonl` (append-only, one line per
case) and `summary.json`. Its name ends with a key of the config, so that another config is another run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.files import LineFile, encode_json, make_folder, write_file
from invariant_rag.models.hub import check_model
from invariant_rag.orderings import Relevance
from invariant_rag.prompts import tokenize_prompt
from pydantic import ConfigDict

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.base import Case, Example, Record, Selection, Text, parse_example
from invariant_rag_benchmarks.config import BenchmarkConfig, package_versions, resolve_config, run_folder_name
from invariant_rag_benchmarks.data import DataSource
from invariant_rag_benchmarks.errors import InvalidDataset, InvalidRun, RunExists
from invariant_rag_benchmarks.report import markdown, summarize

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt

_ROUTING_FIELDS = ("branch", "plain_confidence", "invariant_confidence")  # of a routed result, for its record


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

    They differ in anything but the model, its dtype and its devices. Each gets a folder of its own below `out`. With
    `resume`, runs of the same config are continued. A `model` that is loaded already is used with the choices of each
    config. `progress` shows a bar for each run; one step per record.

    Raises:
        RunExists: There is a run of a config, and `resume` is false.
        InvalidRun: A file of the run is not one that a run writes.
        UnusableFile: The folder cannot be written, or another process continues the run.
        InvalidDataset, DatasetUnavailable: The data are not as the benchmark's page says, or not to be had.
        ContextOverflow: A prompt is too long, and `overflow` is `error`.
        UnsupportedCombination: A benchmark generates texts, and the ensemble only scores candidates.
    """
    make_folder(out)
    runs = [_plan(config, out, model, resume=resume) for config in configs]
    if model is None and runs:
        check_model(configs[0].model)
        with progress("Loading"):
            model = configs[0].load_model()
    return [run(model, progress) for run in runs if model is not None]


def _plan(
    config: BenchmarkConfig, out: Path, model: InvariantModel | None, *, resume: bool
) -> Callable[[InvariantModel, Progress], BenchmarkRun]:
    """Read the data of a run, before a model is loaded, which may take minutes; return what runs it."""
    benchmark, source = resolve_benchmark(config.benchmark), DataSource(config.data)
    settings = benchmark.parse_settings(config.settings)
    if config.intervention is not None and config.method != "sequential":
        raise UnsupportedCombination(
            f"expected the method 'sequential' with the intervention {config.intervention!r}, got {config.method!r}, "
            "which replaces the attention that the intervention changes"
        )

    @cache
    def load_tokenizer() -> Any:
        if model is not None:
            return model.tokenizer
        check_model(config.model)
        from invariant_rag.models import loading  # imports PyTorch

        return loading.load_tokenizer(config.model)

    cases = benchmark.load(source, settings, Selection(config.limit, config.seed, load_tokenizer))
    if not cases:
        raise InvalidChoice(f"{config.benchmark}: these settings leave no case to run")
    resolved = resolve_config(config, benchmark, settings, source, model)
    folder = out / run_folder_name(resolved)
    if folder.exists() and not resume:
        raise RunExists(f"{str(folder)!r} exists")
    return partial(_run, config, cases, resolved, folder)


def _run(
    config: BenchmarkConfig,
    cases: Sequence[Case],
    resolved: Mapping[str, Any],
    folder: Path,
    model: InvariantModel,
    progress: Progress,
) -> BenchmarkRun:
    from invariant_rag.attention import backend_label

    lm, key = config.configure(model), resolved["key"]
    computed_with = {"versions": package_versions(), "attention": backend_label(lm.backend, lm.model)}
    make_folder(folder)
    if not (folder / "config.json").exists():
        _write_json(folder / "config.json", {**resolved, **computed_with})
    answerer = Answerer(config, lm)
    with open_records(folder / "records.jsonl", key) as file:
        known = {record["id"]: record for record in file.lines}
        batches = [
            [case for case in cases[start : start + config.batch_size] if case.id not in known]
            for start in range(0, len(cases), config.batch_size)
        ]
        label = f"{config.benchmark}, {config.method} {resolved['ordering']}"
        with progress(label, len(cases), len({case.id for case in cases} & known.keys())) as advance:
            for batch in filter(None, batches):
                records = [{**record, "run": key} for record in answerer(batch)]
                file.append(records)
                known |= {record["id"]: record for record in records}
                for _ in records:
                    advance()
    records = [known[case.id] for case in cases]
    summary = summarize(resolve_benchmark(config.benchmark), records, config.seed)
    _write_json(folder / "summary.json", {**summary, "limit": config.limit, "config": resolved, **computed_with})
    return BenchmarkRun(folder, resolved, records, summary)


def _write_json(path: Path, document: Mapping[str, Any]) -> None:
    write_file(path, encode_json(document, indent=2) + b"\n")


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


def open_records(path: Path, key: str) -> LineFile[Record]:
    """Open `records.jsonl` of the run with this key for appending; a torn last line is removed: its case runs again."""

    def check(record: Any, where: str) -> Any:
        try:
            line = parse_example(_Line, record, where)
        except InvalidDataset as error:
            raise InvalidRun(str(error)) from None
        if line.run != key:
            raise InvalidRun(f"{where}: expected a record of run {key}, got one of {line.run!r}")
        return record

    return LineFile(path, check, InvalidRun)


class Answerer:
    """Answers batches of cases with a model, as of `BenchmarkConfig.configure`, and returns their records."""

    def __init__(self, config: BenchmarkConfig, lm: InvariantModel) -> None:
        self._benchmark = resolve_benchmark(config.benchmark)
        self._lm, self._source = lm, config.answering(lm)
        self._longest = config.max_new_tokens or self._benchmark.max_new_tokens
        # PINE's positions differ by token, and a model of relevance does not run twice.
        comparable = lm.ordering.invariant and lm.method.stock_decoding
        self._counts_collisions = comparable and not isinstance(lm.ordering, Relevance)

    def __call__(self, batch: Sequence[Case]) -> list[Record]:
        """Generate or choose the outputs of a batch of cases, and return their records."""
        prompts = [(case, case.prompt(self._lm)) for case in batch]
        if all(case.candidates for case in batch):
            return [self._choose(case, prompt) for case, prompt in prompts]
        if not hasattr(self._source, "generate"):
            raise UnsupportedCombination(
                f"expected a benchmark with candidates for {type(self._source).__name__}, which generates no text; "
                f"got {self._benchmark.name!r}",
                hint="Some benchmarks have a setting with candidates: see `invariant-rag bench list`.",
            )
        records = []
        for limit, group in groupby(prompts, lambda each: min(each[0].max_new_tokens or self._longest, self._longest)):
            same = list(group)
            generations: Any = self._source.generate([prompt for _, prompt in same], max_new_tokens=limit)
            for (case, prompt), each in zip(same, generations, strict=True):
                record = self._record(case, prompt, each.text, each, each)
                records.append({**record, "perplexity": perplexity(each.logprobs)})
        return records

    def _choose(self, case: Case, prompt: Prompt) -> Record:
        logprobs = self._source.score(prompt, case.candidates)
        prepared = self._lm.prepare(prompt, new_tokens=1)
        record = self._record(case, prompt, _likeliest(case, logprobs), logprobs, prepared)
        return {**record, "logprobs": list(logprobs)}

    def _record(self, case: Case, prompt: Prompt, output: str, result: Any, prepared: Any) -> Record:
        """Score an output. `result` is a generation or scores, `prepared` says what was dropped and trimmed."""
        fields = {name: getattr(case, name) for name in ("system", "prefix", "segments", "suffix")}
        record = {
            **{name: getattr(case, name) for name in ("id", "question", "variant", "group")},
            "prompt": {**fields, "segments": list(case.segments)},
            "gold": list(case.gold),
            **self._scored(case, output),
            "dropped": len(prepared.dropped),
            "trimmed": len(prepared.trimmed),
            **{name: getattr(result, name) for name in _ROUTING_FIELDS if hasattr(result, name)},
        }
        if self._counts_collisions:
            record["collisions"] = collisions(self._lm, prompt)
        if (rejected := getattr(result, "rejected", None)) is not None:
            text = _likeliest(case, rejected) if isinstance(rejected, list) else rejected.text
            record["rejected"] = self._scored(case, text)
        return record

    def _scored(self, case: Case, output: str) -> Record:
        scored = self._benchmark.score(case, output)
        return {"output": output, "answer": scored.answer, "scores": dict(scored.scores)}


def perplexity(logprobs: Sequence[float]) -> float:
    """Return the perplexity of generated tokens, given their log-probabilities; 1 for none."""
    return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else 1.0


def collisions(lm: InvariantModel, prompt: Prompt) -> float:
    """Return the share of a prompt's segments beyond the distinct sort keys (RoToR, Table 4c): 0 if all keys differ."""
    sets = [lm.ordering.sort_keys(each, prompt.query or "") for each in tokenize_prompt(prompt, lm.tokenizer).sets]
    count = sum(map(len, sets))
    return 1 - sum(len(set(keys)) for keys in sets) / count if count else 0.0


def _likeliest(case: Case, logprobs: Sequence[float]) -> str:
    return case.candidates[logprobs.index(max(logprobs))]
