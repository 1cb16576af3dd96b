"""Errors as HTTP: what a server refuses, and the one table that gives every error its status.

A body is `{"error": {"message", "type", "param", "code", "hint"}}`, the shape of OpenAI's with the fix added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response

from invariant_rag import errors
from invariant_rag.server.fields import field_of, hint_of, in_fields
from invariant_rag.server.json_text import JsonReply
from invariant_rag.server.schemas import Request


class Refusal(errors.InvariantRAGError):
    """A request that the server refuses.

    Args:
        message: What was expected and what was given.
        param: The field that is wrong.
        hint: What to do about it.
        retry_after: Seconds after which another try may succeed.
    """

    hint = "Change the request as the message says."

    def __init__(
        self, message: str, *, param: str | None = None, hint: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.retry_after = retry_after


class InvalidRequest(Refusal):
    """A request with unknown fields, missing ones, or values that are none."""

    hint = "The fields are those of OpenAI's API, with documents and invariant; see /openapi.json."


class UnknownModel(Refusal):
    """A model that the server does not serve."""

    hint = "GET /v1/models lists those that it does."


class Unauthorized(Refusal):
    """No key, or a wrong one."""

    hint = "Send `Authorization: Bearer KEY`."


class TooLarge(Refusal):
    """A body or a prompt beyond the limits."""

    hint = "Send fewer or shorter documents."


class Busy(Refusal):
    """As many requests run and wait as the server takes, or the model behind it."""

    hint = "Try again after the seconds of Retry-After."


class SlowRequest(Refusal):
    """A client that does not send its request in time."""

    hint = "Send the whole body at once."


class Ambiguous(Refusal):
    """A request whose end two headers tell in two ways, which may hide another one behind it (RFC 9112 6.1)."""

    hint = "Send one of them."


class DeadlineExceeded(Refusal):
    """An answer that was not finished in time."""

    hint = "Ask for fewer tokens, or try again when the server is less busy."


class ClientLeft(Refusal):
    """Nobody waits for the answer any more."""

    hint = ""


class UpstreamFailed(Refusal):
    """The engine behind this server refused a request, or cannot be reached."""

    hint = "Try again; if that does not help, its logs say more than it answered."


class ReplicaLost(Refusal):
    """The replica that was answering is gone, or there is none."""

    hint = "Ask again: another replica answers."


class ReplicaFailed(Refusal):
    """A fault of a replica."""

    hint = "The logs of Ray Serve say where it was."


class UpstreamRefused(Refusal):
    """A request that the engine behind this server takes for a wrong one; the message is its own."""

    hint = "Change the request as the message says: the model behind this server does not take it."


_STATUS: tuple[tuple[type[errors.InvariantRAGError], int], ...] = (
    (Unauthorized, 401),
    (UnknownModel, 404),
    (SlowRequest, 408),
    (TooLarge, 413),
    (errors.IncompleteObject, 422),
    (errors.InvalidObject, 422),
    (Busy, 429),
    (ClientLeft, 499),
    (errors.ExtraRequired, 501),
    (UpstreamFailed, 502),
    (ReplicaLost, 503),
    (DeadlineExceeded, 504),
    (Ambiguous, 400),
    (InvalidRequest, 400),
    (UpstreamRefused, 400),
    (errors.ContextOverflow, 400),
    (errors.InvalidChoice, 400),
    (errors.InvalidOption, 400),
    (errors.InvalidPrompt, 400),
    (errors.InvalidSchema, 400),
    (errors.InvalidSegment, 400),
    (errors.InvalidTool, 400),
    (errors.UnknownName, 400),
    (errors.UnsupportedCombination, 400),
    (errors.UnsupportedModel, 400),
)
"""Status of every error that a request can cause. Any other one is a fault of the server: 500."""

_CODES: Mapping[type, str] = {
    errors.ContextOverflow: "context_length_exceeded",
    UnknownModel: "model_not_found",
    Unauthorized: "invalid_api_key",
    Busy: "rate_limit_exceeded",
}
"""Codes for which OpenAI has a name; the others are those of the classes."""

_KINDS = ("bool", "dict", "float", "int", "list", "str")
_VARIANT = re.compile("|".join((*_KINDS, r".*[^\w].*")))
"""What pydantic adds to the place of an error where a field may be of several kinds: `str`, `function-after[...]`."""

_MODELS = frozenset(each.__name__ for each in Request.__subclasses__())
_TAGS = ("text", "document", "documents")
"""What it adds after the number of a part of a message."""

_STARLETTE = {404: "not_found", 405: "method_not_allowed"}
_TYPES = {401: "authentication_error", 429: "rate_limit_error", 501: "invalid_request_error"}
_FAULT = "The server failed. The request id tells its operator where to look."


def status_of(error: BaseException) -> int:
    """Return the HTTP status of an error."""
    return next((status for kind, status in _STATUS if isinstance(error, kind)), 500)


def error_body(error: BaseException) -> dict[str, Any]:
    """Return the body of an error. Of a fault of the server it says nothing: its message may hold anything."""
    status = status_of(error)
    if not isinstance(error, errors.InvariantRAGError) or status == 500:
        return _body(500, _FAULT, "internal_error", hint="Report it with its request id.")
    code = next((code for kind, code in _CODES.items() if isinstance(error, kind)), _snake(type(error).__name__))
    message = str(error) if isinstance(error, Refusal) else in_fields(str(error))
    return _body(status, message, code, field_of(error), hint_of(error))


def error_response(error: BaseException) -> Response:
    """Return an error as a response."""
    headers = {}
    if isinstance(error, Refusal) and error.retry_after is not None:
        headers["Retry-After"] = str(error.retry_after)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, Ambiguous | TooLarge | SlowRequest):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JsonReply(error_body(error), status_of(error), headers)


def invalid_request(problems: Sequence[Mapping[str, Any]]) -> InvalidRequest:
    """Return what pydantic says of a body: ten fields, and what was expected of each. No value is repeated."""
    problems = sorted(problems, key=lambda each: each["type"] != "extra_forbidden")
    found: dict[str, str] = {}
    for each in problems:
        if not each["loc"] or each["loc"][-1] not in _KINDS:
            found.setdefault(_path(each["loc"]), _expected(each))
    if not found:
        found[_path(problems[0]["loc"])] = _expected(problems[0])
    listed = [f"{path}: {message}" if path else message for path, message in list(found.items())[:10]]
    more = f"; and {len(found) - 10} more" if len(found) > 10 else ""
    return InvalidRequest("; ".join(listed) + more, param=next(iter(found), "") or None)


def http_error(error: HTTPException) -> Response:
    """Return what Starlette refuses (an unknown path or method, a body that is no JSON) in the same shape."""
    message = str(error.detail) if error.status_code != 500 else _FAULT
    body = _body(error.status_code, message, _STARLETTE.get(error.status_code, "invalid_request"))
    return JsonReply(body, error.status_code, error.headers)


def _body(status: int, message: str, code: str, param: str | None = None, hint: str = "") -> dict[str, Any]:
    kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code, "hint": hint}}


def _expected(each: Mapping[str, Any]) -> str:
    if each["type"] == "extra_forbidden":
        return "unknown field"
    return str(each["msg"]).removeprefix("Value error, ").replace("Input should be", "expected")


def _path(location: Sequence[int | str]) -> str:
    """Return where a field is: `messages[0].content`. Names of variants, which pydantic adds, are left out."""
    path = ""
    for before, part in pairwise(("body", *location)):
        if part in _MODELS or (isinstance(before, int) and part in _TAGS):
            continue
        if isinstance(part, str):
            path += "" if path and _VARIANT.fullmatch(part) else f".{part}" if path else part
        else:
            path += f"[{part}]"
    return path.encode("ascii", "replace").decode()[:200]


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
