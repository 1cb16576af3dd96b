"""Split long texts into chunks of equally many tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from invariant_rag.errors import TokenizerRequired

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def token_starts(text: str, tokenizer: PreTrainedTokenizerBase | None) -> list[int]:
    """Return the character offset at which each token of a text starts.

    Raises:
        TokenizerRequired: There is no tokenizer, or it is not a fast one, which knows the offsets of its tokens.
    """
    if tokenizer is None or not tokenizer.is_fast:
        raise TokenizerRequired("this benchmark counts tokens: it needs a model with a fast tokenizer")
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    return [start for start, _ in encoded["offset_mapping"]]


def split_into_chunks(text: str, starts: list[int], tokens: int, limit: int) -> list[str]:
    """Split the first `limit` tokens of a text into chunks of `tokens` tokens. Joined, the chunks are that text.

    >>> split_into_chunks("one two three", [0, 3, 7], tokens=2, limit=3)
    ['one two', ' three']
    """
    ends = [*starts, len(text)]
    count = min(limit, len(starts))
    bounds = [*range(0, count, tokens), count]
    return [text[ends[low] : ends[high]] for low, high in pairwise(bounds)]
