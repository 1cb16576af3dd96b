"""The base class of interventions, and their view of a batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from invariant_rag.attention.base import LayerInputs
from invariant_rag.attention.hook import PromptState, rows_per_prompt, unpad_row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.base import AttentionCall
    from invariant_rag.attention.positions import PositionEncoding


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch in one layer."""

    call: AttentionCall  # the layer's inputs for this row, without padding
    padded_queries: int  # before those of the call
    prompt_length: int  # in tokens; those after them were generated


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a batch, each with as many consecutive rows (beams, candidates), and each layer's positions."""

    prompts: Sequence[PromptState]
    rotations: Sequence[PositionEncoding]

    def rows(self, inputs: LayerInputs) -> Iterator[BatchRow]:
        """Yield the rows of the batch for one layer."""
        repeats = rows_per_prompt(inputs, self.prompts)
        for index in range(inputs.queries.shape[0]):
            prompt = self.prompts[index // repeats]
            call, padded_queries = unpad_row(inputs, index, prompt, self.rotations[inputs.layer])
            yield BatchRow(call, padded_queries, prompt.length)


def stack_rows(outputs: Sequence[tuple[BatchRow, torch.Tensor]]) -> torch.Tensor:
    """Stack the rows' outputs `[H, Q, D_v]` to `[B, Q, H, D_v]`; padding gets zeros."""
    padded = [torch.nn.functional.pad(out, (0, 0, row.padded_queries, 0)) for row, out in outputs]
    return torch.stack(padded).transpose(1, 2)


class Intervention(ABC):
    """A change to the plain model's attention that reduces its position bias.

    It requires the method `sequential`, since other methods replace the attention that it changes. It ignores
    `backend`. It does not make the output invariant by itself.

    Attributes:
        name: Registry key.
        paper: The paper that proposes it.
        cost: Extra computation compared with the plain model, as a phrase.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    cost: ClassVar[str]

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Self:
        """Return the intervention with its parameters for a model; refuse a model without known ones."""
        intervention = cls()
        intervention.check(model)
        return intervention

    @abstractmethod
    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedCombination if the parameters do not match the model."""

    @abstractmethod
    def applied(self, model: PreTrainedModel, batch: PromptBatch) -> AbstractContextManager[None]:
        """Apply the intervention to forward passes inside the context; restore the model afterwards."""
