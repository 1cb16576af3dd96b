"""The serving benchmark: both systems are asked in every round, and ratios are of the same one. No time is judged."""

from __future__ import annotations

from itertools import product

from invariant_rag import InvariantModel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag_benchmarks.config import ServingConfig
from invariant_rag_benchmarks.vllm import ARRANGED, MEASURES, PLAIN, STATES, measure_serving, prompts, ratios


def test_every_system_is_asked_in_every_round_and_tenants_are_new(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    tenants: list[str] = []

    def connect(tenant: str) -> InvariantModel:
        tenants.append(tenant)
        return InvariantModel(chat_llama, tokenizer, method="rotor")

    config = ServingConfig(clients=(1, 2), questions=(1, 2), requests=2, segments=2, new_tokens=2, rounds=2)
    measured = measure_serving(connect, config)
    names = ("clients", "questions", "system", "state")
    asked = {tuple(row[name] for name in names): row["measured"] for row in measured["rows"]}
    assert asked.keys() == {*product((1, 2), (1, 2), (PLAIN, ARRANGED), STATES)}
    assert all(tuple(times) == MEASURES for times in asked.values())
    assert all(len(times) == 2 and min(times) > 0 for each in asked.values() for times in each.values())
    assert len(set(tenants)) == len(tenants) == 9
    assert (measured["setting"]["rounds"], len(measured["ratios"])) == (2, 8)


def test_requests_of_a_round_ask_about_each_set_in_other_orders() -> None:
    lm = InvariantModel.from_pretrained()
    made = prompts(lm, ServingConfig(requests=8, segments=4), 4, seed=1)
    orders = {tuple(each.text for each in prompt.segments) for prompt in made}
    assert len({frozenset(order) for order in orders}) == 2
    assert len(made) == 8
    assert len(orders) > 4


def test_ratios_are_medians_over_rounds_against_the_plain_requests_in_the_same_state() -> None:
    rows = {
        (1, 4, PLAIN, "cold"): [(1.0, 1.0, 1.0), (2.0, 1.0, 1.0), (4.0, 1.0, 1.0)],
        (1, 4, ARRANGED, "cold"): [(2.0, 0.5, 1.0), (2.0, 0.5, 1.0), (2.0, 0.25, 1.0)],
        (1, 4, PLAIN, "warm"): [(8.0, 1.0, 1.0)] * 3,
        (1, 4, ARRANGED, "warm"): [(8.0, 1.0, 1.0), (8.0, 1.0, 1.0), (4.0, 2.0, 1.0)],
    }
    cold, warm = ratios(rows)
    assert (cold["state"], cold["throughput"], cold["first token"]) == ("cold", [1, 0.5, 2], [0.5, 0.25, 0.5])
    assert (warm["state"], warm["throughput"], warm["first token"]) == ("warm", [1, 0.5, 1], [1, 1, 2])
