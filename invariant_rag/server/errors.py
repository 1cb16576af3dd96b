"""Errors as HTTP: what a server refuses, the status of every error, and the library's errors in words of a request.

A body is `{"error": {"message", "type", "param", "code", "hint"}}`, the shape of OpenAI's with the fix added.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from invariant_rag import errors
from invariant_rag.errors import InvariantRAGError


class Refusal(InvariantRAGError):
    """A request that the server refuses: with the field that is wrong, and seconds after which a try may succeed."""

    status = 400
    hint = "Change the request as the message says."

    def __init_subclass__(cls, status: int = 400, hint: str = hint) -> None:
        cls.status, cls.hint = status, hint

    def __init__(
        self, message: str, *, param: str | None = None, hint: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(Refusal, hint="The fields are OpenAI's, with documents and invariant; see /openapi.json."):
    """A request with unknown fields, missing ones, or values that are none."""


class Ambiguous(Refusal, hint="Send one of them."):
    """A request whose end two headers give in two ways, which may hide another one after it (RFC 9112 6.1)."""


class Unauthorized(Refusal, status=401, hint="Send `Authorization: Bearer KEY`."):
    """No key, or a wrong one."""


class UnknownModel(Refusal, status=404, hint="GET /v1/models lists those that it does."):
    """A model that the server does not serve."""


class SlowRequest(Refusal, status=408, hint="Send the whole body at once."):
    """A client that does not send its request in time."""


class TooLarge(Refusal, status=413, hint="Send fewer or shorter documents."):
    """A body or a prompt beyond the limits."""


class Busy(Refusal, status=429, hint="Try again after the seconds of Retry-After."):
    """As many requests run and wait as the server takes, or the model behind it."""


class ClientLeft(Refusal, status=499, hint=""):
    """Nobody waits for the answer any more."""


class UpstreamRefused(Refusal, hint="Change the request: the model behind this server does not take it."):
    """A request that the engine behind this server refuses; the message is its own."""


class UpstreamFailed(Refusal, status=502, hint="Try again; if that does not help, its logs say more than it answered."):
    """The engine behind this server refused a request, or cannot be reached."""


class ReplicaLost(Refusal, status=503, hint="Ask again: another replica answers."):
    """The replica that was answering is gone, or there is none."""


class DeadlineExceeded(Refusal, status=504, hint="Ask for fewer tokens, or try again when the server is less busy."):
    """An answer that was not finished in time."""


class ReplicaFailed(Refusal, status=500, hint="The logs of Ray Serve say where it was."):
    """A fault of a replica."""


_OF_REQUESTS = (
    errors.ContextOverflow,
    errors.InvalidChoice,
    errors.InvalidOption,
    errors.InvalidPrompt,
    errors.InvalidSchema,
    errors.InvalidSegment,
    errors.InvalidTool,
    errors.UnknownName,
    errors.UnsupportedCombination,
    errors.UnsupportedModel,
)
_STATUS = {
    errors.IncompleteObject: 422,
    errors.InvalidObject: 422,
    errors.ExtraRequired: 501,
    **dict.fromkeys(_OF_REQUESTS, 400),
}
"""Status of every error of the library that a request can cause. Any other one is a fault of the server: 500."""

_CODES: Mapping[type, str] = {
    errors.ContextOverflow: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthorized: "invalid_api_key",
    Busy: "rate_limit_exceeded",
}
"""Codes for which OpenAI has a name; the others are those of the classes."""
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 501: "invalid_request_error"}
_FAULT = "The server failed. The request id tells its operator where to look."

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
"""Options as messages of the library name them, and the fields that they are from."""
_OPTION = re.compile("|".join(rf"(?<!\w){re.escape(name)}(?!\w)" for name in _FIELDS))
_LEADING = re.compile(r"(\w+): expected ")
_HINTS: Mapping[type[InvariantRAGError], str] = {
    errors.ContextOverflow: "Send fewer or shorter documents, ask for fewer max_tokens, or let some be left away: "
    "invariant.overflow is drop_last, or trim_segments.",
    errors.IncompleteObject: "Ask for more max_tokens.",
    errors.InvalidOption: "Leave the field away for its default.",
    errors.InvalidPrompt: "A message has a role and a content: a text, or parts that are texts and documents. "
    "A prompt is a text, token ids, or such parts.",
    errors.InvalidSchema: "Give a JSON schema of an object.",
    errors.InvalidSegment: "A document is a text, or an object with text or data.",
    errors.InvalidTool: 'A tool is {"type": "function", "function": {"name", "description", "parameters"}}; the '
    "arguments of a call are a text that holds a JSON object.",
    errors.UnsupportedModel: "GET /v1/models lists what this server has.",
}
"""What to do over HTTP, where the hint of a class speaks of Python or of the command line."""

_KINDS = ("bool", "dict", "float", "int", "list", "str")
_VARIANT = re.compile("|".join((*_KINDS, "Document", "NamedTool", r".*\W.*")))
"""What pydantic adds to the path of an error where a field may be of several kinds: `str`, `Document`, `list[...]`."""
_OBJECT = re.compile(r"a valid dictionary(?: or (?:instance of \w+|object to extract fields from))?")
_TAGS = ("text", "document", "documents")  # what it adds after the index of a part of a message


def encode(content: Any) -> str:
    """Return JSON. Lone surrogates, which a request may hold as escapes and UTF-8 cannot, are replaced."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "replace").decode()


