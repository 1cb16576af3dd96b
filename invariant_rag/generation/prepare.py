"""Prompt preparation: token ids in physical order, and the arrangement over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.errors import InvalidPrompt
from invariant_rag.generation.overflow import TokenLimits
from invariant_rag.methods import Method
from invariant_rag.orderings import Ordering
from invariant_rag.prompts import tokenize_in_slots, tokenize_prompt
from invariant_rag.prompts.labels import Labels, labels_of
from invariant_rag.prompts.literal_text import CUT
from invariant_rag.segments import Prompt, SegmentSet, verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedPrompt:
    """The model's input for a prompt.

    Attributes:
        input_ids: All tokens, in physical order.
        arrangement: Which keys each token sees, and at which positions.
        order: Physical order of the segments, farthest from the suffix first: indices into `prompt.segments`.
        dropped: Segments that were dropped because the prompt was too long.
        trimmed: Segments that were truncated because the prompt was too long.
        method: Name of the method.
        labels: Which segment has which label, such as the 2 of `[2]`; see `prompts.labels`.
        invariant: Whether the input is the same for every order of the segments; see `segments.verdict`.
    """

    input_ids: tuple[int, ...]
    arrangement: Arrangement
    order: tuple[int, ...]
    dropped: tuple[int, ...]
    trimmed: tuple[int, ...]
    method: str
    labels: Labels
    invariant: bool | None

    @property
    def sets(self) -> tuple[int, ...]:
        """Number of segments of each set, without those that were dropped."""
        return tuple(len(lengths) for lengths in self.arrangement.layout.sets if lengths)

    @property
    def positions(self) -> tuple[float, ...]:
        """Rotary position of each token."""
        return self.arrangement.positions

    @cached_property
    def is_natural(self) -> bool:
        """Whether the position of each token is its index."""
        return self.positions == tuple(range(len(self.input_ids)))

    @property
    def suffix_length(self) -> int:
        """Number of tokens of the suffix, the last text."""
        return self.arrangement.layout.texts[-1]


def prepare(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    method: Method,
    ordering: Ordering,
    limits: TokenLimits,
    new_tokens: int,
) -> PreparedPrompt:
    """Tokenise a prompt, sort its segments into physical order, fit it into the context window, and arrange it.

    For an ordering by content, permuting the segments of a set changes `order`, `dropped` and `trimmed` (indices into
    the input), and nothing else.

    Args:
        prompt: The prompt.
        tokenizer: The model's tokenizer. None: the prompt consists of token ids.
        method: Arranges the segments.
        ordering: Ranks the segments.
        limits: Context window, segment limit and overflow strategy.
        new_tokens: Tokens to reserve for the answer.

    Raises:
        InvalidPrompt: The prompt has no token, or a source of a segment is not in its set.
        ContextOverflow: The prompt is too long and the overflow strategy cannot shorten it.
    """
    tokens = tokenize_prompt(prompt, tokenizer)
    query = _query(prompt, tokenizer)
    ranks = [ordering.rank(candidates, query) for candidates in tokens.sets]
    ranked_ids = [
        [candidates[i].token_ids for i in rank]
        if segments.slots is None
        else tokenize_in_slots(segments, rank, tokenizer)
        for segments, candidates, rank in zip(prompt.sets, tokens.sets, ranks, strict=True)
    ]
    fitted = limits.fit(sum(map(len, tokens.texts)), [list(map(len, each)) for each in ranked_ids], new_tokens)

    input_ids = list(tokens.texts[0])
    layout: list[tuple[int, ...]] = []
    sources: list[tuple[tuple[int, ...], ...]] = []
    drafts: list[tuple[int, ...]] = []
    order: list[int] = []
    dropped: list[int] = []
    trimmed: list[int] = []
    offset = 0
    for segments, rank, ranked, fitted_lengths, text in zip(
        prompt.sets, ranks, ranked_ids, fitted, tokens.texts[1:], strict=True
    ):
        kept: list[int] = []
        kept_ids: list[tuple[int, ...]] = []
        for index, ids, length in reversed(list(zip(rank, ranked, fitted_lengths, strict=True))):
            if ids and not length:
                dropped.append(offset + index)
                continue
            if length < len(ids):
                trimmed.append(offset + index)
            kept.append(index)
            kept_ids.append(ids[:length])
        order += (offset + index for index in kept)
        layout.append(tuple(map(len, kept_ids)))
        sources.append(_sources(segments, kept))
        drafts.append(tuple(method.drafts(sources[-1])))
        input_ids += chain.from_iterable([*(kept_ids[place] for place in drafts[-1]), *kept_ids, text])
        offset += len(rank)
    if not input_ids:
        raise InvalidPrompt("expected at least one token, got an empty prompt")
    arranged = Layout(
        texts=tuple(map(len, tokens.texts)),
        sets=tuple(layout),
        sources=tuple(sources) if any(chain.from_iterable(sources)) else (),
        drafts=tuple(drafts) if any(drafts) else (),
    )
    arrangement = method.arrange(arranged)
    return PreparedPrompt(
        input_ids=tuple(input_ids),
        arrangement=arrangement,
        order=tuple(order),
        dropped=tuple(sorted(dropped)),
        trimmed=tuple(sorted(trimmed)),
        method=method.name,
        labels=labels_of([(each, rank[::-1]) for each, rank in zip(prompt.sets, ranks, strict=True)]),
        invariant=verdict(map(len, prompt.sets), sorts=ordering.invariant),
    )


def _sources(segments: SegmentSet, kept: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return for each segment in memory the places of those that it builds on.

    Args:
        segments: The set.
        kept: The segments in memory, in physical order.

    Raises:
        InvalidPrompt: A source is not in the set.
    """
    if not any(segment.sources for segment in segments):
        return ((),) * len(kept)
    known = set(segments)
    missing = [source for segment in segments for source in segment.sources if source not in known]
    if missing:
        raise InvalidPrompt(
            f"expected the sources of a segment in its own set, got {missing[0]!r}",
            hint="A source is found by equality: put the same segment, with its title and metadata, into the set.",
        )
    return tuple(
        tuple(place for place, other in enumerate(kept) if segments[other] in segments[index].sources) for index in kept
    )


def _query(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the query for relevance orderings: the prompt's query, or its last text."""
    if prompt.query is not None:
        return prompt.query
    if isinstance(prompt.suffix, str):
        return prompt.suffix.replace(CUT, "")
    return "" if tokenizer is None else str(tokenizer.decode(list(prompt.suffix)))
