"""Documents from files, chunks from documents, and chunks joined again."""

import contextlib
import json
import os
import re
import subprocess
import time
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from invariant_rag.errors import DocumentSkipped, RetrievalError
from invariant_rag.rag.documents import Document, chunk_documents, load_documents
from invariant_rag.rag.text_splitting import join_chunks


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_pdf(path, pages, *, title=None, password=None):
    """Write a real PDF with one line of Helvetica per page."""
    writer = PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    font_object = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    fonts = DictionaryObject({NameObject("/F1"): font_object})
    for text in pages:
        page, content = writer.add_blank_page(300, 200), DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        page[NameObject("/Contents")] = content
    if title:
        writer.add_metadata({"/Title": title})
    if password:
        writer.encrypt(password, algorithm="RC4-128")
    writer.write(path)
    return path


def test_a_file_gives_documents_with_title_source_and_place(tmp_path):
    """One for each line of JSON with its other fields, and for each page with text; without a byte order mark."""
    castle = write(tmp_path / "orn.txt", "\ufeffCastle Orn\n\nIt stands above the Aru.\n\nIt has a market.\n")
    records = [{"text": "one", "title": "First", "year": 12}, {"text": "two", "title": None}]
    lines = write(tmp_path / "a.jsonl", "\n\n".join(map(json.dumps, records)) + "\n")
    pages = write_pdf(tmp_path / "atlas.pdf", ["The Aru rises here.", "", "Orn is a castle."], title="Atlas")
    for file, expected in (
        (castle, [("It stands above the Aru.\n\nIt has a market.", "Castle Orn", {})]),
        (lines, [("one", "First", {"line": 1, "year": 12}), ("two", None, {"line": 3})]),
        (pages, [("The Aru rises here.", "Atlas", {"page": 1}), ("Orn is a castle.", "Atlas", {"page": 3})]),
    ):
        source = {"source": file.as_posix()}
        assert load_documents(file) == [Document(text, title, {**source, **place}) for text, title, place in expected]


def test_a_first_line_that_is_a_heading_is_the_title_and_another_stays_in_the_text(tmp_path):
    for text in (
        "It stands above the Aru.\n\nIt has a market.",  # a sentence
        "A line\nand the next one\n\nand a paragraph",
        "- an item\n\n- another item",
        "word " * 50 + "\n\nmore",
        "Only one line",
    ):
        (document,) = load_documents(write(tmp_path / "a.txt", text))
        assert (document.text, document.title) == (text, None)
    for name, text, title in (
        ("a.txt", "Orn\n\nA castle.", "Orn"),  # a short first line before a blank one
        *(("a.md", "# A", "A"), ("a.md", "## A ##", "A"), ("a.md", "### C#", "C#"), ("a.md", "# A #B", "A #B")),
        *(("a.md", "###### six", "six"), *(("a.md", line, None) for line in ("####### seven", "#tag", "## ##"))),
    ):
        (document,) = load_documents(write(tmp_path / name, f"{text}\nA body follows."))
        assert document.title == title


def test_a_folder_is_read_in_order_without_hidden_and_other_files_to_its_end_1100_folders_down(tmp_path):
    others = ("picture.png", "a/PAGE.PNG", "LICENSE")
    for name in ("b.txt", "a/z.md", "a/c.TXT", *others, ".hidden.txt", ".git/inside.txt"):
        write(tmp_path / name, name)
    skipped: list[RetrievalError] = []
    twice = [str(tmp_path), tmp_path / "a", tmp_path / ".." / tmp_path.name / "b.txt"]
    for strict in (False, True):
        loaded = load_documents(twice, strict=strict, on_skipped=skipped.append)
        assert [document.text for document in loaded] == ["a/c.TXT", "a/z.md", "b.txt"]
    expected = "3 files of other types: .png (2), no suffix (1); read are .jsonl, .md, .pdf, .txt"
    assert [*map(str, skipped)] == [expected] * 2
    (deep := tmp_path / "deep").mkdir()
    with contextlib.chdir(deep):
        for _ in range(1100):
            Path("d").mkdir()
            os.chdir("d")
        Path("end.txt").write_text("the end")
    try:
        assert [each.text for each in load_documents(deep)] == ["the end"]
    finally:
        subprocess.run(["rm", "-rf", str(deep / "d")], check=True)  # shutil.rmtree recurses


