"""vLLM's prefix cache keeps plain keys, arranged ones, those of different sets and those of tenants apart.

Log-probabilities tell: rounding moves them by 1e-5, and keys of another arrangement by 0.01 and more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidChoice

from tests.documents import documents, question
from tests.test_in_process import LENGTH, ROUNDING, assert_same
from vllm_invariant_rag import RequestRefused, VLLMBackend

Ask = Callable[..., list[Any]]


def prompt_of(lm: InvariantModel, seed: int, count: int = 8) -> Prompt:
    segments = documents(count, seed)
    return lm.chat_prompt(question(segments), segments)


@pytest.fixture(scope="module")
def ask(llm: Any) -> Ask:
    """Send token ids as any client of vLLM does, with `kv_transfer_params` or without."""

    def send(*requests: tuple[list[int], Any], salt: str = "") -> list[Any]:
        from vllm import SamplingParams

        prompts = [{"prompt_token_ids": ids, **({"cache_salt": salt} if salt else {})} for ids, _ in requests]
        params = [
            SamplingParams(
                temperature=0, max_tokens=16, min_tokens=16, ignore_eos=True, logprobs=0,
                extra_args=None if reading is None else {"kv_transfer_params": reading},
            )
            for _, reading in requests
        ]  # fmt: skip
        return [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]

    return send


def request_of(backend: VLLMBackend, prompt: Prompt) -> tuple[list[int], Any]:
    made = backend._request(backend.prepare_to_generate(prompt, 16), {"max_tokens": 16})
    return list(made.token_ids), made.kv_transfer_params


def distance(output: Any, logprobs: tuple[float, ...]) -> float:
    assert output.finish_reason == "length"
    found = [entry[token].logprob for entry, token in zip(output.logprobs, output.token_ids, strict=True)]
    return max(abs(a - b) for a, b in zip(found, logprobs, strict=True))


@pytest.mark.parametrize("arranged_first", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_plain_and_arranged_requests_of_the_same_tokens_do_not_meet(
    arranged_first: bool, together: bool, ask: Ask, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    prompt = prompt_of(lm, seed=200 + 2 * arranged_first + together)
    ids, reading = request_of(on_vllm, prompt)
    sequential = lm.with_method("sequential", ordering="lexical")
    expected = {True: lm.generate(prompt, **LENGTH).logprobs, False: sequential.generate(prompt, **LENGTH).logprobs}
    differ = max(abs(a - b) for a, b in zip(expected[True], expected[False], strict=True))
    assert differ > 10 * ROUNDING, "the two methods have to be told apart"
    kinds = (arranged_first, not arranged_first) * 2
    requests = [(ids, reading if kind else None) for kind in kinds]
    outputs = ask(*requests) if together else [ask(each)[0] for each in requests]
    for kind, output in zip(kinds, outputs, strict=True):
        assert distance(output, expected[kind]) < ROUNDING


def test_equal_tokens_in_other_sets_do_not_meet(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    """In RoToR the first segments attend to those behind them, too."""
    here, there = lm.with_method("rotor", ordering="given"), on_vllm.with_method("rotor", ordering="given")
    tokens = list(range(30, 190))
    for cuts in ((0, 40, 80, 120), (0, 40, 80, 120, 160), (0, 40, 80, 120), (0, 64, 120), (0, 40, 120)):
        segments = [tokens[start:stop] for start, stop in pairwise(cuts)]
        prompt = Prompt(prefix=[5, 6, 7], segments=segments, suffix=[8, 9])
        assert_same(there.generate(prompt, **LENGTH), here.generate(prompt, **LENGTH))


def test_methods_do_not_meet(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, seed=230)
    for method in ("isolated", "rotor", "isolated", "set-based", "rotor"):
        here, there = (each.with_method(method, ordering="lexical") for each in (lm, on_vllm))
        assert_same(there.generate(prompt, **LENGTH), here.generate(prompt, **LENGTH))


@pytest.mark.parametrize("method", ["rotor", "sequential"])
def test_tenants_answer_alike_and_learn_nothing_of_each_other(
    method: str, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    here, there = (each.with_method(method, ordering="lexical") for each in (lm, on_vllm))
    prompt = prompt_of(lm, seed=240, count=9)
    expected, cached = here.generate(prompt, **LENGTH), []
    for tenant in ("ada", "ivo", "ada", "ivo"):
        answer = there.with_tenant(tenant).generate(prompt, **LENGTH)
        assert_same(answer, expected)
        cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, False, True, True]
    with pytest.raises(InvalidChoice, match="tenant"):
        on_vllm.with_tenant("\ud800")


def test_a_salt_is_not_told_and_differs_for_every_engine(
    llm: Any, lm: InvariantModel, on_vllm: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever knows a set and its tenant cannot leave plain keys where arranged ones are expected."""
    connector, salts = llm.llm_engine.engine_core.engine_core.scheduler.connector, []
    arrived = connector.on_new_request

    def see(request: Any) -> None:
        arrived(request)
        salts.append(request.cache_salt)

    monkeypatch.setattr(connector, "on_new_request", see)
    on_vllm.generate(prompt_of(lm, 245), max_new_tokens=1)
    monkeypatch.setattr(connector, "_secret", "of another engine")
    on_vllm.generate(prompt_of(lm, 245), max_new_tokens=1)
    assert len(set(salts)) == 2
    assert all(len(salt) == 64 for salt in salts)


_GOOD: dict[str, Any] = {"method": "rotor", "texts": [4, 9], "sets": [[20, 20]]}


@pytest.mark.parametrize(
    "reading",
    [
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
    ],
)
def test_a_forged_reading_fails_its_request_and_harms_nobody(
    reading: Any, ask: Ask, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    prompts = [prompt_of(lm, seed) for seed in (250, 251)]
    expected = [lm.generate(prompt, **LENGTH).logprobs for prompt in prompts]
    good, other = (request_of(on_vllm, prompt) for prompt in prompts)
    for _ in range(2):  # the second time, blocks of the first could be found
        first, failed, second = ask(good, (good[0], {"invariant_rag": reading}), other)
        assert (failed.finish_reason, list(failed.token_ids)) == ("error", [])
        assert distance(first, expected[0]) < ROUNDING
        assert distance(second, expected[1]) < ROUNDING


def test_a_refused_request_is_a_typed_error_and_the_next_one_runs(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, 255)
    fields = {"max_tokens": 4, "n": 1, "logprobs": 0}
    request = on_vllm._request(on_vllm.prepare_to_generate(prompt, 4), fields)
    forged = replace(request, kv_transfer_params={"invariant_rag": {**_GOOD, "texts": [4, 0]}})
    with pytest.raises(RequestRefused):
        on_vllm._engine.complete([request, forged])
    assert_same(on_vllm.generate(prompt, **LENGTH), lm.generate(prompt, **LENGTH))


def test_log_probabilities_of_the_prompt_are_those_of_the_arranged_one(
    llm: Any, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    from vllm import SamplingParams

    prompt = prompt_of(lm, 260)
    ids, reading = request_of(on_vllm, prompt)
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, extra_args={"kv_transfer_params": reading})
    (output,) = llm.generate([{"prompt_token_ids": ids}], [params], use_tqdm=False)
    logits = lm.logits(prompt)[:-1].log_softmax(-1)
    suffix = ids[-len(logits) :]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[-len(suffix) :], suffix, strict=True)]
    expected = [float(row[token]) for row, token in zip(logits, suffix, strict=True)]
    assert found == pytest.approx(expected, abs=ROUNDING)
