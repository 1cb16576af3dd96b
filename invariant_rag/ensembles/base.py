"""The base class of ensembles, what they cost, and checks of their arguments."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import get_ident
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from invariant_rag.attention.per_model import cache_of
from invariant_rag.checks import MOST_CALLS, check_items, check_kind, check_number
from invariant_rag.errors import InvalidPrompt, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import is_set, resolve_max_new_tokens, resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class Cost:
    """Forward passes of a model. Every row of a batch counts.

    Attributes:
        prefills: Prompts that were prefilled from their first token.
        passes: Prefills, decoding steps (but for a first token of the prefill), and one per scored candidate.
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
        self._thread, self.cost = get_ident(), Cost()

    def __call__(self, _: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call of the model."""
        if get_ident() == self._thread:
            rows, tokens = (args[0] if args else kwargs["input_ids"]).shape
            cache, so_far = cache_of(kwargs), self.cost
            prefills = rows if cache is None or not cache.get_seq_length() else 0
            self.cost = Cost(
                so_far.prefills + prefills, so_far.passes + rows, so_far.tokens + rows * tokens, so_far.calls + 1
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
    """The answer of an ensemble, with the cost of all its forward passes; `usage` counts one prompt and the answer."""

    cost: Cost = Cost()


class Scores(list[float]):
    """Log-probabilities of candidates, with the cost of all forward passes."""

    def __init__(self, values: Iterable[float], cost: Cost) -> None:
        super().__init__(values)
        self.cost = cost


G = TypeVar("G", bound=EnsembleGeneration)
Candidates = Sequence[str | Sequence[int]]


class Ensemble(ABC, Generic[G]):
    """Several forward passes of one model over one prompt, combined into one answer.

    A subclass implements `_generate_one` and `score`.

    Args:
        lm: The model. Its method is used unchanged. Its ordering gives the base order of the segments, so with an
            ordering by content the result is bit-for-bit the same for every input order; with `given` it is not.
    """

    def __init__(self, lm: InvariantModel) -> None:
        self.lm = check_kind("lm", lm, InvariantModel)

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped transformers model."""
        return self.lm.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer."""
        return self.lm.tokenizer

    @property
    def invariant(self) -> bool:
        """Whether permuting the input segments changes no bit of the output."""
        return self.lm.invariant

    def chat_prompt(self, *args: Any, **kwargs: Any) -> Prompt:
        """Render a prompt as `InvariantModel.chat_prompt` does."""
        return self.lm.chat_prompt(*args, **kwargs)

    @overload
    def generate(self, prompt: Prompt, *, max_new_tokens: int | None = None, **kwargs: Any) -> G: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, **kwargs: Any) -> list[G]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None, **kwargs: Any
    ) -> G | list[G]:
        """Generate one answer per prompt.

        Args:
            prompt: One prompt, or several, which are processed one after the other.
            max_new_tokens: Maximum number of tokens to generate. None: the default of `InvariantModel.generate`.
            **kwargs: Keyword arguments of `InvariantModel.generate`, except those that the class rejects.

        Raises:
            UnsupportedCombination: The class rejects one of the keyword arguments.
        """
        if not isinstance(prompt, Prompt):
            prompts = check_items("prompt", prompt, Prompt, error=InvalidPrompt)
            return [self.generate(each, max_new_tokens=max_new_tokens, **kwargs) for each in prompts]
        with count_cost(self.model) as counter:
            generation = self._generate_one(prompt, resolve_max_new_tokens(max_new_tokens, kwargs), kwargs)
        return replace(generation, cost=counter.cost, invariant=self.invariant if prompt.segments else None)

    @abstractmethod
    def _generate_one(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> G:
        """Generate the answer to one prompt; the caller adds the cost."""

    @abstractmethod
    def score(self, prompt: Prompt, candidates: Candidates) -> Scores:
        """Return the log-probability of each candidate, and the cost."""

    @property
    def _given_order_lm(self) -> InvariantModel:
        """The model with the ordering `given`."""
        return self.lm.with_method(ordering="given")

    @property
    def _one_batch_lm(self) -> InvariantModel:
        """The model with the ordering `given`, for prompts that have to be one batch, since their scores are combined.

        Nothing else is in that batch, so an answer is as deterministic as that of one prompt. A model that computes
        prompts one by one whatever is chosen is refused.
        """
        lm = self._given_order_lm.with_method(deterministic=False)
        if lm.prefiller.one_by_one:
            raise UnsupportedCombination(
                "expected a model whose rotary frequencies do not depend on the length: in a batch, the longest prompt "
                "would change the others",
                hint="Use a vote over permutations, or another model.",
            )
        return lm

    def _max_candidate_tokens(self, candidates: Candidates) -> int:
        """Return the number of tokens of the longest candidate."""
        return max(map(len, self.lm.candidate_ids(candidates)), default=0)


def require_unrouted(lm: InvariantModel) -> InvariantModel:
    """Return the model; refuse a `RoutedModel`, which may choose another branch for every row of a batch."""
    if hasattr(lm, "invariant_branch"):
        raise UnsupportedCombination(
            "expected a model without routing: log-probabilities of two different branches cannot be averaged",
            hint="Pass one branch to the ensemble: model.invariant_branch.",
        )
    return lm


def check_positive(name: str, count: int | None) -> int | None:
    """Return an optional count; refuse what is no whole number of at least 1, or absurdly large."""
    return None if count is None else check_number(name, count, 1, MOST_CALLS)


def refuse_options(options: Mapping[str, Any], *names: str) -> None:
    """Refuse keyword arguments of `generate` that are not absent or at a value that disables them (None, False, 1)."""
    values = {name: resolve_option(options, name) for name in names}
    refused = [name for name, value in values.items() if is_set(value)]
    if refused:
        raise UnsupportedCombination(
            f"expected options that generate a single sequence, got {', '.join(refused)}",
            hint="Remove the option, or call generate of the model instead of the ensemble.",
        )
