"""Documents by run: what a retriever of retrievers returned replaces what they found, also when they have ended."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest

from invariant_rag import Segment
from invariant_rag.prompts import KnownDocument, RunDocuments, Turn, mark, recognize
from invariant_rag.prompts.known_documents import Retrieval, holds_several
from invariant_rag.prompts.labels import translate_labels, translate_stream

A, B, C = (
    KnownDocument.of(Segment(f"The {name} is described in this sentence.")) for name in ("mill", "ferry", "bridge")
)


def texts_of(retrievals: tuple[Retrieval, ...]) -> list[set[str]]:
    return [{each.segment.text for each in one.documents} for one in retrievals]


def test_what_a_run_retrieved_replaces_that_of_runs_below_it_that_have_ended() -> None:
    runs = RunDocuments()
    runs.start("chain", None)
    runs.start("outer", "chain", retrieves=True)
    runs.start("inner", "outer", retrieves=True)
    runs.add("inner", [A, B, C])
    runs.end("inner")
    runs.add("outer", [A, B])
    runs.end("outer")
    assert texts_of(runs.of("chain")) == [{A.segment.text, B.segment.text}]


def test_lists_of_one_run_are_known_beside_one_another() -> None:
    runs = RunDocuments()
    runs.start("chain", None)
    runs.start("step", "chain")
    runs.add("step", [A, B], [C])
    assert texts_of(runs.of("chain")) == [{A.segment.text, B.segment.text}, {C.segment.text}]
    runs.add("chain", [A, B], [C])
    assert len(runs.of("chain")) == 2
    runs.add("chain", [])
    assert len(runs.of("chain")) == 2


def test_what_this_run_retrieved_too_is_not_elsewhere() -> None:
    runs = RunDocuments()
    for name, found in (("one", [A, B]), ("two", [B, C])):
        runs.start(name, None)
        runs.add(name, found)
    assert [each.segment.text for each in runs.elsewhere("two")] == [A.segment.text]
    runs.end("two")
    assert len(runs.elsewhere("three")) == 4


def test_the_path_of_a_run_ends_at_its_root() -> None:
    runs = RunDocuments()
    runs.start("root", "unknown")
    runs.start("leaf", "root")
    assert runs.path("leaf") == ["leaf", "root"]
    assert runs.path("nobody") == ["nobody"]


def test_a_sentence_that_documents_share_is_one_document() -> None:
    shared = "A sentence that two documents share. "
    known = [KnownDocument.of(Segment(shared + more)) for more in ("See page 1.", "See page 2.")]
    assert not holds_several(f"He said: {known[0].segment.text}", known)
    assert holds_several(f"{A.segment.text} {B.segment.text}", [A, B, C])


def test_short_documents_of_another_run_are_found_if_they_are_phrases() -> None:
    texts = ("noon ferry leaves", "salt is sold", "boats", "渡船中午从奥斯特拉出发")
    short = [KnownDocument.of(Segment(each)) for each in texts]
    assert holds_several("noon ferry leaves\n\nsalt is sold\n\nWhen?", short)
    assert holds_several("noon ferry leaves\n\n渡船中午从奥斯特拉出发\n\nWhen?", short)
    assert not holds_several("boats\n\nsalt is sold\n\nWhen?", short)


def test_retrievals_that_share_a_document_do_not_miss_each_others() -> None:
    turn = Turn("user", (f"{B.segment.text}\n\n{C.segment.text}\n\nWhich?",))
    both = [Retrieval((A, B)), Retrieval((B, C))]
    assert recognize([turn], both).findings == ()
    assert [each.kind for each in recognize([turn], both[:1]).findings] == ["incomplete"]


def test_examples_of_a_template_are_no_reason_to_warn() -> None:
    example = "For example:\nSource 1:\nThe sky is red.\nSource 2:\nWater is wet."
    turn = Turn("user", (f"{example}\n\n Now: {A.segment.text}",))
    assert [each.kind for each in recognize([turn]).findings] == ["no_segments"]
    assert recognize([turn], examples=[example.replace("\n", "  \n")]).findings == ()


def test_marked_segments_get_the_metadata_that_decorations_show_wherever_they_were_retrieved() -> None:
    known = [
        KnownDocument.of(Segment(each.segment.text, metadata={"file": name}))
        for each, name in ((A, "mill.txt"), (B, "ferry.txt"))
    ]
    text = "".join(f"Source: {each.segment.metadata['file']}\n{mark(each.segment, 2)}\n\n" for each in known)
    assert recognize([Turn("user", (text,))], elsewhere=known).findings == ()
    assert recognize([Turn("user", (text,))]).findings


def test_the_number_of_a_doc_is_translated_in_one_piece_and_in_many() -> None:
    text, labels = "Doc: 2, Relevance: 9\nDoc 1 too.", {"1": "2", "2": "1"}
    assert translate_labels(text, labels) == "Doc: 1, Relevance: 9\nDoc 2 too."
    assert "".join(translate_stream(iter(text), labels)) == translate_labels(text, labels)


def test_a_model_within_a_retriever_may_be_asked_about_one_document_or_all() -> None:
    runs = RunDocuments()
    runs.start("outer", None, retrieves=True)
    runs.start("inner", "outer", retrieves=True, query="Which?")
    runs.add("inner", [A, B, C])
    runs.end("inner")
    runs.start("model", "outer")
    known = runs.of("model")
    one = Turn("user", (f"{A.segment.text}\n\nIs it?",))
    every = Turn("user", ("\n\n".join([*(each.segment.text for each in (A, B, C)), "Is it?"]),))
    assert recognize([one], known).findings == ()
    [turn] = recognize([every], known).turns
    assert len(turn.parts[0]) == 3
    assert runs.of("outer")[0].queries == ("Which?",)


def test_equal_texts_belong_to_the_nearest_retrieval() -> None:
    runs = RunDocuments()
    runs.start("root", None)
    mine = {name: KnownDocument.of(Segment(A.segment.text, metadata={"source": name})) for name in ("one", "two")}
    for name, document in mine.items():
        runs.start(name, "root")
        runs.start(f"retriever of {name}", name, retrieves=True)
        runs.add(f"retriever of {name}", [document, B if name == "one" else C])
    assert [each.segment.metadata for each in runs.of("two")[0].documents if each.segment.text == A.segment.text] == [
        {"source": "two"}
    ]
    assert all(A.segment.text not in {one.segment.text for one in each.documents} for each in runs.of("two")[1:])
    assert len(runs.of("root")) == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda listed: [f"Rank {n}: {text}" for n, text in enumerate(listed, start=1)],
        lambda listed: ["\n\n".join(listed)],
        lambda listed: [f"{listed[0]}\n{listed[1]}", listed[2]],
    ],
)
def test_order_that_is_written_into_documents_is_found(change: Any) -> None:
    for listed in permutations([each.segment.text for each in (A, B, C)]):
        runs = RunDocuments()
        runs.start("engine", None)
        runs.add("engine", [KnownDocument.of(Segment(text)) for text in listed])
        changed = change(list(listed))
        runs.add("engine", [KnownDocument.of(Segment(text)) for text in changed])
        turn = Turn("user", ("\n---\n".join((*changed, "Which?")),))
        assert "written" in {each.kind for each in recognize([turn], runs.of("engine")).findings}


def test_chunks_of_one_source_may_be_joined() -> None:
    runs = RunDocuments()
    runs.start("engine", None)
    chunks = [KnownDocument.of(Segment(each.segment.text, metadata={"source": "a.txt"})) for each in (A, B)]
    runs.add("engine", chunks)
    runs.add("engine", [KnownDocument.of(Segment("\n".join(each.segment.text for each in chunks)))])
    assert runs.of("engine")[0].doubt == ""
