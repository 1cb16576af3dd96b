"""`POST /v1/chat/completions`, `/v1/completions` and `/tokenize`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from threading import Event
from typing import Annotated, Any, TypeAlias

from fastapi import APIRouter, Body, Request
from sse_starlette import EventSourceResponse
from starlette.responses import Response

from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.server.conversation import chat_call, completion_calls, tokenize_call
from invariant_rag.server.engines.base import Call, Emit, Reply
from invariant_rag.server.json_text import JsonReply, JsonRoute
from invariant_rag.server.order_sampling import compare_orders
from invariant_rag.server.replies import ChatReplies, TextReplies
from invariant_rag.server.running import Running, as_events
from invariant_rag.server.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from invariant_rag.server.state import State, state_of

router = APIRouter(route_class=JsonRoute)
Piece: TypeAlias = tuple[int, AnswerDelta]


@router.post("/v1/chat/completions")
async def chat_completions(request: Request, body: Annotated[ChatRequest, Body()]) -> Response:
    """Answer a conversation. Listing its documents in another order changes no bit of the answer."""
    state = state_of(request)
    state.check_model(body.model)
    state.note(request, body)
    call = chat_call(body, state.settings, state.tenant(request))
    replies = ChatReplies(state.request_id(request), state.engine.name)
    running = _run(state, [call], body.invariant.check_order)
    if not body.stream:
        (reply,) = await running.result(request)
        state.finish(request, [reply])
        return JsonReply(replies.whole(reply))
    first = await running.first(request)

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        for index in range(call.count):
            yield replies.begin(index)
        async for index, delta in _pieces(first, running):
            yield replies.piece(index, delta)
        (reply,) = await running.finished()
        state.finish(request, [reply])
        for index, choice in enumerate(reply.choices):
            yield replies.end(index, choice, reply)
        if body.include_usage:
            yield replies.usage(reply)

    return EventSourceResponse(as_events(chunks(), running, state.noted(request)))


@router.post("/v1/completions")
async def completions(request: Request, body: Annotated[CompletionRequest, Body()]) -> Response:
    """Continue a text, or several."""
    state = state_of(request)
    state.check_model(body.model)
    state.note(request, body)
    calls = completion_calls(body, state.settings, state.tenant(request))
    replies = TextReplies(state.request_id(request), state.engine.name)
    running = _run(state, calls, body.invariant.check_order)
    if not body.stream:
        found = await running.result(request)
        state.finish(request, found)
        return JsonReply(replies.whole(found))
    first = await running.first(request)

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        async for index, delta in _pieces(first, running):
            yield replies.piece(index, delta)
        found = await running.finished()
        state.finish(request, found)
        ends = [(choice, reply) for reply in found for choice in reply.choices]
        for index, (choice, reply) in enumerate(ends):
            yield replies.end(index, choice, reply)
        if body.include_usage:
            yield replies.usage(found)

    return EventSourceResponse(as_events(chunks(), running, state.noted(request)))


@router.post("/tokenize")
async def tokenize(request: Request, body: Annotated[TokenizeRequest, Body()]) -> Response:
    """Return the token ids of a text, or of a conversation as the model reads it."""
    state = state_of(request)
    state.check_model(body.model)
    call = tokenize_call(body, state.tenant(request))
    running: Running[Piece, list[int]] = state.run(lambda _put, _abandoned: state.engine.tokens(call))
    tokens = await running.result(request)
    window = state.engine.context_window
    return JsonReply({"count": len(tokens), "max_model_len": window, "tokens": tokens})


def _run(state: State, calls: list[Call], check_orders: int) -> Running[Piece, list[Reply]]:
    """Start calls, one after another; their answers are numbered through."""

    def work(put: Callable[[Piece], None], abandoned: Event) -> list[Reply]:
        found = []
        for number, call in enumerate(calls):
            reply = state.engine.answer(call, _numbered(put, number * call.count), abandoned)
            if check_orders:
                report = {**reply.report, "check_order": compare_orders(state.engine, call, check_orders, abandoned)}
                reply = replace(reply, report=report)
            state.sampling.consider(call, reply)
            found.append(reply)
        return found

    return state.run(work)


def _numbered(put: Callable[[Piece], None], first: int) -> Emit:
    return lambda index, delta: put((first + index, delta))


async def _pieces(first: list[Piece], running: Running[Piece, list[Reply]]) -> AsyncIterator[Piece]:
    for piece in first:
        yield piece
    if first:
        async for piece in running.rest():
            yield piece
