"""Throughput and time to first token on vLLM: arranged requests against plain ones, and against our own engine.

    python serve_with_vllm.py http://127.0.0.1:8000 --out serve_with_vllm.md

64 requests about 16 sets, in one run: every round asks all systems, one after the other. A new tenant makes a round
cold, since tenants share neither the folder nor vLLM's prefix cache; asking the same requests again is warm.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

from vllm_invariant_rag import VLLMBackend

from invariant_rag import InvariantModel, Prompt
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.kv_cache import KeyValueCache

SETS, REQUESTS, DOCUMENTS, TOKENS = 16, 64, 16, 32
WORDS = "river mill ferry bridge tower field harbour market forest guild castle valley road lake hill stone".split()


def sentences(rng: random.Random) -> list[str]:
    """Return the documents of one set."""
    names = [f"{rng.choice(WORDS)} of {rng.randrange(10**6)}" for _ in range(DOCUMENTS)]
    return [f"The {name} lies by the {' '.join(rng.choices(WORDS, k=12))}." for name in names]


def prompts(lm: InvariantModel, seed: int) -> list[Prompt]:
    """All requests of a round: each set with four questions, its documents in four orders."""
    rng, made = random.Random(seed), []
    for number in range(SETS):
        documents = sentences(random.Random(1000 + number))
        for question in range(REQUESTS // SETS):
            order = rng.sample(documents, len(documents))
            made.append(lm.chat_prompt(f"What is told of the {WORDS[(number + question) % len(WORDS)]}?", order))
    rng.shuffle(made)
    return made


def timed(ask: Callable[[Prompt], float], asked: list[Prompt], clients: int) -> tuple[float, float]:
    """Return requests per second, and the median of seconds to the first token."""
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        first = list(pool.map(ask, asked))
    return len(asked) / (time.perf_counter() - began), statistics.median(first)


def streaming(lm: InvariantModel) -> Callable[[Prompt], float]:
    """Ask for a stream, and return the seconds to its first piece."""

    def ask(prompt: Prompt) -> float:
        began = time.perf_counter()
        stream = lm.stream(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS)
        next(stream)
        first = time.perf_counter() - began
        for _ in stream:
            pass
        return first

    return ask


def batching(lm: InvariantModel) -> Callable[[Prompt], float]:
    """Ask through the micro-batcher, whose answers come whole."""
    batcher = MicroBatcher()

    def ask(prompt: Prompt) -> float:
        began = time.perf_counter()
        batcher.generate(lm, prompt, {"max_new_tokens": TOKENS, "min_new_tokens": TOKENS}, batch_size=16)
        return time.perf_counter() - began

    return ask


def one_round(url: str, lm: InvariantModel, clients: int, seed: int) -> dict[str, tuple[float, float]]:
    """Measure every system once."""
    asked, found = prompts(lm, seed), {}
    rotor = VLLMBackend(lm, url=url, tenant=uuid4().hex)
    plain = rotor.with_method("sequential", ordering="given")
    cached = lm.with_cache(KeyValueCache())
    for name, ask in (
        ("plain vLLM", streaming(plain)),
        ("RoToR on vLLM", streaming(rotor)),
        ("our engine", batching(cached)),
    ):
        for state in ("cold", "warm"):
            found[f"{name}, {state}"] = timed(ask, asked, clients)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    lm = VLLMBackend(url=options.url)
    local = InvariantModel(lm.model, lm.tokenizer, method="rotor")
    one_round(options.url, local, 8, seed=0)  # kernels are compiled and pages are touched
    lines = []
    for clients in (1, 8, 32):
        rounds = [one_round(options.url, local, clients, seed=1 + index) for index in range(options.rounds)]
        for name in rounds[0]:
            base = "plain vLLM, " + name.rpartition(", ")[2]
            ratios = [each[name][0] / each[base][0] for each in rounds]
            first = statistics.median(each[name][1] / each[base][1] for each in rounds)
            spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
            lines.append(f"| {clients} | {name} | {statistics.median(ratios):.2f} | {spread} | {first:.2f} |")
            print(lines[-1], flush=True)
    head = "| clients | system | throughput / plain vLLM | lowest to highest | first token / plain vLLM |\n"
    options.out.write_text(head + "|---|---|---|---|---|\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
