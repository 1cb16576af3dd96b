"""A model behind an OpenAI-compatible API as an engine. Its attention is its own, so only the prompt can be arranged.

`canonical` writes documents in an order that depends on their contents alone: equal sets make equal requests, and that
is all. The model still reads the documents one after another. `vote` asks about several orders, and returns the answer
that most of them give. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import Any, NoReturn, TypeVar

from anyio.from_thread import start_blocking_portal

from invariant_rag.api_models import (
    STRATEGIES,
    PlainRequest,
    PlainRequests,
    answer_key,
    content_ordering,
    elect,
    request_as_given,
)
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.answers import AnswerDelta, Usage
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.json_schema import check_complete
from invariant_rag.orderings import ORDERINGS, resolve_ordering
from invariant_rag.prompts.labels import Labels
from invariant_rag.segments import Prompt
from invariant_rag.server.compiling import validate
from invariant_rag.server.documents import citations_of, report_of_request
from invariant_rag.server.engines.base import Call, Choice, Emit, Engine, EngineReply, JudgeCall, wait_for
from invariant_rag.server.engines.openai_api import OpenAIAPI, WrittenAnswer
from invariant_rag.server.errors import Busy, UpstreamFailed, UpstreamRefused, about

T = TypeVar("T")

METHODS = STRATEGIES | {"sequential"}
_DEFAULT_ORDERING = {"canonical": "lexical", "sequential": "given", "vote": "lexical"}
_NOTES = {
    "canonical": "Equal sets make equal requests. The model reads the documents in this one order, and may overlook "
    "some for where they stand; an API may also answer equal requests differently.",
    "vote": "The documents were read in several orders, the same for equal sets, and the most frequent answer counts. "
    "An API may answer equal requests differently.",
    "sequential": "The model read the documents one after another, as it reads any text.",
}
_NOT_COUNTED = "The upstream did not say how many tokens there were."
_FIRST_PAUSE = 0.25  # before an API that is busy is asked again


@dataclass(frozen=True)
class _Asked:
    """What came back for one request: its answers, and the usage, if that was counted."""

    written: Sequence[WrittenAnswer]
    usage: Mapping[str, Any] | None


class Upstream(Engine):
    """A model behind an API as an engine.

    Args:
        url: Address of the API, such as `https://api.openai.com/v1`.
        model: Name of the model there. None: the only one that it lists.
        name: What requests call it. None: as it is called there.
        key: Key for the API. None: it needs none.
        method: How documents are written where a request says nothing: `canonical`, `vote` or `sequential`.
        ordering: Their order where a request says nothing.
        votes: Orders of a vote.
        together: How many requests are sent at a time.
        timeout: Seconds until a request fails if nothing comes.

    Raises:
        InvalidChoice: A choice is none, or the API lists several models.
        UnsupportedCombination: The ordering keeps the order given.
        UpstreamFailed: The API had to be asked for its models, and cannot be reached.
    """

    methods = METHODS

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        name: str | None = None,
        key: str | None = None,
        method: str = "canonical",
        ordering: str | None = None,
        votes: int = 5,
        together: int = 64,
        timeout: float = 300.0,
    ) -> None:
        if method not in METHODS:
            raise InvalidChoice(f"method: expected {', '.join(sorted(METHODS))} for an upstream, got {method!r}")
        if votes < 2:
            raise InvalidChoice(f"votes: expected at least 2, got {votes}")
        self.together, self._timeout = together, timeout
        self.method, self._votes = method, votes
        by_content = frozenset(name for name, each in ORDERINGS.items() if each.invariant)
        self.orderings = dict.fromkeys(STRATEGIES, by_content) | {"sequential": frozenset(ORDERINGS)}
        self._ordering = _DEFAULT_ORDERING[method] if ordering is None else resolve_ordering(ordering).name
        if method in STRATEGIES:
            content_ordering(self._ordering)
        self._limit = "max_tokens"
        self._api = OpenAIAPI(url, key, timeout)
        self._exit = ExitStack()
        self._portal = self._exit.enter_context(start_blocking_portal(name="invariant-rag-upstream"))
        try:
            self._model = self._only_model() if model is None else model
        except BaseException:
            self.close()
            raise
        self.name = self._model if name is None else name

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> EngineReply:
        """Answer a request; see `Engine`.

        Raises:
            Busy: The upstream has too many requests.
            ContextOverflow: The prompt is too long for it.
            DeadlineExceeded: It does not answer in time.
            IncompleteObject: It ended an answer that should follow a schema too early.
            InvalidObject: Its answer does not follow the schema.
            UnsupportedCombination: The request asks for what an API cannot do.
            UpstreamFailed: It cannot be reached, or failed.
            UpstreamRefused: It takes the request for a wrong one.
        """
        method = call.choices.method or self.method  # another method than the server's brings its own ordering
        ordering = call.choices.ordering or (self._ordering if method == self.method else _DEFAULT_ORDERING[method])
        with about("invariant.ordering"):
            if method in STRATEGIES:
                content_ordering(ordering)
        _check_supported(call, method)
        if method == "sequential" and ordering == "given":
            requests = [request_as_given(call.turns)]
        else:
            writing = PlainRequests(ordering, votes=self._votes if method == "vote" else 1)
            requests = writing.of_turns(call.turns, call.request.question or "")
        tally, winner = None, 0
        if method == "vote":
            asked = self._wait(partial(self._ask_all, call, requests), abandoned)
            tally = elect([_key(each) for each in asked])
            winner = tally.winner
            for delta in asked[winner].written[0].deltas if call.stream else ():
                emit(0, delta)
        else:
            asked = [self._wait(partial(self._ask, call, requests[0], emit), abandoned)]
        request = requests[winner]
        notes = [_NOTES[method]] if request.sets else []
        notes += [_NOT_COUNTED] if any(each.usage is None for each in asked) else []
        report = report_of_request(request, method, ordering, call.warnings)
        report["warnings"] += notes
        return EngineReply(
            choices=[_choice(call, each, request.labels, abandoned) for each in asked[winner].written],
            usage=_usage([each.usage or {} for each in asked]),
            report=report if tally is None else {**report, "vote": tally.as_dict()},
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

    def check_ready(self) -> None:
        """Check that the API answers, and takes the key; see `Engine`."""
        self._portal.call(self._api.check_ready)

    def close(self) -> None:
        """End, with what is still asked for."""
        self._portal.call(self._api.close)
        self._exit.close()

    def _only_model(self) -> str:
        names = self._portal.call(self._api.models)
        if len(names) != 1:
            listed = ", ".join(names[:10]) or "none"
            raise InvalidChoice(
                f"model: expected the name of one, since the upstream has {len(names)}, got none",
                hint=f"It lists {listed}.",
            )
        return names[0]

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]], abandoned: Event) -> T:
        """Run work in the event loop until it is done, or nobody waits for it: then its connections are closed."""
        task: Future[T] = self._portal.start_task_soon(work)
        return wait_for(task, abandoned)

    async def _ask_all(self, call: Call, requests: Sequence[PlainRequest]) -> list[_Asked]:
        """Ask about several orders: all at the same time, and what the API has no room for again, fewer at a time.

        Any other error ends all of them.

        Raises:
            Busy: The API has no room for as long as an answer may take.
        """
        loop = asyncio.get_running_loop()
        end, pause, together = loop.time() + self._timeout, _FIRST_PAUSE, len(requests)
        found: dict[int, _Asked] = {}
        while waiting := [index for index in range(len(requests)) if index not in found][:together]:
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._ask_unless_busy(call, requests[index])) for index in waiting]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from None
            results = {index: task.result() for index, task in zip(waiting, tasks, strict=True)}
            answered = {index: each for index, each in results.items() if isinstance(each, _Asked)}
            found |= answered
            busy = [each for each in results.values() if isinstance(each, Busy)]
            if busy:
                seconds = max(each.retry_after or 0 for each in busy) or pause
                if loop.time() + seconds > end:
                    raise busy[0]
                await asyncio.sleep(seconds)
                pause, together = 2 * pause, max(len(answered), 1)
        return [found[index] for index in range(len(requests))]

    async def _ask_unless_busy(self, call: Call, request: PlainRequest) -> _Asked | Busy:
        try:
            return await self._ask(call, request, None)
        except Busy as error:
            return error

    async def _ask(self, call: Call, request: PlainRequest, emit: Emit | None) -> _Asked:
        """Ask about one order. Without `emit`, nobody takes the pieces.

        Some models take `max_completion_tokens` only, and say so: then they get that.
        """
        count, emitting = call.request.n, emit if call.stream else None
        written = [WrittenAnswer() for _ in range(count)]

        def pass_on(index: int, deltas: Iterable[AnswerDelta]) -> None:
            for delta in deltas:
                if emitting is not None:
                    emitting(index, delta)

        def take(choice: Mapping[str, Any]) -> None:
            index = choice.get("index") or 0
            if index not in range(count):
                raise UpstreamFailed(f"expected {count} answers of the upstream, got one with the index {index}")
            pass_on(index, written[index].feed(choice))

        path = "/chat/completions" if call.chat else "/completions"
        body = _body_of(call, request, self._model, stream=emitting is not None)
        limit = call.request.max_new_tokens
        try:
            usage = await self._api.ask(path, {**body, self._limit: limit}, take, call.headers)
        except UpstreamRefused as error:
            if error.param != self._limit or "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"
            usage = await self._api.ask(path, {**body, self._limit: limit}, take, call.headers)
        for index, each in enumerate(written):
            pass_on(index, each.finish())
        return _Asked(written, usage)


def _body_of(call: Call, request: PlainRequest, model: str, *, stream: bool) -> dict[str, Any]:
    """Return the body of a request, but for the limit of its answer: what was asked, with its documents as text."""
    asked = call.request
    body: dict[str, Any] = {"model": model, "temperature": asked.temperature, **asked.options, **call.penalties}
    drawn = {name: getattr(asked, name) for name in ("top_p", "top_k", "min_p", "seed")}
    body |= {name: value for name, value in drawn.items() if value is not None}
    body |= {"stop": list(asked.stop)} if asked.stop else {}
    body |= {"n": asked.n} if asked.n > 1 else {}
    body |= {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    if not call.chat:
        (turn,) = request.turns
        token_ids = next((list(part) for part in turn.parts if isinstance(part, tuple)), None)
        body["prompt"] = turn.text if token_ids is None else token_ids
        return body | ({"logprobs": asked.top_logprobs} if asked.logprobs else {})
    messages = body["messages"] = []
    for turn, more in zip(request.turns, call.extra or ({},) * len(request.turns), strict=True):
        kept = {name: value for name, value in more.items() if name != "reasoning_content"}  # few APIs take it back
        content = None if kept.get("tool_calls") and not turn.text else turn.text
        messages.append({**kept, "role": turn.role, "content": content})
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
    """Return an answer with its citations.

    Raises:
        IncompleteObject: It is no JSON, should follow a schema, and was not cut off.
        InvalidObject: It does not follow the schema.
        UnsupportedCombination: Log-probabilities were asked for, and did not come.
    """
    answer, asked = written.answer, call.request
    is_cut = written.finish_reason == "length"
    if asked.schema is not None and call.strict and not answer.tool_calls and not is_cut:
        with about("response_format"):
            validate(check_complete(answer.content), asked.schema, abandoned)
    if asked.logprobs and written.logprobs is None:
        with about("logprobs"):
            raise UnsupportedCombination(
                "expected log-probabilities of the upstream, which gave none", hint="Leave logprobs away."
            )
    prompt = Prompt.of(*call.sets)
    cites = asked.citations and prompt.segments
    spans = cite_spans(answer.content, asked.question or "", prompt.segments, None, labels) if cites else ()
    return Choice(
        answer=answer,
        finish_reason=written.finish_reason,
        logprobs=written.logprobs if asked.logprobs else None,
        citations=citations_of(answer.content, spans, prompt),
    )


def _key(asked: _Asked) -> Any:
    answer = asked.written[0].answer
    return answer_key(answer.content, [(each.name, each.arguments) for each in answer.tool_calls])


def _usage(counted: Sequence[Mapping[str, Any]]) -> Usage:
    """Return the tokens of all requests."""
    details = [each.get("prompt_tokens_details") or {} for each in counted]
    return Usage(
        prompt_tokens=sum(each.get("prompt_tokens") or 0 for each in counted),
        completion_tokens=sum(each.get("completion_tokens") or 0 for each in counted),
        cached_tokens=sum(each.get("cached_tokens") or 0 for each in details),
    )
