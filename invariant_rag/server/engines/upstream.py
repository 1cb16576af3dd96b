"""A model behind an OpenAI-compatible API as an engine. Its attention is its own: only the prompt can be arranged.

`canonical` writes documents in an order that depends on their contents alone: equal sets make equal requests, and that
is all. The model still attends to the documents as a sequence. `vote` sends several orders, and returns the answer
that most of them give. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from threading import Event
from typing import Any, NoReturn

import httpx
from anyio.from_thread import start_blocking_portal

from invariant_rag import api_models
from invariant_rag.citation_labels import Labels
from invariant_rag.errors import ContextOverflow, InvalidChoice, InvariantRAGError, UnsupportedCombination
from invariant_rag.generation.answers import Answer, AnswerDelta, CallDelta, parse_deltas, parse_logprobs
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.json_schema import check_complete
from invariant_rag.generation.outputs import Usage
from invariant_rag.orderings import ORDERINGS, resolve_ordering
from invariant_rag.prompts import Turn
from invariant_rag.segments import Prompt
from invariant_rag.server.engines.base import Call, Choice, Emit, Engine, EngineReply, JudgeCall, in_threads, wait_for
from invariant_rag.server.errors import Busy, DeadlineExceeded, UpstreamFailed, UpstreamRefused, about, encode
from invariant_rag.server.replies import citations_of, ledger_of_request, token_of
from invariant_rag.server.worker import validate

_logger = logging.getLogger("invariant_rag.server")

METHODS = api_models.STRATEGIES | {"sequential"}
_DEFAULT_ORDERING = {"canonical": "lexical", "sequential": "given", "vote": "lexical"}
_NOTES = {
    "canonical": "Equal sets make equal requests. The model gets this one order, and may miss documents at "
    "unfavourable positions; an API may also answer equal requests differently.",
    "vote": "The model was asked in several orders, the same for equal sets, and the most frequent answer counts. "
    "An API may answer equal requests differently.",
    "sequential": "The model attended to the documents as a sequence, as to any text.",
}
_CONNECT_SECONDS, _CHECK_SECONDS = 10.0, 5.0
_REFUSED = frozenset({400, 413, 422})
"""Statuses that say what is wrong with a request. Others are about the gateway, whose key may be wrong."""
_LONGEST_MESSAGE = 500


class Upstream(Engine):
    """A model behind an API as an engine.

    Args:
        url: Address of the API, such as `https://api.openai.com/v1`.
        model: Name of the model there.
        name: What requests call it. None: as it is called there.
        key: Key for the API, if it needs one.
        method: How documents are ordered where a request sets nothing: `canonical`, `vote` or `sequential`.
        ordering: Their order where a request sets nothing.
        votes: Orders of a vote.
        together: How many requests are sent at a time.
        timeout: Seconds until a request fails if nothing comes.
    """

    methods = METHODS

    def __init__(
        self,
        url: str,
        model: str,
        *,
        name: str | None = None,
        key: str | None = None,
        method: str = "canonical",
        ordering: str | None = None,
        votes: int = 5,
        together: int = 64,
        timeout: float = 300.0,
    ) -> None:
        if not re.match(r"https?://[^/]", url):
            raise InvalidChoice(
                f"upstream: expected an address with http:// or https://, got {url!r}",
                hint="Such as http://127.0.0.1:8001/v1.",
            )
        if method not in METHODS:
            raise InvalidChoice(f"method: expected {', '.join(sorted(METHODS))} for an upstream, got {method!r}")
        if votes < 2:
            raise InvalidChoice(f"votes: expected at least 2, got {votes}")
        self.together, self.method, self._votes = together, method, votes
        by_content = frozenset(name for name, each in ORDERINGS.items() if each.invariant)
        self.orderings = dict.fromkeys(api_models.STRATEGIES, by_content) | {"sequential": frozenset(ORDERINGS)}
        self._ordering = _DEFAULT_ORDERING[method] if ordering is None else resolve_ordering(ordering).name
        if method in api_models.STRATEGIES:
            api_models.content_ordering(self._ordering)
        self._limit, self._key = "max_tokens", key
        headers = {"content-type": "application/json"} | ({} if key is None else {"Authorization": f"Bearer {key}"})
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/"),
            headers=headers,
            timeout=httpx.Timeout(timeout, connect=min(_CONNECT_SECONDS, timeout)),
            limits=httpx.Limits(max_connections=None, keepalive_expiry=2.0),  # before servers close them: after 5 s
        )
        self._exit = ExitStack()
        self._portal = self._exit.enter_context(start_blocking_portal(name="invariant-rag-upstream"))
        self._model, self.name = model, model if name is None else name

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        """Answer the prompts of a request; see `Engine`."""

        def one(number: int) -> EngineReply:
            first = number * calls[number].request.n
            return self._answer(calls[number], lambda index, delta: emit(first + index, delta), abandoned)

        return in_threads(one, len(calls))

    def _answer(self, call: Call, emit: Emit, abandoned: Event) -> EngineReply:
        method = call.choices.method or self.method  # another method than the server's brings its own ordering
        ordering = call.choices.ordering or (self._ordering if method == self.method else _DEFAULT_ORDERING[method])
        with about("invariant.ordering"):
            if method in api_models.STRATEGIES:
                api_models.content_ordering(ordering)
        _check_supported(call, method)
        if method == "sequential" and ordering == "given":
            requests = [api_models.request_as_given(_turns_of(call))]
        else:
            writing = api_models.PlainRequests(ordering, votes=self._votes if method == "vote" else 1)
            requests = writing.of_turns(_turns_of(call), call.request.question or "")
        taken = emit if call.stream and method != "vote" else None
        answers = wait_for(self._portal.start_task_soon(self._send_all, call, requests, taken), abandoned)
        tally = api_models.elect([_key(each) for each, _ in answers]) if method == "vote" else None
        winner = 0 if tally is None else tally.winner
        written, request = answers[winner][0], requests[winner]
        if tally is not None and call.stream:
            for delta in written[0].deltas:
                emit(0, delta)
        counted = [usage for _, usage in answers if usage is not None]
        notes = [_NOTES[method]] if request.sets else []
        if len(counted) < len(answers):
            notes.append("The upstream did not say how many tokens there were.")
        ledger = ledger_of_request(request, method, ordering, call.warnings)
        ledger["warnings"] += notes
        return EngineReply(
            choices=[_choice(call, each, request.labels, abandoned) for each in written],
            usage=_usage(counted),
            ledger=ledger if tally is None else {**ledger, "vote": tally.as_dict()},
        )

    def tokens(self, call: Call) -> NoReturn:
        """Refuse; see `Engine`."""
        raise UnsupportedCombination(
            "expected an engine with a tokenizer, got an API, which counts tokens only when it answers",
            hint="Ask the upstream itself, if it can tokenize.",
        )

    def judge(self, call: JudgeCall) -> NoReturn:
        """Refuse; see `Engine`."""
        raise UnsupportedCombination(
            "expected an engine that scores given answers, got an API, which scores only what it writes",
            hint="Serve a model in process, or on vLLM, as the judge.",
        )

    @property
    def toy(self) -> bool:  # type: ignore[override]
        """Whether the server behind says that its model is one; requested each time, since the model may change."""
        try:
            listed = _parsed(self._portal.call(self._models).content).get("data")
            return any((each.get("id"), each.get("toy")) == (self._model, True) for each in listed or ())
        except (InvariantRAGError, AttributeError, TypeError):  # it cannot be reached, or lists something else
            return False

    def check_ready(self) -> None:
        """Check that the API answers, and takes the key; see `Engine`."""
        response = self._portal.call(self._models)
        if response.status_code in (401, 403) or response.status_code >= 500:
            _refuse(response, self._key)

    async def _models(self) -> httpx.Response:
        with _failures():
            return await self._client.get("/models", timeout=_CHECK_SECONDS)

    def close(self) -> None:
        """End, with the requests that still run."""
        self._portal.call(self._client.aclose)
        self._exit.close()

    async def _send_all(
        self, call: Call, requests: Sequence[api_models.PlainRequest], emit: Emit | None
    ) -> list[tuple[list[WrittenAnswer], Mapping[str, Any] | None]]:
        """Ask about all orders at the same time: return the answers and the usage of each.

        An error ends all of them, and so does who cancels this: their connections are closed.
        """
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._send_one(call, each, emit)) for each in requests]
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _send_one(
        self, call: Call, request: api_models.PlainRequest, emit: Emit | None
    ) -> tuple[list[WrittenAnswer], Mapping[str, Any] | None]:
        """Send one order. Without `emit`, no deltas are passed on.

        Some models take `max_completion_tokens` only, and say so: then they get that.
        """
        written = [WrittenAnswer(index) for index in range(call.request.n)]

        def pass_on(deltas: Iterable[AnswerDelta]) -> None:
            if emit is not None:
                for delta in deltas:
                    emit(delta.index, delta)

        def take(choice: Mapping[str, Any]) -> None:
            index = choice.get("index") or 0
            if index not in range(len(written)):
                raise UpstreamFailed(f"expected {len(written)} answers of the upstream, got one with the index {index}")
            pass_on(written[index].feed(choice))

        body = _body_of(call, request, self._model, stream=emit is not None)
        try:
            usage = await self._post(call, {**body, self._limit: call.request.max_new_tokens}, take)
        except UpstreamRefused as error:
            if error.param != self._limit or "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"
            usage = await self._post(call, {**body, self._limit: call.request.max_new_tokens}, take)
        for each in written:
            pass_on(each.finish())
        return written, usage

    async def _post(
        self, call: Call, body: Mapping[str, Any], take: Callable[[Mapping[str, Any]], None]
    ) -> Mapping[str, Any] | None:
        """Send a request, and pass on its choices as they come. Returns the usage, if the API counts."""
        path, usage = "/completions" if call.request.messages is None else "/chat/completions", None
        content, headers = encode(body).encode(), dict(call.headers)
        with _failures():
            async with self._client.stream("POST", path, content=content, headers=headers) as response:
                if not response.is_success:
                    await response.aread()
                    _refuse(response, self._key)
                if not body.get("stream"):
                    return _take_all(_parsed(await response.aread()), take)
                async for line in response.aiter_lines():
                    data = line.removeprefix("data:").strip()
                    if line.startswith("data:") and data != "[DONE]":
                        usage = _take_all(_parsed(data), take) or usage
        return usage


class WrittenAnswer:
    """One answer, while it is written. A whole one is a stream of a single chunk."""

    def __init__(self, index: int) -> None:
        self.index, self.finish_reason = index, ""
        self.logprobs: list[dict[str, Any]] | None = None
        self.deltas: list[AnswerDelta] = []

    def feed(self, choice: Mapping[str, Any]) -> list[AnswerDelta]:
        """Return the deltas of another chunk, or raise UpstreamFailed."""
        try:
            deltas = list(parse_deltas(choice, self.index))
            if logprobs := choice.get("logprobs"):
                tokens = logprobs.get("content") or map(token_of, parse_logprobs(logprobs))
                self.logprobs = [*(self.logprobs or []), *tokens]
            self.finish_reason = str(choice.get("finish_reason") or self.finish_reason)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UpstreamFailed("expected a choice of OpenAI's API of the upstream, got something else") from error
        self.deltas += deltas
        return deltas

    def finish(self) -> list[AnswerDelta]:
        """Return what is known at the end: a call without arguments has empty ones."""
        if not self.finish_reason:
            raise UpstreamFailed("expected an answer of the upstream to its end, got a part of one")
        if self.finish_reason == "length":
            return []
        arguments: dict[int, str] = {}
        for call in (each.call for each in self.deltas if each.call):
            arguments[call.index] = arguments.get(call.index, "") + call.arguments
        empty = [CallDelta(index, arguments="{}") for index, text in arguments.items() if not text]
        completed = [AnswerDelta(call=each, index=self.index) for each in empty]
        self.deltas += completed
        if Answer.join(self.deltas).cut_call is not None:
            raise UpstreamFailed("expected calls of tools of the upstream, got one whose arguments are no JSON")
        return completed


def _turns_of(call: Call) -> list[Turn]:
    asked, prompt = call.request, call.request.prompt
    if prompt is None:
        return [Turn(each["role"], tuple(each["content"])) for each in asked.messages or ()]
    parts = [part for pair in zip(prompt.texts, (*prompt.sets, ""), strict=True) for part in pair]
    return [Turn("user", tuple(part for part in parts if len(part)))]


def _body_of(call: Call, request: api_models.PlainRequest, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body of a request, but for the limit of its answer: what was asked, with its documents as text."""
    asked = call.request
    body: dict[str, Any] = {"model": model, "temperature": asked.temperature, **asked.options}
    drawn = {name: getattr(asked, name) for name in ("top_p", "top_k", "min_p", "seed")}
    body |= {name: value for name, value in drawn.items() if value is not None}
    body |= {"stop": list(asked.stop)} if asked.stop else {}
    body |= {"n": asked.n} if asked.n > 1 else {}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if asked.messages is None:
        (turn,) = request.turns
        token_ids = next((list(part) for part in turn.parts if isinstance(part, tuple)), None)
        body["prompt"] = turn.text if token_ids is None else token_ids
        return body | ({"logprobs": asked.top_logprobs} if asked.logprobs else {})
    messages = body["messages"] = []
    for turn, message in zip(request.turns, asked.messages, strict=True):
        kept = {name: value for name, value in message.items() if name != "reasoning_content"}  # few APIs take it back
        content = None if kept.get("tool_calls") and not turn.text else turn.text
        messages.append({**kept, "content": content})
    if asked.tools:
        is_name = asked.tool_choice not in {"auto", "none", "required"}
        named = {"type": "function", "function": {"name": asked.tool_choice}}
        body |= {"tools": list(asked.tools), "tool_choice": named if is_name else asked.tool_choice}
        body |= {} if asked.parallel else {"parallel_tool_calls": False}
    body |= {} if asked.schema is None else {"response_format": call.response_format}
    body |= {"chat_template_kwargs": dict(asked.template_kwargs)} if asked.template_kwargs else {}
    top = {"top_logprobs": asked.top_logprobs} if asked.top_logprobs else {}
    return body | ({"logprobs": True, **top} if asked.logprobs else {})


