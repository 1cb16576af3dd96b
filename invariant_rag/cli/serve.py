"""`invariant-rag serve`: an OpenAI-compatible server that takes documents."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from invariant_rag.checks import check_real
from invariant_rag.cli import options, scale
from invariant_rag.cli.console import handle_errors, print_text, print_warning
from invariant_rag.cli.progress import disable_transformers_bars, progress_bar
from invariant_rag.errors import ExtraRequired, ToyModelWarning
from invariant_rag.server.keys import KEY_VARIABLE, read_keys, read_operator_key

if TYPE_CHECKING:
    from invariant_rag.server.engines.base import Engine, Reranker
    from invariant_rag.server.settings import Settings

_PACKAGES = ("fastapi", "uvicorn", "sse_starlette", "prometheus_client")


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Model id or folder; with --upstream, the name of its model.",
            show_default="the embedded model; or the one behind this server",
        ),
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help="See `invariant-rag methods`. With --upstream: canonical, vote or sequential.",
            show_default="rotor; with --upstream, canonical",
        ),
    ] = None,
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
    together: Annotated[
        int,
        typer.Option(
            min=1,
            help="Requests to decode as one batch. Under load, what else is in it may change log-probabilities by "
            "rounding, about 1e-6 in float32; see --deterministic.",
        ),
    ] = 8,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic",
            help="Read and decode prompts one by one: slower under load, but other requests change no bit.",
        ),
    ] = False,
    vllm: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Let a vLLM with the plug-in vllm-invariant-rag answer. INVARIANT_RAG_UPSTREAM_KEY is its key.",
        ),
    ] = None,
    upstream: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Let an OpenAI-compatible API answer, with the documents in an order by content. "
            "INVARIANT_RAG_UPSTREAM_KEY is its key.",
        ),
    ] = None,
    votes: Annotated[int, typer.Option(min=2, help="Orders that the method vote asks about, with --upstream.")] = 5,
    max_requests: Annotated[
        int,
        typer.Option(min=1, help="Requests that run or wait; more get 429. No tenant gets the places of all others."),
    ] = 64,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Connections of one address; beyond them, the oldest idle one is closed.")
    ] = 128,
    trusted_proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="A proxy: its connections are not limited, and its X-Forwarded-For is believed."
        ),
    ] = None,
    max_body_mb: Annotated[float, typer.Option(min=0.001, help="Longest body; longer ones get 413.")] = 4.0,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Longest prompt of a chat, a completion or a judge, with its documents; longer ones get 413. Overflow "
            "cuts to the context window only, never to this limit.",
            show_default="the context window",
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="The most tokens that a request may ask for.")] = 4096,
    timeout: Annotated[float, typer.Option(min=0.1, help="Seconds for an answer; then 504.")] = 300.0,
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
    ray: scale.Ray = False,
    replicas: scale.Replicas = None,
    max_replicas: scale.MaxReplicas = None,
    replica_gpus: scale.ReplicaGpus = None,
    log_contents: Annotated[bool, typer.Option("--log-contents", help="Log requests with their texts.")] = False,
) -> None:
    """Serve MODEL with OpenAI's API: `documents` beside `messages` are read as a set.

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' -d
    '{"messages": [{"role": "user", "content": "When does the ferry leave?"}],
    "documents": ["The ferry leaves at noon.", "The mill grinds barley."]}'
    """
    with handle_errors():
        check_packages()
        from invariant_rag.server.engines.building import EngineConfig
        from invariant_rag.server.logs import configure_logging
        from invariant_rag.server.serving import reserve
        from invariant_rag.server.tracing import export_traces

        allowed = {"methods": allow_method, "orderings": allow_ordering}
        settings = _settings(
            read_keys(keys),
            {name: frozenset(values) for name, values in allowed.items() if values},
            max_requests=max_requests,
            max_connections=max_connections,
            trusted_proxies=frozenset(trusted_proxy or ()),
            max_body_bytes=int(check_real("--max-body-mb", max_body_mb) * (1 << 20)),
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            timeout=timeout,
            check_order=check_order,
            log_contents=log_contents,
        )
        config = EngineConfig(
            model=model,
            name=served_name,
            method=method,
            ordering=ordering,
            overflow=overflow,
            dtype=dtype,
            device_map=device_map,
            deterministic=deterministic,
            cache_gb=cache_gb,
            cache_folder=cache_folder,
            together=together,
            vllm=vllm,
            upstream=upstream,
            votes=votes,
        )
        wanted = scale.scale_of(replicas, max_replicas, replica_gpus, ray=ray)
        with ExitStack() as stack:
            reserved = stack.enter_context(reserve(host, port))
            with progress_bar("Loading model"):
                if upstream is None:
                    disable_transformers_bars()
                engine, relevance = stack.enter_context(scale.started(config, settings, wanted, reranker))
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


def _settings(keys: dict[str, str], allowed: dict[str, Any], **limits: Any) -> Settings:
    from invariant_rag.server.settings import Settings

    return Settings(
        keys=keys,
        operator_key=read_operator_key(),
        default_new_tokens=min(256, limits["max_new_tokens"]),
        **allowed,
        **limits,
    )


def _run(engine: Engine, settings: Settings, reranker: Reranker, reserved: socket.socket) -> None:
    from invariant_rag.orderings.monot5 import EMBEDDED_NAME
    from invariant_rag.server.application import create_app
    from invariant_rag.server.handling import TOY
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
