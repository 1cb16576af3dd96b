"""Retrieval, with real FAISS, a real sentence embedder and real BM25; and RAG: from documents to cited answers."""

import json
import math
import pickle
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from invariant_rag import RAG, InvariantModel
from invariant_rag.errors import RetrievalError, ToyModelWarning, UnknownName, UnsupportedCombination
from invariant_rag.models.embedders import load_embedder
from invariant_rag.rag.retrieval import RETRIEVERS, BM25Retriever, FaissRetriever, index_documents
from invariant_rag.segments import Segment
from invariant_rag.testing.rounding import assert_rounded_alike

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
    embedder = remembering(request.getfixturevalue("minilm"))
    return lambda segments: FaissRetriever(segments, embedder)


def remembering(embedder):
    """The real embedder, which embeds every question once: many tests ask the same ones."""

    @cache
    def encode(text):
        return embedder.encode_query([text], show_progress_bar=False)

    return SimpleNamespace(encode_document=embedder.encode_document, encode_query=lambda texts, **_: encode(*texts))


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


class Listing:
    """Finds what another retriever finds, and lists it in another order every time; None: nothing."""

    def __init__(self, inner):
        self.inner, self.random = inner, random.Random(0)

    def retrieve(self, query, k):
        found = self.inner.retrieve(query, k) if self.inner else []
        return self.random.sample(found, len(found))


@pytest.fixture(scope="module", params=[*RETRIEVERS])
def rag(request, docs, model):
    return RAG.from_documents(docs, model, request.param, k=4)


def test_ask_answers_as_the_model_does_on_the_retrieved_chunks_and_so_does_stream(rag):
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


def test_answers_ignore_the_order_in_which_the_retriever_lists_chunks_which_may_be_none(rag):
    def all_of(answer):
        read = [answer.segments[index] for index in answer.order]
        cited = [each.segment for each in answer.citations]
        return answer.segments, read, cited, answer.generation.token_ids, answer.generation.logprobs

    expected = all_of(rag.ask(QUESTION, max_new_tokens=8))
    listing = RAG(rag.model, Listing(rag.retriever), k=4)
    for _ in range(4):
        assert all_of(listing.ask(QUESTION, max_new_tokens=8)) == expected
    answer = RAG(rag.model, Listing(None)).ask("Anything?", max_new_tokens=4)
    assert answer.generation == rag.model.generate(rag.model.chat_prompt("Anything?", []), max_new_tokens=4)
    assert (answer.citations, answer.order) == ((), ())


def test_documents_and_model_can_be_named_by_path_and_a_retriever_can_be_a_function(docs, tiny_folder):
    chunks = []

    def build(segments):
        chunks.extend(segments)
        return BM25Retriever(segments)

    options = {"max_chars": 40, "system": "Answer in one word.", "method": "pine", "ordering": "score"}
    rag = RAG.from_documents([docs / "mill.md"], tiny_folder, build, **options)
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
    for wrong, error, said in (
        *(({"retriever": name}, UnknownName, "'bm25', 'faiss'") for name in ("fais", "", None, "bm25:MODEL")),
        *(({name: "eror"}, UnknownName, "choose from") for name in ("method", "ordering", "overflow")),
        ({"metod": "pine"}, UnknownName, "did you mean"),
        ({"model": "no-such-model"}, RetrievalError, "no-such-folder"),
    ):
        with pytest.raises(error, match=said):
            RAG.from_documents("no-such-folder", **wrong)
    for call, error, said in (
        (lambda: RAG.from_documents(docs, model, method="pine"), UnsupportedCombination, "method"),
        (lambda: RAG(model, Listing(None), k=0), RetrievalError, "at least 1, got 0"),
        (lambda: index_documents(docs, "faiss:no-such/embedder"), RetrievalError, no_embedder),
        (lambda: index_documents(tmp_path / "empty.txt"), RetrievalError, r"documents with text, got none in .*empty"),
    ):
        with pytest.raises(error, match=said):
            call()
