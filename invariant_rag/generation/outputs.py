"""Generations, the results of `InvariantModel.generate`, and their ledgers. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Self

from invariant_rag.checks import check_kind
from invariant_rag.citation_labels import Labels
from invariant_rag.segments import Prompt


@dataclass(frozen=True)
class Usage:
    """Token counts of one generation; `cached_tokens` of the prompt were loaded from a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """A generated answer, with what became of the segments of its prompt."""

    text: str  # without special tokens, as the model wrote it; empty for a model without a tokenizer
    token_ids: tuple[int, ...]  # with the end-of-sequence token
    logprobs: tuple[float, ...]  # of each token under the model, before logits processors and temperature
    finish_reason: Literal["stop", "length"]  # at an end-of-sequence token or stop string, or at `max_new_tokens`
    usage: Usage
    order: tuple[int, ...]  # physical order, farthest from the suffix first: indices into `prompt.segments`
    dropped: tuple[int, ...] = ()  # segments dropped by `overflow="drop_last"`
    trimmed: tuple[int, ...] = ()  # segments truncated by `overflow="trim_segments"`
    sets: tuple[int, ...] = ()  # number of segments of each set
    method: str = ""  # its name
    labels: Labels = field(default_factory=dict)  # of a document in the prompt, such as the 2 of `[2]` -> its index
    invariant: bool | None = None  # whether the order of the segments could not change it; None without segments
    bitwise: bool = True  # False: some bits may depend on others of its batch, decoded without `deterministic=True`
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()  # the most likely ones in the place of each token

    @property
    def details(self) -> Mapping[str, Any]:
        """Further entries of the ledger: which branch a router took. Plain values."""
        return {}

    @classmethod
    def extend(cls, generation: Generation, **extra: Any) -> Self:
        """Return a generation as an instance of this subclass, with the fields that the subclass adds or changes."""
        check_kind("generation", generation, Generation)
        return cls(**{each.name: getattr(generation, each.name) for each in fields(Generation)} | extra)


def ledger(generation: Generation, prompt: Prompt, *, recognized: bool = True) -> dict[str, Any]:
    """Return the ledger of an answer: its documents, as plain values that do not depend on the input order.

    With `recognized=False`, not every document in the prompt is known to be a segment, so the answer may depend on the
    order in which the others were listed.

    Returns:
        `sets`: sizes of the sets; `order`: content hashes of all segments in physical order, farthest from the suffix
        first; `dropped` and `trimmed`: of those that did not fit; `cached_tokens`: tokens of the prompt that came from
        a cache; `method` and `invariant`, as in `Generation`; `bitwise`: only there where it is False; and `details`.
    """
    name_of = [each.content_hash for each in prompt.segments].__getitem__
    return {
        "sets": list(generation.sets),
        "order": list(map(name_of, generation.order)),
        "dropped": sorted(map(name_of, generation.dropped)),
        "trimmed": sorted(map(name_of, generation.trimmed)),
        "cached_tokens": generation.usage.cached_tokens,
        "method": generation.method,
        "invariant": generation.invariant if recognized else False,
        **({} if generation.bitwise else {"bitwise": False}),
        **generation.details,
    }
