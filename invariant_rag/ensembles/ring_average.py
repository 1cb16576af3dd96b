"""Ring averaging: one prefill of the segments, averaged over several cuts of the ring."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from invariant_rag.arrangement import Layout
from invariant_rag.attention.per_model import cache_keyword, forward_parameters
from invariant_rag.checks import check_kind
from invariant_rag.ensembles.base import (
    Candidates,
    Ensemble,
    EnsembleGeneration,
    Scores,
    check_positive,
    count_cost,
    require_unrouted,
)
from invariant_rag.ensembles.permutations import averaging_options, mean_logprobs
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.decode import decode
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import generation_options
from invariant_rag.generation.prefill import batch_caches
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.methods import RoToR
from invariant_rag.segments import Prompt


class RingAverage(Ensemble[EnsembleGeneration]):
    """Prefill the segments once with RoToR, and average the suffix's log-probabilities over several cuts of the ring.

    In RoToR only the suffix depends on where the ring is cut. So one prefill serves all cuts: the keys of each segment
    are rotated to its position in the cut. The result equals `PermutationAverage` over the same rotations, which needs
    one prefill per rotation. Decoding is greedy.

    Args:
        lm: A model with the method `rotor`.
        cuts: Number of evenly spaced cuts, at most the number of segments. None: one per segment.

    Raises:
        UnsupportedCombination: The method is not `rotor`, or the model has a sliding window, ALiBi, rotary frequencies
            that depend on the prompt length, or routing; or, in `generate`, sampling, beams or a streamer.
        InvalidChoice: `cuts` is below 1.
    """

    def __init__(self, lm: InvariantModel, cuts: int | None = None) -> None:
        check_kind("lm", lm, InvariantModel)
        if not isinstance(lm.method, RoToR):
            raise UnsupportedCombination(
                f"expected the method 'rotor', whose segments form a ring, got {lm.method.name!r}"
            )
        unfit = {
            "a model that attends to its whole context, got one with a sliding window, which would cover other tokens "
            "for every cut": _has_sliding_window(lm.model),
            "rotary frequencies that do not depend on the prompt length; this model's grow with it": (
                lm.prefiller.shared.has_dynamic_rope
            ),
            "a model with rotary positions, whose cached keys can be moved, got one with ALiBi, whose own attention "
            "takes the index of a key for its position": lm.prefiller.shared.has_alibi,
        }
        for expected, is_unfit in unfit.items():
            if is_unfit:
                raise UnsupportedCombination(f"expected {expected}", hint="Use PermutationAverage.")
        super().__init__(require_unrouted(lm))
        self.cuts = check_positive("cuts", cuts)

    def _generate_one(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> EnsembleGeneration:
        options = generation_options(averaging_options(options), self.model, self.tokenizer, stock_decoding=True)
        with self.lm.prefiller.exclusive():
            prepared = self.lm.prepare_to_generate(prompt, max_new_tokens)
            cache, count = self._prefill_cuts(prepared)
            rows = decode(self.model, self.tokenizer, [prepared] * count, cache, max_new_tokens, options)
        return EnsembleGeneration.extend(replace(rows[0], logprobs=mean_logprobs(rows)))

    def score(self, prompt: Prompt, candidates: Candidates) -> Scores:
        """Return the mean log-probability of each candidate over the cuts, and the cost."""
        options = self.lm.candidate_ids(candidates)
        with count_cost(self.model) as counter, self.lm.prefiller.exclusive():
            prepared = self.lm.prepare_to_generate(prompt, max(map(len, options), default=0))
            cache, count = self._prefill_cuts(prepared)
            start, totals = len(prepared.input_ids) - prepared.suffix_length, []
            name = cache_keyword(forward_parameters(self.model))
            for option in options:
                ids = torch.tensor([[*prepared.input_ids[start:], *option]] * count, device=self.lm.device)
                logits = self.model(input_ids=ids, **{name: cache}, use_cache=True).logits
                logprobs = torch.log_softmax(logits[:, -len(option) - 1 : -1].float(), dim=-1)
                chosen = torch.tensor(option, device=ids.device).expand(count, -1)
                totals.append(float(logprobs.gather(2, chosen[..., None]).double().sum()) / count)
                cache.crop(-ids.shape[1])
        return Scores(totals, counter.cost)

    def _prefill_cuts(self, prepared: PreparedPrompt) -> tuple[DynamicCache, int]:
        """Prefill everything before the suffix; return its cache with one row per cut, and the number of cuts."""
        prefix = prepared.prefix(self.lm.method)
        if not prefix.input_ids:
            return DynamicCache(), 1
        prefilled = self.lm.prefiller.prefill_uncached([prefix])[0].cache
        layout = prefix.arrangement.layout
        largest = max(map(len, layout.sets), default=1) or 1
        count = largest if self.cuts is None else min(self.cuts, largest)
        shifts = [_shifts(layout, cut, count) for cut in range(count)]
        cache = DynamicCache()
        layers: list[Any] = batch_caches([prefilled], [0], count).layers
        for index, layer in enumerate(layers):
            keys = layer.keys
            rotation, reach = self.lm.prefiller.shared.rotations[index], layout.length + 1
            rotated = [
                rotation.rotate_each(keys[cut], shift.to(keys.device), reach).to(keys.dtype)
                for cut, shift in enumerate(shifts)
            ]
            cache.update(torch.stack(rotated), layer.values, index)
        return cache, count


def _has_sliding_window(model: PreTrainedModel) -> bool:
    config = model.config.get_text_config(decoder=True)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) is not None and "sliding_attention" in layer_types


def _shifts(layout: Layout, cut: int, count: int) -> torch.Tensor:
    """Return the position shift of each token `[T]` for cut number `cut` of `count`, applied to every set."""
    shifts = torch.zeros(layout.length, dtype=torch.long)
    for spans in layout.set_spans:
        first = cut * len(spans) // count
        order = [*range(first, len(spans)), *range(first)]
        starts = accumulate((len(spans[i]) for i in order), initial=spans[0].start if spans else 0)
        for i, start in zip(order, starts, strict=False):
            shifts[spans[i].start : spans[i].stop] = start - spans[i].start
    return shifts
