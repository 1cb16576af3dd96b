"""The speed benchmark: prefill, decoding and memory of every method against the plain model, in alternating runs.

Weights are random, since speed does not depend on the text. Compare the times of one measurement only with each other.
"""

from __future__ import annotations

import ctypes
import platform
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
import transformers
from invariant_rag.attention import backend_label
from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.checks import check_name
from invariant_rag.errors import InvalidChoice
from invariant_rag.models.loading import resolve_dtype
from torch.utils.flop_counter import FlopCounterMode
from transformers.generation.streamers import BaseStreamer

from invariant_rag_benchmarks.config import SpeedConfig

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt
    from transformers import PreTrainedModel

PLAIN = "plain"
STEPS = ("prefill", "decode", "whole")
"""Time to the first token, the median time of a further one, and the time of the whole generation."""
_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "num_hidden_layers")
SHAPES: dict[str, dict[str, int]] = {
    "tiny": dict(zip(_SIZES, (64, 128, 4, 2, 2), strict=True)),
    "0.5b": dict(zip(_SIZES, (896, 4864, 14, 2, 24), strict=True)),
    "1b": dict(zip(_SIZES, (2048, 8192, 32, 8, 16), strict=True)),
    "8b-layer": dict(zip(_SIZES, (4096, 14336, 32, 8, 1), strict=True)),
    "8b": dict(zip(_SIZES, (4096, 14336, 32, 8, 32), strict=True)),
}
"""Sizes of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.1-8B and one layer of it, and a tiny model for tests."""
VOCABULARY = 4096
_TEXT_TOKENS = 32  # tokens of the prefix, and of the suffix
_CACHE_BYTES = 1 << 40  # more than any prompt takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's mallopt


@dataclass
class SpeedResult:
    """The measurements of one way to generate."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in STEPS})  # of every round
    peak: int | None = None  # memory of the prefill in bytes, without the model, where the platform reports it
    flops: int | None = None  # up to the first token; see `count_flops`; None on a GPU, whose kernels do not tell them

    def ratios_to(self, plain: SpeedResult) -> dict[str, float | None]:
        """Return medians over rounds of the ratios to the plain model in the same round, and of peak and operations."""
        ratios: dict[str, float | None] = {
            step: median(mine / other for mine, other in zip(times, plain.seconds[step], strict=True))
            for step, times in self.seconds.items()
        }
        ratios["peak"] = self.peak / plain.peak if self.peak is not None and plain.peak else None
        ratios["flops"] = self.flops / plain.flops if self.flops is not None and plain.flops else None
        return ratios


class TimingStreamer(BaseStreamer):
    """Records when the tokens of a generation arrive: `generate` passes the prompt, and then every token."""

    def __init__(self) -> None:
        self._start, self._arrivals = perf_counter(), list[float]()

    def put(self, value: torch.Tensor) -> None:
        """Record the time."""
        self._arrivals.append(perf_counter())

    def end(self) -> None:
        """Do nothing."""

    def times(self) -> tuple[float, float, float]:
        """Return the seconds of the `STEPS`."""
        first, *_, last = self._arrivals[1:]
        intervals = [later - sooner for sooner, later in pairwise(self._arrivals[1:])]
        return first - self._start, median(intervals), last - self._start


GenerateFunction: TypeAlias = Callable[[int, TimingStreamer], object]
"""Generates a number of tokens into a streamer."""


def measure(config: SpeedConfig, methods: Sequence[str], progress: Progress = no_progress) -> dict[str, Any]:
    """Measure methods against the plain model; return everything as plain data, with ratios to the plain model.

    During timing, glibc keeps freed memory in the process: a virtual machine can need longer to provide it again than
    attention takes. It is released before peak memory is measured.
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
    results = {name: SpeedResult() for name in functions}
    _keep_freed_memory(True)
    for generate in functions.values():  # warm up: kernels, page tables, rotary tables
        generate(1, TimingStreamer())
    label = f"{config.tokens} tokens, {config.segments} segments"
    with progress(label, config.repeats * len(functions)) as advance:
        for _ in range(config.repeats):
            for name, generate in functions.items():
                timer = TimingStreamer()
                generate(1 + config.new_tokens, timer)
                for step, seconds in zip(STEPS, timer.times(), strict=True):
                    results[name].seconds[step].append(seconds)
                advance()
    _keep_freed_memory(False)
    for name, generate in functions.items():
        results[name].peak = _peak_memory(generate, config.device)
        if model.device.type == "cpu":
            results[name].flops = count_flops(partial(generate, 1, TimingStreamer()))
    rows = [
        {
            "name": name,
            **{step: {"seconds": times} for step, times in each.seconds.items()},
            "peak": each.peak,
            "flops": each.flops,
            "ratios": each.ratios_to(results[PLAIN]),
        }
        for name, each in results.items()
    ]
    return {
        "setting": asdict(config),
        "environment": {**environment(config.device), "backend": backend_label(lm.backend, model)},
        "floor": bidirectional_floor(config),
        "rows": rows,
    }


