"""vLLM in this process answers as `InvariantModel.generate` does, and never mixes arranged and plain keys."""

from __future__ import annotations

import random
from itertools import pairwise, permutations
from typing import Any

import pytest
from invariant_rag import Generation, InvariantModel, Prompt, SegmentSet
from invariant_rag.errors import InvalidOption, UnsupportedCombination
from invariant_rag.methods import APE, METHODS
from invariant_rag.testing.rounding import rounding

from tests.documents import documents, question
from vllm_invariant_rag import VLLMBackend

SUPPORTED = sorted(METHODS)
LENGTH: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}


def _rounding() -> float:
    """How far rounding may move a log-probability: of the methods that weight keys, whose answers it moves most."""
    lm, segments = InvariantModel.from_pretrained(), documents(10, seed=10)
    prompt = lm.chat_prompt(question(segments), segments)
    return max(
        rounding(lm.with_method(name, ordering="lexical").generate, prompt, **LENGTH) for name in ("ape", "structured")
    )


ROUNDING = _rounding()


def assert_same(ours: Generation, theirs: Generation, tolerance: float = ROUNDING) -> None:
    """The same tokens, and log-probabilities up to rounding. Another method moves them by 0.1 and more."""
    assert ours.token_ids == theirs.token_ids
    assert ours.text == theirs.text
    assert ours.finish_reason == theirs.finish_reason
    assert ours.order == theirs.order
    assert max(abs(a - b) for a, b in zip(ours.logprobs, theirs.logprobs, strict=True)) < tolerance


def prompt_of(lm: InvariantModel, count: int, seed: int) -> Prompt:
    segments = documents(count, seed)
    return lm.chat_prompt(question(segments), segments)


