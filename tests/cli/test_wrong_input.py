"""Claims about wrong input to commands: one red line that says what is wrong, exit code 2, and never a traceback."""

import json
import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch
import typer
from transformers import AutoModelForCausalLM
from typer.core import TyperOption

from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app
from invariant_rag.cli.console import handle_errors, print_error, print_skipped, print_table, print_text
from invariant_rag.errors import ContextOverflow, DocumentSkipped, OutOfMemory, RetrievalError
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.rag.documents import warn_skipped
from tests.cli.conftest import refused, run

ROOT = Path(__file__).parents[2]

ALL_IN_ONE_PROCESS = """
import json, sys
from invariant_rag.cli import app
for arguments in json.loads(sys.argv[1]):
    try:
        app(arguments)
    except SystemExit as ended:
        print("=", ended.code, file=sys.stderr)
"""


def run_all(commands, then="", **options):
    """Run commands in one fresh process; behind the errors of each, there is a line `= ` with its exit code."""
    program = [sys.executable, "-c", ALL_IN_ONE_PROCESS + then, json.dumps(commands)]
    return subprocess.run(program, capture_output=True, text=True, check=True, **options)


def test_questions_that_cannot_be_read_are_named_before_a_missing_out(questions, tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    score = f'{{"question": "Q", "segments": [{{"text": "a", "score": {10**400}}}, "b"]}}'.encode()
    for name, content, message in (
        ("nofile.jsonl", b"", "nofile.jsonl"),
        ("pipe.jsonl", b"", "got a named pipe"),
        ("score.jsonl", score, "line 1: score: expected a number other than nan, got a number of more than 20 digits"),
        ("title.jsonl", b'{"question": "Q", "segments": [{"text": "a", "title": 5}]}', "line 1: title: expected str"),
        ("latin.jsonl", b'{"question": "caf\xe9"}', "cannot be read"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        error = refused("audit", tmp_path / name)
        assert (name in error, message in error, "--out" in error) == (True, True, False), error
    assert "--out is missing" in refused("audit", questions)


@pytest.fixture
def questions(tmp_path):
    file = tmp_path / "questions.jsonl"
    file.write_text(json.dumps({"question": "Who?", "segments": ["a b", "c d"], "answers": ["a"]}) + "\n")
    return file


def test_odd_texts_are_read_and_a_terminal_of_ascii_shows_the_rest_as_escapes(tmp_path, tiny_folder):
    (tmp_path / "words.py").write_text("def answer(question, segments):\n    return segments[0].text[:9]\n")
    (tmp_path / "a.csv").write_text(f"question,segment\nQ,{'x' * 140_000}\nQ,b\n")
    line = {"question": "Q\ud800", "segments": ["a\ud800", "b"], "answers": ["\ud800"], "id": "\udfff"}
    (tmp_path / "b.jsonl").write_text(json.dumps(line) + "\n")
    (tmp_path / "a.txt").write_text("三十メートルの塔。", encoding="utf-8")
    names = ("a.csv", "b.jsonl")
    audits = [f"audit {name} --out out-{name} --remedy sort --system words:answer".split() for name in names]
    asked = ["ask", "三?", "--model", str(tiny_folder), *"--docs a.txt --retriever bm25 --max-new-tokens 4".split()]
    ascii_only = {"PYTHONIOENCODING": "ascii", "LANG": "C", "PYTHONPATH": f"{ROOT}{os.pathsep}."}
    done = run_all([*audits, asked], cwd=tmp_path, env={**os.environ, **ascii_only})
    assert [line for line in done.stderr.splitlines() if line.startswith("= ")] == ["= 0"] * 3
    assert all((tmp_path / f"out-{name}" / "report.md").exists() for name in names)
    assert done.stdout.isascii()


AUDIT, ASK = "audit {questions} --out {out}", "ask Who? --docs {docs}"
BEFORE_LOADING = [
    ("ask {blank} --docs {docs}", "expected a question, got blank text"),
    (f"{ASK} --model {{docs}}/none", "no such folder Run `ls "),
    (f"{ASK} --model {{docs}}/mill.md", "a file Run `ls "),
    (f"{ASK} --model {{docs}}", "its config.json cannot be read: No such file or directory"),
    (f"{ASK} --model {{bare}}", "its config.json names no model_type"),
    (f"{ASK} --model {{torn}}", "model.safetensors cannot be read|download it again"),
    (f"{ASK} --model {{torn}}/none/config.json", "no such folder"),
    (f"{ASK} --model {{light}}", "light: no weights in it"),
    (f"{ASK} --model no-such/model", "hf download no-such/model --local-dir"),
    (f"{ASK} --ordering cross-encoder", "expected the hub id or the folder of a model for the ordering cross-encoder"),
    (f"{ASK} --retriever faiss:no-such/model", "got no-such/model: it is not in the local cache"),
    (f"{ASK} --retriever faiss:{{docs}}/none", "none: no such folder"),
    (f"{ASK} --retriever faiss:", "unknown retriever 'faiss:'"),
    ("ask Who? --docs {empty}", "no document in "),
    ("ask Who? --docs {pdf}", "bad.pdf"),
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
    ("models --check-tokens {light}", "expected a tokenizer in "),
    (f"{AUDIT} --docs {{empty}}", "no document in "),
    (f"{AUDIT} --docs {'x' * 5000}", "is no path of a file"),
    *((f"audit {{questions}} --out {out}", "cannot make the folder") for out in ("{pdf}", "{pdf}/below", "x" * 5000)),
    ("audit", "name a file of QUESTIONS"),
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
    *(
        (f"{each} --docs no-such-folder --model no-such/model", "no such file or folder: no-such-folder")
        for each in (ASK, AUDIT)
    ),
    *(
        (f"{each} --model no-such/model --{kind} {name}", f"unknown {kind} '{name}'| did you mean '{meant}'?")
        for each in (ASK, f"{AUDIT} --docs {{docs}}")
        for kind, name, meant in (
            ("method", "rotr", "rotor"),
            ("ordering", "lexcal", "lexical"),
            ("retriever", "fais", "faiss"),
        )
    ),
]


def test_what_is_wrong_is_said_before_torch_is_imported(docs, questions, tmp_path):
    folders = {name: tmp_path / name for name in ("bare", "light", "torn", "empty")}
    for name, folder in folders.items():
        folder.mkdir()
        if name != "empty":
            (folder / "config.json").write_text("{}" if name == "bare" else '{"model_type": "llama"}')
    weights = (EMBEDDED["generator"] / "model.safetensors").read_bytes()
    (folders["torn"] / "model.safetensors").write_bytes(weights[:-1000])
    pdf = tmp_path / "bad.pdf"
    pdf.write_bytes(b"%PDF-1.4 nothing")
    named = {"docs": docs, "blank": "  ", "pdf": pdf, "questions": questions, "out": tmp_path / "out", **folders}
    commands = [[word.format(**named) for word in each.split()] for each, _ in BEFORE_LOADING]
    (tmp_path / "raises.py").write_text("1 / 0\n")
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(3)\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    done = run_all(commands, then="assert 'torch' not in sys.modules", cwd=tmp_path, env=environment)
    assert done.stdout == ""
    told = done.stderr.split("= 2\n")
    assert (len(told), told.pop()) == (len(BEFORE_LOADING) + 1, "")
    for error, (given, message) in zip(told, BEFORE_LOADING, strict=True):
        assert all(part in " ".join(error.split()) for part in message.split("|")), given
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
    program = [sys.executable, "-c", ALL_IN_ONE_PROCESS, json.dumps([["methods"], ["--help"]])]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
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
    options = {*whole_numbers(typer.main.get_command(app))}
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


class Hub(BaseHTTPRequestHandler):
    """Answers as huggingface.co does: one model is gated, all others are missing."""

    def do_HEAD(self):
        gated = "/gated/" in self.path
        self.send_response(403 if gated else 404)
        self.send_header("X-Error-Code", "GatedRepo" if gated else "RepoNotFound")
        self.send_header("X-Error-Message", "Access is restricted." if gated else "Repository not found")
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_GET = do_HEAD  # noqa: N815 - the name that the base class calls


def test_a_wrong_name_and_a_gated_model_are_told_apart(tmp_path):
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        hub = {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HUB_OFFLINE": "0", "NO_PROXY": "*"}
        environment = {**os.environ, **hub, "HF_HOME": str(tmp_path)}
        done = run_all([["ask", "--model", name] for name in ("Qwen/Qwen99-7B", "gated/model")], env=environment)
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
