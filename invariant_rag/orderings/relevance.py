"""What the orderings that ask a model how well a segment answers the query have in common."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import Any

from invariant_rag.errors import InvariantRAGError, TokenizerRequired, UnsupportedModel
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.segments import encodable


class Relevance(Ordering):
    """Best score first, where a model scores every text against the query.

    A model's scores depend, in their last bits, on what else is in the batch. So the model is shown the distinct
    texts in sorted order, whatever order the segments came in: the scores are then bit-identical too.

    Args:
        model: A model id, a local folder, or a loaded model. Ids and folders are loaded on first use.
        batch_size: Texts per forward pass.
        device: Where to load the model; the GPU if there is one, unless told. A loaded model stays where it is.
    """

    _loaded: Any = None
    """What a subclass has loaded."""

    def __init__(self, model: object, *, batch_size: int = 32, device: str | None = None) -> None:
        if batch_size < 1:
            raise InvariantRAGError(f"batch_size: expected at least 1, got {batch_size}")
        self.model = model
        self.name_or_folder = str(model) if isinstance(model, str | Path) else None
        self.batch_size = batch_size
        self.device = device
        # One lock for loading and for scoring: fast tokenizers cannot change their padding from two threads at once.
        self._lock = Lock()

    @abstractmethod
    def score_texts(self, texts: Sequence[str], query: str) -> Sequence[float]:
        """Return one score per text, higher is better. `texts` are distinct and sorted; called by one thread."""

    def keys(self, candidates: Sequence[Candidate], query: str) -> list[float]:
        """Return the negated scores.

        Raises:
            TokenizerRequired: A candidate has no text.
            UnsupportedModel: The model gave a score that is not a number.
        """
        texts = [candidate.text for candidate in candidates]
        if any(text is None for text in texts):
            raise TokenizerRequired(
                f"ordering {self.name!r} compares texts, but segment {texts.index(None)} has token ids only",
                hint='Pass `tokenizer=` to InvariantModel, or choose an ordering over token ids such as "lexical".',
            )
        readable = [encodable(text) for text in texts if text is not None]
        distinct = sorted(set(readable))
        if not distinct:
            return []
        with self._lock:
            scores = dict(zip(distinct, map(float, self.score_texts(distinct, encodable(query))), strict=True))
        if any(math.isnan(score) for score in scores.values()):
            raise UnsupportedModel(f"the model of ordering {self.name!r} gave nan scores", hint="Try another model.")
        return [-scores[text] for text in readable]

    def __getstate__(self) -> dict[str, Any]:
        # A lock cannot leave its process, and weights that have a name are loaded where they are needed.
        left = {"_lock"} if self.name_or_folder is None else {"_lock", "_loaded"}
        return {name: value for name, value in vars(self).items() if name not in left}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._lock = Lock()

    def __repr__(self) -> str:
        shown = type(self.model).__name__ if self.name_or_folder is None else repr(self.name_or_folder)
        return f"{type(self).__name__}({shown})"


def unloadable(what: str, name: str, error: Exception) -> InvariantRAGError:
    """Return the error for a model that could not be loaded."""
    return InvariantRAGError(
        f"cannot load {what} {name!r}: {error}",
        hint="Give a model id that can be downloaded or is in the local cache, a local folder, or a loaded model.",
    )
