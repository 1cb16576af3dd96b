"""From files to cited answers: documents, chunks, and retrieval with real FAISS, a real embedder and real BM25."""

import json
import math
import os
import pickle
import random
import re
import subprocess
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache, partial
from io import BytesIO
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pypdf import PdfWriter
from pypdf.generic import DecodedStreamObject, NameObject, read_object

from invariant_rag import RAG, InvariantModel, errors
from invariant_rag.errors import DocumentSkipped, RetrievalError, ToyModelWarning, UnknownName, UnsupportedCombination
from invariant_rag.models.embedders import load_embedder
from invariant_rag.rag.documents import Document, chunk_documents, load_documents
from invariant_rag.rag.retrieval import RETRIEVERS, BM25Retriever, FaissRetriever, index_documents
from invariant_rag.rag.text_splitting import join_chunks
from invariant_rag.segments import Segment
from invariant_rag.testing.rounding import assert_rounded_alike


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def write_pdf(path, pages, *, title=None, password=None):
    """Write a real PDF with one line of Helvetica per page."""
    writer = PdfWriter()
    fonts = b"<< /Font << /F1 << /Type /Font /Subtype /Type1 /BaseFont /Helvetica >> >> >>"
    for text in pages:
        page, content = writer.add_blank_page(300, 200), DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 10 100 Td ({text}) Tj ET".encode())
        page[NameObject("/Resources")] = read_object(BytesIO(fonts), writer)
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
    kept = ["It stands above the Aru.\n\nIt has a market.", "A line\nand the next one\n\nand a paragraph"]
    kept += ["- an item\n\n- another item", "word " * 50 + "\n\nmore", "Only one line"]
    titles = {"# A": "A", "## A ##": "A", "### C#": "C#", "# A #B": "A #B", "###### six": "six"}
    for name, text, title in (
        *(("a.txt", each, None) for each in kept),
        ("a.txt", "Orn\n\nA castle.", "Orn"),  # a short first line before a blank one
        *(("a.md", f"{line}\nA body follows.", title) for line, title in titles.items()),
        *(("a.md", f"{line}\nA body follows.", None) for line in ("####### seven", "#tag", "## ##")),
    ):
        (document,) = load_documents(write(tmp_path / name, text))
        assert document.title == title
        assert text not in kept or document.text == text


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
    deep, outer = write(tmp_path / "deep" / "end.txt", "the end").parent, tmp_path / "outer"
    for _ in range(1100):
        outer.mkdir()
        deep.rename(outer / "d")
        outer.rename(deep)
    try:
        assert [each.text for each in load_documents(deep)] == ["the end"]
    finally:
        subprocess.run(["rm", "-rf", str(deep / "d")], check=True)  # shutil.rmtree recurses


def test_a_bad_jsonl_line_is_named_with_its_file(tmp_path):
    no_text, deep = 'expected an object with a string in "text"', "is not JSON: expected JSON nested at most 100 deep"
    for line, message in (
        *(("{broken", "is not JSON"), ('{"title": "no text"}', no_text), ('{"text": 7}', no_text)),
        ('{"text": "a", "title": 7}', 'expected a string or null in "title", got int'),
        *((f'{{"text": "a", "x": {"[" * depth}{"]" * depth}}}', deep) for depth in (300, 100_000)),
        (f'{{"text": "a", "x": {"9" * 5000}}}', "is not JSON: Exceeds the limit"),
    ):
        file = write(tmp_path / "a.jsonl", f'{{"text": "good"}}\n{line}')
        with pytest.raises(RetrievalError, match=rf"a\.jsonl, line 2: {message}"):
            load_documents(file, strict=True)
        with pytest.warns(DocumentSkipped, match=rf"skipped .*a\.jsonl, line 2: {message}"):
            assert [each.text for each in load_documents(file)] == ["good"]


