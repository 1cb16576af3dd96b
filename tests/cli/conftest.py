"""Commands, asked through typer's runner."""

from typer.testing import CliRunner

from invariant_rag.cli import app


def run(*arguments):
    """Run a command."""
    return CliRunner().invoke(app, [str(each) for each in arguments])


def refused(*arguments):
    """Return the error of a command that is refused, in one line: nothing is on stdout, and there is no traceback."""
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), result.exception
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())
