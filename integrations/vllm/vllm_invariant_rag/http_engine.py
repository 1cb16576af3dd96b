"""A vLLM server, over its completions API."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import openai
from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidChoice
from invariant_rag.shown import shown

from vllm_invariant_rag.engines import Completion, Engine, EngineRequest, OnTokens, likeliest
from vllm_invariant_rag.errors import RequestRefused, UnsupportedServer, VLLMError, VLLMTimeout, VLLMUnreachable
from vllm_invariant_rag.facts import FACTS_PATH, ServerFacts

_MOST_AT_ONCE = 64  # requests of one call; vLLM queues what is more than it can run
_CHECK_SECONDS = 5.0


class HTTPEngine(Engine):
    """A server.

    Args:
        url: Its address, such as `http://127.0.0.1:8000`.
        api_key: Its key, if it asks for one.
        timeout: Seconds until a request without an answer fails.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        self.url = check_text("url", url).rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise InvalidChoice(f"url: expected an address such as http://127.0.0.1:8000, got {url!r}")
        # A path that only a vLLM with our middleware has: no other one reads documents causally for us.
        base = self.url + FACTS_PATH
        # One retry: a connection that was kept has been closed by a server that restarted.
        self._client = openai.OpenAI(base_url=base, api_key=api_key or "none", timeout=timeout, max_retries=1)

    def facts(self) -> ServerFacts:
        """Return what it serves; see `Engine`."""
        with self._errors():
            found = self._client.get(self.url + FACTS_PATH, cast_to=object)
        try:
            return ServerFacts(**found)  # type: ignore[arg-type]
        except TypeError as error:
            raise UnsupportedServer(
                f"expected a vLLM at {self.url} that tells what it serves, got {shown(found)}",
                hint="Is it the address of a vLLM with this version's middleware?",
            ) from error

    def check_ready(self) -> None:
        """Ask whether it is up; see `Engine`."""
        with self._errors():
            self._client.with_options(timeout=_CHECK_SECONDS).get(self.url + "/health", cast_to=object)

    @cached_property
    def _served_name(self) -> str:
        return self.facts().served_name

    def complete(
        self, request: EngineRequest, on_tokens: OnTokens | None = None, stopped: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Run one request; see `Engine`."""
        completions = [Completion() for _ in range(request.fields["n"])]
        body: dict[str, Any] = {
            **request.fields,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # where tokens are named: among the likeliest
            **({"cache_salt": request.tenant} if request.tenant else {}),
            **({"kv_transfer_params": dict(request.kv_transfer_params)} if request.kv_transfer_params else {}),
        }
        name, ids = self._served_name, list(request.token_ids)
        with self._errors():
            events = self._client.completions.create(
                model=name,
                prompt=ids,
                stream=True,
                stream_options={"include_usage": True},
                extra_body=body,
                extra_headers=request.headers,
            )
            with events:  # closing the connection ends the request
                for event in events:
                    for choice in event.choices:
                        _extend(completions[choice.index], choice, request.fields["logprobs"], on_tokens)
                    details = event.usage.prompt_tokens_details if event.usage is not None else None
                    for completion in completions if details is not None else ():
                        completion.cached_tokens = (details and details.cached_tokens) or 0
                    if stopped is not None and stopped():
                        break
        return completions

    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Run requests at the same time; see `Engine`."""
        with ThreadPoolExecutor(min(len(requests), _MOST_AT_ONCE) or 1) as pool:
            return list(pool.map(self.complete, requests))

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
                f"expected a vLLM at {self.url} that reads documents, got 404: {error.message}",
                hint="Start it with --middleware vllm_invariant_rag.middleware.Documents.",
            ) from error
        except openai.APIError as error:
            told = error.body if isinstance(error.body, dict) else {}
            kinds = {each.__name__: each for each in (RequestRefused, UnsupportedServer, VLLMError)}
            raise kinds.get(str(told.get("type")), VLLMError)(
                str(told.get("message") or f"vLLM answered {error.message}")
            ) from error


def _extend(completion: Completion, choice: Any, top: int, on_tokens: OnTokens | None) -> None:
    tokens = choice.token_ids or []
    completion.token_ids += tokens
    completion.logprobs += (choice.logprobs and choice.logprobs.token_logprobs) or []
    for each in (choice.logprobs and choice.logprobs.top_logprobs) or () if top else ():
        found = {int(name.removeprefix("token_id:")): value for name, value in each.items()}
        completion.top_logprobs.append(likeliest(found, top))
    if choice.finish_reason is not None:
        completion.finish_reason = "length" if choice.finish_reason == "length" else "stop"
    if on_tokens is not None and tokens:
        on_tokens(choice.index, tokens)
