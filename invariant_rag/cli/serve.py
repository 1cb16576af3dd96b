"""`invariant-rag serve`: an OpenAI-compatible server that takes documents."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.checks import check_real, require_extra
from invariant_rag.cli.console import handle_errors, print_text, print_warning
from invariant_rag.cli.options import check_model_options, from_options, with_fields
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import RemoteError, ToyModelWarning
from invariant_rag.server.settings import (
    KEY_VARIABLE,
    OPERATOR_KEY_VARIABLE,
    EngineConfig,
    Settings,
    key_of_environment,
    read_keys,
)

if TYPE_CHECKING:
    from invariant_rag.orderings import Relevance
    from invariant_rag.server.engines.base import Engine


@with_fields(EngineConfig, Settings)
def serve(
    *,
    host: Annotated[str, typer.Option(help="Address to listen at; 0.0.0.0: all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")] = 8000,
    keys: Annotated[
        Path | None,
        typer.Option(help=f"File with a line `TENANT KEY` for each key. One key: the variable {KEY_VARIABLE}."),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Longest body; longer ones get 413.")] = 4.0,
    reranker: Annotated[
        str | None,
        typer.Option(help="monot5 or cross-encoder, or a MonoT5 checkpoint, for /v1/rerank.", show_default="monot5"),
    ] = None,
    **fields: Any,
) -> None:
    """Serve MODEL with OpenAI's API: `documents` beside `messages` are a set.

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d
    '{"messages": [{"role": "user", "content": "When does the ferry leave?"}],
    "documents": ["The ferry leaves at noon.", "The mill grinds barley."]}'
    """
    with handle_errors():
        for package in ("fastapi", "uvicorn", "sse_starlette", "prometheus_client"):
            require_extra(package, "serve")
        from invariant_rag.server.engines.building import build_engine, build_reranker, check_reranker
        from invariant_rag.server.serving import reserve
        from invariant_rag.server.telemetry import configure_logging, export_traces

        settings = from_options(
            Settings,
            fields,
            keys=read_keys(keys),
            operator_key=key_of_environment(OPERATOR_KEY_VARIABLE),
            max_body_bytes=int(check_real("--max-body-mb", max_body_mb) * (1 << 20)),
        )
        config = from_options(EngineConfig, fields)
        if config.upstream is None and config.vllm is None:
            check_model_options(config.model, config.method or "rotor", config.ordering, config.device_map)
        if config.vllm is not None:
            check_answers(config.vllm)
        check_reranker(reranker)
        with reserve(host, port) as reserved:
            with progress_bar("Loading model"):
                if config.upstream is None:
                    disable_transformers_bars()
                engine = build_engine(config, settings)
            configure_logging()
            export_traces()
            _run(engine, settings, build_reranker(reranker), reserved)


def check_answers(url: str) -> None:
    """Check that a server answers, whatever it says, before transformers is imported."""
    import httpx

    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=10)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        why = str(error).rpartition("] ")[2] or type(error).__name__  # without the number of the error
        raise RemoteError(
            f"expected an answer of vLLM at {url}, got {why}", hint="Is the server up? Its log says what happened."
        ) from error


def _run(engine: Engine, settings: Settings, reranker: Relevance, reserved: socket.socket) -> None:
    from invariant_rag.orderings.monot5 import EMBEDDED_NAME
    from invariant_rag.server.application import create_app
    from invariant_rag.server.endpoints import TOY
    from invariant_rag.server.serving import server_of

    host, port = reserved.getsockname()[:2]
    address = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    server = server_of(create_app(engine, settings, reranker), settings, host, port)
    if reranker.model_name == EMBEDDED_NAME:
        print_text(f"/v1/rerank: {TOY}")
    if engine.toy:
        print_warning(f"/v1/chat/completions: {ToyModelWarning()}")
    print_text(f"{engine.name} at {address}/v1; the order lab, a page to try it, at {address}/")
    server.run(sockets=[reserved])
