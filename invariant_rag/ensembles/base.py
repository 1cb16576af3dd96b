"""What all ensembles share: a model, and what may be asked of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from invariant_rag.ensembles.cost import Cost, EnsembleGeneration
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import resolve_option
from invariant_rag.generation.outputs import Generation
from invariant_rag.prompts import tokenize_text
from invariant_rag.segments import Prompt, Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


class Ensemble:
    """Several readings of one prompt by one model.

    Args:
        lm: The model. Its method is used as it is. Its ordering says from which order the readings start: with one
            that reads contents only, the result is the same, bit for bit, for every order of the segments; with
            `given`, it is not.
    """

    def __init__(self, lm: InvariantModel) -> None:
        self.lm = lm

    @property
    def model(self) -> PreTrainedModel:
        """The weights."""
        return self.lm.model

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        """The model's tokenizer."""
        return self.lm.tokenizer

    @property
    def invariant(self) -> bool:
        """Whether the order in which segments are given changes no bit of the output."""
        return self.lm.invariant

    def chat_prompt(
        self,
        question: str | None = None,
        segments: Iterable[Segment | str] = (),
        system: str | None = None,
        **more: Any,
    ) -> Prompt:
        """Render a prompt as `InvariantModel.chat_prompt` does."""
        return self.lm.chat_prompt(question, segments, system, **more)

    @property
    def _reader(self) -> InvariantModel:
        """The model, reading in the order given."""
        return self.lm.with_method(ordering="given")


def unrouted(lm: InvariantModel) -> InvariantModel:
    """Return a model that reads a prompt in one way.

    Raises:
        UnsupportedCombination: It is a routed one, which may keep another branch for every row.
    """
    if hasattr(lm, "invariant_branch"):
        raise UnsupportedCombination(
            "expected a model without routing, since log-probabilities of two branches have no common mean",
            hint="Give the ensemble one of them: model.invariant_branch.",
        )
    return lm


def at_least_one(name: str, count: int | None) -> int | None:
    """Return a count that may be left open.

    Raises:
        InvalidChoice: It is below 1.
    """
    if count is not None and count < 1:
        raise InvalidChoice(f"{name}: expected at least 1, got {count}")
    return count


def refuse(options: Mapping[str, Any], *names: str) -> None:
    """Refuse keywords of `generate` that ask for anything but one text, decoded greedily.

    Raises:
        UnsupportedCombination: One of them was given; the message says which.
    """
    given = {name: resolve_option(options, name) for name in names}
    asked = [name for name, value in given.items() if value is True or value not in (None, False, 1)]
    if asked:
        raise UnsupportedCombination(
            f"this ensemble writes one text, without {', '.join(asked)}", hint="Leave it out, or use the model itself."
        )


def with_cost(generation: Generation, cost: Cost) -> EnsembleGeneration:
    """Return a generation of one reading as that of the ensemble."""
    return EnsembleGeneration(**{each.name: getattr(generation, each.name) for each in fields(Generation)}, cost=cost)


def longest_of(candidates: Sequence[str | Sequence[int]], tokenizer: PreTrainedTokenizerBase | None) -> int:
    """Return the tokens of the longest candidate."""
    return max((len(tokenize_text(each, tokenizer)) for each in candidates), default=0)