def _check_supported(call: Call, method: str) -> None:
    """Raise UnsupportedCombination for what an API cannot do."""
    if call.choices.overflow not in (None, "error"):
        with about("invariant.overflow"):
            raise UnsupportedCombination(
                f"expected no invariant.overflow but 'error', got {call.choices.overflow!r}: an API tells only that a "
                "prompt is too long",
                hint="Send fewer documents.",
            )
    if method == "vote" and (count := call.request.n) > 1:
        with about("n"):
            raise UnsupportedCombination(f"expected n=1 with the method vote, which has one outcome, got {count}")


def _choice(call: Call, written: WrittenAnswer, labels: Labels, abandoned: Event) -> Choice:
    """Return an answer with its citations."""
    answer, asked = Answer.join(written.deltas), call.request
    is_cut = written.finish_reason == "length"
    if asked.schema is not None and call.is_strict and not answer.tool_calls and not is_cut:
        with about("response_format"):
            validate(check_complete(answer.content), asked.schema, call.choices.tenant, abandoned)
    if asked.logprobs and written.logprobs is None:
        with about("logprobs"):
            raise UnsupportedCombination(
                "expected log-probabilities of the upstream, which gave none", hint="Leave logprobs away."
            )
    prompt = Prompt.of(*call.sets)
    cites = asked.citations and prompt.segments
    spans = cite_spans(answer.content, prompt.segments, None, labels) if cites else ()
    return Choice(
        answer=answer,
        finish_reason=written.finish_reason,
        logprobs=written.logprobs if asked.logprobs else None,
        citations=citations_of(answer.content, spans, prompt),
    )


