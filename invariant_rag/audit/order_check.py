"""Check order invariance: generate from one prompt in many segment orders, and compare with the plain model."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from invariant_rag.audit.calls import Progress, no_progress
from invariant_rag.checks import MOST_CALLS, check_function, check_kind, check_number
from invariant_rag.errors import InvalidChoice, InvalidPrompt
from invariant_rag.segments import Prompt
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel


@dataclass(frozen=True)
class OrderCheck:
    """The result of `check_order`.

    Attributes:
        orders, seed: Number of random orders beside the given one, and their seed.
        promised: Whether the model is invariant by design.
        distinct: Number of distinct outputs: text, token ids and log-probabilities, compared bit for bit.
        answers: The distinct texts with their counts, most frequent first.
        plain_distinct, plain_answers: The same of the plain model (`sequential` with ordering `given`).
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
        """Whether all outputs are the same, bit for bit."""
        return self.distinct == 1

    @property
    def broken(self) -> bool:
        """Whether the model is invariant by design and its outputs differ."""
        return self.promised and not self.identical

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        found = {**asdict(self), "identical": self.identical}
        for name in ("answers", "plain_answers"):
            found[name] = [{"text": text, "count": count} for text, count in found[name]]
        return found


def check_order(
    model: InvariantModel,
    prompt: Prompt,
    orders: int = 10,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
    **generation: Any,
) -> OrderCheck:
    """Generate from `prompt` in the given and in `orders` random orders, with `model` and with the plain model.

    `progress` shows a bar, with one step for each of the `2 * (orders + 1)` generations; `generation` are keywords of
    `InvariantModel.generate`. With sampling, outputs differ whatever the order.
    """
    check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
    check_number("orders", orders, 1, MOST_CALLS, error=InvalidPrompt)
    source = random.Random(seed := check_number("seed", seed))
    check_function("progress", progress)
    if not callable(getattr(model, "with_method", None)):
        raise InvalidChoice(f"model: expected an InvariantModel, got {shown(model)}")
    prompts = [prompt, *(prompt.shuffled(source) for _ in range(orders))]
    found: list[Any] = []
    with progress(f"Asking in {orders} orders", 2 * len(prompts)) as advance:
        for lm in (model, model.with_method("sequential", ordering="given")):
            outputs = []
            for each in prompts:
                result = lm.generate(each, **generation)
                outputs.append((result.text, tuple(result.token_ids), tuple(result.logprobs)))
                advance()
            found += [len(set(outputs)), tuple(Counter(text for text, *_ in outputs).most_common())]
    return OrderCheck(orders, seed, model.invariant, *found)
