"""Key-value retrieval prompts: look up one of many random keys (arXiv 2406.02536, appendix B)."""

from __future__ import annotations

import random
import string
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invariant_rag.errors import ContextOverflow

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CHARACTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its expected answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def key_value_examples(
    tokenizer: PreTrainedTokenizerBase,
    count: int = 100,
    *,
    pairs: int = 50,
    length: int = 12,
    window: int | None = None,
    seed: int = 0,
) -> list[Example]:
    """Return prompts that ask for the value of one key; the positions of these keys are evenly spread.

    Args:
        tokenizer: The model's tokenizer.
        count: Number of prompts.
        pairs: Key-value pairs in each prompt; reduced to fit the context window.
        length: Characters of each key and value.
        window: Maximum number of tokens of prompt and answer together. None: no limit.
        seed: Seed of the random strings.

    Raises:
        ContextOverflow: Two pairs do not fit.
    """
    while True:
        random_state = random.Random(seed)
        examples = [_example(tokenizer, random_state, pairs, length, index * pairs // count) for index in range(count)]
        longest = max((len(each.prompt) + len(each.answer) for each in examples), default=0)
        if window is None or longest <= window:
            return examples
        if pairs <= 2:
            raise ContextOverflow(f"expected a context window that fits two key-value pairs, got {window} tokens")
        pairs = max(2, min(pairs - 1, pairs * window // longest))


def _example(
    tokenizer: PreTrainedTokenizerBase, random_state: random.Random, pairs: int, length: int, target: int
) -> Example:
    keys, values = (["".join(random_state.choices(_CHARACTERS, k=length)) for _ in range(pairs)] for _ in range(2))
    listed = "\n".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
    prompt = tokenizer(f'Keys and their values:\n{listed}\nThe value of the key "{keys[target]}" is "').input_ids
    answer = tokenizer(values[target], add_special_tokens=False).input_ids
    return Example(tuple(prompt), tuple(answer))
