"""vLLM in this process answers as `InvariantModel.generate` does, whatever else is in a batch, and when preempted."""

import random
from itertools import pairwise, permutations

import pytest
from invariant_rag import KeyValueCache, Prompt, SegmentSet
from invariant_rag.errors import InvalidChoice, InvalidOption, UnsupportedCombination
from invariant_rag.methods import APE, METHODS

from tests.pairs import LENGTH, MOVED, ask, documents, moved
from vllm_invariant_rag import VLLMBackend

SAMPLED = {"do_sample": True, "temperature": 2.0, "top_k": 0, **LENGTH}


# --- every state of a request ---


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gives_the_tokens_of_generate_cold_and_from_prefixes_that_end_inside_a_set(method, pair):
    segments = [documents(count, seed=count) for count in (5, 9)]
    prompts = [ask(pair.here, each, asked) for each in segments for asked in (None, "How long is it?")]
    for _ in range(2):
        cached = [each.usage.cached_tokens for each in pair.using(method).alike(*prompts)]
        # Whole blocks are found again, but for those of PINE, which ranks by the queries of whole segments.
        assert method == "sequential" or all(each % 32 == 0 for each in cached)
    assert all((each > 0) == (method not in {"pine", "pine-reverse"}) for each in cached)


@pytest.mark.parametrize("method", ["rotor", "isolated", "pine-in-place"])
def test_a_prefix_that_ends_before_the_last_segment_is_read_from_blocks(method, pair):
    segments = [list(range(start, stop)) for start, stop in pairwise((30, 70, 110, 150, 190, 195))]
    for suffix, cached in (([8, 9], 0), ([10, 11], 160)):  # five blocks, of 168 tokens
        prompt = Prompt(prefix=[5, 6, 7], segments=segments, suffix=suffix)
        (answer,) = pair.using(method, "given").alike(prompt)
        assert answer.usage.cached_tokens == cached


def test_segments_of_any_number_and_length_give_the_tokens_of_generate(pair):
    pair.alike(*[pair.prompt(count, count) for count in range(31)])
    pair.using("isolated").alike(*[pair.prompt(70, count) for count in (0, 1, 3, 8)])
    tokens = random.Random(5)
    for lengths in ((32, 32, 32), (1, 31, 33, 64), (2,) * 60, (0, 5, 100, 0)):  # blocks of 32; and a long text before
        segments = [tokens.choices(range(5, 250), k=length) for length in lengths]
        prompt = Prompt(prefix=tokens.choices(range(5, 250), k=200), segments=segments, suffix=[8, 9])
        pair.using("rotor", "given").alike(prompt)


def test_all_orders_of_four_documents_give_the_same_answer_and_are_read_once(pair):
    answers = [pair.alike(ask(pair.here, order))[0] for order in permutations(documents(4, seed=40))]
    assert [each.usage.cached_tokens > 0 for each in answers] == [False] + [True] * 23


@pytest.mark.parametrize("method", ["rotor", "set-based", "parallel-windows", "pine", "isolated"])
def test_several_sets_and_text_between_them_give_the_tokens_of_generate(method, pair):
    one, two = documents(3, seed=80), documents(3, seed=81)
    prompt = Prompt.of("Documents: ", SegmentSet(one), "\nMore: ", SegmentSet(two), "\nWhat colour is the flag?")
    for _ in range(2):
        pair.using(method).alike(prompt)


def test_requests_of_all_methods_do_not_meet_in_one_step_and_in_the_cache(pair):
    prompt, cases = pair.prompt(800), []
    sampling = {"max_tokens": 16, "min_tokens": 16, "n": 1, "temperature": 0.0, "logprobs": 0, "ignore_eos": True}
    for method in METHODS:
        chosen = pair.using(method)
        request = chosen.there._request(chosen.there.prepare_to_generate(prompt, 16), sampling)
        cases.append((request, chosen.here.generate(prompt, **LENGTH), chosen.most_moved(prompt, **LENGTH)))
    for _ in range(2):
        answers = pair.there._engine.complete([request for request, *_ in cases])
        for (completion,), (_, expected, far) in zip(answers, cases, strict=True):
            assert tuple(completion.token_ids) == expected.token_ids
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=far)


