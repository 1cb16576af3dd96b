"""Claims about the command line, asked through typer's runner with real retrievers and a tiny model."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest
from click.testing import Result

from invariant_rag import __version__
from invariant_rag.audit.order_check import OrderCheck
from invariant_rag.cli.ask import _print_check, _print_citations
from invariant_rag.cli.console import print_table, print_text
from invariant_rag.generation.citations import Citation
from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS, Given
from invariant_rag.segments import Segment
from invariant_rag.testing import families
from tests.cli.conftest import run

QUESTION = "Who built the mill of Brenn?"
Run = Callable[..., Result]


class Pretended(Given):
    """Says that it is invariant, and keeps the order given."""

    name: ClassVar[str] = "pretended"
    invariant: ClassVar[bool] = True


@pytest.fixture
def ask(docs: Path, tiny_folder: Path) -> Run:
    """Ask the tiny model over the documents, with BM25 and short answers."""

    def asked(*options: object) -> Result:
        fixed = ("--docs", docs, "--model", tiny_folder, "--retriever", "bm25", "--k", 4, "--max-new-tokens", 8)
        return run("ask", QUESTION, *fixed, *options)

    return asked


def test_ask_prints_an_answer_and_what_it_was_made_of(ask: Run) -> None:
    result = ask()
    assert result.exit_code == 0, result.output
    assert "chunks as read, farthest first" in result.stdout
    assert "method rotor, ordering lexical, backend sdpa" in result.stdout
    for step in ("Indexing documents", "Loading model", "Generating"):
        assert step in result.stderr
        assert step not in result.stdout


def test_json_on_stdout_is_one_clean_object(ask: Run) -> None:
    result = ask("--json", "--method", "pine", "--ordering", "score")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (
        list(document)
        == (
            "question model answer citations segments order dropped trimmed finish_reason usage timings order_check"
        ).split()
    )
    assert document["question"] == QUESTION
    assert document["model"]["method"] == "pine"
    assert document["model"]["ordering"] == "score"
    assert document["segments"][0]["title"] == "Mill"
    assert sorted(document["order"]) == [0, 1, 2, 3]
    assert set(document["timings"]) == {"load", "index", "retrieve", "generate"}
    assert document["order_check"] is None
    described = run("ask", "--help").stdout
    assert all(key in described for key in document)


def test_check_order_compares_with_the_plain_model(ask: Run) -> None:
    result = ask("--check-order", 5, "--json")
    assert result.exit_code == 0, result.output
    check = json.loads(result.stdout)["order_check"]
    assert check["identical"]
    assert check["orders"] == 5
    assert [each["count"] for each in check["answers"]] == [6]
    assert check["plain_distinct"] >= len(check["plain_answers"]) > 1
    printed = ask("--check-order", 5)
    assert "  rotor: 1 answer in 6 orders, bit for bit\n" in printed.stdout
    assert f"  plain model: {len(check['plain_answers'])} answers in 6 orders" in printed.stdout
    assert "Asking in 5 orders" in printed.stderr
    changed = 6 - check["plain_answers"][0]["count"]
    assert (
        printed.stdout.splitlines()[-1]
        == f"The plain model changed its answer in {changed} of 6 orders; rotor in none."
    )


def test_one_chunk_has_one_order_and_one_output_is_one(ask: Run) -> None:
    printed = ask("--check-order", 5, "--k", 1)
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.splitlines()[-1] == "Order check: one chunk has one order, so there is nothing to compare"
    assert "Asking" not in printed.stderr
    assert json.loads(ask("--check-order", 5, "--k", 1, "--json").stdout)["order_check"]["identical"]


def test_one_output_is_not_several(capsys: pytest.CaptureFixture[str]) -> None:
    _print_check(OrderCheck(1, 0, True, 1, (("x", 2),), 1, (("x", 2),)), "rotor")
    assert 'plain model: 1 answer in 2 orders, bit for bit\n      2 x "x"' in capsys.readouterr().out


def test_a_broken_promise_ends_with_code_1_and_says_so(ask: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERINGS, "pretended", Pretended)
    result = ask("--check-order", 5, "--ordering", "pretended")
    assert result.exit_code == 1
    assert "error: rotor with ordering pretended promises one output for every order" in result.stderr
    assert re.search(r"  \w+: \d answers in 6 orders", result.stdout)


def test_a_method_without_a_promise_may_give_different_outputs(ask: Run) -> None:
    result = ask("--check-order", 5, "--method", "sequential")
    assert result.exit_code == 0
    assert re.search(r"  \w+: \d answers in 6 orders", result.stdout)


def test_stream_prints_the_same_answer(ask: Run) -> None:
    streamed = ask("--stream")
    assert streamed.exit_code == 0, streamed.output
    assert streamed.stdout.splitlines()[0] == ask().stdout.splitlines()[0]


def test_ask_needs_no_name_of_a_retriever(docs: Path, tiny_folder: Path) -> None:
    result = run("ask", QUESTION, "--docs", docs, "--model", tiny_folder, "--max-new-tokens", 2, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert len(document["segments"]) == 5
    assert document["segments"][0]["title"] == "Mill"


def test_documents_may_follow_as_a_shell_pattern_gives_them(docs: Path, tiny_folder: Path) -> None:
    files = sorted(docs.iterdir())
    fixed = ("--model", tiny_folder, "--retriever", "bm25", "--max-new-tokens", 1)
    result = run("ask", QUESTION, "--docs", *files, *fixed, "--json")
    assert result.exit_code == 0, result.output
    assert len(json.loads(result.stdout)["segments"]) == len(files)


@pytest.mark.parametrize("command", [("ask", QUESTION), ("audit", "q.jsonl", "--out", "out")])
def test_a_path_that_does_not_exist_is_named_before_anything_is_loaded(
    command: tuple[str, ...], docs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "q.jsonl").write_text('{"question": "Who?"}')
    result = run(*command, "--docs", docs, "--docs", "no-such-folder", "--model", "no-such-model")
    assert result.exit_code == 2
    assert result.stderr.startswith("error: no such file or folder: no-such-folder\n")  # and no bar before it


def test_neither_control_characters_nor_markup_reach_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    print_text("\x1b[31mred\x07 \ud800 [bold]plain[/bold]\nnext line")
    assert capsys.readouterr().out == "\ufffd[31mred\ufffd \ufffd [bold]plain[/bold]\nnext line\n"


def test_text_of_other_scripts_reaches_the_terminal_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    text = "10\u00a0000 \u5854\u3000\u6a4b \u0645\u06cc\u200c\u062e soft\u00adhyphen \U0001f468\u200d\U0001f469"
    print_text(text)
    assert capsys.readouterr().out == f"{text}\n"
    print_text("a\tb")
    assert capsys.readouterr().out.split() == ["a", "b"]
    print_text("\u202egnp.\u2066exe\u2069")
    assert capsys.readouterr().out == "\ufffdgnp.\ufffdexe\ufffd\n"


def test_a_chunk_without_spaces_is_shown_by_its_beginning(capsys: pytest.CaptureFixture[str]) -> None:
    _print_citations([Citation(0, Segment("塔" * 500), exact=True)])
    assert f"    {'塔' * 194} [...]\n" in capsys.readouterr().out
    _print_check(OrderCheck(1, 0, True, 1, (("塔" * 500, 2),), 1, (("x", 2),)), "rotor")
    assert f'2 x "{"塔" * 94} [...]"\n' in capsys.readouterr().out


def test_a_chunk_that_does_not_fit_is_left_out_if_asked(tmp_path: Path, tiny_folder: Path) -> None:
    (tmp_path / "long.txt").write_text("The mill of Brenn was built. " * 1000, encoding="utf-8")
    (tmp_path / "short.txt").write_text("The mill of Brenn.", encoding="utf-8")
    asked = ("ask", QUESTION, "--docs", tmp_path, "--model", tiny_folder, "--retriever", "bm25")
    options = ("--max-chars", 100_000, "--max-new-tokens", 2)
    assert "drop_last" in run(*asked, *options).stderr
    result = run(*asked, *options, "--overflow", "drop_last", "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (dropped,) = document["dropped"]
    assert len(document["segments"][dropped]["text"]) > 20_000
    assert document["order"] == [1 - dropped]


def test_models_prints_the_table_that_the_probe_gives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "FAMILIES", {name: families.FAMILIES[name] for name in ("llama", "mamba")})
    assert [(each["family"], each["supported"]) for each in json.loads(run("models", "--json").stdout)] == [
        ("llama", True),
        ("mamba", False),
    ]
    lines = run("models").stdout.splitlines()
    assert lines[1].split()[:2] == ["llama", "yes"]
    assert lines[2].split()[:2] == ["mamba", "no"]


@pytest.mark.parametrize(
    ("command", "registry"), [("methods", METHODS), ("interventions", INTERVENTIONS), ("orderings", ORDERINGS)]
)
def test_the_registries_are_listed(command: str, registry: dict[str, type]) -> None:
    listed = json.loads(run(command, "--json").stdout)
    assert [each[command.removesuffix("s")] for each in listed] == [*registry]
    assert all(each.get("about", "It is.").endswith(".") for each in listed)
    printed = run(command).stdout
    assert all(name in printed for name in registry)


def test_methods_are_listed_with_what_they_promise_and_cost() -> None:
    listed = {each.pop("method"): each for each in json.loads(run("methods", "--json").stdout)}
    assert listed["rotor"] == {
        "invariant": True,
        "fair": False,
        "cost": "attention both ways",
        "stock_decoding": True,
        "ordering": "lexical",
        "paper": "arXiv 2502.08662",
    }
    assert all(each["cost"] and each["paper"] for each in listed.values())


def test_a_table_is_not_cut_off_in_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_table(
        [{"name": "x" * 30, "stock_decoding": True, "about": "seven words " * 3 + "incomprehensibilities"}], False
    )
    printed = capsys.readouterr().out
    assert "x" * 30 in printed
    assert "decoding" in printed
    about = [line.partition("x" * 30)[2].removeprefix("  yes") or line for line in printed.splitlines()[2:]]
    assert "incomprehensibilities" in "".join("".join(about).split())


def test_version_and_completion() -> None:
    assert run("--version").stdout == f"invariant-rag {__version__}\n"
    assert "--install-completion" in run("--help").stdout


def test_shorter_chunks_are_more_chunks(ask: Run) -> None:
    def chunks(*options: object) -> list[str]:
        return [segment["text"] for segment in json.loads(ask("--json", "--k", 50, *options).stdout)["segments"]]

    short = chunks("--max-chars", 30)
    assert len(short) > len(chunks())
    assert max(map(len, short)) <= 30


def test_the_cards_of_the_embedded_models_are_printed() -> None:
    cards = json.loads(run("models", "--embedded", "--json").stdout)
    assert [*cards] == ["generator", "native", "monot5"]
    assert all(Path(each["folder"]).is_dir() and each["card"].startswith("# Embedded") for each in cards.values())
    assert "What it cannot do" in run("models", "--embedded").stdout
