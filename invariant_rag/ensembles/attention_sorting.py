"""Attention sorting: place the documents with the most attention nearest to the question (arXiv 2310.01427)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, overload

import torch

from invariant_rag.attention.hook import ArrangedAttention, LayerInputs, PromptState, override_attention
from invariant_rag.attention.kernels import causal_mask
from invariant_rag.ensembles.base import Ensemble, at_least_one, longest_of, refuse, with_cost
from invariant_rag.ensembles.cost import EnsembleGeneration, Scores, counted
from invariant_rag.ensembles.listing import Listing, canonical_listing
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import resolve_max_new_tokens
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.segments import Prompt


def segment_attention(lm: InvariantModel, prepared: PreparedPrompt) -> list[float]:
    """Return the attention that the last token of a prompt pays each segment, per token of the segment.

    It is the mean over layers, heads and the segment's tokens, so that a long segment has no advantage. One forward
    pass.

    Args:
        lm: The model.
        prepared: The prompt, as the model prepared it.

    Returns:
        One number for each segment that `prepared.order` lists, in that order; 0 for one without a token.

    Raises:
        UnsupportedCombination: The method's last token does not read every key where it lies, as one of `pine` does, or
            an intervention changes what it reads.
    """
    if lm.intervention is not None:
        raise UnsupportedCombination(
            f"expected a model without an intervention, whose attention is its own, got {lm.intervention.name!r}"
        )
    if not lm.method.stock_decoding:
        raise UnsupportedCombination(
            f"expected a method whose suffix reads every segment where it lies, got {lm.method.name!r}",
            hint="Use sequential, rotor, or another method with stock decoding.",
        )
    prefiller = lm.prefiller
    observer = _Observer(ArrangedAttention([PromptState(prepared.arrangement)], lm.backend, prefiller.rotations))
    with prefiller.exclusive(), override_attention(lm.model, observer):
        prefiller.forward(prepared, 1, use_cache=False)
    weights = torch.stack(observer.weights).mean(dim=0)
    spans = [span for spans in prepared.arrangement.layout.set_spans for span in spans]
    return [float(weights[span.start : span.stop].mean()) if len(span) else 0.0 for span in spans]


@dataclass
class _Observer:
    """An attention function that records the last token's weights in every layer: `[S]`, the mean over heads."""

    attention: ArrangedAttention
    weights: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, inputs: LayerInputs) -> torch.Tensor:
        query, keys = inputs.queries[0, :, -1:].float(), inputs.keys[0].float()
        keys = keys.repeat_interleave(query.shape[0] // keys.shape[0], dim=0)
        scores = (query @ keys.transpose(1, 2)) * inputs.scaling
        softcap, sinks = inputs.extra.get("softcap"), inputs.extra.get("s_aux")
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores.masked_fill(~causal_mask(1, keys.shape[1], inputs.sliding_window, keys.device), float("-inf"))
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(scores).view(-1, 1, 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : keys.shape[1]]
        self.weights.append(weights.double().mean(dim=0)[0].cpu())
        return self.attention(inputs)


class AttentionSorting(Ensemble):
    """Sort the segments of every set by the attention they get, repeat, then answer (arXiv 2310.01427).

    The segment with the most attention stands nearest to the suffix. Every round is one forward pass over the prompt in
    the order of the round before. Rounds start from the order of the model's own ordering, and equal attention keeps
    that order. So with an ordering that reads contents only, the result is the same, bit for bit, for every order of
    the segments. With `given`, as published, it is not.

    Args:
        lm: The model; published with `sequential`. Any method works whose suffix reads every segment where it lies.
        rounds: How often to sort.

    Raises:
        InvalidChoice: `rounds` is below 1.
    """

    def __init__(self, lm: InvariantModel, rounds: int = 1) -> None:
        super().__init__(lm)
        self.rounds = at_least_one("rounds", rounds)

    def sorted(self, prompt: Prompt, new_tokens: int = 0) -> Listing:
        """Return the prompt with its segments sorted.

        Raises:
            UnsupportedCombination: The method cannot be looked at.
        """
        listing = canonical_listing(self.lm, prompt, new_tokens)
        for _ in range(self.rounds or 0):
            prepared = self._reader.prepare(listing.prompt, new_tokens=new_tokens)
            attention = dict(zip(listing.origin, segment_attention(self._reader, prepared), strict=True))
            listing = listing.relisted([sorted(order, key=attention.__getitem__) for order in listing.orders])
        return listing

    @overload
    def generate(self, prompt: Prompt, *, max_new_tokens: int | None = None, **kwargs: Any) -> EnsembleGeneration: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, **kwargs: Any
    ) -> list[EnsembleGeneration]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None, **kwargs: Any
    ) -> EnsembleGeneration | list[EnsembleGeneration]:
        """Sort, then generate.

        Args:
            prompt: One prompt, or several, one after the other.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            **kwargs: As for `InvariantModel.generate`, but for several returned sequences.

        Raises:
            UnsupportedCombination: Several sequences were asked for, or the method cannot be looked at.
        """
        refuse(kwargs, "num_return_sequences")
        if not isinstance(prompt, Prompt):
            return [self.generate(each, max_new_tokens=max_new_tokens, **kwargs) for each in prompt]
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        with counted(self.model) as counter:
            listing = self.sorted(prompt, wanted)
            generation = self._reader.generate(
                listing.prompt, max_new_tokens=wanted, **{**kwargs, "num_return_sequences": 1}
            )
        return with_cost(listing.translated(generation), counter.cost)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> Scores:
        """Sort, then score candidates; with what it cost."""
        with counted(self.model) as counter:
            listing = self.sorted(prompt, longest_of(candidates, self.tokenizer))
            scores = self._reader.score(listing.prompt, candidates)
        return Scores(scores, counter.cost)
