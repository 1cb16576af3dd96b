"""vLLM behind one interface: a server over HTTP, or an `LLM` in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_invariant_rag.server_facts import ServerFacts

OnTokens = Callable[[int, Sequence[int]], None]
"""Called with the number of a sequence and its next tokens."""


@dataclass(frozen=True)
class EngineRequest:
    """One request to vLLM.

    Attributes:
        token_ids: The prompt.
        cache_salt: Its salt.
        kv_transfer_params: Its parameters for the connector; None for a plain prompt.
        fields: Sampling parameters.
    """

    token_ids: tuple[int, ...]
    cache_salt: str
    kv_transfer_params: Mapping[str, Any] | None
    fields: Mapping[str, Any]


@dataclass
class Completion:
    """What vLLM wrote: one sequence of a request."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"


class Engine(ABC):
    """A vLLM. Safe for threads."""

    @abstractmethod
    def facts(self) -> ServerFacts:
        """Return what it serves.

        Raises:
            UnsupportedServer: It runs without our connector.
            VLLMError: It cannot be reached.
        """

    @abstractmethod
    def check_ready(self) -> None:
        """Check that it takes requests.

        Raises:
            VLLMError: It does not, or cannot be reached.
        """

    @abstractmethod
    def complete(
        self, request: EngineRequest, on_tokens: OnTokens | None = None, stopped: Callable[[], bool] | None = None
    ) -> list[Completion]:
        """Run one request; return its sequences. Once `stopped`, it ends, and what was written until then is returned.

        Raises:
            EntryUnusable: Keys and values could not be loaded.
            RequestRefused: The connector refused the request.
            VLLMError: vLLM answered another error, or cannot be reached.
        """

    @abstractmethod
    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion] | Exception]:
        """Run requests at the same time; return the sequences of each, or its error."""
