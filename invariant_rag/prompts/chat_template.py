"""Chat messages with segments in them, rendered once through the model's chat template."""

from __future__ import annotations

import hashlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.checks import check_items, is_iterable
from invariant_rag.errors import InvalidPrompt, TokenizerRequired
from invariant_rag.prompts.literal_text import CUT, PRIVATE, Trusted, literals_of
from invariant_rag.prompts.template_format import TemplateFormat, template_format
from invariant_rag.prompts.tool_messages import prepare_tool_messages
from invariant_rag.prompts.tools import Tool, as_tools
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SYSTEM = "Answer the question using only the documents."
"""Default system message for a question over documents."""

Content: TypeAlias = str | Trusted | Segment | SegmentSet | Sequence[str | Trusted | Segment | SegmentSet]
Message: TypeAlias = Mapping[str, Any]

# Stands for a set while the template is rendered. Private-use characters, which no text of a message may contain.
_PLACEHOLDER_BEGIN, _PLACEHOLDER_END = "\ueca4", "\ueca5"
_PLACEHOLDER = re.compile(rf"{_PLACEHOLDER_BEGIN}([0-9]+){_PLACEHOLDER_END}")


def question_messages(question: str, segments: SegmentSet, system: str | None = None) -> list[Message]:
    """Build the messages of one question over documents: a system message, then the documents and the question."""
    return [
        {"role": "system", "content": DEFAULT_SYSTEM if system is None else system},
        {"role": "user", "content": [segments, f"\nQuestion: {question}"]},
    ]


