"""Claims about `ask`, through typer's runner with real retrievers and a tiny model, and about what it prints."""

import json
import re

import pytest

from invariant_rag.audit.order_check import OrderCheck
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS, EXAMPLE_QUESTION, _print_check, _print_citations
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import ORDERINGS
from invariant_rag.rag.citations import Citation
from invariant_rag.segments import Segment
from tests.audit.known import Pretended
from tests.cli.conftest import refused, run

QUESTION = "Who built the mill of Brenn?"
KEYS = "question model answer citations segments order dropped trimmed finish_reason usage timings order_check".split()


@pytest.fixture
def ask(docs, tiny_folder):
    """Ask the tiny model over the documents, with BM25 and short answers."""

    def asked(*options, docs=docs):
        fixed = ("--docs", docs, "--model", tiny_folder, "--retriever", "bm25", "--k", 4, "--max-new-tokens", 8)
        result = run("ask", QUESTION, *fixed, *options)
        assert result.exit_code in (0, 1), result.output
        return result

    return asked


def test_ask_prints_an_answer_and_what_it_was_made_of_or_one_clean_object_of_json(ask):
    result = ask()
    for told in ("chunks in the prompt, farthest first", "method rotor, ordering lexical, backend sdpa"):
        assert told in result.stdout
    for step in ("Indexing documents", "Loading model", "Generating"):
        assert (step in result.stderr, step in result.stdout) == (True, False)
    document = json.loads(ask("--json", "--method", "pine", "--ordering", "score").stdout)
    assert list(document) == KEYS
    assert document["question"] == QUESTION
    assert {"method": "pine", "ordering": "score"}.items() <= document["model"].items()
    assert document["segments"][0]["title"] == "Mill"
    assert sorted(document["order"]) == [0, 1, 2, 3]
    assert set(document["timings"]) == {"load", "index", "retrieve", "generate"}
    assert document["order_check"] is None
    described = run("ask", "--help").stdout
    assert all(key in described for key in document)


def test_the_example_is_answered_and_the_same_in_every_order():
    result = run("ask", "--check-order", "3", "--json")
    assert (result.exit_code, "toy" in result.stderr) == (0, False), result.output
    document = json.loads(result.stdout)
    assert (document["question"], document["answer"]) == (EXAMPLE_QUESTION, "orange and black")
    assert len(document["segments"]) == 10 == len([*EXAMPLE_DOCUMENTS.iterdir()])
    assert document["order_check"]["identical"] is True


def test_check_order_compares_with_the_plain_model(ask):
    check = json.loads(ask("--check-order", 5, "--json").stdout)["order_check"]
    assert (check["identical"], check["orders"]) == (True, 5)
    assert [each["count"] for each in check["answers"]] == [6]
    assert check["plain_distinct"] >= len(check["plain_answers"]) > 1
    printed = ask("--check-order", 5)
    assert "  rotor: 1 answer in 6 orders, bit for bit\n" in printed.stdout
    assert f"  plain model: {len(check['plain_answers'])} answers in 6 orders" in printed.stdout
    assert "Asking in 5 orders" in printed.stderr
    changed = 6 - check["plain_answers"][0]["count"]
    last = f"The plain model changed its answer in {changed} of 6 orders; rotor in none."
    assert printed.stdout.splitlines()[-1] == last
    one = ask("--check-order", 5, "--k", 1)
    told = "Order check: one chunk has one order, so there is nothing to compare"
    assert (one.stdout.splitlines()[-1], "Asking" in one.stderr) == (told, False)


def test_a_broken_promise_ends_with_code_1_and_what_promises_nothing_does_not(ask, monkeypatch):
    monkeypatch.setitem(ORDERINGS, "pretended", Pretended)
    broken = ask("--check-order", 5, "--ordering", "pretended")
    plain = ask("--check-order", 5, "--method", "sequential")
    assert (broken.exit_code, plain.exit_code) == (1, 0)
    assert "error: rotor with ordering pretended promises one output for every order" in broken.stderr
    for each in (broken, plain):
        assert re.search(r"  \w+: \d answers in 6 orders", each.stdout)


def test_documents_may_be_listed_as_a_shell_pattern_does_and_there_are_no_more_chunks_than_there_are(docs, tiny_folder):
    files = sorted(docs.iterdir())
    for options in ((), ("--k", 2**70), ("--retriever", "faiss", "--k", 2**70)):
        fixed = ("--model", tiny_folder, "--max-new-tokens", 1, "--json")
        segments = json.loads(run("ask", QUESTION, "--docs", *files, *fixed, *options).stdout)["segments"]
        assert (len(segments), segments[0]["title"]) == (len(files), "Mill")


def test_shorter_chunks_are_more_chunks_and_one_that_does_not_fit_is_left_out_if_asked(ask, tmp_path):
    long, short = (json.loads(ask("--json", "--k", 50, *each).stdout)["segments"] for each in ((), ("--max-chars", 30)))
    assert len(short) > len(long)
    assert max(len(segment["text"]) for segment in short) <= 30
    (tmp_path / "long.txt").write_text("The mill of Brenn was built. " * 1000, encoding="utf-8")
    (tmp_path / "short.txt").write_text("The mill of Brenn.", encoding="utf-8")
    document = json.loads(ask("--json", "--max-chars", 100_000, "--overflow", "drop_last", docs=tmp_path).stdout)
    (dropped,) = document["dropped"]
    assert len(document["segments"][dropped]["text"]) > 20_000
    assert document["order"] == [1 - dropped]


def test_a_skipped_document_is_named_and_strict_stops_at_it(ask, tmp_path):
    for name, content in (("good.txt", b"The mill of Brenn."), ("bad.pdf", b"%PDF-1.4 nothing"), ("page.html", b"a")):
        (tmp_path / name).write_bytes(content)
    result = ask(docs=tmp_path)
    assert result.exit_code == 0, result.output
    for told in ("skipped", "bad.pdf: cannot be read as PDF", "skipped 1 file of other types: .html (1); read are"):
        assert told in result.stderr
    assert "bad.pdf: cannot be read as PDF" in refused("ask", "Who?", "--docs", tmp_path, "--strict")


def test_the_toy_says_once_that_its_answers_to_documents_of_the_user_mean_nothing(docs):
    asked = ("ask", "Who?", "--docs", docs, "--retriever", "bm25", "--max-new-tokens", 1)
    result, by_name = run(*asked), run(*asked, "--model", EMBEDDED["generator"])
    assert (result.exit_code, by_name.exit_code) == (0, 0), result.output
    assert result.stderr.count("answered by the embedded toy model") == 1
    assert "Name a model: " in result.stderr
    assert "of the embedded toy" in result.stdout
    assert "toy" not in by_name.stderr


def test_a_chunk_without_spaces_is_shown_by_its_beginning_and_one_output_is_one(capsys):
    _print_citations([Citation(0, Segment("塔" * 500), exact=True)])
    assert f"    {'塔' * 194} [...]\n" in capsys.readouterr().out
    _print_check(OrderCheck(1, 0, True, 1, (("塔" * 500, 2),), 1, (("x", 2),)), "rotor")
    printed = capsys.readouterr().out
    assert f'2 x "{"塔" * 94} [...]"\n' in printed
    assert 'plain model: 1 answer in 2 orders, bit for bit\n      2 x "x"' in printed
