"""Throughput and time to first token of a server: arranged requests, plain ones, and our own engine, in one run.

Requests ask several questions about each of a few sets, whose segments come in another order every time. A new tenant
makes a round cold, since tenants share neither stored keys and values nor a prefix cache; asking the same requests
again is warm. Every round asks all systems, one after the other, so ratios are of the same minutes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias
from uuid import uuid4

from invariant_rag.evaluation.progress import Progress, no_progress
from invariant_rag.generation import InvariantModel
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.segments import Prompt

Connect: TypeAlias = Callable[[str], InvariantModel]
"""Returns a model on the server, for a tenant."""

Ask: TypeAlias = Callable[[Prompt], float]
"""Asks for an answer, and returns the seconds to its first piece."""

PLAIN, ARRANGED, LOCAL = "plain, on the server", "arranged, on the server", "arranged, in this process"
_STATES = ("cold", "warm")
_WORDS = "river mill ferry bridge tower field harbour market forest guild castle valley road lake hill stone".split()


@dataclass(frozen=True)
class ServingConfig:
    """What is measured.

    Attributes:
        clients: Numbers of clients that ask at the same time.
        requests: Requests of a round, a multiple of the sets.
        sets: Different sets.
        segments: Segments of a set.
        new_tokens: Tokens of an answer.
        batch: Prompts that our own engine decodes together.
        rounds: Rounds, after one that is not counted.
    """

    clients: tuple[int, ...] = (1, 8, 32)
    requests: int = 64
    sets: int = 16
    segments: int = 16
    new_tokens: int = 32
    batch: int = 16
    rounds: int = 3


@dataclass
class ServingRow:
    """One system in one state, asked by so many clients.

    Attributes:
        clients: Clients that ask at the same time.
        system: `PLAIN`, `ARRANGED` or `LOCAL`.
        state: `cold` or `warm`.
        throughput: Requests per second, of each round.
        first_token: Median of seconds to the first piece, of each round. That of `LOCAL`, whose answers come whole, is
            the time of the answer.
    """

    clients: int
    system: str
    state: str
    throughput: list[float]
    first_token: list[float]


def measure_serving(connect: Connect, config: ServingConfig, progress: Progress = no_progress) -> list[ServingRow]:
    """Ask every system, with every number of clients, in every round.

    Args:
        connect: Returns the arranged model on the server.
        config: What is measured.
        progress: Reports rounds.
    """
    rows: dict[tuple[int, str, str], ServingRow] = {}
    with progress("rounds", len(config.clients) * config.rounds + 1) as advance:
        _round(connect, config, config.clients[-1], 0)  # kernels are compiled, and pages are touched
        advance()
        for clients in config.clients:
            for number in range(config.rounds):
                for (system, state), (throughput, first) in _round(connect, config, clients, 1 + number).items():
                    row = rows.setdefault((clients, system, state), ServingRow(clients, system, state, [], []))
                    row.throughput.append(throughput)
                    row.first_token.append(first)
                advance()
    return list(rows.values())


def ratios(rows: Sequence[ServingRow]) -> list[dict[str, Any]]:
    """Return each row against the plain one in the same state: median, lowest and highest ratio of a round."""
    plain = {(row.clients, row.state): row for row in rows if row.system == PLAIN}
    found = []
    for row in rows:
        base = plain[row.clients, row.state]
        throughput = [mine / other for mine, other in zip(row.throughput, base.throughput, strict=True)]
        first = [mine / other for mine, other in zip(row.first_token, base.first_token, strict=True)]
        found.append(
            {
                "clients": row.clients,
                "system": row.system,
                "state": row.state,
                "throughput": statistics.median(throughput),
                "lowest": min(throughput),
                "highest": max(throughput),
                "first token": statistics.median(first),
            }
        )
    return found


def as_data(config: ServingConfig, rows: Sequence[ServingRow], machine: dict[str, Any]) -> dict[str, Any]:
    """Return settings, machine, ratios and times of a run."""
    return {
        "setting": asdict(config),
        "environment": machine,
        "ratios": ratios(rows),
        "rows": [asdict(row) for row in rows],
    }


def prompts(lm: InvariantModel, config: ServingConfig, seed: int) -> list[Prompt]:
    """Return the requests of a round: each set with several questions, its segments in an order of its own."""
    rng, made = random.Random(seed), []
    for number in range(config.sets):
        segments = _segments(config.segments, 1000 + number)
        for question in range(config.requests // config.sets):
            asked = f"What is told of the {_WORDS[(number + question) % len(_WORDS)]}?"
            made.append(lm.chat_prompt(asked, rng.sample(segments, len(segments))))
    rng.shuffle(made)
    return made


def _segments(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    names = [f"{rng.choice(_WORDS)} of {rng.randrange(10**6)}" for _ in range(count)]
    return [f"The {name} lies by the {' '.join(rng.choices(_WORDS, k=12))}." for name in names]


def _round(
    connect: Connect, config: ServingConfig, clients: int, seed: int
) -> dict[tuple[str, str], tuple[float, float]]:
    arranged = connect(uuid4().hex)
    local = InvariantModel(arranged.model, arranged.tokenizer, method=arranged.method, ordering=arranged.ordering)
    asked = prompts(local, config, seed)
    systems: dict[str, Ask] = {
        PLAIN: _streaming(arranged.with_method("sequential", ordering="given"), config),
        ARRANGED: _streaming(arranged, config),
        LOCAL: _batching(local.with_cache(KeyValueCache()), config),
    }
    return {(name, state): _timed(ask, asked, clients) for name, ask in systems.items() for state in _STATES}


def _timed(ask: Ask, asked: Sequence[Prompt], clients: int) -> tuple[float, float]:
    """Return requests per second, and the median of seconds to the first token."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        first = list(pool.map(ask, asked))
    return len(asked) / (time.perf_counter() - began), statistics.median(first)


def _streaming(lm: InvariantModel, config: ServingConfig) -> Ask:
    def ask(prompt: Prompt) -> float:
        began = time.perf_counter()
        stream = lm.stream(prompt, max_new_tokens=config.new_tokens, min_new_tokens=config.new_tokens)
        next(stream)
        first = time.perf_counter() - began
        for _ in stream:
            pass
        return first

    return ask


def _batching(lm: InvariantModel, config: ServingConfig) -> Ask:
    batcher, options = MicroBatcher(), {"max_new_tokens": config.new_tokens, "min_new_tokens": config.new_tokens}

    def ask(prompt: Prompt) -> float:
        began = time.perf_counter()
        batcher.generate(lm, prompt, options, batch_size=config.batch)
        return time.perf_counter() - began

    return ask
