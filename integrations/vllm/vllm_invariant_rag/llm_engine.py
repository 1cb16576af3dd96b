"""vLLM in this process: an `LLM`, or the engine of the API server that this process is."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import wait
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_invariant_rag.engines import Completion, EngineRequest, ServerFacts, Stopped, VLLMEngine
from vllm_invariant_rag.errors import RequestRefused

if TYPE_CHECKING:
    from vllm import LLM

_POLL_SECONDS = 0.1


class LLMEngine(VLLMEngine):
    """An `LLM` with `InvariantRAGConnector` in its `kv_transfer_config`. Calls of threads run one after the other."""

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.llm_engine
        self.facts = ServerFacts.of(self._engine.vllm_config)
        self._lock = Lock()

    def complete(self, requests: Sequence[EngineRequest], stopped: Stopped | None = None) -> list[list[Completion]]:
        """Run requests at the same time; see `VLLMEngine`."""
        results = list(map(_Result, requests))
        running = {each.name: each for each in results}
        with self._lock:
            try:
                for each in results:
                    self._engine.add_request(each.name, each.prompt, each.params)
                while running and not (stopped is not None and stopped()):
                    for output in self._engine.step():
                        if (result := running.get(output.request_id)) is not None:
                            result.extend(output)
                            if output.finished:
                                del running[result.name]
            finally:
                self._engine.abort_request(list(running))
        return [each.completions for each in results]


class ServingEngine(VLLMEngine):
    """The `EngineClient` of vLLM's API server, for threads of its process. It is made in the server's event loop."""

    def __init__(self, client: Any) -> None:
        self._client, self._loop, self.facts = client, asyncio.get_running_loop(), ServerFacts.of(client.vllm_config)

    def complete(self, requests: Sequence[EngineRequest], stopped: Stopped | None = None) -> list[list[Completion]]:
        """Run requests at the same time; see `VLLMEngine`."""
        results = list(map(_Result, requests))

        async def run(result: _Result) -> None:
            async for output in self._client.generate(result.prompt, result.params, result.name):
                result.extend(output)

        async def run_all() -> None:
            await asyncio.gather(*map(run, results))

        running = asyncio.run_coroutine_threadsafe(run_all(), self._loop)
        while not wait([running], _POLL_SECONDS).done:
            if stopped is not None and stopped():
                running.cancel()
                break
        else:
            running.result()
        return [each.completions for each in results]


class _Result:
    """A request as vLLM takes it, and what it has written."""

    def __init__(self, request: EngineRequest) -> None:
        self._request = request
        self.name = f"invariant-rag-{uuid4().hex}"
        self.prompt: Any = tokens_input(list(request.token_ids), cache_salt=request.tenant or None)
        self.completions = [Completion() for _ in range(request.fields["n"])]

    @property
    def params(self) -> SamplingParams:
        fields, params = dict(self._request.fields), self._request.kv_transfer_params
        if "structured_outputs" in fields:
            fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
        extra = None if params is None else {"kv_transfer_params": dict(params)}
        return SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)

    def extend(self, output: Any) -> None:
        """Append what a step wrote, or raise RequestRefused."""
        for each in output.outputs:
            if each.finish_reason == "error":
                raise RequestRefused("vLLM refused the request; its log says why")
            logprobs = [{token: known.logprob for token, known in entry.items()} for entry in each.logprobs or ()]
            completion = self.completions[each.index]
            completion.extend(each.token_ids, logprobs, each.finish_reason)
            completion.cached_tokens = output.num_cached_tokens or completion.cached_tokens
            if self._request.on_tokens is not None and each.token_ids:
                self._request.on_tokens(each.token_ids)
