"""The commands that a first-time user types: without arguments, and without documents."""

from __future__ import annotations

import json
from pathlib import Path

from invariant_rag import __version__
from invariant_rag.cli.example import EXAMPLE_DOCUMENTS, EXAMPLE_QUESTION
from tests.cli.conftest import run


def test_without_arguments_three_commands_are_offered_that_exist_and_need_no_documents() -> None:
    result = run()
    assert result.exit_code == 0
    assert __version__ in result.stdout
    offline, _, own = result.stdout.partition("Then with your own documents")
    assert "--docs FOLDER" in own
    lines = [line.split("   ")[0].split() for line in offline.splitlines() if line.startswith("  invariant-rag ")]
    assert len(lines) == 3
    for _, *words in lines:
        assert run(words[0], "--help").exit_code == 0
        assert not {"--docs", "--model"} & {*words}


def test_ask_answers_the_example_and_is_the_same_in_every_order() -> None:
    result = run("ask", "--check-order", "3", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["question"] == EXAMPLE_QUESTION
    assert document["answer"] == "orange and black"
    assert len(document["segments"]) == 10 == len([*EXAMPLE_DOCUMENTS.iterdir()])
    assert document["order_check"]["identical"] is True


def test_explain_prints_the_example_and_draws_it(tmp_path: Path) -> None:
    result = run("explain", "--out", tmp_path / "ring.svg", "--max-new-tokens", 8)
    assert result.exit_code == 0, result.output
    for name in (EXAMPLE_QUESTION, "rotor", "orange and black", "[0] Gesthaven", "no segment"):
        assert name in result.stdout
    assert (tmp_path / "ring.svg").read_text().count("Gesthaven") >= 1


def test_explain_gives_json_for_the_users_documents(docs: Path, tiny_folder: Path) -> None:
    fixed = ("--docs", docs, "--model", tiny_folder, "--retriever", "bm25", "--max-new-tokens", 2, "--k", 3)
    result = run("explain", "Who keeps the lighthouse?", *fixed, "--method", "pine", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["setting"]["method"] == "pine"
    assert len(document["readers"]) == 4
    (answer,) = (each for each in document["readers"] if each["segment"] is None)
    assert all(each["closest"] <= each["distance"] <= each["farthest"] for each in answer["sees"])
