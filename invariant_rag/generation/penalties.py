"""OpenAI's penalties of tokens that an answer has already; transformers has one for prompt and answer together only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LogitsProcessor


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
