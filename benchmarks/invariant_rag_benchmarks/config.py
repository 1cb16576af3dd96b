"""The config of a benchmark run: options of the commands, and the key that identifies the run."""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from invariant_rag.attention import BACKENDS
from invariant_rag.checks import MOST_CALLS, check_name, check_number, check_real, check_text
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.methods import check_method_and_ordering
from invariant_rag.models.devices import DType, check_device

from invariant_rag_benchmarks.base import declared

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

    from invariant_rag_benchmarks.base import Benchmark
    from invariant_rag_benchmarks.data import DataSource

ENSEMBLES: dict[str, tuple[str, dict[str, Any]]] = {
    "permutation-average": ("PermutationAverage", {}),
    "ring-average": ("RingAverage", {}),
    "self-consistency": ("SelfConsistency", {}),
    "attention-sorting": ("AttentionSorting", {}),
    "contextual-calibration": ("ContextualCalibration", {}),
    "context-experts": ("ContextExperts", {"gamma": 0}),  # the data have no relevance of a segment
}
"""Class of every ensemble in `invariant_rag.ensembles`, with its arguments, by its name on the command line."""
INTERVENTIONS = ("hidden-scaling", "ms-poe")
"""Names of `invariant_rag.interventions.INTERVENTIONS`, which imports PyTorch: that takes seconds."""
SHAPES: dict[str, dict[str, int]] = declared("shapes")
"""Sizes of the models of `bench speed`."""
TEXT_TOKENS = 32
"""Tokens of the prefix, and of the suffix, of the prompts of `bench speed`."""


