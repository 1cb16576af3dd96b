"""Ordering by the relevance score of a cross-encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from invariant_rag.cancellation import check_cancelled
from invariant_rag.errors import UnsupportedModel
from invariant_rag.orderings.relevance import CHARACTERS_PER_TOKEN, Relevance, load_error

_DEFAULT = "cross-encoder/ms-marco-MiniLM-L6-v2"
_LONGEST = 8192
"""Tokens that a cross-encoder reads whose limit is not known."""
_BATCHES = 4
"""Of texts that are scored before it is seen whether somebody still waits; the texts of similar length are together."""


class CrossEncoder(Relevance):
    """Rank by the score of a sentence-transformers cross-encoder for query and segment, most relevant first.

    Args:
        model: A model id or local folder, or a loaded `sentence_transformers.CrossEncoder` with one output.
        batch_size: Texts per forward pass.
        device: Device to load the model on; default: the GPU if there is one.
    """

    name: ClassVar[str] = "cross-encoder"
    scores_with: ClassVar[str | None] = "predict"

    def __init__(self, model: object = _DEFAULT, *, batch_size: int = 32, device: str | None = None) -> None:
        super().__init__(model, batch_size=batch_size, device=device)

    def score_texts(self, texts: Sequence[str], query: str) -> list[float]:
        """Return the logit of each text. A sigmoid would round high scores to the same float32."""
        import torch

        model = self._load()
        # Before sentence-transformers 6, the name is `max_length`.
        longest = model.max_seq_length if hasattr(model, "max_seq_length") else getattr(model, "max_length", None)
        most = CHARACTERS_PER_TOKEN * (longest or _LONGEST)
        pairs = [(query[:most], text[:most]) for text in texts]
        found: list[float] = []
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
            found += map(float, scores)
        return found

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
