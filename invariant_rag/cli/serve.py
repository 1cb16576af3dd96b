"""`invariant-rag serve`: an OpenAI-compatible server that takes documents."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.checks import check_real
from invariant_rag.cli.console import handle_errors, print_text, print_warning
from invariant_rag.cli.options import made, option_fields, with_fields
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import ExtraRequired, InvalidChoice, ToyModelWarning
from invariant_rag.server.settings import (
    KEY_VARIABLE,
    OPERATOR_KEY_VARIABLE,
    EngineConfig,
    Scale,
    Settings,
    key_of_environment,
    read_keys,
)

if TYPE_CHECKING:
    from invariant_rag.server.engines.base import Engine, Reranker

_PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")
_RAY_PACKAGES = ("ray", "aiohttp", "mmh3")
"""Of `ray[serve]`."""


@with_fields(EngineConfig, Settings, Scale)
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
    ray: Annotated[
        bool,
        typer.Option(
            "--ray",
            help="Answer in replicas on Ray: in the cluster of RAY_ADDRESS, or one that is started on this machine. "
            "Equal sets of documents meet the replica that has read them.",
        ),
    ] = False,
    **fields: Any,
) -> None:
    """Serve MODEL with OpenAI's API: `documents` beside `messages` are read as a set.

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d
    '{"messages": [{"role": "user", "content": "When does the ferry leave?"}],
    "documents": ["The ferry leaves at noon.", "The mill grinds barley."]}'
    """
    with handle_errors():
        check_packages()
        from invariant_rag.methods import check_method_and_ordering
        from invariant_rag.models.hub import check_model
        from invariant_rag.server.engines.building import check_reranker
        from invariant_rag.server.logs import configure_logging, export_traces
        from invariant_rag.server.serving import reserve

        settings = made(
            Settings,
            fields,
            keys=read_keys(keys),
            operator_key=key_of_environment(OPERATOR_KEY_VARIABLE),
            max_body_bytes=int(check_real("--max-body-mb", max_body_mb) * (1 << 20)),
        )
        config, scale = made(EngineConfig, fields), scale_of(fields) if ray else None
        if not ray:
            _check_unscaled(fields)
        if config.upstream is None and config.vllm is None:  # before torch is imported, which takes seconds
            check_method_and_ordering(config.method or "rotor", config.ordering)
            check_model(config.model)
        check_reranker(reranker)
        with ExitStack() as stack:
            reserved = stack.enter_context(reserve(host, port))
            with progress_bar("Loading model"):
                if config.upstream is None:
                    disable_transformers_bars()
                engine, relevance = stack.enter_context(_started(config, settings, scale, reranker))
            configure_logging()
            export_traces()
            _run(engine, settings, relevance, reserved)


def check_packages() -> None:
    """Check that the extra `serve` is installed.

    Raises:
        ExtraRequired: A package is missing.
    """
    for name in _PACKAGES:
        if find_spec(name) is None:
            raise ExtraRequired(name.replace("_", "-"), "serve")


def scale_of(fields: dict[str, Any]) -> Scale:
    """Return how replicas scale, before Ray is imported: it looks at the environment then.

    Raises:
        ExtraRequired: Ray Serve is not installed.
    """
    if any(find_spec(name) is None for name in _RAY_PACKAGES):
        raise ExtraRequired("ray[serve]", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_ADDRESS"):
        # Despite its name: on every system, a cluster of this process alone listens on loopback.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    found: Scale = made(Scale, fields)
    return found


def _check_unscaled(fields: dict[str, Any]) -> None:
    for each in option_fields(Scale):
        if fields[each.name] != each.default:
            name = f"--{each.name.replace('_', '-')}"
            raise InvalidChoice(f"expected {name} with --ray, got it alone", hint="Add --ray.")


@contextmanager
def _started(
    config: EngineConfig, settings: Settings, scale: Scale | None, reranker: str | None
) -> Iterator[tuple[Engine, Reranker]]:
    """Give an engine and a reranker: in this process, or in replicas that end with the block."""
    if scale is None:
        from invariant_rag.server.engines.building import build_engine, build_reranker

        yield build_engine(config, settings), build_reranker(reranker)
        return
    from invariant_rag.server.ray_app import running_replicas

    with running_replicas(config, settings, scale, reranker) as found:
        yield found


def _run(engine: Engine, settings: Settings, reranker: Reranker, reserved: socket.socket) -> None:
    from invariant_rag.orderings.monot5 import EMBEDDED_NAME
    from invariant_rag.server.application import create_app
    from invariant_rag.server.handlers import TOY
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
