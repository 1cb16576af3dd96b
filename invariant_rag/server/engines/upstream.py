"""A model behind an OpenAI-compatible API as an engine. Its attention is its own, so only the prompt can be arranged.

`canonical` writes documents in an order that depends on their contents alone: equal sets make equal requests, and that
is all. The model still reads the documents one after another. `vote` asks about several orders, and returns the answer
that most of them give. Nothing here imports torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from threading import Event
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from anyio.from_thread import start_blocking_portal

from invariant_rag.api_models import (
    STRATEGIES,
    PlainRequest,
    PlainRequests,
    Vote,
    answer_key,
    content_ordering,
    elect,
    request_as_given,
)
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.citations import cite_spans
from invariant_rag.generation.json_schema import check_complete
from invariant_rag.generation.outputs import Usage
from invariant_rag.orderings import ORDERINGS, resolve_ordering
from invariant_rag.prompts.labels import Labels
from invariant_rag.segments import Prompt, SegmentSet
from invariant_rag.server.compiling import validate
from invariant_rag.server.documents import citations_of, report_of_request
from invariant_rag.server.engines.base import Call, Choice, Choices, Emit, JudgeCall, OnePromptAtATime, Reply
from invariant_rag.server.engines.openai_api import OpenAIAPI
from invariant_rag.server.engines.upstream_request import body_of
from invariant_rag.server.engines.written_answer import WrittenAnswer
from invariant_rag.server.errors import Busy, UpstreamFailed, UpstreamRefused
from invariant_rag.server.fields import about

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache

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
_POLL_SECONDS = 0.1  # until it is noticed that nobody waits any more


@dataclass(frozen=True)
class _Asked:
    """What came back for one request: its answers, and the usage, if that was counted."""

    written: Sequence[WrittenAnswer]
    usage: Mapping[str, Any] | None


class Upstream(OnePromptAtATime):
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

    context_window: int | None = None
    methods = METHODS
    toy = False
    orderings: Mapping[str, frozenset[str]] = {
        method: frozenset(name for name, each in ORDERINGS.items() if each.invariant or method == "sequential")
        for method in METHODS
    }

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
        self._ordering = _DEFAULT_ORDERING[method] if ordering is None else resolve_ordering(ordering).name
        if method in STRATEGIES:
            content_ordering(self._ordering)
        self.caches: dict[str, KeyValueCache] = {}
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

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> Reply:
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
        with about("invariant.ordering"):
            method, ordering = self._order(call.choices)
            if method in STRATEGIES:
                content_ordering(ordering)
        _check_supported(call, method)
        requests = self._requests(call, method, ordering)
        tally: Vote | None = None
        if method == "vote":
            asked = self._wait(partial(self._ask_all, call, requests), abandoned)
            tally = elect([_key(each) for each in asked])
            winner = tally.winner
            for delta in asked[winner].written[0].deltas if call.stream else ():
                emit(0, delta)
        else:
            asked, winner = [self._wait(partial(self._ask, call, requests[0], emit), abandoned)], 0
        written, request = asked[winner].written, requests[winner]
        notes = [_NOTES[method]] if request.sets else []
        notes += [_NOT_COUNTED] if any(each.usage is None for each in asked) else []
        report = report_of_request(request, method, ordering, call.warnings, notes)
        return Reply(
            choices=[_choice(call, each, request.labels, abandoned) for each in written],
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

    def _order(self, choices: Choices) -> tuple[str, str]:
        """Return method and ordering. Another method than the server's brings its own ordering."""
        method = choices.method or self.method
        default = self._ordering if method == self.method else _DEFAULT_ORDERING[method]
        return method, choices.ordering or default

    def _requests(self, call: Call, method: str, ordering: str) -> list[PlainRequest]:
        """Return the requests to write: one, or one for each order of a vote."""
        if method == "sequential" and ordering == "given":
            return [request_as_given(call.turns)]
        return PlainRequests(ordering, votes=self._votes if method == "vote" else 1).of_turns(call.turns, call.question)

    def _wait(self, work: Callable[[], Coroutine[Any, Any, T]], abandoned: Event) -> T:
        """Run work in the event loop until it is done, or nobody waits for it: then its connections are closed."""
        future: Future[T] = self._portal.start_task_soon(work)
        while not wait((future,), timeout=_POLL_SECONDS).done:
            if abandoned.is_set():
                future.cancel()
                raise CancelledError
        return future.result()

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
        """Ask about one order. Without `emit`, nobody takes the pieces."""
        written = [WrittenAnswer() for _ in range(call.count)]
        stream = call.stream and emit is not None

        def pass_on(index: int, deltas: Iterable[AnswerDelta]) -> None:
            if stream and emit is not None:
                for delta in deltas:
                    emit(index, delta)

        def take(choice: Mapping[str, Any]) -> None:
            index = choice.get("index") or 0
            if index not in range(call.count):
                raise UpstreamFailed(f"expected {call.count} answers of the upstream, got one with the index {index}")
            pass_on(index, written[index].feed(choice))

        path = "/chat/completions" if call.chat else "/completions"
        body = body_of(call, request, self._model, stream=stream)
        usage = await self._ask_within(path, body, call, take)
        for index, each in enumerate(written):
            pass_on(index, each.finish())
        return _Asked(written, usage)

    async def _ask_within(
        self, path: str, body: Mapping[str, Any], call: Call, take: Callable[[Mapping[str, Any]], None]
    ) -> Mapping[str, Any] | None:
        """Ask for so many tokens. Some models take `max_completion_tokens` only, and say so: then they get that."""
        limit = call.sampling.max_new_tokens
        try:
            return await self._api.ask(path, {**body, self._limit: limit}, take, call.headers)
        except UpstreamRefused as error:
            if error.param != self._limit or "max_completion_tokens" not in str(error):
                raise
            self._limit = "max_completion_tokens"
            return await self._api.ask(path, {**body, self._limit: limit}, take, call.headers)


