"""vLLM in this process answers as `InvariantModel.generate` does, whatever else is in a batch, and when preempted.

Its prefix cache keeps plain keys, arranged ones, those of different sets and those of tenants apart. Log-probabilities
tell: rounding moves them by 1e-5, and keys of another arrangement by 0.01 and more.
"""

import random
from dataclasses import replace
from itertools import pairwise, permutations

import pytest
from invariant_rag import KeyValueCache, Prompt, SegmentSet
from invariant_rag.errors import InvalidChoice, InvalidOption, UnsupportedCombination
from invariant_rag.methods import APE, METHODS

from tests.worlds import LENGTH, MOVED, Pair, ask, documents, moved
from vllm_invariant_rag import RequestRefused, VLLMBackend

SAMPLED = {"do_sample": True, "temperature": 2.0, "top_k": 0, **LENGTH}


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gives_the_tokens_of_generate_cold_and_from_prefixes_that_end_inside_a_set(method, pair):
    segments = [documents(count, seed=count) for count in (5, 9)]
    prompts = [ask(pair.here, each, asked) for each in segments for asked in (None, "How long is it?")]
    one, two = (SegmentSet(documents(3, seed)) for seed in (80, 81))
    prompts.append(Prompt.of("Documents: ", one, "\nMore: ", two, "\nWhat colour is the flag?"))
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


def test_requests_of_all_methods_do_not_meet_in_one_step_and_in_the_cache(pair):
    prompt, cases = pair.prompt(800), []
    for method in METHODS:
        chosen = pair.using(method)
        request = chosen.request(prompt, min_tokens=16, temperature=0.0, ignore_eos=True)
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
    ((cut,),) = pair.there._engine.complete([pair.request(prompt, 600, ignore_eos=True)], stopped=lambda: True)
    assert cut.token_ids == []
    assert not pair.there._engine._engine.has_unfinished_requests()


@pytest.mark.parametrize("options", [{}, {"stop_strings": ["."]}, {"stop_strings": "and"}, {"repetition_penalty": 1.3}])
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


ONE = Prompt(suffix=[5])
INVALID = {
    "either url": lambda lm, on, llm: VLLMBackend(lm),
    "or llm": lambda lm, on, llm: VLLMBackend(lm, url="http://127.0.0.1:1", llm=llm),
    "RoutedModel": lambda lm, on, llm: VLLMBackend(lm.with_routing(), llm=llm),
    "tenant": lambda lm, on, llm: on.with_tenant("\ud800"),
}
UNSUPPORTED = {
    "routing": lambda lm, on, llm: on.with_routing(),
    "no intervention": lambda lm, on, llm: on.with_method("sequential", intervention="ms-poe"),
    "a forward pass": lambda lm, on, llm: on.logits(ONE),
    "in this process": lambda lm, on, llm: on.arranged([]).__enter__(),
    "no cache of our": lambda lm, on, llm: VLLMBackend(lm, llm=llm, cache=KeyValueCache(1)),
    "own parameters": lambda lm, on, llm: on.with_method(APE(temperature=0.5)),
    "num_beams": lambda lm, on, llm: on.generate(ONE, num_beams=2),
    "no_repeat_ngram_size": lambda lm, on, llm: on.generate(ONE, no_repeat_ngram_size=2),
    "do_sample=True for 2": lambda lm, on, llm: on.generate(ONE, num_return_sequences=2),
    "guidance_scale": lambda lm, on, llm: on.generate(ONE, guidance_scale=2.0),
}


@pytest.mark.parametrize("words", [*INVALID, *UNSUPPORTED])
def test_choices_that_make_no_sense_and_what_vllm_cannot_do_are_refused(words, llm, pair):
    choose = {**INVALID, **UNSUPPORTED}[words]
    with pytest.raises(InvalidChoice if words in INVALID else UnsupportedCombination, match=words):
        choose(pair.here, pair.there, llm)


# --- what is kept apart in the prefix cache ---


def send(llm, *requests, **more):
    """Send token ids as any client of vLLM does, with `kv_transfer_params` or without."""
    from vllm import SamplingParams

    fields = {"max_tokens": 16, "min_tokens": 16, "ignore_eos": True, "logprobs": 0, "temperature": 0, **more}
    readings = [each.kv_transfer_params and {"kv_transfer_params": each.kv_transfer_params} for each in requests]
    params = [SamplingParams(extra_args=each, **fields) for each in readings]
    return llm.generate([{"prompt_token_ids": list(each.token_ids)} for each in requests], params, use_tqdm=False)


def distance(output, logprobs):
    (one,) = output.outputs
    assert one.finish_reason == "length"
    found = [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]
    return max(abs(a - b) for a, b in zip(found, logprobs, strict=True))


@pytest.mark.parametrize("arranged_first", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_plain_and_arranged_requests_of_the_same_tokens_do_not_meet(arranged_first, together, llm, pair):
    prompt = pair.prompt(200 + 2 * arranged_first + together, 8)
    request = pair.request(prompt)
    cases = [
        (request, pair.here.generate(prompt, **LENGTH).logprobs),
        (replace(request, kv_transfer_params=None), pair.using("sequential").here.generate(prompt, **LENGTH).logprobs),
    ]
    differ = max(abs(a - b) for a, b in zip(cases[0][1], cases[1][1], strict=True))
    assert differ > 10 * MOVED, "the two methods have to be told apart"
    asked = (cases if arranged_first else cases[::-1]) * 2
    requests = [each for each, _ in asked]
    outputs = send(llm, *requests) if together else [send(llm, each)[0] for each in requests]
    assert all(distance(output, expected) < MOVED for output, (_, expected) in zip(outputs, asked, strict=True))


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
    monkeypatch.setattr(
        connector, "on_new_request", lambda request: (arrived(request), salts.append(request.cache_salt))
    )
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
def test_a_forged_reading_fails_its_request_and_harms_nobody(reading, llm, pair):
    prompts = [pair.prompt(seed, 8) for seed in (250, 251)]
    expected = [pair.here.generate(prompt, **LENGTH).logprobs for prompt in prompts]
    good, other = map(pair.request, prompts)
    forged = replace(good, kv_transfer_params={"invariant_rag": reading})
    for _ in range(2):  # the second time, blocks of the first could be found
        first, failed, second = send(llm, good, forged, other)
        assert (failed.outputs[0].finish_reason, list(failed.outputs[0].token_ids)) == ("error", [])
        assert distance(first, expected[0]) < MOVED
        assert distance(second, expected[1]) < MOVED
    with pytest.raises(RequestRefused):
        pair.there._engine.complete([good, forged])


def test_log_probabilities_of_the_prompt_are_those_of_the_arranged_one(llm, pair):
    request, logits = pair.request(pair.prompt(260, 8)), pair.here.logits(pair.prompt(260, 8))[:-1].log_softmax(-1)
    (output,) = send(llm, request, max_tokens=1, min_tokens=1, prompt_logprobs=0)
    suffix = request.token_ids[-len(logits) :]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[-len(suffix) :], suffix, strict=True)]
    expected = [float(row[token]) for row, token in zip(logits, suffix, strict=True)]
    assert found == pytest.approx(expected, abs=MOVED)
