"""The speed benchmark: prefill, decoding and memory of every method against the plain model, in alternating runs.

Weights are random, since speed does not depend on the text. Compare the times of one measurement only with each other.
"""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from invariant_rag.attention import backend_label
from invariant_rag.audit.progress import Progress, no_progress
from transformers.generation.streamers import BaseStreamer

from invariant_rag_benchmarks.flops import count_flops
from invariant_rag_benchmarks.speed_setup import (
    VOCABULARY,
    SpeedConfig,
    bidirectional_floor,
    build_model,
    environment,
    random_prompt,
)

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt
    from transformers import PreTrainedModel

PLAIN = "plain"
_CACHE_BYTES = 1 << 40  # more than any prompt takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's mallopt


@dataclass
class Timings:
    """Seconds that one step took in every round."""

    seconds: list[float] = field(default_factory=list)

    def ratio_to(self, other: Timings) -> float:
        """Return the median over rounds of the ratio to another step."""
        return median(mine / theirs for mine, theirs in zip(self.seconds, other.seconds, strict=True))


@dataclass
class SpeedResult:
    """The measurements of one way to generate.

    Attributes:
        name: The plain model, a method, or a method with a cache.
        prefill: Time to the first token.
        decode: Time per further token: the median over the tokens of a generation.
        whole: Time of the whole generation.
        peak: Peak memory of the prefill in bytes, without the model; None if the platform does not report it.
        flops: Operations up to the first token; see `count_flops`. None on a GPU, whose kernels do not tell them.
    """

    name: str
    prefill: Timings = field(default_factory=Timings)
    decode: Timings = field(default_factory=Timings)
    whole: Timings = field(default_factory=Timings)
    peak: int | None = None
    flops: int | None = None


@dataclass
class BatchGains:
    """How much faster several prompts are as one batch than one after the other, by method.

    Attributes:
        prefill: The time to all first tokens of single calls, over that of the batch.
        decode: Likewise, the time of the further tokens.
    """

    prefill: dict[str, float] = field(default_factory=dict)
    decode: dict[str, float] = field(default_factory=dict)


