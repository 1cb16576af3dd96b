"""Orderings that score segments against the query with a model: by a cross-encoder, or by embeddings."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar

from invariant_rag.cancellation import check_cancelled
from invariant_rag.checks import check_number, check_text, require_extra
from invariant_rag.errors import InvalidChoice, InvariantRAGError, TokenizerRequired, UnsupportedModel
from invariant_rag.models.embedders import DEFAULT_EMBEDDER, load_embedder
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.segments import replace_surrogates

CHARACTERS_PER_TOKEN = 16
"""A text is truncated to so many characters for each token of a model's input, before it is tokenized."""
_CROSS_ENCODER = "cross-encoder/ms-marco-MiniLM-L6-v2"
_LONGEST = 8192  # input tokens of a cross-encoder whose limit is not known
_BATCHES = 4
"""Texts that are scored between two checks for cancellation; texts of similar length are scored together."""


class Relevance(Ordering):
    """Rank by the score of a model for query and segment, highest first.

    The last bits of a score depend on the other texts in the batch. The model therefore scores the distinct texts in
    sorted order, so that the scores are bit-identical for every input order.

    Args:
        model: A model id, a local folder, or a loaded model. Ids and folders are loaded on first use.
        batch_size: Texts per forward pass.
        device: Device to load the model on; default: the GPU if there is one. A loaded model is not moved.

    Raises:
        InvalidChoice: An argument is of another type, or too small.
    """

    scores_with: ClassVar[str | None] = None
    """Method of a loaded model of sentence-transformers; None: models of another package, which is always installed."""

    def __init__(self, model: object, *, batch_size: int = 32, device: str | None = None) -> None:
        known = isinstance(model, str | Path) or self.scores_with is None
        if not known and not callable(getattr(model, str(self.scores_with), None)):
            raise InvalidChoice(
                f"model: expected the name of a model, or one with {self.scores_with}, got {type(model).__name__}"
            )
        check_number("batch_size", batch_size, 1)
        if device is not None:
            check_text("device", device)
        self.model = model
        self.name_or_folder = str(model) if isinstance(model, str | Path) else None
        self.batch_size = batch_size
        self.device = device
        self._loaded: Any = model if self.name_or_folder is None else None
        # For loading and scoring: a fast tokenizer keeps its padding as state, so only one thread may use it.
        self._lock = Lock()

    @property
    def model_name(self) -> str:
        """Name of the model: of a folder, its last part; of a loaded model, its class."""
        name = self.name_or_folder
        if name is None:
            return type(self.model).__name__
        return Path(name).name if Path(name).is_absolute() else name

    def check_installed(self) -> None:
        """Check that sentence-transformers is installed, if it is needed and the model is not loaded already."""
        if self.scores_with and self.name_or_folder is not None:
            require_extra("sentence_transformers", "retrieval")

    @abstractmethod
    def score_texts(self, texts: Sequence[str], query: str) -> Sequence[float]:
        """Return one score per text, higher is better.

        Called under a lock, with texts that are distinct and sorted. Between batches it calls `check_cancelled`.
        """

    def probability(self, score: float) -> float:
        """Return a score as a number from 0 to 1, higher for higher scores: here, the sigmoid of a logit."""
        return 1 / (1 + math.exp(-score)) if score > -700 else 0.0

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[float]:
        """Return the negated scores; refuse candidates without text, and scores that are nan."""
        texts = [candidate.text for candidate in candidates]
        if any(text is None for text in texts):
            raise TokenizerRequired(
                f"ordering {self.name!r} expects text, but segment {texts.index(None)} has only token ids",
                hint='Pass `tokenizer=` to InvariantModel, or choose an ordering over token ids such as "lexical".',
            )
        clean = [replace_surrogates(text) for text in texts if text is not None]
        distinct = sorted(set(clean))
        if not distinct:
            return []
        check_cancelled()
        with self._lock:
            check_cancelled()
            scores = dict(zip(distinct, map(float, self.score_texts(distinct, replace_surrogates(query))), strict=True))
        if any(math.isnan(score) for score in scores.values()):
            raise UnsupportedModel(
                f"ordering {self.name!r} expects numbers as scores, got nan from {self!r}",
                hint="Load the model in float32, or choose another model.",
            )
        return [-scores[text] for text in clean]

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot be pickled, and a model with a name is loaded again by the process that unpickles it.
        loaded = self._loaded if self.name_or_folder is None else None
        return {**{name: value for name, value in vars(self).items() if name != "_lock"}, "_loaded": loaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._lock = Lock()
        super().__setstate__(state)

    def __repr__(self) -> str:
        shown = type(self.model).__name__ if self.name_or_folder is None else repr(self.name_or_folder)
        return f"{type(self).__name__}({shown})"


def load_error(what: str, name: str, error: Exception) -> InvariantRAGError:
    """Build the error for a model that could not be loaded."""
    return InvariantRAGError(
        f"cannot load {what} {name!r}: {error}",
        hint="Give a model id that can be downloaded or is in the local cache, a local folder, or a loaded model.",
    )


class CrossEncoder(Relevance):
    """Rank by the score of a sentence-transformers cross-encoder for query and segment, most relevant first.

    Args:
        model: A model id or local folder, or a loaded `sentence_transformers.CrossEncoder` with one output.
        batch_size: Texts per forward pass.
        device: Device to load the model on; default: the GPU if there is one.
    """

    name: ClassVar[str] = "cross-encoder"
    scores_with: ClassVar[str | None] = "predict"

    def __init__(self, model: object = _CROSS_ENCODER, *, batch_size: int = 32, device: str | None = None) -> None:
        super().__init__(model, batch_size=batch_size, device=device)

    def score_texts(self, texts: Sequence[str], query: str) -> list[float]:
        """Return the logit of each text. A sigmoid would round high scores to the same float32."""
        import torch

        model = self._load()
        # Before sentence-transformers 6, the name is `max_length`.
        longest = model.max_seq_length if hasattr(model, "max_seq_length") else getattr(model, "max_length", None)
        most = CHARACTERS_PER_TOKEN * (longest or _LONGEST)
        pairs = [(query[:most], text[:most]) for text in texts]
        listed: list[float] = []
        for first in range(0, len(pairs), _BATCHES * self.batch_size):
            check_cancelled()
            scores = model.predict(
                pairs[first : first + _BATCHES * self.batch_size],
                batch_size=self.batch_size,
                show_progress_bar=False,
                activation_fn=torch.nn.Identity(),
            )
            if scores.ndim != 1:
                raise UnsupportedModel(
                    f"ordering {self.name!r} expects one score per text, got {scores.shape[-1]} from {self!r}",
                    hint="Use a cross-encoder with num_labels=1.",
                )
            listed += map(float, scores)
        return listed

    def _load(self) -> Any:
        if self._loaded is None:
            self.check_installed()
            import sentence_transformers

            name = str(self.name_or_folder)
            try:
                self._loaded = sentence_transformers.CrossEncoder(name, device=self.device)
            except (OSError, ValueError) as error:
                raise load_error("the cross-encoder", name, error) from error
        return self._loaded


class Embedding(Relevance):
    """Rank by cosine similarity of sentence-transformers embeddings to the query, most similar first.

    Args:
        model: A model id or local folder, or a loaded `SentenceTransformer`.
        batch_size: Texts per forward pass.
        device: Device to load the model on; default: the GPU if there is one.
    """

    name: ClassVar[str] = "embedding"
    scores_with: ClassVar[str | None] = "encode_document"

    def __init__(self, model: object = DEFAULT_EMBEDDER, *, batch_size: int = 32, device: str | None = None) -> None:
        super().__init__(model, batch_size=batch_size, device=device)

    def score_texts(self, texts: Sequence[str], query: str) -> list[float]:
        """Return the cosine similarity of each text to the query."""
        if self._loaded is None:
            self._loaded = load_embedder(str(self.name_or_folder), device=self.device)
        options = {"batch_size": self.batch_size, "show_progress_bar": False, "normalize_embeddings": True}
        documents = self._loaded.encode_document(list(texts), **options)  # [N, D] float32
        query_vector = self._loaded.encode_query(query, **options)  # [D] float32
        return [float(similarity) for similarity in documents @ query_vector]

    def probability(self, score: float) -> float:
        """Return the cosine similarity, from -1 to 1, as a number from 0 to 1."""
        return min(max((1 + score) / 2, 0.0), 1.0)
