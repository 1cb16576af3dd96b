"""A byte-level tokenizer with a chat template, and random prompts, for tests without files."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from invariant_rag.segments import Prompt

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per byte, five special tokens and a ChatML template: 261 tokens in all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {name: index for index, name in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",  # noqa: S106
        bos_token="<bos>",  # noqa: S106
        eos_token="<eos>",  # noqa: S106
        chat_template=_CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def random_prompt(
    random_state: random.Random,
    lengths: Sequence[int],
    *,
    prefix: int = 3,
    suffix: int = 4,
    vocabulary: int = 128,
) -> Prompt:
    """Return a prompt of random token ids.

    Args:
        random_state: Random number generator.
        lengths: Tokens of each segment.
        prefix: Tokens before the set.
        suffix: Tokens after the set.
        vocabulary: Size of the vocabulary; the first three ids, which are often special tokens, are not used.
    """

    def ids(count: int) -> list[int]:
        return [random_state.randrange(3, vocabulary) for _ in range(count)]

    return Prompt(prefix=ids(prefix), segments=[ids(length) for length in lengths], suffix=ids(suffix))
