"""Errors of the plug-in and of the backend."""

from __future__ import annotations

from invariant_rag.errors import InvariantRAGError


class RequestRefused(InvariantRAGError):
    """A request whose documents vLLM cannot read as it asks. It is failed, never answered causally."""

    hint = "Send requests by VLLMBackend, or documents to /v1/chat/completions."


class UnsupportedServer(InvariantRAGError):
    """A vLLM whose configuration the plug-in cannot serve; the message says why."""

    hint = "The README has a launch line that works."


class VLLMError(InvariantRAGError):
    """An error that vLLM answered; the message is vLLM's own. Or a vLLM that could not be reached."""

    hint = "The log of the vLLM server says more."


class VLLMUnreachable(VLLMError):
    """A vLLM that could not be reached, or went away before it had answered."""

    hint = "Is the server up? Its log says what happened."


class VLLMTimeout(VLLMUnreachable):
    """A vLLM that did not answer in time."""
