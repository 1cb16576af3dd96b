"""Claims about all commands: lists, shared options, the progress bar, commands of other packages, --check-tokens."""

import json
import os
import subprocess
import sys
import warnings
from collections import defaultdict
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import typer
from tokenizers import AddedToken

from invariant_rag import InvariantModel, __version__
from invariant_rag.cli import app
from invariant_rag.cli.console import print_table
from invariant_rag.cli.progress import progress_bar
from invariant_rag.errors import TokenWarning
from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS
from invariant_rag.testing import families, toy_tokenizer
from invariant_rag.testing.tokenizer_layouts import LAYOUTS
from tests.cli.conftest import run

ROOT = typer.main.get_command(app)
ROTOR = {"invariant": True, "fair": False, "cost": "attention both ways", "stock_decoding": True}


def test_without_arguments_two_commands_are_offered_that_exist_and_need_no_documents():
    result = run()
    assert (result.exit_code, __version__ in result.stdout) == (0, True)
    offline, _, own = result.stdout.partition("Then with your own documents")
    assert "--docs FOLDER" in own
    lines = [line.split("   ")[0].split() for line in offline.splitlines() if line.startswith("  invariant-rag ")]
    assert len(lines) == 2
    for _, *words in lines:
        assert words[0] in ROOT.commands
        assert not {"--docs", "--model"} & {*words}
    assert run("--version").stdout == f"invariant-rag {__version__}\n"
    assert "--install-completion" in run("--help").stdout


def test_families_are_listed_with_what_the_probe_says_of_them_and_so_are_the_registries(monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", {name: families.FAMILIES[name] for name in ("llama", "mamba")})
    found = [(each["family"], each["supported"]) for each in json.loads(run("models", "--json").stdout)]
    assert found == [("llama", True), ("mamba", False)]
    assert [line.split()[:2] for line in run("models").stdout.splitlines()[1:3]] == [["llama", "yes"], ["mamba", "no"]]
    for command, registry in (("orderings", ORDERINGS), ("interventions", INTERVENTIONS), ("methods", METHODS)):
        listed = {each.pop(command.removesuffix("s")): each for each in json.loads(run(command, "--json").stdout)}
        assert [*listed] == [*registry]
        assert all(each.get("about", "It is.").endswith(".") for each in listed.values())
        printed = run(command).stdout
        assert all(name in printed for name in registry)
    assert listed["rotor"] == {**ROTOR, "ordering": "lexical", "paper": "arXiv 2502.08662"}
    assert all(each["cost"] and each["paper"] for each in listed.values())


def test_a_table_is_not_cut_off_in_a_narrow_terminal(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "20")
    row = {"name": "x" * 30, "stock_decoding": True, "about": "seven words " * 3 + "incomprehensibilities"}
    print_table([row], as_json=False)
    printed = capsys.readouterr().out
    assert "x" * 30 in printed
    assert "decoding" in printed
    about = [line.partition("x" * 30)[2].removeprefix("  yes") or line for line in printed.splitlines()[2:]]
    assert "incomprehensibilities" in "".join("".join(about).split())


def test_a_shared_option_says_the_same_in_every_command():
    texts = defaultdict(list)
    for command in ROOT.commands.values():
        for option in command.params:
            for flag in option.opts:
                texts[flag].append(getattr(option, "help", None) or "")
    for flag in ("--model", "--ordering", "--dtype", "--device-map", "--overflow", "--strict", "--json"):
        assert len(texts[flag]) > len(set(texts[flag])) == 1, flag


COMPLETING = """
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from invariant_rag.cli import app
app(prog_name="invariant-rag")
"""


def test_the_tab_key_completes_names_without_torch():
    """In a process of its own, as a shell asks: the last word is completed."""
    for words, offered in (
        ("ask --method ro", {"rotor"}),
        ("serve --allow-method ro", {"rotor"}),
        ("audit --ordering le", {"lexical", "lexical-reversed"}),
    ):
        asked = {"COMP_WORDS": f"invariant-rag {words}", "COMP_CWORD": str(len(words.split()))}
        shell = {**os.environ, **asked, "_INVARIANT_RAG_COMPLETE": "complete_bash"}
        program = [sys.executable, "-c", COMPLETING]
        done = subprocess.run(program, env=shell, capture_output=True, text=True, check=False)
        assert set(done.stdout.split()) == offered, (words, done.stderr)


def test_the_bar_is_on_stderr_and_counts_what_was_done_before(capsys):
    for total in (3, None):
        with progress_bar("Counting sheep", total, completed=1) as advance:
            advance()
            advance()
        printed = capsys.readouterr()
        assert (printed.out, "Counting sheep" in printed.err, "3/3" in printed.err) == ("", True, total is not None)


greeter = typer.Typer(add_completion=False)


@greeter.command()
def greet(name):
    """Say hello."""
    typer.echo(f"hello {name}")


def installed(monkeypatch, **values):
    """Pretend that packages with these commands are installed, and no others."""
    found = EntryPoints(EntryPoint(name, value, "invariant_rag.commands") for name, value in values.items())
    monkeypatch.setattr(import_module("invariant_rag.cli.app"), "entry_points", found.select)


def test_a_command_that_is_not_installed_says_how_to_install_it(monkeypatch):
    installed(monkeypatch)
    assert "Not installed: pip install ./benchmarks" in run("--help").stdout
    for words in ("bench", "bench xquad --help", "reproduce t --model m"):
        name, *_ = words.split()
        told = [
            f"error: {name} is a command of a package that is not installed",
            "In a clone: pip install ./benchmarks",
        ]
        result = run(*words.split())
        assert (result.exit_code, result.stderr.splitlines()) == (2, told)


def test_a_command_of_a_package_is_listed_and_run_and_a_broken_one_is_one_line_and_breaks_no_other(monkeypatch):
    for value in ("no_such_package:app", "json:nothing", "json:dumps"):
        installed(monkeypatch, broken=value)
        result = run("broken")
        assert (result.exit_code, result.stderr.count("error: "), value in result.stderr) == (2, 1, True)
        assert run("methods").exit_code == 0
    installed(monkeypatch, greet=f"{__name__}:greeter", ask=f"{__name__}:greeter")
    monkeypatch.setattr(EntryPoint, "load", lambda entry: greeter)
    assert "Say hello." in run("--help").stdout
    assert run("greet", "Ann").stdout == "hello Ann\n"
    assert "from documents" in run("ask", "--help").stdout, "the core's own commands stay"


# --- tokenizers that cannot keep text out: `models --check-tokens`, and the warning of a loaded model ---


def with_tokens(*tokens):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(each) for each in tokens])
    return tokenizer


