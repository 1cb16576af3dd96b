"""Claims about all commands and those of other packages; wrong input is one red line, and never a traceback."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from threading import Thread

import pytest
import torch
import typer
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM
from typer.core import TyperOption

from invariant_rag import InvariantModel, __version__
from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app
from invariant_rag.cli.console import handle_errors, print_error, print_skipped, print_table, print_text
from invariant_rag.cli.progress import progress_bar
from invariant_rag.errors import ContextOverflow, DocumentSkipped, OutOfMemory, RetrievalError, TokenWarning
from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import ORDERINGS
from invariant_rag.rag.documents import warn_skipped
from invariant_rag.testing import families, toy_tokenizer
from invariant_rag.testing.tokenizer_layouts import LAYOUTS
from tests.cli.conftest import refused, run

COMMANDS = typer.main.get_command(app)
ROTOR = {"invariant": True, "fair": False, "cost": "attention both ways", "stock_decoding": True}


ALL_IN_ONE_PROCESS = """
import json, sys
from invariant_rag.cli import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments, prog_name="invariant-rag")
    except SystemExit as ended:
        print("=", ended.code, file=sys.stderr)
"""
WITHOUT_TORCH = "assert not {'torch', 'transformers'} & sys.modules.keys()"


def run_all(commands, then="", env=None, stdout=subprocess.PIPE, check=True, cwd=None):
    """Run commands in one fresh process; behind the errors of each, there is a line `= ` with its exit code."""
    program = [sys.executable, "-c", ALL_IN_ONE_PROCESS + then, json.dumps(commands)]
    path = f"{Path(__file__).parents[2]}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": path, **(env or {})}
    return subprocess.run(program, stdout=stdout, stderr=subprocess.PIPE, text=True, check=check, cwd=cwd, env=env)


def test_without_arguments_two_commands_are_offered_that_exist_and_need_no_documents():
    result = run()
    assert (result.exit_code, __version__ in result.stdout) == (0, True)
    offline, _, own = result.stdout.partition("Then with your own documents")
    assert "--docs FOLDER" in own
    lines = [line.split("   ")[0].split() for line in offline.splitlines() if line.startswith("  invariant-rag ")]
    assert len(lines) == 2
    for _, *words in lines:
        assert words[0] in COMMANDS.commands
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
    options = [option for command in COMMANDS.commands.values() for option in command.params]
    for flag in ("--model", "--ordering", "--dtype", "--device-map", "--overflow", "--strict", "--json"):
        texts = [option.help for option in options if flag in option.opts]
        assert len(texts) > len(set(texts)) == 1, flag


def test_the_tab_key_completes_names_without_torch():
    """As a shell asks: the last word is completed."""
    for words, offered in (
        ("ask --method ro", {"rotor"}),
        ("serve --allow-method ro", {"rotor"}),
        ("audit --ordering le", {"lexical", "lexical-reversed"}),
    ):
        asked = {"COMP_WORDS": f"invariant-rag {words}", "COMP_CWORD": str(len(words.split()))}
        done = run_all([[]], WITHOUT_TORCH, env={**asked, "_INVARIANT_RAG_COMPLETE": "complete_bash"})
        assert set(done.stdout.split()) == offered, (words, done.stderr)


def test_the_bar_is_on_stderr_and_counts_what_was_done_before(capsys):
    for total in (3, None):
        with progress_bar("Counting sheep", total, completed=1) as advance:
            advance()
            advance()
        printed = capsys.readouterr()
        assert (printed.out, "Counting sheep" in printed.err, "3/3" in printed.err) == ("", True, total is not None)


def installed(monkeypatch, **values):
    """Pretend that packages with these commands are installed, and no others."""
    found = EntryPoints(EntryPoint(name, value, "invariant_rag.commands") for name, value in values.items())
    monkeypatch.setattr(import_module("invariant_rag.cli.app"), "entry_points", found.select)


def test_a_command_of_a_package_is_run_and_a_missing_or_broken_one_is_one_line_and_breaks_no_other(monkeypatch):
    installed(monkeypatch)
    assert "Not installed: pip install ./benchmarks" in run("--help").stdout
    for words in ("bench", "bench xquad --help", "reproduce t --model m"):
        result = run(*words.split())
        said, *hint = result.stderr.splitlines()
        assert said == f"error: {words.split()[0]} is a command of a package that is not installed"
        assert (result.exit_code, hint) == (2, ["In a clone: pip install ./benchmarks"])
    for value in ("no_such_package:app", "json:nothing", "json:dumps"):
        installed(monkeypatch, broken=value)
        result = run("broken")
        assert (result.exit_code, result.stderr.count("error: "), value in result.stderr) == (2, 1, True)
        assert run("methods").exit_code == 0
    greeter = typer.Typer(add_completion=False)
    greeter.command(help="Say hello.")(lambda name: typer.echo(f"hello {name}"))
    installed(monkeypatch, greet="a_package:greeter", ask="a_package:greeter")
    monkeypatch.setattr(EntryPoint, "load", lambda entry: greeter)
    assert "Say hello." in run("--help").stdout
    assert run("greet", "Ann").stdout == "hello Ann\n"
    assert "from documents" in run("ask", "--help").stdout, "the core's own commands stay"


# --- tokenizers that cannot keep text out: `models --check-tokens`, and the warning of a loaded model ---


def with_tokens(*tokens):
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(each) for each in tokens])
    return tokenizer


UNPROTECTED = with_tokens("<start_of_turn>", "### User:")  # roles that its template does not write


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check a tokenizer that is saved with a configuration, with a few texts."""
    monkeypatch.setattr("invariant_rag.cli.models._HOSTILE_TEXTS", 60)

    def checked(tokenizer, *options):
        tokenizer.save_pretrained(tmp_path)
        (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
        return run("models", "--check-tokens", tmp_path, *options)

    return checked


def test_names_that_only_a_long_conversation_writes_are_control_tokens(check):
    tokenizer = with_tokens("T38:", "T90:")
    tokenizer.chat_template = "{% for each in messages %}\nT{{ loop.index0 }}: {{ each.content }}{% endfor %}"
    names = json.loads(check(tokenizer, "--json").stdout)["control_tokens"]
    assert ("T38:" in names, "T90:" in names) == (True, False)
    assert "up to 40 turns" in check(tokenizer).stdout


def test_a_tokenizer_with_unprotected_roles_fails_the_check_and_a_protected_one_or_one_with_words_alone_passes(check):
    words = with_tokens("<table>", "user", "Ostra", "<reuser>")
    for tokenizer in (LAYOUTS["joined bars"].build(), LAYOUTS["llama2"].build(), words):
        result = check(tokenizer)
        assert (result.exit_code, "60 hostile texts: 0 broke out" in result.stdout) == (0, True), result.output
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
    for folder in (tmp_path, tiny_folder):
        InvariantModel.from_pretrained(folder)  # a warning would be an error here


# --- wrong input ---


def test_odd_texts_are_read_and_a_terminal_of_ascii_shows_the_rest_as_escapes(tmp_path, tiny_folder):
    (tmp_path / "words.py").write_text("def answer(question, segments):\n    return segments[0].text[:9]\n")
    (tmp_path / "a.csv").write_text(f"question,segment\nQ,{'x' * 140_000}\nQ,b\n")
    line = {"question": "Q\ud800", "segments": ["a\ud800", "b"], "answers": ["\ud800"], "id": "\udfff"}
    (tmp_path / "b.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "a.txt").write_text("三十メートルの塔。", encoding="utf-8")
    names = ("a.csv", "b.jsonl")
    audits = [f"audit {name} --out out-{name} --remedy sort --system words:answer".split() for name in names]
    asked = ["ask", "三?", "--model", str(tiny_folder), *"--docs a.txt --retriever bm25 --max-new-tokens 4".split()]
    done = run_all([*audits, asked], cwd=tmp_path, env={"PYTHONIOENCODING": "ascii", "LANG": "C"})
    assert [line for line in done.stderr.splitlines() if line.startswith("= ")] == ["= 0"] * 3
    assert all((tmp_path / f"out-{name}" / "report.md").exists() for name in names)
    assert done.stdout.isascii()


AUDIT, ASK = "audit q.jsonl --out out", "ask Who? --docs {docs}"
BEFORE_LOADING = [
    ("ask {blank} --docs {docs}", "expected a question, got blank text"),
    (f"{ASK} --model {{docs}}/none", "no such folder Run `ls "),
    (f"{ASK} --model {{docs}}/mill.md", "a file Run `ls "),
    (f"{ASK} --model {{docs}}", "its config.json cannot be read: No such file or directory"),
    (f"{ASK} --model bare", "its config.json names no model_type"),
    (f"{ASK} --model torn", "model.safetensors cannot be read|download it again"),
    (f"{ASK} --model torn/none/config.json", "no such folder"),
    (f"{ASK} --model light", "light: no weights in it"),
    (f"{ASK} --model no-such/model", "hf download no-such/model --local-dir"),
    (f"{ASK} --ordering cross-encoder", "expected the hub id or the folder of a model for the ordering cross-encoder"),
    (f"{ASK} --retriever faiss:no-such/model", "got no-such/model: it is not in the local cache"),
    (f"{ASK} --retriever faiss:{{docs}}/none", "none: no such folder"),
    (f"{ASK} --retriever faiss:", "unknown retriever 'faiss:'"),
    ("ask Who? --docs empty", "no document in "),
    ("ask Who? --docs bad.pdf", "bad.pdf"),
    (f"{ASK} --dtype int8", "--dtype: expected one of auto, float32"),
    (f"{ASK} --k many", "--k: expected a whole number, got many"),
    (f"{ASK} --k 0", "--k: expected at least 1, got 0"),
    (f"{ASK} --overflow cut", "expected one of error, drop_last, trim_segments, got cut"),
    ("ask Who?", "--docs is missing"),
    ("ask --docs x", "a question, got none"),
    ("ask Who? --doc {docs}", "No such option: --doc"),
    ("serve {docs}/none", "no such folder"),
    ("serve --vllm http://127.0.0.1:9", "expected an answer of vLLM at http://127.0.0.1:9|Is the server up?"),
    ("serve --dtype int8", "--dtype: expected one of auto, float32"),
    ("serve --reranker no-such/model", "expected monot5, cross-encoder or a checkpoint"),
    ("serve --port 99999", "--port: expected at most 65535, got 99999"),
    ("serve --method rotr", "did you mean 'rotor'?"),
    ("models --check-tokens {docs}/none", "no such folder"),
    ("models --check-tokens light", "expected a tokenizer in "),
    (f"{AUDIT} --docs empty", "no document in "),
    (f"{AUDIT} --docs {'x' * 5000}", "is no path of a file"),
    *((f"audit q.jsonl --out {out}", "cannot make the folder") for out in ("bad.pdf", "bad.pdf/below", "x" * 5000)),
    ("audit", "name a file of QUESTIONS"),
    ("audit nofile.jsonl", "no such file: nofile.jsonl"),
    ("audit pipe.jsonl", "pipe.jsonl|got a named pipe"),
    ("audit q.jsonl", "--out is missing"),
    (f"{AUDIT} --seed -5", "--seed: expected at least 0, got -5"),
    (f"{AUDIT} --system raises:x --fail-on flip-rate>5%", "fail-on: expected order-matters, or a bound such as"),
    (f"{AUDIT} --system raises:x", "ZeroDivisionError"),
    (f"{AUDIT} --system exits:x", "SystemExit: 3"),
    (f"{AUDIT} --system exits.py:x", "MODULE is no path, and has no .py"),
    (f"{AUDIT} --system json:last", "no attribute 'last'"),
    (f"{AUDIT} --system http://127.0.0.1:9/v1", "be reached: Connection refused"),
    (f"{AUDIT} --judge {{docs}}/none", "none: no such folder"),
    (f"{AUDIT} --judge http://127.0.0.1:9/v1", "http://127.0.0.1:9/v1 lists no model"),
    (f"{AUDIT} --system no_module:x --docs {{docs}}", "No module named 'no_module'"),
    (f"{AUDIT} --model no-such/model --remedy srot", "unknown remedy 'srot'| did you mean 'sort'?"),
    *((f"{each} --docs nowhere --model no-such/model", "no such file or folder: nowhere") for each in (ASK, AUDIT)),
    *(
        (f"{each} --model no-such/model --{kind} {name[:-1]}", f"unknown {kind} '{name[:-1]}'| did you mean '{name}'?")
        for each in (ASK, f"{AUDIT} --docs {{docs}}")
        for kind, name in (("method", "rotor"), ("ordering", "lexical"), ("retriever", "faiss"))
    ),
]


def test_what_is_wrong_is_said_before_torch_is_imported(docs, tmp_path):
    questions = tmp_path / "q.jsonl"
    questions.write_text('{"question": "Who?", "segments": ["a b", "c d"], "answers": ["a"]}\n')
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "empty").mkdir()
    for name, config in (("bare", "{}"), ("light", '{"model_type": "llama"}'), ("torn", '{"model_type": "llama"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(config)
    weights = (EMBEDDED["generator"] / "model.safetensors").read_bytes()
    (tmp_path / "torn" / "model.safetensors").write_bytes(weights[:-1000])
    pdf = tmp_path / "bad.pdf"
    pdf.write_bytes(b"%PDF-1.4 nothing")
    commands = [[word.format(docs=docs, blank="  ") for word in each.split()] for each, _ in BEFORE_LOADING]
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    done = run_all(commands, WITHOUT_TORCH, cwd=tmp_path)
    assert done.stdout == ""
    told = done.stderr.split("= 2\n")
    assert (len(told), told.pop()) == (len(BEFORE_LOADING) + 1, "")
    for error, (given, message) in zip(told, BEFORE_LOADING, strict=True):
        assert all(part in " ".join(error.split()) for part in message.split("|")), given
        assert ("--out is missing" in error) == ("--out" in message), "questions are read first"
        for never in ("PosixPath", "Loading model", "Indexing", "Traceback", "Errno"):
            assert never not in error, given
    assert pdf.read_bytes() == b"%PDF-1.4 nothing", "an --out that is a file is kept"
    assert not (tmp_path / "out").exists(), "what fails before the first call leaves no folder"
    for device in ("cuda:99", "nowhere"):  # which torch knows
        assert device in refused("audit", questions, "--out", tmp_path / "out", "--device-map", device)


def test_neither_control_characters_nor_markup_reach_the_terminal_nor_do_names_of_files_as_such(capsys):
    odd = "10\u00a0000 \u5854\u3000\u6a4b \u0645\u06cc\u200c\u062e soft\u00adhyphen \U0001f468\u200d\U0001f469"
    for given, printed in (
        ("\x1b[31mred\x07 \ud800 [bold]plain[/bold]\nnext", "\ufffd[31mred\ufffd \ufffd [bold]plain[/bold]\nnext"),
        ("\u202egnp.\u2066exe\u2069", "\ufffdgnp.\ufffdexe\ufffd"),
        (odd, odd),
        ("a\tb", "a       b"),
    ):
        print_text(given)
        assert capsys.readouterr().out == f"{printed}\n"
    controls = {*"\x1b\x07\u202e\u200e\u200f\u061c\u2028\u2029"}
    bad = f"\x1b]0;owned\x07\x1b[2Jevil{''.join(controls)}.txt"
    print_error(f"{bad}: cannot be read", f"rename {bad}")
    print_skipped(RetrievalError(bad))
    print_table([{"name": bad}], as_json=False)
    with pytest.warns(DocumentSkipped, match="evil") as warned:
        warn_skipped(RetrievalError(bad, hint=bad))
    printed = "".join([*capsys.readouterr(), str(warned[0].message), str(RetrievalError("", hint=bad).hint)])
    assert (printed.count("evil"), controls & {*printed}) == (6, set())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_listing_that_finds_no_room_says_so():
    with Path("/dev/full").open("w") as full:
        done = run_all([["methods"], ["--help"]], stdout=full, check=False)
    assert done.stderr.count("error: No space left on device") == done.stderr.count("= 2\n") == 2
    assert "Traceback" not in done.stderr


def whole_numbers(command, path=()):
    """Every option of a command, and of those below it, that takes a whole number."""
    for name, inner in getattr(command, "commands", {}).items():
        yield from whole_numbers(inner, (*path, name))
    for option in command.params:
        if isinstance(option, TyperOption) and "int" in str(option.type_descriptor.annotation):
            yield path, option.opts[0]


def test_what_is_no_whole_number_is_refused_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {*whole_numbers(COMMANDS)}
    assert len(options) >= 16
    assert {("ask",), ("audit",), ("serve",)} <= {path for path, _ in options}
    for value in ("nan", "-1", "1e400", "9" * 5000):
        for path, option in options:
            result = run(*path, f"{option}={value}")
            assert (type(result.exception), result.exit_code) == (SystemExit, 2), (path, option, value[:9])
            assert option in result.stderr, (path, option, value[:9], result.stderr[:200])
    for command in ("audit --workers", "audit --retries", "ask q --check-order"):
        result = run(*f"{command}={1 << 70}".split())
        assert (result.exit_code, str(MOST_CALLS) in result.stderr) == (2, True), command


# --- what stops a first-time user gives the next command to type; the hub is a real server on this machine ---


def test_a_wrong_name_and_a_gated_model_are_told_apart(tmp_path):
    def answer(handler):
        gated = "/gated/" in handler.path
        handler.send_response(403 if gated else 404)
        handler.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    hub = type("Hub", (BaseHTTPRequestHandler,), {"do_HEAD": answer, "do_GET": answer})
    with ThreadingHTTPServer(("127.0.0.1", 0), hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        online = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        commands = [["ask", "--model", name] for name in ("Qwen/Qwen99-7B", "gated/model")]
        done = run_all(commands, env={**online, "HF_HOME": str(tmp_path)})
        server.shutdown()
    wrong, gated, rest = done.stderr.split("= 2\n")
    assert rest == ""
    assert "https://huggingface.co/models" in wrong
    assert "https://huggingface.co/gated/model, then run `hf auth login`" in " ".join(gated.split())


def test_memory_of_a_device_that_does_not_suffice_names_the_options(capsys):
    with pytest.raises(typer.Exit) as caught, handle_errors():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    assert caught.value.exit_code == 2
    printed = capsys.readouterr().err
    assert "20.00 GiB" in printed
    for option in ("--dtype", "--device-map", "--k"):
        assert option in printed
        assert option in run("ask", "--help").stdout
    assert OutOfMemory("too much").hint in printed
    with pytest.raises(RuntimeError, match="another"), handle_errors():
        raise RuntimeError("another")


def test_a_prompt_that_is_too_long_names_the_options_before_the_weights_are_loaded(docs, tiny_folder, monkeypatch):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded"))
    asked = ("--docs", docs, "--model", tiny_folder, "--retriever", "bm25", "--max-new-tokens", 4096)
    error = refused("ask", "Who?", *asked)
    for told in ("--k 5", "--overflow drop_last", "max_new_tokens", ContextOverflow.hint):
        assert told in error
