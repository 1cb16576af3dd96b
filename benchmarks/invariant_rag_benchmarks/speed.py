"""What order invariance costs: every method against the plain model here, and arranged requests against plain ones.

What is compared runs in turn in every round, so ratios are of the same minutes. Here, weights are random, since speed
does not depend on the text. On a server, a round sends sets of documents, in another order every time; a new
tenant makes it cold, since tenants share no prefix cache, and the same requests again are warm.
"""

from __future__ import annotations

import ctypes
import platform
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from uuid import uuid4

import torch
from invariant_rag.attention import backend_label
from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.errors import InvalidChoice
from invariant_rag.models.loading import resolve_dtype
from invariant_rag.testing import toy_inputs
from torch.utils.flop_counter import FlopCounterMode
from transformers.generation.streamers import BaseStreamer

from invariant_rag_benchmarks.config import SHAPES, TEXT_TOKENS, ServingConfig, SpeedConfig, package_versions

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt
    from transformers import PreTrainedModel

PLAIN, ARRANGED = "plain", "arranged"
STATES = ("cold", "warm")
MEASURES = ("throughput", "first token", "between tokens")
"""Of a server: requests per second, and medians of seconds."""
_WORDS = "river mill ferry bridge tower field harbour market forest guild castle valley road lake hill stone".split()
STEPS = ("prefill", "decode", "whole")
"""Time to the first token, the median time of a further one, and the time of the whole generation."""
VOCABULARY = 4096
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4  # glibc's mallopt


@dataclass
class SpeedResult:
    """The measurements of one way to generate."""

    seconds: dict[str, list[float]] = field(default_factory=lambda: {step: [] for step in STEPS})  # of every round
    peak: int | None = None  # bytes of a prefill above those in use before; None on a CPU
    flops: int | None = None  # up to the first token; None on a GPU, whose kernels do not count them

    def ratios_to(self, plain: SpeedResult) -> dict[str, float | None]:
        """Return medians over rounds of the ratios to the plain model in the same round, and of peak and operations."""
        return {
            **{step: median_ratio(times, plain.seconds[step])[0] for step, times in self.seconds.items()},
            "peak": self.peak / plain.peak if self.peak is not None and plain.peak else None,
            "flops": self.flops / plain.flops if self.flops is not None and plain.flops else None,
        }


def median_ratio(ours: Sequence[float], plain: Sequence[float]) -> tuple[float, float, float]:
    """Return the median, lowest and highest ratio of rounds."""
    ratios = [mine / other for mine, other in zip(ours, plain, strict=True)]
    return median(ratios), min(ratios), max(ratios)


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


