"""From text to token ids and back: each part of a prompt on its own, so that no segment can touch its neighbours."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.errors import InvalidPrompt, InvalidSegment, TokenizerRequired
from invariant_rag.orderings.base import Candidate
from invariant_rag.segments import (
    Prompt,
    Segment,
    SegmentSet,
    Text,
    TokenIds,
    as_token_ids,
    document_rendering,
    encodable,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_logger = logging.getLogger(__name__)

DEFAULT_SYSTEM = "Answer the question using only the documents."
"""System message of a question over documents."""

Content: TypeAlias = str | Segment | SegmentSet | Sequence[str | Segment | SegmentSet]
Message: TypeAlias = Mapping[str, Any]

# The codec's marks: private-use characters that JSON, str.strip() and Unicode normalisation leave alone.
_BEGIN, _END, _TITLE = "\ue200", "\ue201", "\ue202"
_PLACE = "\ue203{}\ue204"
_PLACES = re.compile(_PLACE.format(r"(\d+)"))
_MARKED = re.compile(f"{_BEGIN}(?:([^{_BEGIN}{_END}{_TITLE}]*){_TITLE})?([^{_BEGIN}{_END}{_TITLE}]*){_END}")
_CONTROL = re.compile(r"<([|\uff5c]).*\1>")
_MARKS = re.compile(f"[{_BEGIN}{_END}{_TITLE}]")

_tokenizing = Lock()  # a fast tokenizer keeps its handling of special tokens as state


@dataclass(frozen=True)
class TokenizedPrompt:
    """A prompt as token ids, its sets still in the order given.

    Attributes:
        texts: The texts, one more than there are sets.
        sets: For each set, its segments as orderings see them.
    """

    texts: tuple[TokenIds, ...]
    sets: tuple[tuple[Candidate, ...], ...]


def tokenize_prompt(prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None) -> TokenizedPrompt:
    """Tokenise every part of a prompt on its own.

    Special tokens are special in texts, and plain text in segments. A tokenizer that starts every sequence with
    special tokens (bos) starts the first text with them too, unless they are there already. Token ids are used as
    they are, and nothing is put in front of a prompt whose texts are token ids.

    Raises:
        InvalidPrompt: It is no prompt.
        TokenizerRequired: The prompt holds text and there is no tokenizer.
    """
    if not isinstance(prompt, Prompt):
        raise InvalidPrompt(
            f"expected a Prompt, got {type(prompt).__name__}",
            hint="Build one with lm.chat_prompt(question, documents), or with Prompt(prefix, segments, suffix).",
        )
    texts = [_text_ids(text, tokenizer) for text in prompt.texts]
    if tokenizer is not None and isinstance(prompt.prefix, str) and (prompt.prefix or isinstance(prompt.suffix, str)):
        start = _start_ids(tokenizer)
        if texts[0][: len(start)] != start:
            texts[0] = start + texts[0]
    control = {} if tokenizer is None else control_tokens(tokenizer)
    sets = tuple(tuple(_candidate(segment, prompt, tokenizer, control) for segment in each) for each in prompt.sets)
    return TokenizedPrompt(tuple(texts), sets)


def _start_ids(tokenizer: PreTrainedTokenizerBase) -> TokenIds:
    """What the tokenizer puts before any text."""
    with _tokenizing:
        bare, full = (tokenizer("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    return tuple(full[: next((at for at in range(len(full)) if full[at : at + len(bare)] == bare), 0)])


def _text_ids(text: Text, tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    if not isinstance(text, str):
        return text
    if tokenizer is None:
        if not text:
            return ()
        raise TokenizerRequired("expected token ids: this model was given no tokenizer, and the prompt holds text")
    return _encode(tokenizer, text, split_special_tokens=False)


def text_ids(text: str | Sequence[int], tokenizer: PreTrainedTokenizerBase | None) -> TokenIds:
    """Token ids of a text that continues a prompt: special tokens are special, and none is put in front.

    Raises:
        InvalidPrompt: It is neither a text nor token ids.
        TokenizerRequired: It is text, and there is no tokenizer.
    """
    return _text_ids(text if isinstance(text, str) else as_token_ids(text, InvalidPrompt), tokenizer)


def _candidate(
    segment: Segment, prompt: Prompt, tokenizer: PreTrainedTokenizerBase | None, control: Mapping[int, str]
) -> Candidate:
    if segment.token_ids is not None:
        text = None if tokenizer is None else str(tokenizer.decode(list(segment.token_ids)))
        return Candidate(segment, segment.token_ids, text)
    text = prompt.rendering(segment)
    if not text:
        return Candidate(segment, (), text)
    if tokenizer is None:
        raise TokenizerRequired("expected token ids: this model was given no tokenizer, and a segment holds text")
    return Candidate(segment, literal_ids(text, tokenizer, control), text)


def literal_ids(text: str, tokenizer: PreTrainedTokenizerBase, control: Mapping[int, str] | None = None) -> TokenIds:
    """Tokenise text in which nothing is special: no id of a control token can come out.

    Args:
        text: The text.
        tokenizer: What tokenises it.
        control: The tokenizer's `control_tokens`, where they are known already.

    Raises:
        InvalidSegment: The tokenizer makes a control token of a single character.
    """
    control = control_tokens(tokenizer) if control is None else control
    ids = _encode(tokenizer, text, split_special_tokens=True)
    if control.keys().isdisjoint(ids):
        return ids
    # Some control tokens are not flagged as special. Cut behind the first character of each, so that none is whole.
    names = sorted((name for name in control.values() if len(name) > 1), key=len, reverse=True)
    cuts = [match.start() + 1 for match in re.finditer("|".join(map(re.escape, names)), text)]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return tuple(i for piece in pieces for i in _halved_ids(piece, tokenizer, control))


def _halved_ids(text: str, tokenizer: PreTrainedTokenizerBase, control: Mapping[int, str]) -> TokenIds:
    """Tokenise text, halved until no control token is whole, whatever the tokenizer's normalizer makes of it."""
    ids = _encode(tokenizer, text, split_special_tokens=True)
    if control.keys().isdisjoint(ids):
        return ids
    if len(text) < 2:
        found = [name for index, name in control.items() if index in ids]
        raise InvalidSegment(f"the tokenizer reads {text!r} in a segment as a control token: {', '.join(found)}")
    middle = len(text) // 2
    return _halved_ids(text[:middle], tokenizer, control) + _halved_ids(text[middle:], tokenizer, control)


