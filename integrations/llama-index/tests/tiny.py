"""A tiny model whose chat template knows tools; LLMs that show every bit, and that write a given text."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from invariant_rag import InvariantModel
from transformers import LogitsProcessor, LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM

TEMPLATE = Path(__file__).with_name("tools.jinja").read_text(encoding="utf-8")
"""As many models have it: tools, calls, results in a role of their own, reasoning, and a variable."""


class EveryBit(LogitsProcessor):
    """Chooses each letter by a hash of the scores, so that an answer shows every bit in which two prompts differ."""

    def __init__(self, tokenizer: Any) -> None:
        letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
        self._letters = torch.tensor(tokenizer.encode(letters, add_special_tokens=False))

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> Any:
        digest = hashlib.sha256(scores.float().numpy().tobytes()).digest()
        chosen = torch.full_like(scores, float("-inf"))
        chosen[:, self._letters[digest[0] % len(self._letters)]] = 0.0
        return chosen


def local_llm(model: InvariantModel) -> InvariantLLM:
    processors = LogitsProcessorList([EveryBit(model.tokenizer)])
    return InvariantLLM(model, max_tokens=2, generation_kwargs={"logits_processor": processors})


class Writing(LogitsProcessor):
    """Makes a model write a text, as far as it may, and nothing more where `only`; it serves one call."""

    def __init__(self, lm: InvariantModel, text: str, *, only: bool = False) -> None:
        end = [lm.tokenizer.convert_tokens_to_ids("<eos>")] if only else []
        self.tokens = [*lm.tokenizer.encode(text, add_special_tokens=False), *end]
        self.start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.start = input_ids.shape[1] if self.start is None else self.start
        place = input_ids.shape[1] - self.start
        if place < len(self.tokens):
            scores = scores.clone()
            scores[0, self.tokens[place]] = scores.max() + 100
        return scores


def written(lm: InvariantModel, text: str) -> dict[str, Any]:
    """Return keywords with which one call writes a text and nothing more."""
    return {"logits_processor": [Writing(lm, text, only=True)], "eos_token_id": lm.tokenizer.eos_token_id}
