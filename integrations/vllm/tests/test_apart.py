"""vLLM's prefix cache keeps plain keys, arranged ones, those of different sets and those of tenants apart.

Log-probabilities tell: rounding moves them by 1e-5, and keys of another arrangement by 0.01 and more.
"""

from dataclasses import replace
from itertools import pairwise

import pytest
from invariant_rag import Prompt

from tests.pairs import LENGTH, MOVED, Pair
from vllm_invariant_rag import RequestRefused


@pytest.fixture(scope="module")
def ask(llm):
    """Send token ids as any client of vLLM does, with `kv_transfer_params` or without."""

    def send(*requests, **more):
        from vllm import SamplingParams

        fields = {"max_tokens": 16, "min_tokens": 16, "ignore_eos": True, "logprobs": 0, "temperature": 0, **more}
        params = [
            SamplingParams(extra_args=reading and {"kv_transfer_params": reading}, **fields) for _, reading in requests
        ]
        return llm.generate([{"prompt_token_ids": ids} for ids, _ in requests], params, use_tqdm=False)

    return send


def request_of(pair, prompt):
    made = pair.there._request(pair.there.prepare_to_generate(prompt, 16), {"max_tokens": 16, "n": 1, "logprobs": 0})
    return list(made.token_ids), made.kv_transfer_params


def distance(output, logprobs):
    (one,) = output.outputs
    assert one.finish_reason == "length"
    found = [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
    return max(abs(a - b) for a, b in zip(found, logprobs, strict=True))


@pytest.mark.parametrize("arranged_first", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_plain_and_arranged_requests_of_the_same_tokens_do_not_meet(arranged_first, together, ask, pair):
    prompt = pair.prompt(200 + 2 * arranged_first + together, 8)
    ids, reading = request_of(pair, prompt)
    models = {True: pair.here, False: pair.using("sequential").here}
    expected = {kind: model.generate(prompt, **LENGTH).logprobs for kind, model in models.items()}
    differ = max(abs(a - b) for a, b in zip(expected[True], expected[False], strict=True))
    assert differ > 10 * MOVED, "the two methods have to be told apart"
    kinds = (arranged_first, not arranged_first) * 2
    requests = [(ids, reading if kind else None) for kind in kinds]
    outputs = ask(*requests) if together else [ask(each)[0] for each in requests]
    assert all(distance(output, expected[kind]) < MOVED for kind, output in zip(kinds, outputs, strict=True))


def test_equal_tokens_in_other_sets_do_not_meet(pair):
    """In RoToR the first segments attend to those behind them, too."""
    tokens = list(range(30, 190))
    for cuts in ((0, 40, 80, 120), (0, 40, 80, 120, 160), (0, 40, 80, 120), (0, 64, 120), (0, 40, 120)):
        segments = [tokens[start:stop] for start, stop in pairwise(cuts)]
        pair.using("rotor", "given").alike(Prompt(prefix=[5, 6, 7], segments=segments, suffix=[8, 9]))


@pytest.mark.parametrize("method", ["rotor", "sequential"])
def test_tenants_answer_alike_and_learn_nothing_of_each_other(method, pair):
    cached, chosen = [], pair.using(method)
    for tenant in ("ada", "ivo", "ada", "ivo"):
        (answer,) = Pair(chosen.here, chosen.there.with_tenant(tenant)).alike(pair.prompt(240, 9))
        cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, False, True, True]


def test_a_salt_is_not_told_and_differs_for_every_engine(core, pair, monkeypatch):
    """Whoever knows a set and its tenant cannot leave plain keys where arranged ones are expected."""
    connector, salts = core.scheduler.connector, []
    arrived = connector.on_new_request

    def see(request):
        arrived(request)
        salts.append(request.cache_salt)

    monkeypatch.setattr(connector, "on_new_request", see)
    for secret in (connector._secret, "of another engine"):
        monkeypatch.setattr(connector, "_secret", secret)
        pair.there.generate(pair.prompt(245), max_new_tokens=1)
    assert [len(salt) for salt in {*salts}] == [64, 64]


GOOD = {"method": "rotor", "texts": [4, 9], "sets": [[20, 20]]}
FORGED = [
    *("rotor", {}, {**GOOD, "more": 1}, {**GOOD, "method": "rotar"}, {**GOOD, "method": ["rotor"]}),
    *({**GOOD, "texts": each} for each in ([4], [4, 0], [4, "9"], [4, -9])),
    *({**GOOD, "sets": each} for each in ([[20, True]], [20, 20], [[20, 10**12]], [[0] * 10**6])),
]


@pytest.mark.parametrize("reading", FORGED, ids=lambda reading: str(reading)[:80])
def test_a_forged_reading_fails_its_request_and_harms_nobody(reading, ask, pair):
    prompts, params = [pair.prompt(seed, 8) for seed in (250, 251)], {"invariant_rag": reading}
    expected = [pair.here.generate(prompt, **LENGTH).logprobs for prompt in prompts]
    good, other = (request_of(pair, prompt) for prompt in prompts)
    for _ in range(2):  # the second time, blocks of the first could be found
        first, failed, second = ask(good, (good[0], params), other)
        assert (failed.outputs[0].finish_reason, list(failed.outputs[0].token_ids)) == ("error", [])
        assert distance(first, expected[0]) < MOVED
        assert distance(second, expected[1]) < MOVED
    prepared = pair.there.prepare_to_generate(prompts[0], 4)
    request = pair.there._request(prepared, {"max_tokens": 4, "n": 1, "logprobs": 0})
    with pytest.raises(RequestRefused):
        pair.there._engine.complete([request, replace(request, kv_transfer_params=params)])


def test_log_probabilities_of_the_prompt_are_those_of_the_arranged_one(ask, pair):
    ids, reading = request_of(pair, pair.prompt(260, 8))
    (output,) = ask((ids, reading), max_tokens=1, min_tokens=1, prompt_logprobs=0)
    logits = pair.here.logits(pair.prompt(260, 8))[:-1].log_softmax(-1)
    suffix = ids[-len(logits) :]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[-len(suffix) :], suffix, strict=True)]
    expected = [float(row[token]) for row, token in zip(logits, suffix, strict=True)]
    assert found == pytest.approx(expected, abs=MOVED)
