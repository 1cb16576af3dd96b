"""The RAG pipeline: index documents, retrieve chunks, generate an answer, cite the chunks."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from invariant_rag.checks import check_number, check_text
from invariant_rag.errors import InvalidChoice, RetrievalError, ToyModelWarning, UnsupportedCombination
from invariant_rag.generation.choices import check_before_loading
from invariant_rag.generation.model import InvariantModel
from invariant_rag.models.loading import load_config
from invariant_rag.rag.citations import Citation, cite
from invariant_rag.rag.documents import check_documents
from invariant_rag.rag.retrieval import Retriever, RetrieverFactory, index_documents, resolve_retriever
from invariant_rag.segments import Prompt, SegmentSet

if TYPE_CHECKING:
    from invariant_rag.generation.outputs import Generation
    from invariant_rag.generation.streaming import TextStream


@dataclass(frozen=True)
class Timings:
    """Wall-clock seconds of retrieval and generation."""

    retrieve: float
    generate: float


@dataclass(frozen=True)
class Answer:
    """What `RAG.ask` returns."""

    text: str
    citations: tuple[Citation, ...]  # the chunks of the prompt that contain the answer, best first; see `cite`
    segments: SegmentSet  # the retrieved chunks as the retriever ranked them, best first
    order: tuple[int, ...]  # physical order in the prompt: indices into `segments`, farthest from the question first
    timings: Timings
    generation: Generation  # the model's output, with token ids, log-probabilities and usage

    def as_dict(self) -> dict[str, Any]:
        """Return the answer as a dict without token ids and log-probabilities; metadata values are not converted."""
        return {
            "answer": self.text,
            "citations": [{"index": each.index, "exact": each.exact} for each in self.citations],
            "segments": [
                {"title": each.title, "text": each.text, "score": each.score, "metadata": dict(each.metadata)}
                for each in self.segments
            ],
            "order": list(self.order),
            "dropped": list(self.generation.dropped),
            "trimmed": list(self.generation.trimmed),
            "finish_reason": self.generation.finish_reason,
            "usage": {each: getattr(self.generation.usage, each) for each in ("prompt_tokens", "completion_tokens")},
            "timings": asdict(self.timings),
        }


class RAG:
    """Answer questions from the chunks that a retriever finds.

    Args:
        model: The model.
        retriever: An object with `retrieve(query, k)`.
        k: Number of chunks to retrieve.
        system: System message. None: the default of `InvariantModel.chat_prompt`.

    Raises:
        RetrievalError: `k` is below 1.
        InvalidChoice: Another argument is of another type.
    """

    def __init__(self, model: InvariantModel, retriever: Retriever, k: int = 10, *, system: str | None = None) -> None:
        if not callable(getattr(model, "chat_prompt", None)):
            raise InvalidChoice(
                f"model: expected an InvariantModel, got {type(model).__name__}",
                hint="RAG.from_documents takes the name of a model.",
            )
        if not callable(getattr(retriever, "retrieve", None)):
            raise InvalidChoice(
                f"retriever: expected an object with retrieve(query, k), got {type(retriever).__name__}",
                hint="index_documents and RAG.from_documents take documents.",
            )
        if system is not None:
            check_text("system", system)
        self.model = model
        self.retriever = retriever
        self.k = check_number("k", k, 1, error=RetrievalError)
        self.system = system

    @classmethod
    def from_documents(
        cls,
        paths: str | Path | Iterable[str | Path],
        model: InvariantModel | str | Path | None = None,
        retriever: str | RetrieverFactory = "bm25",
        k: int = 10,
        *,
        system: str | None = None,
        max_chars: int = 1000,
        overlap: int = 0,
        strict: bool = False,
        **model_options: Any,
    ) -> RAG:
        """Load and chunk documents, index the chunks, and load the model.

        Args:
            paths: Files (`.txt`, `.md`, `.jsonl`, `.pdf`) and folders.
            model: A model, a model id, a local folder, or None for the embedded toy model, with a `ToyModelWarning`.
            retriever: "bm25"; "faiss", or "faiss:MODEL" with a sentence-transformers model; or a function that builds
                a retriever from a list of chunks. Pass an existing retriever to `RAG(model, retriever)`.
            k: Number of chunks to retrieve.
            system: System message.
            max_chars: Maximum characters per chunk.
            overlap: Maximum characters shared by two adjacent chunks.
            strict: Whether a document that cannot be read is an error. Otherwise it is skipped, with a
                `DocumentSkipped` warning.
            **model_options: Keywords of `InvariantModel.from_pretrained`, such as `method` and `ordering`.

        Raises:
            UnknownName: There is no retriever of that name, or no such model option; nothing is indexed before.
            ExtraRequired: A package that the retriever or the ordering needs is not installed.
            ModelNotFound: There is no such model; nothing is indexed before.
            RetrievalError: The documents cannot be read, or have no text; or a number is below its least value.
            UnsupportedCombination: `model_options` are given together with a loaded model.
        """
        check_number("k", k, 1, error=RetrievalError)
        if system is not None:
            check_text("system", system)
        if isinstance(model, InvariantModel) and model_options:
            raise UnsupportedCombination(
                f"expected no model options beside a loaded model, got {', '.join(model_options)}",
                hint="Use model.with_method(...) first.",
            )
        if not isinstance(model, InvariantModel):
            check_before_loading(**model_options)
            resolve_retriever(retriever)
            if isinstance(paths, str | Path):
                check_documents([paths])
            load_config(model, **model_options)  # refuses an unknown model before anything is indexed
        index = index_documents(paths, retriever, max_chars=max_chars, overlap=overlap, strict=strict)
        if model is None:
            warnings.warn(ToyModelWarning(), stacklevel=2)
        loaded = model if isinstance(model, InvariantModel) else InvariantModel.from_pretrained(model, **model_options)
        return cls(loaded, index, k, system=system)

    def prompt(self, question: str) -> Prompt:
        """Retrieve chunks for a question and build a chat prompt with them as one set."""
        check_text("question", question)
        return self.model.chat_prompt(question, self.retriever.retrieve(question, self.k), system=self.system)

    def ask(self, question: str, **generation: Any) -> Answer:
        """Answer a question from the retrieved chunks.

        Args:
            question: The question, which is also the retriever's query.
            **generation: Keywords of `InvariantModel.generate`.
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
        """Stream the answer to a question. The joined deltas are the text that `ask` returns."""
        return self.model.stream(self.prompt(question), **generation)