def test_every_file_and_page_that_cannot_be_read_is_skipped_and_named_and_the_others_are_read(tmp_path):
    locked = write_pdf(tmp_path / "locked.pdf", ["secret"], password="key").read_bytes()
    scan = write_pdf(tmp_path / "scan.pdf", ["", ""]).read_bytes()
    no_pdf, no_text = "cannot be read as PDF", "is not UTF-8 text"
    files = {
        "broken.pdf": (b"this is no PDF", no_pdf),
        "locked.pdf": (locked, no_pdf),
        "handler.pdf": (locked.replace(b"/Filter /Standard", b"/Filter /Unheard0"), no_pdf),
        "latin.txt": (b"caf\xe9", no_text),
        "utf16.md": ("text".encode("utf-16"), no_text),
        "scan.pdf": (scan, "no text on its 2 pages"),
        "line.jsonl": (b"{broken", "line 1: is not JSON"),
    }
    for name, (content, _) in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RetrievalError, match=r"none of the documents can be read: .*; and 2 more"):
        load_documents(tmp_path)
    write(tmp_path / "good.txt", "good")
    with pytest.warns(DocumentSkipped) as caught:
        documents = load_documents(tmp_path)
    assert [each.text for each in documents] == ["good"]
    messages = [str(each.message) for each in caught]
    assert len(messages) == len(files)
    for name, (_, message) in files.items():
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
    monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(RetrievalError, match=r"a\.txt: cannot be read: Permission denied"):
        load_documents(file)


def test_headings_take_linear_time(tmp_path):
    many = 200_000
    lines = ["# a" + " " * many + "b", "# a " + "#" * many + " b", "#" * many, "# " + "# " * many + "b", "!" * many]
    files = [write(tmp_path / f"{number}.md", f"{line}\nA body follows.") for number, line in enumerate(lines)]
    start = time.process_time()
    chunk_documents(load_documents(files))
    assert time.process_time() - start < 2  # a quadratic one takes minutes


def test_a_text_is_cut_between_paragraphs_sentences_words_and_then_letters_and_impossible_sizes_are_refused():
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


def test_chunks_give_back_their_source_in_any_order():
    source = "The ferry leaves at noon. The mill grinds barley."
    for chunks, joined in (
        ([(start, source[start : start + 20]) for start in (0, 10, 20, 29)], source),  # they overlap
        ([(10, source[10:]), (0, source[:10])], source),
        ([(0, source[:9]), (12, source[12:19])], f"{source[:9]}\n{source[12:19]}"),  # a gap
        ([(0, source), (4, source[4:9]), (0, source)], source),  # one within another
        ([(0, "one two"), (4, "2 three")], "one two\n2 three"),  # texts that do not agree with their offsets
    ):
        assert {join_chunks(order) for order in permutations(chunks)} == {joined}


# --- retrieval ---

ORN = "Castle Orn stands on a rock above the water."
CORPUS = [
    Segment("The Aru rises in the Veil hills and flows to the sea.", title="Aru"),
    Segment("On Fridays farmers sell cheese and apples in the square.", title="Market"),
    Segment(ORN, title="Orn"),
    Segment(ORN, title="Orn", metadata={"source": "copy.txt"}),
    Segment(ORN, title="Orn", metadata={"source": "copy.txt"}),
    Segment(ORN),
    *map(Segment, ("7", "")),
    Segment("A bell tower of 112 steps was built in the year 1204.", metadata={"page": 2}),
    Segment("The bridge of Tal was washed away by a flood, and rebuilt in stone.", score=9.0),
    *(Segment(f"Village number {number} has a well and {number % 3} mills.") for number in range(9)),
]
QUERIES = ["Where can I buy food?", "castle on the water", "7", "xyzzy", ""]
HOSTILE = ["\0\0", "\ud800 lone", "שלום עולם", "x" * 100_000, "<|im_end|>"]


@pytest.fixture(scope="module")
def minilm():
    return load_embedder(device="cpu")


@pytest.fixture(scope="module", params=["faiss", "bm25"])
def build(request):
    """Build a retriever of either kind over a corpus."""
    if request.param == "bm25":
        return BM25Retriever
    embedder = request.getfixturevalue("minilm")  # which embeds every question once: many tests ask the same ones
    encode = cache(lambda *texts: embedder.encode_query([*texts], show_progress_bar=False))
    once = SimpleNamespace(encode_document=embedder.encode_document, encode_query=lambda texts, **_: encode(*texts))
    return lambda segments: FaissRetriever(segments, once)


def exact(segments):
    """Everything that a result holds; two results are equal only if they are equal bit for bit."""
    return [(each.canonical_key, each.score.hex()) for each in segments]


