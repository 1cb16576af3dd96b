"""vLLM in this process answers as `InvariantModel.generate` does, and never mixes arranged and plain keys."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from invariant_rag import Generation, InvariantModel, Prompt, SegmentSet
from invariant_rag.errors import UnsupportedCombination

from tests.documents import documents, question
from vllm_invariant_rag import EntryUnusable, VLLMBackend

SUPPORTED = [
    "rotor",
    "isolated",
    "pine-in-place",
    "sequential",
    "set-based",
    "parallel-windows",
    "graph-kv",
    "invicl",
]
REFUSED = ["pine", "pine-reverse", "structured", "ape", "set-llm", "shared-sink-topk"]
LENGTH: dict[str, Any] = {"max_new_tokens": 16, "min_new_tokens": 16}


def assert_same(ours: Generation, theirs: Generation, tolerance: float = 1e-3) -> None:
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
def test_every_supported_method_gives_the_tokens_of_generate(
    method: str, lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    chosen = lm.with_method(method, ordering="lexical")
    for seed in (1, 2):
        prompt = prompt_of(lm, 6, seed)
        answer = on_vllm.with_method(method, ordering="lexical").generate(prompt, **LENGTH)
        assert_same(answer, chosen.generate(prompt, **LENGTH))


@pytest.mark.parametrize("method", REFUSED)
def test_methods_with_an_attention_of_their_own_while_decoding_are_refused_with_the_reason(
    method: str, on_vllm: VLLMBackend
) -> None:
    with pytest.raises(UnsupportedCombination, match=method):
        on_vllm.with_method(method)


def test_one_to_thirty_segments_give_the_tokens_of_generate(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompts = [prompt_of(lm, count, seed=count) for count in range(1, 31)]
    answers = on_vllm.generate(prompts, **LENGTH)
    assert len(answers) == 30
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer, lm.generate(prompt, **LENGTH))


def test_all_orders_of_four_documents_give_the_same_bits_and_are_prefilled_once(
    lm: InvariantModel, on_vllm: VLLMBackend
) -> None:
    segments = documents(4, seed=40)
    expected = lm.generate(lm.chat_prompt(question(segments), segments), **LENGTH)
    prefilled = []
    for order in permutations(segments):
        answer = on_vllm.generate(lm.chat_prompt(question(segments), list(order)), **LENGTH)
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
        prefilled.append(not answer.usage.cached_tokens)
    assert prefilled == [True] + [False] * 23


def test_a_set_serves_every_question_about_it(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    segments = documents(5, seed=50)
    first = on_vllm.generate(lm.chat_prompt("How long is it?", segments), **LENGTH)
    prompt = lm.chat_prompt(question(segments), segments[::-1])
    second = on_vllm.generate(prompt, **LENGTH)
    assert first.usage.cached_tokens == 0 < second.usage.cached_tokens
    assert_same(second, lm.generate(prompt, **LENGTH))


def test_segments_without_context_are_computed_once_for_all_sets(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    backend, chosen = on_vllm.with_method("set-based"), lm.with_method("set-based")
    segments = documents(6, seed=60)
    worker = backend._connection.worker
    backend.generate(lm.chat_prompt("How long is it?", segments[:5]), **LENGTH)
    before = worker.cache.stats()
    prompt = lm.chat_prompt("How long is it?", segments[1:])
    assert_same(backend.generate(prompt, **LENGTH), chosen.generate(prompt, **LENGTH))
    after = worker.cache.stats()
    assert after.misses - before.misses == 2  # the new segment, and the set as it lies in vLLM
    assert after.hits - before.hits == 5  # the text before the set, and four segments


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
    for method in ("rotor", "set-based", "parallel-windows"):
        chosen = lm.with_method(method)
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


def test_several_samples_of_a_prompt_are_sequences_of_their_own(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "top_k": 0, "num_return_sequences": 3, **LENGTH}
    answers = on_vllm.generate(prompt_of(lm, 4, seed=96), **options)
    assert len({answer.token_ids for answer in answers}) == len(answers) == 3
    assert all(len(answer.token_ids) == len(answer.logprobs) == 16 for answer in answers)


def test_scores_are_those_of_score(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    prompt = prompt_of(lm, 5, seed=94)
    candidates = ["red and white", "red and black", "blue", "33 miles long"]
    assert on_vllm.score(prompt, candidates) == pytest.approx(lm.score(prompt, candidates), abs=1e-3)
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


def test_preempted_requests_resume_with_their_keys(llm: Any, lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    """Requests that need several times the blocks that there are."""
    prompts = [prompt_of(lm, 20, seed=100 + index) for index in range(8)]
    options: dict[str, Any] = {"max_new_tokens": 96, "min_new_tokens": 96}
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    preempted: list[str] = []
    original = scheduler._preempt_request
    scheduler._preempt_request = lambda request, *args, **more: (
        preempted.append(request.request_id),
        original(request, *args, **more),
    )[1]
    try:
        answers = on_vllm.generate(prompts, **options)
    finally:
        scheduler._preempt_request = original
    assert preempted
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer, lm.generate(prompt, **options))


def test_a_folder_that_vllm_does_not_read_is_named(llm: Any, lm: InvariantModel, folder: Path, tmp_path: Path) -> None:
    elsewhere = VLLMBackend(lm, llm=llm, folder=tmp_path)
    with pytest.raises(EntryUnusable, match="prefilled twice") as refused:
        elsewhere.generate(prompt_of(lm, 3, seed=140), max_new_tokens=2)
    assert f"written to {tmp_path}, and vLLM reads {folder}" in refused.value.hint


def test_a_folder_with_room_for_two_sets_serves_a_batch_of_six(llm: Any, lm: InvariantModel, folder: Path) -> None:
    """Entries go before vLLM has loaded them: their requests fail, and are prefilled and asked once more."""
    small = VLLMBackend(lm, llm=llm, max_disk_bytes=3_500_000)
    prompts = [prompt_of(lm, 8, seed=120 + index) for index in range(6)]
    answers = small.generate(prompts, **LENGTH)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert_same(answer, lm.generate(prompt, **LENGTH))
    sizes = [path.stat().st_size for path in folder.glob("*.kv")]
    assert sum(sizes) <= 3_500_000 < 6 * max(sizes)
