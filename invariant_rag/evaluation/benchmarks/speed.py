"""What order invariance costs: every method against the plain model, side by side in alternating runs.

Models are built from a config with random weights: speed does not depend on what they say. Times of one run are only
ever compared with times of the same run.
"""

from __future__ import annotations

import ctypes
import platform
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from invariant_rag.errors import InvalidChoice, UnknownName
from invariant_rag.models.loading import resolve_dtype

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt

SHAPES: dict[str, dict[str, int]] = {
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "layers": 2,
    },
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "layers": 24,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layers": 16,
    },
    "8b-layer": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layers": 1,
    },
}
"""Sizes of Qwen2.5-0.5B, Llama-3.2-1B and one layer of Llama-3.1-8B, and a toy."""

PLAIN = "plain"
_AROUND = 32  # tokens of the prefix, and of the suffix
_VOCABULARY = 4096
_ROOM = 1 << 40  # bytes of the caches, more than any prompt takes
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's mallopt


@dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        shape: A key of `SHAPES`.
        layers: How many layers; None: as many as the shape has.
        tokens: Tokens of a prompt.
        segments: How many segments it has. Their lengths differ by up to 30%.
        new_tokens: Tokens to decode.
        batch: Prompts of the batched decoding.
        dtype: Of weights and computation.
        device: Where.
        backend: What computes the attention.
        repeats: Rounds; every round runs everything once.
    """

    shape: str = "1b"
    layers: int | None = None
    tokens: int = 2500
    segments: int = 20
    new_tokens: int = 16
    batch: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    repeats: int = 3


@dataclass
class Timing:
    """Seconds of one thing in every round."""

    seconds: list[float] = field(default_factory=list)

    def relative_to(self, other: Timing) -> float:
        """The median ratio of a round."""
        return median(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


@dataclass
class Row:
    """What was measured of one way to run the model.

    Attributes:
        name: The plain model, a method, or a method with a cache.
        prefill: Time to the first token.
        decode: Time of each further token: the median over those of a run.
        whole: Time of all tokens.
        peak: Bytes above the resting model while the prompt is read; None where the platform does not tell.
    """

    name: str
    prefill: Timing = field(default_factory=Timing)
    decode: Timing = field(default_factory=Timing)
    whole: Timing = field(default_factory=Timing)
    peak: int | None = None


class Clock(BaseStreamer):
    """When the tokens of a generation came: transformers hands over the prompt, and then each token, off the device."""

    def __init__(self) -> None:
        self._began = perf_counter()
        self._came: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        """Note the time."""
        self._came.append(perf_counter())

    def end(self) -> None:
        """Tell nobody."""

    @property
    def prefill(self) -> float:
        """Seconds to the first token."""
        return self._came[1] - self._began

    @property
    def further(self) -> list[float]:
        """Seconds between one token and the next."""
        return [later - sooner for sooner, later in pairwise(self._came[1:])]


Way: TypeAlias = Callable[[int, Clock], object]
"""Writes so many tokens, timed."""


def floor(setting: Setting) -> float:
    """Least multiply-adds per token of bidirectional attention between segments, relative to the plain model.

    `(w + 2 d T) / (w + d T)` for weights w of a layer, width d of all heads and T tokens.
    """
    sizes = SHAPES[setting.shape]
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kept = width // heads * sizes["num_key_value_heads"]
    weights = 2 * width * width + 2 * width * kept + 3 * width * sizes["intermediate_size"]
    attention = width * setting.tokens
    return (weights + 2 * attention) / (weights + attention)


def build(setting: Setting) -> PreTrainedModel:
    """Return a model of a shape, with random weights.

    Raises:
        UnknownName: There is no such shape.
        InvalidChoice: There is no such dtype, or no such device here.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if setting.shape not in SHAPES:
        raise UnknownName("shape", setting.shape, SHAPES)
    sizes: dict[str, Any] = dict(SHAPES[setting.shape])
    layers = sizes.pop("layers")
    dtype: Any = resolve_dtype(setting.dtype)
    try:
        torch.empty(0, device=setting.device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        raise InvalidChoice(f"device: {setting.device!r} cannot be used here: {error}") from error
    config = LlamaConfig(
        num_hidden_layers=setting.layers or layers,
        vocab_size=_VOCABULARY,
        max_position_embeddings=1 << 18,
        eos_token_id=None,
        **sizes,
    )
    with torch.device(setting.device):
        model: Any = LlamaForCausalLM(config)
    wanted: PreTrainedModel = model.to(dtype).eval()
    return wanted


def prompt_of(setting: Setting, seed: int = 0) -> Prompt:
    """Return a prompt of random token ids."""
    from invariant_rag.segments import Prompt

    draw = random.Random(seed)
    room = setting.tokens - 2 * _AROUND
    shares = [draw.uniform(0.7, 1.3) for _ in range(setting.segments)]
    lengths = [max(1, round(room * share / sum(shares))) for share in shares]
    ids = [[draw.randrange(3, _VOCABULARY) for _ in range(length)] for length in (_AROUND, *lengths, _AROUND)]
    return Prompt(ids[0], ids[1:-1], ids[-1])


def measure(
    setting: Setting, methods: Sequence[str], on_run: Callable[[], None] = lambda: None
) -> tuple[list[Row], dict[str, float]]:
    """Measure methods against the plain model.

    Args:
        setting: What is measured.
        methods: Names of methods.
        on_run: Called after each run; there are `runs(setting, methods)` of them.

    While times are taken, freed memory stays with the process where glibc allocates it: to get it anew from a virtual
    machine's host can take longer than attention does. It is handed back while peaks are taken, and from then on.

    Returns:
        The rows, the plain model first, and throughputs of batched decoding, relative to single calls.
    """
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel

    model, prompt = build(setting), prompt_of(setting)
    lm = InvariantModel(model, backend=setting.backend)
    ids = torch.tensor([lm.with_method("sequential").prepare(prompt).input_ids], device=setting.device)
    ways = {PLAIN: _plainly(model, ids)}
    for name in methods:
        ways[name] = _with_method(lm.with_method(name), prompt)
    if "rotor" in methods:
        warm = lm.with_method("rotor").with_cache(KeyValueCache(_ROOM))
        warm.generate(prompt, max_new_tokens=1)
        ways["rotor, warm set"] = _with_method(warm, prompt.shuffled(random.Random(1)))
    if "ape" in methods:
        ways["ape, one new segment"] = _all_but_one(lm.with_method("ape"), prompt)
    rows = {name: Row(name) for name in ways}
    _keep_freed_memory(True)
    for run in ways.values():  # kernels, page tables and tables of angles
        run(1, Clock())
    for _ in range(setting.repeats):
        for name, run in ways.items():
            clock = Clock()
            run(1 + setting.new_tokens, clock)
            rows[name].prefill.seconds.append(clock.prefill)
            rows[name].decode.seconds.append(median(clock.further))
            rows[name].whole.seconds.append(clock.prefill + sum(clock.further))
            on_run()
    batched = _batched(lm, setting, methods)
    _keep_freed_memory(False)
    for name, run in ways.items():
        rows[name].peak = _peak(run, setting.device)
    return list(rows.values()), batched


def runs(setting: Setting, methods: Sequence[str]) -> int:
    """How many runs `measure` makes."""
    return setting.repeats * (1 + len(methods) + ("rotor" in methods) + ("ape" in methods))


def environment(setting: Setting) -> dict[str, Any]:
    """Return what the measurement ran on."""
    from invariant_rag import __version__

    device = torch.cuda.get_device_name() if setting.device.startswith("cuda") else _processor()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "invariant_rag": __version__,
    }


