"""The serving benchmark: both systems are asked in every round, and ratios are of the same one. No time is judged."""

from __future__ import annotations

from invariant_rag import InvariantModel
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag_benchmarks.config import ServingConfig
from invariant_rag_benchmarks.vllm import (
    ARRANGED,
    PLAIN,
    ServingRow,
    measure_serving,
    prompts,
    ratios,
)


def test_every_system_is_asked_in_every_round_and_tenants_are_new(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    tenants: list[str] = []

    def connect(tenant: str) -> InvariantModel:
        tenants.append(tenant)
        return InvariantModel(chat_llama, tokenizer, method="rotor")

    config = ServingConfig(clients=(1, 2), questions=(1, 2), requests=2, segments=2, new_tokens=2, rounds=2)
    rows = measure_serving(connect, config)
    assert {(row.clients, row.questions, row.system, row.state) for row in rows} == {
        (clients, questions, system, state)
        for clients in (1, 2)
        for questions in (1, 2)
        for system in (PLAIN, ARRANGED)
        for state in ("cold", "warm")
    }
    assert all(len(times) == 2 and min(times) > 0 for row in rows for times in row.measured.values())
    assert len(set(tenants)) == len(tenants) == 9


def test_requests_of_a_round_ask_about_each_set_in_other_orders() -> None:
    lm = InvariantModel.from_pretrained()
    made = prompts(lm, ServingConfig(requests=8, segments=4), 4, seed=1)
    orders = {tuple(each.text for each in prompt.segments) for prompt in made}
    assert len({frozenset(order) for order in orders}) == 2
    assert len(made) == 8
    assert len(orders) > 4


def test_ratios_are_medians_over_rounds_against_the_plain_requests_in_the_same_state() -> None:
    def row(system: str, state: str, throughput: list[float], first: list[float]) -> ServingRow:
        measured = {"throughput": throughput, "first token": first, "between tokens": [1.0, 1.0, 1.0]}
        return ServingRow(1, 4, system, state, measured)

    rows = [
        row(PLAIN, "cold", [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]),
        row(ARRANGED, "cold", [2.0, 2.0, 2.0], [0.5, 0.5, 0.25]),
        row(PLAIN, "warm", [8.0, 8.0, 8.0], [1.0, 1.0, 1.0]),
        row(ARRANGED, "warm", [8.0, 8.0, 4.0], [1.0, 1.0, 2.0]),
    ]
    cold, warm = ratios(rows)
    assert (cold["state"], cold["throughput"], cold["first token"]) == ("cold", [1, 0.5, 2], [0.5, 0.25, 0.5])
    assert (warm["state"], warm["throughput"], warm["first token"]) == ("warm", [1, 0.5, 1], [1, 1, 2])