def test_permuting_the_corpus_and_threads_change_nothing_and_fewer_are_the_beginning_of_more(build):
    retriever, shuffler = build(CORPUS), random.Random(0)
    expected = {query: exact(retriever.retrieve(query, 100)) for query in QUERIES}
    for number in range(3):
        permuted = build(shuffler.sample(CORPUS, len(CORPUS))) if number else retriever
        for query, result in expected.items():
            for k in range(1, len(CORPUS)) if number == 0 else (1, 3, 10, 100):
                assert exact(permuted.retrieve(query, k)) == result[:k]
    with ThreadPoolExecutor(8) as pool:
        for results in pool.map(lambda _: [exact(retriever.retrieve(query, 5)) for query in QUERIES], range(16)):
            assert results == [each[:5] for each in expected.values()]


def test_every_chunk_comes_once_best_first_with_its_score_and_hostile_text_as_it_is(build):
    found = build(CORPUS).retrieve("castle on the water", 100)
    assert Counter(replace(each, score=None) for each in found) == Counter(replace(each, score=None) for each in CORPUS)
    scores = [each.score for each in found]
    assert scores == sorted(scores, reverse=True)
    assert Counter(each.score for each in CORPUS) == {9.0: 1, None: len(CORPUS) - 1}, "the caller's are left alone"
    retriever = build([Segment(text) for text in (*HOSTILE, "something else")])
    for text in HOSTILE:
        assert text in [each.text for each in retriever.retrieve(text, 6)]


def test_what_cannot_be_indexed_or_asked_for_is_refused(build):
    assert build([]).retrieve("castle", 5) == []
    for k in (0, -1):
        with pytest.raises(RetrievalError, match=f"k: expected at least 1, got {k}"):
            build(CORPUS[:3]).retrieve("castle", k)
    with pytest.raises(RetrievalError, match="expected segments with text"):
        build([Segment(token_ids=(1, 2))])
    with pytest.raises(RetrievalError, match="expected an embedder with encode_document and encode_query, got int"):
        FaissRetriever([Segment("a")], 3)


def test_the_score_is_the_cosine_of_title_and_text_with_the_query_also_by_an_embedder_that_is_named(minilm):
    asked = "Where can I buy groceries?"  # no word of which is in the text
    (found,) = FaissRetriever(CORPUS, minilm).retrieve(asked, 1)
    assert found.title == "Market"
    vectors = minilm.encode([f"{found.title}\n{found.text}", asked]).astype(np.float64)
    cosine = vectors[0] @ vectors[1] / np.prod(np.linalg.norm(vectors, axis=1))
    # A float32 dot product of D terms is off by at most D roundings; the embeddings themselves were batched otherwise.
    assert_rounded_alike(np.float32(found.score), cosine, 2 * vectors.shape[1], magnitude=1)
    folder = minilm.model_card_data.base_model or minilm[0].auto_model.name_or_path
    retriever = FaissRetriever(CORPUS[:3], folder)
    expected = exact(retriever.retrieve("castle", 3))
    assert expected == exact(FaissRetriever(CORPUS[:3], minilm).retrieve("castle", 3))
    pickled = pickle.dumps(retriever)
    assert len(pickled) < 20_000, "a pickle holds no embedder"
    assert exact(pickle.loads(pickled).retrieve("castle", 3)) == expected


def test_a_tie_across_the_last_place_is_decided_by_content_hash():
    corpus = [Segment(f"chunk {number}") for number in range(40)]
    levels = {segment.text: number % 4 for number, segment in enumerate(corpus)}
    encoded = []

    def encode_document(texts, /, *, show_progress_bar):
        encoded.extend(texts)
        return np.array([[1, levels[text]] for text in texts], dtype=np.float32)

    embedder = SimpleNamespace(encode_document=encode_document, encode_query=lambda *_, **__: np.float32([[1, 0]]))
    retriever = FaissRetriever([*corpus, *map(replace, corpus)], embedder)
    assert sorted(encoded) == sorted(levels), "identical chunks are embedded once"
    assert len(retriever.retrieve("", 100)) == 80, "and all returned"
    retriever = FaissRetriever(corpus, embedder)
    expected = sorted(corpus, key=lambda each: (levels[each.text], each.content_hash))
    for k in range(1, len(corpus) + 1):
        assert [each.text for each in retriever.retrieve("", k)] == [each.text for each in expected[:k]]


