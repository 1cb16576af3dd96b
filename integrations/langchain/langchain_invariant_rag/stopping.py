"""Stop sequences as LangChain means them: the text ends before the first one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop sequence.

    >>> before_stop("one. two. three.", [". t"])
    'one'
    """
    found = [at for at in (text.find(each) for each in stop) if at >= 0]
    return text[: min(found, default=None)]


def stream_before_stop(pieces: Iterable[str], stop: Sequence[str]) -> Iterator[str]:
    """Yield pieces of text up to the first stop sequence. Joined, they are `before_stop` of the joined pieces.

    Text that may be the beginning of a stop sequence is held back until it is known to be none.
    """
    held = ""
    ended = False
    for piece in pieces:
        if ended:  # read on: the model stops by itself, and then says how much it read and wrote
            continue
        held += piece
        kept = before_stop(held, stop)
        ended = len(kept) < len(held)
        safe = len(kept) if ended else len(held) - _begun(held, stop)
        if safe:
            yield held[:safe]
        held = held[safe:]
    if held and not ended:
        yield held


def _begun(text: str, stop: Sequence[str]) -> int:
    """Length of the longest end of the text with which a stop sequence begins."""
    longest = max(map(len, stop), default=1) - 1
    return next((n for n in range(min(longest, len(text)), 0, -1) if any(s.startswith(text[-n:]) for s in stop)), 0)
