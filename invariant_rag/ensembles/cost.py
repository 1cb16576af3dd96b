"""The cost of an ensemble: forward passes, counted by a hook while the model runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import get_ident
from typing import Any

from transformers import PreTrainedModel

from invariant_rag.generation.outputs import Generation


@dataclass(frozen=True)
class Cost:
    """Forward passes of a model. Every row of a batch counts.

    Attributes:
        prefills: Prompts that were prefilled from their first token.
        passes: Forward passes: prefills, decoding steps (one per generated token, except the first where the prefill
            returned it) and one per scored candidate.
        tokens: Tokens of all passes, padding included.
        calls: Calls of the model. A batch of any size is one call.
    """

    prefills: int = 0
    passes: int = 0
    tokens: int = 0
    calls: int = 0

    def __str__(self) -> str:
        return f"{self.prefills} prefills, {self.passes} forward passes, {self.tokens} tokens, {self.calls} calls"


class CostCounter:
    """A forward pre-hook that counts the calls made by one thread."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._calls: list[tuple[int, int, bool]] = []  # rows, tokens per row, whether the cache was empty

    def __call__(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of the model."""
        if get_ident() == self._thread:
            rows, tokens = (args[0] if args else kwargs["input_ids"]).shape
            cache = kwargs.get("past_key_values")
            self._calls.append((rows, tokens, cache is None or not cache.get_seq_length()))

    @property
    def cost(self) -> Cost:
        """The cost so far."""
        return Cost(
            prefills=sum(rows for rows, _, is_prefill in self._calls if is_prefill),
            passes=sum(rows for rows, _, _ in self._calls),
            tokens=sum(rows * tokens for rows, tokens, _ in self._calls),
            calls=len(self._calls),
        )


@contextmanager
def count_cost(model: PreTrainedModel) -> Iterator[CostCounter]:
    """Count the calls of a model by the current thread, until the block ends."""
    counter = CostCounter()
    hook = model.register_forward_pre_hook(counter, with_kwargs=True)
    try:
        yield counter
    finally:
        hook.remove()


@dataclass(frozen=True)
class EnsembleGeneration(Generation):
    """The answer of an ensemble.

    Attributes:
        cost: Cost of all its forward passes. `usage` counts one prompt and the answer only.
    """

    cost: Cost = Cost()


class Scores(list[float]):
    """Log-probabilities of candidates, with their cost.

    Attributes:
        cost: Cost of all forward passes.
    """

    def __init__(self, values: Iterable[float], cost: Cost) -> None:
        super().__init__(values)
        self.cost = cost
