"""From the body of a request to what an engine is called with. It runs in a worker; see `worker`.

What comes out is bounded, too: the server takes it out of a pickle.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from pydantic import ValidationError

from invariant_rag.files import parse_json
from invariant_rag.server.conversation import chat_call, completion_calls, tokenize_call
from invariant_rag.server.engines.base import Call, JudgeCall, RerankCall
from invariant_rag.server.errors import InvalidRequest, invalid_request
from invariant_rag.server.ranking import judge_call, rerank_call
from invariant_rag.server.schema_checks import check_values
from invariant_rag.server.schemas import (
    ChatRequest,
    CompletionRequest,
    JudgeRequest,
    Request,
    RerankRequest,
    TokenizeRequest,
)
from invariant_rag.server.settings import Settings

Work: TypeAlias = Sequence[Call] | JudgeCall | RerankCall

MOST_VALUES = 100_000
"""Of a body, not counting numbers: texts, names, lists and objects."""


@dataclass(frozen=True)
class Parsed:
    """A request that was parsed.

    Attributes:
        work: What the engine is called with.
        model: The model that it names.
        include_usage: Whether a stream ends with a chunk of usage.
        check_orders: Orders in which the plain model is asked as well.
        contents: The request for the log, if it is to hold contents.
    """

    work: Any
    model: str | None
    include_usage: bool = False
    check_orders: int = 0
    contents: Mapping[str, Any] | None = None


_ROUTES: Mapping[str, tuple[type[Request], Callable[[Any, Settings, str], Work]]] = {
    "chat": (ChatRequest, lambda body, settings, tenant: [chat_call(body, settings, tenant)]),
    "completions": (CompletionRequest, completion_calls),
    "tokenize": (TokenizeRequest, lambda body, _settings, tenant: [tokenize_call(body, tenant)]),
    "rerank": (RerankRequest, rerank_call),
    "judge": (JudgeRequest, judge_call),
}


def parse(route: str, body: bytes, settings: Settings, tenant: str) -> Parsed:
    """Return a body as a call.

    Args:
        route: `chat`, `completions`, `tokenize`, `rerank` or `judge`.
        body: The body.
        settings: What requests may choose.
        tenant: Whose request it is.

    Raises:
        InvalidRequest: It is no JSON, has fields that do not exist, or values that they do not take.
        InvariantRAGError: It asks for what there is not; see `conversation`.
        TooLarge: It has too many values.
    """
    schema, to_work = _ROUTES[route]
    request: Any
    try:
        document = parse_json(body, finite=True)
        check_values(document, MOST_VALUES, "a body")
        request = schema.model_validate(document)
    except json.JSONDecodeError as error:
        raise InvalidRequest(f"expected a body of JSON: {error.msg} at character {error.pos}") from None
    except ValidationError as error:
        raise invalid_request(error.errors(include_url=False, include_context=False, include_input=False)) from None
    except ValueError as error:
        raise InvalidRequest(f"expected a body of JSON: {error}") from None
    return Parsed(
        to_work(request, settings, tenant),
        request.model,
        include_usage=getattr(request, "include_usage", False),
        check_orders=request.invariant.check_order if hasattr(request, "invariant") else 0,
        contents=request.model_dump(mode="json", exclude_defaults=True) if settings.log_contents else None,
    )