def _key(written: Sequence[WrittenAnswer]) -> Any:
    answer = Answer.join(written[0].deltas)
    return api_models.answer_key(answer.content, [(each.name, each.arguments) for each in answer.tool_calls])


def _usage(counted: Sequence[Mapping[str, Any]]) -> Usage:
    """Return the tokens of all requests."""
    details = [each.get("prompt_tokens_details") or {} for each in counted]
    prompt, written = (sum(each.get(f"{kind}_tokens") or 0 for each in counted) for kind in ("prompt", "completion"))
    return Usage(prompt, written, sum(each.get("cached_tokens") or 0 for each in details))


def _take_all(reply: Mapping[str, Any], take: Callable[[Mapping[str, Any]], None]) -> Mapping[str, Any] | None:
    """Give the choices of a reply, or of a chunk of a stream, away; return its usage."""
    if "error" in reply:  # within a stream, whose status was sent before
        raise UpstreamFailed("the upstream failed in the middle of its answer")
    choices, usage = reply.get("choices"), reply.get("usage")
    if not isinstance(choices, list) or not all(isinstance(each, Mapping) for each in choices):
        raise UpstreamFailed("expected a reply with choices of the upstream, got something else")
    for choice in choices:
        take(choice)
    return usage if isinstance(usage, Mapping) else None


