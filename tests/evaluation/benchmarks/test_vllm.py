"""The serving benchmark: every system is asked in every round, and ratios are of the same one. No time is judged."""

from __future__ import annotations

from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel
from invariant_rag.evaluation.benchmarks.vllm import (
    ARRANGED,
    LOCAL,
    PLAIN,
    ServingConfig,
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

    config = ServingConfig(clients=(1, 2), requests=2, sets=1, segments=2, new_tokens=2, batch=2, rounds=2)
    rows = measure_serving(connect, config)
    assert [(row.clients, row.system, row.state) for row in rows] == [
        (clients, system, state)
        for clients in (1, 2)
        for system in (PLAIN, ARRANGED, LOCAL)
        for state in ("cold", "warm")
    ]
    assert all(len(row.throughput) == len(row.first_token) == 2 and min(row.throughput) > 0 for row in rows)
    assert len(set(tenants)) == len(tenants) == 5


def test_requests_of_a_round_ask_about_each_set_in_other_orders(tokenizer: PreTrainedTokenizerFast) -> None:
    lm = InvariantModel.from_pretrained()
    made = prompts(lm, ServingConfig(requests=8, sets=2, segments=4), seed=1)
    orders = {tuple(each.text for each in prompt.segments) for prompt in made}
    assert len({frozenset(order) for order in orders}) == 2
    assert len(made) == 8
    assert len(orders) > 4


def test_ratios_are_medians_over_rounds_against_the_plain_requests_in_the_same_state() -> None:
    rows = [
        ServingRow(1, PLAIN, "cold", [1.0, 2.0, 4.0], [1.0, 1.0, 1.0]),
        ServingRow(1, ARRANGED, "cold", [2.0, 2.0, 2.0], [0.5, 0.5, 0.25]),
        ServingRow(1, PLAIN, "warm", [8.0, 8.0, 8.0], [1.0, 1.0, 1.0]),
        ServingRow(1, ARRANGED, "warm", [8.0, 8.0, 4.0], [1.0, 1.0, 2.0]),
    ]
    found = [(each["throughput"], each["lowest"], each["highest"], each["first token"]) for each in ratios(rows)]
    assert found == [(1, 1, 1, 1), (1, 0.5, 2, 0.5), (1, 1, 1, 1), (1, 0.5, 1, 1)]
