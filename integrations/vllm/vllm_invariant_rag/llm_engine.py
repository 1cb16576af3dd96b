"""vLLM in this process: an `LLM`, or the engine of the API server that this process is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_invariant_rag.engines import Completion, Engine, EngineRequest, OnTokens, likeliest
from vllm_invariant_rag.errors import RequestRefused
from vllm_invariant_rag.facts import ServerFacts, facts_of

if TYPE_CHECKING:
    from vllm import LLM

_POLL_SECONDS = 0.1


class LLMEngine(Engine):
    """An `LLM`. Calls of several threads run one after the other.

    Args:
        llm: The LLM, with `InvariantRAGConnector` in its `kv_transfer_config`.
    """

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.llm_engine
        self._lock = Lock()

    def facts(self) -> ServerFacts:
        """Return what it serves; see `Engine`."""
        return facts_of(self._engine.vllm_config)

    def check_ready(self) -> None:
        """Do nothing: it is in this process."""

    def complete(
        self, request: EngineRequest, on_tokens: OnTokens | None = None, stopped: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Run one request; see `Engine`."""
        return self._run([request], on_tokens, stopped)[0]

    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Run requests at the same time; see `Engine`."""
        return self._run(requests, None, None)

    def _run(
        self, requests: Sequence[EngineRequest], on_tokens: OnTokens | None, stopped: Callable[[], bool] | None
    ) -> list[list[Completion]]:
        names = {_name(): index for index, _ in enumerate(requests)}
        results = [[Completion() for _ in range(request.fields["n"])] for request in requests]
        with self._lock:
            try:
                for name, request in zip(names, requests, strict=True):
                    self._engine.add_request(name, _prompt(request), _sampling_params(request))
                running = set(names)
                while running and not (stopped is not None and stopped()):
                    for output in self._engine.step():
                        if output.request_id not in names:
                            continue
                        index = names[output.request_id]
                        _extend(results[index], output, requests[index].fields["logprobs"], on_tokens)
                        if output.finished:
                            running.discard(output.request_id)
            finally:
                self._engine.abort_request(list(names))  # those that ended are not known any more
        return results


class ServingEngine(Engine):
    """The engine of vLLM's API server, for threads of the same process.

    Args:
        client: vLLM's `EngineClient`.
        loop: The event loop that it runs in.
    """

    def __init__(self, client: Any, loop: asyncio.AbstractEventLoop) -> None:
        self._client, self._loop = client, loop

    def facts(self) -> ServerFacts:
        """Return what it serves; see `Engine`."""
        return facts_of(self._client.vllm_config)

    def check_ready(self) -> None:
        """Do nothing: it is in this process."""

    def complete(
        self, request: EngineRequest, on_tokens: OnTokens | None = None, stopped: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Run one request; see `Engine`."""
        completions = [Completion() for _ in range(request.fields["n"])]

        async def run() -> None:
            async for output in self._client.generate(_prompt(request), _sampling_params(request), _name()):
                _extend(completions, output, request.fields["logprobs"], on_tokens)

        running = asyncio.run_coroutine_threadsafe(run(), self._loop)
        while True:
            try:
                running.result(_POLL_SECONDS)
            except TimeoutError:
                if stopped is None or not stopped():
                    continue
                running.cancel()
            return completions

    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Run requests at the same time; see `Engine`."""

        async def run(request: EngineRequest) -> list[Completion]:
            completions = [Completion() for _ in range(request.fields["n"])]
            async for output in self._client.generate(_prompt(request), _sampling_params(request), _name()):
                _extend(completions, output, request.fields["logprobs"], None)
            return completions

        async def run_all() -> list[list[Completion]]:
            return await asyncio.gather(*map(run, requests))

        return asyncio.run_coroutine_threadsafe(run_all(), self._loop).result()


def _name() -> str:
    return f"invariant-rag-{uuid4().hex}"


def _prompt(request: EngineRequest) -> Any:
    return tokens_input(list(request.token_ids), cache_salt=request.tenant or None)


def _sampling_params(request: EngineRequest) -> SamplingParams:
    parameters = request.kv_transfer_params
    extra = None if parameters is None else {"kv_transfer_params": dict(parameters)}
    fields = dict(request.fields)
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)


def _extend(completions: list[Completion], output: Any, top: int, on_tokens: OnTokens | None) -> None:
    """Append what a step wrote to the sequences of a request.

    Raises:
        RequestRefused: vLLM failed the request.
    """
    for each in output.outputs:
        if each.finish_reason == "error":
            raise RequestRefused("vLLM refused the request; its log says why")
        completion = completions[each.index]
        completion.token_ids += each.token_ids
        completion.logprobs += [
            entry[token].logprob for entry, token in zip(each.logprobs or (), each.token_ids, strict=False)
        ]
        for entry in each.logprobs or () if top else ():
            found = {token: known.logprob for token, known in entry.items()}
            completion.top_logprobs.append(likeliest(found, top))
        completion.cached_tokens = output.num_cached_tokens or completion.cached_tokens
        if each.finish_reason is not None:
            completion.finish_reason = "length" if each.finish_reason == "length" else "stop"
        if on_tokens is not None and each.token_ids:
            on_tokens(each.index, each.token_ids)
