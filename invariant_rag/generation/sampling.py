"""Logits processors for batches: rows that sample with random generators of their own, and OpenAI's penalties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    """Return keywords of `InvariantModel.generate` with which every row draws its tokens by itself.

    Args:
        options: Keywords of `InvariantModel.generate` that `samples_rows`.
        seeds: The seed of each row. None: one from the global random state.
        model: The model.
    """
    chosen = {name: resolve_option(options, name, model.generation_config) for name in _DEFAULTS}
    chosen = {name: _DEFAULTS[name] if value is None else value for name, value in chosen.items()}
    sampler = RowSampler(seeds, **chosen)
    return {
        **{name: value for name, value in options.items() if name not in ("seed", *_DEFAULTS)},
        "do_sample": False,
        "logits_processor": [*(options.get("logits_processor") or ()), sampler],
    }


class RowSampler(LogitsProcessor):
    """Draws a token for each row, and leaves nothing else to choose. The options are those of transformers.

    Of a row without a seed, it is one from the global random state.
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


@dataclass(unsafe_hash=True)
class TokenPenalties(LogitsProcessor):
    """Takes `presence`, and `frequency` for each time, from the scores of tokens that were generated before.

    Two with the same numbers are equal, so that their texts can be rows of one batch. Of beams it knows nothing.

    Attributes:
        presence: What a token loses that the answer has: more than 0 for other words.
        frequency: What it loses each time that the answer has it.

    Source:
        https://platform.openai.com/docs/api-reference/chat/create (`presence_penalty`, `frequency_penalty`)
    """

    presence: float = 0.0
    frequency: float = 0.0
    _seen: torch.Tensor | None = field(default=None, init=False, repr=False, compare=False)
    _start: int = field(default=0, init=False, repr=False, compare=False)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]` after prompts and answers `[B, L]`."""
        seen, self._seen = self._seen, input_ids
        if seen is None or not torch.equal(input_ids[:, :-1], seen):
            self._start = input_ids.shape[1]
        counts = torch.zeros_like(scores)
        answered = input_ids[:, self._start :]
        counts.scatter_add_(1, answered, torch.ones_like(answered, dtype=scores.dtype))
        return scores - self.presence * (counts > 0) - self.frequency * counts

    def __deepcopy__(self, memo: dict[int, Any]) -> TokenPenalties:
        """Return one of answers that have not begun: a routed model writes two."""
        return TokenPenalties(self.presence, self.frequency)
