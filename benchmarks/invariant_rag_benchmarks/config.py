"""The config of a benchmark run, and the key that identifies it."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.checks import check_number, check_real, check_text
from invariant_rag.errors import UnknownName, UnsupportedCombination

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.prepare import Overflow

    from invariant_rag_benchmarks.base import Benchmark
    from invariant_rag_benchmarks.data import DataSource

EMBEDDED_NAME = "embedded"
"""Name of the embedded model in the config of a run."""

ENSEMBLES: dict[str, tuple[str, dict[str, Any]]] = {
    "permutation-average": ("PermutationAverage", {}),
    "ring-average": ("RingAverage", {}),
    "self-consistency": ("SelfConsistency", {}),
    "attention-sorting": ("AttentionSorting", {}),
    "contextual-calibration": ("ContextualCalibration", {}),
    "context-experts": ("ContextExperts", {"gamma": 0}),  # the data have no relevance of a segment
}
"""Class of every ensemble in `invariant_rag.ensembles`, with its arguments, by its name on the command line."""


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
        UnknownName: There is no such method, ordering, intervention, ensemble, backend, dtype or overflow.
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
        from invariant_rag.generation.choices import check_before_loading

        for name, smallest in (("limit", 1), ("batch_size", 1), ("max_new_tokens", 1), ("seed", 0)):
            if getattr(self, name) is not None or name in {"batch_size", "seed"}:
                check_number(name, getattr(self, name), smallest)
        if self.alpha is not None:
            check_real("alpha", self.alpha)
        for name in ("intervention", "ensemble"):
            if getattr(self, name) is not None:
                check_text(name, getattr(self, name))
        check_before_loading(self.model, **self.choices)
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
    def choices(self) -> dict[str, Any]:
        """The choices of `InvariantModel.from_pretrained` that a config has, as its keywords."""
        from invariant_rag.generation.choices import Choices

        ours, known = {each.name for each in fields(self)}, [each.name for each in fields(Choices)]
        chosen = {name: getattr(self, name) for name in (*known, "dtype", "device_map") if name in ours}
        return {**chosen, "intervention": resolve_intervention(self.intervention)}

    @property
    def is_main_process(self) -> bool:
        """Whether this process writes and reports the run."""
        return not self.tensor_parallel or os.environ["RANK"] == "0"

    def load_model(self) -> InvariantModel:
        """Load the model with its choices; `answering` adds routing or an ensemble."""
        from invariant_rag.generation.model import InvariantModel

        placement: dict[str, Any] = {}
        if self.tensor_parallel:
            from transformers.distributed.configuration_utils import DistributedConfig

            placement = {"device_map": None, "distributed_config": DistributedConfig(tp_plan="auto")}
        return InvariantModel.from_pretrained(self.model, **{**self.choices, **placement})

    def configure(self, lm: InvariantModel) -> InvariantModel:
        """Return a loaded model with the choices of this config; its dtype and devices are those it was loaded with."""
        loading = ("dtype", "device_map")
        return lm.with_method(**{name: value for name, value in self.choices.items() if name not in loading})

    def answering(self, lm: InvariantModel) -> Any:
        """Return what generates and scores: the model, routed, or an ensemble over it."""
        if self.ensemble is not None:
            from invariant_rag import ensembles

            name, arguments = ENSEMBLES[self.ensemble]
            return getattr(ensembles, name)(lm, **arguments)
        return lm if self.alpha is None else lm.with_routing(self.alpha)

    def load_tokenizer(self) -> Any:
        """Load the tokenizer without the model.

        Raises:
            ModelNotFound: There is none.
        """
        from invariant_rag.models.loading import load_tokenizer

        return load_tokenizer(self.model)


def resolve_intervention(described: str | None) -> Any:
    """Return an intervention: its name, or the parameters in a file of `invariant-rag search-dimension`.

    Raises:
        UnknownName: There is no such intervention, and no such file.
        InvalidChoice: The file holds no parameters.
    """
    from invariant_rag.interventions import INTERVENTIONS, HiddenScaling

    if described is None or described in INTERVENTIONS:
        return described
    if not Path(described).is_file():
        raise UnknownName("intervention", described, INTERVENTIONS, hint="Or give a file of search-dimension.")
    return HiddenScaling.load(described)


def resolve_config(
    config: BenchmarkConfig, benchmark: Benchmark[Any], settings: Any, source: DataSource, lm: InvariantModel | None
) -> dict[str, Any]:
    """Return everything that decides the records of a run, and its `key`, a hash of all that.

    Args:
        config: The config.
        benchmark: The benchmark.
        settings: Its parsed settings.
        source: The data that were read.
        lm: The model, if one was given that is loaded; None: that of the config.
    """
    from invariant_rag.methods import resolve_method
    from invariant_rag.models.embedded import EMBEDDED

    intervention = resolve_intervention(config.intervention)
    parameters = intervention.as_dict() if hasattr(intervention, "as_dict") else intervention
    is_embedded = lm is None or lm.name == str(EMBEDDED["generator"])
    resolved = {
        "benchmark": benchmark.name,
        "settings": settings.model_dump(),
        "model": config.model or (EMBEDDED_NAME if is_embedded or lm is None else lm.name),
        "method": config.method,
        "ordering": config.ordering or resolve_method(config.method).default_ordering,
        "alpha": config.alpha,
        "intervention": parameters,
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
    model = str(resolved["model"]).rstrip("/").rsplit("/", 1)[-1]
    words = [resolved["benchmark"], model, resolved["method"], resolved["ordering"], resolved["key"]]
    return "_".join(re.sub(r"[^A-Za-z0-9.-]+", "-", word) for word in words)


def package_versions() -> dict[str, str]:
    """Return the versions that the records may depend on."""
    packages = {name: version(name) for name in ("invariant-rag", "torch", "transformers", "tokenizers")}
    return {"python": platform.python_version(), "platform": platform.platform(), **packages}
