"""Prompt preparation: token ids in physical order, and the arrangement over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING

from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.errors import InvalidPrompt
from invariant_rag.generation.overflow import fit_segments
from invariant_rag.prompts import tokenize_in_slots, tokenize_prompt
from invariant_rag.prompts.labels import Labels, labels_of
from invariant_rag.prompts.literal_text import CUT
from invariant_rag.segments import Prompt, verdict

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.choices import ResolvedChoices


@dataclass(frozen=True)
class PreparedPrompt:
    """The model's input for a prompt.

    Attributes:
        input_ids: All tokens, in physical order.
        arrangement: Which keys each token attends to, and at which positions.
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
        return tuple([len(lengths) for lengths in self.arrangement.layout.sets if lengths])

    @property
    def positions(self) -> tuple[int, ...]:
        """Rotary position of each token."""
        return self.arrangement.positions

    @cached_property
    def is_natural(self) -> bool:
        """Whether the position of each token is its index."""
        return self.arrangement.positions == tuple(range(len(self.input_ids)))

    @property
    def suffix_length(self) -> int:
        """Number of tokens of the suffix, the last text."""
        return self.arrangement.layout.texts[-1]


def prepare(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, choices: ResolvedChoices, new_tokens: int = 0
) -> PreparedPrompt:
    """Tokenise a prompt, sort its segments into physical order, fit it into the context window, and arrange it.

    For an ordering by content, permuting the segments of a set changes `order`, `dropped` and `trimmed` (indices into
    the input), and nothing else.

    Args:
        prompt: The prompt.
        tokenizer: The model's tokenizer. None: the prompt consists of token ids.
        choices: Method, ordering, and token limits.
        new_tokens: Tokens to reserve for the answer.

    Raises:
        InvalidPrompt: The prompt has no token.
        ContextOverflow: The prompt is too long and the overflow strategy cannot shorten it.
    """
    tokens = tokenize_prompt(prompt, tokenizer)
    query = _query(prompt, tokenizer)
    ranks = [choices.ordering.rank(candidates, query) for candidates in tokens.sets]
    ranked_ids = [
        [candidates[i].token_ids for i in rank]
        if segments.slots is None
        else tokenize_in_slots(segments, rank, tokenizer)
        for segments, candidates, rank in zip(prompt.sets, tokens.sets, ranks, strict=True)
    ]
    lengths = fit_segments(
        [list(map(len, each)) for each in ranked_ids],
        choices.overflow,
        window=choices.context_window,
        max_segment_tokens=choices.max_segment_tokens,
        text_tokens=sum(map(len, tokens.texts)),
        new_tokens=new_tokens,
        shares_positions=choices.method.shares_positions,
    )
    input_ids = list(tokens.texts[0])
    order: list[int] = []
    dropped: list[int] = []
    trimmed: list[int] = []
    layout, offset = [], 0
    for rank, ranked, kept_lengths, text in zip(ranks, ranked_ids, lengths, tokens.texts[1:], strict=True):
        kept: list[tuple[int, ...]] = []
        for index, ids, length in reversed(list(zip(rank, ranked, kept_lengths, strict=True))):
            if ids and not length:
                dropped.append(offset + index)
                continue
            if length < len(ids):
                trimmed.append(offset + index)
            order.append(offset + index)
            kept.append(ids[:length])
        layout.append(tuple(map(len, kept)))
        input_ids += chain.from_iterable([*kept, text])
        offset += len(rank)
    if not input_ids:
        raise InvalidPrompt("expected at least one token, got an empty prompt")
    in_slots = any(map(attrgetter("slots"), prompt.sets))
    return PreparedPrompt(
        input_ids=tuple(input_ids),
        arrangement=choices.method.arrange(Layout(texts=tuple(map(len, tokens.texts)), sets=tuple(layout))),
        order=tuple(order),
        dropped=tuple(sorted(dropped)),
        trimmed=tuple(sorted(trimmed)),
        method=choices.method.name,
        labels=labels_of([(each, rank[::-1]) for each, rank in zip(prompt.sets, ranks, strict=True)])
        if in_slots
        else {},
        invariant=verdict(map(len, ranks), sorts=choices.ordering.invariant),
    )


def _query(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """Return the query for relevance orderings: the prompt's query, or its last text."""
    if prompt.query is not None:
        return prompt.query
    if isinstance(prompt.suffix, str):
        return prompt.suffix.replace(CUT, "")
    return "" if tokenizer is None else str(tokenizer.decode(list(prompt.suffix)))