@pytest.mark.parametrize("method", ["rotor", "set-based", "pine"])
def test_preempted_requests_resume_with_their_sets(method, pair, core, monkeypatch):
    """Requests that need several times the blocks that there are."""
    preempt, preempted = core.scheduler._preempt_request, []
    seen = lambda *args, **more: (preempted.append(args), preempt(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr(core.scheduler, "_preempt_request", seen)
    prompts = [pair.prompt(100 + index, 10) for index in range(5)]
    pair.using(method).alike(*prompts, max_new_tokens=160, min_new_tokens=160)
    assert preempted


def test_a_thousand_mixed_requests_get_the_answers_that_they_get_alone(pair):
    """Twenty sets in random orders, by four methods, plain prompts among them, in 64 blocks."""
    rng, methods = random.Random(7), ("rotor", "isolated", "sequential", "pine-in-place")
    sets = [documents(rng.randrange(0, 9), 700 + number) for number in range(20)]
    expected = {}
    for _ in range(25):
        method, numbers = rng.choice(methods), rng.choices(range(20), k=40)
        chosen = pair.using(method)
        orders = [rng.sample(sets[number], len(sets[number])) for number in numbers]
        prompts = [ask(pair.here, order, "What is told of it?") for order in orders]
        answers = chosen.there.generate(prompts, max_new_tokens=8)
        for number, prompt, answer in zip(numbers, prompts, answers, strict=True):
            if (method, number) not in expected:
                expected[method, number] = chosen.here.generate(prompt, max_new_tokens=8)
            assert answer.token_ids == expected[method, number].token_ids, (method, number)


# --- what `generate` takes ---


def test_a_stream_is_the_text_of_generate_and_a_closed_one_ends_its_request(pair):
    prompt = pair.prompt(90)
    (expected,), stream = pair.alike(prompt), pair.there.stream(prompt, **LENGTH)
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(pieces) == stream.generation.text
    assert moved(stream.generation, expected) < MOVED
    closed = pair.there.stream(prompt, max_new_tokens=600, min_new_tokens=600)
    next(closed)
    closed.close()
    pair.alike(prompt)
    prepared = pair.there.prepare_to_generate(prompt, 600)
    request = pair.there._request(prepared, {"max_tokens": 600, "n": 1, "logprobs": 0, "ignore_eos": True})
    ((cut,),) = pair.there._engine.complete([request], stopped=lambda: True)
    assert cut.token_ids == []
    assert not pair.there._engine._engine.has_unfinished_requests()


ENDS = [{}, {"stop_strings": ["."]}, {"stop_strings": "and"}, {"repetition_penalty": 1.3}]


@pytest.mark.parametrize("options", ENDS, ids=str)
def test_answers_end_where_those_of_generate_end(options, pair):
    pair.alike(pair.prompt(92, 4), max_new_tokens=24, min_new_tokens=None, **options)


def test_samples_have_seeds_of_their_own_and_repeat_in_every_order(pair):
    segments, on_vllm = documents(4, seed=61), pair.there
    orders = [ask(pair.here, order) for order in (segments, segments[::-1], segments)]
    alone = [on_vllm.generate(orders[0], seed=seed, **SAMPLED).token_ids for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = on_vllm.generate(orders, seed=[1, 2, 1], **SAMPLED)
    assert [each.token_ids for each in together] == [alone[0], alone[1], alone[0]]
    with pytest.raises(InvalidOption, match="one for each of 3 prompts, got 2"):
        on_vllm.generate(orders, seed=[1, 2], **SAMPLED)
    answers = on_vllm.generate(orders[0], num_return_sequences=3, **SAMPLED)
    assert len({answer.token_ids for answer in answers}) == len(answers) == 3
    assert all(len(answer.token_ids) == len(answer.logprobs) == 16 for answer in answers)


def test_scores_are_those_of_score(pair):
    prompt, candidates = pair.prompt(94), ["red and white", "red and black", "blue", "33 miles long"]
    expected = pair.here.score(prompt, candidates)
    assert pair.there.score(prompt, candidates) == pytest.approx(expected, abs=MOVED)
    assert pair.there.score(prompt, []) == []


# --- what is refused ---


def generate(lm, **options):
    return lm.generate(Prompt(suffix=[5]), max_new_tokens=4, **options)


REFUSED = [
    (InvalidChoice, "either url", lambda lm, on, llm: VLLMBackend(lm)),
    (InvalidChoice, "or llm", lambda lm, on, llm: VLLMBackend(lm, url="http://127.0.0.1:1", llm=llm)),
    (InvalidChoice, "RoutedModel", lambda lm, on, llm: VLLMBackend(lm.with_routing(), llm=llm)),
    (InvalidChoice, "tenant", lambda lm, on, llm: on.with_tenant("\ud800")),
    (UnsupportedCombination, "routing", lambda lm, on, llm: on.with_routing()),
    (
        UnsupportedCombination,
        "no intervention",
        lambda lm, on, llm: on.with_method("sequential", intervention="ms-poe"),
    ),
    (UnsupportedCombination, "a forward pass", lambda lm, on, llm: on.logits(Prompt(suffix=[5]))),
    (UnsupportedCombination, "in this process", lambda lm, on, llm: on.arranged([]).__enter__()),
    (UnsupportedCombination, "no cache of our", lambda lm, on, llm: VLLMBackend(lm, llm=llm, cache=KeyValueCache(1))),
    (UnsupportedCombination, "own parameters", lambda lm, on, llm: on.with_method(APE(temperature=0.5))),
    (UnsupportedCombination, "num_beams", lambda lm, on, llm: generate(on, num_beams=2)),
    (UnsupportedCombination, "no_repeat_ngram_size", lambda lm, on, llm: generate(on, no_repeat_ngram_size=2)),
    (UnsupportedCombination, "do_sample=True for 2", lambda lm, on, llm: generate(on, num_return_sequences=2)),
    (UnsupportedCombination, "guidance_scale", lambda lm, on, llm: generate(on, guidance_scale=2.0)),
]


@pytest.mark.parametrize(("error", "words", "choose"), REFUSED, ids=[words for _, words, _ in REFUSED])
def test_choices_that_make_no_sense_and_what_vllm_cannot_do_are_refused(error, words, choose, llm, pair):
    with pytest.raises(error, match=words):
        choose(pair.here, pair.there, llm)
