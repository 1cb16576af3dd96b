"""The system under audit, whatever it is, as a function from a question and listed segments to a reply; and its calls.

The classes of a framework are looked up in `sys.modules`: a caller who passes one of its objects has imported it.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.checks import check_stops
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from invariant_rag.prompts import DEFAULT_SYSTEM
from invariant_rag.segments import Segment, document_rendering

if TYPE_CHECKING:
    import httpx
    from tenacity import RetryCallState

    from invariant_rag.audit.questions import Question, Retrieve
    from invariant_rag.generation.model import InvariantModel

ToInput = Callable[[str, Sequence[Segment]], Any]
Ask = Callable[["Question", Sequence[Segment]], "Reply"]


@dataclass(frozen=True)
class Reply:
    """The answer of a system. A function may return one instead of a string, to report its tokens.

    Attributes:
        text: The answer.
        tokens: Prompt and completion tokens; None if unknown.
    """

    text: str
    tokens: int | None = None


@dataclass(frozen=True)
class System:
    """A system under audit: its name in reports, and what calls it with a question and its segments in an order.

    Behind it there may be an `InvariantModel`, with a system message and keywords of `generate`: methods can be tried
    on it. It may have a retriever of its own, or replace the given segments by others.
    """

    name: str
    ask: Ask
    lm: InvariantModel | None = None
    message: str | None = None
    retrieve: Retrieve | None = None
    generation: Mapping[str, Any] = field(default_factory=dict)
    may_retrieve: bool = False


def as_system(system: Any, to_input: ToInput | None = None, generation: Mapping[str, Any] | None = None) -> System:
    """Wrap a system of any supported kind.

    Args:
        system: An `InvariantModel` or a `RAG`; a chat model, an LLM, an agent or any other Runnable of
            LangChain; an LLM, query engine, chat engine, synthesizer or agent of LlamaIndex; an `Endpoint`, or its URL;
            or anything callable, which may be async. A framework's wrapper around an `InvariantModel` is audited as
            that model, with the wrapper's parameters.
        to_input: Makes the input of the system from question and segments. By default it follows from what the system
            declares; see `invariant_rag.audit.frameworks`.
        generation: Keywords of `InvariantModel.generate`; they override a wrapper's parameters.

    Raises:
        UnsupportedCombination: The system is none of these, or an argument does not apply to it.
    """
    found = _invariant_rag(system, generation or {})
    if found is not None:
        refuse(to_input, "to_input", "one of our models, which takes segments as they are")
        return found
    refuse(generation, "generation keywords", "a system that is not one of our models")
    from invariant_rag.audit.frameworks import from_callable, from_langchain, from_llama_index

    for wrap in (_from_url, from_langchain, from_llama_index, from_callable):
        found = wrap(system, to_input)
        if found is not None:
            return found
    raise UnsupportedCombination(
        f"expected a system that answers questions, got {type(system).__name__}",
        hint="Wrap it in a function (question, segments) -> answer.",
    )


_ANSWERS = ("answer", "output", "response", "result", "text", "output_text", "content")
"""Names under which answers are returned."""


def as_reply(said: Any, tokens: int | None = None) -> Reply:
    """Return the answer in whatever a system returns: text, a message, a mapping or an object that holds one."""
    if isinstance(said, Reply):
        return said
    if isinstance(said, str):
        return Reply(said, tokens)
    usage = getattr(said, "usage_metadata", None)
    if isinstance(usage, Mapping):
        tokens = usage.get("total_tokens", tokens)
    field_of = said.get if isinstance(said, Mapping) else partial(getattr, said)
    content = field_of("content", None)
    if isinstance(content, list) and content:  # blocks of a message
        parts = [each if isinstance(each, str) else each.get("text", "") for each in content]
        return Reply("".join(part for part in parts if isinstance(part, str)), tokens)
    if isinstance(said, Mapping) and isinstance(said.get("messages"), Sequence) and said["messages"]:
        return as_reply(said["messages"][-1], tokens)
    for name in _ANSWERS:
        found = field_of(name, None)
        if isinstance(found, str):
            return Reply(found, tokens)
        if found is not None and not callable(found) and not isinstance(found, int | float | list | tuple):
            return as_reply(found, tokens)
    what = f"a mapping with {sorted(map(str, said))}" if isinstance(said, Mapping) else type(said).__name__
    raise AuditFailed(
        f"expected an answer as text, a message, or a mapping with one of {', '.join(_ANSWERS)}; got {what}",
        hint="Return a string, or a Reply with its tokens.",
    )


def prompt_text(
    question: str, segments: Sequence[Segment], rendering: Callable[[Segment], str] = document_rendering
) -> str:
    """Return the default prompt for a language model of a framework: the documents, then the question."""
    return f"{DEFAULT_SYSTEM}\n\n{''.join(map(rendering, segments))}\nQuestion: {question}\nAnswer:"


def is_url(value: Any) -> bool:
    """Return whether a value is the address of a server."""
    return isinstance(value, str) and value.startswith(("http://", "https://"))


def refuse(value: Any, what: str, where: str) -> None:
    """Refuse an argument that means nothing to a system."""
    if value:
        raise UnsupportedCombination(f"{what} mean nothing to {where}")


def loaded(module: str, *names: str) -> tuple[Any, ...]:
    """Return the classes of a module if the module is imported, as a tuple for isinstance."""
    found = (getattr(sys.modules.get(module), name, None) for name in names)
    return tuple(each for each in found if each is not None)


def is_language_model(value: Any) -> bool:
    """Return whether a value is a language model of LangChain or LlamaIndex."""
    models = loaded("langchain_core.language_models", "BaseLanguageModel") + loaded("llama_index.core.llms", "LLM")
    return isinstance(value, models)


def _invariant_rag(system: Any, generation: Mapping[str, Any]) -> System | None:
    """Wrap an `InvariantModel`, a `RAG`, or a framework's wrapper around an `InvariantModel`."""
    lm, message, retrieve = system, None, None
    if isinstance(system, loaded("invariant_rag.rag.pipeline", "RAG")):
        lm, message, retrieve = system.model, system.system, partial(system.retriever.retrieve, k=system.k)
    elif is_language_model(system):
        lm, message = getattr(system, "lm", None), getattr(system, "system_prompt", None)
    if not isinstance(lm, loaded("invariant_rag.generation.model", "InvariantModel")):
        return None
    if lm is not system and retrieve is None:
        generation = {**_wrapper_parameters(system), **generation}
    options = "".join(f", {key}={value}" for key, value in sorted(generation.items()))
    options += "" if message is None else f", system={message!r}"
    name = f"{lm.name} ({lm.method.name}, {lm.ordering!r}, {lm.backend.name}{options})"
    return System(name, lm_ask_function(lm, message, generation), lm, message, retrieve, generation)