def as_data(setting: Setting, rows: Sequence[Row], batched: dict[str, float]) -> dict[str, Any]:
    """Return everything as plain data, with ratios to the plain model."""
    plain = rows[0]
    listed = []
    for row in rows:
        ratios: dict[str, float | None] = {
            name: getattr(row, name).relative_to(getattr(plain, name)) for name in ("prefill", "decode", "whole")
        }
        ratios["peak"] = row.peak / plain.peak if row.peak is not None and plain.peak else None
        listed.append({**asdict(row), "ratios": ratios})
    return {
        "setting": asdict(setting),
        "environment": environment(setting),
        "floor": floor(setting),
        "rows": listed,
        "batched": batched,
    }


def _plainly(model: PreTrainedModel, ids: torch.Tensor) -> Way:
    generate: Any = model.generate
    return lambda count, clock: generate(
        input_ids=ids, max_new_tokens=count, do_sample=False, pad_token_id=0, streamer=clock
    )


def _with_method(lm: InvariantModel, prompt: Prompt) -> Way:
    return lambda count, clock: lm.generate(prompt, max_new_tokens=count, streamer=clock)


def _all_but_one(lm: InvariantModel, prompt: Prompt) -> Way:
    """Answer from a cache that knows every segment but one, which is another each time."""
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.segments import Prompt

    warm, draw = lm.with_cache(KeyValueCache(_ROOM)), random.Random(2)
    segments = list(prompt.segments)
    warm.generate(prompt, max_new_tokens=1)

    def run(count: int, clock: Clock) -> object:
        length = len(segments[-1].token_ids or ())
        new = [draw.randrange(3, _VOCABULARY) for _ in range(length)]
        changed = Prompt(prompt.prefix, [*segments[:-1], new], prompt.suffix)
        return warm.generate(changed, max_new_tokens=count, streamer=clock)

    return run


