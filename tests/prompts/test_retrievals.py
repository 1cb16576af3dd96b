"""Documents by run: what a retriever of retrievers returned replaces what they found, also when they have ended."""

from __future__ import annotations

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
