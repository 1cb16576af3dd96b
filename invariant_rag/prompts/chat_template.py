"""Chat messages with segments in them, rendered once through the model's chat template."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from invariant_rag.checks import check_items, check_text, is_iterable
from invariant_rag.errors import InvalidPrompt, TokenizerRequired
from invariant_rag.prompts.template_probes import TemplateFormat, template_format, templates_of
from invariant_rag.prompts.tokenization import CUT, PRIVATE, Literals, Trusted, literals_of
from invariant_rag.prompts.tools import Tool, ToolCall, as_tools
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DEFAULT_SYSTEM = "Answer the question using only the documents."
Message: TypeAlias = Mapping[str, Any]

_PLACEHOLDER = re.compile("\ueca4([0-9]+)\ueca5")  # of a set, while the template is rendered: no text may hold it
_PART = str | Trusted | Segment | SegmentSet
_OF = ("name", "tool_call_id")  # the fields that link a result to its call


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

    The template gets a placeholder for each set, never the text of a segment. Only the template makes control tokens:
    their names in messages, tools, calls and results are literal text, unless a part of a content is `Trusted`, or they
    are the markers of the reasoning with which an assistant's message begins. What it does not render of tools, calls
    and results is written as text. Without a template, one question, with or without a system message, is plain text.

    Args:
        messages: `{"role": ..., "content": ...}`; a content is a string, a `Trusted` text, a `SegmentSet`, or a list
            of these and of `Segment`s, of which adjacent ones form a set. An assistant's message may have `tool_calls`
            (what `ToolCall.of` takes); a result has the role `tool`, and `tool_call_id` or `name`.
        tokenizer: The tokenizer.
        query: Query that relevance orderings score segments against.
        tools: Tools that the model may call: `Tool`s, or dicts in OpenAI's shape.
        template_kwargs: Other variables of the template, such as `enable_thinking`.
    """
    if tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: a chat prompt needs its chat template")
    messages = check_items("messages", messages, Mapping, error=InvalidPrompt)
    if not messages:
        raise InvalidPrompt("expected at least one message, got none")
    offered, literals = as_tools(tools), literals_of(tokenizer)
    sets: list[SegmentSet] = []
    plain, uses_tools = [], bool(offered)
    for message in messages:
        plain.append(_plain_message(message, sets, literals, tokenizer))
        uses_tools = uses_tools or plain[-1]["role"] == "tool" or "tool_calls" in plain[-1]
    variables = _template_variables(template_kwargs, tokenizer) if template_kwargs else {}
    described = None
    if uses_tools:
        form = template_format(tokenizer) if tokenizer.chat_template else TemplateFormat()
        plain, described = _prepare_tool_messages(plain, offered, form, literals.cut)
    rendered = literals.needed_cuts(_apply_template(plain, tokenizer, described, variables))
    parts: list[Any] = _PLACEHOLDER.split(rendered)  # text, index, text, ...
    for index in range(len(sets)):
        if (count := parts[1::2].count(str(index))) != 1:
            raise InvalidPrompt(
                f"expected the chat template of {tokenizer.name_or_path!r} to render every set of segments once; "
                f"it rendered set {index} of {len(sets)} {count} times",
                hint="Set tokenizer.chat_template, or put the segments into a message that the template renders.",
            )
    parts[1::2] = map(sets.__getitem__, map(int, parts[1::2]))
    return Prompt.of(*parts, query=query, rendering=document_rendering)


def _plain_message(
    message: Message, sets: list[SegmentSet], literals: Literals, tokenizer: PreTrainedTokenizerBase
) -> dict[str, Any]:
    """Return a message whose fields are literal text, with placeholders for its sets, which are added to `sets`."""
    role, content, tool_calls = message.get("role"), message.get("content"), message.get("tool_calls")
    calls = [] if tool_calls is None else check_items("tool_calls", tool_calls, object, error=InvalidPrompt)
    if not isinstance(role, str) or ("content" not in message and not (calls and role == "assistant")):
        raise InvalidPrompt(f"expected a message with role and content, got {shown(message)}")
    if not role.isalnum() and literals.holds_name(role):
        raise InvalidPrompt(f"expected the name of a role, got {role!r}, which holds the name of a control token")
    literal = partial(_keep_reasoning, tokenizer=tokenizer, cut=literals.cut) if role == "assistant" else literals.cut
    text = _replace_sets("" if calls and content is None else content, sets, literal)
    plain = {"role": role, "content": text, **({"tool_calls": calls} if calls else {})}
    try:
        for key, value in message.items():
            if key not in ("role", "content", "tool_calls"):
                plain[key] = literals.cut(value, key)
    except RecursionError as error:
        raise InvalidPrompt(f"expected fields nested less deeply in a message of role {role!r}") from error
    return plain


def _replace_sets(content: Any, sets: list[SegmentSet], literal: Callable[[str], str]) -> str:
    """Return the text of a content with a placeholder for each set, and append the sets to `sets`."""
    items = [content] if isinstance(content, _PART) else content
    if not isinstance(items, list | tuple) and (isinstance(items, bytes | Mapping) or not is_iterable(items)):
        raise InvalidPrompt(f"expected a str or a list of str and segments as content, got {type(content).__name__}")
    parts: list[Any] = []  # neighbouring texts are one: two may form the name of a control token; segments are one set
    for item in items:
        if not isinstance(item, _PART):
            raise InvalidPrompt(f"expected str, Trusted, Segment or SegmentSet in a message, got {type(item).__name__}")
        if isinstance(item, Segment):
            if not (parts and isinstance(parts[-1], list)):
                parts.append([])
            parts[-1].append(item)
        elif isinstance(item, str) and parts and isinstance(parts[-1], str):
            parts[-1] += item
        elif not isinstance(item, str) or item.strip(PRIVATE):
            parts.append(item)
    written = ""
    for part in parts:
        if isinstance(part, list | SegmentSet):
            sets.append(part if isinstance(part, SegmentSet) else SegmentSet(part))
            written += f"\ueca4{len(sets) - 1}\ueca5"
        else:
            written += literal(part) if isinstance(part, str) else str(part)
    return written


