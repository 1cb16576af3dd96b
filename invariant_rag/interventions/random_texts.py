"""Texts of random characters, in which a hidden value can follow nothing but the position."""

from __future__ import annotations

import random
import string
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = string.ascii_letters + string.digits + "!#$%&'()*+,./:;<>?@[\\]^_{|}"
"""The characters of `corpus/random_string.txt` of PositionalHidden/PositionalHidden."""
_CHARACTERS_PER_TOKEN = 10


def random_texts(
    tokenizer: PreTrainedTokenizerBase, length: int = 1000, count: int = 200, seed: int = 0
) -> list[list[int]]:
    """Return the token ids of random texts, without special tokens, cut as in `get_avg_hidden_state.py` of that code.

    Args:
        tokenizer: The model's tokenizer.
        length: Most tokens in a text; each is cut from ten times as many characters.
        count: Number of texts.
        seed: Seed of the characters.
    """
    source = random.Random(seed)
    texts = ("".join(source.choices(CHARACTERS, k=length * _CHARACTERS_PER_TOKEN)) for _ in range(count))
    return [tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:length] for text in texts]
