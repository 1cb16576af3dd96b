"""Prompt preparation: token ids in physical order, fitted into the context window, and the arrangement over them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, TypeAlias

from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.citation_labels import Labels, labels_of
from invariant_rag.errors import ContextOverflow, InvalidPrompt
from invariant_rag.generation.outputs import Generation, Usage
from invariant_rag.prompts import tokenize_in_slots, tokenize_prompt
from invariant_rag.prompts.tokenization import CUT
from invariant_rag.segments import Prompt, is_invariant

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.choices import ResolvedChoices
    from invariant_rag.methods import Method

Overflow: TypeAlias = Literal["error", "drop_last", "trim_segments"]

_OF_PROMPT = ("sets", "order", "dropped", "trimmed", "method", "labels", "invariant")  # what a generation has of it


@dataclass(frozen=True)
class PreparedPrompt:
    """The model's input for a prompt. What is not described here is as in `Generation`."""

    input_ids: tuple[int, ...]  # all tokens, in physical order
    arrangement: Arrangement  # which keys each token attends to, and at which positions
    order: tuple[int, ...]
    dropped: tuple[int, ...]
    trimmed: tuple[int, ...]
    method: str
    labels: Labels
    invariant: bool | None
    sets: tuple[int, ...]  # without those that were dropped

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

    def prefix(self, method: Method) -> PreparedPrompt:
        """Return the prompt without its suffix, as a method arranges it."""
        layout = self.arrangement.layout
        prefix = replace(layout, texts=(*layout.texts[:-1], 0))
        return replace(self, input_ids=self.input_ids[: prefix.length], arrangement=method.arrange(prefix))

    def generation(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: Literal["stop", "length"],
        cached_tokens: int = 0,
        top_logprobs: Sequence[tuple[tuple[int, float], ...]] = (),
    ) -> Generation:
        """Return the generation that tokens after this prompt are. Without a tokenizer, its text is empty."""
        return Generation(
            text="" if tokenizer is None else str(tokenizer.decode(list(token_ids), skip_special_tokens=True)),
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=finish_reason,
            usage=Usage(len(self.input_ids), len(token_ids), cached_tokens),
            top_logprobs=tuple(top_logprobs),
            **{name: getattr(self, name) for name in _OF_PROMPT},
        )


def prepare(
    prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, choices: ResolvedChoices, new_tokens: int = 0
) -> PreparedPrompt:
    """Tokenise a prompt, sort its segments into physical order, fit it into the context window, and arrange it.

    Law: for an ordering by content, permuting the segments of a set changes `order`, `dropped` and `trimmed` (indices
    into the input), and nothing else. Errors are those of `InvariantModel.prepare`.
    """
    tokens = tokenize_prompt(prompt, tokenizer)
    query, suffix = prompt.query, prompt.suffix
    if query is None and isinstance(suffix, str):
        query = suffix.replace(CUT, "")
    elif query is None:
        query = "" if tokenizer is None else str(tokenizer.decode(list(suffix)))  # type: ignore[arg-type]
    ranks, ranked_ids, ranked_lengths = [], [], []
    for segments, candidates in zip(prompt.sets, tokens.sets, strict=True):
        ranks.append(rank := choices.ordering.rank(candidates, query))
        by_rank = [candidates[i].token_ids for i in rank]
        ranked_ids.append(by_rank if segments.slots is None else tokenize_in_slots(segments, rank, tokenizer))
        ranked_lengths.append(list(map(len, ranked_ids[-1])))
    lengths = fit_segments(
        ranked_lengths,
        choices.overflow,
        window=choices.context_window,
        max_segment_tokens=choices.max_segment_tokens,
        text_tokens=sum(map(len, tokens.texts)),
        new_tokens=new_tokens,
        shares_positions=choices.method.shares_positions,
    )
    input_ids, offset = list(tokens.texts[0]), 0
    order, dropped, trimmed, sets = list[int](), list[int](), list[int](), list[tuple[int, ...]]()
    for rank, ranked, kept_lengths, text in zip(ranks, ranked_ids, lengths, tokens.texts[1:], strict=True):
        fitted: list[tuple[int, ...]] = []
        for index, ids, length in reversed(list(zip(rank, ranked, kept_lengths, strict=True))):
            if ids and not length:
                dropped.append(offset + index)
                continue
            if length < len(ids):
                trimmed.append(offset + index)
            order.append(offset + index)
            fitted.append(ids[:length])
        sets.append(tuple(map(len, fitted)))
        input_ids += chain.from_iterable([*fitted, text])
        offset += len(rank)
    if not input_ids:
        raise InvalidPrompt("expected at least one token, got an empty prompt")
    labels: Labels = {}
    if any(map(attrgetter("slots"), prompt.sets)):
        labels = labels_of([(each, rank[::-1]) for each, rank in zip(prompt.sets, ranks, strict=True)])
    return PreparedPrompt(
        input_ids=tuple(input_ids),
        arrangement=choices.method.arrange(Layout(texts=tuple(map(len, tokens.texts)), sets=tuple(sets))),
        order=tuple(order),
        dropped=tuple(sorted(dropped)),
        trimmed=tuple(sorted(trimmed)),
        method=choices.method.name,
        labels=labels,
        invariant=is_invariant(map(len, ranks), sorts=choices.ordering.invariant),
        sets=tuple(map(len, filter(None, sets))),
    )


