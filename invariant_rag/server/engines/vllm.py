"""A vLLM as an engine: prompts are written here, and vLLM attends to their documents and writes the answers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from vllm_invariant_rag import RequestRefused, UnsupportedServer, VLLMBackend, VLLMError, VLLMTimeout, VLLMUnreachable

from invariant_rag.errors import UnsupportedCombination, UnsupportedModel
from invariant_rag.server.engines.base import Call, CallChoices, Emit, EngineReply, JudgeCall
from invariant_rag.server.engines.model_engine import ModelEngine
from invariant_rag.server.errors import DeadlineExceeded, UpstreamFailed

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.judge import Verdict

_logger = logging.getLogger("invariant_rag.server")


class OnVLLM(ModelEngine):
    """A `VLLMBackend` as an engine. vLLM batches by itself, and shares no cache between tenants."""

    def __init__(
        self, backend: VLLMBackend, name: str | None = None, *, together: int, max_prompt_tokens: int | None = None
    ) -> None:
        super().__init__(backend, name, together=together, max_prompt_tokens=max_prompt_tokens)
        self._backend = backend
        self.methods = frozenset(name for name in self.methods if _is_supported(backend, name))

    def check_ready(self) -> None:
        """Check that vLLM takes requests; see `Engine`."""
        with _refusals():
            self._backend.check_ready()

    def for_tenant(self, lm: InvariantModel, tenant: str) -> InvariantModel:
        """Return a backend for the tenant."""
        backend: InvariantModel = cast("VLLMBackend", lm).with_tenant(tenant)
        return backend

    def model_for(self, choices: CallChoices, headers: Mapping[str, str] = MappingProxyType({})) -> InvariantModel:
        """Return a backend that passes on the names of a request and of its trace."""
        backend: InvariantModel = cast("VLLMBackend", super().model_for(choices)).with_headers(headers)
        return backend

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        """Answer the prompts of a request; see `Engine`."""
        with _refusals():
            return super().answer_all(calls, emit, abandoned)

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers; see `answer_all`."""
        with _refusals():
            return super().judge(call)


def _is_supported(backend: VLLMBackend, method: str) -> bool:
    try:
        backend.with_method(method)
    except (UnsupportedCombination, UnsupportedModel):
        return False
    return True


@contextmanager
def _refusals() -> Iterator[None]:
    """Raise errors of vLLM as answers of this server. Only the log names vLLM's address."""
    try:
        yield
    except VLLMUnreachable as error:
        _logger.warning("vLLM cannot be reached", extra={"fields": {"reason": str(error)}})
        if isinstance(error, VLLMTimeout):
            raise DeadlineExceeded("expected an answer of vLLM in time") from error
        raise UpstreamFailed("expected an answer of vLLM, which cannot be reached", hint="Try again later.") from error
    except (RequestRefused, UnsupportedServer, VLLMError) as error:
        raise UpstreamFailed(str(error), hint=error.hint) from error
