"""vLLM's prefix cache keeps plain keys, arranged ones, those of different sets and those of tenants apart.

Log-probabilities tell: rounding moves them by 1e-5, and keys of another arrangement by 0.01 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from invariant_rag import Prompt
from invariant_rag.errors import InvalidChoice

from tests.pairs import LENGTH, MOVED, Pair
from vllm_invariant_rag import RequestRefused

Ask = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ask(llm: Any) -> Ask:
    """Send token ids as any client of vLLM does, with `kv_transfer_params` or without."""

    def send(*requests: tuple[list[int], Any], **more: Any) -> list[Any]:
        from vllm import SamplingParams

        fields = {"max_tokens": 16, "min_tokens": 16, "ignore_eos": True, "logprobs": 0, **more}
        params = [
            SamplingParams(temperature=0, extra_args=reading and {"kv_transfer_params": reading}, **fields)
            for _, reading in requests
        ]
        return llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)

    return send


def request_of(pair: Pair, prompt: Prompt) -> tuple[list[int], Any]:
    made = pair.there._request(pair.there.prepare_to_generate(prompt, 16), {"max_tokens": 16})
    return list(made.token_ids), made.kv_transfer_params


def distance(output: Any, logprobs: tuple[float, ...]) -> float:
    (one,) = output.outputs
    assert one.finish_reason == "length"
    found = [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
    return max(abs(a - b) for a, b in zip(found, logprobs, strict=True))


@pytest.mark.parametrize("arranged_first", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_plain_and_arranged_requests_of_the_same_tokens_do_not_meet(
    arranged_first: bool, together: bool, ask: Ask, pair: Pair
) -> None:
    prompt = pair.prompt(200 + 2 * arranged_first + together, 8)
    ids, reading = request_of(pair, prompt)
    models = {True: pair.here, False: pair.using("sequential").here}
    expected = {kind: model.generate(prompt, **LENGTH).logprobs for kind, model in models.items()}
    differ = max(abs(a - b) for a, b in zip(expected[True], expected[False], strict=True))
    assert differ > 10 * MOVED, "the two methods have to be told apart"
    kinds = (arranged_first, not arranged_first) * 2
    requests = [(ids, reading if kind else None) for kind in kinds]
    outputs = ask(*requests) if together else [ask(each)[0] for each in requests]
    for kind, output in zip(kinds, outputs, strict=True):
        assert distance(output, expected[kind]) < MOVED


def test_equal_tokens_in_other_sets_do_not_meet(pair: Pair) -> None:
    """In RoToR the first segments attend to those behind them, too."""
    tokens = list(range(30, 190))
    for cuts in ((0, 40, 80, 120), (0, 40, 80, 120, 160), (0, 40, 80, 120), (0, 64, 120), (0, 40, 120)):
        segments = [tokens[start:stop] for start, stop in pairwise(cuts)]
        pair.using("rotor", "given").alike(Prompt(prefix=[5, 6, 7], segments=segments, suffix=[8, 9]))


@pytest.mark.parametrize("method", ["rotor", "sequential"])
def test_tenants_answer_alike_and_learn_nothing_of_each_other(method: str, pair: Pair) -> None:
    cached, chosen = [], pair.using(method)
    for tenant in ("ada", "ivo", "ada", "ivo"):
        (answer,) = Pair(chosen.here, chosen.there.with_tenant(tenant)).alike(pair.prompt(240, 9))
        cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, False, True, True]
    with pytest.raises(InvalidChoice, match="tenant"):
        pair.there.with_tenant("\ud800")


def test_a_salt_is_not_told_and_differs_for_every_engine(llm: Any, pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever knows a set and its tenant cannot leave plain keys where arranged ones are expected."""
    connector, salts = llm.llm_engine.engine_core.engine_core.scheduler.connector, []
    arrived = connector.on_new_request

    def see(request: Any) -> None:
        arrived(request)
        salts.append(request.cache_salt)

    monkeypatch.setattr(connector, "on_new_request", see)
    for secret in (connector._secret, "of another engine"):
        monkeypatch.setattr(connector, "_secret", secret)
        pair.there.generate(pair.prompt(245), max_new_tokens=1)
    assert len(set(salts)) == 2
    assert all(len(salt) == 64 for salt in salts)


_GOOD: dict[str, Any] = {"method": "rotor", "texts": [4, 9], "sets": [[20, 20]]}
_FORGED: list[Any] = [
    "rotor",
    {},
    {**_GOOD, "more": 1},
    {**_GOOD, "method": "rotar"},
    {**_GOOD, "method": ["rotor"]},
    {**_GOOD, "texts": [4]},
    {**_GOOD, "texts": [4, 0]},
    {**_GOOD, "texts": [4, "9"]},
    {**_GOOD, "texts": [4, -9]},
    {**_GOOD, "sets": [[20, True]]},
    {**_GOOD, "sets": [20, 20]},
    {**_GOOD, "sets": [[20, 10**12]]},
    {**_GOOD, "sets": [[0] * 10**6]},
]


@pytest.mark.parametrize("reading", _FORGED)
def test_a_forged_reading_fails_its_request_and_harms_nobody(reading: Any, ask: Ask, pair: Pair) -> None:
    prompts = [pair.prompt(seed, 8) for seed in (250, 251)]
    expected = [pair.here.generate(prompt, **LENGTH).logprobs for prompt in prompts]
    good, other = (request_of(pair, prompt) for prompt in prompts)
    for _ in range(2):  # the second time, blocks of the first could be found
        first, failed, second = ask(good, (good[0], {"invariant_rag": reading}), other)
        assert (failed.outputs[0].finish_reason, list(failed.outputs[0].token_ids)) == ("error", [])
        assert distance(first, expected[0]) < MOVED
        assert distance(second, expected[1]) < MOVED


def test_a_refused_request_is_a_typed_error_and_the_next_one_runs(pair: Pair) -> None:
    prompt, on_vllm = pair.prompt(255), pair.there
    request = on_vllm._request(on_vllm.prepare_to_generate(prompt, 4), {"max_tokens": 4, "n": 1, "logprobs": 0})
    forged = replace(request, kv_transfer_params={"invariant_rag": {**_GOOD, "texts": [4, 0]}})
    with pytest.raises(RequestRefused):
        on_vllm._engine.complete([request, forged])
    pair.alike(prompt)


def test_log_probabilities_of_the_prompt_are_those_of_the_arranged_one(ask: Ask, pair: Pair) -> None:
    ids, reading = request_of(pair, pair.prompt(260, 8))
    (output,) = ask((ids, reading), max_tokens=1, min_tokens=1, prompt_logprobs=0)
    logits = pair.here.logits(pair.prompt(260, 8))[:-1].log_softmax(-1)
    suffix = ids[-len(logits) :]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[-len(suffix) :], suffix, strict=True)]
    expected = [float(row[token]) for row, token in zip(logits, suffix, strict=True)]
    assert found == pytest.approx(expected, abs=MOVED)
