"""Claims about `invariant-rag bench` and `invariant-rag reproduce`, asked through typer's runner with a tiny model.

Of the speed benchmark: what it measures is there, and ratios are of the same run. Nothing here judges a time.
"""

import json
import math
import runpy
import subprocess
import sys
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
import typer
from invariant_rag import InvariantModel
from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app
from invariant_rag.errors import InvariantRAGError
from invariant_rag.interventions import INTERVENTIONS
from invariant_rag.methods import METHODS
from typer.core import TyperOption
from typer.testing import CliRunner

from invariant_rag_benchmarks import BENCHMARKS, config, speed
from invariant_rag_benchmarks.commands import bench, reproduce
from invariant_rag_benchmarks.config import BenchmarkConfig, ServingConfig, SpeedConfig
from invariant_rag_benchmarks.published_tables import published_tables


def invoke(*arguments):
    return CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def fixed(lm, files, tmp_path_factory):
    """Options for a model in a folder that is named like one of the papers."""
    folder, out = tmp_path_factory.mktemp("models") / "Qwen1.5-4B-Chat", tmp_path_factory.mktemp("runs")
    lm.model.save_pretrained(folder)
    lm.tokenizer.save_pretrained(folder)
    return ["--model", folder, "--data", files, "--out", out, "--limit", 1, "--max-new-tokens", 3]


def test_every_benchmark_is_a_listed_command_that_names_its_settings():
    rows = json.loads(invoke("bench", "list", "--json").stdout)
    assert [row["benchmark"] for row in rows] == list(BENCHMARKS)
    assert invoke("bench", "list").exit_code == 0
    assert [row["table"] for row in json.loads(invoke("reproduce", "--json").stdout)] == list(published_tables())
    for name, benchmark in BENCHMARKS.items():
        result = invoke("bench", name, "--help")
        assert result.exit_code == 0, result.output
        assert all(f"{setting}=" in result.output for setting in benchmark.settings.model_fields)


def test_bench_prints_figures_or_json_says_if_a_toy_answered_and_overwrites_no_run(fixed, tmp_path, monkeypatch):
    """It goes on with the run; without `--resume`, it refuses before a model is loaded."""
    command = ["bench", "xquad", *fixed, "--method", "pine"]
    result = invoke(*command)
    assert result.exit_code == 0, result.output
    assert "1 questions, 5 records; best_subspan_em in per cent" in result.stdout
    assert ("5/5" in result.stderr, "toy" in result.stderr) == (True, False)
    again = json.loads(invoke(*command, "--json", "--resume").stdout)
    assert (again["summary"]["records"], again["config"]["settings"]) == (5, {"slots": ""})
    assert again["folder"] in " ".join(result.stdout.split())
    toy = invoke("bench", "key-value", "--set", "make=1", "--set", "keys=2", "--out", tmp_path)
    assert (toy.exit_code, toy.stderr.count("answered by the embedded toy model")) == (0, 1), toy.output
    monkeypatch.setattr(BenchmarkConfig, "load_model", lambda self: pytest.fail("loaded"))
    assert "--resume" in refused(*command)


REPRODUCED = {
    "rotor-table-10 --row RoToR": ("| RoToR |", 6, "| RoToR | 30 triples, Acc. | 31.8 | 0.0 (0.0 to 79.3) | -31.8 |"),
    "pine-table-2 --ensemble permutation-average": ("| permutation |", 6, "Section 4.2"),
    "pine-table-2 --ensemble context-experts": ("| context-experts | Full, gold first |  |", 1, "Section 4.2"),
    "rotor-table-8": ("| Original | t-statistic | 3.71 | not measured |", 1, "Not measured: the nine pairs are those"),
}
"""Rows, how many lines have them, and what else is said."""


@pytest.mark.parametrize("command", REPRODUCED)
def test_reproduce_measures_the_rows_that_were_chosen_and_says_what_it_does_not_measure(command, fixed):
    measured = ["reproduce", *command.split(), *fixed, "--overflow", "trim_segments"]
    result = invoke(*measured)
    row, count, said = REPRODUCED[command]
    assert (result.exit_code, result.stdout.count(row)) == (0, count), result.output
    assert said in result.stdout
    written = [line.split(" | ")[0] for line in result.stdout.splitlines() if line.startswith("| ")]
    cells = json.loads(invoke(*measured, "--resume", "--json").stdout)
    assert written[2:] == [f"| {cell['row']}" for cell in cells]


def refused(*arguments):
    """One red line says what is wrong, with exit code 2, before any work."""
    result = invoke(*arguments)
    assert isinstance(result.exception, SystemExit), (arguments, result.exception)
    assert result.exit_code == 2, (arguments, result.output)
    return result.stderr


