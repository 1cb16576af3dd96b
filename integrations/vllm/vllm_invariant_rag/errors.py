"""Errors of the plug-in and of the backend."""

from __future__ import annotations

from invariant_rag.errors import InvariantRAGError


class RequestRefused(InvariantRAGError):
    """A request that vLLM cannot arrange as its method says. It fails, and is never answered with causal attention."""

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
