"""Tokenize a prompt part by part, so that the token ids of a segment never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invariant_rag.errors import InvalidPrompt, TokenizerRequired
from invariant_rag.orderings.base import Candidate
from invariant_rag.prompts.literal_text import Literals, literals_of
from invariant_rag.segments import Prompt, Segment, SegmentSet, Text, TokenIds, as_token_ids, plain_rendering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids, its segments still in input order.

    Attributes:
        texts: Token ids of the `len(sets) + 1` texts around the sets.
        sets: For each set, its segments as candidates of an ordering.
    """

    texts: tuple[TokenIds, ...]
    sets: tuple[tuple[Candidate, ...], ...]


def tokenize_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> TokenizedPrompt:
    """Tokenize every text and every segment of a prompt separately.

    Special tokens are parsed in texts and are literal in segments. The special tokens that the tokenizer prepends to a
    text (bos) are prepended to the first text, unless it starts with them. Token ids are not changed, and a prompt of
    token ids gets no bos.

    Raises:
        InvalidPrompt: `prompt` is not a `Prompt`.
        TokenizerRequired: The prompt holds text and there is no tokenizer.
    """
    if not isinstance(prompt, Prompt):
        raise InvalidPrompt(
            f"expected a Prompt, got {type(prompt).__name__}",
            hint="Build one with lm.chat_prompt(question, documents), or with Prompt(prefix, segments, suffix).",
        )
    literals = None if tokenizer is None else literals_of(tokenizer)
    texts = [_encode_text(text, literals) for text in prompt.texts]
    first, last = prompt.texts[0], prompt.texts[-1]
    if literals is not None and isinstance(first, str) and (first or isinstance(last, str)):
        start = literals.leading_ids()
        if texts[0][: len(start)] != start:
            texts[0] = start + texts[0]
    sets = []
    for each in prompt.sets:
        rendering = prompt.rendering if each.slots is None else plain_rendering
        written = ["" if segment.token_ids is not None else rendering(segment) for segment in each]
        encoded = _encode_segments(written, literals)
        sets.append(tuple(map(_candidate, each, written, encoded, [tokenizer] * len(each))))
    return TokenizedPrompt(tuple(texts), tuple(sets))


def tokenize_in_slots(
    segments: SegmentSet, ranks: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[TokenIds]:
    """Tokenize the segments of a set that has slots, each in the slot of its physical place.

    Args:
        segments: The set.
        ranks: Indices of the segments by rank. Rank 0 takes the last slot: it is placed nearest to what follows.
        tokenizer: The tokenizer.

    Returns:
        Token ids by rank.

    Raises:
        TokenizerRequired: There is no tokenizer.
    """
    slots = reversed(segments.slots or ())
    written = [slot.render(segments[index]) for index, slot in zip(ranks, slots, strict=True)]
    return _encode_segments(written, None if tokenizer is None else literals_of(tokenizer))


def tokenize_text(text: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    """Tokenize a text that continues a prompt: special tokens are parsed, and no bos is prepended.

    Raises:
        InvalidPrompt: `text` is neither a string nor token ids.
        TokenizerRequired: It is a string, and there is no tokenizer.
    """
    given = text if isinstance(text, str) else as_token_ids(text, InvalidPrompt)
    return _encode_text(given, None if tokenizer is None else literals_of(tokenizer))


def tokenize_literal(text: str, tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """Tokenize untrusted text: the names of control tokens in it are plain text, and no control token is returned.

    Raises:
        InvalidSegment: The tokenizer has no other ids for a part of the text than those of a control token.
    """
    return literals_of(tokenizer).encode_literal([text])[0]


def _encode_text(text: Text, literals: Literals | None) -> TokenIds:
    if not isinstance(text, str):
        return text
    if literals is not None:
        return literals.encode_text(text)
    if text:
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and the prompt holds text")
    return ()


def _encode_segments(written: list[str], literals: Literals | None) -> list[TokenIds]:
    if literals is not None:
        return literals.encode_literal(written)
    if any(written):
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and a segment or its slot holds text")
    return [()] * len(written)


def _candidate(segment: Segment, text: str, ids: TokenIds, tokenizer: PreTrainedTokenizerBase | None) -> Candidate:
    if segment.token_ids is None:
        return Candidate(segment, ids, text)
    decoded = None if tokenizer is None else str(tokenizer.decode(list(segment.token_ids)))
    return Candidate(segment, segment.token_ids, decoded)
