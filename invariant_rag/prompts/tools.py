"""Tools that a model may call, and calls of them, in the shapes that chat templates and frameworks use."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from invariant_rag.checks import check_text, is_iterable
from invariant_rag.errors import InvalidTool
from invariant_rag.files import parse_json
from invariant_rag.shown import shown

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NAME = re.compile(r"[\w./:-]{1,128}")


@dataclass(frozen=True)
class Tool:
    """A function that a model may call."""

    name: str  # letters, digits, and `_ . / : -`
    description: str = ""  # what it does, for the model
    parameters: Mapping[str, Any] = field(default_factory=_NO_PARAMETERS.copy)  # JSON schema of an object

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise InvalidTool(f"expected a name of up to 128 letters, digits and _ . / : -, got {shown(self.name)}")
        check_text("description", self.description, error=InvalidTool)
        if not isinstance(self.parameters, Mapping) or self.parameters.get("type", "object") != "object":
            raise InvalidTool(
                f"expected a schema of an object as parameters of {self.name!r}, got {shown(self.parameters)}"
            )
        _check_json(f"parameters of tool {self.name!r}", self.parameters)

    @classmethod
    def of(cls, tool: Tool | Mapping[str, Any]) -> Tool:
        """Return a tool, also from OpenAI's shape; raise `InvalidTool` for anything else."""
        if isinstance(tool, Tool):
            return tool
        function = _function_of(tool)
        if "name" not in function:
            raise InvalidTool(f"expected a Tool, or a dict with the name of a function, got {shown(tool)}")
        description, parameters = function.get("description"), function.get("parameters")
        if parameters is None or (isinstance(parameters, dict) and not parameters):
            parameters = _NO_PARAMETERS
        return cls(function["name"], "" if description is None else description, parameters)

    def to_dict(self) -> dict[str, Any]:
        """Return the tool in OpenAI's shape."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolCall:
    """A call that a model wrote."""

    id: str  # which the message with the result names; see `call_id`
    name: str  # of the tool
    arguments: Mapping[str, Any]  # as JSON has them

    def __post_init__(self) -> None:
        check_text("id", self.id, error=InvalidTool)
        check_text("name", self.name, error=InvalidTool)
        if not isinstance(self.arguments, Mapping):
            raise InvalidTool(f"expected an object as arguments of {self.name!r}, got {shown(self.arguments)}")
        _check_json(f"arguments of {self.name!r}", self.arguments)
        object.__setattr__(self, "arguments", dict(self.arguments))

    @classmethod
    def of(cls, call: ToolCall | Mapping[str, Any]) -> ToolCall:
        """Return a call, also from the shapes of OpenAI and LangChain; raise `InvalidTool` for anything else."""
        if isinstance(call, ToolCall):
            return call
        function: Mapping[str, Any] = _function_of(call)
        if not isinstance(call, Mapping) or not isinstance(function.get("name"), str):
            raise InvalidTool(f"expected a ToolCall, or a dict with name and arguments, got {shown(call)}")
        arguments = function.get("arguments", function.get("args"))
        try:
            if isinstance(arguments, str):
                arguments = parse_json(arguments) if arguments.strip() else None
        except ValueError as error:
            raise InvalidTool(f"expected JSON as arguments of {function['name']!r}, got {shown(arguments)}") from error
        identifier = "" if call.get("id") is None else call["id"]
        return cls(identifier, function["name"], {} if arguments is None else arguments)

    def to_dict(self) -> dict[str, Any]:
        """Return the call in the shape that transformers documents."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"type": "function", "id": self.id, "function": function}


def _function_of(value: Any) -> Mapping[str, Any]:
    """Return the function of a tool or a call in OpenAI's shape, or the mapping itself; nothing for another value."""
    function = value.get("function", value) if isinstance(value, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _check_json(what: str, fields: Mapping[Any, Any]) -> None:
    for name, value in fields.items():
        try:
            json.dumps({name: value})
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidTool(f"expected JSON as {what}, got {shown(value)} as {shown(name)}") from error


def as_tools(tools: Iterable[Tool | Mapping[str, Any]]) -> tuple[Tool, ...]:
    """Return tools with distinct names, or raise `InvalidTool`."""
    if isinstance(tools, tuple | list) and not tools:
        return ()
    if not is_iterable(tools):
        raise InvalidTool(f"expected a list of tools, got {shown(tools)}")
    listed = tuple(Tool.of(tool) for tool in tools)
    names = [tool.name for tool in listed]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InvalidTool(f"expected tools with distinct names, got several called {', '.join(twice)}")
    return listed


def choice_of(choice: Mapping[str, Any] | str | bool | None) -> str:
    """Return the choice of a tool, in a shape of OpenAI or of a framework, as `AnswerRequest` takes it."""
    if choice is None or isinstance(choice, str):
        return choice or "auto"
    if isinstance(choice, bool):
        return "required" if choice else "none"
    if isinstance(name := _function_of(choice).get("name"), str):
        return name
    raise InvalidTool(f"tool_choice: expected 'auto', 'none', 'required', or the name of a tool, got {shown(choice)}")


def call_id(prompt: str, index: int, name: str) -> str:
    """Return the id of a call: the same for the same prompt, index in the answer and tool."""
    return "call_" + hashlib.sha256(json.dumps([prompt, index, name]).encode()).hexdigest()[:24]