def option(default: Any, about: str, **more: Any) -> Any:
    """Return a field that is an option of the commands; see `invariant_rag.cli.options.with_fields`."""
    return field(default=default, metadata={"about": about, **more})


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What all runs have in common. The fields, whose metadata say what they mean, are options of the commands."""

    model: str | None = option(None, "Model id or folder.", shown="the embedded model")
    intervention: str | None = option(
        None, "See `invariant-rag interventions`; or a file of a search. With the method sequential.", shown="none"
    )
    ensemble: str | None = option(None, f"{', '.join(ENSEMBLES)}.", shown="none")
    data: Path | None = option(None, "The benchmark's file, or a folder that contains it.", shown="download")  # noqa: RUF009 - a field
    limit: int | None = option(None, "Largest number of questions.", min=1, shown="all")
    seed: int = option(0, "Seed of everything that is drawn: samples, orders, resamples.", min=0)
    batch_size: int = option(8, "Prompts to decode together.", min=1)
    max_new_tokens: int | None = option(None, "Longest output, in tokens.", min=1, shown="the benchmark's default")
    overflow: Literal["error", "drop_last", "trim_segments"] = option(
        "error", "What to do with prompts that are longer than the context window."
    )
    dtype: DType = option("auto", "As in transformers.")  # noqa: RUF009 - a field
    device_map: str = option("auto", "As in transformers: auto spreads a large model over all devices.")
    backend: str = "auto"


@dataclass(frozen=True)
class BenchmarkConfig(RunConfig):
    """What to run, and how: a benchmark with its settings (values, or strings), and a `RunConfig`; it is checked."""

    benchmark: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    method: str = option("rotor", "See `invariant-rag methods`.")
    ordering: str | None = option(None, "See `invariant-rag orderings`.", shown="the method's default")
    alpha: float | None = option(
        None, "Margin of selective routing between the plain model and the method.", shown="no routing"
    )

    def __post_init__(self) -> None:
        """Check everything without PyTorch, whose import takes seconds."""
        _check_numbers(self)
        if self.alpha is not None:
            check_real("alpha", self.alpha)
        described = self.intervention
        if described not in (None, *INTERVENTIONS) and not Path(check_text("intervention", described)).is_file():
            raise UnknownName("intervention", described, INTERVENTIONS, hint="Or a file of a search.")
        resolve_intervention(described)  # a file is read
        check_method_and_ordering(self.method, self.ordering)
        check_name("backend", self.backend, ("auto", *BACKENDS))
        check_name("overflow", self.overflow, ("error", "drop_last", "trim_segments"))
        check_name("dtype", self.dtype, get_args(DType))
        check_device(self.device_map)
        if self.ensemble is not None:
            check_name("ensemble", self.ensemble, ENSEMBLES)
            if self.alpha is not None:
                raise UnsupportedCombination(
                    f"expected routing or an ensemble, got alpha={self.alpha} with {self.ensemble!r}",
                    hint="Leave one of them out.",
                )

    @property
    def choices(self) -> dict[str, Any]:
        """The keywords of `InvariantModel.with_method`."""
        names = ("method", "ordering", "backend", "overflow")
        intervention = resolve_intervention(self.intervention)
        return {**{name: getattr(self, name) for name in names}, "intervention": intervention}

    def load_model(self) -> InvariantModel:
        """Load the model with its choices; `answering` adds routing or an ensemble."""
        from invariant_rag.generation.model import InvariantModel

        return InvariantModel.from_pretrained(self.model, dtype=self.dtype, device_map=self.device_map, **self.choices)

    def configure(self, lm: InvariantModel) -> InvariantModel:
        """Return a loaded model with the choices of this config; its dtype and devices are those it was loaded with."""
        return lm.with_method(**self.choices)

    def answering(self, lm: InvariantModel) -> Any:
        """Return what generates and scores: the model, routed, or an ensemble over it."""
        if self.ensemble is not None:
            from invariant_rag import ensembles

            name, arguments = ENSEMBLES[self.ensemble]
            return getattr(ensembles, name)(lm, **arguments)
        return lm if self.alpha is None else lm.with_routing(self.alpha)


@dataclass(frozen=True)
class SpeedConfig:
    """What is measured; lengths of segments differ from their mean by up to 30%."""

    shape: str = option("1b", f"{', '.join(SHAPES)}.")
    layers: int | None = option(None, "Layers.", min=1, max=MOST_CALLS, shown="the shape's")
    tokens: int = 2500
    segments: int = 20
    new_tokens: int = option(16, "Tokens to decode.", min=1)
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = option("float32", "As in transformers.")
    device: str = option("cpu", "cpu, cuda...")
    backend: str = option("auto", f"auto, {', '.join(BACKENDS)}.")
    repeats: int = option(3, "Rounds; each runs everything once.", min=1, max=MOST_CALLS)

    def __post_init__(self) -> None:
        """Check everything without PyTorch, but for a device that is no CPU."""
        _check_numbers(self)
        check_name("shape", self.shape, SHAPES)
        check_name("dtype", self.dtype, get_args(DType)[1:])
        check_name("backend", self.backend, ("auto", *BACKENDS))
        check_device(self.device, "device")
        if self.tokens < 2 * TEXT_TOKENS + self.segments:
            least = f"at least {2 * TEXT_TOKENS + self.segments} for {self.segments} segments"
            raise InvalidChoice(f"tokens: expected {least}, got {self.tokens}")


@dataclass(frozen=True)
class ServingConfig:
    """What `bench vllm` measures, for numbers of clients at the same time, and of questions about each set."""

    clients: tuple[int, ...] = (1, 8, 32)
    questions: tuple[int, ...] = (1, 4, 16)
    requests: int = option(64, "Requests of a round, a multiple of all numbers of questions.", min=1)
    segments: int = option(16, "Segments of a set.", min=1)
    words: int = option(12, "Words of a segment, behind its name.", min=1)
    new_tokens: int = option(32, "Tokens of an answer.", min=1)
    rounds: int = option(3, "Rounds, after one that is not counted; each asks every system.", min=1)

    def __post_init__(self) -> None:
        _check_numbers(self)
        if any(self.requests % each for each in self.questions):
            divisors = " and ".join(map(str, self.questions))
            raise InvalidChoice(f"--requests: expected a multiple of {divisors}, got {self.requests}")


def _check_numbers(config: Any) -> None:
    """Check numbers against the bounds of their options."""
    for each in fields(config):
        value = getattr(config, each.name)
        if "min" in each.metadata and (value is not None or each.default is not None):
            check_number(each.name, value, each.metadata["min"], each.metadata.get("max"))


def resolve_intervention(described: str | None) -> Any:
    """Return an intervention: its name, or the parameters in a file of a search."""
    if described is None or described in INTERVENTIONS:
        return described
    from invariant_rag.interventions import HiddenScaling

    return HiddenScaling.load(described)


def resolve_config(
    config: BenchmarkConfig, benchmark: Benchmark[Any], settings: Any, source: DataSource, lm: InvariantModel | None
) -> dict[str, Any]:
    """Return everything that decides the records of a run, and its `key`, a hash of all that."""
    from invariant_rag.methods import resolve_method
    from invariant_rag.models.embedded import EMBEDDED

    intervention = resolve_intervention(config.intervention)
    loaded = lm.name if lm is not None and lm.name != str(EMBEDDED["generator"]) else "embedded"
    same = ("method", "alpha", "ensemble", "backend", "dtype", "overflow", "batch_size", "seed")
    resolved = {
        **{name: getattr(config, name) for name in same},
        "benchmark": benchmark.name,
        "settings": settings.model_dump(),
        "model": config.model or loaded,
        "ordering": config.ordering or resolve_method(config.method).default_ordering,
        "intervention": intervention.as_dict() if hasattr(intervention, "as_dict") else intervention,
        "max_new_tokens": config.max_new_tokens or benchmark.max_new_tokens,
        "data": dict(sorted(source.digests.items())),
    }
    return {**resolved, "key": hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:12]}


def run_folder_name(resolved: Mapping[str, Any]) -> str:
    """Return the name of a run's folder, which ends with the key of its resolved config."""
    model = str(resolved["model"]).rstrip("/").rsplit("/", 1)[-1]
    words = [resolved["benchmark"], model, resolved["method"], resolved["ordering"], resolved["key"]]
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in words)


def package_versions() -> dict[str, str]:
    """Return the versions that the records may depend on."""
    packages = {name: version(name) for name in ("invariant-rag", "torch", "transformers", "tokenizers")}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}