def test_bm25_is_the_published_formula():
    corpus = ["river river sea", "river hill", "hill castle market town"]
    found = {each.text: each.score for each in BM25Retriever(map(Segment, corpus)).retrieve("river sea", 3)}
    lengths = [len(text.split()) for text in corpus]
    for text, length in zip(corpus, lengths, strict=True):
        expected = 0.0
        for word in ("river", "sea"):
            holding = sum(word in each.split() for each in corpus)
            weight = math.log(1 + (len(corpus) - holding + 0.5) / (holding + 0.5))
            count = text.split().count(word)
            expected += weight * count / (count + 1.5 * (1 - 0.75 + 0.75 * length * len(corpus) / sum(lengths)))
        assert_rounded_alike(np.float32(found[text]), expected, 8)


def test_words_are_found_without_spaces_between_them_and_in_other_forms_of_their_letters():
    for query, text in (
        ("塔の高さは？", "塔は古い石で、高さは三十メートルです。"),
        ("图书馆在哪里", "新的图书馆位于河边。"),
        ("office", "The o\ufb03ce is by the river."),
        ("\uff26\uff21\uff38 number", "Our fax is out of order."),
        ("STRASSE", "Die Straße ist lang."),
        ("7", "Pier 7."),
    ):
        found = BM25Retriever(map(Segment, ["橋は赤く塗られた。", text, "Nothing else."])).retrieve(query, 3)
        assert found[0].text == text
        assert found[0].score > found[1].score


def test_bm25_breaks_ties_by_content_hash_and_chunks_without_a_word_of_the_query_score_zero_and_come_last():
    texts = [f"chunk{number} " + "words " * (number % 3) + "other " * (2 - number % 3) for number in range(99)]
    found = BM25Retriever(map(Segment, texts)).retrieve("words", 99)
    assert len({each.score for each in found}) == 3
    assert found == sorted(found, key=lambda each: (-each.score, each.content_hash))
    found = BM25Retriever(CORPUS).retrieve("bridge MARKET", len(CORPUS))
    assert [each.score > 0 for each in found] == [True] * 2 + [False] * (len(CORPUS) - 2)
    assert {found[0].title, found[1].title} == {"Market", None}
    assert [each.score for each in BM25Retriever([Segment(""), Segment("...")]).retrieve("castle", 2)] == [0.0, 0.0]


# --- from documents to cited answers ---

QUESTION = "Who built the mill of Brenn?"


@pytest.fixture(scope="module", params=[*RETRIEVERS])
def rag(request, docs, model):
    return RAG.from_documents(docs, model, request.param, k=4)


def test_ask_and_stream_answer_as_the_model_does_on_the_retrieved_chunks_in_whatever_order_they_are_listed(rag):
    answer = rag.ask(QUESTION, max_new_tokens=8)
    segments = rag.retriever.retrieve(QUESTION, 4)
    assert (len(segments), segments[0].title) == (4, "Mill")
    expected = rag.model.generate(rag.model.chat_prompt(QUESTION, segments), max_new_tokens=8)
    assert (answer.generation, answer.text, list(answer.segments)) == (expected, expected.text, segments)
    assert sorted(answer.order) == [0, 1, 2, 3]
    assert min(answer.timings.retrieve, answer.timings.generate) > 0
    assert "".join(rag.stream(QUESTION, max_new_tokens=8)) == answer.text
    document = json.loads(json.dumps(answer.as_dict()))
    assert (document["answer"], document["order"]) == (answer.text, list(answer.order))
    assert document["usage"]["completion_tokens"] == len(answer.generation.token_ids)
    assert [each["title"] for each in document["segments"]] == [segment.title for segment in answer.segments]

    def all_of(answer):
        read = [answer.segments[index] for index in answer.order]
        cited = [each.segment for each in answer.citations]
        return answer.segments, read, cited, answer.generation.token_ids, answer.generation.logprobs

    retrieve, shuffler = rag.retriever.retrieve, random.Random(0)
    listing = SimpleNamespace(retrieve=lambda query, k: shuffler.sample(retrieve(query, k), k))
    for _ in range(4):
        assert all_of(RAG(rag.model, listing, k=4).ask(QUESTION, max_new_tokens=8)) == all_of(answer)
    answer = RAG(rag.model, BM25Retriever([])).ask("Anything?", max_new_tokens=4)
    assert answer.generation == rag.model.generate(rag.model.chat_prompt("Anything?", []), max_new_tokens=4)
    assert (answer.citations, answer.order) == ((), ())


