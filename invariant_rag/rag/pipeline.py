"""Retrieval-augmented generation: retrieve chunks, let the model read them as a set, answer with citations."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import RetrievalError, UnknownName, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.rag.citations import Citation, cite
from invariant_rag.rag.documents import chunk_documents, load_documents
from invariant_rag.rag.retrieval import BM25Retriever, FaissRetriever, Retriever
from invariant_rag.segments import Prompt, Segment, SegmentSet

if TYPE_CHECKING:
    from invariant_rag.generation.outputs import Generation
    from invariant_rag.generation.streaming import TextStream

RetrieverFactory = Callable[[list[Segment]], Retriever]
RETRIEVERS: dict[str, RetrieverFactory] = {"faiss": FaissRetriever, "bm25": BM25Retriever}


def index_documents(
    paths: str | Path | Iterable[str | Path],
    retriever: str | RetrieverFactory = "faiss",
    *,
    max_chars: int = 1000,
    overlap: int = 0,
) -> Retriever:
    """Load documents, cut them into chunks, and build a retriever over them; see `RAG.from_documents`."""
    factory = RETRIEVERS.get(retriever) if isinstance(retriever, str) else retriever
    if factory is None:
        raise UnknownName("retriever", retriever, RETRIEVERS)
    chunks = chunk_documents(load_documents(paths), max_chars=max_chars, overlap=overlap)
    if not chunks:
        raise RetrievalError(
            f"expected documents with text, got none in {paths}", hint="Give files that are not empty."
        )
    return factory(chunks)


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of the two steps of an answer."""

    retrieve: float
    generate: float


@dataclass(frozen=True)
class Answer:
    """What `RAG.ask` returns.

    Attributes:
        text: The answer.
        citations: The chunks that were read and in which the answer was found, best first; see
            `invariant_rag.rag.citations.cite`.
        segments: Every retrieved chunk, in the retriever's order, best first.
        order: The physical order in which the model read them: indices into `segments`, farthest from the question
            first.
        timings: Seconds spent.
        generation: Token ids, log-probabilities, usage and the rest.
    """

    text: str
    citations: tuple[Citation, ...]
    segments: SegmentSet
    order: tuple[int, ...]
    timings: Timings
    generation: Generation

    def as_dict(self) -> dict[str, Any]:
        """Return everything but token ids and log-probabilities as plain data; metadata stays as it came."""
        return {
            "answer": self.text,
            "citations": [{"index": each.index, "exact": each.exact} for each in self.citations],
            "segments": [
                {
                    "title": segment.title,
                    "text": segment.text,
                    "score": segment.score,
                    "metadata": dict(segment.metadata),
                }
                for segment in self.segments
            ],
            "order": list(self.order),
            "dropped": list(self.generation.dropped),
            "trimmed": list(self.generation.trimmed),
            "finish_reason": self.generation.finish_reason,
            "usage": {
                "prompt_tokens": self.generation.usage.prompt_tokens,
                "completion_tokens": self.generation.usage.completion_tokens,
            },
            "timings": {"retrieve": self.timings.retrieve, "generate": self.timings.generate},
        }


class RAG:
    """Answer questions from the chunks that a retriever finds.

    Args:
        model: The model that answers.
        retriever: Anything with `retrieve(query, k)`.
        k: Number of chunks to retrieve.
        system: System message; the model's own default where None.

    Raises:
        RetrievalError: `k` is below 1.
    """

    def __init__(self, model: InvariantModel, retriever: Retriever, k: int = 10, *, system: str | None = None) -> None:
        if k < 1:
            raise RetrievalError(f"k: expected at least 1, got {k}")
        self.model = model
        self.retriever = retriever
        self.k = k
        self.system = system

    @classmethod
    def from_documents(
        cls,
        paths: str | Path | Iterable[str | Path],
        model: InvariantModel | str | Path | None = None,
        retriever: str | RetrieverFactory = "faiss",
        k: int = 10,
        *,
        system: str | None = None,
        max_chars: int = 1000,
        overlap: int = 0,
        **model_options: Any,
    ) -> RAG:
        """Load documents, cut them into chunks, index the chunks, load the model.

        Args:
            paths: Files (`.txt`, `.md`, `.jsonl`, `.pdf`) and folders.
            model: A model, a model id, a local folder, or None for the embedded model.
            retriever: "faiss", "bm25", or a function that builds a retriever over chunks. A retriever that exists
                already goes to `RAG(model, retriever)`.
            k: Number of chunks to retrieve.
            system: System message.
            max_chars: Longest chunk, in characters.
            overlap: Characters that two neighbouring chunks may share.
            model_options: Keywords of `InvariantModel.from_pretrained`, such as `method` and `ordering`.

        Raises:
            UnknownName: No retriever has that name.
            RetrievalError: The documents cannot be read.
            UnsupportedCombination: There are options for a model that is loaded already.
        """
        if isinstance(model, InvariantModel) and model_options:
            raise UnsupportedCombination(
                f"a loaded model takes no {', '.join(model_options)}", hint="Use model.with_method(...) first."
            )
        index = index_documents(paths, retriever, max_chars=max_chars, overlap=overlap)
        loaded = model if isinstance(model, InvariantModel) else InvariantModel.from_pretrained(model, **model_options)
        return cls(loaded, index, k, system=system)

    def prompt(self, question: str) -> Prompt:
        """Retrieve chunks for `question` and put them into the model's chat template, as one set."""
        return self.model.chat_prompt(question, self.retriever.retrieve(question, self.k), system=self.system)

    def ask(self, question: str, **generation: Any) -> Answer:
        """Answer `question` from the retrieved chunks.

        Args:
            question: The question. It is also what the retriever searches for.
            generation: Keywords of `InvariantModel.generate`.
        """
        start = perf_counter()
        prompt = self.prompt(question)
        retrieved = perf_counter()
        result = self.model.generate(prompt, **generation)
        done = perf_counter()
        return Answer(
            text=result.text,
            citations=tuple(cite(result.text, question, prompt.segments, result.order)),
            segments=prompt.segments,
            order=tuple(result.order),
            timings=Timings(retrieve=retrieved - start, generate=done - retrieved),
            generation=result,
        )

    def stream(self, question: str, **generation: Any) -> TextStream:
        """Answer `question` piece by piece. The pieces, joined, are the text that `ask` returns."""
        return self.model.stream(self.prompt(question), **generation)
