"""Load documents from files (`.txt`, `.md`, `.jsonl`, `.pdf`), and split them into chunks.

What cannot be read is skipped and named, one file, page or line at a time, or is an error.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from invariant_rag.checks import check_items, check_kind, check_number, check_path, check_text, is_iterable
from invariant_rag.errors import DocumentSkipped, RetrievalError
from invariant_rag.files import check_regular, parse_json
from invariant_rag.rag.text_splitting import WORD_START, split_spans
from invariant_rag.segments import Segment
from invariant_rag.shown import counted

_MAX_HEADING_CHARS = 100


@dataclass(frozen=True)
class Document:
    """A document before chunking."""

    text: str  # all of it, without its title
    title: str | None = None
    # `source` (the path of the file), `page` of a PDF, `line` and all further fields of the record of a .jsonl file
    metadata: Mapping[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_text("text", self.text, error=RetrievalError)
        if self.title is not None:
            check_text("title", self.title, error=RetrievalError)
        check_kind("metadata", self.metadata, Mapping, error=RetrievalError)  # type: ignore[type-abstract]


Found: TypeAlias = Document | RetrievalError
"""What a reader yields: a document, or what is wrong with a part of the file."""


def warn_skipped(error: RetrievalError) -> None:
    """Issue a `DocumentSkipped` warning for what cannot be read."""
    warnings.warn(DocumentSkipped(f"skipped {error}"), stacklevel=2)


def load_documents(
    paths: str | Path | Iterable[str | Path],
    *,
    strict: bool = False,
    on_skipped: Callable[[RetrievalError], object] = warn_skipped,
) -> list[Document]:
    """Read documents from files and folders, in the order of the paths.

    Folders are searched recursively, sorted by path, without hidden files; links to folders are not followed. Files of
    other types are left out, and one report names how many there are and their suffixes; with `strict`, too. A file
    that is given or found twice is read once. A PDF gives one document per page with text. A file, a page of a PDF, or
    a line of a .jsonl file that cannot be read is skipped and reported.

    Args:
        paths: One path or several, of files (`.txt`, `.md`, `.jsonl`, `.pdf`) or folders.
        strict: Whether what cannot be read is an error.
        on_skipped: Called with the error of each file, page and line that is skipped, and once for all files of other
            types. Default: a `DocumentSkipped` warning.

    Raises:
        RetrievalError: A path does not exist, a named file has another suffix, no file was found, or nothing in the
            files can be read; with `strict`, one cannot be read. The message names the file.
    """
    if not (isinstance(paths, str | Path) or is_iterable(paths)) or isinstance(paths, bytes):
        raise RetrievalError(f"expected paths of documents, got {type(paths).__name__}")
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    roots = [check_path("path of documents", each, error=RetrievalError) for each in listed]
    candidates: list[Path | RetrievalError] = []
    others: set[str] = set()
    for root in roots:
        candidates += _search_folder(root, others) if _is_folder(root) else [root]
    files = {os.path.realpath(each): each for each in candidates if isinstance(each, Path)}  # resolve() would recurse
    failed = [each for each in candidates if isinstance(each, RetrievalError)]
    if not files and not failed:
        named = ", ".join(map(str, roots)) or "an empty list"
        raise RetrievalError(f"no document in {named}; looked for {', '.join(sorted(_READERS))}")
    documents = []
    for each in (*failed, *(part for file in files.values() for part in _read_file(file))):
        if isinstance(each, Document):
            documents.append(each)
        elif strict:
            raise each
        else:
            failed.append(each)
    if failed and not documents:
        reasons = "; ".join(map(str, failed[:5])) + (f"; and {len(failed) - 5} more" if len(failed) > 5 else "")
        raise failed[0] if len(failed) == 1 else RetrievalError(f"none of the documents can be read: {reasons}")
    for error in failed:
        on_skipped(error)
    if others:
        on_skipped(_of_other_types(others))
    return documents


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
    _check_sizes(max_chars, overlap)
    loaded = load_documents(paths, strict=strict, on_skipped=on_skipped)
    chunks = chunk_documents(loaded, max_chars=max_chars, overlap=overlap)
    if not chunks:
        listed = paths if isinstance(paths, str | Path) else ", ".join(map(str, paths))
        hint = "Give files with text in them."
        raise RetrievalError(f"expected documents with text, got none in {listed}", hint=hint)
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
    _check_sizes(max_chars, overlap)
    listed = check_items("documents", documents, Document, error=RetrievalError)
    return [segment for document in listed for segment in _chunk_document(document, max_chars, overlap)]


def _check_sizes(max_chars: int, overlap: int) -> None:
    check_number("max_chars", max_chars, error=RetrievalError)
    check_number("overlap", overlap, error=RetrievalError)
    if max_chars < 1 or not 0 <= overlap < max_chars:
        raise RetrievalError(f"expected max_chars >= 1 and 0 <= overlap < max_chars, got {max_chars} and {overlap}")


def _chunk_document(document: Document, max_chars: int, overlap: int) -> Iterator[Segment]:
    text = document.text
    spans = split_spans(text, 0, len(text.rstrip()), max_chars - overlap)
    with_text = ((start, stop) for start, stop in spans if text[start:stop].strip())
    for index, (begin, stop) in enumerate(with_text):
        word = WORD_START.search(text, max(begin - overlap, 0), begin)
        chunk = text[word.start() if word else begin : stop].lstrip()
        metadata = {**document.metadata, "chunk": index, "start": stop - len(chunk)}
        yield Segment(chunk.rstrip(), document.title, metadata)


def _of_other_types(files: Iterable[str]) -> RetrievalError:
    counts = Counter(os.path.splitext(each)[1].lower() or "no suffix" for each in files)  # noqa: PTH122
    named = ", ".join(f"{suffix} ({count})" for suffix, count in counts.most_common(8))
    more = f" and {len(counts) - 8} more" if len(counts) > 8 else ""
    skipped = f"{counted(counts.total(), 'file')} of other types: {named}{more}"
    hint = "Convert those that are to be read to one of these."
    return RetrievalError(f"{skipped}; read are {', '.join(sorted(_READERS))}", hint=hint)


def check_documents(paths: Iterable[str | Path]) -> None:
    """Check that paths exist, and have a suffix of `load_documents`, before anything is read; or RetrievalError."""
    for each in paths:
        _is_folder(check_path("path of documents", each, error=RetrievalError))


def _is_folder(path: Path) -> bool:
    """Return whether a path is a folder, and not a supported file; raise `RetrievalError` if it is neither."""
    try:
        if path.is_dir():
            return True
        there = path.exists()
    except OSError as error:  # in a folder that may not be read
        raise RetrievalError(f"{path}: {error.strerror}") from error
    if not there:
        raise RetrievalError(f"no such file or folder: {path}")
    if path.suffix.lower() not in _READERS:
        known = ", ".join(sorted(_READERS))
        raise RetrievalError(f"{path}: cannot read a file with suffix {path.suffix!r}; choose from {known}")
    return False


def _search_folder(folder: Path, others: set[str]) -> list[Path | RetrievalError]:
    """Return the supported files below a folder, sorted by path, and the folders that cannot be listed.

    Files of other types are added to `others`.
    """
    files: list[Path] = []
    failed: list[RetrievalError] = []
    folders = [str(folder)]
    while folders:  # no recursion: folders may be nested deeper than calls can be
        current = folders.pop()
        try:
            with os.scandir(current) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file():
                        if os.path.splitext(entry.name)[1].lower() in _READERS:  # noqa: PTH122
                            files.append(Path(entry.path))
                        else:
                            others.add(os.path.realpath(entry.path))
        except OSError as error:
            failed.append(RetrievalError(f"{current}: cannot be listed: {error.strerror or error}"))
    return [*failed, *sorted(files)]


def _read_file(file: Path) -> Iterator[Found]:
    """Read one file with the reader for its suffix; errors name the file."""
    try:
        check_regular(file)
        yield from _READERS[file.suffix.lower()](file)
    except OSError as error:
        yield _error(f"{file}: cannot be read: {error.strerror or error}", error)
    except UnicodeDecodeError as error:
        where = f"byte {error.start + 1:,} is 0x{error.object[error.start]:02x}"
        yield _error(f"{file}: is not UTF-8 text: {where}", error, hint="Convert the file to UTF-8.")


def _error(message: str, cause: BaseException | None = None, hint: str | None = None) -> RetrievalError:
    error = RetrievalError(message, hint=hint)
    error.__cause__ = cause
    return error


def _read_text(file: Path) -> Iterator[Document]:
    title, text = _split_heading(file.read_text("utf-8-sig"))
    yield Document(text, title, {"source": file.as_posix()})


def _split_heading(text: str) -> tuple[str | None, str]:
    """Split a text into title and body.

    The title is a Markdown heading, or a short first line before a blank one that does not end like a sentence.
    """
    first, _, rest = text.strip().partition("\n")
    body = rest.strip()
    if body and (heading := _parse_heading(first.strip())) is not None:
        return heading or None, body
    followed_by_blank = not rest.partition("\n")[0].strip()
    looks_like_heading = first[:1].isalnum() and first.strip()[-1:] not in ".,;:" and len(first) <= _MAX_HEADING_CHARS
    return (first.strip(), body) if body and followed_by_blank and looks_like_heading else (None, text.strip())


def _parse_heading(line: str) -> str | None:
    """Return the text of a Markdown heading, without closing `#`; None if the line is none. Linear in its length."""
    marked = line.lstrip("#")
    if not 1 <= len(line) - len(marked) <= 6 or not marked[:1].isspace():
        return None
    title = marked.strip()
    unclosed = title.rstrip("#")
    return unclosed.rstrip() if not unclosed or unclosed[-1].isspace() else title


def _read_jsonl(file: Path) -> Iterator[Found]:
    for number, line in enumerate(file.read_text("utf-8-sig").split("\n"), start=1):
        if line.strip():
            yield _parse_record(line, file, number)


def _parse_record(line: str, file: Path, number: int) -> Found:
    where = f"{file}, line {number}"
    try:
        record = parse_json(line)
    except ValueError as error:
        return _error(f"{where}: is not JSON: {error}", error)
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        return _error(f'{where}: expected an object with a string in "text"')
    text, title = record.pop("text"), record.pop("title", None)
    if title is not None and not isinstance(title, str):
        return _error(f'{where}: expected a string or null in "title", got {type(title).__name__}')
    return Document(text, title, {"source": file.as_posix(), "line": number, **record})


def _read_pdf(file: Path) -> Iterator[Found]:
    from pypdf import PdfReader

    def attempt(read: Callable[[], Any], complaint: str) -> Any:
        try:
            return read()
        except Exception as error:  # noqa: BLE001 - a malformed PDF makes pypdf raise whatever its code runs into
            reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            return _error(f"{file}{complaint}: {reason}", error)

    count = reader = attempt(lambda: PdfReader(file), ": cannot be read as PDF")
    if isinstance(reader, PdfReader):
        count = attempt(lambda: len(reader.pages), ": cannot be read as PDF")
    if isinstance(count, RetrievalError):
        yield count
        return
    title = attempt(lambda: reader.metadata.title if reader.metadata else None, ": its title cannot be read")
    if isinstance(title, RetrievalError):
        yield title
    heading = title if isinstance(title, str) and title else None
    empty = True
    for number in range(1, count + 1):
        page = partial(lambda each: str(reader.pages[each - 1].extract_text()).strip(), number)
        text = attempt(page, f", page {number}: cannot be read as PDF")
        if isinstance(text, RetrievalError):
            yield text
        elif text:
            yield Document(text, heading, {"source": file.as_posix(), "page": number})
        empty = empty and not text
    if empty:
        hint = "It probably holds scanned images: run OCR on it first, or leave it out."
        yield _error(f"{file}: no text on its {count} pages", hint=hint)


_READERS: dict[str, Callable[[Path], Iterator[Found]]] = {
    ".txt": _read_text,
    ".md": _read_text,
    ".jsonl": _read_jsonl,
    ".pdf": _read_pdf,
}
