"""Search for the shortest way to finish a JSON text that follows a schema, byte by byte, with xgrammar.

The search works on single bytes, whatever the tokenizer of the model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import torch

from invariant_rag.errors import ExtraRequired, InvalidSchema
from invariant_rag.locks import ForkSafeLock

LONGEST = 16_384
"""Bytes of an ending at which to give up: a schema may describe no finite text."""

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

_compiling = ForkSafeLock()


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
        xgrammar.TokenizerInfo([*words, b"<end>"], xgrammar.VocabType.RAW, vocab_size=257, stop_token_ids=[256])
    )


def new_matcher(compiler: Any, schema: str) -> Any:
    """Return a matcher of a schema over a compiler's vocabulary. It terminates with the text, without a stop token.

    Raises:
        InvalidSchema: xgrammar does not take the schema.
    """
    with _compiling:
        try:
            grammar = compiler.compile_json_schema(schema, any_whitespace=False)
        except RuntimeError as error:
            raise InvalidSchema(f"xgrammar does not take this schema: {error}") from error
    return import_xgrammar().GrammarMatcher(grammar, terminate_without_stop_token=True)


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


def shortest_ending(matcher: Any, text: bytes) -> bytes | None:
    """Return bytes that finish a text: value by value, each ended as soon as possible.

    Args:
        matcher: Matcher over bytes, which stays as it is.
        text: What was written so far.
    """
    matcher, ending = matcher.fork(), b""
    while not matcher.is_terminated():
        forced = _forced_byte(matcher)
        searches = (_end_of_value(matcher, text + ending, *limits) for limits in _SEARCHES)
        piece = forced or next((found for found in searches if found is not None), None)
        if piece is None or len(ending) > LONGEST or not matcher.accept_string(piece):
            return None
        ending += piece
    return ending


def _end_of_value(matcher: Any, text: bytes, alphabet: list[int], most_states: int) -> bytes | None:
    """Search, breadth first, for the shortest bytes that end the string, number or container that is being written."""
    began_in_string, start = _in_string(text), pending(text)
    if not began_in_string and (closing := _closing(_byte_mask(matcher))):
        return closing
    frontier = [(matcher, b"", began_in_string)]
    visited = 0
    while frontier and visited < most_states:
        reached: dict[str, tuple[Any, bytes, bool]] = {}
        for state, path, in_string in frontier:
            before = pending(start + path)
            for byte in _next_bytes(state, before, alphabet):
                visited += 1
                child, longer = state.fork(), path + bytes([byte])
                child.accept_string(longer[-1:])
                in_string_now = in_string != (byte == _QUOTE and before != b"\\")
                if not in_string_now and (began_in_string or child.is_terminated() or _closing(_byte_mask(child))):
                    return longer
                reached.setdefault(_state(child), (child, longer, in_string_now))
        frontier = list(reached.values())
    return None


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
    return str(matcher._debug_print_internal_state())


def _closing(mask: Any) -> bytes | None:
    """Return the byte that ends a value or a container, if one may come next."""
    return next((bytes([byte]) for byte in b"}]," if int(mask[byte >> 5]) >> (byte & 31) & 1), None)


def finishes(matcher: Any, ending: bytes) -> bool:
    """Return whether bytes finish the text that a matcher follows."""
    matcher = matcher.fork()
    return bool(matcher.accept_string(ending) and matcher.is_terminated())


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
