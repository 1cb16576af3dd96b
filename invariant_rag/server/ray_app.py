"""`serve run invariant_rag.server:app`: HTTP by Ray Serve's proxies, ingresses that check requests, and replicas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from ray import serve

from invariant_rag.errors import InvalidChoice
from invariant_rag.generation.overflow import Overflow
from invariant_rag.server.application import create_app
from invariant_rag.server.engines.building import EngineConfig
from invariant_rag.server.keys import read_keys, read_operator_key
from invariant_rag.server.logs import configure_logging
from invariant_rag.server.scaling import Scale, deployment_of, engine_of, without_keys
from invariant_rag.server.settings import Settings
from invariant_rag.shown import shown

T = TypeVar("T")
_SPARE_REQUESTS = 256
"""Beside those that are admitted: of load balancers, of Prometheus, and to be told to come back."""


def app(args: dict[str, Any]) -> Any:
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
    engine, limits, size = ({each.name for each in fields(kind)} for kind in (EngineConfig, Settings, Scale))
    if unknown := sorted(given.keys() - engine - limits - size):
        listed = ", ".join(sorted(engine | limits | size | {"reranker"}))
        raise InvalidChoice(f"expected arguments of {listed}; got {', '.join(unknown)}")
    config, scale = _made(EngineConfig, given, engine), _made(Scale, given, size)
    if scale.replica_gpus is None and config.model is not None:
        raise InvalidChoice(
            "expected replica_gpus beside a model", hint="Say how many GPUs each replica gets; 0: it runs on CPU cores."
        )
    settings = replace(_made(Settings, given, limits), keys=read_keys(keys))
    deployment: Any = serve.deployment(serve.ingress()(Ingress))
    ingress = deployment.options(
        name="ingress",
        num_replicas=scale.ingresses,
        ray_actor_options={"num_cpus": 1},
        max_ongoing_requests=settings.max_requests + _SPARE_REQUESTS,
        graceful_shutdown_timeout_s=settings.timeout,
    )
    replicas = deployment_of(config, settings, scale, reranker)
    return ingress.bind(replicas, config.together * scale.most_replicas, without_keys(settings), reranker, keys)


class Ingress:
    """The application in a process of Ray Serve.

    Keys are read here: they go neither into Ray's own store nor to the replicas.

    Raises:
        InvalidChoice: The keys are not those with which the application was built.
    """

    def __init__(
        self,
        handle: Any,
        together: int,
        settings: Settings,
        reranker: str | None,
        keys: Path | None,
    ) -> None:
        configure_logging()
        given = read_keys(keys)
        if set(given.values()) != set(settings.keys):
            raise InvalidChoice(
                f"expected keys of {len(settings.keys)} tenants on this node, as where the application was built; "
                f"got those of {len(set(given.values()))}",
                hint="Put the same file of keys, or the same variable, on every node.",
            )
        engine, relevance = engine_of(handle, together, reranker)
        self._app = create_app(engine, replace(settings, keys=given, operator_key=read_operator_key()), relevance)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, for Ray Serve."""
        return self._app


def _made(kind: type[T], given: Mapping[str, Any], names: set[str]) -> T:
    """Return an object of these attributes, which may come as text from a command line."""
    hints = get_type_hints(kind, localns={"Overflow": Overflow})
    values = {}
    for name in given.keys() & names:
        try:
            values[name] = TypeAdapter(hints[name]).validate_python(given[name])
        except ValidationError as error:
            said = "; ".join(each["msg"] for each in error.errors())
            raise InvalidChoice(f"{name}: {said}; got {shown(given[name])}") from None
    return kind(**values)
