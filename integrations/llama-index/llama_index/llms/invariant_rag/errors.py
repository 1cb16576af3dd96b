"""Errors that leave `InvariantLLM`: none of a kind that LlamaIndex takes for an answer that cannot be parsed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from invariant_rag.errors import InvariantRAGError


class AnswerFailed(InvariantRAGError, RuntimeError):
    """A call failed with a `ValueError` or `TypeError`, such as one of transformers; it is the `__cause__`.

    LlamaIndex's `Refine` (which `compact` and the context chat engines use) and its sub-question engine catch
    `ValueError` and `TypeError`, and answer "Empty Response" or nothing. They do not catch this one.
    """

    hint = "The message and `__cause__` say what was wrong with the call; it has no answer."


class NoToolCall(InvariantRAGError, RuntimeError):
    """A call of a tool was expected, and the answer holds none."""

    hint = "Set tool_required=True or tool_choice: then every answer is a call. Or error_on_no_tool_call=False."


@contextmanager
def no_swallowed_errors() -> Iterator[None]:
    """Raise `AnswerFailed` from every `ValueError` and `TypeError`; other errors pass as they are.

    Raises:
        AnswerFailed: With the message of the error, and its hint if it has one.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        hint = error.hint if isinstance(error, InvariantRAGError) else None
        raise AnswerFailed(f"{type(error).__name__}: {error}", hint=hint) from error
