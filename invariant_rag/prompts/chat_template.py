"""Chat messages with segments in them, rendered once through the model's chat template."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.errors import InvalidPrompt, TokenizerRequired
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SYSTEM = "Answer the question using only the documents."
"""Default system message for a question over documents."""

Content: TypeAlias = str | Segment | SegmentSet | Sequence[str | Segment | SegmentSet]
Message: TypeAlias = Mapping[str, Any]

# Stands for a set while the template is rendered. Private-use characters, which no text of a message may contain.
_PLACEHOLDER_BEGIN, _PLACEHOLDER_END = "\ue203", "\ue204"
_PLACEHOLDER = re.compile(rf"{_PLACEHOLDER_BEGIN}(\d+){_PLACEHOLDER_END}")


def question_messages(question: str, segments: SegmentSet, system: str | None = None) -> list[Message]:
    """Build the messages of one question over documents: a system message, then the documents and the question."""
    return [
        {"role": "system", "content": DEFAULT_SYSTEM if system is None else system},
        {"role": "user", "content": [segments, f"\nQuestion: {question}"]},
    ]


def render_chat(
    messages: Sequence[Message], tokenizer: PreTrainedTokenizerBase | None, query: str | None = None
) -> Prompt:
    """Apply the tokenizer's chat template to messages that contain segments.

    The template gets a placeholder for each set, and its output is split at the placeholders. So a template never sees
    the text of a segment.

    Args:
        messages: `{"role": ..., "content": ...}`; a content is a string, a `SegmentSet`, or a list of strings,
            `Segment`s and `SegmentSet`s. Adjacent segments form one set. If the template raises an error for a system
            message, as Gemma's does, the system message is prepended to the first user message.
        tokenizer: The tokenizer with the template. Without a template, a single user message, with or without a system
            message, is rendered as plain text.
        query: Query that relevance orderings score segments against.

    Raises:
        TokenizerRequired: There is no tokenizer.
        InvalidPrompt: A message is malformed; a conversation has no template; the template raises an error; or it
            does not render every set exactly once.
    """
    if tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: a chat prompt needs its chat template")
    if not messages:
        raise InvalidPrompt("expected at least one message, got none")
    sets: list[SegmentSet] = []
    plain = []
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
            raise InvalidPrompt(f"expected a message with role and content, got {message!r}")
        text = "".join(_replace_sets(message["content"], sets))
        plain.append({**message, "content": text})
    pieces = _PLACEHOLDER.split(_apply_template(plain, tokenizer))  # text, index of a set, text, ...
    rendered_sets = pieces[1::2]
    for index in map(str, range(len(sets))):
        if rendered_sets.count(index) != 1:
            raise InvalidPrompt(
                f"expected the chat template of {tokenizer.name_or_path!r} to render every set of segments once; "
                f"it rendered set {index} of {len(sets)} {rendered_sets.count(index)} times",
                hint="Set tokenizer.chat_template, or put the segments into a message that the template renders.",
            )
    parts = [sets[int(piece)] if position % 2 else piece for position, piece in enumerate(pieces)]
    return Prompt.of(*parts, query=query, rendering=document_rendering)


def _replace_sets(content: Content, sets: list[SegmentSet]) -> Iterable[str]:
    """Yield the texts of a message with a placeholder for each set, and append the sets to `sets`."""
    items = [content] if isinstance(content, str | Segment | SegmentSet) else content
    if not isinstance(items, Iterable) or isinstance(items, bytes | Mapping):
        raise InvalidPrompt(f"expected a str or a list of str and segments as content, got {type(content).__name__}")

    def placeholder(segments: SegmentSet) -> str:
        sets.append(segments)
        return f"{_PLACEHOLDER_BEGIN}{len(sets) - 1}{_PLACEHOLDER_END}"

    adjacent: list[Segment] = []
    for item in [*items, ""]:
        if isinstance(item, Segment):
            adjacent.append(item)
            continue
        if adjacent:
            yield placeholder(SegmentSet(adjacent))
            adjacent = []
        if isinstance(item, SegmentSet):
            yield placeholder(item)
        elif isinstance(item, str):
            yield item.replace(_PLACEHOLDER_BEGIN, "").replace(_PLACEHOLDER_END, "")
        else:
            raise InvalidPrompt(f"expected str, Segment or SegmentSet in a message, got {type(item).__name__}")


def _apply_template(messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> str:
    roles = [message["role"] for message in messages]
    if tokenizer.chat_template:
        from jinja2 import TemplateError

        try:
            return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            if roles[:2] == ["system", "user"]:
                contents = [message["content"] for message in messages[:2]]
                first = {**messages[1], "content": "\n\n".join(filter(None, contents))}
                return _apply_template([first, *messages[2:]], tokenizer)
            raise InvalidPrompt(
                f"the chat template of {tokenizer.name_or_path!r} cannot render roles {roles}: {error}",
                hint="Change the order of the roles, or set tokenizer.chat_template.",
            ) from error
    if roles not in (["user"], ["system", "user"]):
        raise InvalidPrompt(
            "expected one user message, with or without a system message: this tokenizer has no chat template, "
            f"got roles {roles}",
            hint="Set tokenizer.chat_template, or build a Prompt from text.",
        )
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"
