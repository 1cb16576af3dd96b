"""Claims about `invariant-rag bench` and `invariant-rag reproduce`, asked through typer's runner with a tiny model.

Of the speed benchmark: what it measures is there, and ratios are of the same run. Nothing here judges a time. The
tables of the papers are checked against each other, and measured again.
"""

import json
import math
import runpy
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path

import pytest
import torch
import typer
from invariant_rag import InvariantModel
from invariant_rag.checks import MOST_CALLS
from invariant_rag.cli import app
from invariant_rag.errors import InvariantRAGError
from invariant_rag.interventions import INTERVENTIONS, HiddenScaling
from invariant_rag.methods import METHODS
from scipy.stats import t as student
from scipy.stats import ttest_rel
from typer.core import TyperOption
from typer.testing import CliRunner

from invariant_rag_benchmarks import BENCHMARKS, Case, config, speed
from invariant_rag_benchmarks import published_tables as tables
from invariant_rag_benchmarks.commands import bench, reproduce
from invariant_rag_benchmarks.config import BenchmarkConfig, ServingConfig, SpeedConfig
from invariant_rag_benchmarks.published_tables import resolve_table
from invariant_rag_benchmarks.tasks.judging import SECTIONS

from .conftest import records

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")


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
    assert [row["table"] for row in json.loads(invoke("reproduce", "--json").stdout)] == list(tables.published_tables())
    for name, benchmark in {"list": None, **BENCHMARKS}.items():
        result = invoke("bench", name, *(["--help"] if benchmark else []))
        assert result.exit_code == 0, result.output
        assert benchmark is None or all(f"{each}=" in result.output for each in benchmark.settings.model_fields)


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


REPRODUCED = {  # rows, how many lines have them, and what else is said
    "rotor-table-10 --row RoToR": ("| RoToR |", 6, "| RoToR | 30 triples, Acc. | 31.8 | 0.0 (0.0 to 79.3) | -31.8 |"),
    "pine-table-2 --ensemble permutation-average": ("| permutation |", 6, "Section 4.2"),
    "pine-table-2 --ensemble context-experts": ("| context-experts | Full, gold first |  |", 1, "Section 4.2"),
    "rotor-table-8": ("| Original | t-statistic | 3.71 | not measured |", 1, "Not measured: the nine pairs are those"),
}


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
    assert (type(result.exception), result.exit_code) == (SystemExit, 2), (arguments, result.output)
    return result.stderr


def test_what_is_no_whole_number_is_refused_by_name(tmp_path, monkeypatch):
    """Every option of every command; benchmarks share theirs, so one of them stands for all."""
    monkeypatch.chdir(tmp_path)
    group = typer.main.get_command(bench.app).commands
    names = ("xquad", "list", "speed --shape tiny", "vllm")
    commands = {f"bench {name}": group[name.split()[0]] for name in names}
    commands["reproduce"] = typer.main.get_command(reproduce.app)
    typed = [(path, each) for path, command in commands.items() for each in command.params if type(each) is TyperOption]
    numbers = [f"{path} {each.opts[0]}" for path, each in typed if "int" in str(each.type_descriptor.annotation)]
    assert len(numbers) == 20
    for number, value in product(numbers, ("nan", "-1")):
        assert number.split()[-1] in refused(*f"{number}={value}".split())
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
    (f"{SPEED} --new-tokens 0", "--new-tokens: expected at least 1, got 0"),
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
    of_pine = " ".join(name for name in tables.published_tables() if name.startswith("pine"))
    completed = {**dict.fromkeys((*BENCHMARKS, "speed", "vllm"), "rotor"), "reproduce": of_pine}
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
    script = runpy.run_path(str(ROOT / "cookbook" / "costs" / "gpu.py"))
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


def test_every_system_is_asked_in_every_round_about_each_set_in_other_orders_and_tenants_are_new(lm):
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
    made = speed.prompts(lm, ServingConfig(questions=(4,), requests=8, segments=4, words=20), 4, seed=1)
    orders = {tuple(each.text for each in prompt.segments) for prompt in made}
    assert (len(made), len({frozenset(order) for order in orders})) == (8, 2)
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