BAD_LINES = {
    "{broken": "is not JSON",
    '{"title": "no text"}': 'expected an object with a string in "text"',
    '{"text": 7}': 'expected an object with a string in "text"',
    '{"text": "a", "title": 7}': 'expected a string or null in "title", got int',
    '{"text": "a", "x": ' + "[" * 100_000 + "]" * 100_000 + "}": "is not JSON: expected JSON nested at most 100 deep",
    '{"text": "a", "x": ' + "[" * 300 + "]" * 300 + "}": "is not JSON: expected JSON nested at most 100 deep",
    '{"text": "a", "x": ' + "9" * 5000 + "}": "is not JSON: Exceeds the limit",
}


def test_a_bad_jsonl_line_is_named_with_its_file(tmp_path):
    for line, message in BAD_LINES.items():
        file = write(tmp_path / "a.jsonl", '{"text": "good"}\n' + line)
        with pytest.raises(RetrievalError, match=rf"a\.jsonl, line 2: {message}"):
            load_documents(file, strict=True)
        with pytest.warns(DocumentSkipped, match=rf"skipped .*a\.jsonl, line 2: {message}"):
            assert [each.text for each in load_documents(file)] == ["good"]


def test_every_file_and_page_that_cannot_be_read_is_skipped_and_named_and_the_others_are_read(tmp_path):
    locked = write_pdf(tmp_path / "locked.pdf", ["secret"], password="key").read_bytes()
    write_pdf(tmp_path / "scan.pdf", ["", ""])
    for name, content in (
        ("broken.pdf", b"this is no PDF"),
        ("handler.pdf", locked.replace(b"/Filter /Standard", b"/Filter /Unheard0")),
        ("latin.txt", b"caf\xe9"),
        ("utf16.md", "text".encode("utf-16")),
        ("line.jsonl", b"{broken"),
    ):
        (tmp_path / name).write_bytes(content)
    expected = {
        **dict.fromkeys(("broken.pdf", "locked.pdf", "handler.pdf"), "cannot be read as PDF"),
        **dict.fromkeys(("latin.txt", "utf16.md"), "is not UTF-8 text"),
        "scan.pdf": "no text on its 2 pages",
        "line.jsonl": "line 1: is not JSON",
    }
    with pytest.raises(RetrievalError, match=r"none of the documents can be read: .*; and 2 more"):
        load_documents(tmp_path)
    write(tmp_path / "good.txt", "good")
    with pytest.warns(DocumentSkipped) as caught:
        documents = load_documents(tmp_path)
    assert [each.text for each in documents] == ["good"]
    messages = [str(each.message) for each in caught]
    assert len(messages) == len(expected)
    for name, message in expected.items():
        assert any(name in each and message in each for each in messages), (name, messages)
        with pytest.raises(RetrievalError, match=re.escape(name)) as refused:
            load_documents([tmp_path / "good.txt", tmp_path / name], strict=True)
        assert message in str(refused.value)
        assert ("OCR" in refused.value.hint) == (name == "scan.pdf")
    file = write_pdf(tmp_path / "a.pdf", ["The first page.", "The second page."])
    file.write_bytes(file.read_bytes().replace(b"(The second", b"<7ge second"))
    with pytest.warns(DocumentSkipped, match=r"a\.pdf, page 2: cannot be read as PDF"):
        (document,) = load_documents(file)
    assert document.text == "The first page."


