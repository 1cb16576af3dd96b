"""What a call of a chat model asks for, in the shapes of LangChain and of the APIs that its users know."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from invariant_rag.checks import check_tools
from invariant_rag.errors import InvalidTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from langchain_invariant_rag.parsing import object_parser


@dataclass(frozen=True)
class ChatOptions:
    """What a call of a chat model asks for, beyond decoding.

    Attributes:
        tools: The tools, in OpenAI's shape.
        tool_choice: As for `invariant_rag.generation.tools.ToolCalling`.
        parallel_tool_calls: Whether an answer may hold several calls.
        template_kwargs: Variables of the chat template.
        logprobs: Whether to report log-probabilities of the tokens.
        citations: Whether to cite segments.
    """

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel_tool_calls: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    citations: bool = False

    @classmethod
    def take(cls, parameters: Mapping[str, Any], keywords: dict[str, Any]) -> Self:
        """Return what a call asks for, and take it out of its keywords.

        Args:
            parameters: `template_kwargs`, `logprobs` and `citations` of the model object.
            keywords: What was bound or passed. Variables of the chat template are added to those of the object.

        Raises:
            InvalidTool: The tools are no collection, or the choice of one is of no known shape.
        """
        tools = check_tools(keywords.pop("tools", None))
        return cls(
            tools=[convert_to_openai_tool(tool) for tool in tools],
            tool_choice=choice_of(keywords.pop("tool_choice", None)),
            parallel_tool_calls=keywords.pop("parallel_tool_calls", None) is not False,
            template_kwargs={**parameters["template_kwargs"], **(keywords.pop("template_kwargs", None) or {})},
            logprobs=bool(keywords.pop("logprobs", parameters["logprobs"])),
            citations=bool(keywords.pop("citations", parameters["citations"])),
        )


def choice_of(given: Mapping[str, Any] | str | bool | None) -> str:
    """Return the choice of a tool as `ToolCalling` takes it.

    >>> choice_of(None), choice_of(True), choice_of({"type": "function", "function": {"name": "search"}})
    ('auto', 'required', 'search')

    Raises:
        InvalidTool: It is of no known shape.
    """
    if given is None or isinstance(given, str):
        return given or "auto"
    if isinstance(given, bool):
        return "required" if given else "none"
    function = given.get("function", given) if isinstance(given, Mapping) else None
    if isinstance(function, Mapping) and isinstance(function.get("name"), str):
        return str(function["name"])
    raise InvalidTool(
        f"expected 'auto', 'none', 'any', the name of a tool, or a dict with that name as tool_choice, got {given!r}"
    )


def response_schema(response_format: Mapping[str, Any] | type) -> str:
    """Return the JSON schema of a response format: a class, a schema, or what LangChain's `ProviderStrategy` writes."""
    if isinstance(response_format, Mapping) and "json_schema" in response_format:
        described = response_format["json_schema"]
        return json.dumps({"title": described.get("name", ""), **described["schema"]})
    schema = dict(response_format) if isinstance(response_format, Mapping) else response_format
    return json.dumps(object_parser(schema).get_json_schema())