def _keep_reasoning(text: str, tokenizer: PreTrainedTokenizerBase, cut: Callable[[str], str]) -> str:
    """Make an assistant's text literal except its reasoning markers, by which templates drop the reasoning."""
    literal = cut(text)
    if CUT not in literal:
        return literal
    form = template_format(tokenizer).reasoning
    start = text.lstrip()
    if form is None or not start.startswith(form.open) or form.close not in start:
        return literal
    reasoning, _, answer = start[len(form.open) :].partition(form.close)
    return text[: len(text) - len(start)] + form.open + cut(reasoning) + form.close + cut(answer)


def _template_variables(variables: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    own = {*inspect.signature(tokenizer.apply_chat_template).parameters, "messages"} - {"kwargs"}
    template = "\n".join(templates_of(tokenizer))
    unknown = {name for name in variables if not re.search(rf"\b{re.escape(name)}\b", template)}
    if wrong := ", ".join(sorted((own & variables.keys()) | unknown)):
        hint = "Documents are segments in a message, tools have an argument of their own; others change nothing."
        raise InvalidPrompt(f"template_kwargs: expected variables of the chat template, got {wrong}", hint=hint)
    return dict(variables)


def _prepare_tool_messages(
    messages: Iterable[Mapping[str, Any]], tools: Sequence[Tool], form: TemplateFormat, cut: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages, and tools in OpenAI's shape if the template renders them; everything else is written as text."""
    converted: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    after_results = False  # whether the last message is a user's turn made of results
    for message in messages:
        prepared = dict(message)
        calls = [ToolCall.of(call) for call in prepared.pop("tool_calls", ())]
        names.update({cut(call.id): call.name for call in calls})
        if calls and form.renders_calls and form.results:
            prepared["tool_calls"] = [cut(call.to_dict()) for call in calls]
        elif calls:
            literal = [ToolCall(call.id, cut(call.name), cut(call.arguments)) for call in calls]
            prepared["content"] = "\n".join(filter(None, (prepared["content"], form.call_format.write(literal))))
        is_result = prepared["role"] == "tool"
        if is_result:
            fields = {
                key: check_text(key, prepared[key], error=InvalidPrompt) for key in _OF if prepared.get(key) is not None
            }
            if name := fields.get("name") or names.get(fields.get("tool_call_id", "")):
                prepared["name"] = cut(name)
        if is_result and not form.results:
            title = f"Result of {prepared.get('name', 'the tool')}"
            prepared = {"role": "user", "content": f"{title}:\n{prepared['content']}"}
        if after_results and prepared["role"] == "user":  # many templates refuse two turns of the user in a row
            prepared["content"] = f"{converted.pop()['content']}\n\n{prepared['content']}"
        after_results = is_result and not form.results
        converted.append(prepared)
    described = [cut(tool.to_dict()) for tool in tools]
    if not tools or form.tools:
        return converted, described or None
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in described)
    example = form.call_format.write([ToolCall("", "NAME", {"ARGUMENT": "VALUE"})])
    text = f"You may call these tools:\n{listed}\n\nTo call one, write this and nothing after it:\n{example}"
    system = converted.pop(0)["content"] if converted and converted[0]["role"] == "system" else ""
    return [{"role": "system", "content": "\n\n".join(filter(None, (system, text)))}, *converted], None


def _apply_template(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
) -> str:
    if tokenizer.chat_template:
        from jinja2 import TemplateError

        options = {"tokenize": False, "add_generation_prompt": True, **variables}
        try:
            return str(tokenizer.apply_chat_template(messages, tools=tools, **options))  # type: ignore[arg-type]
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            if (shorter := _with_short_ids(messages)) != messages:  # Mistral's templates take ids of nine characters
                return _apply_template(shorter, tokenizer, tools, variables)
            if roles[:2] == ["system", "user"]:
                contents = [message["content"] for message in messages[:2]]
                first = {**messages[1], "content": "\n\n".join(filter(None, contents))}
                return _apply_template([first, *messages[2:]], tokenizer, tools, variables)
            message = f"the chat template of {tokenizer.name_or_path!r} cannot render roles {roles}: {error}"
            hint = "Change the order of the roles, or set tokenizer.chat_template."
            raise InvalidPrompt(message, hint=hint) from error
    roles = [message["role"] for message in messages]
    if roles not in (["user"], ["system", "user"]):
        raise InvalidPrompt(
            f"expected one question, with or without a system message, got roles {roles}: there is no chat template",
            hint="Take its instruct version, set tokenizer.chat_template, or build Prompt(prefix, segments, suffix).",
        )
    return "\n\n".join(message["content"] for message in messages) + "\nAnswer:"


def _with_short_ids(fields: Any) -> Any:
    """Return messages or calls in which ids of calls have nine letters or digits."""
    if isinstance(fields, list):
        return list(map(_with_short_ids, fields))
    short = {**fields, "tool_calls": _with_short_ids(fields["tool_calls"])} if "tool_calls" in fields else dict(fields)
    for key in {"id", "tool_call_id"} & short.keys():
        text = str(short[key])
        short[key] = text if re.fullmatch("[a-zA-Z0-9]{9}", text) else hashlib.sha256(text.encode()).hexdigest()[:9]
    return short
