"""Requests to an OpenAI-compatible API: what was asked of this server, with its documents written as text."""

from __future__ import annotations

from typing import Any

from invariant_rag.api_models import PlainRequest
from invariant_rag.server.engines.base import Call


def body_of(call: Call, request: PlainRequest, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body of a request, but for the limit of its answer.

    Args:
        call: What was asked.
        request: Its conversation as plain text.
        model: Name of the model.
        stream: Whether the answer is to come in pieces.
    """
    body = {"model": model, **(_chat if call.chat else _completion)(call, request), **_sampling(call)}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {})


def _chat(call: Call, request: PlainRequest) -> dict[str, Any]:
    extra = call.extra or ({},) * len(request.turns)
    messages = []
    for turn, more in zip(request.turns, extra, strict=True):
        kept = {name: value for name, value in more.items() if name != "reasoning_content"}  # few APIs take it back
        content = None if kept.get("tool_calls") and not turn.text else turn.text
        messages.append({**kept, "role": turn.role, "content": content})
    body: dict[str, Any] = {"messages": messages}
    if call.tools:
        body |= {"tools": list(call.tools), "tool_choice": _tool_choice(call.tool_choice)}
        body |= {} if call.parallel else {"parallel_tool_calls": False}
    if call.schema is not None:
        body["response_format"] = call.response_format
    if call.template_kwargs:
        body["chat_template_kwargs"] = dict(call.template_kwargs)
    top = {"top_logprobs": call.top_logprobs} if call.top_logprobs else {}
    return body | ({"logprobs": True, **top} if call.logprobs else {})


def _completion(call: Call, request: PlainRequest) -> dict[str, Any]:
    (turn,) = request.turns
    token_ids = next((part for part in turn.parts if isinstance(part, tuple)), None)
    prompt = turn.text if token_ids is None else list(token_ids)
    return {"prompt": prompt} | ({"logprobs": call.top_logprobs} if call.logprobs else {})


def _tool_choice(choice: str) -> str | dict[str, Any]:
    return choice if choice in {"auto", "none", "required"} else {"type": "function", "function": {"name": choice}}


def _sampling(call: Call) -> dict[str, Any]:
    sampling = call.sampling
    body: dict[str, Any] = {"temperature": sampling.temperature, **sampling.more}
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if call.stop:
        body["stop"] = list(call.stop)
    return body | ({"n": call.count} if call.count > 1 else {})