def row_of(table, model, name):
    """A row of a table, and its cells by the names of columns."""
    (row,) = [each for each in resolve_table(table).rows_of(model) if each.name == name]
    return row, dict(zip((each.label for each in resolve_table(table).columns), row.values, strict=True))


@pytest.mark.parametrize("name", tables.published_tables())
def test_every_column_and_row_is_measured_with_what_we_have_or_the_note_says_why_not(name):
    table = resolve_table(name)
    columns = [each for each in table.columns if each.metric]
    rows = [each for each in table.rows if each.setup is not None]
    assert (columns, rows) == ([*table.columns], [*table.rows]) or "not measured" in table.note.lower()
    assert table.columns
    for column in columns:
        benchmark = BENCHMARKS[column.benchmark]
        assert benchmark.parse_settings(column.settings)
        case = Case("q", "0123", "", (), "", ("0",), candidates=(" A", " B", " C", " D"), group="qasper")
        metrics = benchmark.score(case, " A").scores.keys() | {"routed", "perplexity", "collisions"}
        assert column.metric.startswith("figure: ") or column.metric.removeprefix("deviation: ") in metrics
    assert all(any(each is not None for each in row.values) for row in table.rows)
    for row in rows:
        BenchmarkConfig("mmlu", **asdict(row.setup))  # which refuses what has no such name
        assert row.setup.intervention != "hidden-scaling" or HiddenScaling.published(row.model)


def test_the_t_tests_of_rotor_follow_from_its_table_of_scores():
    """But for a factor: the paper divides the variance of nine differences by nine, a t-test by eight."""
    scores, published = resolve_table("rotor-table-7"), resolve_table("rotor-table-8")
    for name, row in zip(("Original Model", "RoToR-lexical"), published.rows, strict=True):
        values = [row.values for row in scores.rows if row.name.removesuffix(" + S.R.") == name]
        pairs = [pair for each in values for pair in zip(each[::2], each[1::2], strict=True) if None not in pair]
        before, after = zip(*pairs, strict=True)
        test = ttest_rel(before, after)
        freedom, difference, t, critical = row.values
        assert (test.df, len(pairs)) == (freedom, 9)
        assert sum(before) / 9 - sum(after) / 9 == pytest.approx(difference, abs=0.005)
        assert student.ppf(0.975, test.df) == pytest.approx(critical, abs=0.0005)
        assert test.statistic * (9 / 8) ** 0.5 == pytest.approx(t, abs=0.005)
        assert (test.pvalue < 0.05) == (t > critical) == (name == "Original Model")


def test_the_scores_of_rotor_before_and_after_shuffling_and_its_margin_are_those_of_its_main_tables():
    names = {"Original Model": "Original", "RoToR-lexical": "RoToR"}
    for row in resolve_table("rotor-table-7").rows:
        if row.name in names:
            _, main = row_of("rotor-table-2", row.model, names[row.name])
            labels = [f"{count} triples, {order}, F1" for count in (30, 50) for order in ("initial", "shuffled")]
            assert list(row.values[:4]) == [main[label] for label in labels]
        if row.values[4] is not None:
            name = "Orig." if row.name == "Original Model" else "RoToR + S.R."
            mean, _ = row_of("rotor-table-3", row.model, name)
            assert row.values[4:] == (mean.values[0], mean.values[2])
    margin = next(row for row in resolve_table("rotor-table-6").rows if row.name == "ours-lexical, 0.2")
    routed, _ = row_of("rotor-table-3", margin.model, "RoToR + S.R.")
    assert (margin.setup, margin.values[1]) == (routed.setup, routed.values[0])


