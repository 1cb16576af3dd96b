"""Run a benchmark: every case asked once, every answer written down before the next batch is asked.

A run is a folder: `config.json` (everything that decides the records, and versions), `records.jsonl` (append-only, one
line per case) and `summary.json`. Its name holds a key of the settings, so that other settings are another run.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import InvalidChoice, RunExists, UnsupportedCombination
from invariant_rag.evaluation.benchmarks import resolve_benchmark
from invariant_rag.evaluation.benchmarks.base import Benchmark, Case, Record, Selection
from invariant_rag.evaluation.benchmarks.records import RecordFile
from invariant_rag.evaluation.benchmarks.report import markdown, summarise
from invariant_rag.evaluation.benchmarks.sources import Source
from invariant_rag.methods import resolve_method

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.overflow import Overflow

_ROUTING = ("branch", "plain_confidence", "invariant_confidence")
"""What a routed answer says of itself."""

EMBEDDED_NAME = "embedded"
"""What a run calls the model that comes with the package."""


@dataclass(frozen=True)
class Plan:
    """What to run.

    Attributes:
        benchmark: Name of the benchmark.
        settings: Its settings, as values or as words of a command line.
        model: Hub id or folder; None for the embedded model.
        method: Our method.
        ordering: Our ordering; None for the method's own.
        alpha: Margin of selective routing between the plain model and the method; None: there is no routing.
        backend: What computes the attention.
        dtype: As in transformers.
        device_map: As in transformers: `auto` spreads a model over all devices.
        tensor_parallel: Split every layer over the processes that `torchrun` started, all of which make this run. The
            first of them writes it.
        overflow: What happens to prompts that are too long: `error`, `drop_last` or `trim_segments`.
        data: The benchmark's file or folder; None for INVARIANT_RAG_DATA or the public source.
        limit: The most questions; None for all.
        seed: Seed of the sample of questions, and of what the benchmark draws.
        batch_size: Prompts that are decoded together.
        max_new_tokens: Longest output; None for the benchmark's own.
    """

    benchmark: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    method: str = "rotor"
    ordering: str | None = None
    alpha: float | None = None
    backend: str = "auto"
    dtype: str = "auto"
    device_map: str | None = "auto"
    tensor_parallel: bool = False
    overflow: Overflow = "error"
    data: Path | None = None
    limit: int | None = None
    seed: int = 0
    batch_size: int = 8
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, smallest in (("limit", 1), ("batch_size", 1), ("max_new_tokens", 1)):
            value = getattr(self, name)
            if value is not None and value < smallest:
                raise InvalidChoice(f"{name}: expected at least {smallest}, got {value}")
        if self.tensor_parallel and "RANK" not in os.environ:
            raise UnsupportedCombination(
                "expected several processes for tensor parallelism, got one that torchrun did not start",
                hint="Run `torchrun --nproc-per-node 2 --no-python invariant-rag bench ... --tp`.",
            )

    @property
    def leads(self) -> bool:
        """Whether this process writes the run and reports it."""
        return not self.tensor_parallel or os.environ["RANK"] == "0"

    def load(self) -> InvariantModel:
        """Load the model, arranged as planned, without routing."""
        from invariant_rag.generation.model import InvariantModel

        placing: dict[str, Any] = {"device_map": self.device_map}
        if self.tensor_parallel:
            from transformers.distributed.configuration_utils import DistributedConfig

            placing = {"device_map": None, "distributed_config": DistributedConfig(tp_plan="auto")}
        return InvariantModel.from_pretrained(
            self.model,
            method=self.method,
            ordering=self.ordering,
            backend=self.backend,
            dtype=self.dtype,
            overflow=self.overflow,
            **placing,
        )

    def routed(self, lm: InvariantModel) -> InvariantModel:
        """Return a model with the planned routing."""
        return lm if self.alpha is None else lm.with_routing(self.alpha)


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: Where it lies.
        config: Everything that decides the records.
        records: One per case, in the order of the cases.
        summary: Its figures.
    """

    folder: Path
    config: Mapping[str, Any]
    records: Sequence[Record]
    summary: Mapping[str, Any]

    def markdown(self) -> str:
        """Write the run as Markdown, with published numbers where there are any."""
        return markdown(self.config, self.summary, self.records)


