"""Split documents into chunks.

The splitter prefers coarse separators (blank line, sentence, line, word, character) and drops only the white space at
its cuts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from invariant_rag.checks import check_items, check_number
from invariant_rag.errors import RetrievalError
from invariant_rag.rag.readers import Document, load_documents, warn_skipped
from invariant_rag.segments import Segment

__all__ = ["Document", "chunk_documents", "load_documents"]

_SEPARATORS = tuple(re.compile(each) for each in (r"\n\s*\n", r"(?<=[.!?])\s+|(?<=[。！？])", r"\n", r"\s+"))  # noqa: RUF001
_WORD_START = re.compile(r"(?<!\S)\S")


def load_chunks(
    paths: str | Path | Iterable[str | Path],
    *,
    max_chars: int = 1000,
    overlap: int = 0,
    strict: bool = False,
    on_skipped: Callable[[RetrievalError], object] = warn_skipped,
) -> list[Segment]:
    """Load and chunk documents. Arguments and errors are those of `load_documents` and `chunk_documents`.

    Raises:
        RetrievalError: There is no text in the documents.
    """
    loaded = load_documents(paths, strict=strict, on_skipped=on_skipped)
    chunks = chunk_documents(loaded, max_chars=max_chars, overlap=overlap)
    if not chunks:
        listed = paths if isinstance(paths, str | Path) else ", ".join(map(str, paths))
        raise RetrievalError(
            f"expected documents with text, got none in {listed}", hint="Give files with text in them."
        )
    return chunks


def chunk_documents(documents: Iterable[Document], *, max_chars: int = 1000, overlap: int = 0) -> list[Segment]:
    """Split documents into chunks of at most `max_chars` characters.

    Adjacent paragraphs share a chunk if they fit; a longer paragraph is split between sentences, then lines, then
    words, then characters. Every chunk is a slice of the text: with `start` from its metadata,
    `document.text[start : start + len(chunk.text)] == chunk.text`. Between two slices there is only white space.

    Args:
        documents: The documents. A document without text gives no chunk.
        max_chars: Maximum characters per chunk, overlap included. The default (about 200 English words) stays within
            the 256 word pieces that the default embedder supports.
        overlap: Maximum characters that a chunk repeats from the one before it, starting at a word.

    Returns:
        Segments with title and metadata of their document, and `chunk` (index) and `start` (character offset).

    Raises:
        RetrievalError: `max_chars` is not positive, `overlap` is not in `0..max_chars - 1`, or one is no document.
    """
    check_number("max_chars", max_chars, error=RetrievalError)
    check_number("overlap", overlap, error=RetrievalError)
    if max_chars < 1 or not 0 <= overlap < max_chars:
        raise RetrievalError(f"expected max_chars >= 1 and 0 <= overlap < max_chars, got {max_chars} and {overlap}")
    listed = check_items("documents", documents, Document, error=RetrievalError)
    return [segment for document in listed for segment in _chunk_document(document, max_chars, overlap)]


def _chunk_document(document: Document, max_chars: int, overlap: int) -> Iterator[Segment]:
    text = document.text
    spans = _split_spans(text, 0, len(text.rstrip()), max_chars - overlap, _SEPARATORS)
    with_text = ((start, stop) for start, stop in spans if text[start:stop].strip())
    for index, (begin, stop) in enumerate(with_text):
        word = _WORD_START.search(text, max(begin - overlap, 0), begin)
        chunk = text[word.start() if word else begin : stop].lstrip()
        metadata = {**document.metadata, "chunk": index, "start": stop - len(chunk)}
        yield Segment(chunk.rstrip(), document.title, metadata)


def _split_spans(
    text: str, start: int, stop: int, size: int, separators: Sequence[re.Pattern[str]]
) -> Iterator[tuple[int, int]]:
    """Split `text[start:stop]` into spans of at most `size` characters, at the coarsest separators that suffice.

    A separator is white space (or empty) and belongs to no span; a span holds as many pieces as fit.
    """
    if stop - start <= size:
        yield start, stop
    elif not separators:
        yield from ((at, min(at + size, stop)) for at in range(start, stop, size))
    else:
        begin = end = resume = start
        for cut, after in [*(match.span() for match in separators[0].finditer(text, start, stop)), (stop, stop)]:
            if cut - begin > size:
                yield from _split_spans(text, begin, end, size, separators[1:])
                begin = resume
            end, resume = cut, after
        yield from _split_spans(text, begin, end, size, separators[1:])
