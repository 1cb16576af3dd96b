"""A model's own logits for a mask and positions that are written down from a paper, for methods that are a mask."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel


def masked_logits(
    model: PreTrainedModel, ids: Sequence[int], positions: Sequence[int], sees: Callable[[int, int], bool]
) -> torch.Tensor:
    """All logits `[tokens, vocabulary]`, where token `i` sees token `j` if `sees(i, j)`."""
    mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64)
    for query, key in itertools.product(range(len(ids)), repeat=2):
        if sees(query, key):
            mask[query, key] = 0.0
    options = {"position_ids": torch.tensor([positions]), "attention_mask": mask[None, None], "use_cache": False}
    logits: torch.Tensor = model(torch.tensor([ids]), **options).logits[0]
    return logits


def answer_gradients(model: PreTrainedModel, logits: torch.Tensor, answer: Sequence[int]) -> list[torch.Tensor]:
    """The gradient of the loss on an answer at the end, at every weight."""
    loss = cross_entropy(logits[-len(answer) - 1 : -1], torch.tensor(answer))
    return list(torch.autograd.grad(loss, list(model.parameters())))
