"""Load on a server: many clients at a time, and whether any answer is another one than that of a request alone."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from invariant_rag.errors import InvalidChoice, RemoteError
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import SegmentSet

_TOWNS = ("Ostra", "Brenn", "Gesthaven", "Lume", "Senn", "Marn", "Kolm", "Oss", "Harrow", "Tyne", "Vell", "Aster")
_COLOURS = ("white", "green", "red", "blue", "orange", "black", "yellow", "grey")


@dataclass(frozen=True)
class Load:
    """The result of a load test.

    Attributes:
        clients: How many asked at a time.
        requests: How many requests were sent.
        answered: How many were answered.
        rejected: How many were refused because the server was full.
        failed: How many failed for another reason.
        wrong: How many answers differ from that of the same request alone, with its documents in another order.
        seconds: From the first request to the last answer.
        throughput: Answers per second.
        tokens_per_second: Generated tokens per second.
        cached: Share of the prompts' tokens that came from a cache.
        latency: Seconds of an answer: `p50`, `p90`, `p99` and `max`.
    """

    clients: int
    requests: int
    answered: int
    rejected: int
    failed: int
    wrong: int
    seconds: float
    throughput: float
    tokens_per_second: float
    cached: float
    latency: dict[str, float]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


@dataclass(frozen=True)
class _Asked:
    question: int
    seconds: float
    text: str | None = None
    refused: bool = False
    tokens: tuple[int, int, int] = (0, 0, 0)


def load_server(
    base_url: str,
    *,
    clients: int = 32,
    requests: int = 500,
    documents: int = 8,
    questions: int = 50,
    max_tokens: int = 32,
    api_key: str | None = None,
    seed: int = 0,
    advance: Callable[[], None] = lambda: None,
) -> Load:
    """Send requests from many clients at a time, then ask every question once more, alone and in another order.

    Args:
        base_url: Address of the API.
        clients: Requests at a time.
        requests: Requests in all. Each has the documents of its question in a random order.
        documents: Documents of a question.
        questions: Different questions.
        max_tokens: The most tokens of an answer.
        api_key: Key for the server.
        seed: Seed of questions and orders.
        advance: Called after each answer.

    Raises:
        InvalidChoice: A number is below 1.
        RemoteError: The server cannot be reached.
    """
    if min(clients, requests, documents, questions, max_tokens) < 1:
        raise InvalidChoice("expected at least one client, request, document, question and token")
    source = random.Random(seed)
    asked = [_question(source, documents) for _ in range(min(questions, requests))]
    remote = RemoteModel(base_url, api_key=api_key, max_retries=0)
    remote.context_window()  # raises if nobody is there
    local = threading.local()

    def ask(number: int) -> _Asked:
        if not hasattr(local, "remote"):
            local.remote = RemoteModel(base_url, api_key=api_key, max_retries=0)
        found = _ask(local.remote, asked, number % len(asked), seed + 1 + number, max_tokens)
        advance()
        return found

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(ask, range(requests)))
    seconds = time.perf_counter() - start
    alone = [_ask(remote, asked, number, -1 - number, max_tokens).text for number in range(len(asked))]
    answers = [each for each in found if each.text is not None]
    prompts, cached, written = (sum(each.tokens[place] for each in answers) for place in range(3))
    times = sorted(each.seconds for each in answers)
    return Load(
        clients=clients,
        requests=requests,
        answered=len(answers),
        rejected=sum(each.refused for each in found),
        failed=sum(each.text is None and not each.refused for each in found),
        wrong=sum(each.text != alone[each.question] for each in answers),
        seconds=seconds,
        throughput=len(answers) / seconds,
        tokens_per_second=written / seconds,
        cached=cached / prompts if prompts else 0.0,
        latency={f"p{share}": _percentile(times, share) for share in (50, 90, 99)} | {"max": max(times, default=0.0)},
    )


def _question(source: random.Random, documents: int) -> tuple[str, list[str]]:
    """Return a question, and documents of which one answers it."""
    number = source.randrange(10**6)
    towns = [f"{source.choice(_TOWNS)} {number + place}" for place in range(documents)]
    flags = [f"The flag of {town} is {source.choice(_COLOURS)}." for town in towns]
    return f"What colour is the flag of {source.choice(towns)}?", flags


def _ask(
    remote: RemoteModel, asked: Sequence[tuple[str, list[str]]], number: int, order: int, max_tokens: int
) -> _Asked:
    question, documents = asked[number]
    listed = random.Random(order).sample(documents, len(documents))
    messages = [{"role": "user", "content": [SegmentSet(listed), f"\nQuestion: {question}"]}]
    start = time.perf_counter()
    try:
        reply = remote.chat(messages, max_tokens=max_tokens)
    except RemoteError as error:
        return _Asked(number, time.perf_counter() - start, refused="(status 429)" in str(error))
    usage = reply["usage"]
    tokens = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
    seconds = time.perf_counter() - start
    return _Asked(number, seconds, reply["choices"][0]["message"]["content"], tokens=tokens)


def _percentile(ordered: Sequence[float], share: int) -> float:
    """Return the smallest value that at least `share` percent of the values do not exceed."""
    return ordered[max(-(-len(ordered) * share // 100) - 1, 0)] if ordered else 0.0
