"""No number at the command line, of whatever size or kind, ends in a raw traceback, and each is refused at once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner

from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app

WRONG = ("nan", "-1", "1e400", "9" * 5000)
NO_NUMBERS = [("ask",), ("audit",), ("search-dimension",)]


def whole_numbers() -> Iterator[tuple[tuple[str, ...], str]]:
    """Every option of every command that takes a whole number."""

    def below(command: TyperCommand | TyperGroup, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
        if isinstance(command, TyperGroup):
            for name, inner in command.commands.items():
                yield from below(inner, (*path, name))  # type: ignore[arg-type]
            return
        for option in command.params:
            if isinstance(option, TyperOption) and "int" in str(option.type_descriptor.annotation):
                yield path, option.opts[0]

    yield from below(typer.main.get_command(app), ())  # type: ignore[arg-type]


OPTIONS = sorted({*whole_numbers()})


def test_every_command_with_numbers_is_found() -> None:
    assert {path for path, _ in OPTIONS} >= set(NO_NUMBERS)
    assert len(OPTIONS) >= 19


@pytest.mark.parametrize("value", WRONG, ids=lambda value: ascii(value)[:8])
def test_what_is_no_whole_number_is_refused_by_name(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for path, option in OPTIONS:
        result = CliRunner().invoke(app, [*path, f"{option}={value}"])
        assert isinstance(result.exception, SystemExit), (path, option, result.exception)
        assert result.exit_code == 2, (path, option)


@pytest.mark.parametrize(
    ("path", "option"),
    [
        *((("audit",), option) for option in ("--workers", "--retries")),
        (("ask", "q"), "--check-order"),
        *((("search-dimension",), option) for option in ("--examples", "--pairs")),
    ],
)
def test_a_number_of_calls_beyond_sense_is_refused(path: tuple[str, ...], option: str) -> None:
    result = CliRunner().invoke(app, [*path, f"{option}={1 << 70}"])
    assert result.exit_code == 2
    assert str(MOST_CALLS) in result.stderr
