"""Ask the same prompt in many document orders, and compare what comes out with what the plain model says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import InvalidPrompt

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt


@dataclass(frozen=True)
class OrderCheck:
    """What `check_order` saw.

    Attributes:
        orders: How many random orders were asked, besides the order given.
        seed: Seed of the random orders.
        promised: Whether the outputs are to ignore the order: the ordering puts the segments into one canonical order.
        distinct: Number of different outputs of the model: text, token ids or log-probabilities, bit for bit.
        answers: The model's different texts with their counts, most frequent first; the order given is counted too.
        plain_distinct: Number of different outputs of the plain model (`sequential` with ordering `given`).
        plain_answers: Its different texts with their counts, on the same orders.
    """

    orders: int
    seed: int
    promised: bool
    distinct: int
    answers: tuple[tuple[str, int], ...]
    plain_distinct: int
    plain_answers: tuple[tuple[str, int], ...]

    @property
    def identical(self) -> bool:
        """Whether every output was the same, bit for bit."""
        return self.distinct == 1

    @property
    def broken(self) -> bool:
        """Whether a promise was broken."""
        return self.promised and not self.identical

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "orders": self.orders,
            "seed": self.seed,
            "promised": self.promised,
            "identical": self.identical,
            "distinct": self.distinct,
            "answers": [{"text": text, "count": count} for text, count in self.answers],
            "plain_distinct": self.plain_distinct,
            "plain_answers": [{"text": text, "count": count} for text, count in self.plain_answers],
        }


def check_order(
    model: InvariantModel,
    prompt: Prompt,
    orders: int = 10,
    *,
    seed: int = 0,
    on_answer: Callable[[], None] | None = None,
    **generation: Any,
) -> OrderCheck:
    """Generate from `prompt` as given and in `orders` random orders, with `model` and with the plain model.

    Args:
        model: The model under test.
        prompt: The prompt. Every order is made by `prompt.shuffled`, so the segments reach the model shuffled.
        orders: Number of random orders.
        seed: Seed of the orders: the same seed gives the same orders.
        on_answer: Called after each of the `2 * (orders + 1)` generations, for a progress bar.
        generation: Keywords of `InvariantModel.generate`. Sampling makes any two outputs differ, whatever the order.

    Raises:
        InvalidPrompt: `orders` is below 1.
    """
    if orders < 1:
        raise InvalidPrompt(f"orders: expected at least 1, got {orders}")
    source = random.Random(seed)
    prompts = [prompt, *(prompt.shuffled(source) for _ in range(orders))]

    def outputs(asked: InvariantModel) -> list[tuple[str, tuple[int, ...], tuple[float, ...]]]:
        collected = []
        for each in prompts:
            result = asked.generate(each, **generation)
            collected.append((result.text, tuple(result.token_ids), tuple(result.logprobs)))
            if on_answer:
                on_answer()
        return collected

    ours = outputs(model)
    plain = outputs(model.with_method("sequential", ordering="given"))
    return OrderCheck(
        orders=orders,
        seed=seed,
        promised=model.invariant,
        distinct=len(set(ours)),
        answers=tuple(Counter(text for text, _, _ in ours).most_common()),
        plain_distinct=len(set(plain)),
        plain_answers=tuple(Counter(text for text, _, _ in plain).most_common()),
    )
