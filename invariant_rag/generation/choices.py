"""Everything that one wrapper of a model was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from invariant_rag.attention.call import Backend
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.overflow import TokenLimits
    from invariant_rag.interventions import Intervention
    from invariant_rag.methods import Method
    from invariant_rag.orderings import Ordering


@dataclass(frozen=True)
class Choices:
    """The choices of an `InvariantModel`. They never change; another choice makes another wrapper.

    Attributes:
        method: How segments see each other.
        ordering: Which segment goes where.
        backend: What computes the attention.
        limits: How long prompts may be, and what happens to longer ones.
        intervention: A change to the plain model's attention; None for none.
        cache: Keeps keys and values of prompt prefixes; None for none.
    """

    method: Method
    ordering: Ordering
    backend: Backend
    limits: TokenLimits
    intervention: Intervention | None
    cache: KeyValueCache | None

    @property
    def stock_decoding(self) -> bool:
        """Whether tokens behind a prefilled prompt use the model's own attention."""
        return self.method.stock_decoding and self.intervention is None
