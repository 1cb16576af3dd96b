"""Errors of the library in the words of a request: which field became which option, and what to do over HTTP."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from invariant_rag import errors

_FIELDS: Mapping[str, str] = {
    "stop_strings": "stop",
    "max_new_tokens": "max_tokens",
    "tool_choice": "tool_choice",
    "template_kwargs": "chat_template_kwargs",
    'overflow="drop_last"': "invariant.overflow: drop_last",
    'overflow="trim_segments"': "invariant.overflow: trim_segments",
    "Segment(..., score=...)": "the `score` of every document",
    'Judge(by="texts")': '`"by": "texts"`',
}
"""Options as messages name them, and the fields that they are from."""
_OPTION = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in _FIELDS))
_LEADING = re.compile(r"(\w+): expected ")
_OWN_FIELD: Mapping[type[errors.InvariantRAGError], str] = {errors.InvalidSegment: "documents"}
"""Errors that are about the same field wherever they come from."""
_HINTS: Mapping[type[errors.InvariantRAGError], str] = {
    errors.ContextOverflow: "Send fewer or shorter documents, ask for fewer max_tokens, or let some be left away: "
    "invariant.overflow is drop_last, or trim_segments.",
    errors.IncompleteObject: "Ask for more max_tokens.",
    errors.InvalidOption: "Leave the field away for its default.",
    errors.InvalidPrompt: "A message has a role and a content: a text, or parts that are texts and documents.",
    errors.InvalidSchema: "Give a JSON schema of an object.",
    errors.InvalidSegment: "A document is a text, or an object with text or data.",
    errors.InvalidTool: 'A tool is {"type": "function", "function": {"name", "description", "parameters"}}.',
    errors.UnsupportedModel: "GET /v1/models lists what this server has.",
}
"""What to do over HTTP, where the hint of a class speaks of Python or of the command line."""


@contextmanager
def about(field: str) -> Iterator[None]:
    """Note in errors of the library what field of the request they are about, unless they name another one."""
    try:
        yield
    except errors.InvariantRAGError as error:
        error.param = error.param or field_of(error) or field
        raise


def field_of(error: errors.InvariantRAGError) -> str | None:
    """Return the field that an error is about, as far as it says.

    >>> field_of(errors.InvalidOption("stop_strings: expected a text"))
    'stop'
    """
    if error.param is not None:
        return error.param
    leading = _LEADING.match(str(error)) if isinstance(error, errors.InvalidOption | errors.InvalidChoice) else None
    named = leading[1] if leading else next((found[0] for found in _OPTION.finditer(str(error))), None)
    if named is not None:
        return _FIELDS.get(named, named).partition(":")[0]
    return next((field for kind, field in _OWN_FIELD.items() if isinstance(error, kind)), None)


def in_fields(text: str) -> str:
    """Return a message or a hint with fields for options.

    >>> in_fields("expected max_new_tokens of at least 9 for this schema, got 4")
    'expected max_tokens of at least 9 for this schema, got 4'
    """
    return _OPTION.sub(lambda found: _FIELDS[found[0]], text)


def hint_of(error: errors.InvariantRAGError) -> str:
    """Return what to do about an error over HTTP."""
    own = error.hint != type(error).hint
    return in_fields(error.hint) if own else _HINTS.get(type(error), error.hint)