def test_what_is_no_path_and_paths_without_documents_are_refused_by_name(tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    file = write(tmp_path / "here" / "a.txt", "text")
    os.mkfifo(file.parent / "pipe.txt")
    no_path = r"expected (paths of documents|a path, got)|is no path of a file"
    no_paths = (None, 3, b"a.txt", "", "\0", "a" * 9000, "x/" * 3000, [None], ["a", 3], [""])
    suffixes = r"\.jsonl, \.md, \.pdf, \.txt"
    for paths, message in (
        *((each, no_path) for each in no_paths),
        (tmp_path / "gone.txt", r"no such file or folder: .*gone\.txt"),
        (write(tmp_path / "a.docx", "text"), rf"a\.docx: .*'\.docx'; choose from {suffixes}"),
        ([], rf"no document in .*; looked for {suffixes}"),
        (tmp_path / "empty", rf"no document in .*; looked for {suffixes}"),
        (file.parent / "pipe.txt", r"pipe\.txt: .*expected a file, got a named pipe"),
    ):
        with pytest.raises(RetrievalError, match=message):
            load_documents(paths)
    assert len(load_documents(file.parent)) == 1

    def refuse(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(RetrievalError, match=r"a\.txt: cannot be read: Permission denied"):
        load_documents(file)


def test_headings_take_linear_time(tmp_path):
    many = 200_000
    lines = ["# a" + " " * many + "b", "# a " + "#" * many + " b", "#" * many, "# " + "# " * many + "b", "!" * many]
    files = [write(tmp_path / f"{number}.md", f"{line}\nA body follows.") for number, line in enumerate(lines)]
    start = time.process_time()
    chunk_documents(load_documents(files))
    assert time.process_time() - start < 2  # a quadratic one takes minutes


def test_a_text_is_cut_between_paragraphs_sentences_words_and_then_letters():
    sentences = ["A first sentence.", "A second one!", "山は高い。川は長い。", "Wordwithoutanyspa", "ces."]
    rows = ["river | length", "Aru | 120 km", "Veil | 80 km"]
    overlapping = ["alpha beta", "beta gamma", "gamma delta", "delta epsilon"]  # by whole words
    for text, size, overlap, expected in (
        ("One.\n\nTwo.\n\nThree is longer.", 16, 0, ["One.\n\nTwo.", "Three is longer."]),
        ("A first sentence. A second one! 山は高い。川は長い。 Wordwithoutanyspaces.", 17, 0, sentences),
        ("\n".join(rows), 15, 0, rows),
        ("alpha beta gamma delta epsilon", 18, 8, overlapping),
    ):
        found = chunk_documents([Document(text)], max_chars=size, overlap=overlap)
        assert [each.text for each in found] == expected


def test_impossible_sizes_are_refused():
    for options, message in (
        *(({"max_chars": m, "overlap": o}, "expected max_chars >= 1") for m, o in ((0, 0), (10, 10), (10, -1))),
        *(({"max_chars": each}, "max_chars: expected a whole number") for each in ("10", None, 10.5)),
        ({"overlap": float("nan")}, "overlap: expected a whole number"),
    ):
        with pytest.raises(RetrievalError, match=message):
            chunk_documents([Document("text")], **options)


texts = (
    st.sampled_from(["x" * 9000, "\n" * 9000 + "x", "a. " * 4000])
    | st.text(st.sampled_from("ab.!。 \n\t\r\0"), max_size=200)
    | st.text(st.characters(), max_size=200)
)


@given(texts, st.integers(1, 60), st.data())
def test_chunking_loses_nothing_but_white_space_and_a_chunk_carries_title_source_page_and_place(text, size, data):
    overlap = data.draw(st.integers(0, size - 1))
    source = {"source": "n.pdf", "page": 3}
    stop = 0
    for index, chunk in enumerate(chunk_documents([Document(text, "T", source)], max_chars=size, overlap=overlap)):
        start = chunk.metadata["start"]
        assert (chunk.title, chunk.metadata) == ("T", {**source, "chunk": index, "start": start})
        assert 1 <= len(chunk.text) <= size
        assert text[start : start + len(chunk.text)] == chunk.text
        assert start >= stop - overlap
        assert not text[stop:start].strip()
        stop = start + len(chunk.text)
    assert not text[stop:].strip()


SOURCE = "The ferry leaves at noon. The mill grinds barley."


def test_chunks_give_back_their_source_in_any_order():
    for chunks, joined in (
        ([(start, SOURCE[start : start + 20]) for start in (0, 10, 20, 29)], SOURCE),  # they overlap
        ([(10, SOURCE[10:]), (0, SOURCE[:10])], SOURCE),
        ([(0, SOURCE[:9]), (12, SOURCE[12:19])], f"{SOURCE[:9]}\n{SOURCE[12:19]}"),  # a gap
        ([(0, SOURCE), (4, SOURCE[4:9]), (0, SOURCE)], SOURCE),  # one within another
        ([(0, "one two"), (4, "2 three")], "one two\n2 three"),  # texts that do not agree with their offsets
    ):
        assert {join_chunks(order) for order in permutations(chunks)} == {joined}
