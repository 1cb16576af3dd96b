"""Jobs over Ray actors: each actor holds a worker of its own, and a lost actor is replaced and its job done again."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from invariant_rag.errors import ActorsLost, ExtraRequired, InvalidChoice

Job = TypeVar("Job")
Result = TypeVar("Result")
ATTEMPTS = 4
"""How often a job is given to an actor before the run gives up on it."""


def ray_map(make: Callable[[], Callable[[Job], Result]], jobs: Sequence[Job], actors: int) -> Iterator[Result]:
    """Yield the results of the jobs as they come, in any order.

    Uses the Ray cluster that is connected to, or starts one on this machine, and stops it at the end. Where the cluster
    has accelerators, they are shared out among the actors.

    Args:
        make: Makes a worker, within the actor.
        jobs: What the workers are called with.
        actors: How many actors to hold.

    Raises:
        ExtraRequired: Ray is not installed.
        ActorsLost: A job lost its actor `ATTEMPTS` times.
    """
    if actors < 1:
        raise InvalidChoice(f"actors: expected at least 1, got {actors}")
    try:
        import ray
    except ImportError:
        raise ExtraRequired("ray", "ray") from None
    started = not ray.is_initialized()
    if started:
        ray.init(num_cpus=None, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    try:
        yield from _shared_out(ray, make, jobs, min(actors, len(jobs)))
    finally:
        if started:
            ray.shutdown()


def _shared_out(ray: Any, make: Callable[[], Any], jobs: Sequence[Any], actors: int) -> Iterator[Any]:
    gpus = ray.cluster_resources().get("GPU", 0) / actors if actors else 0
    remote = ray.remote(num_cpus=0, num_gpus=int(gpus) if gpus >= 1 else gpus)(_Worker)
    shared = ray.put(make)
    waiting = deque((number, 1) for number in range(len(jobs)))
    under_way: dict[Any, tuple[Any, int, int]] = {}

    def give(actor: Any) -> None:
        if waiting:
            number, attempt = waiting.popleft()
            under_way[actor.work.remote(shared, jobs[number])] = (actor, number, attempt)

    for _ in range(actors):
        give(remote.remote())
    while under_way:
        (done, *_), _ = ray.wait(list(under_way), num_returns=1)
        actor, number, attempt = under_way.pop(done)
        try:
            result = ray.get(done)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None  # the worker's own error, as if it had run here
        except ray.exceptions.RayActorError as error:
            if attempt == ATTEMPTS:
                raise ActorsLost(f"job {number} lost its actor {ATTEMPTS} times: {error}") from error
            waiting.appendleft((number, attempt + 1))
            give(remote.remote())
            continue
        yield result
        give(actor)


class _Worker:
    """An actor. It makes its worker with its first job, so that what goes wrong there is an error and no lost actor."""

    def __init__(self) -> None:
        self._worker: Callable[[Any], Any] | None = None

    def work(self, make: Callable[[], Callable[[Any], Any]], job: Any) -> Any:
        """Do one job."""
        if self._worker is None:
            self._worker = make()
        return self._worker(job)
