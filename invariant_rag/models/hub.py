"""The model hub: whether it can be reached, and what to do where a model is not found there."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def what_to_do(name: str, error: BaseException) -> str | None:
    """Return the next step after transformers did not find a model; None where there is none in particular.

    Args:
        name: Hub id or folder.
        error: What transformers raised, with its causes.
    """
    from huggingface_hub import errors

    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]
    if any(isinstance(each, errors.GatedRepoError) for each in causes):
        return f"Accept its terms at https://huggingface.co/{name}, then run `hf auth login`, and try again."
    if any(isinstance(each, errors.RepositoryNotFoundError) for each in causes):
        return f"The hub has no {name!r}: see https://huggingface.co/models. If it is private, run `hf auth login`."
    if Path(name).is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        return (
            f"There is no such folder, or no model in it: run `ls {name}`. It should hold config.json and the weights."
        )
    if any(isinstance(each, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled) for each in causes):
        return (
            f"The hub cannot be reached. Where it can, run `hf download {name} --local-dir FOLDER`, and give the "
            "folder. Without a name, the embedded model runs."
        )
    return None


def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the model hub answers an HTTP request, with any status; its client retries for over a minute.

    Respects `HF_HUB_OFFLINE`, `HF_ENDPOINT` and proxy settings.

    Args:
        timeout: Seconds to wait for the answer.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=timeout).close()  # noqa: S310 - the URL is the user's own setting
    except HTTPError:
        return True
    except OSError:
        return False
    return True
