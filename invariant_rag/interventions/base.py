"""The base class of interventions, and the rows of a batch as they see them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from invariant_rag.attention.hook import LayerInputs, PromptState, unpad_row
from invariant_rag.attention.kernels import attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.call import AttentionCall
    from invariant_rag.attention.rope import Rotation


@dataclass(frozen=True)
class BatchRow:
    """One row of a batch in one layer.

    Attributes:
        index: Its index in the batch.
        call: The layer's attention for it, without padding.
        skipped: Queries before those of the call that are padding.
        prompt_length: Tokens of its prompt. Tokens behind them were generated.
    """

    index: int
    call: AttentionCall
    skipped: int
    prompt_length: int


@dataclass(frozen=True)
class PromptBatch:
    """The prompts of a batch, and how the layers rotate.

    Attributes:
        prompts: The prompts. Rows of the batch are spread evenly over them (beams, candidates).
        rotations: The rotary embedding of each layer.
    """

    prompts: Sequence[PromptState]
    rotations: Sequence[Rotation]

    def rows(self, inputs: LayerInputs) -> Iterator[BatchRow]:
        """Yield every row of the batch, as one layer sees it."""
        repeats = inputs.queries.shape[0] // len(self.prompts)
        for index in range(inputs.queries.shape[0]):
            prompt = self.prompts[index // repeats]
            call, skipped = unpad_row(inputs, index, prompt, self.rotations[inputs.layer])
            yield BatchRow(index, call, skipped, prompt.length)


def plain_attention(call: AttentionCall) -> torch.Tensor:
    """Return the attention output of the model as it is `[H, Q, D_v]`."""
    return attend(call, call.queries, call.keys, call.values)


def stack_rows(outputs: Sequence[tuple[BatchRow, torch.Tensor]]) -> torch.Tensor:
    """Stack the rows' outputs `[H, Q, D_v]` to `[B, Q, H, D_v]`; padding gets zeros."""
    padded = [torch.nn.functional.pad(out, (0, 0, row.skipped, 0)) for row, out in outputs]
    return torch.stack(padded).transpose(1, 2)


class Intervention(ABC):
    """A change to the plain model's attention that lessens its position bias.

    It combines with the method `sequential` only, since other methods replace the attention that it changes. It
    computes its own attention, whatever the `backend` is. It never makes an output invariant by itself.

    Attributes:
        name: Registry key, and the name of the file.
        paper: Its source.
        cost: What it computes beyond the plain model, in a phrase.
    """

    name: ClassVar[str]
    paper: ClassVar[str]
    cost: ClassVar[str]

    @classmethod
    def for_model(cls, model: PreTrainedModel) -> Self:
        """Return the intervention with the parameters that suit a model.

        Raises:
            UnknownName: None are known for this one.
            UnsupportedCombination: The model cannot be changed in this way.
        """
        chosen = cls()
        chosen.check(model)
        return chosen

    @abstractmethod
    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedCombination where the parameters do not fit the model."""

    @abstractmethod
    def applied(self, model: PreTrainedModel, batch: PromptBatch) -> AbstractContextManager[None]:
        """Run the model's layers with this intervention; restore the model afterwards."""
