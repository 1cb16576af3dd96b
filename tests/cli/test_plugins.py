"""Claims about commands of other packages: they are loaded when they are called, and who lacks one is told."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from invariant_rag.cli import app, plugins


def installed(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    """Pretend that packages with these commands are installed, and no others."""
    found = EntryPoints(EntryPoint(name, value, plugins.GROUP) for name, value in values.items())
    monkeypatch.setattr(plugins, "entry_points", found.select)


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "xquad", "--help"], ["reproduce", "t", "--model", "m"]])
def test_a_command_that_is_not_installed_says_how_to_install_it(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"error: {arguments[0]} is a command of a package that is not installed",
        "In a clone: pip install ./benchmarks",
    ]
    assert "Not installed: pip install ./benchmarks" in CliRunner().invoke(app, ["--help"]).stdout


def test_a_command_of_a_package_is_listed_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, greet=f"{__name__}:greeter", ask=f"{__name__}:greeter")
    monkeypatch.setattr(EntryPoint, "load", lambda entry: greeter)
    assert "Say hello." in CliRunner().invoke(app, ["--help"]).stdout
    assert CliRunner().invoke(app, ["greet", "Ann"]).stdout == "hello Ann\n"
    assert "from documents" in CliRunner().invoke(app, ["ask", "--help"]).stdout, "the core's own commands stay"


@pytest.mark.parametrize("value", ["no_such_package:app", "json:nothing", "json:dumps"])
def test_a_broken_command_is_one_line_and_breaks_no_other(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, broken=value)
    result: Any = CliRunner().invoke(app, ["broken"])
    assert (result.exit_code, result.stderr.count("error: ")) == (2, 1)
    assert value in result.stderr
    assert CliRunner().invoke(app, ["methods"]).exit_code == 0


greeter = typer.Typer(add_completion=False)


@greeter.command()
def greet(name: str) -> None:
    """Say hello."""
    typer.echo(f"hello {name}")
