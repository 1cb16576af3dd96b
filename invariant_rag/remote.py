"""A model behind `invariant-rag serve`, for applications without torch: conversations with segments over HTTP."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from weakref import finalize

from invariant_rag import errors
from invariant_rag.checks import check_items, check_number, check_real, check_text
from invariant_rag.errors import InvalidChoice, InvalidPrompt, InvalidSegment, RemoteError
from invariant_rag.generation.answers import (
    AnswerDelta,
    AnswerRequest,
    Reply,
    parse_chunks,
    parse_reply,
    request_fields,
)
from invariant_rag.prompts.tools import ToolCall
from invariant_rag.segments import Segment, SegmentSet, canonical_json

if TYPE_CHECKING:
    import httpx

_PLAIN = str | int | float | bool | None
_TRY_AGAIN = (429, 502, 503)
_LONGEST_PAUSE = 30.0
_NAMES = (
    "IncompleteObject InvalidChoice InvalidObject InvalidOption InvalidPrompt InvalidSchema InvalidSegment InvalidTool"
)
_TYPED: dict[str, type[errors.InvariantRAGError]] = {
    re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower(): getattr(errors, name)
    for name in (*_NAMES.split(), "UnsupportedCombination", "UnsupportedModel")
} | {"context_length_exceeded": errors.ContextOverflow}
"""Errors of the server that are raised here as what they are there, by their code."""


class RemoteModel:
    """A model that a server runs. Its methods block, and may be called from several threads.

    >>> RemoteModel("http://localhost:8000/v1").chat([{"role": "user", "content": "Hello"}])  # doctest: +SKIP

    Args:
        base_url: Address of the API, such as `http://localhost:8000/v1`.
        model: Name of the model. None: the one that the server has.
        api_key: Key for the server. None: none.
        timeout: Seconds for an answer, or for the next chunk of a stream.
        max_retries: How often a request is sent again where the server was busy or could not be reached.
    """

    _settings: dict[str, Any]

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout: float = 300.0,
        max_retries: int = 2,
    ) -> None:
        import httpx

        if not re.match(r"https?://", check_text("base_url", base_url)):
            raise InvalidChoice(f"base_url: expected an address with http:// or https://, got {base_url!r}")
        settings = {"model": model, "api_key": api_key, "timeout": timeout, "max_retries": max_retries}
        self._settings: dict[str, Any] = settings
        self.model = model
        self.max_retries = check_number("max_retries", max_retries, 0)
        headers = {} if api_key is None else {"Authorization": f"Bearer {check_text('api_key', api_key)}"}
        seconds = check_real("timeout", timeout)
        self._client = httpx.Client(base_url=base_url.rstrip("/"), headers=headers, timeout=seconds)
        finalize(self, self._client.close)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RemoteModel, **self._settings), (str(self._client.base_url).rstrip("/"),)

    def reply(self, request: AnswerRequest, *, choices: Mapping[str, Any] = MappingProxyType({})) -> Reply:
        """Answer a request as `generation.answering` does for a model of this process.

        `choices` are method, ordering and overflow of the request. Options that a server does not take are an
        `UnsupportedCombination`.
        """
        return parse_reply(self._post(*_path_and_body(request, choices)), request)

    def stream_reply(
        self, request: AnswerRequest, *, choices: Mapping[str, Any] = MappingProxyType({})
    ) -> Iterator[AnswerDelta | Reply]:
        """Answer a request, and yield the deltas of the answers as they come, and then the whole reply. See `reply`."""
        yield from parse_chunks(self._stream(*_path_and_body(request, choices)), request)

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> dict[str, Any]:
        """Answer a conversation; return a `chat.completion` of OpenAI's, with `invariant` and citations.

        Messages are those of `InvariantModel.chat_prompt`; other fields of the request that are None are left away.
        A server that cannot be reached, or refuses the request, is a `RemoteError`; else errors are as in this process.
        """
        return self._post("/chat/completions", {"messages": chat_messages(messages), **fields})

    def stream_chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Iterator[dict[str, Any]]:
        """Answer a conversation, and yield the chunks, of which the last one has the usage. See `chat`."""
        return self._stream("/chat/completions", {"messages": chat_messages(messages), **fields})

    def complete(self, parts: Iterable[str | Segment | SegmentSet], **fields: Any) -> dict[str, Any]:
        """Continue a text with segments; return a `text_completion` of OpenAI's, with `invariant`. See `chat`."""
        return self._post("/completions", {"prompt": content_parts(parts), **fields})

    def stream_complete(self, parts: Iterable[str | Segment | SegmentSet], **fields: Any) -> Iterator[dict[str, Any]]:
        """Continue a text with segments, and yield the chunks. See `chat`."""
        return self._stream("/completions", {"prompt": content_parts(parts), **fields})

    def context_window(self) -> int | None:
        """Return the tokens that prompt and answer may have together; None if the server does not say."""
        response = self._send("GET", "/models", None)
        try:
            window = response.json()["data"][0].get("max_model_len")
        finally:
            response.close()
        return None if window is None else int(window)

    def _body(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in {"model": self.model, **body}.items() if value is not None}

    def _post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = self._send("POST", path, self._body(body)).json()
        return reply

    def _stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        import httpx

        options = {"stream": True, "stream_options": {"include_usage": True}}
        response = self._send("POST", path, {**self._body(body), **options}, stream=True)
        try:
            for line in response.iter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                chunk = json.loads(data)
                if "error" in chunk:
                    raise error_of(chunk["error"], response.status_code)
                yield chunk
        except httpx.HTTPError as error:
            raise RemoteError(f"the stream of {self._client.base_url} broke off: {error!r}") from error
        finally:
            response.close()

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None, *, stream: bool = False) -> httpx.Response:
        """Send a request, again where that may help."""
        import httpx

        for attempt in range(self.max_retries + 1):
            last = attempt == self.max_retries
            try:
                response = self._client.send(self._client.build_request(method, path, json=body), stream=stream)
            except httpx.HTTPError as error:
                if last or not isinstance(error, httpx.ConnectError):
                    raise RemoteError(f"{self._client.base_url} cannot be reached: {error!r}") from error
                pause = 0.5 * 2**attempt
            else:
                if response.is_success:
                    return response
                response.read()
                response.close()
                if last or response.status_code not in _TRY_AGAIN:
                    raise _refusal(response)
                seconds = response.headers.get("retry-after", "")
                pause = float(seconds) if re.fullmatch(r"\d{1,4}", seconds) else 0.5 * 2**attempt
            time.sleep(min(pause, _LONGEST_PAUSE))
        raise RemoteError(f"{self._client.base_url} cannot be reached")  # for mypy: the last attempt has returned


