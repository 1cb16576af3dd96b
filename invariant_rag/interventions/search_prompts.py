"""Texts of the dimension search: look up one of many random keys, and random characters (arXiv 2406.02536)."""

from __future__ import annotations

import random
import string
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invariant_rag.errors import ContextOverflow, TokenizerRequired

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHARACTERS = string.ascii_letters + string.digits + "!#$%&'()*+,./:;<>?@[\\]^_{|}"
"""The characters of `corpus/random_string.txt` of PositionalHidden/PositionalHidden."""
_CHARACTERS_PER_TOKEN = 10
_KEY_CHARACTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True)
class Example:
    """Token ids of a prompt and of its expected answer."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


def uuid_examples(
    tokenizer: PreTrainedTokenizerBase, count: int = 100, *, pairs: int = 50, window: int | None = None, seed: int = 0
) -> list[Example]:
    """Return chat prompts that ask for the value of one UUID in a JSON object, as the published code validates with.

    Source: `experiments/search_dimension` of PositionalHidden/PositionalHidden at f3bcd55: `eval_on_valid_set.py`, and
    the valid sets, which have 50 pairs in a prompt and ask for those at 25, 50 and 75 per cent.

    Args:
        tokenizer: The model's tokenizer, with a chat template.
        count: Number of prompts.
        pairs: Key-value pairs in each prompt; reduced to fit the context window.
        window: Maximum number of tokens of prompt and answer together. None: no limit.
        seed: Seed of the random keys and values.

    Raises:
        TokenizerRequired: The tokenizer has no chat template.
        ContextOverflow: Two pairs do not fit.
    """
    if not tokenizer.chat_template:
        raise TokenizerRequired(
            f"expected a tokenizer with a chat template, got {tokenizer.name_or_path!r} without one",
            hint="Set tokenizer.chat_template, or use the procedure 'averaged'.",
        )
    return _fit(
        lambda source, fitting, index: _uuid_example(tokenizer, source, fitting, (fitting - 1) * (1 + index % 3) // 4),
        count,
        pairs,
        window,
        seed,
    )


def _uuid_example(tokenizer: PreTrainedTokenizerBase, source: random.Random, pairs: int, target: int) -> Example:
    keys, values = ([str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(pairs)] for _ in range(2))
    listed = ",\n ".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
    asked = (
        "Extract the value corresponding to the specified key in the JSON object below.\n\n"
        f'JSON data:\n{{{listed}}}\n\nKey: "{keys[target]}"\nCorresponding value:'
    )
    messages = [{"role": "user", "content": asked}]
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    prompt = tokenizer(rendered, add_special_tokens=False).input_ids
    answer = tokenizer(values[target], add_special_tokens=False).input_ids
    return Example(tuple(prompt), tuple(answer))


def _fit(
    make: Callable[[random.Random, int, int], Example], count: int, pairs: int, window: int | None, seed: int
) -> list[Example]:
    """Return `count` examples of `make(source, pairs, index)`, with as many pairs as fit the context window."""
    while True:
        source = random.Random(seed)
        examples = [make(source, pairs, index) for index in range(count)]
        longest = max((len(each.prompt) + len(each.answer) for each in examples), default=0)
        if window is None or longest <= window:
            return examples
        if pairs <= 2:
            raise ContextOverflow(f"expected a context window that fits two key-value pairs, got {window} tokens")
        pairs = max(2, min(pairs - 1, pairs * window // longest))


def key_value_examples(
    tokenizer: PreTrainedTokenizerBase,
    count: int = 100,
    *,
    pairs: int = 50,
    window: int | None = None,
    seed: int = 0,
) -> list[Example]:
    """Return plain prompts with keys of 12 characters, shaped as in appendix B, asked at evenly spread positions.

    Args:
        tokenizer: The model's tokenizer.
        count: Number of prompts.
        pairs: Key-value pairs in each prompt; reduced to fit the context window.
        window: Maximum number of tokens of prompt and answer together. None: no limit.
        seed: Seed of the random strings.

    Raises:
        ContextOverflow: Two pairs do not fit.
    """
    return _fit(
        lambda source, fitting, index: _example(tokenizer, source, fitting, index * fitting // count),
        count,
        pairs,
        window,
        seed,
    )


def _example(tokenizer: PreTrainedTokenizerBase, random_state: random.Random, pairs: int, target: int) -> Example:
    keys, values = (["".join(random_state.choices(_KEY_CHARACTERS, k=12)) for _ in range(pairs)] for _ in range(2))
    listed = "\n".join(f'"{key}": "{value}"' for key, value in zip(keys, values, strict=True))
    prompt = tokenizer(f'Keys and their values:\n{listed}\nThe value of the key "{keys[target]}" is "').input_ids
    answer = tokenizer(values[target], add_special_tokens=False).input_ids
    return Example(tuple(prompt), tuple(answer))


def random_texts(
    tokenizer: PreTrainedTokenizerBase, length: int = 1000, count: int = 200, seed: int = 0
) -> list[list[int]]:
    """Return the token ids of texts, without special tokens, in which a hidden value can only follow the position.

    They are cut as in `get_avg_hidden_state.py` of the published code.

    Args:
        tokenizer: The model's tokenizer.
        length: Most tokens in a text; each is cut from ten times as many characters.
        count: Number of texts.
        seed: Seed of the characters.
    """
    source = random.Random(seed)
    texts = ("".join(source.choices(CHARACTERS, k=length * _CHARACTERS_PER_TOKEN)) for _ in range(count))
    return [tokenizer(text, add_special_tokens=False, verbose=False).input_ids[:length] for text in texts]
