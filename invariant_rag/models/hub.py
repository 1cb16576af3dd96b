"""Check quickly whether the model hub is reachable; the hub client retries for more than a minute."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import Request, urlopen


def hub_reachable(timeout: float = 3.0) -> bool:
    """Return whether the model hub answers an HTTP request, with any status.

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