def _path_and_body(request: AnswerRequest, choices: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    fields, prompt = request_fields(request, choices), request.prompt
    if request.messages is not None:
        return "/chat/completions", {"messages": chat_messages(request.messages), **fields}
    if prompt is None or not all(isinstance(text, str) for text in prompt.texts):
        raise InvalidPrompt("expected messages, or a prompt of text: a server takes no token ids beside segments")
    parts: list[Any] = [part for pair in zip(prompt.texts, (*prompt.sets, ""), strict=True) for part in pair]
    return "/completions", {"prompt": content_parts([part for part in parts if len(part)]), **fields}


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages as the server takes them: segments, which have no token ids, are parts of their contents."""
    converted = []
    for message in check_items("messages", messages, Mapping, error=InvalidPrompt):
        content = message.get("content")
        calls = [_call(each) for each in message.get("tool_calls") or ()]
        parts = content if content is None or isinstance(content, str) else content_parts(content)
        converted.append({**message, "content": parts, **({"tool_calls": calls} if calls else {})})
    return converted


def content_parts(content: Any) -> list[dict[str, Any]]:
    """Return texts and segments as parts of a content."""
    items = [content] if isinstance(content, str | Segment | SegmentSet) else content
    if not isinstance(items, Iterable) or isinstance(items, bytes | Mapping):
        raise InvalidPrompt(f"expected texts and segments, got {type(content).__name__}")
    parts: list[dict[str, Any]] = []
    for item in items:
        if isinstance(item, SegmentSet):
            slots = {} if item.slots is None else {"slots": list(map(asdict, item.slots))}
            parts.append({"type": "documents", "documents": list(map(_document, item)), **slots})
        elif isinstance(item, Segment):
            parts.append({"type": "document", "document": _document(item)})
        elif isinstance(item, str):
            parts.append({"type": "text", "text": str(item)})
        else:
            raise InvalidPrompt(f"expected texts and segments, got {type(item).__name__}")
    return parts


def error_of(described: Mapping[str, Any], status: int) -> errors.InvariantRAGError:
    """Return the error that a server describes."""
    message, hint = str(described.get("message", "")), described.get("hint") or None
    kind = _TYPED.get(str(described.get("code")), RemoteError)
    return kind(f"{message} (status {status})" if kind is RemoteError else message, hint=hint)


def _document(segment: Segment) -> dict[str, Any]:
    if segment.token_ids is not None:
        raise InvalidSegment("expected text: a server takes no token ids of segments")
    metadata = {key: value if _is_plain(value) else canonical_json(value) for key, value in segment.metadata.items()}
    title = {} if segment.title is None else {"title": segment.title}
    score = {} if segment.score is None or not math.isfinite(segment.score) else {"score": float(segment.score)}
    return {"id": segment.content_hash, "text": segment.text, "metadata": metadata, **title, **score}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _PLAIN) and not (isinstance(value, float) and not math.isfinite(value))


def _call(call: ToolCall | Mapping[str, Any]) -> dict[str, Any]:
    """Return the call of a tool in OpenAI's shape, whose arguments are a text."""
    parsed = ToolCall.of(call)
    function = {"name": parsed.name, "arguments": json.dumps(dict(parsed.arguments))}
    return {"id": parsed.id, "type": "function", "function": function}


def _refusal(response: httpx.Response) -> errors.InvariantRAGError:
    try:
        described = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        described = {"message": f"{response.url} answered {response.text[:200]!r}"}
    return error_of(described, response.status_code)