def render_chat(
    messages: Sequence[Message],
    tokenizer: PreTrainedTokenizerBase | None,
    query: str | None = None,
    *,
    tools: Iterable[Tool | Mapping[str, Any]] = (),
    template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Apply the tokenizer's chat template to messages that contain segments.

    The template gets a placeholder for each set, and its output is split at the placeholders. So a template never sees
    the text of a segment. Only the template makes control tokens: their names in messages of any role, in tools, calls
    and results are literal text, unless a part of a content is `Trusted`. There is one exception: where an assistant's
    message begins with reasoning, in the markers of the template, these markers stay what they are.

    Args:
        messages: `{"role": ..., "content": ...}`; a content is a string, a `Trusted` text, a `SegmentSet`, or a list
            of these and of `Segment`s. Adjacent segments form one set; empty strings between them change nothing. If
            the template raises an error for a system message, as Gemma's does, the system message is prepended to the
            first user message.

            An assistant's message may have `tool_calls` (what `ToolCall.of` takes), and then needs no content. The
            result of a call has the role `tool`, the content (segments if they came from a retriever), and
            `tool_call_id` or `name`.
        tokenizer: The tokenizer with the template. Without a template, a single user message, with or without a system
            message, is rendered as plain text.
        query: Query that relevance orderings score segments against.
        tools: Tools that the model may call: `Tool`s, or dicts in OpenAI's shape. What the template does not render of
            tools, calls and results is written as text: see `prepare_tool_messages`.
        template_kwargs: Other variables of the template, such as `enable_thinking`.

    Raises:
        TokenizerRequired: There is no tokenizer.
        InvalidPrompt: A message is malformed; a conversation has no template; the template raises an error; it does
            not render every set exactly once; or it has no such variable.
        InvalidTool: A tool or a call is malformed, or two tools share a name.
    """
    if tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: a chat prompt needs its chat template")
    messages = check_items("messages", messages, Mapping, error=InvalidPrompt)
    if not messages:
        raise InvalidPrompt("expected at least one message, got none")
    offered = as_tools(tools)
    sets: list[SegmentSet] = []
    plain = []
    literals = literals_of(tokenizer)
    cut = literals.cut
    for message in messages:
        given = message.get("tool_calls")
        calls = check_items("tool_calls", () if given is None else given, object, error=InvalidPrompt)
        has_role = isinstance(message.get("role"), str)
        if not has_role or ("content" not in message and not (calls and message["role"] == "assistant")):
            raise InvalidPrompt(f"expected a message with role and content, got {shown(message)}")
        role = message["role"]
        if literals.holds_name(role) and not role.isalnum():
            raise InvalidPrompt(f"expected the name of a role, got {role!r}, which holds the name of a control token")
        content = "" if calls and message.get("content") is None else message["content"]
        literal = partial(_keep_reasoning, tokenizer=tokenizer, cut=cut) if role == "assistant" else cut
        text = "".join(_replace_sets(content, sets, literal))
        others = {key: value for key, value in message.items() if key not in ("role", "content", "tool_calls")}
        try:
            literal_others = {key: cut(value, key) for key, value in others.items()}
        except RecursionError as error:
            raise InvalidPrompt(f"expected fields nested less deeply in a message of role {role!r}") from error
        plain.append({"role": role, **literal_others, "content": text, **({"tool_calls": calls} if calls else {})})
    variables = _template_variables(template_kwargs or {}, tokenizer)
    described = None
    if offered or any(message["role"] == "tool" or message.get("tool_calls") for message in plain):
        form = template_format(tokenizer) if tokenizer.chat_template else TemplateFormat()
        plain, described = prepare_tool_messages(plain, offered, form, cut)
    rendered = literals.needed_cuts(_apply_template(plain, tokenizer, described, variables))
    pieces = _PLACEHOLDER.split(rendered)  # text, index, text, ...
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


def _keep_reasoning(text: str, tokenizer: PreTrainedTokenizerBase, cut: Callable[[str], str]) -> str:
    """Make what an assistant said literal, but for the two markers of the reasoning that it begins with.

    Templates leave the reasoning of earlier turns away, and know it by its markers.
    """
    literal = cut(text)
    if CUT not in literal:
        return literal
    form = template_format(tokenizer).reasoning
    start = text.lstrip()
    if form is None or not start.startswith(form.open) or form.close not in start:
        return literal
    reasoning, _, answer = start[len(form.open) :].partition(form.close)
    return text[: len(text) - len(start)] + form.open + cut(reasoning) + form.close + cut(answer)


def _template_variables(given: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return variables of the template.

    Raises:
        InvalidPrompt: One has a place of its own, or does not occur in the template.
    """
    if not given:
        return {}
    own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"} - {"kwargs"}
    if taken := sorted(own & given.keys()):
        raise InvalidPrompt(
            f"template_kwargs: expected variables of the chat template, got {', '.join(taken)}",
            hint="Documents are segments in a message; tools have an argument of their own.",
        )
    templates = tokenizer.chat_template or ""
    template = templates if isinstance(templates, str) else "\n".join(templates.values())
    if unknown := sorted(name for name in given if not re.search(rf"\b{re.escape(name)}\b", template)):
        raise InvalidPrompt(
            "template_kwargs: expected variables of the chat template, "
            f"got {', '.join(unknown)}, which do not occur in it",
            hint="Leave them away: they would change nothing.",
        )
    return dict(given)


def _replace_sets(content: Content, sets: list[SegmentSet], literal: Callable[[str], str]) -> Iterator[str]:
    """Yield the texts of a message with a placeholder for each set, and append the sets to `sets`."""
    items = [content] if isinstance(content, str | Trusted | Segment | SegmentSet) else content
    if not is_iterable(items) or isinstance(items, bytes | Mapping):
        raise InvalidPrompt(f"expected a str or a list of str and segments as content, got {type(content).__name__}")
    parts: list[str | Trusted | Segment | SegmentSet] = []
    for item in items:
        if not isinstance(item, str | Trusted | Segment | SegmentSet):
            raise InvalidPrompt(f"expected str, Trusted, Segment or SegmentSet in a message, got {type(item).__name__}")
        if not isinstance(item, str) or item.strip(PRIVATE):
            parts.append(item)
    for kind, group in groupby(parts, _kind):
        if kind is str:
            yield literal("".join(map(str, group)))  # as one text: two may form the name of a control token
        elif kind is Trusted:
            yield from map(str, group)
        else:
            for each in [SegmentSet(group)] if kind is Segment else group:  # type: ignore[arg-type]
                sets.append(each)  # type: ignore[arg-type]
                yield f"{_PLACEHOLDER_BEGIN}{len(sets) - 1}{_PLACEHOLDER_END}"


def _kind(part: str | Trusted | Segment | SegmentSet) -> type:
    return next(kind for kind in (str, Trusted, Segment, SegmentSet) if isinstance(part, kind))


def _apply_template(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> str:
    roles = [message["role"] for message in messages]
    if tokenizer.chat_template:
        from jinja2 import TemplateError

        options = {"tokenize": False, "add_generation_prompt": True, **variables}
        try:
            return str(tokenizer.apply_chat_template(messages, tools=tools, **options))  # type: ignore[arg-type]
        except TemplateError as error:
            if (shorter := _with_short_ids(messages)) != messages:  # Mistral's templates take ids of nine characters
                return _apply_template(shorter, tokenizer, tools, variables)
            if roles[:2] == ["system", "user"]:
                contents = [message["content"] for message in messages[:2]]
                first = {**messages[1], "content": "\n\n".join(filter(None, contents))}
                return _apply_template([first, *messages[2:]], tokenizer, tools, variables)
            raise InvalidPrompt(
                f"the chat template of {tokenizer.name_or_path!r} cannot render roles {roles}: {error}",
                hint="Change the order of the roles, or set tokenizer.chat_template.",
            ) from error
    if roles not in (["user"], ["system", "user"]):
        raise InvalidPrompt(
            "expected one user message, with or without a system message: this tokenizer has no chat template, "
            f"got roles {roles}",
            hint="Take its instruct version, set tokenizer.chat_template, or build Prompt(prefix, segments, suffix).",
        )
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages in which ids of calls have nine letters or digits."""

    def short(identifier: str) -> str:
        is_short = re.fullmatch("[a-zA-Z0-9]{9}", identifier)
        return identifier if is_short else hashlib.sha256(identifier.encode()).hexdigest()[:9]

    found = []
    for message in messages:
        changed = dict(message)
        if "tool_calls" in changed:
            changed["tool_calls"] = [{**call, "id": short(call["id"])} for call in changed["tool_calls"]]
        if "tool_call_id" in changed:
            changed["tool_call_id"] = short(str(changed["tool_call_id"]))
        found.append(changed)
    return found
