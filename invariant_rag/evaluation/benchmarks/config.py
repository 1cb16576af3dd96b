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

from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.evaluation.benchmarks.base import Benchmark
from invariant_rag.evaluation.benchmarks.sources import DataSource
from invariant_rag.methods import resolve_method

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.overflow import Overflow

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
        InvalidChoice: A number is too small.
        UnsupportedCombination: Tensor parallelism without `torchrun`.
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
    def is_main_process(self) -> bool:
        """Whether this process writes and reports the run."""
        return not self.tensor_parallel or os.environ["RANK"] == "0"

    def load_model(self) -> InvariantModel:
        """Load the model with method and ordering, without routing."""
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
            **placement,
        )

    def configure(self, lm: InvariantModel) -> InvariantModel:
        """Return a loaded model with method, ordering and overflow, without routing."""
        return lm.with_method(self.method, ordering=self.ordering, overflow=self.overflow)

    def with_routing(self, lm: InvariantModel) -> InvariantModel:
        """Return a model with the routing of this config."""
        return lm if self.alpha is None else lm.with_routing(self.alpha)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer without the model."""
        from transformers import AutoTokenizer

        from invariant_rag.models.embedded import EMBEDDED

        embedded = {None: "generator", "native": "native"}
        return AutoTokenizer.from_pretrained(EMBEDDED[embedded[self.model]] if self.model in embedded else self.model)


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
