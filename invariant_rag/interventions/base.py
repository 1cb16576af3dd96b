"""What an intervention has to say, and how it meets a batch of prompts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from invariant_rag.attention.hook import LayerInputs, Memory, unpad_row
from invariant_rag.attention.kernels import attend

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.call import AttentionCall
    from invariant_rag.attention.rope import Rotation


@dataclass(frozen=True)
class Row:
    """One row of a batch in one layer.

    Attributes:
        index: Its index in the batch.
        call: The layer's attention for it, without padding.
        skipped: Queries in front of the call's that are padding.
        prompt_length: Tokens of its prompt. Tokens behind them were generated.
    """

    index: int
    call: AttentionCall
    skipped: int
    prompt_length: int


@dataclass(frozen=True)
class Reading:
    """The prompts that a model reads, or continues, while an intervention is at work.

    Attributes:
        lengths: Tokens of each prompt. Rows of the batch are spread evenly over the prompts (beams, candidates).
        padding: For each prompt, the tokens of padding on the left of its keys.
        rotations: The rotary embedding of each layer.
        memories: For each prompt, what its layers keep for later calls. The prefill's are handed on to decoding.
    """

    lengths: Sequence[int]
    padding: Sequence[int]
    rotations: Sequence[Rotation]
    memories: Sequence[Memory]

    def rows(self, inputs: LayerInputs) -> Iterator[Row]:
        """Yield every row of the batch."""
        repeats = inputs.queries.shape[0] // len(self.lengths)
        for index in range(inputs.queries.shape[0]):
            prompt = index // repeats
            memory = self.memories[prompt].setdefault(inputs.layer, {})
            call, skipped = unpad_row(inputs, index, self.padding[prompt], self.rotations[inputs.layer], memory)
            yield Row(index, call, skipped, self.lengths[prompt])


def plain(call: AttentionCall) -> torch.Tensor:
    """Attend as the model does: `[H, Q, D_v]`."""
    return attend(call, call.queries, call.keys, call.values)


def stacked(outputs: Sequence[tuple[Row, torch.Tensor]]) -> torch.Tensor:
    """Make `[B, Q, H, D_v]` of the rows' outputs `[H, Q, D_v]`; padding gets zeros."""
    padded = [torch.nn.functional.pad(out, (0, 0, row.skipped, 0)) for row, out in outputs]
    return torch.stack(padded).transpose(1, 2)


class Intervention(ABC):
    """A change to the plain model's attention that lessens its position bias.

    It combines with the method `sequential` only, since other methods replace the attention that it changes, and it
    computes its own attention, so that `backend` has no part in it. It never makes an output invariant by itself.

    Attributes:
        name: Registry key, and the name of the file.
        paper: Where it comes from.
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
    def at_work(self, model: PreTrainedModel, reading: Reading) -> AbstractContextManager[None]:
        """Run the model's layers with this intervention; leave the model as it was."""
