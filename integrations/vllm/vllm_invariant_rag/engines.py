"""vLLM behind one interface. Here: a server over HTTP. In `llm_engine`: what runs in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import openai
from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidChoice, InvariantRAGError
from invariant_rag.shown import shown

from vllm_invariant_rag.arranged_prompt import ArrangedPrompt
from vllm_invariant_rag.errors import RequestRefused, UnsupportedServer, VLLMError, VLLMTimeout, VLLMUnreachable

FACTS_PATH = "/v1/invariant_rag"
"""Answers what the server serves, to whom it also answers /v1/models."""

COMPLETIONS_PATH = FACTS_PATH + "/completions"
"""Takes what /v1/completions takes. A vLLM without our middleware has no such path, and would attend causally."""

Stopped = Callable[[], bool]
"""Whether nobody waits any more."""

_CONNECTOR = "InvariantRAGConnector"
_MOST_AT_ONCE = 64  # requests of one call; vLLM queues what is more than it can run
_CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class ServerFacts:
    """What a vLLM serves."""

    source: str  # folder or hub id of the model, where its tokenizer is too
    served_name: str  # what requests call it
    max_tokens: int  # that prompt and answer may have together
    sliding_window: int | None  # tokens that a layer attends back to
    arranges_decoding: bool  # whether answers may have an attention of their own: CUDA graphs replay vLLM's

    @classmethod
    def of(cls, vllm_config: Any) -> ServerFacts:
        """Return what a vLLM with this configuration serves; refuse one that would prefill documents causally."""
        transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
        if transfer is None or transfer.kv_connector != _CONNECTOR:
            raise UnsupportedServer(
                f"expected a vLLM with {_CONNECTOR}, got {getattr(transfer, 'kv_connector', None)}",
                hint="Pass kv_transfer_config, as the README shows.",
            )
        name = model.served_model_name if isinstance(model.served_model_name, str) else model.served_model_name[0]
        window, graphs = model.get_sliding_window(), vllm_config.compilation_config.cudagraph_mode
        arranges = graphs is None or not graphs.has_full_cudagraphs()
        return cls(str(model.model), str(name), int(model.max_model_len), window, arranges)

    def exceeds_window(self, length: int) -> bool:
        """Return whether prompt and answer are longer than the sliding window, beyond which vLLM frees blocks."""
        return self.sliding_window is not None and length > self.sliding_window

    def check(self, prompt: ArrangedPrompt, length: int, error: type[InvariantRAGError]) -> None:
        """Raise an error if the answer of a request of `length` tokens would not be decoded as its method says."""
        if prompt.is_causal_after_sets:
            return
        if not self.arranges_decoding:
            raise error(
                f"expected a method that decodes as a plain model does, got {prompt.method!r}: CUDA graphs replay "
                "vLLM's own attention",
                hint='Start vLLM with --compilation-config \'{"cudagraph_mode": "PIECEWISE"}\'.',
            )
        if self.exceeds_window(length):
            raise error(
                f"expected prompt and answer within the sliding window of {self.sliding_window} tokens for "
                f"{prompt.method!r}, which shifts the positions of documents for answers",
                hint="Use rotor or isolated.",
            )


@dataclass(frozen=True)
class EngineRequest:
    """One request to vLLM."""

    token_ids: tuple[int, ...]
    fields: Mapping[str, Any]  # sampling parameters
    kv_transfer_params: Mapping[str, Any] | None = None  # of an arranged prompt; None: there are no documents
    tenant: str = ""  # whose documents these are: tenants share no keys and values
    headers: Mapping[str, str] = field(default_factory=dict)  # names of the caller's request and of its trace
    on_tokens: Callable[[Sequence[int]], None] | None = None  # called with the next tokens of a single sequence


@dataclass
class Completion:
    """What vLLM wrote: one sequence of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs_at: list[Mapping[int, float]] = field(default_factory=list)  # by index: of the token and the likeliest
    finish_reason: Literal["stop", "length"] = "length"
    cached_tokens: int = 0  # tokens of the prompt that vLLM had in its prefix cache

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities of the tokens."""
        return tuple([logprobs[token] for token, logprobs in zip(self.token_ids, self.logprobs_at, strict=True)])

    def likeliest(self, count: int) -> tuple[tuple[tuple[int, float], ...], ...]:
        """Return the `count` likeliest tokens at each index, with their log-probabilities."""
        ranked = [sorted(each.items(), key=lambda item: (-item[1], item[0])) for each in self.logprobs_at if count]
        return tuple([tuple(each[:count]) for each in ranked])

    def extend(self, tokens: Sequence[int], logprobs: Iterable[Mapping[int, float]], finish_reason: str | None) -> None:
        """Append what a step wrote; VLLMUnreachable where vLLM gave the request up, which leaves an answer cut off."""
        if finish_reason == "abort":
            raise VLLMUnreachable("expected a whole answer of vLLM, which ended the request: it stops, or was paused")
        self.token_ids += tokens
        self.logprobs_at += logprobs
        if finish_reason is not None:
            self.finish_reason = "length" if finish_reason == "length" else "stop"


class VLLMEngine(ABC):
    """A vLLM. Safe for threads."""

    facts: ServerFacts  # what it serves

    def check_ready(self) -> None:  # noqa: B027 - one in this process is ready
        """Check that it takes requests; VLLMError if it does not, or cannot be reached."""

    @abstractmethod
    def complete(self, requests: Sequence[EngineRequest], stopped: Stopped | None = None) -> list[list[Completion]]:
        """Run requests at the same time; return the sequences of each.

        Once `stopped`, they end, and what was written until then is returned.

        Raises:
            RequestRefused: The connector refused a request.
            VLLMError: vLLM answered another error, or cannot be reached.
        """


class HTTPEngine(VLLMEngine):
    """A server, over its completions API; see `VLLMBackend` for the arguments."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = check_text("url", url).rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidChoice(f"url: expected an address such as http://127.0.0.1:8000, got {url!r}")
        base = self.url + FACTS_PATH
        # One retry: a connection that was kept has been closed by a server that restarted.
        self._client = openai.OpenAI(base_url=base, api_key=api_key or "none", timeout=timeout, max_retries=1)
        with self._errors():
            facts = self._client.get(base, cast_to=object)
        try:
            self.facts = ServerFacts(**facts)  # type: ignore[arg-type]
        except TypeError as error:
            raise UnsupportedServer(
                f"expected a vLLM at {self.url} that says what it serves, got {shown(facts)}",
                hint="Is it the address of a vLLM with this version's middleware?",
            ) from error

    def check_ready(self) -> None:
        """Check whether it is up; see `VLLMEngine`."""
        with self._errors():
            self._client.with_options(timeout=_CHECK_SECONDS).get(self.url + "/health", cast_to=object)

    def complete(self, requests: Sequence[EngineRequest], stopped: Stopped | None = None) -> list[list[Completion]]:
        """Run requests at the same time; see `VLLMEngine`."""
        with ThreadPoolExecutor(min(len(requests), _MOST_AT_ONCE) or 1) as pool:
            return list(pool.map(lambda each: self._complete(each, stopped), requests))

    def _complete(self, request: EngineRequest, stopped: Stopped | None) -> list[Completion]:
        completions = [Completion() for _ in range(request.fields["n"])]
        body: dict[str, Any] = {
            **request.fields,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # where tokens are named: among the likeliest
            "cache_salt": request.tenant or None,
            "kv_transfer_params": request.kv_transfer_params,
        }
        with self._errors():
            events: Any = self._client.completions.create(
                model=self.facts.served_name,
                prompt=list(request.token_ids),
                stream=True,
                stream_options={"include_usage": True},
                extra_body=body,
                extra_headers=request.headers,
            )
            with events:  # closing the connection ends the request
                for event in events:
                    for choice in event.choices:
                        named = (choice.logprobs and choice.logprobs.top_logprobs) or ()
                        logprobs = [{int(k.removeprefix("token_id:")): v for k, v in each.items()} for each in named]
                        completions[choice.index].extend(choice.token_ids or (), logprobs, choice.finish_reason)
                        if request.on_tokens is not None and choice.token_ids:
                            request.on_tokens(choice.token_ids)
                    if event.usage is not None and event.usage.prompt_tokens_details is not None:
                        for completion in completions:
                            completion.cached_tokens = event.usage.prompt_tokens_details.cached_tokens or 0
                    if stopped is not None and stopped():
                        break
        return completions

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise what the server answers as errors of ours."""
        try:
            yield
        except openai.APIConnectionError as error:
            lost = VLLMTimeout if isinstance(error, openai.APITimeoutError) else VLLMUnreachable
            raise lost(f"expected an answer of vLLM at {self.url}, got {type(error).__name__}: {error}") from error
        except openai.NotFoundError as error:
            raise UnsupportedServer(
                f"expected a vLLM at {self.url} that takes documents, got 404: {error.message}",
                hint="Start it with --middleware vllm_invariant_rag.middleware.Documents.",
            ) from error
        except openai.APIError as error:
            body = error.body if isinstance(error.body, dict) else {}
            kinds = {each.__name__: each for each in (RequestRefused, UnsupportedServer, VLLMError)}
            raise kinds.get(str(body.get("type")), VLLMError)(
                str(body.get("message") or f"vLLM answered {error.message}")
            ) from error