def control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[int, str]:
    """Ids and texts of the tokens that steer a model.

    They are the special ones, those that a chat template writes, and those that are written like one: templates put
    `<|user|>` together from the name of a role. A token for unknown text is none, unless it also starts or ends texts.
    """
    templates = tokenizer.chat_template or {}
    template = templates if isinstance(templates, str) else "\n".join(templates.values())
    special = set(tokenizer.all_special_ids)
    unknown = {tokenizer.unk_token_id} - {tokenizer.bos_token_id, tokenizer.eos_token_id}
    return {
        index: token.content
        for index, token in tokenizer.added_tokens_decoder.items()
        if token.special or index in special or _CONTROL.match(token.content) or token.content in template
        if index not in unknown and not token.content.isspace()
    }


def _encode(tokenizer: PreTrainedTokenizerBase, text: str, *, split_special_tokens: bool) -> TokenIds:
    """Token ids of a string, without special tokens around it. Halves of surrogate pairs become U+FFFD."""
    with _tokenizing:
        options = {"add_special_tokens": False, "split_special_tokens": split_special_tokens, "verbose": False}
        return tuple(tokenizer(encodable(text), **options)["input_ids"])


# --- chat templates -------------------------------------------------------------------------------------------------


def question_messages(question: str, segments: SegmentSet, system: str | None = None) -> list[Message]:
    """The messages of one question over a set of documents: a system message, the documents, the question."""
    return [
        {"role": "system", "content": DEFAULT_SYSTEM if system is None else system},
        {"role": "user", "content": [segments, f"\nQuestion: {question}"]},
    ]