class TimingStreamer(BaseStreamer):
    """Records when the tokens of a generation arrive: `generate` passes the prompt, and then every token."""

    def __init__(self) -> None:
        self._start = perf_counter()
        self._arrivals: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Record the time."""
        self._arrivals.append(perf_counter())

    def end(self) -> None:
        """Do nothing."""

    @property
    def prefill(self) -> float:
        """Seconds to the first token."""
        return self._arrivals[1] - self._start

    @property
    def intervals(self) -> list[float]:
        """Seconds between consecutive tokens."""
        return [later - sooner for sooner, later in pairwise(self._arrivals[1:])]


GenerateFunction: TypeAlias = Callable[[int, TimingStreamer], object]
"""Generates a number of tokens into a streamer."""


def measure(
    config: SpeedConfig, methods: Sequence[str], progress: Progress = no_progress
) -> tuple[list[SpeedResult], BatchGains, str]:
    """Measure methods against the plain model.

    During timing, glibc keeps freed memory in the process: a virtual machine can need longer to provide it again than
    attention takes. It is released before peak memory is measured.

    Args:
        config: What is measured.
        methods: Names of methods.
        progress: Shows a progress bar; one step per timed generation.

    Returns:
        The results, the plain model first; what batches gain; and the backend, with its kernel if it chooses one.
    """
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel

    model, prompt = build_model(config), random_prompt(config)
    lm = InvariantModel(model, backend=config.backend)
    ids = torch.tensor([lm.with_method("sequential").prepare(prompt).input_ids], device=config.device)
    functions = {PLAIN: _generate_plain(model, ids)}
    for name in methods:
        functions[name] = _generate_with(lm.with_method(name), prompt)
    if "rotor" in methods:
        warm = lm.with_method("rotor").with_cache(KeyValueCache(_CACHE_BYTES))
        warm.generate(prompt, max_new_tokens=1)
        functions["rotor, warm set"] = _generate_with(warm, prompt.shuffled(random.Random(1)))
    if "ape" in methods:
        functions["ape, one new segment"] = _generate_with_new_segment(lm.with_method("ape"), prompt)
    results = {name: SpeedResult(name) for name in functions}
    _keep_freed_memory(True)
    for generate in functions.values():  # warm up: kernels, page tables, rotary tables
        generate(1, TimingStreamer())
    label = f"{config.tokens} tokens, {config.segments} segments"
    with progress(label, config.repeats * len(functions)) as advance:
        for _ in range(config.repeats):
            for name, generate in functions.items():
                timer = TimingStreamer()
                generate(1 + config.new_tokens, timer)
                results[name].prefill.seconds.append(timer.prefill)
                results[name].decode.seconds.append(median(timer.intervals))
                results[name].whole.seconds.append(timer.prefill + sum(timer.intervals))
                advance()
    gains = _batch_gains(lm, config, methods)
    _keep_freed_memory(False)
    for name, generate in functions.items():
        results[name].peak = _peak_memory(generate, config.device)
        if model.device.type == "cpu":
            results[name].flops = count_flops(partial(generate, 1, TimingStreamer()))
    return list(results.values()), gains, backend_label(lm.backend, model)


def as_data(config: SpeedConfig, results: Sequence[SpeedResult], gains: BatchGains, backend: str) -> dict[str, Any]:
    """Return everything as plain data, with ratios to the plain model."""
    plain = results[0]
    rows = []
    for result in results:
        ratios: dict[str, float | None] = {
            name: getattr(result, name).ratio_to(getattr(plain, name)) for name in ("prefill", "decode", "whole")
        }
        ratios["peak"] = result.peak / plain.peak if result.peak is not None and plain.peak else None
        ratios["flops"] = result.flops / plain.flops if result.flops is not None and plain.flops else None
        rows.append({**asdict(result), "ratios": ratios})
    return {
        "setting": asdict(config),
        "environment": {**environment(config), "backend": backend},
        "floor": bidirectional_floor(config),
        "rows": rows,
        "batched": gains.decode,
        "batched_prefill": gains.prefill,
    }


def _generate_plain(model: PreTrainedModel, ids: torch.Tensor) -> GenerateFunction:
    generate: Any = model.generate
    return lambda count, timer: generate(
        input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0, streamer=timer
    )


def _generate_with(lm: InvariantModel, prompt: Prompt) -> GenerateFunction:
    return lambda count, timer: lm.generate(prompt, max_new_tokens=count, streamer=timer)


def _generate_with_new_segment(lm: InvariantModel, prompt: Prompt) -> GenerateFunction:
    """Generate from a cache of all segments but one, which is new in every call."""
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.segments import Prompt

    warm, source = lm.with_cache(KeyValueCache(_CACHE_BYTES)), random.Random(2)
    segments = list(prompt.segments)
    warm.generate(prompt, max_new_tokens=1)

    def generate(count: int, timer: TimingStreamer) -> object:
        length = len(segments[-1].token_ids or ())
        new = [source.randrange(3, VOCABULARY) for _ in range(length)]
        changed = Prompt(prompt.prefix, [*segments[:-1], new], prompt.suffix)
        return warm.generate(changed, max_new_tokens=count, streamer=timer)

    return generate


def _batch_gains(lm: InvariantModel, config: SpeedConfig, methods: Sequence[str]) -> BatchGains:
    """Measure prompts as one batch and one after the other."""
    short = SpeedConfig(shape=config.shape, tokens=min(config.tokens, 1024), segments=min(config.segments, 8))
    prompts = [random_prompt(short, seed) for seed in range(config.batch)]
    gains = BatchGains()
    for name in methods:
        generate = partial(lm.with_method(name).generate, max_new_tokens=1 + config.new_tokens)
        generate(prompts)  # warm up
        together, single = TimingStreamer(), []
        generate(prompts, streamer=together)
        for prompt in prompts:
            single.append(TimingStreamer())
            generate(prompt, streamer=single[-1])
        gains.prefill[name] = sum(timer.prefill for timer in single) / together.prefill
        gains.decode[name] = sum(sum(timer.intervals) for timer in single) / sum(together.intervals)
    return gains


def _keep_freed_memory(keep: bool) -> None:
    """Tell glibc to keep freed memory in the process, or to release it."""
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_MMAP_MAX, 0 if keep else 1 << 16)
    libc.mallopt(_TRIM_THRESHOLD, -1 if keep else 1 << 17)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 17)
    if not keep:
        libc.malloc_trim(0)


def _peak_memory(generate: GenerateFunction, device: str) -> int | None:
    """Return the peak memory in bytes of generating one token, above the memory in use before."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        generate(1, TimingStreamer())
        return torch.cuda.max_memory_allocated() - before
    clear_refs, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if sys.platform != "linux" or not clear_refs.exists():
        return None
    clear_refs.write_text("5", encoding="ascii")  # resets VmHWM, the peak resident set size
    before = _read_kilobytes(status.read_text(encoding="ascii"), "VmRSS")
    generate(1, TimingStreamer())
    peak = _read_kilobytes(status.read_text(encoding="ascii"), "VmHWM")
    return 1024 * max(0, peak - before)  # memory that was released in between counts as nothing


def _read_kilobytes(status: str, name: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
