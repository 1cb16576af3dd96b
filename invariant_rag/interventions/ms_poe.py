"""Ms-PoE: multi-scale positional encoding, one position scale per head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from invariant_rag.attention.base import LayerInputs
from invariant_rag.attention.hook import override_attention
from invariant_rag.attention.softmax import apply_softcap, causal_mask, plain_attention
from invariant_rag.checks import check_number, check_real
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.interventions.base import BatchRow, Intervention, PromptBatch, stack_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.base import AttentionCall


@dataclass(frozen=True)
class MsPoE(Intervention):
    """Divide the positions of each head by a head-specific ratio, from 1.2 to 1.8 (arXiv 2403.04797, section 3.3).

    Heads are ranked by position-awareness: the share of keys to which the last prompt query attends with more than
    three times the mean weight (equation 1; three, and more than, as in `_calculate_outlier` of VITA-Group/Ms-PoE at
    a46c3d1), at the model's original positions. The most aware head gets the smallest ratio; ratios increase in equal
    steps with rank (equation 2). Each layer ranks its heads once per prompt, for decoding, too. Otherwise that code
    differs from the paper, which is followed here: it ranks without positions, gives head i the ratio of rank
    `argsort(...)[i]`, and never reaches the largest ratio.

    Attributes:
        smallest: Ratio of the most position-aware head.
        largest: Ratio of the least position-aware head.
        first_layer: Index of the first layer with scaled positions.
        threshold: A key counts for position-awareness if its weight is more than this multiple of the mean.

    Raises:
        InvalidChoice: A ratio is not positive, the ratios are not ascending, or `first_layer` is negative.
    """

    name: ClassVar[str] = "ms-poe"
    paper: ClassVar[str] = "arXiv 2403.04797"
    cost: ClassVar[str] = "keys rotated for every head"

    smallest: float = 1.2
    largest: float = 1.8
    first_layer: int = 2
    threshold: float = 3.0

    def __post_init__(self) -> None:
        for name in ("smallest", "largest", "threshold"):
            object.__setattr__(self, name, check_real(name, getattr(self, name)))
        if not 0 < self.smallest <= self.largest:
            raise InvalidChoice(f"expected ratios 0 < smallest <= largest, got {self.smallest} and {self.largest}")
        check_number("first_layer", self.first_layer, 0)

    def check(self, model: PreTrainedModel) -> None:
        """Raise UnsupportedCombination if the model has no layer from `first_layer` on."""
        config = model.config.get_text_config(decoder=True)
        if self.first_layer >= config.num_hidden_layers:
            raise UnsupportedCombination(
                f"first_layer: expected less than {config.num_hidden_layers}, the layers of {config.model_type}, "
                f"got {self.first_layer}"
            )

    @contextmanager
    def applied(self, model: PreTrainedModel, batch: PromptBatch) -> Iterator[None]:
        """Apply the intervention to forward passes inside the context; restore the model afterwards."""

        def attention(inputs: LayerInputs) -> torch.Tensor:
            is_scaled = inputs.layer >= self.first_layer
            rows = batch.rows(inputs)
            return stack_rows([(row, self._attend(row) if is_scaled else plain_attention(row.call)) for row in rows])

        with override_attention(model, attention):
            yield

    def _attend(self, row: BatchRow) -> torch.Tensor:
        """Return the attention output `[H, Q, D_v]` with position p replaced by p / ratio.

        Queries and keys are already rotated to p, so they are rotated by a further `p / ratio - p`.
        """
        call = row.call
        if "ratios" not in call.scratch:
            call.scratch["ratios"] = self._ratios(call, row.prompt_length - 1)
        shrink = 1 / call.scratch["ratios"] - 1
        positions = torch.arange(call.keys.shape[1], dtype=torch.float64, device=call.keys.device)
        shifts = shrink[:, None] * positions  # [H, S]
        rescaled = replace(
            call,
            queries=call.rotation.rotate_by(call.queries, shifts[:, call.query_start :]),
            keys=call.rotation.rotate_by(call.keys.repeat_interleave(call.num_key_value_groups, dim=0), shifts),
            values=call.values.repeat_interleave(call.num_key_value_groups, dim=0),
        )
        return plain_attention(rescaled)

    def _ratios(self, call: AttentionCall, last: int) -> torch.Tensor:
        """Return the ratio of each head `[H]`, from the attention of the last prompt token, at index `last`."""
        dtype = torch.promote_types(call.queries.dtype, torch.float32)
        queries = call.queries[:, last - call.query_start].to(dtype)
        keys = call.keys[:, : last + 1].to(dtype).repeat_interleave(call.num_key_value_groups, dim=0)
        visible = causal_mask(1, last + 1, call.sliding_window, keys.device)[0]
        scores = apply_softcap(call, (keys @ queries[..., None])[..., 0] * call.scaling)[:, visible]
        if call.sinks is not None:
            scores = torch.cat((scores, call.sinks[:, None].to(scores)), dim=1)
        weights = torch.softmax(scores, dim=1)[:, : int(visible.sum())]
        heads = rank_heads(weights, self.threshold)
        ratios = torch.empty(len(heads), dtype=torch.float64, device=keys.device)
        ratios[heads] = torch.linspace(self.smallest, self.largest, len(heads), dtype=torch.float64, device=keys.device)
        return ratios


def rank_heads(weights: torch.Tensor, threshold: float) -> torch.Tensor:
    """Return the heads `[H]`, most position-aware first, from the attention weights of one query `[H, S]`."""
    awareness = (weights > threshold * weights.mean(dim=1, keepdim=True)).float().mean(dim=1)
    return awareness.argsort(descending=True, stable=True)
