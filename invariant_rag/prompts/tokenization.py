"""Tokenize a prompt part by part, so that the token ids of a segment never depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from invariant_rag.errors import InvalidPrompt, InvalidSegment, TokenizerRequired
from invariant_rag.locks import ForkSafeLock
from invariant_rag.orderings.base import Candidate
from invariant_rag.prompts.literal_text import CUT, Literals, leading, literals_of
from invariant_rag.segments import (
    Prompt,
    Segment,
    SegmentSet,
    Text,
    TokenIds,
    as_token_ids,
    plain_rendering,
    replace_surrogates,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TOKENIZER_LOCK = ForkSafeLock()  # of tokenizers that cannot be copied: a call may leave state behind


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
    texts = [_tokenize_text(text, tokenizer, literals) for text in prompt.texts]
    if tokenizer is not None and isinstance(prompt.prefix, str) and (prompt.prefix or isinstance(prompt.suffix, str)):
        start = _leading_special_ids(tokenizer, literals or literals_of(tokenizer))
        if texts[0][: len(start)] != start:
            texts[0] = start + texts[0]
    sets = []
    for each in prompt.sets:
        rendering = prompt.rendering if each.slots is None else plain_rendering
        sets.append(tuple([_tokenize_segment(segment, rendering, tokenizer, literals) for segment in each]))
    return TokenizedPrompt(tuple(texts), tuple(sets))


def tokenize_in_slots(
    segments: SegmentSet, ranks: Sequence[int], tokenizer: PreTrainedTokenizerBase | None
) -> list[TokenIds]:
    """Tokenize the segments of a set that has slots, each in the slot of its physical place.

    The segment of rank 0 takes the last slot: it is placed nearest to what follows.

    Args:
        segments: The set.
        ranks: Indices of the segments by rank.
        tokenizer: The tokenizer.

    Returns:
        Token ids by rank.

    Raises:
        TokenizerRequired: There is no tokenizer.
    """
    if tokenizer is None:
        raise TokenizerRequired("expected segments without slots: the model has no tokenizer, and slots hold text")
    literals = literals_of(tokenizer)
    slots = reversed(segments.slots or ())
    return [
        tokenize_literal(slot.render(segments[index]), tokenizer, literals)
        for index, slot in zip(ranks, slots, strict=True)
    ]


def tokenize_text(text: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    """Tokenize a text that continues a prompt: special tokens are parsed, and no bos is prepended.

    Raises:
        InvalidPrompt: `text` is neither a string nor token ids.
        TokenizerRequired: It is a string, and there is no tokenizer.
    """
    return _tokenize_text(text if isinstance(text, str) else as_token_ids(text, InvalidPrompt), tokenizer)


def tokenize_literal(text: str, tokenizer: PreTrainedTokenizerBase, literals: Literals | None = None) -> TokenIds:
    """Tokenize untrusted text: the names of control tokens in it are plain text, and no control token is returned.

    Args:
        text: The text.
        tokenizer: The tokenizer.
        literals: Result of `literals_of(tokenizer)`, so that many texts need only one call.

    Raises:
        InvalidSegment: The tokenizer has no other ids for a part of the text than those of a control token.
    """
    literals = literals_of(tokenizer) if literals is None else literals
    ids = _encode(tokenizer, text, literals, split_special_tokens=True)
    if literals.control.keys().isdisjoint(ids):
        return ids
    found = literals.encode(text)
    if found is None:
        return _tokenize_halves(text, tokenizer, literals)
    if not literals.control.keys().isdisjoint(found):
        raise _refused(text, found, literals.control)
    return found


def _leading_special_ids(tokenizer: PreTrainedTokenizerBase, literals: Literals) -> TokenIds:
    """Return the special tokens that the tokenizer prepends to a text, such as bos."""
    found = literals.leading_ids()
    if found is not None:
        return found
    with _TOKENIZER_LOCK:
        bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return leading(full, bare)


def _tokenize_text(text: Text, tokenizer: PreTrainedTokenizerBase | None, literals: Literals | None = None) -> TokenIds:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        if not text:
            return ()
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and the prompt holds text")
    literals = literals_of(tokenizer) if literals is None else literals
    if CUT not in text:
        return _encode(tokenizer, text, literals, split_special_tokens=False)
    found = literals.encode_rendered(text)
    if found is None:  # a tokenizer written in Python: the two halves of a name are tokenized separately
        return tuple(
            i for piece in text.split(CUT) for i in _encode(tokenizer, piece, literals, split_special_tokens=False)
        )
    return found


def _tokenize_segment(
    segment: Segment,
    rendering: Callable[[Segment], str],
    tokenizer: PreTrainedTokenizerBase | None,
    literals: Literals | None,
) -> Candidate:
    if segment.token_ids is not None:
        text = None if tokenizer is None else str(tokenizer.decode(list(segment.token_ids)))
        return Candidate(segment, segment.token_ids, text)
    text = rendering(segment)
    if not text:
        return Candidate(segment, (), text)
    if tokenizer is None:
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and a segment holds text")
    return Candidate(segment, tokenize_literal(text, tokenizer, literals), text)


def _tokenize_halves(text: str, tokenizer: PreTrainedTokenizerBase, literals: Literals) -> TokenIds:
    """Tokenize text, bisecting it until no control token is matched: a normalizer may turn other text into a name."""
    ids = _encode(tokenizer, text, literals, split_special_tokens=True)
    if literals.control.keys().isdisjoint(ids):
        return ids
    if len(text) < 2:
        raise _refused(text, ids, literals.control)
    middle = len(text) // 2
    return _tokenize_halves(text[:middle], tokenizer, literals) + _tokenize_halves(text[middle:], tokenizer, literals)


def _refused(text: str, ids: TokenIds, control: Mapping[int, str]) -> InvalidSegment:
    found = ", ".join(sorted({control[index] for index in ids if index in control}))
    shown = text if len(text) < 80 else f"{text[:80]}..."
    return InvalidSegment(
        f"the tokenizer encodes {shown!r} in a segment as a control token: {found}",
        hint="Remove what it cannot encode as text from the segment, or use another tokenizer.",
    )


def _encode(
    tokenizer: PreTrainedTokenizerBase, text: str, literals: Literals, *, split_special_tokens: bool
) -> TokenIds:
    """Return the token ids of a string without special tokens around it; lone surrogates become U+FFFD."""
    found = literals.encode_plain(text, split_special_tokens=split_special_tokens)
    if found is not None:
        return found
    with _TOKENIZER_LOCK:
        options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens, "verbose": False}
        return tuple(tokenizer(replace_surrogates(text), **options)["input_ids"])
