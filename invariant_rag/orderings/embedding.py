"""Ordering by the cosine similarity of embeddings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from invariant_rag.models.embedders import DEFAULT_EMBEDDER, load_embedder
from invariant_rag.orderings.relevance import Relevance


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