def run(
    plan: Plan,
    out: Path,
    *,
    resume: bool = False,
    model: InvariantModel | None = None,
    actors: int = 0,
    on_start: Callable[[int, int], None] | None = None,
    on_record: Callable[[], None] | None = None,
) -> Run:
    """Run a benchmark, and write it into a folder of its own below `out`.

    Args:
        plan: What to run.
        out: Folder of the runs.
        resume: Go on with a run of the same settings; without one, start it.
        model: The model, where it is loaded already; read with the plan's method and ordering.
        actors: Ray actors that share the cases, each with a model of its own. 0: this process asks them.
        on_start: Called with the number of cases, and of those that are answered already.
        on_record: Called after each new record.

    Raises:
        RunExists: A run of these settings lies there, and `resume` is false.
        DatasetUnavailable: The benchmark's file is not to be had.
        ContextOverflow: A prompt is too long, and `overflow` is `error`.
        ExtraRequired: Actors were asked for, and Ray is not installed.
        UnsupportedCombination: Actors were asked for, and tensor parallelism too.
    """
    benchmark = resolve_benchmark(plan.benchmark)
    settings = benchmark.configured(plan.settings)
    resolve_method(plan.method)
    if actors and plan.tensor_parallel:
        raise UnsupportedCombination("actors hold a model each, and tensor parallelism splits one over all processes")
    lm = _arranged(plan, model) if model is not None else None if actors else plan.load()
    source = Source(plan.data)
    tokenizer = _tokenizer(plan) if lm is None else lm.tokenizer
    cases = benchmark.load(source, settings, Selection(plan.limit, plan.seed, tokenizer))
    if not cases:
        raise InvalidChoice(f"{plan.benchmark}: these settings leave no case to ask")
    config = _config(plan, benchmark, settings, source, lm)
    folder = out / _folder_name(config)
    if plan.leads:
        _begin(folder, config, resume)
    wanted = {case.id: case for case in cases}
    with RecordFile(folder / "records.jsonl", config["key"], writes=plan.leads) as file:
        known = {name for name in file.records if name in wanted}
        if on_start:
            on_start(len(cases), len(known))
        batches = [
            [case for case in cases[start : start + plan.batch_size] if case.id not in known]
            for start in range(0, len(cases), plan.batch_size)
        ]
        batches = [batch for batch in batches if batch]
        longest = config["max_new_tokens"]
        answered: Iterator[list[Record]]
        if lm is not None:
            reader = plan.routed(lm)
            answered = (answer(reader, benchmark, batch, longest) for batch in batches)
        else:
            from invariant_rag.evaluation.ray_map import ray_map

            answered = ray_map(lambda: Replica(plan, longest), batches, actors)
        for batch_records in answered:
            file.append(batch_records)
            for _ in batch_records:
                if on_record:
                    on_record()
        records = [file.records[name] for name in wanted]
    summary = summarise(benchmark, records, plan.seed)
    if plan.leads:
        _write(folder / "summary.json", {**summary, "limit": plan.limit, "config": config, "versions": versions()})
    return Run(folder, config, records, summary)


def _begin(folder: Path, config: Mapping[str, Any], resume: bool) -> None:
    if folder.exists() and not resume:
        raise RunExists(f"{str(folder)!r} exists")
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "config.json").exists():
        _write(folder / "config.json", {**config, "versions": versions()})


class Replica:
    """A model that answers batches of cases: what an actor holds."""

    def __init__(self, plan: Plan, max_new_tokens: int) -> None:
        self._benchmark = resolve_benchmark(plan.benchmark)
        self._lm = plan.routed(plan.load())
        self._longest = max_new_tokens

    def __call__(self, batch: Sequence[Case]) -> list[Record]:
        """Return the records of a batch."""
        return answer(self._lm, self._benchmark, batch, self._longest)