def render_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase | None, query: str | None = None
) -> Prompt:
    """Render messages through the model's chat template, with every set of segments left out, and put the sets back.

    Args:
        messages: `{"role": ..., "content": ...}`; a content is a string, a `SegmentSet`, or a list of strings,
            `Segment`s and `SegmentSet`s. Neighbouring segments form one set. Where the template refuses a system
            message, as Gemma's does, it opens the first user message.
        tokenizer: The tokenizer that has the template. One without a template gets a plain rendering for a single
            system and user message.
        query: What relevance orderings compare segments with.

    Raises:
        TokenizerRequired: There is no tokenizer.
        InvalidPrompt: A message is not understood, there is no template for a conversation, the template refuses it,
            or it does not write every set exactly once.
    """
    if tokenizer is None:
        raise TokenizerRequired("chat prompts need the model's tokenizer")
    if not messages:
        raise InvalidPrompt("expected at least one message, got none")
    sets: list[SegmentSet] = []
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidPrompt(f"expected a message with role and content, got {message!r}")
        text = "".join(_without_sets(message["content"], sets))
        plain.append({**message, "content": text})
    pieces = _PLACES.split(_rendered(plain, tokenizer))  # text, number of a set, text, ...
    places = pieces[1::2]
    for number in map(str, range(len(sets))):
        if places.count(number) != 1:
            raise InvalidPrompt(
                f"expected the chat template of {tokenizer.name_or_path!r} to write every set of segments once; "
                f"it wrote set {number} of {len(sets)} {places.count(number)} times",
                hint="Set tokenizer.chat_template, or put the segments into a message that the template writes.",
            )
    parts = [sets[int(piece)] if index % 2 else piece for index, piece in enumerate(pieces)]
    return Prompt.of(*parts, query=query, rendering=document_rendering)


def _without_sets(content: Content, sets: list[SegmentSet]) -> Iterable[str]:
    """Yield the texts of a message, with a mark in the place of each set, and append the sets."""
    items = [content] if isinstance(content, str | Segment | SegmentSet) else content
    if not isinstance(items, Iterable) or isinstance(items, bytes | Mapping):
        raise InvalidPrompt(f"expected a content of text and segments, got {type(content).__name__}")
    together: list[Segment] = []
    for item in [*items, ""]:
        if isinstance(item, Segment):
            together.append(item)
            continue
        if together:
            yield _PLACE.format(len(sets))
            sets.append(SegmentSet(together))
            together = []
        if isinstance(item, SegmentSet):
            yield _PLACE.format(len(sets))
            sets.append(item)
        elif isinstance(item, str):
            yield item.replace("\ue203", "").replace("\ue204", "")
        else:
            raise InvalidPrompt(f"expected str, Segment or SegmentSet in a message, got {type(item).__name__}")


def _rendered(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    if tokenizer.chat_template:
        from jinja2 import TemplateError

        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            if [message["role"] for message in messages[:2]] == ["system", "user"]:
                opened = {
                    **messages[1],
                    "content": "\n\n".join(filter(None, (each["content"] for each in messages[:2]))),
                }
                return _rendered([opened, *messages[2:]], tokenizer)
            raise InvalidPrompt(f"the chat template of {tokenizer.name_or_path!r} refuses: {error}") from error
    if [message["role"] for message in messages] not in (["user"], ["system", "user"]):
        raise InvalidPrompt(
            "expected one question: this tokenizer has no chat template for a conversation",
            hint="Set tokenizer.chat_template, or build a Prompt from text.",
        )
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"


# --- in-band codec --------------------------------------------------------------------------------------------------


def mark(segment: Segment | str) -> str:
    """Write a segment into a string so that `parse_marked` finds its boundaries again.

    For frameworks that can only carry text. The codec's own characters are removed from the segment's text.

    >>> parse_marked("Read this: " + mark("one") + mark("two") + " Which?").sets
    (SegmentSet([Segment(text='one', title=None, score=None, token_ids=None), \
Segment(text='two', title=None, score=None, token_ids=None)]),)
    """
    segment = Segment.of(segment)
    if segment.token_ids is not None:
        raise InvalidSegment("expected text: token ids cannot be written into a string")
    title = "" if segment.title is None else _MARKS.sub("", segment.title) + _TITLE
    return f"{_BEGIN}{title}{_MARKS.sub('', segment.text)}{_END}"


def parse_marked(text: str) -> Prompt:
    """Find the segments that `mark` wrote into a text. Neighbours with nothing but white space between form one set.

    Marks that do not pair up are removed, with a warning; what they enclose stays as text.
    """
    parts: list[str | SegmentSet] = []
    together: list[Segment] = []
    position = 0
    for match in _MARKED.finditer(text):
        between = _unmarked(text[position : match.start()])
        if between.strip() or not together:
            parts += [SegmentSet(together), between] if together else [between]
            together = []
        together.append(Segment(match[2], title=match[1]))
        position = match.end()
    if together:
        parts.append(SegmentSet(together))
    return Prompt.of(*parts, _unmarked(text[position:]), rendering=document_rendering)


def _unmarked(text: str) -> str:
    clean = _MARKS.sub("", text)
    if clean != text:
        _logger.warning("removed segment marks that do not pair up; the text around them is no segment")
    return clean
