"""Lists of documents that a template has printed as Python: `[Document(metadata={...}, page_content='...'), ...]`.

A prompt template formats a plain list of documents as its `repr`. That is how documents arrive that lost their class
`Segments` on the way, in a checkpoint or a slice. Contents are quoted there, so boundaries cannot be forged.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any

from invariant_rag.segments import Segment

from langchain_invariant_rag.documents import to_segment

_DOCUMENT = re.compile(r"\bDocument\(")
_TOKEN = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|[()\[\]{}]""", re.DOTALL)


def split_reprs(text: str) -> Iterator[str | Segment]:
    """Yield the texts and the printed documents of a string.

    >>> from langchain_core.documents import Document
    >>> printed = str([Document("a"), Document("b", metadata={"page": 1})])
    >>> [part if isinstance(part, str) else part.text for part in split_reprs(f"Read {printed} now.")]
    ['Read ', 'a', 'b', ' now.']
    """
    position = 0
    for match in _DOCUMENT.finditer(text):
        if match.start() < position:
            continue
        stop = _end_of_call(text, match.end())
        segment = _parse(text[match.start() : stop]) if stop else None
        if segment is None:
            continue
        before = text[position : match.start()]
        if position and before.strip() == ",":  # of one list
            before = ""
        elif before.endswith("["):
            before = before[:-1]
        if before:
            yield before
        yield segment
        position = stop
        if text[position : position + 1] == "]":
            position += 1
    if text[position:]:
        yield text[position:]


def _end_of_call(text: str, start: int) -> int:
    """Return the index after the parenthesis that closes a call; 0 if none does."""
    depth = 1
    for token in _TOKEN.finditer(text, start):
        depth += (token[0] in "([{") - (token[0] in ")]}")
        if depth == 0:
            return token.end()
    return 0


def _parse(source: str) -> Segment | None:
    """Return the segment of a printed document; None if it is not one."""
    try:
        call = ast.parse(source, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(call, ast.Call):
        return None
    fields = {keyword.arg: _value(keyword.value) for keyword in call.keywords if keyword.arg}
    if not isinstance(fields.get("page_content"), str):
        return None
    return to_segment(fields)


def _value(node: ast.expr) -> Any:
    """Return the value of a literal; the source of anything else, such as a date."""
    try:
        return ast.literal_eval(node)
    except ValueError:
        if isinstance(node, ast.Dict):
            keys = [_value(key) for key in node.keys if key is not None]
            return dict(zip(map(str, keys), map(_value, node.values), strict=False))
        return ast.unparse(node)
