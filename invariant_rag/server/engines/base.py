"""The interface of engines: calls, replies, and what every engine can do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from threading import Event
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from invariant_rag.generation.answers import Answer, AnswerDelta, AnswerRequest
from invariant_rag.generation.outputs import Usage
from invariant_rag.segments import SegmentSet
from invariant_rag.server.admission import POLL_SECONDS
from invariant_rag.server.schemas import JudgeRequest

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.judge import Verdict

T = TypeVar("T")
Emit: TypeAlias = Callable[[int, AnswerDelta], None]
"""Takes a delta of the answer of that index, in any thread."""


@dataclass(frozen=True)
class CallChoices:
    """The tenant, and how the documents are arranged. None: as the server does by default."""

    tenant: str = ""
    method: str | None = None
    ordering: str | None = None
    overflow: str | None = None


@dataclass(frozen=True)
class Call:
    """One request, for an engine.

    Attributes:
        request: Messages or a prompt, in which every document is in a set, and what the answers are to be. Its options
            are those of transformers and OpenAI: penalties, and `logit_bias`.
        choices: How the documents are arranged.
        stream: Whether the client takes deltas.
        response_format: The field of the request that the schema is from.
        warnings: Why the order of the documents may matter all the same.
        characters: Length of the texts of the request; of calls of tools, as JSON.
        headers: What a remote engine gets of the head of the request: names of the request and of its trace.
    """

    request: AnswerRequest
    choices: CallChoices
    stream: bool = False
    response_format: Mapping[str, Any] | None = None
    warnings: tuple[str, ...] = ()
    characters: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def field(self) -> str:
        """The field of the request that the prompt is from."""
        return "prompt" if self.request.messages is None else "messages"

    @property
    def is_strict(self) -> bool:
        """Whether an answer that breaks the schema is an error, also in what no grammar expresses."""
        return ((self.response_format or {}).get("json_schema") or {}).get("strict") is not False

    @property
    def sets(self) -> list[SegmentSet]:
        """The sets of documents."""
        if (prompt := self.request.prompt) is not None:
            return list(prompt.sets)
        parts: list[Any] = []
        for each in self.request.messages or ():
            parts += each["content"]
        return [part for part in parts if isinstance(part, SegmentSet)]


@dataclass(frozen=True)
class JudgeCall:
    """A request to a judge, and how its documents are arranged."""

    request: JudgeRequest
    choices: CallChoices


@dataclass(frozen=True)
class Choice:
    """One answer: its log-probabilities in OpenAI's shape (None: not requested), its citations in Cohere's."""

    answer: Answer
    finish_reason: str
    logprobs: list[dict[str, Any]] | None = None
    citations: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class EngineReply:
    """All answers to a call: the usage counts its prompt once, and the ledger is that of `replies.ledger_of`."""

    choices: list[Choice]
    usage: Usage
    ledger: dict[str, Any]


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
    def answer_all(self, calls: Sequence[Call], emit: Emit, abandoned: Event) -> list[EngineReply]:
        """Answer the prompts of one request, whose choices are the same, at one time; answers are numbered through.

        `emit` takes the deltas of streams. Once `abandoned` is set, the client has left: raise CancelledError.
        """

    @abstractmethod
    def tokens(self, call: Call) -> list[int]:
        """Return the token ids of the prompt."""

    @abstractmethod
    def judge(self, call: JudgeCall) -> Verdict:
        """Compare answers."""

    def check_ready(self) -> None:  # noqa: B027 - a model in this process is ready
        """Check that requests would be answered, or raise why not."""

    def close(self) -> None:  # noqa: B027 - and there is nothing to end
        """End: no request comes any more."""


def in_threads(work: Callable[[int], T], count: int) -> list[T]:
    """Return what work returns for each number below a count, done at the same time."""
    if count == 1:
        return [work(0)]
    with ThreadPoolExecutor(count, "invariant-rag-prompt") as threads:
        return list(threads.map(work, range(count)))


def wait_for(result: Future[T], abandoned: Event) -> T:
    """Return a result; or cancel it and raise CancelledError, once nobody waits for it any more."""
    while not wait([result], POLL_SECONDS).done:
        if abandoned.is_set():
            result.cancel()
            raise CancelledError
    return result.result()