def test_what_is_no_whole_number_is_refused_by_name(tmp_path, monkeypatch):
    """Every option of every command; benchmarks share theirs, so one of them stands for all."""
    monkeypatch.chdir(tmp_path)
    group = typer.main.get_command(bench.app)
    commands = {("bench", name): group.commands[name] for name in ("xquad", "list", "speed", "vllm")}
    commands["reproduce",] = typer.main.get_command(reproduce.app)
    options = [(path, each) for path, command in commands.items() for each in command.params]
    typed = [(path, each) for path, each in options if isinstance(each, TyperOption)]
    numbers = [(path, each.opts[0]) for path, each in typed if "int" in str(each.type_descriptor.annotation)]
    assert len(numbers) == 20
    for (path, flag), value in product(numbers, ("nan", "-1")):
        refused(*path, f"{flag}={value}")
    for flag in ("--layers", "--repeats"):
        assert str(MOST_CALLS) in refused("bench", "speed", f"{flag}={1 << 70}")


NAMES = "bench xquad --data {empty}/none --model no-such/model"
TABLE, SPEED, SERVER = "reproduce rotor-table-1 --data {files}", "bench speed --shape tiny", "http://127.0.0.1:9"
BEFORE_TORCH = [
    ("bench nosuch", "No such command 'nosuch'"),
    (f"{NAMES} --method rotr", "unknown method 'rotr'"),
    (f"{NAMES} --ordering lexcal", "unknown ordering 'lexcal'"),
    (f"{NAMES} --ensemble context-expert", "did you mean 'context-experts'?"),
    (f"{NAMES} --ensemble ring-average --alpha 1", "expected routing or an ensemble"),
    (f"{NAMES} --intervention ms", "unknown intervention 'ms'; choose from 'hidden-scaling'"),
    (f"{NAMES} --intervention ms-poe", "'sequential' with the intervention 'ms-poe', got 'rotor'"),
    (f"{NAMES} --dtype int8", "--dtype: expected one of auto, float32"),
    (f"{NAMES} --alpha nan", "alpha: expected a finite number"),
    (f"{NAMES} --set slot=1", "unknown setting of xquad 'slot'"),
    (f"{NAMES} --set slots", "expected NAME=VALUE"),
    ("bench xquad --data {files} --out {files}/xquad.en.json", "cannot make the folder"),
    ("bench key-value --set make=1 --model no-such/model", "expected the hub id or the folder of a model"),
    # Data come before a model or a tokenizer.
    *(
        (f"{command} --model no-such/model --data {{empty}}", "expected a file, or a folder with")
        for command in ("bench xquad", "bench two-wiki", "reproduce rotor-table-1")
    ),
    ("bench two-wiki --data {files}/data.zip --model no-such/model", "expected the hub id or the folder of a model"),
    ("reproduce rotor-table-99", "rotor-table-1"),
    (f"{TABLE} --row nobody", "rows: expected names among"),
    (f"{TABLE} --ensemble nosuch", "unknown ensemble 'nosuch'"),
    (f"{TABLE} --intervention ms-poe", "intervention: expected one of a row of rotor-table-1"),
    (f"{TABLE} --ensemble context-experts --row PINE", "ensemble: expected one of a row of rotor-table-1"),
    ("bench speed --shape 9b", "unknown shape '9b'"),
    (f"{SPEED} --method rotr", "unknown method 'rotr'"),
    (f"{SPEED} --dtype int8", "--dtype: expected one of float32"),
    (f"{SPEED} --backend nosuch", "unknown backend 'nosuch'"),
    (f"{SPEED} --out {{files}}/xquad.en.json", "cannot make the folder"),
    (f"{SPEED} --tokens 100 --segments 100", "tokens: expected at least 164 for 100 segments, got 100"),
    (f"bench vllm {SERVER} --method rotr", "unknown method 'rotr'"),
    (f"bench vllm {SERVER} --requests 3", "--requests: expected a multiple of 1 and 4 and 16, got 3"),
    (f"bench vllm {SERVER}", "expected an answer of vLLM"),
]


IN_A_FRESH_PROCESS = """
import json, sys, typer
from invariant_rag.cli import app
from invariant_rag_benchmarks.commands import bench, reproduce
commands = {**typer.main.get_command(bench.app).commands, "reproduce": typer.main.get_command(reproduce.app)}
for name, command in commands.items():
    for each in command.params:
        typed = "pine" if each.name == "table" else "ro" if "--method" in each.opts else ""
        if typed:
            print(name, *[offered.value for offered in each.shell_complete(typer.Context(command), typed)])
assert not {"torch", "transformers"} & {*sys.modules}
for arguments in json.loads(sys.argv[1]):
    try: app(arguments)
    except SystemExit as ended: print("=", ended.code, file=sys.stderr)
assert "torch" not in sys.modules
"""


