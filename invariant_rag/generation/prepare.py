"""From a prompt to what the model reads: token ids in physical order, and an arrangement over them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.errors import InvalidPrompt
from invariant_rag.generation.overflow import TokenLimits
from invariant_rag.methods import Method
from invariant_rag.orderings import Ordering
from invariant_rag.prompts import tokenize_prompt
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class PreparedPrompt:
    """A prompt as the model reads it.

    Attributes:
        input_ids: All tokens, in memory order.
        arrangement: What every token sees.
        order: Physical order of the segments, farthest from the suffix first: indices into `prompt.segments`.
        dropped: Segments that were left out because the prompt was too long.
        trimmed: Segments that were shortened because the prompt was too long.
    """

    input_ids: tuple[int, ...]
    arrangement: Arrangement
    order: tuple[int, ...]
    dropped: tuple[int, ...]
    trimmed: tuple[int, ...]

    @property
    def positions(self) -> tuple[int, ...]:
        """Rotary position of every token."""
        return self.arrangement.positions

    @cached_property
    def is_natural(self) -> bool:
        """Whether every token's position is its index."""
        return self.positions == tuple(range(len(self.input_ids)))

    @property
    def suffix_length(self) -> int:
        """Tokens of the last text."""
        return self.arrangement.layout.texts[-1]


def prepare(
    prompt: Prompt,
    tokenizer: PreTrainedTokenizerBase | None,
    method: Method,
    ordering: Ordering,
    budget: TokenLimits,
    new_tokens: int,
) -> PreparedPrompt:
    """Tokenise a prompt, put its segments into physical order, make it fit, and arrange it.

    Law: for an ordering that reads contents only, permuting the segments of a set changes `order` and nothing else.

    Raises:
        InvalidPrompt: The prompt has no token.
        ContextOverflow: It is too long, and the budget allows no cut.
    """
    tokens = tokenize_prompt(prompt, tokenizer)
    query = _query(prompt, tokenizer)
    ranks = [ordering.rank(candidates, query) for candidates in tokens.sets]
    lengths = [[len(each[i].token_ids) for i in rank] for each, rank in zip(tokens.sets, ranks, strict=True)]
    kept = budget.fit(sum(map(len, tokens.texts)), lengths, new_tokens)

    input_ids = list(tokens.texts[0])
    layout: list[tuple[int, ...]] = []
    order: list[int] = []
    dropped: list[int] = []
    trimmed: list[int] = []
    offset = 0
    for candidates, rank, keep, text in zip(tokens.sets, ranks, kept, tokens.texts[1:], strict=True):
        placed = []
        for index, length in reversed(list(zip(rank, keep, strict=True))):
            ids = candidates[index].token_ids
            if ids and not length:
                dropped.append(offset + index)
                continue
            if length < len(ids):
                trimmed.append(offset + index)
            order.append(offset + index)
            placed.append(length)
            input_ids += ids[:length]
        layout.append(tuple(placed))
        offset += len(candidates)
        input_ids += text
    if not input_ids:
        raise InvalidPrompt("expected at least one token, got an empty prompt")
    arrangement = method.arrange(Layout(tuple(map(len, tokens.texts)), tuple(layout)))
    return PreparedPrompt(tuple(input_ids), arrangement, tuple(order), tuple(sorted(dropped)), tuple(sorted(trimmed)))


def _query(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> str:
    """What relevance is measured against: the prompt's query, or its last text."""
    if prompt.query is not None:
        return prompt.query
    if isinstance(prompt.suffix, str):
        return prompt.suffix
    return "" if tokenizer is None else str(tokenizer.decode(list(prompt.suffix)))
