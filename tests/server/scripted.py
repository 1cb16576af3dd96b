"""A real HTTP server that answers chats as a test says: another API, on its good days and its bad ones."""

import asyncio
import json
from contextlib import contextmanager
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from invariant_rag.server.serving import in_thread

USAGE = {"prompt_tokens": 7, "completion_tokens": 2, "total_tokens": 9, "prompt_tokens_details": {"cached_tokens": 3}}


class Answer(NamedTuple):
    """What is answered to one request."""

    status: int = 200
    body: Any = None
    headers: Any = None
    seconds: float = 0.0


def completion(content="white", **more):
    """Return a whole reply."""
    message = {"role": "assistant", "content": content, **more}
    return {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": USAGE}


def refusal(message, **more):
    """Return an error in OpenAI's shape."""
    return {"error": {"message": message, "type": "error", "param": None, "code": None, **more}}


def events(*chunks):
    """Return server-sent events."""
    lines = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in chunks]
    return b"".join(b"data: " + line + b"\n\n" for line in lines)


class ScriptedAPI:
    """Answers that are given in turn; the last one again and again. And what was asked."""

    def __init__(self):
        self.url, self.answers, self.bodies, self.headers = "", [], [], []
        self.left = 0  # clients that closed the connection while they waited
        self.card = {"id": "far"}  # of the one model in the list

    def plan(self, *answers):
        self.answers[:], self.bodies[:], self.left = answers, [], 0

    async def answer(self, request):
        self.bodies.append(await request.json())
        self.headers.append(dict(request.headers))
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        for _ in range(round(answer.seconds / 0.02)):
            if await request.is_disconnected():
                self.left += 1
                break
            await asyncio.sleep(0.02)
        if not isinstance(answer.body, bytes):
            return JSONResponse(answer.body, answer.status, answer.headers)
        return StreamingResponse(pieces_of(answer.body), answer.status, answer.headers)

    async def models(self, request):
        self.headers.append(dict(request.headers))
        return JSONResponse({"object": "list", "data": [self.card]})


async def pieces_of(body):
    for line in body.splitlines(keepends=True):
        if line.startswith(b"data: break"):
            raise ConnectionError  # uvicorn closes the connection
        yield line


@contextmanager
def scripted_api():
    """Run one on loopback."""
    api = ScriptedAPI()
    routes = [Route("/v1/models", api.models), Route("/v1/chat/completions", api.answer, methods=["POST"])]
    config = uvicorn.Config(Starlette(routes=routes), "127.0.0.1", 0, log_level="critical", lifespan="off")
    with in_thread(uvicorn.Server(config)) as url:
        api.url = f"{url}/v1"
        yield api
