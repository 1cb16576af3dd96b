"""The config of a benchmark run, and the key that identifies it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.checks import check_number, check_real, check_text
from invariant_rag.errors import UnknownName, UnsupportedCombination
from invariant_rag.methods import check_method_and_ordering, resolve_method

from invariant_rag_benchmarks.base import Benchmark
from invariant_rag_benchmarks.setups import ENSEMBLES, build_ensemble, resolve_intervention
from invariant_rag_benchmarks.sources import DataSource

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.overflow import Overflow
    from invariant_rag.interventions import HiddenScaling

EMBEDDED_NAME = "embedded"
"""Name of the embedded model in the config of a run."""


@dataclass(frozen=True)
class BenchmarkConfig:
    """What to run, and how.

    Attributes:
        benchmark: Name of the benchmark.
        settings: Its settings, as values or as strings of a command line.
        model: Hub id or folder; None for the embedded model.
        method: The method.
        ordering: The ordering; None for the method's default.
        alpha: Margin of selective routing between the plain model and the method; None for no routing.
        intervention: Name of an intervention, or a file of `invariant-rag search-dimension`; None for none.
        ensemble: Name of an ensemble over the model; None for none.
        backend: The attention backend.
        dtype: As in transformers.
        device_map: As in transformers: `auto` spreads a model over all devices.
        tensor_parallel: Split every layer over the processes that `torchrun` started. All of them run the benchmark;
            the first one writes it.
        overflow: What happens to prompts that are too long: `error`, `drop_last` or `trim_segments`.
        data: The benchmark's file or folder; None for INVARIANT_RAG_DATA or the public URL.
        limit: Largest number of questions; None for all.
        seed: Seed of the sample of questions, and of what the benchmark draws.
        batch_size: Number of prompts that are decoded together.
        max_new_tokens: Longest output; None for the benchmark's default.

    Raises:
        InvalidChoice: A number is none, or too small.
        UnknownName: There is no such method, ordering, intervention or ensemble.
        ExtraRequired: A package that the ordering needs is not installed.
        UnsupportedCombination: Tensor parallelism without `torchrun`, or an ensemble of a routed model.
    """

    benchmark: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None
    method: str = "rotor"
    ordering: str | None = None
    alpha: float | None = None
    intervention: str | None = None
    ensemble: str | None = None
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
        for name, smallest in (("limit", 1), ("batch_size", 1), ("max_new_tokens", 1), ("seed", 0)):
            if getattr(self, name) is not None or name in {"batch_size", "seed"}:
                check_number(name, getattr(self, name), smallest)
        check_method_and_ordering(self.method, self.ordering)
        if self.alpha is not None:
            check_real("alpha", self.alpha)
        for name in ("intervention", "ensemble"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        if self.intervention is not None:
            resolve_intervention(self.intervention)
        if self.ensemble is not None and self.ensemble not in ENSEMBLES:
            raise UnknownName("ensemble", self.ensemble, ENSEMBLES)
        if self.ensemble is not None and self.alpha is not None:
            raise UnsupportedCombination(
                f"expected routing or an ensemble, got alpha={self.alpha} with {self.ensemble!r}",
                hint="Leave one of them out.",
            )
        if self.tensor_parallel and "RANK" not in os.environ:
            raise UnsupportedCombination(
                "expected several processes for tensor parallelism, got one that torchrun did not start",
                hint="Run `torchrun --nproc-per-node 2 --no-python invariant-rag bench ... --tp`.",
            )

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes and reports the run."""
        return not self.tensor_parallel or os.environ["RANK"] == "0"

    def load_model(self) -> InvariantModel:
        """Load the model with method, ordering and intervention; `answering` adds routing or an ensemble."""
        from invariant_rag.generation.model import InvariantModel

        placement: dict[str, Any] = {"device_map": self.device_map}
        if self.tensor_parallel:
            from transformers.distributed.configuration_utils import DistributedConfig

            placement = {"device_map": None, "distributed_config": DistributedConfig(tp_plan="auto")}
        return InvariantModel.from_pretrained(
            self.model,
            method=self.method,
            ordering=self.ordering,
            backend=self.backend,
            dtype=self.dtype,
            overflow=self.overflow,
            intervention=self._intervention,
            **placement,
        )

    def configure(self, lm: InvariantModel) -> InvariantModel:
        """Return a loaded model with method, ordering, overflow and intervention; see `answering`."""
        return lm.with_method(
            self.method, ordering=self.ordering, overflow=self.overflow, intervention=self._intervention
        )

    def answering(self, lm: InvariantModel) -> Any:
        """Return what generates and scores: the model, routed, or an ensemble over it."""
        if self.ensemble is not None:
            return build_ensemble(self.ensemble, lm)
        return lm if self.alpha is None else lm.with_routing(self.alpha)

    @property
    def intervention_parameters(self) -> str | dict[str, Any] | None:
        """The intervention's name, or its parameters if they are those of a file: what decides the records."""
        chosen = self._intervention
        return chosen if chosen is None or isinstance(chosen, str) else chosen.as_dict()

    @property
    def _intervention(self) -> str | HiddenScaling | None:
        return None if self.intervention is None else resolve_intervention(self.intervention)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer without the model.

        Raises:
            ModelNotFound: There is none.
        """
        from invariant_rag.models.loading import load_tokenizer

        return load_tokenizer(self.model)


def resolve_config(
    config: BenchmarkConfig, benchmark: Benchmark, settings: Any, source: DataSource, lm: InvariantModel | None
) -> dict[str, Any]:
    """Return everything that decides the records of a run, and its `key`, a hash of all that.

    Args:
        config: The config.
        benchmark: The benchmark.
        settings: Its parsed settings.
        source: The data that were read.
        lm: The model; None if Ray actors load it.
    """
    ordering = lm.ordering.name if lm is not None else config.ordering or _default_ordering(config.method)
    resolved = {
        "benchmark": benchmark.name,
        "settings": {name: getattr(settings, name) for name in benchmark.default_settings()},
        "model": _model_name(config, lm),
        "method": config.method,
        "ordering": ordering,
        "alpha": config.alpha,
        "intervention": config.intervention_parameters,
        "ensemble": config.ensemble,
        "backend": config.backend,
        "dtype": config.dtype,
        "overflow": config.overflow,
        "max_new_tokens": config.max_new_tokens or benchmark.max_new_tokens,
        "batch_size": config.batch_size,
        "seed": config.seed,
        "data": dict(sorted(source.digests.items())),
    }
    return {**resolved, "key": hashlib.sha256(json.dumps(resolved, sort_keys=True).encode()).hexdigest()[:12]}


def run_folder_name(resolved: Mapping[str, Any]) -> str:
    """Return the name of a run's folder, which ends with the key of its resolved config."""
    words = [
        resolved["benchmark"],
        str(resolved["model"]).rstrip("/").rsplit("/", 1)[-1],
        resolved["method"],
        resolved["ordering"],
    ]
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in [*words, resolved["key"]])


def package_versions() -> dict[str, str]:
    """Return the versions that the records may depend on."""
    packages = {name: version(name) for name in ("invariant-rag", "torch", "transformers", "tokenizers")}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}


def _default_ordering(method: str) -> str:
    return resolve_method(method).default_ordering


def _model_name(config: BenchmarkConfig, lm: InvariantModel | None) -> str:
    from invariant_rag.models.embedded import EMBEDDED

    if config.model is not None:
        return config.model
    return EMBEDDED_NAME if lm is None or lm.name == str(EMBEDDED["generator"]) else lm.name
