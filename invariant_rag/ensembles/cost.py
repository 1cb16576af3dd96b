"""What an answer cost: counted while the model runs, not derived from what should have run."""

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
    """Work of a model, every row of a batch counted.

    Attributes:
        prefills: Prompts that were read from their beginning.
        passes: Forward passes: those of prefills, and those over what follows a prompt (one for each generated token,
            less the first where the prefill gave it; one for each scored candidate).
        tokens: Tokens of all passes, padding included.
        calls: How often the model ran. A batch of any size is one call.
    """

    prefills: int = 0
    passes: int = 0
    tokens: int = 0
    calls: int = 0

    def __str__(self) -> str:
        return f"{self.prefills} prefills, {self.passes} forward passes, {self.tokens} tokens, {self.calls} calls"


class Counter:
    """Counts the calls of one thread."""

    def __init__(self) -> None:
        self._thread = get_ident()
        self._seen: list[tuple[int, int, bool]] = []

    def __call__(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take note of a call; a forward hook."""
        if get_ident() == self._thread:
            rows, tokens = (args[0] if args else kwargs["input_ids"]).shape
            cache = kwargs.get("past_key_values")
            self._seen.append((rows, tokens, cache is None or not cache.get_seq_length()))

    @property
    def cost(self) -> Cost:
        """What was counted so far."""
        return Cost(
            prefills=sum(rows for rows, _, first in self._seen if first),
            passes=sum(rows for rows, _, _ in self._seen),
            tokens=sum(rows * tokens for rows, tokens, _ in self._seen),
            calls=len(self._seen),
        )


@contextmanager
def counted(model: PreTrainedModel) -> Iterator[Counter]:
    """Count what a model does for this thread until the block ends."""
    counter = Counter()
    hook = model.register_forward_pre_hook(counter, with_kwargs=True)
    try:
        yield counter
    finally:
        hook.remove()


@dataclass(frozen=True)
class EnsembleGeneration(Generation):
    """What an ensemble wrote.

    Attributes:
        cost: Everything that was spent on it. `usage` counts one prompt and the answer alone.
    """

    cost: Cost = Cost()


class Scores(list[float]):
    """Log-probabilities of candidates, and what they cost.

    Attributes:
        cost: Everything that was spent on them.
    """

    def __init__(self, values: Iterable[float], cost: Cost) -> None:
        super().__init__(values)
        self.cost = cost