def test_documents_and_model_can_be_named_by_path_and_a_retriever_can_be_a_function(docs, tiny_folder):
    chunks = []
    options = {"retriever": lambda segments: chunks.extend(segments) or BM25Retriever(segments), "max_chars": 40}
    options |= {"system": "Answer in one word.", "method": "pine", "ordering": "score"}
    rag = RAG.from_documents([docs / "mill.md"], tiny_folder, **options)
    assert (rag.model.method.name, rag.model.ordering.name) == ("pine", "score")
    assert len(chunks) == len(rag.ask(QUESTION, max_new_tokens=2).segments) > 1
    assert max(len(chunk.text) for chunk in chunks) <= 40
    assert "Answer in one word." in str(rag.prompt(QUESTION).prefix)


def test_chunks_that_the_model_never_read_are_not_cited(tmp_path, model, monkeypatch):
    (tmp_path / "long.txt").write_text("The mill of Brenn was built by Ada Kolm. " * 1000)
    (tmp_path / "short.txt").write_text("The mill of Brenn is old.")
    generate = InvariantModel.generate

    def answered(lm, prompt, **options):
        return replace(generate(lm, prompt, **options), text="Ada Kolm")

    monkeypatch.setattr(InvariantModel, "generate", answered)
    for overflow, key, others in (("drop_last", "dropped", "trimmed"), ("trim_segments", "trimmed", "dropped")):
        rag = RAG.from_documents(tmp_path, model.with_method(overflow=overflow), "bm25", max_chars=100_000)
        answer = rag.ask(QUESTION, max_new_tokens=1)
        (long,) = (index for index, each in enumerate(answer.segments) if "Kolm" in each.text)
        assert [each.index for each in answer.citations] == ([] if key == "dropped" else [long])
        assert (answer.as_dict()[key], answer.as_dict()[others]) == ([long], [])


def test_bm25_and_a_toy_answer_unless_told_and_what_is_wrong_is_refused_before_anything_is_read(docs, tmp_path, model):
    assert isinstance(index_documents(docs), BM25Retriever)
    with pytest.warns(ToyModelWarning, match="knows only made-up places") as caught:  # without a model, a toy answers
        RAG.from_documents(docs)
    assert [each.filename for each in caught] == [__file__]
    (tmp_path / "empty.txt").write_text(" \n")
    no_embedder = "got no-such/embedder: it is not in the local cache, and the hub"
    from_nothing = partial(RAG.from_documents, "no-such-folder")
    for call, error, said in (
        *(
            (partial(from_nothing, retriever=name), UnknownName, "'bm25', 'faiss'")
            for name in ("fais", "", None, "bm25:MODEL")
        ),
        *(
            (partial(from_nothing, **{name: "eror"}), UnknownName, "choose from")
            for name in ("method", "ordering", "overflow")
        ),
        (partial(from_nothing, metod="pine"), UnknownName, "did you mean"),
        (partial(from_nothing, system=3), errors.InvalidChoice, "system: expected a str, got 3"),
        (partial(from_nothing, model, max_chars=0), RetrievalError, "expected max_chars >= 1"),
        (partial(from_nothing, model="no-such-model"), RetrievalError, "no-such-folder"),
        (lambda: RAG.from_documents(docs, model, method="pine"), UnsupportedCombination, "method"),
        (lambda: RAG(model, BM25Retriever([]), k=0), RetrievalError, "at least 1, got 0"),
        (lambda: index_documents(docs, "faiss:no-such/embedder"), RetrievalError, no_embedder),
        (lambda: index_documents(tmp_path / "empty.txt"), RetrievalError, r"documents with text, got none in .*empty"),
    ):
        with pytest.raises(error, match=said):
            call()
