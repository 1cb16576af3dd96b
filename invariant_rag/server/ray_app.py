"""Replicas on Ray Serve: how many, where, and how requests find them. `serve run invariant_rag.server:app`."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError
from ray.serve.config import AutoscalingConfig
from ray.serve.exceptions import RayServeException

from invariant_rag.cancellation import cancellable, cancelled_event
from invariant_rag.errors import InvalidChoice, InvariantRAGError
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.orderings import Candidate
from invariant_rag.segments import SegmentSet
from invariant_rag.server.application import create_app
from invariant_rag.server.engines.base import Call, Emit, Engine, EngineReply, JudgeCall, wait_for
from invariant_rag.server.engines.building import build_engine, build_reranker
from invariant_rag.server.errors import ClientLeft, ReplicaFailed, ReplicaLost
from invariant_rag.server.replies import set_key
from invariant_rag.server.settings import (
    OPERATOR_KEY_VARIABLE,
    EngineConfig,
    Scale,
    Settings,
    key_of_environment,
    read_keys,
)
from invariant_rag.server.telemetry import configure_logging
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.judge import Verdict

T = TypeVar("T")
_logger = logging.getLogger("invariant_rag.server")

_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"  # sends equal sets to the same replica
_BATCHES = 2
"""Of each replica: one is decoded while another one waits. More requests go to the next replica on the ring."""
_SPARE_REQUESTS = 256  # beside those that are admitted: of load balancers, of Prometheus, and to be told to come back
_LOST = (RayActorError, ObjectLostError, RayServeException)
_DESCRIBED = ("name", "toy", "context_window", "method", "methods", "orderings")
"""Attributes of an engine that others have to know."""


def app(args: Mapping[str, Any]) -> Any:
    """Return the application that Ray Serve runs.

    Args:
        args: Attributes of `EngineConfig`, `Settings` and `Scale` by name; `reranker`; and `keys`, a file as for
            `--keys` that is on every node.

    Raises:
        InvalidChoice: An argument does not exist, or has no value of its kind; or there is a model, and it is not said
            how many GPUs each replica gets.
    """
    options = dict(args)
    keys = Path(options.pop("keys")) if "keys" in options else None
    reranker = options.pop("reranker", None)
    kinds = (EngineConfig, Settings, Scale)
    known = {each.name: kind for kind in kinds for each in fields(kind)}
    if unknown := sorted(options.keys() - known.keys()):
        listed = ", ".join(sorted([*known, "keys", "reranker"]))
        raise InvalidChoice(f"expected arguments of {listed}; got {', '.join(unknown)}")
    made: list[Any] = []
    for kind in kinds:
        own = {name: value for name, value in options.items() if known[name] is kind}
        try:
            made.append(TypeAdapter(kind).validate_python(own))  # values may come as text from a command line
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}; got {shown(own)}" for each in error.errors()]
            raise InvalidChoice("; ".join(wrong)) from None
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
    """

    def __init__(self, handle: Any, together: int, settings: Settings, reranker: str | None, keys: Path | None) -> None:
        configure_logging()
        tenants_by_key = read_keys(keys)
        if set(tenants_by_key.values()) != set(settings.keys):
            raise InvalidChoice(
                f"expected keys of {len(settings.keys)} tenants on this node, as where the application was built; "
                f"got those of {len(set(tenants_by_key.values()))}",
                hint="Put the same file of keys, or the same variable, on every node.",
            )
        engine = RayEngine(handle, together)
        own = replace(settings, keys=tenants_by_key, operator_key=key_of_environment(OPERATOR_KEY_VARIABLE))
        relevance = build_reranker(reranker)
        vars(relevance).update(sort_keys=engine.sort_keys)  # that of the replicas: no model is loaded here
        self._app = create_app(engine, own, relevance)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """Return the application, for Ray Serve."""
        return self._app


