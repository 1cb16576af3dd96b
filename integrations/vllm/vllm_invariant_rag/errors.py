"""Errors of the connector, of the prefill worker and of the backend."""

from __future__ import annotations

from invariant_rag.errors import InvariantRAGError


class RequestRefused(InvariantRAGError):
    """A request to vLLM that names keys and values which do not belong to it. It is failed, never answered causally."""

    hint = (
        "Send what PrefillWorker.prefill returned: its token ids, its cache_salt and its kv_transfer_params, together."
    )


class EntryUnusable(InvariantRAGError):
    """Keys and values that a request names are missing, damaged, or of another shape or dtype."""

    hint = "Prefill the prompt again, with the folder that vLLM's connector reads and with the dtype of vLLM's model."


class UnsupportedServer(InvariantRAGError):
    """A vLLM whose configuration the connector cannot serve; the message says why."""

    hint = "The README has a launch line that works."


class VLLMError(InvariantRAGError):
    """An error that vLLM answered; the message is vLLM's own. Or a vLLM that could not be reached."""

    hint = "The log of the vLLM server says more."


class VLLMUnreachable(VLLMError):
    """A vLLM that could not be reached, or went away before it had answered."""

    hint = "Is the server up? Its log says what happened."


class VLLMTimeout(VLLMUnreachable):
    """A vLLM that did not answer in time."""
