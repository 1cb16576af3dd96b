"""Say that an answer may depend on the order of documents: once per line of the user's code, or as an error."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import FrameType

from invariant_rag.errors import OrderWarning

FIXES: dict[str, str] = {
    "no_segments": "Pass the documents as segments, each by itself.",
    "separate": "Write the same text around each segment, or none.",
    "incomplete": "Pass all documents of a question in one call.",
    "split": "Pass documents whole: retrieve fewer, or let the model's `overflow` shorten them.",
    "named": "Leave it out, or write it from the documents' own metadata beside each of them.",
    "written": "Leave documents as they were retrieved, and write what shows their order around them in the prompt.",
    "marks": "Format the documents in the process that runs the model, and pass the text on unchanged.",
    "elsewhere": "Retrieve and answer in one run, or pass the documents as segments.",
    "routing": 'Use with_routing(plain_order="canonical").',
}
"""What to do about each kind of finding, where no framework has a better answer."""

_FRAMEWORKS = frozenset(
    "anyio asyncio concurrent contextlib contextvars functools invariant_rag langchain langchain_classic "
    "langchain_community langchain_core langchain_invariant_rag langgraph langsmith llama_index "
    "llama_index_instrumentation nest_asyncio pydantic pydantic_core queue selectors tenacity threading tqdm uvloop "
    "workflows wrapt".split()
)


@dataclass(frozen=True)
class Finding:
    """A reason why an answer may depend on the order in which documents were listed.

    Attributes:
        kind: Which of the reasons: a key of `FIXES`, or one of the caller's own fixes.
        message: What was found.
    """

    kind: str
    message: str


def report(findings: Iterable[Finding], *, fixes: Mapping[str, str] = FIXES, strict: bool = False) -> None:
    """Warn of every finding at the line of code that called a framework, or raise the first one.

    A warning is shown once per line, as Python's filters have it.

    Args:
        findings: What was found.
        fixes: What to do about each kind; that of `FIXES` for those that are missing.
        strict: Whether to raise.

    Raises:
        OrderWarning: There is a finding, and `strict` is set or Python's filters make warnings errors.
    """
    for finding in findings:
        fix = {**FIXES, **fixes}[finding.kind]
        warning = OrderWarning(f"The answer may depend on the order of the documents: {finding.message} {fix}", hint="")
        if strict:
            raise warning
        _warn_at_users_line(warning)


def _warn_at_users_line(warning: OrderWarning) -> None:
    frame = _users_frame()
    warnings.warn_explicit(
        warning,
        category=None,  # the class of the warning
        filename=frame.f_code.co_filename,
        lineno=frame.f_lineno,
        module=frame.f_globals.get("__name__", "<unknown>"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _users_frame() -> FrameType:
    """Return the innermost frame that belongs to no framework.

    A worker thread of a framework has none. The main thread then waits at the user's line, as a rule.
    """
    here = sys._getframe(2)
    main = sys._current_frames().get(threading.main_thread().ident or 0)
    return _innermost_users_frame(here) or _innermost_users_frame(main) or here


def _innermost_users_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _FRAMEWORKS:
        frame = frame.f_back
    return frame
