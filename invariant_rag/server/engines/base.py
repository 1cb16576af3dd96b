"""What a server asks of an engine, and what the engine answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Event
from time import monotonic
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest, Usage
from invariant_rag.prompts import Turn
from invariant_rag.segments import Segment, SegmentSet

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.judge import By, Verdict
    from invariant_rag.orderings import Candidate

T = TypeVar("T")
Emit: TypeAlias = Callable[[int, AnswerDelta], None]
"""Takes a piece of the answer of that index, in any thread."""
_POLL_SECONDS = 0.05
"""How often a waiting thread looks whether somebody still waits for the result."""


@dataclass(frozen=True)
class Choices:
    """Who asks, and how the documents are to be read. None: as the server does by default."""

    tenant: str = ""
    method: str | None = None
    ordering: str | None = None
    overflow: str | None = None
    keep: bool = True
    """Whether a cache may keep the documents for later requests."""

    def plain(self) -> Choices:
        """Return the choices with which the plain model reads the documents in the order given."""
        return replace(self, method="sequential", ordering="given", keep=False)


@dataclass(frozen=True)
class Call:
    """One request, for an engine.

    Attributes:
        turns: The conversation, in which every document is in a set; for a completion, one turn, or token ids.
        request: What the answers are to be. It has neither messages nor a prompt: these are `turns`.
        choices: How the documents are read.
        chat: Whether the turns go through a chat template.
        extra: Fields of messages beside role and content, by turn: calls of tools, and ids of results.
        penalties: `frequency_penalty`, `presence_penalty` and `logit_bias`, as OpenAI has them.
        strict: Whether an answer that breaks the schema is an error, also in what no grammar expresses.
        response_format: The field of the request that the schema is from, for an engine that passes it on.
        stream: Whether somebody takes the pieces.
        warnings: Why the order of the documents may matter all the same.
        headers: What an engine elsewhere gets of the head of the request: names of the request and of its trace.
    """

    turns: tuple[Turn, ...]
    request: AnswerRequest
    choices: Choices
    chat: bool = True
    extra: tuple[Mapping[str, Any], ...] = ()
    penalties: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = True
    response_format: Mapping[str, Any] | None = None
    stream: bool = False
    warnings: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def field(self) -> str:
        """The field of the request that the prompt is from."""
        return "messages" if self.chat else "prompt"

    @property
    def sets(self) -> list[SegmentSet]:
        """The sets of documents of all turns."""
        return [each for turn in self.turns for each in turn.sets]


@dataclass(frozen=True)
class Choice:
    """One answer.

    Attributes:
        answer: Text, reasoning and calls.
        finish_reason: `stop`, `length` or `tool_calls`.
        logprobs: Tokens with their log-probabilities, in OpenAI's shape; None if they were not asked for.
        citations: Parts of the text that documents hold, in Cohere's shape.
    """

    answer: Answer
    finish_reason: str
    logprobs: list[dict[str, Any]] | None = None
    citations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EngineReply:
    """All answers to a call: the usage counts its prompt once, and the report is that of `documents.report_of`."""

    choices: list[Choice]
    usage: Usage
    report: dict[str, Any]


@dataclass(frozen=True)
class JudgeCall:
    """A request to a judge; the attributes are those of `Judge` and its `rank` and `choose`.

    Attributes:
        choices: How the answers are read.
        answers: What is compared.
        question: What they answer.
        reference: A right answer.
        criteria: What makes an answer good. None: what the judge looks at where nobody says.
        is_choice: Whether the answers are the options of a question, of which one is right.
        by: What is scored.
        explain_tokens: Length of an explanation; 0: none.
    """

    choices: Choices
    answers: tuple[str, ...]
    question: str | None
    reference: str | None
    criteria: str | Mapping[str, str] | None
    is_choice: bool
    by: By
    explain_tokens: int


@dataclass(frozen=True)
class RerankCall:
    """A request to a reranker: its best `top_n` documents (None: all), with their texts if wanted."""

    query: str
    documents: tuple[Segment, ...]
    top_n: int | None = None
    return_documents: bool = False


class Reranker(Protocol):
    """What scores documents for a query, as `Relevance` does."""

    @property
    def name(self) -> str:
        """Name of the ordering."""

    @property
    def model_name(self) -> str:
        """Name of the model."""

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[float]:
        """Return the negated scores, the same bits for every order of the documents."""

    def probability(self, score: float) -> float:
        """Return a score as a number from 0 to 1, higher for higher scores."""


class Engine(ABC):
    """What answers requests. Its methods block, and are called from many threads.

    Attributes:
        name: Name of the model.
        toy: Whether an embedded model answers, to which real documents mean nothing.
        context_window: Tokens that a prompt and its answer may have together; None if it is not known.
        together: How many requests are answered at a time.
        method: The method of requests that choose none.
        methods: What requests may choose by `invariant.method`, where the settings allow it.
        orderings: What they may choose by `invariant.ordering` with each method, where the settings allow it.
        caches: The cache of each tenant; empty where none is in this process.
    """

    name: str
    toy: bool = False
    context_window: int | None = None
    together: int
    method: str
    methods: frozenset[str]
    orderings: Mapping[str, frozenset[str]]
    caches: Mapping[str, KeyValueCache] = MappingProxyType({})

    @abstractmethod
    def answer(self, call: Call, emit: Emit, abandoned: Event) -> EngineReply:
        """Answer a request.

        Args:
            call: The request.
            emit: Takes the pieces of the answers, if `call.stream`.
            abandoned: Once set, nobody waits for the answer any more.

        Raises:
            CancelledError: It was abandoned.
        """

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        """Answer the prompts of one request, whose choices are the same, at one time; answers are numbered through."""

        def one(number: int) -> EngineReply:
            first = number * calls[number].request.n
            return self.answer(calls[number], lambda index, delta: emit(first + index, delta), abandoned)

        return in_threads(one, len(calls))

    @abstractmethod
    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of what the model reads.

        Raises:
            UnsupportedCombination: The model is elsewhere, and so is its tokenizer.
        """

    @abstractmethod
    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers.

        Raises:
            UnsupportedCombination: The engine has no log-probabilities of candidates.
        """

    def check_ready(self) -> None:  # noqa: B027 - a model in this process is ready
        """Check that requests would be answered.

        Raises:
            InvariantRAGError: What answers them cannot be reached.
        """

    def close(self) -> None:  # noqa: B027 - and there is nothing to end
        """End: no request comes any more."""


def in_threads(work: Callable[[int], T], count: int) -> list[T]:
    """Return what work returns for each number below a count, done at the same time."""
    if count == 1:
        return [work(0)]
    with ThreadPoolExecutor(count, "invariant-rag-prompt") as threads:
        return list(threads.map(work, range(count)))


def wait_for(result: Future[T], abandoned: Event, seconds: float | None = None) -> T:
    """Return a result, unless nobody waits for it any more.

    Raises:
        CancelledError: It was abandoned. The future is cancelled.
        TimeoutError: It takes longer than so many seconds.
    """
    deadline = None if seconds is None else monotonic() + seconds
    while not wait([result], _POLL_SECONDS).done:
        if abandoned.is_set():
            result.cancel()
            raise CancelledError
        if deadline is not None and monotonic() > deadline:
            raise TimeoutError
    return result.result()