def test_what_is_wrong_is_said_and_the_tab_key_completes_methods_and_tables_before_torch_is_imported(files, tmp_path):
    """Behind the errors of each command, there is a line `= ` with its exit code."""
    commands = [[word.format(files=files, empty=tmp_path) for word in each.split()] for each, _ in BEFORE_TORCH]
    arguments = [sys.executable, "-c", IN_A_FRESH_PROCESS, json.dumps(commands)]
    done = subprocess.run(arguments, capture_output=True, text=True, check=True, cwd=tmp_path)
    tables = " ".join(name for name in published_tables() if name.startswith("pine"))
    completed = {**dict.fromkeys((*BENCHMARKS, "speed", "vllm"), "rotor"), "reproduce": tables}
    assert dict(line.partition(" ")[::2] for line in done.stdout.splitlines()) == completed, "and nothing else"
    told = done.stderr.split("= 2\n")
    assert (len(told), told.pop()) == (len(BEFORE_TORCH) + 1, "")
    for error, (given, message) in zip(told, BEFORE_TORCH, strict=True):
        assert message in " ".join(error.split()), given
        assert "Loading" not in error, given
    assert json.loads((files / "xquad.en.json").read_text()), "an --out that is a file is kept"
    assert tuple(INTERVENTIONS) == config.INTERVENTIONS, "names that are known without torch"


def test_a_wrong_argument_of_a_config_is_a_typed_error():
    names = "limit seed batch_size max_new_tokens alpha intervention ensemble method overflow".split()
    for name, wrong in product(names, (None, "3", b"", -1, 0, 1.5, math.nan, True, [], {}, object(), 10**400)):
        with suppress(InvariantRAGError):
            BenchmarkConfig("mmlu", **{name: wrong})


@pytest.mark.parametrize(("tokens", "segments"), [(300, 2), (2500, 20), (2500, 200)])
def test_prompts_have_the_tokens_and_segments_that_were_asked_for(tokens, segments):
    prompt = speed.random_prompt(SpeedConfig(tokens=tokens, segments=segments))
    lengths = [len(each.token_ids or ()) for each in prompt.segments]
    assert len(lengths) == segments
    assert abs(sum(lengths) + len(prompt.prefix) + len(prompt.suffix) - tokens) <= segments
    assert max(lengths) <= 2 * min(lengths) + 1


def test_times_are_to_the_first_token_between_tokens_and_of_all(monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 4.0, 6.0])  # the start, the prompt, and three tokens
    monkeypatch.setattr("invariant_rag_benchmarks.speed.perf_counter", lambda: next(clock))
    timer = speed.TimingStreamer()
    for _ in range(4):
        timer.put(torch.zeros(1))
    assert timer.times() == (3.0, 1.5, 6.0)


