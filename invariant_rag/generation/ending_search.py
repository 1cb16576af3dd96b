"""Search for the shortest way to finish a JSON text that follows a schema, byte by byte, with xgrammar.

The search works on single bytes, whatever the tokenizer of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from time import thread_time
from typing import Any

import numpy as np
import torch

from invariant_rag.errors import ExtraRequired, InvalidSchema

LONGEST = 16_384
"""Bytes of an ending at which to give up: a schema may describe no finite text."""
MOST_WORK = 1_500_000
"""What all searches for the endings of one text may cost together: about as many microseconds."""

MOST_SECONDS = 2.0
"""Of a processor, for all that one text asks of its grammar; and some for each of its tokens."""
TOKEN_SECONDS = 0.02
CACHE_BYTES = 1 << 28
"""Of grammars that a compiler keeps: schemas from outside are without number."""

_QUOTE = ord('"')
_ASCII = sorted(range(32, 127), key=lambda byte: (byte != _QUOTE, not chr(byte).isalnum(), byte in b"[{\\", byte))
_SEARCHES = (
    (list(b'"0a'), 900),
    ([byte for byte in _ASCII if not chr(byte).isalnum() or byte in b"01aA"], 2_000),
    (_ASCII, 5_000),
    (list(b'"0a'), 15_000),
    ([*_ASCII, *range(127, 256)], 20_000),
)
"""Bytes in which to search for the end of a value, and how many states of the grammar to visit, one after the other.

Few bytes will do for most values, above all long ones; some patterns need one byte in particular.
"""

# Bytes that xgrammar lets into strings though they are no JSON in UTF-8: control characters, overlong forms, halves of
# surrogate pairs; and \u escapes, which may be such halves too (any character can be written as itself).
BROKEN = re.compile(
    rb"[\x00-\x1f]|\xe0[\x80-\x9f]|\xed[\xa0-\xbf]|\xf0[\x80-\x8f]|\xf4[\x90-\xbf]|(?<!\\)(?:\\\\)*\\u", re.DOTALL
)
PENDINGS = (b"", b"\xe0", b"\xed", b"\xf0", b"\xf4", b"\\")
"""Ends of a text that make a difference to what may follow."""

_ORIGIN = re.compile(r"\[[\d:]+\] \S+?:\d+: (?:Check failed: (?=\())?")


class Budget:
    """What following one schema may cost: steps of searches, and seconds of a processor.

    Steps are counted, so that equal texts find equal endings on any machine. Seconds are a share that no sensible
    schema uses up: with many readings, as of `(a*){20}b`, each further character takes longer.

    Attributes:
        left: Steps that are left, about as many as microseconds; below 0, nothing is searched for any more.
        seconds: Seconds that are left.
    """

    def __init__(self, left: int = MOST_WORK) -> None:
        self.left, self.seconds = left, MOST_SECONDS
        self._end = float("inf")

    def spend(self, states: int = 0) -> None:
        """Count a step of a search.

        Args:
            states: Characters of the states that the matcher is in.
        """
        self.left -= 30 + states // 64

    @property
    def is_spent(self) -> bool:
        """Whether nothing may be searched for any more."""
        return self.left < 0 or thread_time() > self._end

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Count the seconds that this thread works in the block.

        Raises:
            InvalidSchema: None are left, where a block ends.
        """
        start = thread_time()
        self._end = start + self.seconds
        yield
        self.seconds -= thread_time() - start
        if self.seconds < 0:
            raise InvalidSchema(
                f"expected a schema whose answers are followed in {MOST_SECONDS:g} seconds, got one that takes longer",
                hint="Leave away nested repetitions in patterns.",
            )


def byte_matcher(schema: str) -> Any:
    """Return a matcher of xgrammar that follows bytes.

    Args:
        schema: A JSON schema.

    Raises:
        ExtraRequired: xgrammar is not installed.
        InvalidSchema: xgrammar does not take the schema.
    """
    return new_matcher(_byte_compiler(), schema)


