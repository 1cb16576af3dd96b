"""What a server asks of an engine, and what the engine answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from threading import Event
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from invariant_rag.generation.answers import Answer, AnswerDelta
from invariant_rag.prompts import Turn
from invariant_rag.segments import Segment

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.outputs import Usage
    from invariant_rag.judge import By, Verdict
    from invariant_rag.orderings import Candidate

T = TypeVar("T")
Emit: TypeAlias = Callable[[int, AnswerDelta], None]
"""Takes a piece of the answer of that index, in any thread."""


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
class Sampling:
    """How to choose tokens.

    Attributes:
        max_new_tokens: The most tokens of an answer.
        temperature: 0: greedy.
        seed: Seed of the first answer; the next ones have the numbers after it.
        more: `top_p`, `top_k`, `min_p`, `repetition_penalty`, as transformers names them; `frequency_penalty`,
            `presence_penalty` and `logit_bias`, as OpenAI does.
    """

    max_new_tokens: int
    temperature: float = 0.0
    seed: int | None = None
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Call:
    """One request, for an engine.

    Attributes:
        turns: The conversation, in which every document is in a set; for a completion, one turn, or token ids.
        chat: Whether the turns go through a chat template.
        question: What relevance orderings compare documents with.
        choices: How the documents are read.
        sampling: How tokens are chosen.
        extra: Fields of messages beside role and content, by turn: calls of tools, and ids of results.
        count: Number of answers.
        stop: Strings that end an answer.
        schema: JSON schema of the answer.
        strict: Whether an answer that breaks the schema is an error, also in what no grammar expresses.
        response_format: The field of the request that `schema` is from, for an engine that passes it on.
        tools: Tools, in OpenAI's shape.
        tool_choice: As for `ToolCalling`.
        parallel: Whether an answer may hold several calls.
        template_kwargs: Variables of the chat template.
        logprobs: Whether the log-probabilities of tokens are wanted.
        top_logprobs: Of how many other tokens at each place, too.
        stream: Whether somebody takes the pieces.
        warnings: Why the order of the documents may matter all the same.
        headers: What an engine elsewhere gets of the head of the request: names of the request and of its trace.
    """

    turns: tuple[Turn, ...]
    question: str
    choices: Choices
    sampling: Sampling
    chat: bool = True
    extra: tuple[Mapping[str, Any], ...] = ()
    count: int = 1
    stop: tuple[str, ...] = ()
    schema: Mapping[str, Any] | None = None
    strict: bool = True
    response_format: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str = "auto"
    parallel: bool = True
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    top_logprobs: int = 0
    stream: bool = False
    warnings: tuple[str, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def field(self) -> str:
        """The field of the request that the prompt is from."""
        return "messages" if self.chat else "prompt"


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
class Reply:
    """All answers to a request.

    Attributes:
        choices: The answers.
        usage: Tokens of the prompt, once, and of all answers.
        report: What was read of the documents; see `report_of`.
    """

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
    """A request to a reranker.

    Attributes:
        query: What the documents are compared with.
        documents: The documents.
        top_n: How many are returned; None: all.
        return_documents: Whether with their texts.
    """

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


def in_threads(work: Callable[[int], T], count: int) -> list[T]:
    """Return what work returns for each number below a count, done at the same time."""
    if count == 1:
        return [work(0)]
    with ThreadPoolExecutor(count, "invariant-rag-prompt") as threads:
        return list(threads.map(work, range(count)))


class OnePromptAtATime(ABC):
    """An engine to which the prompts of a request are requests of their own, at the same time."""

    @abstractmethod
    def answer(self, call: Call, emit: Emit, abandoned: Event) -> Reply:
        """Answer a request; see `Engine`."""

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[Reply]:
        """Answer the prompts of one request; see `Engine`."""

        def one(number: int) -> Reply:
            first = number * calls[number].count
            return self.answer(calls[number], lambda index, delta: emit(first + index, delta), abandoned)

        return in_threads(one, len(calls))


class Engine(Protocol):
    """What answers requests. Its methods block, and are called from many threads."""

    @property
    def name(self) -> str:
        """Name of the model."""

    @property
    def toy(self) -> bool:
        """Whether an embedded model answers, to which real documents mean nothing."""

    @property
    def context_window(self) -> int | None:
        """Tokens that a prompt and its answer may have together; None if it is not known."""

    @property
    def together(self) -> int:
        """How many requests are answered at a time."""

    @property
    def method(self) -> str:
        """The method of requests that choose none."""

    @property
    def methods(self) -> frozenset[str]:
        """What requests may choose by `invariant.method`, where the settings allow it."""

    @property
    def orderings(self) -> Mapping[str, frozenset[str]]:
        """What requests may choose by `invariant.ordering` with each method, where the settings allow it."""

    @property
    def caches(self) -> Mapping[str, KeyValueCache]:
        """The cache of each tenant; empty where none is in this process."""

    def check_ready(self) -> None:
        """Check that requests would be answered.

        Raises:
            InvariantRAGError: What answers them cannot be reached.
        """

    def close(self) -> None:
        """End: no request comes any more."""

    def answer(self, call: Call, emit: Emit, abandoned: Event) -> Reply:
        """Answer a request.

        Args:
            call: The request.
            emit: Takes the pieces of the answers, if `call.stream`.
            abandoned: Once set, nobody waits for the answer any more.

        Raises:
            CancelledError: It was abandoned.
        """

    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[Reply]:
        """Answer the prompts of one request, whose choices are the same; as `answer`, with answers numbered through."""

    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of what the model reads.

        Raises:
            UnsupportedCombination: The model is elsewhere, and so is its tokenizer.
        """

    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers.

        Raises:
            UnsupportedCombination: The engine has no log-probabilities of candidates.
        """
