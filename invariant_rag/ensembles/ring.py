"""Ring averaging: one prefill of the segments, several cuts of their ring."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from invariant_rag.arrangement import Layout
from invariant_rag.attention.rope import has_dynamic_rope
from invariant_rag.ensembles.base import Ensemble, at_least_one, unrouted, with_cost
from invariant_rag.ensembles.cost import EnsembleGeneration, Scores, counted
from invariant_rag.ensembles.permutations import one_text
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.decode import decode
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import generation_options, resolve_max_new_tokens
from invariant_rag.generation.outputs import to_generations
from invariant_rag.generation.padding import batch_caches
from invariant_rag.generation.prefix_cache import prompt_prefix
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.methods import RoToR
from invariant_rag.segments import Prompt


class RingAverage(Ensemble):
    """Prefill the segments once with RoToR, and average the suffix's log-probabilities over several cuts of the ring.

    In RoToR only the suffix depends on where the ring is cut: for every segment it is cut behind that segment. So one
    prefill serves every cut, with the keys of each segment rotated to where the cut puts it. The result is that of
    `PermutationAverage` over the same rotations, for one prefill instead of one for each.

    Args:
        lm: A model with the method `rotor`.
        cuts: How many cuts, evenly spaced; a ring has no more than it has segments. None: all of them.

    Raises:
        UnsupportedCombination: The method is another one, or the model has a sliding window, rotary frequencies that
            grow with the prompt, or routing.
        InvalidChoice: `cuts` is below 1.
    """

    def __init__(self, lm: InvariantModel, cuts: int | None = None) -> None:
        if not isinstance(lm.method, RoToR):
            raise UnsupportedCombination(
                f"expected the method 'rotor', whose segments form a ring, got {lm.method.name!r}"
            )
        if _has_window(lm.model):
            raise UnsupportedCombination(
                "expected a model that sees its whole context: a sliding window sees another part of it at every cut",
                hint="Use PermutationAverage.",
            )
        if has_dynamic_rope(lm.model):
            raise UnsupportedCombination(
                "expected rotary frequencies that do not depend on the length of the prompt: this model's grow with it",
                hint="Use PermutationAverage.",
            )
        super().__init__(unrouted(lm))
        self.cuts = at_least_one("cuts", cuts)

    def generate(self, prompt: Prompt, *, max_new_tokens: int | None = None, **kwargs: Any) -> EnsembleGeneration:
        """Generate greedily: at every step, the token with the largest mean log-probability.

        Args:
            prompt: The prompt.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            **kwargs: As for `InvariantModel.generate`, but for what makes several texts of one prompt.

        Raises:
            UnsupportedCombination: Sampling, beams or a streamer were asked for.
        """
        options = generation_options(one_text(kwargs), self.model, self.tokenizer)
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        with counted(self.model) as counter, self.lm.prefiller.exclusive():
            prepared = self.lm.prepare_to_generate(prompt, wanted)
            cache, count = self._cut(prepared)
            ids = torch.tensor([prepared.input_ids] * count, device=self.lm.device)
            decoded = decode(self.model, ids, torch.ones_like(ids), cache, wanted, options)
            rows = to_generations(decoded, [prepared] * count, [0] * count, self.tokenizer, options)
        logprobs = tuple(math.fsum(column) / count for column in zip(*(row.logprobs for row in rows), strict=True))
        return with_cost(replace(rows[0], logprobs=logprobs), counter.cost)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> Scores:
        """Return the mean log-probability of each candidate over the cuts, and what it cost."""
        options = self.lm.candidate_ids(candidates)
        with counted(self.model) as counter, self.lm.prefiller.exclusive():
            prepared = self.lm.prepare_to_generate(prompt, max(map(len, options), default=0))
            cache, count = self._cut(prepared)
            start, totals = len(prepared.input_ids) - prepared.suffix_length, []
            for option in options:
                ids = torch.tensor([[*prepared.input_ids[start:], *option]] * count, device=self.lm.device)
                logits = self.model(input_ids=ids, past_key_values=cache, use_cache=True).logits
                logprobs = torch.log_softmax(logits[:, -len(option) - 1 : -1].float(), dim=-1)
                chosen = torch.tensor(option, device=ids.device).expand(count, -1)
                totals.append(float(logprobs.gather(2, chosen[..., None]).double().sum()) / count)
                cache.crop(-ids.shape[1])
        return Scores(totals, counter.cost)

    def _cut(self, prepared: PreparedPrompt) -> tuple[DynamicCache, int]:
        """Prefill everything before the last text, and return its keys and values for every cut, as one batch."""
        prefix = prompt_prefix(prepared, self.lm.method)
        if not prefix.input_ids:
            return DynamicCache(), 1
        prefilled = self.lm.prefiller.prefill_uncached(prefix)
        layout = prefix.arrangement.layout
        every = max(map(len, layout.sets), default=1) or 1
        count = every if self.cuts is None else min(self.cuts, every)
        shifts = [_shifts(layout, cut, count) for cut in range(count)]
        cache = DynamicCache()
        layers: list[Any] = batch_caches([prefilled], [0], count).layers
        for index, layer in enumerate(layers):
            keys = layer.keys
            rotation, reach = self.lm.prefiller.rotations[index], layout.length + 1
            rotated = [
                rotation.rotate_each(keys[cut], by.to(keys.device), reach).to(keys.dtype)
                for cut, by in enumerate(shifts)
            ]
            cache.update(torch.stack(rotated), layer.values, index)
        return cache, count


def _has_window(model: PreTrainedModel) -> bool:
    """Return whether some layer has a sliding window."""
    config = model.config.get_text_config(decoder=True)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
    return getattr(config, "sliding_window", None) is not None and "sliding_attention" in kinds


def _shifts(layout: Layout, cut: int, count: int) -> torch.Tensor:
    """Return the shift of each token of a prompt when the ring of every set is cut at one of `count` places `[T]`."""
    shifts = torch.zeros(layout.length, dtype=torch.long)
    for spans in layout.set_spans:
        first = cut * len(spans) // count
        order = [*range(first, len(spans)), *range(first)]
        starts = accumulate((len(spans[i]) for i in order), initial=spans[0].start if spans else 0)
        for i, start in zip(order, starts, strict=False):
            shifts[spans[i].start : spans[i].stop] = start - spans[i].start
    return shifts