def fit_segments(
    ranked: Sequence[Sequence[int]],
    overflow: Overflow,
    *,
    window: int | None = None,
    max_segment_tokens: int | None = None,
    text_tokens: int = 0,
    new_tokens: int = 0,
    shares_positions: bool = False,
) -> list[list[int]]:
    """Return the number of tokens to keep of each segment, in the shape of `ranked`; 0 drops a segment.

    `ranked` are the lengths of the segments of each set, in rank order (rank 0 first). The `window` is the most
    positions of prompt and answer together, of which `new_tokens` are reserved; None: no limit. If a set
    `shares_positions`, it takes as many as its longest segment, not as all of them. Then only the longest of a set
    count: of them, `drop_last` drops that of the lowest rank. ContextOverflow: the prompt is too long, and the strategy
    is `error` or the texts alone do not fit.
    """
    sets, limit, trims = list(map(list, ranked)), max_segment_tokens, overflow == "trim_segments"

    def within(most: int) -> list[list[int]]:
        return [[min(each, most) if trims or each <= most else 0 for each in lengths] for lengths in sets]

    if limit is not None and (longest := max(map(_longest, sets), default=0)) > limit:
        if overflow == "error":
            raise ContextOverflow(f"expected at most max_segment_tokens={limit} tokens in a segment, got {longest}")
        sets = within(limit)
    positions = _longest if shares_positions else sum
    total = sum(map(positions, sets))
    if window is None or total <= (available := window - text_tokens - new_tokens):
        return sets
    if overflow == "error" or available < 0:
        counted = "the longest of " * shares_positions + f"{sum(map(len, sets))} segments"
        raise ContextOverflow(
            f"expected at most {window} tokens, the model's context window; got {text_tokens + total} in "
            f"the prompt ({text_tokens} of text, {total} in {counted}) and {new_tokens} to generate"
        )
    if trims:  # to the largest common length at which they fit
        lengths = range(max(map(_longest, sets)) + 1)  # too long from some length on
        return within(bisect_right(lengths, available, key=lambda length: sum(map(positions, within(length)))) - 1)
    # What does not fit alone is dropped, then the lowest-ranked that counts, of the set that takes the most positions.
    sets = within(available)
    while sum(map(positions, sets)) > available:
        largest = max(sets, key=positions)
        at_least = 1 if positions is sum else positions(largest)
        largest[max(index for index, length in enumerate(largest) if length >= at_least)] = 0
    return sets


def _longest(lengths: Iterable[int]) -> int:
    return max(lengths, default=0)