@pytest.mark.parametrize("row", resolve_table("pine-tables-7-15").rows, ids=lambda row: f"{row.model}, {row.name}")
def test_the_subsets_of_reward_bench_average_to_the_published_sections(row):
    """With RewardBench's weights; every cell is rounded to 0.1. The paper has another run in one of its columns."""
    tolerance = 0.65 if (row.model, row.name) == ("meta-llama/Meta-Llama-3-8B-Instruct", "PINE") else 0.11
    _, published = row_of("pine-table-5", row.model, row.name)
    _, cells = row_of("pine-tables-7-15", row.model, row.name)
    for name, weights in SECTIONS.items():
        mean = sum(cells[subset] * weight for subset, weight in weights.items()) / sum(weights.values())
        expected = published[f"{name}, shuffled"]
        assert expected is None or mean == pytest.approx(expected, abs=tolerance), name


def test_the_flips_of_a_model_average_to_its_last_column():
    rows = resolve_table("pine-table-4").rows
    for *sections, full in (row.values for row in rows if None not in row.values):
        assert sum(sections) / 4 == pytest.approx(full, abs=0.1)
    (cells,) = [row.values for row in rows if row.model == "Qwen/Qwen1.5-72B-Chat"]
    assert cells == (None, None, 9.6, 24.7, 17.0)


def test_cells_are_read_from_the_records_of_a_run():
    def column(metric, **more):
        return tables.PublishedColumn("", "mmlu", metric, {}, **more)

    asked = records({"0123": [1, 1], "a": [1, 1], "b": [1, 0], "c": [0, 0]})
    found = column("deviation: accuracy", exclude_variants=("0123",)).read(asked)
    assert found.value == pytest.approx(((0.5**2 + 0 + 0.5**2) / 3) ** 0.5)
    assert column("accuracy", variants=("z",)).read(asked) is None
    assert column("perplexity").read(asked) is None
    assert column("perplexity").read(records({"a": [1]}, perplexity=3.5)).value == 3.5
    routed = [
        *records({"a": [0, 0]}, branch="plain", rejected={"scores": {"accuracy": 1.0}}),
        *records({"b": [1, 0]}, branch="invariant", rejected={"scores": {"accuracy": 0.0}}),
    ]
    assert column("accuracy").read(routed).value == 0.25
    assert column("accuracy").read(routed, oracle=True).value == 0.75  # the better of two branches
    assert column("routed").read(routed).value == 0.5
    mean = resolve_table("rotor-table-3").columns[2]  # the others of MMLU are all orders but the first
    chosen = mean.select({"variant": variant, "group": ""} for variant in ("0123", "0132", "3210"))
    assert [record["variant"] for record in chosen] == ["0132", "3210"]


HIDDEN = [("sequential", None, None), ("sequential", None, "hidden-scaling")]
ROUTED = [("rotor", None, None), ("rotor", 0.2, None)]
METHODS_OF_ROTOR = [(each, None, None) for each in ("sequential", "pine", "rotor", "rotor")]
LOST = "lost-in-the-middle"
PLANS = [
    # The oracle shares the run of the routed row.
    ("rotor-table-3: RoToR|RoToR + S.R.|RoToR + S.R. (Oracle)", "Qwen/Qwen1.5-4B-Chat", ROUTED, ["mmlu"]),
    # MPT has its published scaling.
    ("hidden-scaling-table-1", "mosaicml/mpt-30b-chat", HIDDEN, [LOST, "key-value"]),
    # One run for each method and number of documents.
    ("rotor-table-1", "meta-llama/Llama-3.1-70B-Instruct", METHODS_OF_ROTOR, [LOST, LOST]),
]


@pytest.mark.parametrize(("table", "model", "setups", "benchmarks"), PLANS)
def test_a_table_takes_one_run_per_setup_and_setting(table, model, setups, benchmarks):
    name, _, names = table.partition(": ")
    chosen = resolve_table(name)
    rows = tables.rows_to_measure(chosen, model, names.split("|") if names else [])
    wanted = list(tables.configs_to_run(rows, chosen.columns, BenchmarkConfig("mmlu")).values())
    found = [((each.method, each.alpha, each.intervention), each.benchmark) for each in wanted]
    assert found == [*product(setups, benchmarks)]
    assert len({(each.benchmark, each.method, each.ordering, each.alpha, str(each.settings)) for each in wanted}) >= 2


