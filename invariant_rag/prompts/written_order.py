"""Whether a postprocessor wrote their order into them: `Rank 1: ...`, a rank as metadata, one joined text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from invariant_rag.prompts.known_documents import KnownDocument

_SOURCES = ("source", "file_path", "file_name", "url", "doc_id", "ref_doc_id", "document_id")
_DIGITS = re.compile(r"\d+")


def order_written(now: Sequence[KnownDocument], before: Sequence[KnownDocument]) -> str:
    """Return what of the new documents shows the order in which the old ones were listed; empty if nothing does.

    Args:
        now: The documents that something returned.
        before: Those that it was given.
    """
    if len(before) < 2:
        return ""
    texts = [each.segment.text.strip() for each in before]
    kept = set(texts)
    if any(_joins(each, before, texts) for each in now if each.segment.text.strip() not in kept):
        return "retrieved documents were joined into one, in the order in which they were listed."
    if _numbers_texts(now, texts) or _numbers_metadata(now, before):
        return "running numbers were written into retrieved documents."
    return ""


def _joins(document: KnownDocument, before: Sequence[KnownDocument], texts: Sequence[str]) -> bool:
    """Return whether a document holds several others in the order listed that are not known to be of one source."""
    whole = document.segment.text
    places = [(whole.find(text), each) for text, each in zip(texts, before, strict=True) if text and text in whole]
    if len(places) < 2 or any(one >= other for (one, _), (other, _) in pairwise(places)):
        return False
    sources: list[list[Any]] = [[each.source for _, each in places]]
    sources += [[each.segment.metadata.get(key) for _, each in places] for key in _SOURCES]
    return not any(values[0] and all(value == values[0] for value in values) for values in sources)


def _numbers_texts(now: Sequence[KnownDocument], texts: Sequence[str]) -> bool:
    around = []
    for each in now:
        whole = each.segment.text
        inner = next((text for text in texts if text and text in whole and text != whole.strip()), None)
        if inner is None:
            return False
        around.append(whole.replace(inner, "\0", 1))
    numbers = [_DIGITS.findall(text.partition("\0")[0] + text.partition("\0")[2]) for text in around]
    same = len({_DIGITS.sub("", text) for text in around}) == 1
    return same and any(_counts(column) for column in zip(*numbers, strict=False))


def _numbers_metadata(now: Sequence[KnownDocument], before: Sequence[KnownDocument]) -> bool:
    old = set().union(*(each.segment.metadata for each in before))
    keys = set(now[0].segment.metadata) - old if now else set()
    return any(_counts([str(each.segment.metadata.get(key, "")) for each in now]) for key in keys)


def _counts(labels: Sequence[str]) -> bool:
    """Return whether labels are running numbers, from 0 or 1."""
    numbers = [int(label) for label in labels if label.isdecimal() and len(label) < 10]
    return (
        len(numbers) == len(labels) > 1
        and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        and numbers[0] < 2
    )