def _parsed(content: str | bytes) -> Mapping[str, Any]:
    try:
        reply = json.loads(content)
    except ValueError as error:
        raise UpstreamFailed("expected JSON of the upstream, got something else") from error
    if not isinstance(reply, Mapping):
        raise UpstreamFailed("expected an object of the upstream, got something else")
    return reply


def _refuse(response: httpx.Response, key: str | None) -> NoReturn:
    """Raise what a response says. Only what is about the request is repeated: other messages may name an account."""
    status = response.status_code
    try:
        described = _parsed(response.content)
    except UpstreamFailed:
        described = {}
    error = described.get("error", described)
    fields: Mapping[str, Any] = error if isinstance(error, Mapping) else {"message": error}
    message = str(fields.get("message") or "no reason").replace(key or "\0", "[key]")[:_LONGEST_MESSAGE]
    if fields.get("code") == "context_length_exceeded":
        raise ContextOverflow(message)
    if status in _REFUSED:
        param = fields.get("param")
        raise UpstreamRefused(f"the upstream says: {message}", param=None if param is None else str(param))
    _logger.warning("the upstream failed", extra={"fields": {"status": status, "code": fields.get("code")}})
    wait = response.headers.get("retry-after", "")
    retry_after = int(wait) if re.fullmatch(r"\d{1,6}", wait) else None
    if status == 429:
        raise Busy("the upstream takes no more requests now", retry_after=retry_after)
    if status in (408, 504):
        raise DeadlineExceeded(f"the upstream answered {status}: it took too long", retry_after=retry_after)
    raise UpstreamFailed(f"the upstream answered {status}", retry_after=retry_after)


@contextmanager
def _failures() -> Iterator[None]:
    """Raise what is no answer as what it is for clients; only the log says more."""
    try:
        yield
    except httpx.HTTPError as error:
        is_slow = isinstance(error, httpx.TimeoutException)
        said = "the upstream is too slow" if is_slow else "the upstream cannot be reached"
        _logger.warning(said, extra={"fields": {"error": type(error).__name__, "reason": repr(error)}})
        if is_slow:
            raise DeadlineExceeded("expected an answer of the upstream in time") from error
        told = "expected an answer of the upstream, which cannot be reached"
        raise UpstreamFailed(told, hint="Try again later.") from error
