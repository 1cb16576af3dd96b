"""Options of `invariant-rag serve` for replicas, and what they start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from invariant_rag.errors import ExtraRequired, InvalidChoice

if TYPE_CHECKING:
    from invariant_rag.server.engines.base import Engine, Reranker
    from invariant_rag.server.engines.building import EngineConfig
    from invariant_rag.server.scaling import Scale
    from invariant_rag.server.settings import Settings

Ray = Annotated[
    bool,
    typer.Option(
        "--ray",
        help="Answer in replicas on Ray: in the cluster of RAY_ADDRESS, or one that is started on this machine. "
        "Equal sets of documents meet the replica that has read them.",
    ),
]
Replicas = Annotated[int | None, typer.Option(min=1, help="With --ray: replicas.", show_default="1")]
MaxReplicas = Annotated[
    int | None, typer.Option(min=1, help="With --ray: grow up to so many by load.", show_default="--replicas")
]
ReplicaGpus = Annotated[
    float | None,
    typer.Option(
        min=0, help="With --ray: GPUs of a replica, or a part of one.", show_default="1, where the cluster has any"
    ),
]
_PACKAGES = ("ray", "aiohttp", "mmh3")
"""Of `ray[serve]`."""


def scale_of(replicas: int | None, max_replicas: int | None, replica_gpus: float | None, *, ray: bool) -> Scale | None:
    """Return how the replicas scale; None: there are none, and the model is in this process.

    Raises:
        ExtraRequired: Ray Serve is not installed.
        InvalidChoice: An option comes without `--ray`.
    """
    if not ray:
        given = {"--replicas": replicas, "--max-replicas": max_replicas, "--replica-gpus": replica_gpus}
        if unused := [name for name, value in given.items() if value is not None]:
            raise InvalidChoice(f"expected {unused[0]} with --ray, got it alone", hint="Add --ray.")
        return None
    if any(find_spec(name) is None for name in _PACKAGES):
        raise ExtraRequired("ray[serve]", "ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if not os.environ.get("RAY_ADDRESS"):
        # Despite its name: on every system, a cluster of this process alone listens on loopback. Read by `import ray`.
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    from invariant_rag.server.scaling import Scale

    return Scale(replicas or 1, max_replicas, replica_gpus)


@contextmanager
def started(
    config: EngineConfig, settings: Settings, scale: Scale | None, reranker: str | None
) -> Iterator[tuple[Engine, Reranker]]:
    """Give an engine and a reranker: in this process, or in replicas that end with the block."""
    if scale is None:
        from invariant_rag.server.engines.building import build_engine, build_reranker

        yield build_engine(config, settings), build_reranker(reranker)
        return
    from invariant_rag.server.scaling import running_replicas

    with running_replicas(config, settings, scale, reranker) as found:
        yield found
