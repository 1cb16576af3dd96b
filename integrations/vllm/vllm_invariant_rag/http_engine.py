"""A vLLM server, over its completions API."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any

import httpx
from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidChoice
from invariant_rag.shown import shown

from vllm_invariant_rag.engines import Completion, Engine, EngineRequest, OnTokens
from vllm_invariant_rag.errors import (
    RequestRefused,
    UnsupportedServer,
    VLLMError,
    VLLMTimeout,
    VLLMUnreachable,
)
from vllm_invariant_rag.facts import ServerFacts
from vllm_invariant_rag.paths import COMPLETIONS_PATH, FACTS_PATH

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
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MOST_AT_ONCE)
        try:
            self._client = httpx.Client(base_url=self.url, headers=headers, timeout=timeout, limits=limits)
        except httpx.InvalidURL as error:
            raise InvalidChoice(f"url: expected an address such as http://127.0.0.1:8000, got {url!r}") from error

    def facts(self) -> ServerFacts:
        """Return what it serves; see `Engine`."""
        response = self._send("GET", FACTS_PATH)
        if response.status_code == httpx.codes.NOT_FOUND:
            raise UnsupportedServer(
                f"expected a vLLM at {self.url} that tells what it serves, got none",
                hint="Start it with --middleware vllm_invariant_rag.middleware.Documents.",
            )
        _raise_for(response.status_code, response.content)
        try:
            return ServerFacts(**response.json())
        except (TypeError, ValueError) as error:
            raise UnsupportedServer(
                f"expected a vLLM at {self.url} that tells what it serves, got {shown(response.text)}",
                hint="Is it the address of a vLLM with this version's middleware?",
            ) from error

    def check_ready(self) -> None:
        """Ask whether it is up; see `Engine`."""
        response = self._send("GET", "/health", timeout=_CHECK_SECONDS)
        _raise_for(response.status_code, response.content)

    @cached_property
    def _served_name(self) -> str:
        return self.facts().served_name

    def complete(
        self, request: EngineRequest, on_tokens: OnTokens | None = None, stopped: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Run one request; see `Engine`."""
        body = {
            "model": self._served_name,
            "prompt": list(request.token_ids),
            "return_token_ids": True,
            **({"cache_salt": request.tenant} if request.tenant else {}),
            **request.fields,
        }
        if request.kv_transfer_params is not None:
            body["kv_transfer_params"] = dict(request.kv_transfer_params)
        if on_tokens is None and stopped is None:
            response = self._send("POST", COMPLETIONS_PATH, body)
            _raise_for(response.status_code, response.content)
            answer = response.json()
            details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
            cached = details.get("cached_tokens") or 0
            completions = [Completion(cached_tokens=cached) for _ in range(request.fields["n"])]
            for choice in answer["choices"]:
                _extend(completions[choice["index"]], choice)
            return completions
        return self._stream({**body, "stream": True}, request.fields["n"], on_tokens, stopped)

    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Run requests at the same time; see `Engine`."""
        if len(requests) == 1:
            return [self.complete(requests[0])]
        with ThreadPoolExecutor(min(len(requests), _MOST_AT_ONCE)) as pool:
            return list(pool.map(self.complete, requests))

    def _stream(
        self, body: dict[str, Any], count: int, on_tokens: OnTokens | None, stopped: Callable[[], bool] | None
    ) -> list[Completion]:
        completions = [Completion() for _ in range(count)]
        try:
            with self._client.stream("POST", COMPLETIONS_PATH, json=body) as response:
                if response.status_code != httpx.codes.OK:
                    _raise_for(response.status_code, response.read())
                for event in _events(response.iter_lines()):
                    for choice in event.get("choices", ()):
                        _extend(completions[choice["index"]], choice)
                        if on_tokens is not None and choice.get("token_ids"):
                            on_tokens(choice["index"], choice["token_ids"])
                    if stopped is not None and stopped():
                        break  # closing the connection ends the request
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return completions

    def _send(
        self, verb: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = None
    ) -> httpx.Response:
        """Send a request; once more if a connection that was kept has been closed by a server that restarted."""
        more: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        for last in (False, True):
            try:
                return self._client.request(verb, path, json=body, **more)
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError) as error:
                if last:
                    raise self._unreachable(error) from error
            except httpx.HTTPError as error:
                raise self._unreachable(error) from error
        raise AssertionError

    def _unreachable(self, error: httpx.HTTPError) -> VLLMUnreachable:
        kind = VLLMTimeout if isinstance(error, httpx.TimeoutException) else VLLMUnreachable
        return kind(f"expected an answer of vLLM at {self.url}, got {type(error).__name__}: {error}")


def _events(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """Yield the server-sent events of a stream.

    Raises:
        RequestRefused, VLLMError: One of them is an error.
    """
    for line in lines:
        content = line.removeprefix("data:").strip()
        if line.startswith("data:") and content != "[DONE]":
            event = json.loads(content)
            if "error" in event:
                _raise_for(int(event["error"].get("code") or 500), content.encode())
            yield event


def _extend(completion: Completion, choice: Mapping[str, Any]) -> None:
    completion.token_ids += choice.get("token_ids") or ()
    completion.logprobs += (choice.get("logprobs") or {}).get("token_logprobs") or ()
    if choice.get("finish_reason") is not None:
        completion.finish_reason = "length" if choice["finish_reason"] == "length" else "stop"


def _raise_for(status: int, content: bytes) -> None:
    """Raise the error that an answer states."""
    if status < httpx.codes.BAD_REQUEST:
        return
    try:
        error = json.loads(content)["error"]
        kind, message = str(error.get("type")), str(error.get("message"))
    except (ValueError, KeyError, TypeError, AttributeError):
        kind, message = "", content.decode(errors="replace")[:500]
    known = {each.__name__: each for each in (RequestRefused, UnsupportedServer)}
    if kind in known:
        raise known[kind](message)
    raise VLLMError(f"vLLM answered {status}: {message}")
