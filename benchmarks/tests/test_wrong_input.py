"""Claims about wrong input to the commands: one red line that says what is wrong, exit code 2, before any work."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app
from invariant_rag.errors import InvariantRAGError
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner

from invariant_rag_benchmarks.commands import bench, reproduce
from invariant_rag_benchmarks.config import BenchmarkConfig

WRONG_NUMBERS = ("nan", "-1")
WRONG: list[Any] = [None, "3", b"", -1, 0, 1.5, math.nan, True, [], {}, object(), 10**400]


def refused(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(each) for each in arguments])
    assert isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code == 2, (arguments, result.output)
    return result.stderr


def options() -> Iterator[tuple[tuple[str, ...], TyperOption]]:
    """Every option of every command; benchmarks share theirs, so one of them stands for all."""
    group = typer.main.get_command(bench.app)
    assert isinstance(group, TyperGroup)
    names = ("xquad", "list", "speed", "vllm")
    commands: dict[tuple[str, ...], Any] = {("bench", name): group.commands[name] for name in names}
    commands["reproduce",] = typer.main.get_command(reproduce.app)
    for path, command in commands.items():
        assert isinstance(command, TyperCommand)
        yield from ((path, each) for each in command.params if isinstance(each, TyperOption))


def test_a_shared_option_says_the_same_in_every_command() -> None:
    texts: dict[str, set[str]] = defaultdict(set)
    for path, option in options():
        if path[-1] in {"xquad", "reproduce"} and option.opts[0] not in {"--method", "--set"}:
            texts[option.opts[0]].add(option.help or "")
    assert len(texts) > 15
    assert {flag: said for flag, said in texts.items() if len(said) > 1} == {}


def test_what_is_no_whole_number_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    numbers = [(path, each.opts[0]) for path, each in options() if "int" in str(each.type_descriptor.annotation)]
    assert len(numbers) == 19
    for path, flag in numbers:
        for value in WRONG_NUMBERS:
            refused(*path, f"{flag}={value}")
    for flag in ("--layers", "--repeats"):
        assert str(MOST_CALLS) in refused("bench", "speed", f"{flag}={1 << 70}")


@pytest.mark.parametrize("out", ["file", "file/below", "x" * 5000])
@pytest.mark.parametrize("command", [["bench", "xquad"], ["bench", "speed", "--shape", "tiny"]])
def test_an_out_that_is_no_folder_is_refused_before_the_work(command: list[str], out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    assert "cannot make the folder" in refused(*command, "--out", tmp_path / out)
    assert (tmp_path / "file").read_text() == "kept"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--method", "rotr"], "unknown method 'rotr'"),
        (["--ordering", "lexcal"], "unknown ordering 'lexcal'"),
        (["--ensemble", "context-expert"], "did you mean 'context-experts'?"),
        (["--intervention", "ms"], "unknown intervention 'ms'"),
        (["--dtype", "int8"], "dtype: expected auto, float32"),
        (["--set", "slot=1"], "unknown setting of xquad 'slot'"),
        (["--set", "slots"], "expected NAME=VALUE"),
    ],
)
def test_a_misspelt_name_is_refused_before_data_or_a_model_are_read(
    options: list[str], message: str, tmp_path: Path
) -> None:
    places = ["--data", tmp_path / "missing", "--out", tmp_path, "--model", "no-such/model"]
    assert message in " ".join(refused("bench", "xquad", *places, *options).split())


@pytest.mark.parametrize(
    "name", ["limit", "seed", "batch_size", "max_new_tokens", "alpha", "intervention", "ensemble", "method", "overflow"]
)
def test_a_wrong_argument_of_a_config_is_a_typed_error(name: str) -> None:
    untyped = []
    for wrong in WRONG:
        try:
            BenchmarkConfig("mmlu", **{name: wrong})
        except InvariantRAGError:
            pass
        except Exception as error:  # noqa: BLE001 - that is what the test looks for
            untyped.append((wrong, error))
    assert not untyped