@pytest.mark.parametrize("method", SUPPORTED)
def test_every_method_gives_the_tokens_of_generate_cold_and_from_prefixes_that_end_inside_a_set(
    method: str, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    chosen, backend = lm.with_method(method, ordering="lexical"), on_vllm.with_method(method, ordering="lexical")
    segments = [documents(count, seed=count) for count in (5, 9)]
    prompts = [lm.chat_prompt(asked, each) for each in segments for asked in (question(each), "How long is it?")]
    for _ in range(2):
        for prompt, answer in zip(prompts, backend.generate(prompts, **LENGTH), strict=True):
            assert_same(answer, chosen.generate(prompt, **LENGTH))
            # Whole blocks are found again, but for those of PINE, which ranks by the queries of whole segments.
            assert answer.usage.cached_tokens % 32 == 0 or method == "sequential"
    assert (answer.usage.cached_tokens > 0) == (method not in {"pine", "pine-reverse"})


@pytest.mark.parametrize("method", ["rotor", "isolated", "pine-in-place"])
def test_a_prefix_that_ends_before_the_last_segment_is_read_from_blocks(
    method: str, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    here, there = (each.with_method(method, ordering="given") for each in (lm, on_vllm))
    segments = [list(range(start, stop)) for start, stop in pairwise((30, 70, 110, 150, 190, 195))]
    for suffix, cached in (([8, 9], 0), ([10, 11], 160)):  # five blocks, of 168 tokens
        prompt = Prompt(prefix=[5, 6, 7], segments=segments, suffix=suffix)
        answer = there.generate(prompt, **LENGTH)
        assert_same(answer, here.generate(prompt, **LENGTH))
        assert answer.usage.cached_tokens == cached


def test_a_method_that_vllm_cannot_look_up_is_refused(on_vllm: VLLMBackend) -> None:
    with pytest.raises(UnsupportedCombination, match="own parameters"):
        on_vllm.with_method(APE(temperature=0.5))


def test_one_to_thirty_segments_give_the_tokens_of_generate(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompts = [prompt_of(lm, count, seed=count) for count in range(1, 31)]
    answers = on_vllm.generate(prompts, **LENGTH)
    assert len(answers) == 30
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer, lm.generate(prompt, **LENGTH))


def test_all_orders_of_four_documents_give_the_same_answer_and_are_read_once(
    lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    segments = documents(4, seed=40)
    expected = lm.generate(lm.chat_prompt(question(segments), segments), **LENGTH)
    read = []
    for order in permutations(segments):
        answer = on_vllm.generate(lm.chat_prompt(question(segments), list(order)), **LENGTH)
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING)
        read.append(not answer.usage.cached_tokens)
    assert read == [True] + [False] * 23


def test_a_batch_mixes_plain_and_arranged_requests(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompts = [prompt_of(lm, count, seed=70) for count in (0, 1, 3, 8)] * 2
    methods = ["rotor", "isolated", "sequential"]
    for method in methods:
        chosen = lm.with_method(method, ordering="lexical")
        answers = on_vllm.with_method(method, ordering="lexical").generate(prompts, **LENGTH)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert_same(answer, chosen.generate(prompt, **LENGTH))


def test_several_sets_and_text_between_them_give_the_tokens_of_generate(
    lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    one, two = documents(3, seed=80), documents(3, seed=81)
    prompt = Prompt.of("Documents: ", SegmentSet(one), "\nMore: ", SegmentSet(two), "\nWhat colour is the flag?")
    for method in ("rotor", "set-based", "parallel-windows", "pine", "isolated"):
        chosen = lm.with_method(method)
        for _ in range(2):
            assert_same(on_vllm.with_method(method).generate(prompt, **LENGTH), chosen.generate(prompt, **LENGTH))


def test_a_stream_is_the_text_of_generate(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, 5, seed=90)
    stream = on_vllm.stream(prompt, **LENGTH)
    pieces = list(stream)
    assert len(pieces) > 3
    assert stream.generation is not None
    assert "".join(pieces) == stream.generation.text
    assert_same(stream.generation, lm.generate(prompt, **LENGTH))


def test_a_closed_stream_ends_its_request_and_the_next_one_runs(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, 5, seed=91)
    stream = on_vllm.stream(prompt, max_new_tokens=600, min_new_tokens=600)
    next(stream)
    stream.close()
    assert_same(on_vllm.generate(prompt, **LENGTH), lm.generate(prompt, **LENGTH))


def test_answers_end_where_those_of_generate_end(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, 4, seed=92)
    for options in ({}, {"stop_strings": ["."]}, {"stop_strings": "and"}, {"repetition_penalty": 1.3}):
        for answer, expected in zip(
            on_vllm.generate([prompt], max_new_tokens=24, **options),
            lm.generate([prompt], max_new_tokens=24, **options),
            strict=True,
        ):
            assert_same(answer, expected)


def test_a_seed_repeats_a_sample_in_every_order(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    segments = documents(4, seed=93)
    options: dict[str, Any] = {"do_sample": True, "temperature": 1.5, "seed": 3, **LENGTH}
    texts = {
        on_vllm.generate(lm.chat_prompt("What is told here?", list(order)), **options).token_ids
        for order in (segments, segments[::-1])
    }
    assert len(texts) == 1


def test_each_prompt_of_a_list_has_its_own_seed(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompts = [prompt_of(lm, 4, seed=61)] * 3
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, **LENGTH}
    alone = [on_vllm.generate(prompts[0], seed=seed, **options).token_ids for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = on_vllm.generate(prompts, seed=[1, 2, 1], **options)
    assert [each.token_ids for each in together] == [alone[0], alone[1], alone[0]]
    with pytest.raises(InvalidOption, match="one for each of 3 prompts, got 2"):
        on_vllm.generate(prompts, seed=[1, 2], **options)


def test_several_samples_of_a_prompt_are_sequences_of_their_own(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 3, **LENGTH}
    answers = on_vllm.generate(prompt_of(lm, 4, seed=96), **options)
    assert len({answer.token_ids for answer in answers}) == len(answers) == 3
    assert all(len(answer.token_ids) == len(answer.logprobs) == 16 for answer in answers)


def test_scores_are_those_of_score(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, 5, seed=94)
    candidates = ["red and white", "red and black", "blue", "33 miles long"]
    assert on_vllm.score(prompt, candidates) == pytest.approx(lm.score(prompt, candidates), abs=ROUNDING)
    assert on_vllm.score(prompt, []) == []


@pytest.mark.parametrize(
    "options",
    [
        {"num_beams": 2},
        {"logits_processor": [print]},
        {"no_repeat_ngram_size": 2},
        {"num_return_sequences": 2},
        {"guidance_scale": 2.0},
    ],
)
def test_what_vllm_cannot_do_is_refused(options: dict[str, Any], lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    with pytest.raises(UnsupportedCombination):
        on_vllm.generate(prompt_of(lm, 2, seed=95), max_new_tokens=4, **options)


@pytest.mark.parametrize("method", ["rotor", "set-based", "pine"])
def test_preempted_requests_resume_with_their_sets(
    method: str, llm: Any, lm: InvariantModel, on_vllm: VLLMBackend, preempted: list[str]
) -> None:
    """Requests that need several times the blocks that there are."""
    chosen, backend = lm.with_method(method, ordering="lexical"), on_vllm.with_method(method, ordering="lexical")
    prompts = [prompt_of(lm, 10, seed=100 + index) for index in range(5)]
    options: dict[str, Any] = {"max_new_tokens": 160, "min_new_tokens": 160}
    answers = backend.generate(prompts, **options)
    assert preempted
    bound = max(ROUNDING, rounding(chosen.generate, prompts[0], **options))  # answers are ten times as long as others
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer, chosen.generate(prompt, **options), bound)


@pytest.fixture
def preempted(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The requests that vLLM preempts from now on."""
    scheduler, seen = llm.llm_engine.engine_core.engine_core.scheduler, []
    original = scheduler._preempt_request

    def preempt(request: Any, *args: Any, **more: Any) -> Any:
        seen.append(request.request_id)
        return original(request, *args, **more)

    monkeypatch.setattr(scheduler, "_preempt_request", preempt)
    return seen


def test_a_thousand_mixed_requests_get_the_answers_that_they_get_alone(
    lm: InvariantModel, on_vllm: VLLMBackend, preempted: list[str]
) -> None:
    """Twenty sets in random orders, by four methods, plain prompts among them, in 64 blocks."""
    rng, methods = random.Random(7), ("rotor", "isolated", "sequential", "pine-in-place")
    sets = [documents(rng.randrange(0, 9), 700 + number) for number in range(20)]
    models = {name: (lm.with_method(name, ordering="lexical"), on_vllm.with_method(name)) for name in methods}
    expected: dict[tuple[str, int], Generation] = {}
    for _ in range(25):
        method = rng.choice(methods)
        chosen, backend = models[method]
        numbers = rng.choices(range(20), k=40)
        orders = [rng.sample(sets[number], len(sets[number])) for number in numbers]
        prompts = [lm.chat_prompt("What is told of it?", order) for order in orders]
        for number, prompt, answer in zip(numbers, prompts, backend.generate(prompts, max_new_tokens=8), strict=True):
            if (method, number) not in expected:
                expected[method, number] = chosen.generate(prompt, max_new_tokens=8)
            assert answer.token_ids == expected[method, number].token_ids, (method, number)


def test_requests_of_all_methods_in_one_step_do_not_meet(llm: Any, lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt, cases = prompt_of(lm, 6, seed=800), []
    for method in SUPPORTED:
        backend = on_vllm.with_method(method, ordering="lexical")
        chosen = lm.with_method(method, ordering="lexical")
        sampling = {"max_tokens": 16, "min_tokens": 16, "n": 1, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
        request = backend._request(backend.prepare_to_generate(prompt, 16), sampling)
        cases.append((request, chosen.generate(prompt, **LENGTH)))
    engine = on_vllm._engine
    for _ in range(2):
        answers = engine.complete([request for request, _ in cases])
        for (completion,), (_, expected) in zip(answers, cases, strict=True):
            assert tuple(completion.token_ids) == expected.token_ids
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=ROUNDING)
