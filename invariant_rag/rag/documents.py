"""Load documents from files (`.txt`, `.md`, `.jsonl`, `.pdf`) and split them into chunks.

The splitter prefers coarse separators (blank line, sentence, line, word, character) and drops only the white space at
its cuts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from invariant_rag.errors import RetrievalError
from invariant_rag.segments import Segment

_SEPARATORS = tuple(re.compile(each) for each in (r"\n\s*\n", r"(?<=[.!?])\s+|(?<=[。！？])", r"\n", r"\s+"))  # noqa: RUF001
_WORD_START = re.compile(r"(?<!\S)\S")
_MARKDOWN_HEADING = re.compile(r"#{1,6}\s+(.*?)\s*#*")
_MAX_HEADING_CHARS = 100


@dataclass(frozen=True)
class Document:
    """A document before chunking.

    Attributes:
        text: The whole text, without its title.
        title: The title, or None.
        metadata: `source` (the path of the file), `page` for a PDF, `line` and all further fields of the record for
            a .jsonl file.
    """

    text: str
    title: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)


def load_documents(paths: str | Path | Iterable[str | Path]) -> list[Document]:
    """Read documents from files and folders.

    Folders are searched recursively, sorted by path, without hidden files and other suffixes. A file that is given or
    found twice is read once. A PDF gives one document per page with text.

    Args:
        paths: One path or several, of files (`.txt`, `.md`, `.jsonl`, `.pdf`) or folders.

    Returns:
        The documents, in the order of the paths.

    Raises:
        RetrievalError: A path does not exist, a named file has another suffix, a file cannot be read (the message
            names it), or no file was found.
    """
    roots = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
    files = {file.resolve(): file for root in roots for file in _list_files(root)}
    if not files:
        listed = ", ".join(map(str, roots)) or "an empty list"
        raise RetrievalError(f"no document in {listed}; looked for {_supported_suffixes()}")
    return [document for file in files.values() for document in _read_file(file)]


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
        RetrievalError: `max_chars` is not positive, or `overlap` is not in `0..max_chars - 1`.
    """
    if max_chars < 1 or not 0 <= overlap < max_chars:
        raise RetrievalError(f"expected max_chars >= 1 and 0 <= overlap < max_chars, got {max_chars} and {overlap}")
    return [segment for document in documents for segment in _chunk_document(document, max_chars, overlap)]


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


def _list_files(path: Path) -> list[Path]:
    """Return the supported files in a folder, or the file itself."""
    if path.is_dir():
        return [file for file in sorted(path.rglob("*")) if _is_supported(file.relative_to(path)) and file.is_file()]
    if not path.exists():
        raise RetrievalError(f"no such file or folder: {path}")
    if path.suffix.lower() not in _READERS:
        raise RetrievalError(
            f"{path}: cannot read a file with suffix {path.suffix!r}; choose from {_supported_suffixes()}"
        )
    return [path]


def _is_supported(relative: Path) -> bool:
    return relative.suffix.lower() in _READERS and not any(part.startswith(".") for part in relative.parts)


def _supported_suffixes() -> str:
    return ", ".join(sorted(_READERS))


def _read_file(file: Path) -> Iterator[Document]:
    """Read one file with the reader for its suffix; errors name the file."""
    try:
        yield from _READERS[file.suffix.lower()](file)
    except OSError as error:
        raise RetrievalError(f"{file}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RetrievalError(f"{file}: is not UTF-8 text: {error}", hint="Convert the file to UTF-8.") from error


def _read_text(file: Path) -> Iterator[Document]:
    title, text = _split_heading(file.read_text(encoding="utf-8-sig"))
    yield Document(text, title, {"source": file.as_posix()})


def _split_heading(text: str) -> tuple[str | None, str]:
    """Split a text into title and body.

    The title is a Markdown heading, or a short first line before a blank one that does not end like a sentence.
    """
    first, _, rest = text.strip().partition("\n")
    body = rest.strip()
    if body and (heading := _MARKDOWN_HEADING.fullmatch(first.strip())):
        return heading[1] or None, body
    followed_by_blank = not rest.partition("\n")[0].strip()
    looks_like_heading = first[:1].isalnum() and first.strip()[-1:] not in ".,;:" and len(first) <= _MAX_HEADING_CHARS
    return (first.strip(), body) if body and followed_by_blank and looks_like_heading else (None, text.strip())


def _read_jsonl(file: Path) -> Iterator[Document]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_record(line, file, number)


def _parse_record(line: str, file: Path, number: int) -> Document:
    where = f"{file}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise RetrievalError(f"{where}: is not JSON: {error}") from error
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise RetrievalError(f'{where}: expected an object with a string in "text"')
    text, title = record.pop("text"), record.pop("title", None)
    if title is not None and not isinstance(title, str):
        raise RetrievalError(f'{where}: expected a string or null in "title", got {type(title).__name__}')
    return Document(text, title, {"source": file.as_posix(), "line": number, **record})


def _read_pdf(file: Path) -> Iterator[Document]:
    from pypdf import PdfReader
    from pypdf.errors import DependencyError, PyPdfError

    try:
        reader = PdfReader(file)
        title = reader.metadata.title if reader.metadata else None
        pages = [page.extract_text().strip() for page in reader.pages]
    except (PyPdfError, DependencyError) as error:
        raise RetrievalError(f"{file}: cannot be read as PDF: {error}") from error
    if not any(pages):
        raise RetrievalError(
            f"{file}: no text on its {len(pages)} pages",
            hint="It probably holds scanned images: run OCR on it first, or leave it out.",
        )
    for number, text in enumerate(pages, start=1):
        if text:
            yield Document(text, title or None, {"source": file.as_posix(), "page": number})


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".pdf": _read_pdf,
}