def bidirectional_floor(config: SpeedConfig) -> float:
    """Return the least multiply-adds per token of bidirectional attention between segments, over the plain model's.

    `(w + 2 d T) / (w + d T)` for w weights of a layer, hidden size d and T tokens.
    """
    sizes = SHAPES[config.shape]
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kept = width // heads * sizes["num_key_value_heads"]
    weights = 2 * width * width + 2 * width * kept + 3 * width * sizes["intermediate_size"]
    attention = width * config.tokens
    return (weights + 2 * attention) / (weights + attention)


def build_model(config: SpeedConfig) -> PreTrainedModel:
    """Return a Llama of the configured shape with random weights.

    Raises:
        UnknownName: There is no such shape.
        InvalidChoice: There is no such dtype, or the device is not available.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = dict(SHAPES[check_name("shape", config.shape, SHAPES)])
    dtype = resolve_dtype(config.dtype)
    try:
        torch.empty(1, device=config.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidChoice(f"device: {config.device!r} cannot be used here: {error}") from error
    model_config = LlamaConfig(
        **{**sizes, "num_hidden_layers": config.layers or sizes["num_hidden_layers"]},
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 18,
        eos_token_id=None,
    )
    with torch.device(config.device):
        model: Any = LlamaForCausalLM(model_config)
    built: PreTrainedModel = model.to(dtype).eval()
    return built


def random_prompt(config: SpeedConfig) -> Prompt:
    """Return a prompt of random token ids."""
    from invariant_rag.segments import Prompt

    source = random.Random(0)
    room = config.tokens - 2 * _TEXT_TOKENS
    shares = [source.uniform(0.7, 1.3) for _ in range(config.segments)]
    lengths = [max(1, round(room * share / sum(shares))) for share in shares]
    ids = [
        [source.randrange(3, VOCABULARY) for _ in range(length)] for length in (_TEXT_TOKENS, *lengths, _TEXT_TOKENS)
    ]
    return Prompt(ids[0], ids[1:-1], ids[-1])


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return device, threads and versions of this machine."""
    from invariant_rag import __version__

    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = names[0] if names else platform.processor() or platform.machine()
    return {
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else processor,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "invariant_rag": __version__,
    }


def count_flops(call: Callable[[], object]) -> int:
    """Run a call and return its operations in matrix products and fused attention; a multiply-add counts as two.

    Causal fused attention counts what it sees, about half of the square: `FlopCounterMode` by itself counts all of it,
    and PyTorch's kernel for CPUs not at all. Where a mask is given, or scores are a matrix, what is masked counts too.
    """
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        call()
    return int(counter.get_total_flops())


def _attention_flops(queries: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> int:
    """Return the operations of fused attention for shapes `[B, H, Q, D]`, `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`."""
    batch, heads, count, width = queries
    length = keys[2]
    causal = kwargs.get("is_causal", args[1] if len(args) > 1 else False)
    seen = sum(min(index + 1, length) for index in range(count)) if causal else count * length
    return int(2 * batch * heads * seen * (width + values[3]))


def _generate_plain(model: PreTrainedModel, ids: torch.Tensor) -> GenerateFunction:
    generate: Any = model.generate
    given = {"input_ids": ids, "do_sample": False, "pad_token_id": 0}
    return lambda count, timer: generate(**given, max_new_tokens=count, streamer=timer)


def _generate_with(lm: InvariantModel, prompt: Prompt) -> GenerateFunction:
    return lambda count, timer: lm.generate(prompt, max_new_tokens=count, streamer=timer)


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
    clear_refs = Path("/proc/self/clear_refs")
    if sys.platform != "linux" or not clear_refs.exists():
        return None
    clear_refs.write_text("5", encoding="ascii")  # resets VmHWM, the peak resident set size
    before = _read_kilobytes("VmRSS")
    generate(1, TimingStreamer())
    return 1024 * max(0, _read_kilobytes("VmHWM") - before)  # memory that was released in between counts as nothing


def _read_kilobytes(name: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(next(line for line in status.splitlines() if line.startswith(f"{name}:")).split()[1])
