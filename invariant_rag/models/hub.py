"""The model hub: whether it can be reached, and what to do where a model is not found there."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from invariant_rag.checks import check_path
from invariant_rag.errors import ModelNotFound
from invariant_rag.files import parse_json, read_bytes
from invariant_rag.shown import reason

_WEIGHTS = frozenset({".safetensors", ".bin", ".gguf", ".h5", ".msgpack", ".pt", ".pth"})  # of files of weights
_TOKENIZER = re.compile("token|vocab|merges|piece|bpe|[.]model$", re.IGNORECASE)  # in the names of its files


def check_model(name: str | Path | None, *, weights: bool = True) -> None:
    """Check that there is a model, before PyTorch is imported: its folder, or its configuration on the hub.

    Args:
        name: Hub id or folder. None and `native`: the embedded ones.
        weights: Whether more than the tokenizer is loaded.

    Raises:
        ModelNotFound: There is no such folder, nothing of that name on the hub, or no configuration or weights, or no
            tokenizer, in it.
    """
    if name in (None, "native"):
        return
    check_path("model", name, error=ModelNotFound)
    source = str(name)
    look = f"Run `ls {source}`: the folder of a model holds config.json and its weights."
    expected = f"expected the hub id or the folder of a model, got {source}"
    file = os.path.join(source, "config.json")  # noqa: PTH118 - a hub id is no path
    if not os.path.isdir(source):  # noqa: PTH112
        if os.path.exists(source) or is_folder_name(source):  # noqa: PTH110
            what = "a file" if os.path.exists(source) else "no such folder"  # noqa: PTH110
            raise ModelNotFound(f"{expected}: {what}", hint=look)
        file = _download_config(source, expected)
    if not weights:
        if os.path.isdir(source) and not any(_TOKENIZER.search(each) for each in os.listdir(source)):  # noqa: PTH112, PTH208
            raise ModelNotFound(f"expected a tokenizer in {source}, got none", hint=f"Run `ls {source}`.")
        return
    try:
        config = parse_json(read_bytes(Path(file)))
    except (OSError, ValueError) as error:
        raise ModelNotFound(f"{expected}: its config.json cannot be read: {reason(error)}", hint=look) from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ModelNotFound(f"{expected}: its config.json names no model_type", hint=look)
    if os.path.isdir(source):  # noqa: PTH112
        _check_weights(Path(source), expected, look)


def _check_weights(folder: Path, expected: str, look: str) -> None:
    """Check that a folder has weights, and that none of them is a file that was cut off while it was copied."""
    from safetensors import SafetensorError, safe_open

    files = [path for path in folder.iterdir() if path.suffix in _WEIGHTS]
    if not files:
        raise ModelNotFound(f"{expected}: no weights in it", hint=look)
    for path in files:
        if path.suffix == ".safetensors":
            try:
                safe_open(path, framework="numpy")
            except (OSError, SafetensorError) as error:
                hint = "Copy or download it again: a file that was cut off looks like this."
                raise ModelNotFound(f"{expected}: {path.name} cannot be read: {reason(error)}", hint=hint) from error


def _download_config(name: str, expected: str) -> str:
    from huggingface_hub import errors, hf_hub_download

    try:
        try:
            return hf_hub_download(name, "config.json", local_files_only=True)
        except errors.LocalEntryNotFoundError:
            return hf_hub_download(name, "config.json")
    except (OSError, ValueError, errors.HfHubHTTPError) as error:
        problem = "no hub id" if isinstance(error, errors.HFValidationError) else "not found"
        raise ModelNotFound(f"{expected}: {problem}", hint=what_to_do(name, error)) from error


def is_folder_name(name: str) -> bool:
    """Return whether a name can only be that of a folder, and not a hub id."""
    return Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1


def what_to_do(name: str, error: BaseException) -> str | None:
    """Return the next step after transformers raised an error for a model; None where there is none in particular."""
    from huggingface_hub import errors

    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    if any(isinstance(each, errors.GatedRepoError) for each in causes):
        return f"Accept its terms at https://huggingface.co/{name}, then run `hf auth login`, and try again."
    if any(isinstance(each, errors.RepositoryNotFoundError) for each in causes):
        return f"The hub has no {name!r}: see https://huggingface.co/models. If it is private, run `hf auth login`."
    if is_folder_name(name):
        return f"There is no such folder, or no model in it: run `ls {name}`. It should hold config.json and weights."
    if any(isinstance(each, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) for each in causes):
        return (
            f"The hub cannot be reached. Where it can, run `hf download {name} --local-dir FOLDER`, and give the "
            "folder. Without a name, the embedded model runs."
        )
    return None


def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the model hub answers an HTTP request, with any status; its client retries for over a minute.

    Respects `HF_HUB_OFFLINE`, `HF_ENDPOINT` and proxy settings. The timeout is in seconds.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        with suppress(HTTPError):  # any status is an answer
            urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=timeout).close()  # noqa: S310 - the user's URL
    except OSError:
        return False
    return True