@cache
def _byte_compiler() -> Any:
    xgrammar = import_xgrammar()
    words = [bytes([byte]) for byte in range(256)]
    return xgrammar.GrammarCompiler(
        xgrammar.TokenizerInfo([*words, b"<end>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256]),
        cache_limit_bytes=CACHE_BYTES,
    )


def new_matcher(compiler: Any, schema: str) -> Any:
    """Return a matcher of a schema over a compiler's vocabulary. It terminates with the text, without a stop token.

    Several threads may compile at the same time; others run meanwhile, also those of Python.

    Raises:
        InvalidSchema: xgrammar does not take the schema.
    """
    try:
        grammar = compiler.compile_json_schema(schema, any_whitespace=False)
    except RuntimeError as error:
        raise InvalidSchema(f"xgrammar does not take this schema: {_said(error)}") from error
    return import_xgrammar().GrammarMatcher(grammar, terminate_without_stop_token=True)


def _said(error: Exception) -> str:
    """Return what an error of xgrammar says, without time and place in its source, and without a colon at the end."""
    return _ORIGIN.sub("", str(error)).strip().rstrip(":")


def import_xgrammar() -> Any:
    """Return the package.

    Raises:
        ExtraRequired: It is not installed.
    """
    try:
        import xgrammar
    except ImportError as error:
        raise ExtraRequired("xgrammar", "structured") from error
    return xgrammar


def shortest_ending(matcher: Any, text: bytes, budget: Budget | None = None) -> bytes | None:
    """Return bytes that finish a text: value by value, each ended as soon as possible.

    Args:
        matcher: Matcher over bytes, which stays as it is.
        text: What was written so far.
        budget: What the search may cost; it is spent. None: as much as for a whole text.

    Returns:
        The bytes; None if there are none, or if they were not found within the budget.
    """
    budget = Budget() if budget is None else budget
    matcher, ending = matcher.fork(), b""
    while not matcher.is_terminated():
        budget.spend()
        forced = _forced_byte(matcher)
        searches = (_end_of_value(matcher, text + ending, known, most, budget) for known, most in _SEARCHES)
        piece = forced or next((found for found in searches if found is not None), None)
        if piece is None or len(ending) > LONGEST or budget.is_spent or not matcher.accept_string(piece):
            return None
        ending += piece
    return ending


def _end_of_value(matcher: Any, text: bytes, alphabet: list[int], most_states: int, budget: Budget) -> bytes | None:
    """Search, breadth first, for the shortest bytes that end the string, number or container that is being written.

    One matcher walks back and forth: a copy of it would copy all that it has followed.
    """
    began_in_string, start = _in_string(text), pending(text)
    if not began_in_string and (closing := _closing(_byte_mask(matcher))):
        return closing
    walk = _Walk(matcher, budget)
    frontier = [(b"", began_in_string)]
    seen: set[str] = set()
    visited = 0
    while frontier and visited < most_states and not budget.is_spent:
        reached = []
        for path, in_string in frontier:
            if budget.is_spent:
                break
            walk.to(path)
            before = pending(start + path)
            for byte in list(_next_bytes(matcher, before, alphabet)):
                visited += 1
                longer = path + bytes([byte])
                walk.to(longer)
                in_string_now = in_string != (byte == _QUOTE and before != b"\\")
                if not in_string_now and (began_in_string or matcher.is_terminated() or _closing(_byte_mask(matcher))):
                    walk.to(b"")
                    return longer
                name = _state(matcher)
                budget.spend(len(name))
                if name not in seen:
                    seen.add(name)
                    reached.append((longer, in_string_now))
        frontier = reached
    walk.to(b"")
    return None


class _Walk:
    """Leads one matcher from a path to another, by way of what they share."""

    def __init__(self, matcher: Any, budget: Budget) -> None:
        self._matcher, self._budget, self._path = matcher, budget, b""

    def to(self, path: bytes) -> None:
        """Lead the matcher to the end of a path, which it can follow."""
        pairs = enumerate(zip(self._path, path, strict=False))
        shared = next((place for place, (one, other) in pairs if one != other), min(len(self._path), len(path)))
        if back := len(self._path) - shared:
            self._matcher.rollback(back)
        for place in range(shared, len(path)):
            self._matcher.accept_string(path[place : place + 1])
        self._budget.left -= len(path) - shared
        self._path = path


def _next_bytes(matcher: Any, before: bytes, alphabet: list[int]) -> Iterator[int]:
    """Yield the bytes of an alphabet that may come next; inside a character, those that end it."""
    may_come = _next_bits(matcher)
    if not may_come[:128].any():
        alphabet = _SEARCHES[-1][0]
    for byte in alphabet:
        if may_come[byte] and not BROKEN.search(before + bytes([byte])):
            yield byte


def _next_bits(matcher: Any) -> Any:
    return np.unpackbits(_byte_mask(matcher).view(np.uint8), bitorder="little")[:256]


def _byte_mask(matcher: Any) -> Any:
    if matcher.is_terminated():
        return np.zeros(9, dtype=np.int32)
    mask = torch.empty(1, 9, dtype=torch.int32)
    matcher.fill_next_token_bitmask(mask)
    return mask[0].numpy()


def _forced_byte(matcher: Any) -> bytes | None:
    """Return the next byte if only one may come. (xgrammar's `find_jump_forward_string` hangs on an endless schema)."""
    may_come = _next_bits(matcher).nonzero()[0]
    return bytes([may_come[0]]) if len(may_come) == 1 else None


def _state(matcher: Any) -> str:
    r"""Return the parser states of a matcher, for which there is no public name.

    The bytes that may come next do not tell them apart: `\w+ing` allows the same after `00` and after `0i`.
    """
    printed = str(matcher._debug_print_internal_state())
    return printed[printed.find("[") :]  # without how many bytes it has followed


def _closing(mask: Any) -> bytes | None:
    """Return the byte that ends a value or a container, if one may come next."""
    return next((bytes([byte]) for byte in b"}]," if int(mask[byte >> 5]) >> (byte & 31) & 1), None)


def finishes(matcher: Any, ending: bytes) -> bool:
    """Return whether bytes finish the text that a matcher follows; it stays as it is."""
    if not ending or not matcher.accept_string(ending):
        return False
    finished = bool(matcher.is_terminated())
    matcher.rollback(1)
    return finished


def _in_string(text: bytes) -> bool:
    r"""Return whether a text ends inside a JSON string.

    >>> [_in_string(text) for text in (b'{"a', b'{"a"', rb'{"a\"', rb'{"a\\"')]
    [True, False, True, False]
    """
    return re.sub(rb"\\.", b"", text, flags=re.DOTALL).count(b'"') % 2 == 1


def pending(text: bytes) -> bytes:
    """Return the end of a text as far as it limits what may follow: an open escape, or the lead byte of a character."""
    backslashes = len(text) - len(text.rstrip(b"\\"))
    if backslashes:
        return b"\\" if backslashes % 2 else b""
    return text[-1:] if text[-1:] in PENDINGS else b""
