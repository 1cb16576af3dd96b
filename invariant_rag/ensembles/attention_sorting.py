"""Attention sorting: place the segments with the most attention nearest to the question (arXiv 2310.01427)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from invariant_rag.attention.base import LayerInputs
from invariant_rag.attention.hook import ArrangedAttention, PromptState, override_attention, unpad_row
from invariant_rag.attention.softmax import apply_softcap, causal_mask
from invariant_rag.ensembles.base import (
    Candidates,
    Ensemble,
    EnsembleGeneration,
    Scores,
    check_positive,
    count_cost,
    refuse_options,
)
from invariant_rag.ensembles.permutations import PermutedPrompt, in_canonical_order
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from invariant_rag.attention.base import AttentionCall


def segment_attention(lm: InvariantModel, prepared: PreparedPrompt) -> list[float]:
    """Return the mean attention weight of each segment's tokens for the last token of a prompt.

    The mean is over layers, heads and tokens, so that long segments have no advantage. One forward pass over a prompt
    of `lm.prepare`; the weights are in the order of `prepared.order`, and 0 for an empty segment.

    Raises:
        UnsupportedCombination: The method does not use stock decoding (`pine`, for example), or the model has an
            intervention.
    """
    if lm.intervention is not None:
        raise UnsupportedCombination(
            f"expected a model without an intervention, got {lm.intervention.name!r}, which changes attention weights"
        )
    if not lm.method.stock_decoding:
        raise UnsupportedCombination(
            f"expected a method with stock decoding, got {lm.method.name!r}",
            hint="Use sequential, rotor, or another method with stock decoding.",
        )
    prefiller, layers, state = lm.prefiller, list[torch.Tensor](), PromptState(prepared.arrangement)
    attention = ArrangedAttention([state], lm.backend, prefiller.shared.rotations)

    def record(inputs: LayerInputs) -> torch.Tensor:
        call, _ = unpad_row(inputs, 0, state, prefiller.shared.rotations[inputs.layer])
        layers.append(_last_weights(call))
        return attention(inputs)

    with prefiller.exclusive(), override_attention(lm.model, record):
        prefiller.forward(prepared, DynamicCache())
    weights = torch.stack(layers).mean(dim=0)
    spans = [span for spans in prepared.arrangement.layout.set_spans for span in spans]
    return [float(weights[span.start : span.stop].mean()) if len(span) else 0.0 for span in spans]


def _last_weights(call: AttentionCall) -> torch.Tensor:
    """Return the attention weights of the last token in one layer `[S]`, the mean over heads."""
    query, keys = call.queries[:, -1:].float(), call.keys.float()
    keys = keys.repeat_interleave(call.num_key_value_groups, dim=0)
    scores = apply_softcap(call, (query @ keys.transpose(1, 2)) * call.scaling)
    scores = scores.masked_fill(~causal_mask(1, keys.shape[1], call.sliding_window, keys.device), float("-inf"))
    if call.sinks is not None:
        scores = torch.cat((scores, call.sinks.to(scores).view(-1, 1, 1)), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
    return weights.double().mean(dim=0)[0].cpu()


class AttentionSorting(Ensemble[EnsembleGeneration]):
    """Sort the segments of every set by the attention they receive, repeat, then answer (arXiv 2310.01427).

    The segment with the most attention is placed nearest to the suffix. Every round is one forward pass over the prompt
    in the order of the previous round. The first round starts from the model's own ordering, and ties keep that order.
    So with an ordering by content the result is bit-for-bit the same for every input order; with `given`, as published,
    it is not. `generate` rejects `num_return_sequences`.

    One round may be too few (arXiv 2606.27793); `cookbook/results` has 1 to 3 rounds of the embedded model.

    Args:
        lm: The model; published with `sequential`. Any method with stock decoding works.
        rounds: Number of sorting rounds, at least 1.
    """

    def __init__(self, lm: InvariantModel, rounds: int = 1) -> None:
        super().__init__(lm)
        self.rounds = check_positive("rounds", rounds)

    def sort_segments(self, prompt: Prompt, new_tokens: int = 0) -> PermutedPrompt:
        """Return the prompt with its segments sorted by attention, with room for `new_tokens`.

        Raises:
            UnsupportedCombination: Attention weights are not available; see `segment_attention`.
        """
        permuted, lm = in_canonical_order(self.lm, prompt, new_tokens), self._given_order_lm
        for _ in range(self.rounds or 0):
            prepared = lm.prepare(permuted.prompt, new_tokens=new_tokens)
            weights = dict(zip(permuted.order, segment_attention(lm, prepared), strict=True))
            permuted = permuted.with_orders([sorted(order, key=weights.__getitem__) for order in permuted.orders])
        return permuted

    def _generate_one(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> EnsembleGeneration:
        refuse_options(options, "num_return_sequences")
        permuted = self.sort_segments(prompt, max_new_tokens)
        generation = self._given_order_lm.generate(
            permuted.prompt, max_new_tokens=max_new_tokens, **{**options, "num_return_sequences": 1}
        )
        return EnsembleGeneration.extend(permuted.to_input_indices(generation))

    def score(self, prompt: Prompt, candidates: Candidates) -> Scores:
        """Return the log-probability of each candidate after sorting, and the cost."""
        with count_cost(self.model) as counter:
            permuted = self.sort_segments(prompt, self._max_candidate_tokens(candidates))
            scores = self._given_order_lm.score(permuted.prompt, candidates)
        return Scores(scores, counter.cost)
