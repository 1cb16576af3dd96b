"""Claims about `invariant-rag bench` and `invariant-rag reproduce`, asked through typer's runner with a tiny model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from click.testing import Result
from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app
from invariant_rag.errors import InvariantRAGError
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.testing import CliRunner

from invariant_rag_benchmarks import BENCHMARKS
from invariant_rag_benchmarks.commands import bench, reproduce
from invariant_rag_benchmarks.config import BenchmarkConfig
from invariant_rag_benchmarks.published_tables import published_tables


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def saved(chat_llama: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder named like a model of the papers."""
    folder = tmp_path_factory.mktemp("models") / "Qwen1.5-4B-Chat"
    chat_llama.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def fixed(saved: Path, files: Path, tmp_path: Path) -> list[object]:
    return ["--model", saved, "--data", files, "--out", tmp_path / "runs", "--limit", 1, "--max-new-tokens", 3]


def test_every_benchmark_is_a_listed_command_that_names_its_settings():
    rows = json.loads(invoke("bench", "list", "--json").stdout)
    assert [row["benchmark"] for row in rows] == list(BENCHMARKS)
    assert invoke("bench", "list").exit_code == 0
    assert [row["table"] for row in json.loads(invoke("reproduce", "--json").stdout)] == list(published_tables())
    for name, benchmark in BENCHMARKS.items():
        result = invoke("bench", name, "--help")
        assert result.exit_code == 0, result.output
        assert all(f"{setting}=" in result.output for setting in benchmark.settings.model_fields)


def test_bench_prints_figures_and_progress(fixed: list[object]):
    options = ["--set", "documents=10", "--method", "pine", "--overflow", "trim_segments"]
    result = invoke("bench", "lost-in-the-middle", *fixed, *options)
    assert result.exit_code == 0, result.output
    assert "1 questions, 3 records; best_subspan_em in per cent" in result.stdout
    assert "3/3" in result.stderr


def test_bench_prints_json_and_goes_on_with_a_run(fixed: list[object]):
    command = ["bench", "xquad", *fixed, "--json"]
    first = json.loads(invoke(*command).stdout)
    assert first["summary"]["records"] == 5
    assert first["config"]["settings"] == {"slots": ""}
    refused = invoke(*command)
    assert refused.exit_code == 2
    assert "--resume" in refused.stderr
    assert json.loads(invoke(*command, "--resume").stdout) == first


def test_reproduce_measures_the_chosen_row_of_a_table(fixed: list[object], files: Path):
    table = files / "mintaka_noshuffle_top50.json"
    table.write_bytes((files / "mintaka_noshuffle_top30.json").read_bytes())
    result = invoke("reproduce", "rotor-table-10", *fixed, "--row", "RoToR", "--overflow", "trim_segments")
    assert result.exit_code == 0, result.output
    lines = [line for line in result.stdout.splitlines() if line.startswith("| RoToR |")]
    assert len(lines) == 6
    assert lines[0] == "| RoToR | 30 triples, Acc. | 31.8 | 0.0 (0.0 to 79.3) | -31.8 |"


def test_reproduce_measures_what_its_help_says(fixed: list[object], files: Path):
    said = " ".join(invoke("reproduce", "--help").output.split())
    assert "Rows of selective routing, interventions and ensembles are measured too" in said
    rewards = ["--data", files / "rewards.jsonl", "--overflow", "trim_segments"]
    result = invoke("reproduce", "pine-table-2", *fixed, *rewards, "--ensemble", "permutation-average")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("| permutation |") == 6, "a line for each cell"
    assert "Section 4.2" in result.stdout
    unmeasured = invoke("reproduce", "rotor-table-8", *fixed)
    assert unmeasured.exit_code == 0, unmeasured.output
    assert "| Original | t-statistic | 3.71 | not measured |" in unmeasured.stdout
    assert "Not measured: the nine pairs are those of three models" in unmeasured.stdout
    unknown = invoke("reproduce", "rotor-table-99", *fixed)
    assert (unknown.exit_code, "rotor-table-1" in unknown.stderr) == (2, True)


def test_pced_runs_in_bench_and_is_a_row_of_its_own_in_reproduce(fixed: list[object], files: Path):
    result = invoke("bench", "xquad", *fixed, "--ensemble", "context-experts", "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)["summary"]
    assert (summary["records"], summary["flips"]["value"]) == (5, 0)
    rewards = ["--data", files / "rewards.jsonl", "--overflow", "trim_segments"]
    options = [*rewards, "--ensemble", "context-experts", "--json"]
    assert invoke("reproduce", "pine-table-2", *fixed, *options, "--row", "PINE").exit_code == 2  # of another setup
    cells = json.loads(invoke("reproduce", "pine-table-2", *fixed, *options).stdout)
    assert {(cell["row"], cell["published"]) for cell in cells} == {("context-experts", None)}


@pytest.mark.parametrize("command", [["bench", "xquad"], ["bench", "two-wiki"], ["reproduce", "rotor-table-1"]])
def test_data_are_looked_for_before_a_model_or_a_tokenizer(command: list[str], tmp_path: Path):
    """Were one of them loaded first, the error would be about it."""
    result = invoke(*command, "--model", "no-such/model", "--data", tmp_path / "none", "--out", tmp_path / "runs")
    assert result.exit_code == 2
    assert "expected a file, or a folder with" in result.stderr
    assert "no-such/model" not in result.stderr


def test_a_run_that_exists_is_refused_before_the_model_is_loaded(files: Path, tmp_path: Path, monkeypatch):
    fixed = ["bench", "xquad", "--data", files, "--out", tmp_path, "--limit", 1, "--max-new-tokens", 1]
    assert invoke(*fixed).exit_code == 0
    monkeypatch.setattr(BenchmarkConfig, "load_model", lambda self: pytest.fail("loaded"))
    assert "--resume" in invoke(*fixed).stderr


# --- wrong input: one red line that says what is wrong, exit code 2, before any work ---

WRONG_NUMBERS = ("nan", "-1")
WRONG: list[Any] = [None, "3", b"", -1, 0, 1.5, math.nan, True, [], {}, object(), 10**400]


def refused(*arguments: object) -> str:
    result = invoke(*arguments)
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
        (["--ensemble", "ring"], "'ring-average'"),
        (["--intervention", "ms"], "unknown intervention 'ms'; choose from 'hidden-scaling'"),
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
