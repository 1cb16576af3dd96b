"""Tokenize a prompt part by part, so that the token ids of a segment never depend on its neighbours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

from invariant_rag.errors import InvalidPrompt, InvalidSegment, TokenizerRequired
from invariant_rag.orderings.base import Candidate
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

_LOOKS_LIKE_CONTROL = re.compile(r"<([|\uff5c]).*\1>")

CUT = "\ueca4\ueca6\ueca5"
"""Cuts the name of a control token in a text of a chat prompt: the texts on both sides are tokenized separately."""

_TOKENIZER_LOCK = Lock()  # a fast tokenizer keeps `split_special_tokens` as state


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
    texts = [_tokenize_text(text, tokenizer) for text in prompt.texts]
    if tokenizer is not None and isinstance(prompt.prefix, str) and (prompt.prefix or isinstance(prompt.suffix, str)):
        start = _leading_special_ids(tokenizer)
        if texts[0][: len(start)] != start:
            texts[0] = start + texts[0]
    control = {} if tokenizer is None else control_tokens(tokenizer)
    sets = tuple(
        tuple(
            _tokenize_segment(segment, prompt.rendering if each.slots is None else plain_rendering, tokenizer, control)
            for segment in each
        )
        for each in prompt.sets
    )
    return TokenizedPrompt(tuple(texts), sets)


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
    control = control_tokens(tokenizer)
    slots = reversed(segments.slots or ())
    return [
        tokenize_literal(slot.render(segments[index]), tokenizer, control)
        for index, slot in zip(ranks, slots, strict=True)
    ]


def tokenize_text(text: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    """Tokenize a text that continues a prompt: special tokens are parsed, and no bos is prepended.

    Raises:
        InvalidPrompt: `text` is neither a string nor token ids.
        TokenizerRequired: It is a string, and there is no tokenizer.
    """
    return _tokenize_text(text if isinstance(text, str) else as_token_ids(text, InvalidPrompt), tokenizer)


def tokenize_literal(
    text: str, tokenizer: PreTrainedTokenizerBase, control: Mapping[int, str] | None = None
) -> TokenIds:
    """Tokenize untrusted text: the names of control tokens in it are plain text, and no control token is returned.

    Args:
        text: The text.
        tokenizer: The tokenizer.
        control: Result of `control_tokens(tokenizer)`, so that many texts need only one call.

    Raises:
        InvalidSegment: The tokenizer maps a single character to a control token.
    """
    control = control_tokens(tokenizer) if control is None else control
    ids = _encode(tokenizer, text, split_special_tokens=True)
    if control.keys().isdisjoint(ids):
        return ids
    # Added tokens that are not flagged as special are still matched. Cut each name after its first character.
    names = sorted((name for name in control.values() if len(name) > 1), key=len, reverse=True)
    cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, names)), text)]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return tuple(i for piece in pieces for i in _tokenize_halves(piece, tokenizer, control))


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Return ids and names of the added tokens that control a model.

    These are the special tokens, the ones that occur in the chat template, and the ones whose name looks like
    `<|user|>`: a template may build such a name from a role. The unknown token is excluded, unless it is also bos or
    eos.
    """
    templates = tokenizer.chat_template or {}
    template = templates if isinstance(templates, str) else "\n".join(templates.values())
    special = set(tokenizer.all_special_ids)
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return {
        index: token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special or index in special or _LOOKS_LIKE_CONTROL.match(token.content) or token.content in template
        if index not in unknown and not token.content.isspace()
    }


def _leading_special_ids(tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """Return the special tokens that the tokenizer prepends to a text, such as bos."""
    with _TOKENIZER_LOCK:
        bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return tuple(full[: next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)])


def _tokenize_text(text: Text, tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        if not text:
            return ()
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and the prompt holds text")
    return tuple(i for piece in text.split(CUT) for i in _encode(tokenizer, piece, split_special_tokens=False))


def _tokenize_segment(
    segment: Segment,
    rendering: Callable[[Segment], str],
    tokenizer: PreTrainedTokenizerBase | None,
    control: Mapping[int, str],
) -> Candidate:
    if segment.token_ids is not None:
        text = None if tokenizer is None else str(tokenizer.decode(list(segment.token_ids)))
        return Candidate(segment, segment.token_ids, text)
    text = rendering(segment)
    if not text:
        return Candidate(segment, (), text)
    if tokenizer is None:
        raise TokenizerRequired("expected token ids: the model has no tokenizer, and a segment holds text")
    return Candidate(segment, tokenize_literal(text, tokenizer, control), text)


def _tokenize_halves(text: str, tokenizer: PreTrainedTokenizerBase, control: Mapping[int, str]) -> TokenIds:
    """Tokenize text, bisecting it until no control token is matched: a normalizer may turn other text into a name."""
    ids = _encode(tokenizer, text, split_special_tokens=True)
    if control.keys().isdisjoint(ids):
        return ids
    if len(text) < 2:
        found = [name for index, name in control.items() if index in ids]
        raise InvalidSegment(
            f"the tokenizer encodes {text!r} in a segment as a control token: {', '.join(found)}",
            hint="Remove that character from the segment, or use a tokenizer that can encode it as text.",
        )
    middle = len(text) // 2
    return _tokenize_halves(text[:middle], tokenizer, control) + _tokenize_halves(text[middle:], tokenizer, control)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool) -> TokenIds:
    """Return the token ids of a string without special tokens around it; lone surrogates become U+FFFD."""
    with _TOKENIZER_LOCK:
        options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens, "verbose": False}
        return tuple(tokenizer(replace_surrogates(text), **options)["input_ids"])
