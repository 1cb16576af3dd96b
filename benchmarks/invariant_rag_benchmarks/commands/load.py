"""`invariant-rag bench serve`: load on a server, and whether every answer is right."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Annotated, Any

import typer
from invariant_rag import RemoteModel, SegmentSet
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_error, print_json, print_text
from invariant_rag.cli.progress import progress_bar
from invariant_rag.cli.serve import check_packages
from invariant_rag.errors import RemoteError
from invariant_rag.server.settings import KEY_VARIABLE

_TOWNS = ("Ostra", "Brenn", "Gesthaven", "Lume", "Senn", "Marn", "Kolm", "Oss", "Harrow", "Tyne", "Vell", "Aster")
_COLORS = ("white", "green", "red", "blue", "orange", "black", "yellow", "grey")
_QUESTIONS = 50


def load(
    url: Annotated[
        str | None,
        typer.Option(help="Such as http://localhost:8000/v1.", show_default="the embedded model, served here"),
    ] = None,
    clients: Annotated[int, typer.Option(min=1, max=1000, help="Requests at a time.")] = 32,
    requests: Annotated[int, typer.Option(min=1, max=100_000, help="Requests in all.")] = 500,
    documents: Annotated[int, typer.Option(min=1, help="Documents of a question.")] = 8,
    max_new_tokens: options.MaxNewTokens = 32,
    together: Annotated[int, typer.Option(min=1, help="Without --url: requests to decode as one batch.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of questions and orders.")] = 0,
    as_json: options.Json = False,
) -> None:
    """Ask a server from many clients, in random orders, and compare every answer with that of the request alone.

    Exit code: 0; 1 if an answer is wrong or a request failed; 2 for an error.
    """
    source, local = random.Random(seed), threading.local()
    asked = [_question(source, documents) for _ in range(min(_QUESTIONS, requests))]

    def ask(number: int, order: int) -> dict[str, Any]:
        if not hasattr(local, "remote"):
            local.remote = RemoteModel(str(address), api_key=os.environ.get(KEY_VARIABLE) or None, max_retries=0)
        question, texts = asked[number % len(asked)]
        listed = random.Random(order).sample(texts, len(texts))
        messages = [{"role": "user", "content": [SegmentSet(listed), f"\nQuestion: {question}"]}]
        start = time.perf_counter()
        try:
            reply = local.remote.chat(messages, max_tokens=max_new_tokens)
        except RemoteError as error:
            return {"question": number % len(asked), "refused": "(status 429)" in str(error)}
        finally:
            advance()
        seconds, text = time.perf_counter() - start, reply["choices"][0]["message"]["content"]
        return {"question": number % len(asked), "seconds": seconds, "text": text, "usage": reply["usage"]}

    with handle_errors():
        check_packages()
        with (
            nullcontext(url) if url else _embedded_server(together, clients) as address,
            progress_bar("Asking", requests + len(asked)) as advance,
            ThreadPoolExecutor(clients) as pool,
        ):
            RemoteModel(str(address), api_key=os.environ.get(KEY_VARIABLE) or None).context_window()  # raises if none
            start = time.perf_counter()
            found = list(pool.map(ask, range(requests), range(seed + 1, seed + 1 + requests)))
            seconds = time.perf_counter() - start
            alone = [ask(number, -1 - number).get("text") for number in range(len(asked))]
    measured = _measured(found, alone, seconds) | {"clients": clients, "requests": requests}
    if as_json:
        print_json(measured)
    else:
        for name, value in measured.items():
            print_text(f"{name}: {value}")
    if measured["wrong"] or measured["failed"]:
        print_error("expected every request to be answered as alone", hint="The log of the server says more.")
        raise typer.Exit(1)


def _measured(found: list[dict[str, Any]], alone: list[str | None], seconds: float) -> dict[str, Any]:
    answers = [each for each in found if "text" in each]
    refused = sum(bool(each.get("refused")) for each in found)
    prompts = sum(each["usage"]["prompt_tokens"] for each in answers)
    cached = sum(each["usage"]["prompt_tokens_details"]["cached_tokens"] for each in answers)
    times = sorted(each["seconds"] for each in answers) or [0.0]
    latency = {f"p{share}": times[max(-(-len(times) * share // 100) - 1, 0)] for share in (50, 90, 99)}
    return {
        "answered": len(answers),
        "rejected": refused,
        "failed": len(found) - len(answers) - refused,
        "wrong": sum(each["text"] != alone[each["question"]] for each in answers),
        "seconds": seconds,
        "throughput": len(answers) / seconds,
        "tokens_per_second": sum(each["usage"]["completion_tokens"] for each in answers) / seconds,
        "cached": cached / prompts if prompts else 0.0,
        "latency": latency | {"max": times[-1]},
    }


def _question(source: random.Random, documents: int) -> tuple[str, list[str]]:
    """Return a question, and documents of which one answers it."""
    number = source.randrange(10**6)
    towns = [f"{source.choice(_TOWNS)} {number + place}" for place in range(documents)]
    flags = [f"The flag of {town} is {source.choice(_COLORS)}." for town in towns]
    return f"What colour is the flag of {source.choice(towns)}?", flags


@contextmanager
def _embedded_server(together: int, clients: int) -> Iterator[str]:
    """Serve the embedded model on loopback, with a place for every client, and give the address of its API."""
    from invariant_rag import InvariantModel, KeyValueCache
    from invariant_rag.server import InProcess, Settings, create_app
    from invariant_rag.server.serving import in_thread, server_of

    settings = Settings(max_requests=clients)
    engine = InProcess(InvariantModel.from_pretrained(), caches={"": KeyValueCache()}, together=together)
    with in_thread(server_of(create_app(engine, settings), settings, "127.0.0.1", 0)) as url:
        yield f"{url}/v1"