def test_the_command_writes_a_table_and_json(tmp_path):
    words = "bench speed --shape tiny --tokens 120 --segments 3 --segments 5 --new-tokens 2 --repeats 2"
    methods = ["--method", "rotor", "--method", "pine", "--method", "ape"]
    result = invoke(*words.split(), *methods, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("measuring rotor, pine, ape against the plain model: first token and 2 further tok")
    assert "120 tokens in 3 segments, 120 tokens in 5 segments, shape tiny" in result.stderr.splitlines()[0]
    assert "rotor, warm set" in result.output
    measured = json.loads((tmp_path / "speed.json").read_text())
    script = runpy.run_path(str(Path(__file__).parents[2] / "cookbook" / "costs" / "gpu.py"))
    assert [each["setting"]["segments"] for each in measured] == [3, 5]
    for each in measured:
        plain, *others = each["rows"]
        assert plain["ratios"]["prefill"] == plain["ratios"]["decode"] == 1.0
        assert len(others) == 4
        flops = {row["name"]: row["ratios"]["flops"] for row in each["rows"]}
        assert flops["rotor, warm set"] < flops["rotor"] < flops["pine"]
        assert flops["plain"] == 1.0
        assert all(len(row["prefill"]["seconds"]) == 2 and row["ratios"]["prefill"] > 0 for row in others)
        assert each["environment"]["backend"] == "sdpa"
        rows = script["rows_of"](each)
        assert [row[3] for row in rows] == [row["name"] for row in others]
        assert {len(row) for row in rows} == {len(script["HEAD"])}


def test_the_floor_and_flops_are_those_of_the_arithmetic():
    for tokens, floor in ((3000, 1.05), (10_000, 1.16)):
        found = speed.bidirectional_floor(SpeedConfig(shape="8b-layer", tokens=tokens))
        assert found == pytest.approx(floor, abs=0.01)
    config = SpeedConfig(shape="tiny", tokens=200, segments=4)
    model, prompt = speed.build_model(config), speed.random_prompt(config)
    count = len(prompt.prefix) + len(prompt.suffix) + sum(len(each.token_ids or ()) for each in prompt.segments)
    lm = InvariantModel(model)
    sizes = speed.SHAPES["tiny"]
    width, layers, kept = sizes["hidden_size"], sizes["num_hidden_layers"], sizes["hidden_size"] // 2
    products = 2 * layers * count * (2 * width * width + 2 * width * kept + 3 * width * sizes["intermediate_size"])
    plain = products + layers * 4 * width * count * (count + 1) // 2 + 2 * width * speed.VOCABULARY
    ids = torch.tensor([lm.with_method("sequential").prepare(prompt).input_ids])
    assert speed.count_flops(lambda: model(ids, logits_to_keep=1)) == plain

    def flops(method):
        return speed.count_flops(lambda: lm.with_method(method).generate(prompt, max_new_tokens=1))

    assert flops("sequential") == plain
    assert flops("set-based") < flops("rotor") < flops("pine")


def test_every_method_is_measured_unless_some_are_named_and_a_device_that_is_not_there_is_refused():
    words = "bench speed --shape tiny --tokens 120 --segments 3 --new-tokens 1 --repeats 1 --json".split()
    (measured,) = json.loads(invoke(*words).stdout)
    every = [name for name in METHODS if name != "sequential"]
    assert [row["name"] for row in measured["rows"]] == ["plain", *every, "rotor, warm set"]
    assert all(name in refused(*words, "--device", name) for name in ("abacus", "auto"))


def test_every_system_is_asked_in_every_round_and_tenants_are_new(lm):
    tenants = []

    def connect(tenant):
        tenants.append(tenant)
        return lm

    config = ServingConfig(clients=(1, 2), questions=(1, 2), requests=2, segments=2, new_tokens=2, rounds=2)
    measured = speed.measure_serving(connect, config)
    names = ("clients", "questions", "system", "state")
    asked = {tuple(row[name] for name in names): row["measured"] for row in measured["rows"]}
    assert asked.keys() == {*product((1, 2), (1, 2), (speed.PLAIN, speed.ARRANGED), speed.STATES)}
    assert all(tuple(times) == speed.MEASURES for times in asked.values())
    assert all(len(times) == 2 and min(times) > 0 for each in asked.values() for times in each.values())
    assert len(set(tenants)) == len(tenants) == 9
    assert (measured["setting"]["rounds"], len(measured["ratios"])) == (2, 8)


def test_requests_of_a_round_ask_about_each_set_in_other_orders():
    lm = InvariantModel.from_pretrained()
    made = speed.prompts(lm, ServingConfig(questions=(4,), requests=8, segments=4, words=20), 4, seed=1)
    orders = {tuple(each.text for each in prompt.segments) for prompt in made}
    assert len({frozenset(order) for order in orders}) == 2
    assert len(made) == 8
    assert len(orders) > 4
    assert {len(text.split()) for order in orders for text in order} == {7 + 20}


def test_a_ratio_is_the_median_over_rounds_of_this_way_over_the_plain_one_in_the_same_round_and_state():
    plain, slow = speed.SpeedResult(peak=4, flops=10), speed.SpeedResult(peak=2, flops=30)
    for step in speed.STEPS:
        plain.seconds[step], slow.seconds[step] = [1.0, 2.0, 4.0], [4.0, 4.0, 4.0]
    assert slow.ratios_to(plain) == {**dict.fromkeys(speed.STEPS, 2.0), "peak": 0.5, "flops": 3.0}
    rows = {
        (1, 4, speed.PLAIN, "cold"): [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (4.0, 1.0, 1.0)],
        (1, 4, speed.ARRANGED, "cold"): [(2.0, 0.5, 1.0), (2.0, 0.5, 1.0), (2.0, 0.25, 1.0)],
        (1, 4, speed.PLAIN, "warm"): [(8.0, 1.0, 1.0)] * 3,
        (1, 4, speed.ARRANGED, "warm"): [(8.0, 1.0, 1.0), (8.0, 1.0, 1.0), (4.0, 2.0, 1.0)],
    }
    cold, warm = speed.ratios(rows)
    assert (cold["state"], cold["throughput"], cold["first token"]) == ("cold", (1, 0.5, 2), (0.5, 0.25, 0.5))
    assert (warm["state"], warm["throughput"], warm["first token"]) == ("warm", (1, 0.5, 1), (1, 1, 2))
