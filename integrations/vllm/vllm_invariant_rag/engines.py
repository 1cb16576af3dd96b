"""vLLM behind one interface: a server over HTTP, an `LLM` in this process, or the server that this process is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from vllm_invariant_rag.facts import ServerFacts

OnTokens = Callable[[int, Sequence[int]], None]
"""Called with the number of a sequence and its next tokens."""


@dataclass(frozen=True)
class EngineRequest:
    """One request to vLLM.

    Attributes:
        token_ids: The prompt.
        tenant: Whose documents these are. Tenants share no keys and values.
        kv_transfer_params: How it reads its documents; None for a plain prompt.
        fields: Sampling parameters.
        headers: Names of the caller's request and of its trace, for a server.
    """

    token_ids: tuple[int, ...]
    tenant: str
    kv_transfer_params: Mapping[str, Any] | None
    fields: Mapping[str, Any]
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Completion:
    """What vLLM wrote: one sequence of a request.

    Attributes:
        token_ids: Its tokens.
        logprobs: Their log-probabilities.
        top_logprobs: At each place, the most likely tokens with theirs; as many as were asked for.
        finish_reason: `stop` or `length`.
        cached_tokens: Tokens of the prompt that vLLM had in its prefix cache.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    finish_reason: Literal["stop", "length"] = "length"
    cached_tokens: int = 0


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
            RequestRefused: The connector refused the request.
            VLLMError: vLLM answered another error, or cannot be reached.
        """

    @abstractmethod
    def complete_all(self, requests: Sequence[EngineRequest]) -> list[list[Completion]]:
        """Run requests at the same time; return the sequences of each. It raises what `complete` raises."""


def likeliest(found: Mapping[int, float], count: int) -> tuple[tuple[int, float], ...]:
    """Return so many tokens of the highest log-probabilities; vLLM adds the chosen one."""
    return tuple(sorted(found.items(), key=lambda each: (-each[1], each[0]))[:count])
