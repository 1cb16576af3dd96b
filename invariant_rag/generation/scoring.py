"""Scoring: log-probabilities of given continuations after one prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from invariant_rag.generation.padding import batch_caches

if TYPE_CHECKING:
    from invariant_rag.generation.prefill import Prefiller
    from invariant_rag.generation.prepare import PreparedPrompt
    from invariant_rag.segments import TokenIds


def score_continuations(
    prefiller: Prefiller, prepared: PreparedPrompt, continuations: Sequence[TokenIds]
) -> list[float]:
    """Return the log-probability of each continuation of a prompt, computed in one batch.

    Args:
        prefiller: Prefills the prompt.
        prepared: The prompt.
        continuations: Token ids, at least one continuation and at least one token each.
    """
    logits = continuation_logits(prefiller, prepared, continuations)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    return [
        float(logprobs[row, torch.arange(len(each)), torch.tensor(each)].double().sum())
        for row, each in enumerate(continuations)
    ]


def continuation_logits(
    prefiller: Prefiller, prepared: PreparedPrompt, continuations: Sequence[TokenIds]
) -> torch.Tensor:
    """Return the logits that predict every token of each continuation: `[continuations, longest, vocabulary]`.

    Shorter continuations are padded; what is beyond their end means nothing. Arguments are as for
    `score_continuations`.
    """
    longest, last = max(map(len, continuations)), prepared.input_ids[-1]
    rows = [[last, *each[:-1]] + [each[-1]] * (longest - len(each)) for each in continuations]
    (prefilled,) = prefiller.prefill([prepared])
    cache = batch_caches([prefilled.cache], [0], len(rows))
    ids = torch.tensor(rows, device=prefiller.device)
    first = prepared.positions[-1]
    positions = torch.arange(first, first + longest, device=ids.device).expand(len(rows), -1)
    with prefiller.decoding_attention([prefilled.state]):
        options = prefiller.position_ids(positions)
        output = prefiller.model(input_ids=ids, past_key_values=cache, use_cache=True, **options)
    logits: torch.Tensor = output.logits
    return logits