def _check_supported(call: Call, method: str) -> None:
    """Raise UnsupportedCombination for what an API cannot do."""
    if call.choices.overflow not in (None, "error"):
        with about("invariant.overflow"):
            raise UnsupportedCombination(
                f"expected no invariant.overflow but 'error', got {call.choices.overflow!r}: an API tells only that a "
                "prompt is too long",
                hint="Send fewer documents.",
            )
    if method == "vote" and call.count > 1:
        with about("n"):
            raise UnsupportedCombination(f"expected n=1 with the method vote, which has one outcome, got {call.count}")


def _choice(call: Call, written: WrittenAnswer, labels: Labels, abandoned: Event) -> Choice:
    """Return an answer with its citations.

    Raises:
        IncompleteObject: It is no JSON, should follow a schema, and was not cut off.
        InvalidObject: It does not follow the schema.
        UnsupportedCombination: Log-probabilities were asked for, and did not come.
    """
    answer = written.answer
    is_cut = written.finish_reason == "length"
    if call.schema is not None and call.strict and not answer.tool_calls and not is_cut:
        with about("response_format"):
            validate(check_complete(answer.content), call.schema, abandoned)
    if call.logprobs and written.logprobs is None:
        with about("logprobs"):
            raise UnsupportedCombination(
                "expected log-probabilities of the upstream, which gave none", hint="Leave logprobs away."
            )
    parts = [part for turn in call.turns for part in turn.parts if isinstance(part, SegmentSet)]
    prompt = Prompt.of(*parts)
    cites = call.chat and call.schema is None and prompt.segments
    spans = cite_spans(answer.content, call.question, prompt.segments, None, labels) if cites else ()
    return Choice(
        answer=answer,
        finish_reason=written.finish_reason,
        logprobs=written.logprobs if call.logprobs else None,
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