def test_a_table_is_measured_cell_by_cell(files, lm, tmp_path):
    table = resolve_table("pine-table-2")
    unknown = tables.rows_to_measure(table, None)  # every method, and no published number
    assert [row.name for row in unknown] == ["NIA", "PCW", "SP", "PINE", "permutation"]
    assert all(value is None for row in unknown for value in row.values)
    base = BenchmarkConfig("reward-bench", data=files, max_new_tokens=3)
    found = tables.reproduce(table, base, tmp_path, names=["PCW", "PINE", "permutation"], model=lm)
    cells = [(each.row, each.column) for each in found]
    assert cells[:2] == [("PCW", "Full, gold first"), ("PCW", "Full, gold second")]
    assert all(each.ours == 50 and each.published is None for each in found)  # it gives no verdict
    assert len(list(tmp_path.iterdir())) == 3


def test_the_rows_of_an_intervention_are_measured_with_parameters_of_a_file(files, lm, tmp_path):
    parameters = tmp_path / "found.json"
    HiddenScaling(3, -1.0, [1]).save(parameters)
    table = resolve_table("hidden-scaling-table-4")
    base = BenchmarkConfig("mmlu", data=files, limit=1, overflow="trim_segments", intervention=str(parameters))
    rows = tuple(replace(row, values=row.values[:1]) for row in table.rows)
    found = tables.reproduce(replace(table, columns=table.columns[:1], rows=rows), base, tmp_path / "runs", model=lm)
    assert [each.row for each in found] == ["w/ Ours"]
    assert found[0].ours is not None
    (config,) = [json.loads(path.read_text()) for path in (tmp_path / "runs").glob("*/config.json")]
    assert config["intervention"].items() >= {"dimensions": [3], "factor": -1.0, "layers": [1]}.items()


@pytest.mark.parametrize(
    ("model", "rotor", "said"),
    [
        ("Llama-3.1-8B-Instruct", "RoToR-lexical", "accuracy {} plain, {} PINE, **{}** RoToR"),
        ("Qwen1.5-4B-Chat", "RoToR", "Qwen1.5-4B-Chat loses: {}, {}, {}"),
    ],
)
def test_the_published_figures_of_the_readme_are_those_of_the_paper(model, rotor, said):
    rows = [row_of("rotor-table-1", model, name)[1] for name in ("Original", "PINE", rotor)]
    chosen = [[value for label, value in cells.items() if label.startswith("30 documents")] for cells in rows]
    assert said.format(*(f"{sum(values) / len(values):.1f}" for values in chosen)) in README


def test_the_page_of_the_effect_and_the_line_of_the_demo_are_written_from_the_figures_stored_beside_them():
    """They say what was measured, and when, and nothing else."""
    folder = ROOT / "cookbook" / "effect"
    measured, page = json.loads((folder / "effect.json").read_text("utf-8")), runpy.run_path(str(folder / "page.py"))
    published = page["published_slots"](measured["documents"])
    assert page["describe"](measured, published) == (folder / "README.md").read_text("utf-8")
    assert published["Qwen1.5-7B-Chat"]["plain"] == [73.1, 58.6, 55.8, 53.3, 53.2, 52.5, 57.5]
    line = [sys.executable, str(folder / "page.py"), "--line"]
    said = subprocess.run(line, check=True, capture_output=True, text=True, timeout=60).stdout
    assert f"{measured['questions']} questions" in said
    assert f"measured on {measured['date']}, not just now" in said
    plain, rotor = (measured["readers"][name] for name in ("plain model", "RoToR"))
    flips = plain["flips"]
    assert f"plain model {100 * flips['value']:.1f} ({100 * flips['low']:.1f} to" in said
    assert f"**{100 * flips['value']:.1f}%** plain, **{100 * rotor['flips']['value']:.0f}** RoToR" in README
    assert f"accuracy {100 * plain['mean']['value']:.1f} and {100 * rotor['mean']['value']:.1f}%" in README
