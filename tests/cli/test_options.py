"""Claims about the options that commands share, and about the one progress bar."""

from __future__ import annotations

from collections import defaultdict

import pytest
import typer
from typer.core import TyperGroup, TyperOption

from invariant_rag.cli import app
from invariant_rag.cli.progress import progress_bar

SHARED = ("--model", "--ordering", "--dtype", "--device-map", "--overflow", "--strict", "--json")


def described() -> dict[str, dict[str, str]]:
    """Help texts by option and command."""
    root = typer.main.get_command(app)
    assert isinstance(root, TyperGroup)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for name, command in root.commands.items():
        for option in command.params:
            if isinstance(option, TyperOption):
                for flag in option.opts:
                    found[flag][name] = option.help or ""
    return found


@pytest.mark.parametrize("flag", SHARED)
def test_a_shared_option_says_the_same_in_every_command(flag: str) -> None:
    texts = described()[flag]
    assert len(texts) > 1
    assert len(set(texts.values())) == 1, texts


@pytest.mark.parametrize("total", [3, None])
def test_the_bar_is_on_stderr_and_counts_what_was_done_before(
    total: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("Counting sheep", total, completed=1) as advance:
        advance()
        advance()
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "Counting sheep" in printed.err
    assert ("3/3" in printed.err) == (total is not None)
