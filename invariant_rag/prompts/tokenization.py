"""Tokenize a prompt part by part, so that the token ids of a segment never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from invariant_rag.errors import InvalidPrompt, TokenizerRequired
from invariant_rag.orderings.base import Candidate
from invariant_rag.prompts.literal_text import Literals, literals_of
from invariant_rag.segments import Prompt, Segment, SegmentSet, Text, TokenIds, as_token_ids, plain_rendering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids: of the texts around the sets, and of the segments, in input order, to be ranked."""

    texts: tuple[TokenIds, ...]
    sets: tuple[tuple[Candidate, ...], ...]


def tokenize_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> TokenizedPrompt:
    """Tokenize every text and every segment of a prompt separately.

    Special tokens are parsed in texts and are literal in segments. Those that the tokenizer prepends to a text (bos)
    are prepended to the first text, unless it starts with them. Token ids are not changed, and get no bos.

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
    texts = list(map(_encode_text if literals is None else literals.encode_text, prompt.texts))
    first, last = prompt.texts[0], prompt.texts[-1]
    if literals is not None and isinstance(first, str) and (first or isinstance(last, str)):
        start = literals.leading_ids()
        if texts[0][: len(start)] != start:
            texts[0] = start + texts[0]
    sets = []
    for each in prompt.sets:
        segments = tuple(each)
        written = list(map(prompt.rendering if each.slots is None else plain_rendering, segments))
        encoded = _encode_segments(segments, written, literals)
        candidates = []
        for segment, rendered, ids in zip(segments, written, encoded, strict=True):
            text: str | None = rendered
            if segment.token_ids is not None:
                text = None if tokenizer is None else str(tokenizer.decode(list(segment.token_ids)))
            candidates.append(Candidate(segment, ids, text))
        sets.append(tuple(candidates))
    return TokenizedPrompt(tuple(texts), tuple(sets))


def tokenize_in_slots(
    segments: SegmentSet, ranks: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[TokenIds]:
    """Tokenize the segments of a set that has slots, each in the slot of its physical place.

    `ranks` are indices of the segments by rank. Rank 0 takes the last slot: it is placed nearest to what follows.

    Returns:
        Token ids by rank.
    """
    slots = reversed(segments.slots or ())
    ranked = [segments[index] for index in ranks]
    written = [slot.render(segment) for segment, slot in zip(ranked, slots, strict=True)]
    return _encode_segments(ranked, written, None if tokenizer is None else literals_of(tokenizer))


def tokenize_text(text: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    """Tokenize a text that continues a prompt: special tokens are parsed, and no bos is prepended."""
    if not isinstance(text, str):
        return as_token_ids(text, InvalidPrompt)
    return _encode_text(text) if tokenizer is None else literals_of(tokenizer).encode_text(text)


def tokenize_literal(text: str, tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """Tokenize untrusted text: the names of control tokens in it are plain text, and no control token is returned."""
    return literals_of(tokenizer).encode_literal([text])[0]


def _encode_text(text: Text) -> TokenIds:
    if text and isinstance(text, str):
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and the prompt holds text")
    return text or ()


def _encode_segments(segments: Sequence[Segment], written: list[str], literals: Literals | None) -> list[TokenIds]:
    """Return ids of segments: those that they hold, or those of what is written of them."""
    given = list(map(attrgetter("token_ids"), segments))
    if literals is not None and given.count(None) == len(given):
        return literals.encode_literal(written)
    if literals is None and any(text for ids, text in zip(given, written, strict=True) if ids is None):
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and a segment or its slot holds text")
    texts = [text for ids, text in zip(given, written, strict=True) if ids is None]
    encoded = iter([()] * len(texts) if literals is None else literals.encode_literal(texts))
    return [next(encoded) if ids is None else ids for ids in given]
