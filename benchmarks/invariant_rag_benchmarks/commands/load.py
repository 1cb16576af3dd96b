"""`invariant-rag bench serve`: load on a server, and whether every answer is right."""

from __future__ import annotations

import os
from contextlib import nullcontext
from typing import Annotated

import typer
from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_error, print_json, print_text
from invariant_rag.cli.progress import progress_bar
from invariant_rag.cli.serve import check_packages
from invariant_rag.server.keys import KEY_VARIABLE

from invariant_rag_benchmarks.commands.run_options import Seed


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
    seed: Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Ask a server from many clients, in random orders, and compare every answer with that of the request alone.

    Exit code: 0; 1 if an answer is wrong or a request failed; 2 for an error.
    """
    with handle_errors():
        check_packages()
        from invariant_rag.server.load import load_server
        from invariant_rag.server.serving import embedded_server

        key = os.environ.get(KEY_VARIABLE) or None
        with (
            nullcontext(url) if url else embedded_server(together, clients) as address,
            progress_bar("Asking", requests) as advance,
        ):
            found = load_server(
                str(address),
                clients=clients,
                requests=requests,
                documents=documents,
                max_tokens=max_new_tokens,
                api_key=key,
                seed=seed,
                advance=advance,
            )
    if as_json:
        print_json(found.as_dict())
    else:
        print_text(
            f"{found.answered} of {found.requests} answered, {found.rejected} rejected, {found.failed} failed, "
            f"{found.wrong} wrong\n{found.throughput:.1f} answers and {found.tokens_per_second:.0f} tokens per second, "
            f"{found.cached:.0%} of prompt tokens from the cache\nlatency in seconds: "
            + ", ".join(f"{name} {seconds:.3f}" for name, seconds in found.latency.items())
        )
    if found.wrong or found.failed:
        print_error("expected every request to be answered as alone", hint="The log of the server says more.")
        raise typer.Exit(1)