UNPROTECTED = with_tokens("<start_of_turn>", "### User:")
"""A tokenizer with tokens of roles that its template does not write."""


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check a tokenizer that is saved with a configuration, with a few texts."""
    monkeypatch.setattr("invariant_rag.cli.models._HOSTILE_TEXTS", 60)

    def checked(tokenizer, *options):
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        return run("models", "--check-tokens", tmp_path, *options)

    return checked


def test_a_protected_tokenizer_passes_the_check_and_a_token_that_only_looks_like_a_word_is_no_role(check):
    words = with_tokens("<table>", "user", "Ostra", "<reuser>")
    for tokenizer in (LAYOUTS["joined bars"].build(), LAYOUTS["llama2"].build(), words):
        result = check(tokenizer)
        assert (result.exit_code, "60 hostile texts: 0 broke out" in result.stdout) == (0, True), result.output


def test_names_that_only_a_long_conversation_writes_are_control_tokens(check):
    tokenizer = with_tokens("T38:", "T90:")
    tokenizer.chat_template = "{% for each in messages %}\nT{{ loop.index0 }}: {{ each.content }}{% endfor %}"
    names = json.loads(check(tokenizer, "--json").stdout)["control_tokens"]
    assert ("T38:" in names, "T90:" in names) == (True, False)
    assert "up to 40 turns" in check(tokenizer).stdout


def test_a_tokenizer_with_unprotected_roles_fails_the_check(check):
    result = check(UNPROTECTED)
    assert result.exit_code == 1, result.output
    assert "no template writes them: ### User:, <start_of_turn>" in result.stdout
    report = json.loads(check(UNPROTECTED, "--json").stdout)
    assert report["unprotected"] == ["### User:", "<start_of_turn>"]
    assert {"segment", "title", "question", "tool result"} <= {each["place"] for each in report["break_outs"]}
    assert any("<start_of_turn>" in each["tokens"].split(" ") for each in report["break_outs"])


def test_loading_warns_once_of_tokens_that_look_like_roles(chat_llama, tiny_folder, tmp_path):
    UNPROTECTED.save_pretrained(tmp_path)
    chat_llama.save_pretrained(tmp_path)
    with pytest.warns(TokenWarning, match=r"### User:, <start_of_turn>.*--check-tokens") as caught:
        InvariantModel.from_pretrained(tmp_path)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        InvariantModel.from_pretrained(tmp_path)
        InvariantModel.from_pretrained(tiny_folder)
