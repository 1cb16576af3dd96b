"""A model in this process and the same on vLLM, whose answers are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from invariant_rag import Generation, InvariantModel, Prompt, Segment
from invariant_rag.testing.rounding import rounding

from tests.documents import documents, question
from vllm_invariant_rag import VLLMBackend

LENGTH: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}

MOVED = 1e-4
"""How far log-probabilities may lie apart, whatever the answer's length. Rounding moves 160 tokens by up to 3.4e-5."""


def ask(lm: InvariantModel, segments: Sequence[Segment], asked: str | None = None) -> Prompt:
    return lm.chat_prompt(asked or question(list(segments)), list(segments))


def moved(ours: Generation, theirs: Generation) -> float:
    """How far log-probabilities are apart, where all else is the same. Another method moves them by 0.1 and more."""
    assert (ours.token_ids, ours.text) == (theirs.token_ids, theirs.text)
    assert (ours.finish_reason, ours.order) == (theirs.finish_reason, theirs.order)
    return max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True))


@dataclass(frozen=True)
class Pair:
    """The embedded model, with documents by `lexical`, here and on vLLM."""

    here: InvariantModel
    there: VLLMBackend

    def using(self, method: str, ordering: str = "lexical") -> Pair:
        here, there = (each.with_method(method, ordering=ordering) for each in (self.here, self.there))
        return replace(self, here=here, there=there)

    def prompt(self, seed: int, count: int = 6) -> Prompt:
        return ask(self.here, documents(count, seed))

    def most_moved(self, prompt: Prompt, **options: Any) -> float:
        """`MOVED`, but for APE, whose temperature multiplies rounding: its answers here are 1.4e-4 from float64's."""
        return rounding(self.here.generate, prompt, **options) if self.here.method.name == "ape" else MOVED

    def alike(self, *prompts: Prompt, **options: Any) -> list[Generation]:
        """All prompts at once on vLLM, and one by one here, give the same; 16 tokens, if nothing else is told."""
        options = {**LENGTH, **options}
        answers = self.there.generate(prompts, **options)
        for prompt, answer in zip(prompts, answers, strict=True):
            far = moved(answer, self.here.generate(prompt, **options))
            assert far < MOVED or far < self.most_moved(prompt, **options)
        return answers