def measure(config: SpeedConfig, methods: Sequence[str], progress: Progress = no_progress) -> dict[str, Any]:
    """Measure methods against the plain model; return everything as plain data, with ratios to the plain model.

    During timing, glibc keeps freed memory in the process: a virtual machine can need longer to provide it again than
    attention takes.
    """
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.model import InvariantModel

    model, prompt = build_model(config), random_prompt(config)
    lm = InvariantModel(model, backend=config.backend)
    ids = torch.tensor([lm.with_method("sequential").prepare(prompt).input_ids], device=config.device)
    plain: Any = partial(cast("Any", model.generate), ids, do_sample=False, pad_token_id=0)
    functions = {PLAIN: plain, **{name: partial(lm.with_method(name).generate, prompt) for name in methods}}
    if "rotor" in methods:
        warm = lm.with_method("rotor").with_cache(KeyValueCache(1 << 40))  # more than any prompt takes
        warm.generate(prompt, max_new_tokens=1)
        functions["rotor, warm set"] = partial(warm.generate, prompt.shuffled(random.Random(1)))
    results = {name: SpeedResult() for name in functions}
    _keep_freed_memory(True)
    for generate in functions.values():  # warm up: kernels, page tables, rotary tables
        generate(max_new_tokens=1)
    with progress(f"{config.tokens} tokens, {config.segments} segments", config.repeats * len(functions)) as advance:
        for _ in range(config.repeats):
            for name, generate in functions.items():
                timer = TimingStreamer()
                generate(max_new_tokens=1 + config.new_tokens, streamer=timer)
                for step, seconds in zip(STEPS, timer.times(), strict=True):
                    results[name].seconds[step].append(seconds)
                advance()
    _keep_freed_memory(False)
    for name, generate in functions.items():
        prefill = partial(generate, max_new_tokens=1)
        if model.device.type == "cpu":
            results[name].flops = count_flops(prefill)
        elif model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            prefill()
            results[name].peak = torch.cuda.max_memory_allocated() - before
    rows = []
    for name, each in results.items():
        steps = {step: {"seconds": times} for step, times in each.seconds.items()}
        more = {"peak": each.peak, "flops": each.flops, "ratios": each.ratios_to(results[PLAIN])}
        rows.append({"name": name, **steps, **more})
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
    width, inner, heads, shared, _ = SHAPES[config.shape].values()
    weights = 2 * width * width + 2 * width * (width // heads * shared) + 3 * width * inner
    attention = width * config.tokens
    return (weights + 2 * attention) / (weights + attention)


def build_model(config: SpeedConfig) -> PreTrainedModel:
    """Return a Llama of the configured shape with random weights; refuse a device that cannot be used."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {**SHAPES[config.shape], "vocab_size": VOCABULARY, "max_position_embeddings": 1 << 18}
    sizes["num_hidden_layers"] = config.layers or sizes["num_hidden_layers"]
    try:
        torch.empty(1, device=config.device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InvalidChoice(f"device: {config.device!r} cannot be used here: {error}") from error
    with torch.device(config.device):
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, eos_token_id=None))
    built: PreTrainedModel = model.to(resolve_dtype(config.dtype)).eval()
    return built


def random_prompt(config: SpeedConfig) -> Prompt:
    """Return a prompt of random token ids."""
    source, room = random.Random(0), config.tokens - 2 * TEXT_TOKENS
    shares = [source.uniform(0.7, 1.3) for _ in range(config.segments)]
    lengths = [max(1, round(room * share / sum(shares))) for share in shares]
    return toy_inputs.random_prompt(source, lengths, prefix=TEXT_TOKENS, suffix=TEXT_TOKENS, vocabulary=VOCABULARY)


def environment(device: str = "cpu") -> dict[str, Any]:
    """Return device, threads and versions of this machine."""
    lines = info.read_text().splitlines() if (info := Path("/proc/cpuinfo")).exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    processor = next(iter(names), platform.processor() or platform.machine())
    name = torch.cuda.get_device_name() if device.startswith("cuda") else processor
    return {"device": name, "threads": torch.get_num_threads(), **package_versions()}


def count_flops(call: Callable[[], object]) -> int:
    """Run a call and return its operations in matrix products and fused attention; a multiply-add counts as two.

    Causal fused attention counts the keys attended to, about half of the square: `FlopCounterMode` itself counts all,
    and PyTorch's kernel for CPUs not at all.
    """
    fused = {torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops}
    with FlopCounterMode(display=False, custom_mapping=fused) as counter:
        call()
    return int(counter.get_total_flops())


def _attention_flops(queries: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> int:
    """Count for shapes `[B, H, Q, D]`, `[B, H_kv, S, D]` and `[B, H_kv, S, D_v]`."""
    batch, heads, count, width = queries
    length = keys[2]
    causal = kwargs.get("is_causal", args[1] if len(args) > 1 else False)
    attended = sum(min(index + 1, length) for index in range(count)) if causal else count * length
    return int(2 * batch * heads * attended * (width + values[3]))


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


# --- on a server ---

Connect: TypeAlias = "Callable[[str], InvariantModel]"
Row: TypeAlias = tuple[int, int, str, str]  # clients at the same time, questions about each set, system, and state


def measure_serving(connect: Connect, config: ServingConfig, progress: Progress = no_progress) -> dict[str, Any]:
    """Ask both systems, with every number of clients and questions, in every round.

    `connect` returns the arranged model on the server, for a tenant. The result is plain data.
    """
    rows: dict[Row, list[Sequence[float]]] = defaultdict(list)
    cases = list(product(config.clients, config.questions))
    with progress("rounds", len(cases) * config.rounds + 1) as advance:
        _round(connect, config, *cases[-1], 0)  # kernels are compiled, and pages are touched
        advance()
        for number, case in product(range(config.rounds), cases):
            for (system, state), found in _round(connect, config, *case, 1 + number).items():
                rows[*case, system, state].append(found)
            advance()
    names = ("clients", "questions", "system", "state")
    measured = [
        {**dict(zip(names, row, strict=True)), "measured": dict(zip(MEASURES, zip(*rounds, strict=True), strict=True))}
        for row, rounds in rows.items()
    ]
    return {"setting": asdict(config), "ratios": ratios(rows), "rows": measured}


def ratios(rows: dict[Row, list[Sequence[float]]]) -> list[dict[str, Any]]:
    """Return each arranged row against the plain one: median, lowest and highest ratio of rounds, by measure."""
    ratios = []
    for (clients, questions, system, state), rounds in rows.items():
        if system == ARRANGED:
            plain = zip(*rows[clients, questions, PLAIN, state], strict=True)
            compared = map(median_ratio, zip(*rounds, strict=True), plain)
            case = {"clients": clients, "questions": questions, "state": state}
            ratios.append({**case, **dict(zip(MEASURES, compared, strict=True))})
    return ratios


def prompts(lm: InvariantModel, config: ServingConfig, questions: int, seed: int) -> list[Prompt]:
    """Return the requests of a round: each set with several questions, its segments in an order of its own."""
    rng, made = random.Random(seed), []
    for number in range(config.requests // questions):
        own = random.Random(1000 * seed + number)
        names = [f"{own.choice(_WORDS)} of {own.randrange(10**6)}" for _ in range(config.segments)]
        segments = [f"The {name} lies by the {' '.join(own.choices(_WORDS, k=config.words))}." for name in names]
        for question in range(questions):
            query = f"What is told of the {_WORDS[(number + question) % len(_WORDS)]}?"
            made.append(lm.chat_prompt(query, rng.sample(segments, len(segments))))
    rng.shuffle(made)
    return made


def _round(
    connect: Connect, config: ServingConfig, clients: int, questions: int, seed: int
) -> dict[tuple[str, str], Sequence[float]]:
    arranged = connect(uuid4().hex)
    requests = prompts(arranged, config, questions, seed)
    systems = {PLAIN: arranged.with_method("sequential", ordering="given"), ARRANGED: arranged}
    order = sorted(systems, reverse=bool(seed % 2))
    return {(name, state): _timed(systems[name], requests, config, clients) for name in order for state in STATES}


def _timed(lm: InvariantModel, requests: Sequence[Prompt], config: ServingConfig, clients: int) -> Sequence[float]:
    """Return the `MEASURES`."""

    def ask(prompt: Prompt) -> tuple[float, float]:
        began = perf_counter()
        stream = lm.stream(prompt, max_new_tokens=config.new_tokens, min_new_tokens=config.new_tokens)
        next(stream)
        first = perf_counter()
        for _ in stream:
            pass
        return first - began, (perf_counter() - first) / max(1, config.new_tokens - 1)

    began = perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        first, between = zip(*pool.map(ask, requests), strict=True)
    return len(requests) / (perf_counter() - began), median(first), median(between)
