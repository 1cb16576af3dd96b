"""An `LLM` of vLLM in this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm import SamplingParams
from vllm.inputs import tokens_input
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from vllm_invariant_rag.engines import Completion, Engine, EngineRequest, OnTokens
from vllm_invariant_rag.errors import EntryUnusable
from vllm_invariant_rag.server_facts import ServerFacts, facts_of

if TYPE_CHECKING:
    from vllm import LLM


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
        (result,) = self._run([request], on_tokens, stopped)
        if isinstance(result, Exception):
            raise result
        return result

    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion] | Exception]:
        """Run requests at the same time; see `Engine`."""
        return self._run(requests, None, None)

    def _run(
        self, requests: Sequence[EngineRequest], on_tokens: OnTokens | None, stopped: Callable[[], bool] | None
    ) -> list[list[Completion] | Exception]:
        names = {f"invariant-rag-{uuid4().hex}": index for index, _ in enumerate(requests)}
        results: list[list[Completion] | Exception] = [
            [Completion() for _ in range(request.fields["n"])] for request in requests
        ]
        with self._lock:
            try:
                for name, request in zip(names, requests, strict=True):
                    prompt = tokens_input(list(request.token_ids), cache_salt=request.cache_salt)
                    self._engine.add_request(name, prompt, _sampling_params(request))
                running = set(names)
                while running and not (stopped is not None and stopped()):
                    for output in self._engine.step():
                        if output.request_id not in names:
                            continue
                        index = names[output.request_id]
                        results[index] = _extended(results[index], output, on_tokens)
                        if output.finished:
                            running.discard(output.request_id)
            finally:
                self._engine.abort_request(list(names))  # those that ended are not known any more
        return results


def _sampling_params(request: EngineRequest) -> SamplingParams:
    parameters = request.kv_transfer_params
    extra = None if parameters is None else {"kv_transfer_params": dict(parameters)}
    fields = dict(request.fields)
    if "structured_outputs" in fields:
        fields["structured_outputs"] = StructuredOutputsParams(**fields["structured_outputs"])
    if "logit_bias" in fields:
        fields["logit_bias"] = {int(token): bias for token, bias in fields["logit_bias"].items()}
    return SamplingParams(**fields, extra_args=extra, output_kind=RequestOutputKind.DELTA)


def _extended(
    result: list[Completion] | Exception, output: Any, on_tokens: OnTokens | None
) -> list[Completion] | Exception:
    """Append what a step wrote to the sequences of a request."""
    if isinstance(result, Exception):
        return result
    for each in output.outputs:
        if each.finish_reason == "error":
            return EntryUnusable("vLLM failed the request, as it does when keys and values cannot be loaded")
        completion = result[each.index]
        completion.token_ids += each.token_ids
        completion.logprobs += [
            entry[token].logprob for entry, token in zip(each.logprobs or (), each.token_ids, strict=False)
        ]
        if each.finish_reason is not None:
            completion.finish_reason = "length" if each.finish_reason == "length" else "stop"
        if on_tokens is not None and each.token_ids:
            on_tokens(each.index, each.token_ids)
    return result
