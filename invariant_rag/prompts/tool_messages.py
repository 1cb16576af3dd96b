"""Messages with calls of tools and their results, as a chat template renders them; as text where it does not."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from invariant_rag.checks import check_text
from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts.template_format import CallFormat, TemplateFormat
from invariant_rag.prompts.tools import Tool, ToolCall


def describe_tools(tools: Sequence[Mapping[str, Any]], written: CallFormat) -> str:
    """Return the text that tells a model of tools which its chat template does not render."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = written.write([ToolCall("", "NAME", {"ARGUMENT": "VALUE"})])
    return f"You may call these tools:\n{listed}\n\nTo call one, write this and nothing after it:\n{example}"


def _name_of(result: Mapping[str, Any], called: Mapping[str, str]) -> str | None:
    """Return the name of the tool that a result is of, if it is known."""
    for key in ("name", "tool_call_id"):
        if result.get(key) is not None:
            check_text(key, result[key], error=InvalidPrompt)
    return result.get("name") or called.get(result.get("tool_call_id") or "")


def prepare_tool_messages(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool], form: TemplateFormat, cut: Callable[[Any], Any]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None]:
    """Return messages and tools for a chat template, with everything that it does not render written as text.

    - Tools that it ignores are described at the end of the system message.
    - Calls that it ignores are written into the content of their message, in the format of the description.
    - A result goes to the user's turn where the role `tool` is ignored or refused.

    Args:
        messages: Messages whose fields are literal text. `tool_calls` are what `ToolCall.of` takes.
        tools: The tools.
        form: What the template renders.
        cut: Makes text literal.

    Returns:
        The messages; and the tools in OpenAI's shape, or None if the template gets none.
    """
    found: list[dict[str, Any]] = []
    names: dict[str, str] = {}
    after_results = False  # whether the last message is a user's turn made of results
    for message in messages:
        prepared = dict(message)
        given = prepared.pop("tool_calls", None)
        calls = [] if given is None else [ToolCall.of(call) for call in given]
        names.update({cut(call.id): call.name for call in calls})
        if calls and form.renders_calls and form.results:
            prepared["tool_calls"] = [cut(call.to_dict()) for call in calls]
        elif calls:
            literal = [ToolCall(call.id, cut(call.name), cut(call.arguments)) for call in calls]
            prepared["content"] = "\n".join(filter(None, (prepared["content"], form.call_format.write(literal))))
        is_result = prepared["role"] == "tool"
        if is_result and (name := _name_of(prepared, names)):
            prepared["name"] = cut(name)
        if is_result and not form.results:
            title = f"Result of {prepared.get('name', 'the tool')}"
            prepared = {"role": "user", "content": f"{title}:\n{prepared['content']}"}
        if after_results and prepared["role"] == "user":  # many templates refuse two turns of the user in a row
            prepared["content"] = f"{found.pop()['content']}\n\n{prepared['content']}"
        after_results = is_result and not form.results
        found.append(prepared)
    described = [cut(tool.to_dict()) for tool in tools]
    if not tools or form.tools:
        return found, described or None
    text = describe_tools(described, form.call_format)
    if found and found[0]["role"] == "system":
        found[0]["content"] = "\n\n".join(filter(None, (found[0]["content"], text)))
    else:
        found.insert(0, {"role": "system", "content": text})
    return found, None
