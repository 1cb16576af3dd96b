"""The commands that a first-time user types: without arguments, and without documents."""

from __future__ import annotations

import json

from invariant_rag import __version__
from invariant_rag.cli.ask import EXAMPLE_DOCUMENTS, EXAMPLE_QUESTION
from tests.cli.conftest import run


def test_without_arguments_two_commands_are_offered_that_exist_and_need_no_documents() -> None:
    result = run()
    assert result.exit_code == 0
    assert __version__ in result.stdout
    offline, _, own = result.stdout.partition("Then with your own documents")
    assert "--docs FOLDER" in own
    lines = [line.split("   ")[0].split() for line in offline.splitlines() if line.startswith("  invariant-rag ")]
    assert len(lines) == 2
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
