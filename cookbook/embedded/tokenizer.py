"""Train the tokenizer: a byte-level BPE, and the chat template that goes with it.

Every text that is tokenised on its own gets a leading space, and decoding takes it away again. So a name has the same
tokens in the middle of a document, at the start of an answer, and alone as a candidate to be scored.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from names import Names
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from world import make_context

END = "<|end|>"
SPECIALS = ["<|endoftext|>", END, "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY = 3072
SYSTEM = "Answer the question using only the documents."
PREFIX = f"<|system|>{SYSTEM}<|end|><|user|>"
SUFFIX = "\nQuestion: {question}<|end|><|assistant|>"
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}"
)


def texts(count: int, seed: int) -> Iterator[str]:
    """Yield the texts of made-up contexts."""
    yield from ["Query: Document: Relevant: true", "Query: Document: Relevant: false"] * 500
    names = Names(random.Random(f"tokenizer-{seed}"), strange=0.03)
    for _ in range(count):
        context = make_context(names, documents=6, questions=6)
        yield from (document.render() for document in context.documents)
        yield from (SUFFIX.format(question=question.text) + question.answer for question in context.questions)


def train_tokenizer(seed: int = 0) -> Tokenizer:
    """Train the tokenizer on made-up contexts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(content=" ", left=1, right=0)])
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts(6000, seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write the files that `AutoTokenizer` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "TokenizersBackend",
        "model_max_length": 4096,
        "bos_token": None,
        "eos_token": END,
        "pad_token": "<|endoftext|>",
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