def _batched(lm: InvariantModel, setting: Setting, methods: Sequence[str]) -> dict[str, float]:
    """Throughput of decoding prompts as one batch, relative to one after the other."""
    short = Setting(shape=setting.shape, tokens=min(setting.tokens, 512), segments=min(setting.segments, 8))
    prompts = [prompt_of(short, seed) for seed in range(setting.batch)]
    gains = {}
    for name in methods:
        chosen = lm.with_method(name)
        together, single = Clock(), [Clock() for _ in prompts]
        chosen.generate(prompts, max_new_tokens=1 + setting.new_tokens, streamer=together)
        for prompt, clock in zip(prompts, single, strict=True):
            chosen.generate(prompt, max_new_tokens=1 + setting.new_tokens, streamer=clock)
        gains[name] = sum(sum(clock.further) for clock in single) / sum(together.further)
    return gains


def _keep_freed_memory(keep: bool) -> None:
    libc: Any = ctypes.CDLL(None) if sys.platform == "linux" else None
    if not hasattr(libc, "mallopt"):
        return
    libc.mallopt(_MMAP_MAX, 0 if keep else 1 << 16)
    libc.mallopt(_TRIM_THRESHOLD, -1 if keep else 1 << 17)
    libc.mallopt(_MMAP_THRESHOLD, 1 << 17)
    if not keep:
        libc.malloc_trim(0)


def _peak(run: Way, device: str) -> int | None:
    """Most bytes at a time, above those at rest, while something runs."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(1, Clock())
        return torch.cuda.max_memory_allocated() - before
    marks, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if sys.platform != "linux" or not marks.exists():
        return None
    marks.write_text("5", encoding="ascii")  # the high-water mark starts anew
    before = _kilobytes(status.read_text(encoding="ascii"), "VmRSS")
    run(1, Clock())
    peak = _kilobytes(status.read_text(encoding="ascii"), "VmHWM")
    return 1024 * max(0, peak - before)  # memory that was handed back meanwhile counts for nothing


def _kilobytes(status: str, name: str) -> int:
    line = next(line for line in status.splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
