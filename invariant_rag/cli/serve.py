"""`invariant-rag serve`: an OpenAI-compatible server that takes documents."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.cli import options
from invariant_rag.cli.console import handle_errors, print_text
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import ExtraRequired, InvalidChoice

if TYPE_CHECKING:
    from invariant_rag.server.engines.base import Engine
    from invariant_rag.server.settings import Settings

KEY_VARIABLE = "INVARIANT_RAG_API_KEY"
_PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")


def serve(
    model: Annotated[str | None, typer.Argument(help="Model id or folder.", show_default="the embedded model")] = None,
    method: options.Method = "rotor",
    ordering: options.Ordering = None,
    overflow: options.Overflow = "error",
    dtype: options.DType = "auto",
    device_map: options.DeviceMap = "auto",
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
    served_name: Annotated[
        str | None, typer.Option(help="What requests call the model.", show_default="MODEL, or invariant-rag")
    ] = None,
    keys: Annotated[
        Path | None,
        typer.Option(help=f"File with a line `TENANT KEY` for each key. One key: the variable {KEY_VARIABLE}."),
    ] = None,
    cache_gb: Annotated[float, typer.Option(min=0, help="Keys and values kept in memory, for all tenants.")] = 1.0,
    cache_folder: Annotated[Path | None, typer.Option(help="Keep them on disk, too.")] = None,
    together: Annotated[int, typer.Option(min=1, help="Requests to decode as one batch.")] = 8,
    max_requests: Annotated[int, typer.Option(min=1, help="Requests that run or wait; more get 429.")] = 64,
    max_body_mb: Annotated[float, typer.Option(help="Longest body; longer ones get 413.")] = 4.0,
    max_prompt_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt; longer ones get 413.", show_default="the context window")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens that a request may ask for.")] = 4096,
    timeout: Annotated[float, typer.Option(help="Seconds for an answer; then 504.")] = 300.0,
    allow_method: Annotated[
        list[str] | None, typer.Option(help="A method that requests may choose. Repeatable.", show_default="all")
    ] = None,
    allow_ordering: Annotated[
        list[str] | None,
        typer.Option(help="An ordering that requests may choose. Repeatable.", show_default="those without a model"),
    ] = None,
    check_order: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="Ask this share of requests again in another order; /metrics tells how "
            "often the plain model's answer flips.",
        ),
    ] = 0.0,
    reranker: Annotated[
        str | None,
        typer.Option(help="monot5 or cross-encoder, or a MonoT5 checkpoint, for /v1/rerank.", show_default="monot5"),
    ] = None,
    log_contents: Annotated[bool, typer.Option("--log-contents", help="Log requests with their texts.")] = False,
) -> None:
    """Serve MODEL with OpenAI's API: `documents` beside `messages` are read as a set.

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d
    '{"messages": [{"role": "user", "content": "When does the ferry leave?"}],
    "documents": ["The ferry leaves at noon.", "The mill grinds barley."]}'
    """
    with handle_errors():
        check_packages()
        from invariant_rag.server.engines.building import EngineConfig, build_engine
        from invariant_rag.server.serving import configure_logging

        allowed = {"methods": allow_method, "orderings": allow_ordering}
        settings = _settings(
            read_keys(keys),
            {name: frozenset(values) for name, values in allowed.items() if values},
            max_requests=max_requests,
            max_body_bytes=int(max_body_mb * (1 << 20)),
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            timeout=timeout,
            check_order=check_order,
            log_contents=log_contents,
        )
        config = EngineConfig(
            model, served_name, method, ordering, overflow, dtype, device_map, cache_gb, cache_folder, together
        )
        with progress_bar("Loading model"):
            disable_transformers_bars()
            engine = build_engine(config, settings)
        configure_logging()
        _run(engine, settings, reranker, host, port)


def check_packages() -> None:
    """Check that the extra `serve` is installed.

    Raises:
        ExtraRequired: A package is missing.
    """
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise ExtraRequired(name.replace("_", "-"), "serve")


def read_keys(path: Path | None) -> dict[str, str]:
    """Return the tenant of each key: from a file, and from the environment.

    Raises:
        InvalidChoice: A line is no tenant and key, or a key has two tenants.
    """
    keys = {key: "default"} if (key := os.environ.get(KEY_VARIABLE, "").strip()) else {}
    for number, line in enumerate(path.read_text("utf-8").splitlines() if path else (), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or keys.get(words[1], words[0]) != words[0]:
            raise InvalidChoice(
                f"{path}, line {number}: expected `TENANT KEY`, with a key that is nobody else's",
                hint="One line for each key; a tenant may have several.",
            )
        keys[words[1]] = words[0]
    return keys


def _settings(keys: dict[str, str], allowed: dict[str, Any], **limits: Any) -> Settings:
    from invariant_rag.server.settings import Settings

    return Settings(keys=keys, default_new_tokens=min(256, limits["max_new_tokens"]), **allowed, **limits)


def _run(engine: Engine, settings: Settings, reranker: str | None, host: str, port: int) -> None:
    from invariant_rag.server.app import create_app
    from invariant_rag.server.engines.building import build_reranker
    from invariant_rag.server.serving import server_of

    server = server_of(create_app(engine, settings, build_reranker(reranker)), settings, host, port)
    print_text(f"{engine.name} at http://{host}:{port}/v1; the order lab, a page to try it, at http://{host}:{port}/")
    server.run()