def _wrapper_parameters(wrapper: Any) -> dict[str, Any]:
    """Return the parameters of a framework's wrapper as keywords of `InvariantModel.generate`."""
    options = {"max_new_tokens": wrapper.max_tokens, **wrapper.generation_kwargs}
    if wrapper.temperature:
        sampling = {name: getattr(wrapper, name) for name in ("temperature", "top_p", "top_k", "seed")}
        options = {"do_sample": True, **options, **{name: each for name, each in sampling.items() if each is not None}}
    return options | ({"stop_strings": list(wrapper.stop)} if wrapper.stop else {})


def lm_ask_function(lm: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> Ask:
    """Return the function that asks an `InvariantModel` through its chat template. Answers end before a stop string."""
    from invariant_rag.generation.answer_parsing import trim_at_stop_string

    stops = check_stops(generation.get("stop_strings"))

    def ask(question: Question, segments: Sequence[Segment]) -> Reply:
        result = lm.generate(lm.chat_prompt(question.text, segments, message), **generation)
        return Reply(trim_at_stop_string(result.text, stops), result.usage.total_tokens)

    return ask


KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key of the server, if it wants one."""

SECONDS = 120.0
"""How long the server may take."""


class ServerError(Exception):
    """A request that the server did not answer. It may be sent again, after `retry_after` seconds if it says so."""

    retry_after: float | None = None


@dataclass(frozen=True)
class Endpoint:
    """Chat completions of a server: of OpenAI, vLLM, llama.cpp, Ollama, `invariant-rag` or any other.

    Attributes:
        url: Address up to the version, such as `http://127.0.0.1:8000/v1`.
        model: Name of the model; None: the first that the server lists.
        parameters: Other fields of a request. At temperature 0, most servers answer alike every time.
    """

    url: str
    model: str | None = None
    parameters: dict[str, Any] = field(default_factory=lambda: {"temperature": 0})

    @cached_property
    def _client(self) -> httpx.Client:
        import httpx

        key = os.environ.get(KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return httpx.Client(base_url=self.url.rstrip("/"), headers=headers, timeout=SECONDS)

    @cached_property
    def served(self) -> str:
        """Name of the model that is asked."""
        if self.model is not None:
            return self.model
        try:
            return str(self._send("GET", "/models")["data"][0]["id"])
        except (ServerError, LookupError, TypeError) as error:
            raise AuditFailed(
                f"{self.url} lists no model: {error}",
                hint="Is it running? If it lists none, name one: --model, or Endpoint(url, model).",
            ) from error

    def ask(self, question: Question, segments: Sequence[Segment]) -> Reply:
        """Ask with the documents and the question in one message; see `complete`."""
        return self.complete(prompt_text(question.text, segments))

    def complete(self, text: str) -> Reply:
        """Send one message of a user.

        Raises:
            ServerError: The server does not answer, or with something else.
            AuditFailed: The server refuses this key or this model.
        """
        body = {"model": self.served, "messages": [{"role": "user", "content": text}], **self.parameters}
        said = self._send("POST", "/chat/completions", body)
        try:
            text, usage = said["choices"][0]["message"]["content"] or "", said.get("usage") or {}
        except (LookupError, TypeError, AttributeError) as error:
            raise ServerError(f"{self.url}: expected a chat completion, got {str(said)[:200]!r}") from error
        return Reply(text, usage.get("total_tokens"))

    def _send(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        import httpx

        try:
            response = self._client.request(verb, path, json=body)
        except httpx.TimeoutException as error:
            raise ServerError(f"no answer within {SECONDS:g} seconds") from error
        except httpx.HTTPError as error:
            why = re.sub(r"\[Errno -?\d+\] ", "", str(error)) or type(error).__name__
            raise ServerError(f"the server cannot be reached: {why}") from error
        said = f"{self.url}: {response.status_code}: {response.text[:200]}"
        if response.status_code in {httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN, httpx.codes.NOT_FOUND}:
            raise AuditFailed(said, hint=f"Look at the address, the model, and the key in {KEY_VARIABLE}.")
        if response.is_error:
            failed = ServerError(said)
            with suppress(KeyError, ValueError):  # it may name a date, or nothing
                failed.retry_after = float(response.headers["Retry-After"])
            raise failed
        try:
            return response.json()
        except ValueError as error:
            raise ServerError(f"expected JSON: {said}") from error


def _from_url(system: Any, to_input: ToInput | None) -> System | None:
    """Wrap an `Endpoint`, or the URL of one. None for anything else."""
    endpoint = Endpoint(system) if is_url(system) else system
    if not isinstance(endpoint, Endpoint):
        return None
    refuse(to_input, "to_input", "an endpoint, which is sent a message")
    return System(f"{endpoint.served} at {endpoint.url}", endpoint.ask)


FIRST_PAUSE, LONGEST_PAUSE = 0.25, 30.0
"""Seconds before the second try, twice as many before each further one, and at most, unless an error names more."""

HOPELESS = 10
"""Calls that fail, without a single answer, before an audit stops."""

LONGEST_ERROR = 300
"""Characters of an error that are kept: a server may answer with a page."""

Progress = Callable[..., AbstractContextManager[Callable[[], None]]]
"""Opens a display for a label, a number of steps and the number of those done before; yields what tells of a step."""


def no_progress(*_: Any, **__: Any) -> AbstractContextManager[Callable[[], None]]:
    """Show nothing."""
    return nullcontext(lambda: None)


@dataclass(frozen=True)
class Answer:
    """What came of one call: no text if every try failed; seconds with all tries, and the error of each that failed."""

    key: str
    text: str | None
    tokens: int | None = None
    seconds: float = 0.0
    errors: tuple[str, ...] = ()


def call(key: str, function: Callable[[], Reply], retries: int = 3) -> Answer:
    """Call a function until it returns, at most `retries` times more. An error is an outcome, but for `AuditFailed`."""
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    def error_of(state: RetryCallState) -> BaseException | None:
        return None if state.outcome is None else state.outcome.exception()

    def failed(state: RetryCallState) -> None:
        error = error_of(state)
        errors.append(f"{type(error).__name__}: {error}"[:LONGEST_ERROR])

    def once() -> Reply:
        try:
            return function()
        except SystemExit as error:
            code = "" if error.code is None else repr(error.code)
            raise RuntimeError(f"the system called sys.exit({code}); expected an answer or an error") from error

    errors: list[str] = []
    started, growing = perf_counter(), wait_exponential(FIRST_PAUSE, LONGEST_PAUSE)
    reply = Retrying(
        stop=stop_after_attempt(retries + 1),
        wait=lambda state: max(growing(state), getattr(error_of(state), "retry_after", None) or 0.0),
        retry=retry_if_exception(lambda error: isinstance(error, Exception) and not isinstance(error, AuditFailed)),
        after=failed,
        retry_error_callback=lambda _: None,
    )(once)
    text, tokens = (None, None) if reply is None else (reply.text, reply.tokens)
    return Answer(key, text, tokens, perf_counter() - started, tuple(errors))


def make_calls(
    calls: Sequence[tuple[str, Callable[[], Reply]]],
    on_answer: Callable[[Answer], object],
    *,
    retries: int,
    workers: int,
    answered: bool = False,
) -> None:
    """Make calls, each with its key, in threads; stop where nothing is ever answered, if nothing was `answered` before.

    `on_answer` is called with one answer at a time.
    """
    stopped, lock = threading.Event(), threading.Lock()
    failed = 0

    def make(each: tuple[str, Callable[[], Reply]]) -> None:
        nonlocal answered, failed
        if stopped.is_set():
            return
        try:
            answer = call(*each, retries)
            with lock:
                on_answer(answer)
                answered, failed = answered or answer.text is not None, failed + (answer.text is None)
                if failed >= min(HOPELESS, len(calls)) and not answered:
                    raise AuditFailed(
                        f"every call failed: {answer.errors[-1]}",
                        hint="Call it once by itself. If it is given the wrong input, say what it is called with: "
                        "to_input=lambda question, segments: ...",
                    )
        except BaseException:
            stopped.set()
            raise

    with ThreadPoolExecutor(workers) as pool:
        try:
            list(pool.map(make, calls))
        except BaseException:  # one has raised, or somebody interrupts
            stopped.set()
            raise


def settle(value: Any) -> Any:
    """Return a value; of an awaitable, what it is awaited for.

    All are awaited in one event loop, in a thread of its own: clients that keep connections belong to a loop.
    """
    if not inspect.isawaitable(value):
        return value

    async def awaited() -> tuple[Any, BaseException | None]:
        try:
            return await value, None
        except (KeyboardInterrupt, SystemExit) as error:  # raised in the loop, they would end it, and no call return
            return None, error

    with _starting:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, daemon=True, name="audit-event-loop").start()
    result, error = asyncio.run_coroutine_threadsafe(awaited(), _loops[0]).result()
    if error is not None:
        raise error
    return result


_starting = threading.Lock()
_loops: list[asyncio.AbstractEventLoop] = []
