"""What order invariance costs on a vLLM: arranged requests against plain ones to the same server, in one run.

A round asks questions about sets of documents, which come in another order every time. A new tenant makes it cold,
since tenants share no prefix cache; asking the same requests again is warm. Every round asks both, one after the other,
so ratios are of the same minutes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import product
from typing import Any, TypeAlias
from uuid import uuid4

from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.generation.model import InvariantModel
from invariant_rag.segments import Prompt

from invariant_rag_benchmarks.config import ServingConfig

Connect: TypeAlias = Callable[[str], InvariantModel]
"""Returns a model on the server, for a tenant."""
Row: TypeAlias = tuple[int, int, str, str]
"""Clients at the same time, questions about each set, system, and state."""

PLAIN, ARRANGED = "plain", "arranged"
STATES = ("cold", "warm")
MEASURES = ("throughput", "first token", "between tokens")
"""Requests per second, and medians of seconds."""
_WORDS = "river mill ferry bridge tower field harbour market forest guild castle valley road lake hill stone".split()


def measure_serving(connect: Connect, config: ServingConfig, progress: Progress = no_progress) -> dict[str, Any]:
    """Ask both systems, with every number of clients and questions, in every round.

    Args:
        connect: Returns the arranged model on the server.
        config: What is measured.
        progress: Reports rounds.

    Returns:
        The settings, the ratios, and what was measured: plain data.
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
    found = []
    for (clients, questions, system, state), rounds in rows.items():
        if system == ARRANGED:
            line: dict[str, Any] = {"clients": clients, "questions": questions, "state": state}
            pairs = list(zip(rounds, rows[clients, questions, PLAIN, state], strict=True))
            for index, name in enumerate(MEASURES):
                each = [mine[index] / other[index] for mine, other in pairs]
                line[name] = [statistics.median(each), min(each), max(each)]
            found.append(line)
    return found


def prompts(lm: InvariantModel, config: ServingConfig, questions: int, seed: int) -> list[Prompt]:
    """Return the requests of a round: each set with several questions, its segments in an order of its own."""
    rng, made = random.Random(seed), []
    for number in range(config.requests // questions):
        segments = _segments(config.segments, 1000 * seed + number)
        for question in range(questions):
            asked = f"What is told of the {_WORDS[(number + question) % len(_WORDS)]}?"
            made.append(lm.chat_prompt(asked, rng.sample(segments, len(segments))))
    rng.shuffle(made)
    return made


def _segments(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    names = [f"{rng.choice(_WORDS)} of {rng.randrange(10**6)}" for _ in range(count)]
    return [f"The {name} lies by the {' '.join(rng.choices(_WORDS, k=12))}." for name in names]


def _round(
    connect: Connect, config: ServingConfig, clients: int, questions: int, seed: int
) -> dict[tuple[str, str], Sequence[float]]:
    arranged = connect(uuid4().hex)
    asked = prompts(arranged, config, questions, seed)
    systems = {PLAIN: arranged.with_method("sequential", ordering="given"), ARRANGED: arranged}
    order = sorted(systems, reverse=bool(seed % 2))
    return {(name, state): _timed(systems[name], asked, config, clients) for name in order for state in STATES}


def _timed(lm: InvariantModel, asked: Sequence[Prompt], config: ServingConfig, clients: int) -> Sequence[float]:
    """Return the `MEASURES`."""

    def ask(prompt: Prompt) -> tuple[float, float]:
        began = time.perf_counter()
        stream = lm.stream(prompt, max_new_tokens=config.new_tokens, min_new_tokens=config.new_tokens)
        next(stream)
        first = time.perf_counter()
        for _ in stream:
            pass
        return first - began, (time.perf_counter() - first) / max(1, config.new_tokens - 1)

    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        first, between = zip(*pool.map(ask, asked), strict=True)
    return len(asked) / (time.perf_counter() - began), statistics.median(first), statistics.median(between)
