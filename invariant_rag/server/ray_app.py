"""Replicas on Ray Serve: how many, where, and how requests find them. `serve run invariant_rag.server:app`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.serve.config import AutoscalingConfig

from invariant_rag.errors import InvalidChoice
from invariant_rag.server.application import create_app
from invariant_rag.server.engines.building import build_reranker
from invariant_rag.server.engines.ray import RayEngine, RemoteReranker, Replica
from invariant_rag.server.logs import configure_logging
from invariant_rag.server.settings import (
    OPERATOR_KEY_VARIABLE,
    EngineConfig,
    Scale,
    Settings,
    key_of_environment,
    read_keys,
)
from invariant_rag.shown import shown

_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
"""Sends equal sets to the same replica."""
_BATCHES = 2
"""Of each replica: one is decoded while another one waits. More requests go to the next replica on the ring."""
_SPARE_REQUESTS = 256
"""Beside those that are admitted: of load balancers, of Prometheus, and to be told to come back."""


def app(args: Mapping[str, Any]) -> Any:
    """Return the application that Ray Serve runs.

    Args:
        args: Attributes of `EngineConfig`, `Settings` and `Scale` by name; `reranker`; and `keys`, a file as for
            `--keys` that is on every node.

    Raises:
        InvalidChoice: An argument does not exist, or has no value of its kind; or there is a model, and it is not said
            how many GPUs each replica gets.
    """
    given = dict(args)
    keys = Path(given.pop("keys")) if "keys" in given else None
    reranker = given.pop("reranker", None)
    made: list[Any] = []
    for kind in (EngineConfig, Settings, Scale):
        own = {each.name: given.pop(each.name) for each in fields(kind) if each.name in given}
        try:
            made.append(TypeAdapter(kind).validate_python(own))  # values may come as text from a command line
        except ValidationError as error:
            said = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}; got {shown(own)}" for each in error.errors()]
            raise InvalidChoice("; ".join(said)) from None
    if given:
        known = [each.name for kind in (EngineConfig, Settings, Scale) for each in fields(kind)]
        raise InvalidChoice(
            f"expected arguments of {', '.join(sorted([*known, 'reranker']))}; got {', '.join(sorted(given))}"
        )
    config, settings, scale = made
    if scale.replica_gpus is None and config.model is not None:
        raise InvalidChoice(
            "expected replica_gpus beside a model", hint="Say how many GPUs each replica gets; 0: it runs on CPU cores."
        )
    settings = replace(settings, keys=read_keys(keys))
    deployment: Any = serve.deployment(serve.ingress()(Ingress))
    ingress = deployment.options(
        name="ingress",
        num_replicas=scale.ingresses,
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=settings.max_requests + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.timeout,
    )
    replicas = deployment_of(config, settings, scale, reranker)
    together = config.together * (scale.max_replicas or scale.replicas)
    return ingress.bind(replicas, together, settings.without_keys(), reranker, keys)


class Ingress:
    """The application in a process of Ray Serve.

    Keys are looked up here: they go neither into Ray's own store nor to the replicas.

    Raises:
        InvalidChoice: The keys are not those with which the application was built.
    """

    def __init__(self, handle: Any, together: int, settings: Settings, reranker: str | None, keys: Path | None) -> None:
        configure_logging()
        given = read_keys(keys)
        if set(given.values()) != set(settings.keys):
            raise InvalidChoice(
                f"expected keys of {len(settings.keys)} tenants on this node, as where the application was built; "
                f"got those of {len(set(given.values()))}",
                hint="Put the same file of keys, or the same variable, on every node.",
            )
        engine = RayEngine(handle, together)
        own = replace(settings, keys=given, operator_key=key_of_environment(OPERATOR_KEY_VARIABLE))
        self._app = create_app(engine, own, RemoteReranker(engine, build_reranker(reranker)))

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, for Ray Serve."""
        return self._app


def deployment_of(config: EngineConfig, settings: Settings, scale: Scale, reranker: str | None = None) -> Any:
    """Return replicas as an application of Ray Serve, which a `RayEngine` calls by its handle.

    A replica that is stopped first finishes what it answers.

    Args:
        config: What each engine is made from.
        settings: Tenants and limits. The keys themselves stay here.
        scale: How many there are, and what each needs.
        reranker: As for `build_reranker`.
    """
    places = _BATCHES * config.together
    size: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.max_replicas is not None:
        limits: dict[str, Any] = {"min_replicas": scale.replicas, "max_replicas": scale.max_replicas}
        size = {"autoscaling_config": AutoscalingConfig(**limits, target_ongoing_requests=config.together)}
    deployment: Any = serve.deployment(Replica)
    replicas = deployment.options(
        name="replicas",
        ray_actor_options={"num_cpus": scale.replica_cpus, "num_gpus": scale.replica_gpus or 0},
        max_ongoing_requests=places,
        request_router_config={"request_router_class": _ROUTER},
        graceful_shutdown_timeout_s=settings.timeout,
        **size,
    )
    return replicas.bind(config, settings.without_keys(), reranker, places)