def answer(lm: InvariantModel, benchmark: Benchmark, batch: Sequence[Case], max_new_tokens: int) -> list[Record]:
    """Ask a batch of cases, and return their records."""
    if all(case.candidates for case in batch):
        return [_chosen(lm, benchmark, case) for case in batch]
    generations = lm.generate([case.prompt(lm) for case in batch], max_new_tokens=max_new_tokens)
    return [
        _record(benchmark, case, each.text, each, dropped=len(each.dropped), trimmed=len(each.trimmed))
        for case, each in zip(batch, generations, strict=True)
    ]


def _chosen(lm: InvariantModel, benchmark: Benchmark, case: Case) -> Record:
    prompt = case.prompt(lm)
    logprobs = lm.score(prompt, case.candidates)
    prepared = lm.prepare(prompt, new_tokens=1)
    likeliest = case.candidates[logprobs.index(max(logprobs))]
    record = _record(benchmark, case, likeliest, logprobs, dropped=len(prepared.dropped), trimmed=len(prepared.trimmed))
    return {**record, "logprobs": list(logprobs)}


def _record(benchmark: Benchmark, case: Case, output: str, answered: Any, *, dropped: int, trimmed: int) -> Record:
    scored = benchmark.score(case, output)
    routing = {name: getattr(answered, name) for name in _ROUTING if hasattr(answered, name)}
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


def versions() -> dict[str, str]:
    """Return the versions that a run depends on."""
    packages = {name: version(name) for name in ("invariant-rag", "torch", "transformers", "tokenizers")}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}


def _arranged(plan: Plan, model: InvariantModel) -> InvariantModel:
    return model.with_method(plan.method, ordering=plan.ordering, overflow=plan.overflow)


def _tokenizer(plan: Plan) -> Any:
    from transformers import AutoTokenizer

    from invariant_rag.models.embedded import EMBEDDED

    embedded = {None: "generator", "native": "native"}
    place = EMBEDDED[embedded[plan.model]] if plan.model in embedded else plan.model
    return AutoTokenizer.from_pretrained(place)


def _config(
    plan: Plan, benchmark: Benchmark, settings: Any, source: Source, lm: InvariantModel | None
) -> dict[str, Any]:
    """Return everything that decides the records, with a key of it all."""
    ordering = lm.ordering.name if lm is not None else plan.ordering or resolve_method(plan.method).default_ordering
    config = {
        "benchmark": benchmark.name,
        "settings": {name: getattr(settings, name) for name in benchmark.described_settings()},
        "model": _model_name(plan, lm),
        "method": plan.method,
        "ordering": ordering,
        "alpha": plan.alpha,
        "backend": plan.backend,
        "dtype": plan.dtype,
        "overflow": plan.overflow,
        "max_new_tokens": plan.max_new_tokens or benchmark.max_new_tokens,
        "batch_size": plan.batch_size,
        "seed": plan.seed,
        "data": dict(sorted(source.digests.items())),
    }
    return {**config, "key": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:12]}


def _model_name(plan: Plan, lm: InvariantModel | None) -> str:
    from invariant_rag.models.embedded import EMBEDDED

    if plan.model is not None:
        return plan.model
    return EMBEDDED_NAME if lm is None or lm.name == str(EMBEDDED["generator"]) else lm.name


def _folder_name(config: Mapping[str, Any]) -> str:
    words = [
        config["benchmark"],
        str(config["model"]).rstrip("/").rsplit("/", 1)[-1],
        config["method"],
        config["ordering"],
    ]
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in [*words, config["key"]])


def _write(path: Path, document: Mapping[str, Any]) -> None:
    """Write JSON so that no reader ever sees half of it."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(document, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    partial.replace(path)
