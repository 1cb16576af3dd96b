"""A system behind a URL: any server with the chat completions of OpenAI."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.systems import Reply, System, ToInput, is_url, prompt_text, refuse
from invariant_rag.errors import AuditFailed

if TYPE_CHECKING:
    import httpx

    from invariant_rag.audit.questions import Question
    from invariant_rag.segments import Segment

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key of the server, if it wants one."""

SECONDS = 120.0
"""How long the server may take."""


class ServerError(Exception):
    """A request that the server did not answer. It may be sent again, after `retry_after` seconds if it says so."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


@dataclass(frozen=True)
class Endpoint:
    """Chat completions of a server: of OpenAI, vLLM, llama.cpp, Ollama, `invariant-rag` or any other.

    Attributes:
        url: Address up to the version, such as `http://127.0.0.1:8000/v1`.
        model: Name of the model; None: the first that the server lists.
        parameters: Other fields of a request. At temperature 0, most servers answer alike every time.
    """

    url: str
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url.rstrip("/"), headers=headers, timeout=SECONDS)

    @cached_property
    def served(self) -> str:
        """Name of the model that is asked."""
        if self.model is not None:
            return self.model
        try:
            return str(self._send("GET", "/models")["data"][0]["id"])
        except (ServerError, LookupError, TypeError) as error:
            raise AuditFailed(
                f"{self.url} lists no model: {error}",
                hint="Is it running? If it lists none, name one: --model, or Endpoint(url, model).",
            ) from error

    def ask(self, question: Question, segments: Sequence[Segment]) -> Reply:
        """Ask with the documents and the question in one message; see `complete`."""
        return self.complete(prompt_text(question.text, segments))

    def complete(self, text: str) -> Reply:
        """Send one message of a user.

        Raises:
            ServerError: The server does not answer, or with something else.
            AuditFailed: The server refuses this key or this model.
        """
        body = {"model": self.served, "messages": [{"role": "user", "content": text}], **self.parameters}
        said = self._send("POST", "/chat/completions", body)
        try:
            text, usage = said["choices"][0]["message"]["content"] or "", said.get("usage") or {}
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url}: expected a chat completion, got {str(said)[:200]!r}") from error
        return Reply(text, usage.get("total_tokens"))

    def _send(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._client.request(verb, path, json=body)
        except httpx.HTTPError as error:
            raise ServerError(f"{self.url}: {type(error).__name__}: {error}") from error
        said = f"{self.url}: {response.status_code}: {response.text[:200]}"
        if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND}:
            raise AuditFailed(said, hint=f"Look at the address, the model, and the key in {KEY_VARIABLE}.")
        if response.is_error:
            raise ServerError(said, _pause(response))
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"expected JSON: {said}") from error


def from_url(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap an `Endpoint`, or the URL of one. None for anything else."""
    endpoint = Endpoint(system) if is_url(system) else system
    if not isinstance(endpoint, Endpoint):
        return None
    refuse(to_input, "to_input", "an endpoint, which is sent a message")
    return System(f"{endpoint.served} at {endpoint.url}", endpoint.ask)


def _pause(response: httpx.Response) -> float | None:
    """Return how long a server asks to wait; None if it does not say so in seconds."""
    try:
        return float(response.headers["Retry-After"])
    except (KeyError, ValueError):
        return None
