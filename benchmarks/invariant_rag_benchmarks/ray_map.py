"""A parallel map over Ray actors. An actor that is lost is started again, and its item repeated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from invariant_rag.errors import ActorsLost, ExtraRequired, InvalidChoice

Item = TypeVar("Item")
Result = TypeVar("Result")
ATTEMPTS = 4
"""How many actors an item may lose before the map fails."""


def ray_map(
    make_function: Callable[[], Callable[[Item], Result]], items: Sequence[Item], num_actors: int
) -> Iterator[Result]:
    """Apply a function to every item in Ray actors, and yield the results as they come, in any order.

    Uses the Ray cluster of this process; if there is none, starts one on this machine and stops it at the end. The
    GPUs of the cluster are divided among the actors.

    Args:
        make_function: Makes the function, once in each actor: load a model here.
        items: What the function is called with.
        num_actors: Number of actors; at most one per item is started.

    Raises:
        ExtraRequired: Ray is not installed.
        ActorsLost: An item lost its actor `ATTEMPTS` times.
        InvalidChoice: `num_actors` is below 1.
    """
    if num_actors < 1:
        raise InvalidChoice(f"actors: expected at least 1, got {num_actors}")
    try:
        import ray
    except ImportError:
        raise ExtraRequired("ray", "ray") from None
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=None, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        count = min(num_actors, len(items))
        resources: Any = ray.cluster_resources
        gpus = resources().get("GPU", 0) / max(count, 1)
        actor_class = ray.remote(
            num_cpus=0, num_gpus=int(gpus) if gpus >= 1 else gpus, max_restarts=-1, max_task_retries=ATTEMPTS - 1
        )(_Actor)
        shared = ray.put(make_function)
        pool: Any = ray.util.ActorPool([actor_class.remote() for _ in range(count)])
        yield from pool.map_unordered(lambda actor, item: actor.apply.remote(shared, item), items)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None  # the function's own error, as if it had run here
    except ray.exceptions.RayActorError as error:
        raise ActorsLost(f"a job lost its actor {ATTEMPTS} times: {error}") from error
    finally:
        if started:
            ray.shutdown()


class _Actor:
    """A Ray actor. It makes its function with the first item, so that a failure there is an error, not a lost actor."""

    def __init__(self) -> None:
        self._function: Callable[[Any], Any] | None = None

    def apply(self, make_function: Callable[[], Callable[[Any], Any]], item: Any) -> Any:
        """Apply the function to one item."""
        if self._function is None:
            self._function = make_function()
        return self._function(item)
