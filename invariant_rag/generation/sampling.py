"""Sampling in which every row of a batch has a random generator of its own, and so the tokens that it has alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.options import is_set, resolve_option

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}
"""What transformers' `generate` does where nobody says anything."""
_OTHERS = ("epsilon_cutoff", "eta_cutoff", "num_beams", "num_return_sequences", "top_h", "typical_p")


def samples_rows(options: Mapping[str, Any], model: PreTrainedModel) -> bool:
    """Return whether `sample_rows` takes options of `generate`: tokens are sampled, in ways that it knows."""
    defaults = model.generation_config
    known = not any(is_set(resolve_option(options, name, defaults)) for name in _OTHERS)
    known = known and options.get("generation_config") is None and options.get("watermarking_config") is None
    return known and bool(resolve_option(options, "do_sample"))


def sample_rows(options: dict[str, Any], seeds: Sequence[int | None], model: PreTrainedModel) -> dict[str, Any]:
    """Return options of transformers' `generate` with which every row draws its tokens by itself.

    Args:
        options: From `generation_options`.
        seeds: The seed of each row. None: one from the global random state.
        model: The model.

    Raises:
        UnsupportedCombination: There are several seeds, and nothing or something else is sampled.
    """
    if not samples_rows(options, model):
        raise UnsupportedCombination(
            "expected sampling by temperature, top_k, top_p and min_p with a seed for each prompt",
            hint="Give one seed, or set do_sample=True and leave other ways of sampling away.",
        )
    chosen = {name: resolve_option(options, name, model.generation_config) for name in _DEFAULTS}
    chosen = {name: _DEFAULTS[name] if value is None else value for name, value in chosen.items()}
    sampler = RowSampler(seeds, **chosen)
    return {
        **{name: value for name, value in options.items() if name not in _DEFAULTS},
        "do_sample": False,
        "logits_processor": LogitsProcessorList([*(options.get("logits_processor") or ()), sampler]),
    }


class RowSampler(LogitsProcessor):
    """Draws a token for each row, and leaves nothing else to choose.

    Args:
        seeds: The seed of each row. None: one from the global random state.
        temperature: As in transformers, as the others.
        top_k: 0: all tokens.
        top_p: 1: all tokens.
        min_p: None: all tokens.
    """

    def __init__(
        self,
        seeds: Sequence[int | None],
        *,
        temperature: float,
        top_k: int,
        top_p: float,
        min_p: float | None,
    ) -> None:
        self._seeds = [int(torch.randint(1 << 62, ())) if seed is None else seed for seed in seeds]
        self._generators: list[torch.Generator] = []
        self._warpers = LogitsProcessorList()  # in the order of transformers
        if temperature != 1:
            self._warpers.append(TemperatureLogitsWarper(temperature))
        if top_k:
            self._warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self._warpers.append(TopPLogitsWarper(top_p))
        if min_p is not None:
            self._warpers.append(MinPLogitsWarper(min_p))

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]`: 0 for the token that was drawn, minus infinity for the others."""
        if not self._generators:
            self._generators = [torch.Generator(scores.device).manual_seed(seed) for seed in self._seeds]
        weighed: Any = self._warpers(input_ids, scores)  # type: ignore[arg-type]
        chances = torch.softmax(weighed, dim=-1)
        drawn = [
            torch.multinomial(chances[row : row + 1], 1, generator=generator)
            for row, generator in enumerate(self._generators)
        ]
        return torch.full_like(scores, -torch.inf).scatter(1, torch.cat(drawn), 0.0)
