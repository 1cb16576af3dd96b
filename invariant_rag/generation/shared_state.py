"""What all wrappers of one model share: its position encodings, a lock, and the digest of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from threading import get_ident
from typing import TYPE_CHECKING

from invariant_rag.attention.alibi import Alibi
from invariant_rag.attention.dynamic_rope import has_dynamic_rope
from invariant_rag.attention.per_model import once_per_model
from invariant_rag.attention.probe import probe
from invariant_rag.cancellation import check_cancelled
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.digest import weights_digest
from invariant_rag.locks import ForkSafeLock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.positions import PositionEncoding
    from invariant_rag.generation.kv_cache import EntryLayout

RUNS_ELSEWHERE = "invariant_rag_runs_elsewhere"
"""An attribute of models without weights, of which only configuration and tokenizer are needed."""


@dataclass(eq=False)
class _Hold:
    """A lock while a thread holds it."""

    lock: ModelLock
    thread: int
    active: bool = True


_holds: ContextVar[tuple[_Hold, ...]] = ContextVar("held_model_locks", default=())


class ModelLock:
    """A re-entrant lock that is refused to a thread for whose end the holder may be waiting.

    Such a thread was started by the holder, or with a copy of its context as asyncio and LangChain do. It would wait
    for the lock, and the holder for it.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        Raises:
            CancelledError: Nobody waits for the result of this thread any more; see `cancellable`.
            UnsupportedCombination: This thread was started, with a copy of the context, by one that holds it.
        """
        if _holds.get():
            self._refuse(get_ident())
        with self._lock:
            check_cancelled()
            hold = _Hold(self, get_ident())
            token = _holds.set((*_holds.get(), hold))
            try:
                yield
            finally:
                hold.active = False
                _holds.reset(token)

    def check_new_thread(self) -> None:
        """Check that a new thread could get the lock while this one waits for it.

        Raises:
            UnsupportedCombination: This thread holds it.
        """
        self._refuse(None)

    def _refuse(self, thread: int | None) -> None:
        if any(hold.active and hold.lock is self and hold.thread != thread for hold in _holds.get()):
            raise UnsupportedCombination(
                "expected a call from outside of `lm.arranged`, logits processors, stopping criteria and streamers of "
                "the same model, got one from a thread that they wait for, so that both would wait for ever",
                hint="Call generate instead of stream, in the same thread; or stream when they have ended.",
            )


@dataclass
class SharedState:
    """State of a model that belongs to no single wrapper.

    Attributes:
        rotations: The position encoding of each layer.
        has_dynamic_rope: Whether rotary frequencies depend on the length of the prompt.
        lock: Held during every call of the model.
        entry_layout: Shapes and dtypes of the keys and values of one token, with what they were computed with.
    """

    rotations: list[PositionEncoding]
    has_dynamic_rope: bool = False
    lock: ModelLock = field(default_factory=ModelLock)
    entry_layout: tuple[object, EntryLayout] | None = None
    _digesting: ForkSafeLock = field(default_factory=ForkSafeLock)
    _begun: int = 0
    _digest: tuple[int, str] = (0, "")

    @cached_property
    def has_alibi(self) -> bool:
        """Whether a layer has ALiBi: then the model itself takes the index of a token for its position."""
        return any(isinstance(each, Alibi) for each in self.rotations)

    def weights_digest(self, model: PreTrainedModel) -> str:
        """Return a digest of the weights computed after this call started; concurrent callers share one."""
        wanted = self._begun + 1
        with self._digesting:
            if self._digest[0] < wanted:
                self._begun += 1
                self._digest = self._begun, weights_digest(model)
            return self._digest[1]


@once_per_model
def shared_state(model: PreTrainedModel) -> SharedState:
    """Return the state that all wrappers of a model share; the model is probed the first time.

    One without weights, which another engine runs, has nothing to probe.

    Raises:
        UnsupportedModel: Its attention cannot be arranged; the message gives the reason.
    """
    return SharedState([] if getattr(model, RUNS_ELSEWHERE, False) else probe(model), has_dynamic_rope(model))