def json_reply(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return a response of JSON in UTF-8, whatever texts it repeats."""
    return Response(encode(content), status, headers, "application/json")


@contextmanager
def about(field: str) -> Iterator[None]:
    """Note in errors of the library what field of the request they are about, unless they name another one."""
    try:
        yield
    except InvariantRAGError as error:
        error.param = error.param or _field_of(error) or field
        raise


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, Refusal):
        return error.status
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the body of an error. For a fault of the server it is constant: the message may hold anything."""
    status = status_of(error)
    if not isinstance(error, InvariantRAGError) or status == 500:
        return _body(500, _FAULT, "internal_error", hint="Report it with its request id.")
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(error).__name__).lower()
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), name)
    message = str(error) if isinstance(error, Refusal) else _in_fields(str(error))
    own = error.hint != type(error).hint
    hint = _in_fields(error.hint) if own else _HINTS.get(type(error), error.hint)
    return _body(status, message, code, _field_of(error), hint)


def error_response(error: BaseException) -> Response:
    """Return an error as a response."""
    headers = {}
    if isinstance(error, Refusal) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, Ambiguous | TooLarge | SlowRequest):
        headers["Connection"] = "close"  # the rest of the body is not received
    return json_reply(error_body(error), status_of(error), headers)


def http_error(error: HTTPException) -> Response:
    """Return what Starlette refuses (an unknown path or method) in the same shape."""
    status, message = error.status_code, _FAULT if error.status_code == 500 else str(error.detail)
    code, hint = {404: "not_found", 405: "method_not_allowed"}.get(status), InvalidRequest.hint
    hint = "GET /openapi.json lists the routes and their methods." if code else hint
    return json_reply(_body(status, message, code or "invalid_request", hint=hint), status, error.headers)


def invalid_request(problems: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Return pydantic's errors of a body: ten fields, and what was expected of each. No value is repeated."""
    problems = sorted(problems, key=lambda each: each["type"] != "extra_forbidden")
    of_fields = [each for each in problems if not each["loc"] or each["loc"][-1] not in _KINDS]
    messages: dict[str, str] = {}
    for each in of_fields or problems[:1]:
        message = "unknown field" if each["type"] == "extra_forbidden" else str(each["msg"])
        message = message.removeprefix("Value error, ").replace("Input should be", "expected")
        message = _OBJECT.sub("a JSON object", message.replace("a valid list", "a JSON array"))
        messages.setdefault(_path(each["loc"]), message)
    for each in problems:
        path = _path(each["loc"])
        if each["loc"][-1:] == ("str",) and messages.get(path, "").startswith("expected a JSON"):
            messages[path] = messages[path].replace("expected", "expected a text or")
    listed = [f"{path}: {message}" if path else message for path, message in list(messages.items())[:10]]
    more = f"; and {len(messages) - 10} more" if len(messages) > 10 else ""
    return InvalidRequest("; ".join(listed) + more, param=next(iter(messages), "") or None)


def _path(location: Sequence[int | str]) -> str:
    """Return where a field is: `messages[0].content`. Names of variants, which pydantic adds, are left out."""
    path, before = "", None
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        elif not path:
            path = part
        elif not _VARIANT.fullmatch(part) and not (isinstance(before, int) and part in _TAGS):
            path += f".{part}"
        before = part
    return path.encode("ascii", "replace").decode()[:200]


def _body(status: int, message: str, code: str, param: str | None = None, hint: str = "") -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "hint": hint}}


def _field_of(error: InvariantRAGError) -> str | None:
    """Return the field that an error is about, as far as it says: `stop` for "stop_strings: expected a text"."""
    if error.param is not None:
        return error.param
    leading = _LEADING.match(str(error)) if isinstance(error, errors.InvalidOption | errors.InvalidChoice) else None
    named = leading or _OPTION.search(str(error))
    if named is not None:
        name = named[1] if leading else named[0]
        return _FIELDS.get(name, name).partition(":")[0]
    return "documents" if isinstance(error, errors.InvalidSegment) else None


def _in_fields(text: str) -> str:
    """Return a message or a hint with fields for options: `max_tokens` for `max_new_tokens`."""
    return _OPTION.sub(lambda match: _FIELDS[match[0]], text)