def deployment_of(config: EngineConfig, settings: Settings, scale: Scale, reranker: str | None = None) -> Any:
    """Return replicas as an application of Ray Serve, which a `RayEngine` calls by its handle.

    A replica that is stopped first finishes what it answers. The keys of the settings stay here.
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


class RayEngine(Engine):
    """The replicas behind a handle of Ray Serve as an engine, and as a reranker. The first one is waited for.

    A request whose replica dies is sent to another one, once, unless a delta of its answer has been sent.
    """

    def __init__(self, handle: Any, together: int) -> None:
        self.handle = handle
        self.together = together
        # A handle belongs to one event loop. This one serves all threads that wait for answers.
        self._loop = asyncio.new_event_loop()
        Thread(target=self._run, name="invariant-rag-replicas", daemon=True).start()
        for name, value in self._start(self._routed(None).describe.remote).result().items():
            setattr(self, name, value)

    def check_ready(self) -> None:
        """Check that a replica is up."""
        application = serve.status().applications.get(self.handle.app_name)
        deployments = {} if application is None else application.deployments
        deployment = deployments.get(self.handle.deployment_name)
        if not any(state == "RUNNING" for state in (deployment.replica_states if deployment else ())):
            raise ReplicaLost("expected at least one replica, got none", retry_after=1)

    def close(self) -> None:
        """End the loop of this engine. The replicas go on."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        """Answer the prompts of a request, in one replica; see `Engine`."""
        session = _session(calls[0].choices.tenant, calls[0].sets) if any(calls[0].sets) else None
        return list(self._wait_for(abandoned, "answer_all", calls, session=session, emit=emit))

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of the prompt."""
        return list(self._wait_for(cancelled_event(), "tokens", call))

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `Judge`."""
        answers = SegmentSet(call.request.options or call.request.answers or ())
        verdict: Verdict = self._wait_for(
            cancelled_event(), "judge", call, session=_session(call.choices.tenant, [answers])
        )
        return verdict

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[float]:
        """Return the sort keys of the replicas' reranker."""
        return list(self._wait_for(cancelled_event(), "sort_keys", candidates, query))

    def _run(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    def _start(self, attempt: Callable[[], Awaitable[T]]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(_retried(attempt), self._loop)

    def _wait_for(
        self, abandoned: Event, method: str, *arguments: Any, session: str | None = None, emit: Emit | None = None
    ) -> Any:
        """Return what a method of a replica returns."""
        return wait_for(self._start(lambda: self._call(method, arguments, session, emit)), abandoned)

    async def _call(self, method: str, arguments: Sequence[Any], session: str | None, emit: Emit | None) -> Any:
        emitted = False
        deltas = self._routed(session, stream=True).call.remote(method, *arguments)
        try:
            async for item in deltas:
                if isinstance(item, Done):
                    if item.error is not None:
                        raise item.error
                    return item.value
                if emit is not None:
                    emit(*item)
                    emitted = True
        except asyncio.CancelledError:
            deltas.cancel()
            raise
        except _LOST as error:
            if emitted:
                raise ReplicaLost("the replica was lost in the middle of the answer") from error
            raise
        raise ReplicaLost("expected a reply at the end of an answer")

    def _routed(self, session: str | None, **options: Any) -> Any:
        return self.handle.options(**options, **({} if session is None else {"session_id": session}))


def _session(tenant: str, sets: Sequence[SegmentSet]) -> str:
    """Return the key by which a call is routed: equal sets of a tenant have equal keys in any order."""
    return hashlib.sha256(f"{tenant}\0{set_key(sets)}".encode()).hexdigest()[:32]


async def _retried(attempt: Callable[[], Awaitable[T]]) -> T:
    """Return the result of an attempt; if its replica is lost, that of a second one, or raise ReplicaLost."""
    try:
        return await attempt()
    except _LOST as error:
        _logger.warning("replica lost", extra={"fields": {"error": type(error).__name__}})
    try:
        return await attempt()
    except _LOST as error:
        raise ReplicaLost("two replicas were lost, one after the other", retry_after=1) from error


@dataclass(frozen=True)
class Done:
    """The end of a call: what it returned, or its error, of which Ray would log the message, and so texts."""

    value: Any = None
    error: InvariantRAGError | None = None


class Replica:
    """Holds an engine and a reranker, in a process of its own: what goes in and out is picklable."""

    def __init__(self, config: EngineConfig, settings: Settings, reranker: str | None, places: int) -> None:
        configure_logging()
        self._engine = build_engine(config, settings)
        self._reranker = build_reranker(reranker)
        self._threads = ThreadPoolExecutor(places, "invariant-rag-call")

    async def call(self, method: str, *arguments: Any) -> AsyncIterator[tuple[int, AnswerDelta] | Done]:
        """Call `answer_all`, `tokens`, `judge` or `sort_keys`: yield the deltas of its answers, and then its end.

        Whoever stops listening abandons the call.
        """
        loop, abandoned = asyncio.get_running_loop(), Event()
        deltas: asyncio.Queue[tuple[int, AnswerDelta] | Done] = asyncio.Queue()

        def put(item: tuple[int, AnswerDelta] | Done) -> None:
            loop.call_soon_threadsafe(deltas.put_nowait, item)

        def work() -> Any:
            if method == "answer_all":
                return self._engine.answer_all(arguments[0], lambda index, delta: put((index, delta)), abandoned)
            with cancellable(abandoned):
                return getattr(self._reranker if method == "sort_keys" else self._engine, method)(*arguments)

        self._threads.submit(lambda: put(_done(work)))
        try:
            while True:
                item = await deltas.get()
                yield item
                if isinstance(item, Done):
                    return
        finally:
            abandoned.set()

    async def describe(self) -> dict[str, Any]:
        """Return what others have to know of the engine."""
        return {name: getattr(self._engine, name) for name in _DESCRIBED}


def _done(work: Callable[[], Any]) -> Done:
    try:
        return Done(work())
    except InvariantRAGError as error:
        return Done(error=error)
    except CancelledError:
        return Done(error=ClientLeft("nobody waits for the answer"))
    except Exception as error:
        _logger.error("fault", exc_info=error)
        return Done(error=ReplicaFailed(f"{type(error).__name__} in a replica, whose log says where"))
