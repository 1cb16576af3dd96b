"""The speed benchmark: what it measures is there, and ratios are of the same run. Nothing here judges a time."""

import json
import runpy
from itertools import product
from pathlib import Path

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.cli import app
from invariant_rag.methods import METHODS
from typer.testing import CliRunner

from invariant_rag_benchmarks import speed
from invariant_rag_benchmarks.config import ServingConfig, SpeedConfig


def test_the_floor_is_what_the_arithmetic_says():
    for tokens, floor in ((3000, 1.05), (10_000, 1.16)):
        found = speed.bidirectional_floor(SpeedConfig(shape="8b-layer", tokens=tokens))
        assert found == pytest.approx(floor, abs=0.01)


@pytest.mark.parametrize(("tokens", "segments"), [(300, 2), (2500, 20), (2500, 200)])
def test_prompts_have_the_tokens_and_segments_that_were_asked_for(tokens, segments):
    prompt = speed.random_prompt(SpeedConfig(tokens=tokens, segments=segments))
    lengths = [len(each.token_ids or ()) for each in prompt.segments]
    assert len(lengths) == segments
    assert abs(sum(lengths) + len(prompt.prefix) + len(prompt.suffix) - tokens) <= segments
    assert max(lengths) <= 2 * min(lengths) + 1


def test_a_ratio_is_the_median_over_rounds_of_this_way_over_the_plain_model_in_the_same_round():
    plain, slow = speed.SpeedResult(peak=4, flops=10), speed.SpeedResult(peak=2, flops=30)
    for step in speed.STEPS:
        plain.seconds[step], slow.seconds[step] = [1.0, 2.0, 4.0], [4.0, 4.0, 4.0]
    assert slow.ratios_to(plain) == {**dict.fromkeys(speed.STEPS, 2.0), "peak": 0.5, "flops": 3.0}


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
    result = CliRunner().invoke(app, [*words.split(), *methods, "--out", str(tmp_path)])
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


def test_flops_are_those_of_the_arithmetic():
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
    words = "bench speed --shape tiny --tokens 120 --segments 3 --new-tokens 1 --repeats 1 --json"
    (measured,) = json.loads(CliRunner().invoke(app, words.split()).stdout)
    assert [row["name"] for row in measured["rows"]] == [
        *("plain", *(name for name in METHODS if name != "sequential")),
        "rotor, warm set",
    ]
    for name in ("abacus", "auto"):
        result = CliRunner().invoke(app, [*words.split(), "--device", name])
        assert (result.exit_code, name in result.stderr) == (2, True), result.output


# --- on a server ---


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


def test_ratios_are_medians_over_rounds_against_the_plain_requests_in_the_same_state():
    rows = {
        (1, 4, speed.PLAIN, "cold"): [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (4.0, 1.0, 1.0)],
        (1, 4, speed.ARRANGED, "cold"): [(2.0, 0.5, 1.0), (2.0, 0.5, 1.0), (2.0, 0.25, 1.0)],
        (1, 4, speed.PLAIN, "warm"): [(8.0, 1.0, 1.0)] * 3,
        (1, 4, speed.ARRANGED, "warm"): [(8.0, 1.0, 1.0), (8.0, 1.0, 1.0), (4.0, 2.0, 1.0)],
    }
    cold, warm = speed.ratios(rows)
    assert (cold["state"], cold["throughput"], cold["first token"]) == ("cold", (1, 0.5, 2), (0.5, 0.25, 0.5))
    assert (warm["state"], warm["throughput"], warm["first token"]) == ("warm", (1, 0.5, 1), (1, 1, 2))
