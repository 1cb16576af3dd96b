"""`Documents`: vLLM's API server answers requests with documents by itself, to any OpenAI client.

They go through the same application as in `invariant-rag serve`, and from there to the engine of this process. All
other requests are vLLM's, unchanged; documents at other paths, where vLLM would prefill them causally, are refused.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import asdict
from typing import Any

from invariant_rag.files import MAX_DEPTH, parse_json
from invariant_rag.server.application import create_app
from invariant_rag.server.engines.vllm import OnVLLM
from invariant_rag.server.settings import Settings
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from vllm_invariant_rag.arranged_prompt import FIELD, ArrangedPrompt
from vllm_invariant_rag.engines import COMPLETIONS_PATH, FACTS_PATH, ServerFacts
from vllm_invariant_rag.errors import RequestRefused, UnsupportedServer
from vllm_invariant_rag.llm_engine import ServingEngine
from vllm_invariant_rag.model import VLLMBackend

_PLAIN_PATH = "/v1/completions"
_ANSWERED = ("/v1/chat/completions", _PLAIN_PATH)
_OTHERS = ("/invocations", "/v1/chat/completions/batch", "/v1/messages", "/v1/responses", "/cohere/v2/chat")
_MARKS = (b"document", b"kv_transfer_params", b"\\u", b"\0")  # the last two: letters may be written otherwise
_MOST_REQUESTS = 256  # with documents, at the same time; each has a thread while vLLM answers it


class Documents:
    """ASGI middleware around vLLM's application."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._answers: ASGIApp | None = None
        self._tells = False
        self._starting = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in (FACTS_PATH, COMPLETIONS_PATH, *_ANSWERED, *_OTHERS):
            await self._app(scope, receive, send)
            return
        try:
            if path == FACTS_PATH and not self._tells:
                state, self._tells = scope["app"].state, True  # a path of vLLM's, so its keys protect it
                scope["app"].add_api_route(path, lambda: asdict(ServerFacts.of(state.vllm_config)))
            if scope["method"] != "POST":
                await self._app(scope, receive, send)
            else:
                await self._post(path, scope, *await _read(scope, receive), send)
        except ClientDisconnect:
            return  # nobody is left to answer
        except (RequestRefused, UnsupportedServer) as error:
            status = 400 if isinstance(error, RequestRefused) else 501
            described = {"message": str(error), "type": type(error).__name__, "param": None, "code": status}
            await JSONResponse({"error": described}, status)(scope, receive, send)

    async def _post(self, path: str, scope: Scope, body: bytes, replayed: Receive, send: Send) -> None:
        request = _parsed(body) if any(mark in body for mark in _MARKS) else {}
        if _has_documents(request):
            if path not in _ANSWERED:
                raise RequestRefused(f"expected documents at {' or '.join(_ANSWERED)}, got some at {path}")
            await (await self._answering(scope))(scope, replayed, send)
            return
        params = request.get("kv_transfer_params")
        params = params if isinstance(params, dict) and FIELD in params else {}
        if params or path == COMPLETIONS_PATH:
            ServerFacts.of(scope["app"].state.vllm_config)
        if params:
            ids = params.get("prompt_token_ids", request.get("prompt"))
            if not isinstance(ids, list) or not all(type(each) is int for each in ids):
                raise RequestRefused(f"expected the token ids of one prompt beside {FIELD}, got another form")
            ArrangedPrompt.parse(params, ids)
        if path == COMPLETIONS_PATH:
            scope = {**scope, "path": scope.get("root_path", "") + _PLAIN_PATH}
        await self._app(scope, replayed, send)

    async def _answering(self, scope: Scope) -> ASGIApp:
        """Return the application that answers requests with documents; the first of them makes it, with vLLM's keys."""
        async with self._starting:
            if self._answers is None:
                import vllm.envs

                state, engine = scope["app"].state, ServingEngine(scope["app"].state.engine_client)
                keys = [key for key in (state.args.api_key or [vllm.envs.VLLM_API_KEY]) if key]
                # No cache is shared between keys.
                tenants = {key: hashlib.sha256(key.encode()).hexdigest() for key in keys}
                settings = Settings(keys=tenants, max_requests=_MOST_REQUESTS)
                backend = await asyncio.to_thread(VLLMBackend, engine=engine)
                served = OnVLLM(backend, engine.facts.served_name, together=_MOST_REQUESTS)
                self._answers = create_app(served, settings)
            return self._answers


def _has_documents(request: dict[str, Any]) -> bool:
    """Return whether a request has documents: beside its messages or its prompt, or in them."""
    messages = request["messages"] if isinstance(request.get("messages"), list) else []
    contents = [request.get("prompt"), *(each.get("content") for each in messages if isinstance(each, dict))]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, dict)]
    return bool(request.get("documents")) or any(part.get("type") in ("document", "documents") for part in parts)


def _parsed(body: bytes) -> dict[str, Any]:
    """Return a request; an empty one if it is no JSON object, of which vLLM says what is wrong."""
    try:
        parsed = parse_json(body)
    except (json.JSONDecodeError, UnicodeDecodeError):
        return {}
    except ValueError as error:  # nested more deeply than vLLM's engine, in another process, can read
        raise RequestRefused(str(error), hint=f"Send at most {MAX_DEPTH} levels.") from error
    return parsed if isinstance(parsed, dict) else {}


async def _read(scope: Scope, receive: Receive) -> tuple[bytes, Receive]:
    """Return the body of a request, and a `receive` that returns it again."""
    body = await Request(scope, receive).body()
    whole = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(whole, None) or await receive()

    return body, replayed
