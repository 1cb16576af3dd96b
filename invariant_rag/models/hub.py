"""Whether the model hub can be reached, asked in seconds: its own client waits and retries for more than a minute."""

from __future__ import annotations

from urllib.error import HTTPError
from urllib.request import Request, urlopen


def hub_reachable(timeout: float = 3.0) -> bool:
    """Whether the model hub answers at all, with whatever status. Heeds `HF_HUB_OFFLINE`, `HF_ENDPOINT` and proxies.

    Args:
        timeout: Seconds to wait for it.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        urlopen(Request(constants.ENDPOINT, method="HEAD"), timeout=timeout).close()  # noqa: S310 - set by the user
    except HTTPError:
        return True
    except OSError:
        return False
    return True
