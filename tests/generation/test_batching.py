"""Prompts of a list, and those of several threads: read and decoded together, answered as each alone."""

import copy
import math
import pickle
import random
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial, wraps
from threading import Event
from time import sleep

import pytest
import torch
from transformers import GenerationConfig

from invariant_rag import InvariantModel, KeyValueCache, MicroBatcher, Prompt
from invariant_rag.errors import InvalidChoice, InvalidPrompt
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.structured import constrain
from invariant_rag.interventions import MsPoE
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.generation.test_streaming import deciding

SHAPES = ((3, 5, 2), (4, 1), (2, 2, 2, 2), (6, 3), (3, 1, 4))
SUFFIXES = (4, 4, 7, 5, 3)
PROMPTS = [random_prompt(random.Random(index), SHAPES[index], suffix=SUFFIXES[index]) for index in range(len(SHAPES))]
TEXTS = [Prompt("Read: ", ["one", "two"], f" and say {number}.") for number in range(4)]
OPTIONS, LONG = {"max_new_tokens": 4}, {"max_new_tokens": 40}


@contextmanager
def forward_passes(model, before=lambda passes: None):
    """Note rows and tokens of every forward pass, of any thread, and call `before` it. A hook would bar the cache."""
    passes, forward = [], type(model).forward

    @wraps(forward)
    def noted(*given, input_ids, **options):
        passes.append(tuple(input_ids.shape))
        before(passes)
        return forward(*given, input_ids=input_ids, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "forward", noted)
        yield passes


@contextmanager
def batch_sizes(model):
    """Note the rows of every forward pass that decodes."""
    sizes = []
    with forward_passes(model) as passes:
        yield sizes
    sizes += [rows for rows, length in passes if length == 1]


def until_waiting(batcher, count=1):
    while len(batcher.waiting) < count:
        sleep(0.001)


@contextmanager
def halted(batcher):
    """Let the block add requests to the queue while a first one, which nobody goes before, does not end."""
    begun, go = Event(), Event()
    lm, options = InvariantModel(tiny_model("llama")), deciding(lambda: (begun.set(), go.wait(60)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(batcher.generate, lm, PROMPTS[0], {"max_new_tokens": 1, **options})
        begun.wait(60)
        try:
            yield
        finally:
            go.set()


def ask_together(calls):
    """Let each call wait in a thread of its own while it is somebody else's turn; return their futures, all done."""
    batcher, futures = MicroBatcher(), []
    with ThreadPoolExecutor(len(calls)) as pool, halted(batcher):
        for lm, prompt, options in calls:
            futures.append(pool.submit(batcher.generate, lm, prompt, options, batch_size=4))
            until_waiting(batcher, len(futures))
    return futures


SEEDED = [{"do_sample": True, "seed": seed, "max_new_tokens": 12} for seed in range(4)]
WARPED = {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
TOGETHER = {  # choices of the model and options of each request, and the rows of passes that decode
    "five": ([({}, {})] * 5, {1, 4}),
    "five with pine": ([({"method": "pine"}, {})] * 5, {1, 4}),
    **{
        f"sampled {more}": ([({}, {**each, **more}) for each in SEEDED], {4})
        for more in ({}, WARPED, {"top_k": 0, "repetition_penalty": 2.0})
    },
    "two methods": ([({}, {}), ({"method": "pine"}, {})] * 2, {2}),
    "two limits": ([({}, {}), ({"max_segment_tokens": 1, "overflow": "trim_segments"}, {})] * 2, {2}),
    "two lengths": ([({}, {"max_new_tokens": length}) for length in (3, 6)], {1}),
    "two temperatures": ([({}, {**SEEDED[1], "temperature": each}) for each in (0.1, 5.0)], {1}),
    "one sampled": ([({}, SEEDED[1]), ({}, {})], {1}),
    "one with a penalty": ([({}, {}), ({}, {"repetition_penalty": 9.0})], {1}),
    "equal penalties": ([({}, {"logits_processor": [TokenPenalties(2.0, 0.5)], **LONG}) for _ in range(3)], {3}),
    "two penalties": ([({}, {"logits_processor": [TokenPenalties(2.0, each)]}) for each in (0.5, 0.6)], {1}),
    "two ends, which have no truth": ([({}, {"eos_token_id": torch.tensor([1, each])}) for each in (2, 3)], {1}),
    "sampled in a way that no row has for itself": ([({}, {**each, "typical_p": 0.5}) for each in SEEDED[:2]], {1}),
}


@pytest.mark.parametrize("case", TOGETHER)
def test_prompts_that_wait_are_one_batch_if_they_are_alike_and_answered_as_each_alone(case, llama):
    asked, rows = TOGETHER[case]
    calls = [
        (InvariantModel(llama, **choices), prompt, {**OPTIONS, **options})
        for (choices, options), prompt in zip(asked, PROMPTS, strict=False)
    ]
    alone = [lm.generate(prompt, **options) for lm, prompt, options in calls]
    with batch_sizes(llama) as sizes:
        together = [each.result() for each in ask_together(calls)]
    for (lm, prompt, options), one, other in zip(calls, together, alone, strict=True):
        assert (one.token_ids, one.order, one.usage) == (other.token_ids, other.order, other.usage)
        if options == OPTIONS:
            assert one.logprobs == pytest.approx(other.logprobs, abs=rounding(lm.generate, [prompt] * 4, **OPTIONS))
    assert set(sizes) == rows


def test_a_prompt_that_fails_fails_alone_and_an_interrupt_reaches_everybody_and_is_not_tried_again(llama):
    lm, calls = InvariantModel(llama), []
    first, bad, last = ask_together([(lm, each, OPTIONS) for each in (PROMPTS[0], Prompt([], [], []), PROMPTS[1])])
    with pytest.raises(InvalidPrompt):
        bad.result()
    expected = [lm.generate(each, **OPTIONS).token_ids for each in PROMPTS[:2]]
    assert [first.result().token_ids, last.result().token_ids] == expected

    class Interrupted(InvariantModel):
        def generate(self, prompt, **_):
            calls.append(len(prompt))
            raise KeyboardInterrupt

    for answer in ask_together([(Interrupted(llama), each, OPTIONS) for each in PROMPTS[:2]]):
        with pytest.raises(KeyboardInterrupt):
            answer.result()
    assert calls == [2]


def test_without_seeds_sampled_answers_follow_the_global_state(llama):
    lm, calls = InvariantModel(llama), [(PROMPTS[0], {"max_new_tokens": 12, "do_sample": True})] * 3
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        answers = MicroBatcher().generate_all(lm, calls)
        assert all(each.bitwise for each in answers), "the rows of one prompt are of one length"
        found.append([each.token_ids for each in answers])
    assert found[0] == found[1]
    assert len(set(found[0])) == 3


def options_of_an_object(model, seed):
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 12}}, "required": ["a"]}
    return constrain(model, schema, max_new_tokens=80, do_sample=True, temperature=2.0, top_k=0, seed=seed)


@pytest.mark.parametrize("kind", ["texts", "texts that end", "objects"])
def test_streams_that_wait_are_decoded_together_and_each_gets_its_own_text(kind, model):
    batcher = MicroBatcher()
    calls = [(prompt, {"max_new_tokens": 12}) for prompt in TEXTS]
    if kind == "objects":  # streams end where they are complete
        calls = [(TEXTS[0], options_of_an_object(model, seed)) for seed in range(4)]
    if kind == "texts that end":  # one after the other, and then there is padding, which is a letter here
        whole = [model.generate(prompt, **options).token_ids for prompt, options in calls]
        ends = {"eos_token_id": [tokens[3 * row] for row, tokens in enumerate(whole)], "pad_token_id": 97}
        calls = [(prompt, {**options, **ends}) for prompt, options in calls]
    alone = [model.generate(prompt, **copy.copy(options)).text for prompt, options in calls]
    streams = [batcher.stream(model, prompt, options) for prompt, options in calls]
    with ThreadPoolExecutor(4) as pool, batch_sizes(model.model) as sizes:
        texts = ["".join(each) for each in pool.map(list, streams)]
    assert texts == alone
    assert [each.generation and each.generation.text for each in streams] == alone
    assert len(set(texts)) >= (2 if kind == "texts that end" else 4)
    assert set(sizes) == {4}


def test_a_stream_of_what_is_known_at_the_end_is_the_answer(model):
    """Of two branches, or of beams: nothing is streamed that is not the answer's."""
    for lm, more in ((model.with_routing(-2.0), {}), (model.with_routing(2.0), {}), (model, {"num_beams": 3})):
        stream = MicroBatcher().stream(lm, TEXTS[0], {"max_new_tokens": 12, **more})
        assert "".join(stream) == lm.generate(TEXTS[0], max_new_tokens=12, **more).text
        assert stream.generation is not None


def test_requests_with_other_schemas_or_of_other_tenants_are_not_mixed(model):
    lms = [model.with_cache(KeyValueCache(namespace=name)) for name in ("ours", "theirs")]
    for call in ask_together([(lm, TEXTS[0], OPTIONS) for lm in lms]):
        assert call.result().usage.cached_tokens == 0
    other = {**options_of_an_object(model, 1), **constrain(model, {"enum": ["a"]}, max_new_tokens=80)}
    with batch_sizes(model.model) as sizes:
        MicroBatcher().generate_all(model, [(TEXTS[0], options_of_an_object(model, 0)), (TEXTS[0], other)])
    assert set(sizes) == {1}


def test_several_answers_to_one_prompt_are_refused():
    model, two = tiny_model("llama", num_hidden_layers=1), {"num_return_sequences": 2}
    for options in (two, {"generation_config": GenerationConfig(do_sample=True, **two)}, {}):
        if not options:
            model.generation_config.num_return_sequences = 2
        with pytest.raises(InvalidChoice, match="num_return_sequences"):
            MicroBatcher().generate(InvariantModel(model), PROMPTS[0], options)


def test_a_copy_begins_with_an_empty_queue(llama):
    batcher = MicroBatcher()
    with halted(batcher):
        copied = pickle.loads(pickle.dumps(batcher))
        answer = copied.generate(InvariantModel(llama), PROMPTS[0], OPTIONS)  # nobody holds its turn
    assert len(answer.token_ids) == OPTIONS["max_new_tokens"]


def test_a_row_that_is_abandoned_or_closed_ends_one_in_the_queue_is_not_begun_and_others_go_on(model):
    batcher, gone, never, shared, options = MicroBatcher(), Event(), Event(), Event(), {"max_new_tokens": 200}
    with ThreadPoolExecutor(5) as pool, batch_sizes(model.model) as sizes:
        with halted(batcher):
            left = batcher.stream(model, TEXTS[0], options, abandoned=gone)
            closed, streamed = (batcher.stream(model, each, options, abandoned=shared) for each in TEXTS[2:])
            begun = [pool.submit(next, each) for each in (left, closed)]
            rest = pool.submit("".join, streamed)
            kept = pool.submit(batcher.generate, model, TEXTS[1], options)
            waits = pool.submit(batcher.generate, model, TEXTS[2], options, abandoned=never)
            until_waiting(batcher, 5)
            never.set()
        assert all(each.result() for each in begun)
        gone.set()
        closed.close()
        for abandoned in (waits.result, partial(list, left)):
            with pytest.raises(CancelledError):
                abandoned()
        kept, rest = kept.result().token_ids, rest.result()
    assert (kept, rest) == (model.generate(TEXTS[1], **options).token_ids, model.generate(TEXTS[3], **options).text)
    assert left.generation is closed.generation is None
    assert not shared.is_set(), "closing abandons nothing else"
    assert set(sizes) == {4}
    with batch_sizes(model.model) as sizes:
        alone = batcher.stream(model, TEXTS[0], {"max_new_tokens": 1000})
        next(alone)
        alone.close()
    assert len(sizes) < 900, "the model rests"


@pytest.mark.parametrize("method", ["rotor", "pine"])
@pytest.mark.parametrize("other", ["short", "tenant"])
def test_who_need_not_wait_runs_between_two_steps_and_changes_nothing(other, method, llama):
    sampling = {} if (other == "short") == (method == "rotor") else {"do_sample": True, "seed": 3}
    lms = [InvariantModel(llama, method=method, cache=KeyValueCache()) for _ in range(2)]
    lms[1] = lms[other == "tenant"]
    lengths = (60, 12 if other == "short" else 60)
    options = [{"max_new_tokens": length, "eos_token_id": [], **sampling} for length in lengths]
    alone = [lm.generate(prompt, **each).token_ids for lm, prompt, each in zip(lms, PROMPTS, options, strict=False)]
    batcher, tokens, second = MicroBatcher(), [], []

    def run(number):
        noting = deciding(partial(note, number))
        return batcher.generate(lms[number], PROMPTS[number], {**options[number], **noting})

    def note(number):
        tokens.append(number)
        if tokens == [0]:
            second.append(pool.submit(run, 1))
            until_waiting(batcher)

    with ThreadPoolExecutor(1) as pool:
        assert [run(0).token_ids, second[0].result().token_ids] == alone
    assert (tokens.count(1), tokens[-1]) == (lengths[1], 0)


def test_who_need_not_wait_runs_before_a_batch_that_begins_whoever_gets_the_turn(llama):
    lm, batcher = InvariantModel(llama), MicroBatcher()
    for _ in range(6):
        tokens: list[str] = []
        with ThreadPoolExecutor(2) as pool, halted(batcher):
            for count, (name, length) in enumerate({"long": 8, "short": 2}.items(), 1):
                options = {"max_new_tokens": length, **deciding(partial(tokens.append, name))}
                pool.submit(batcher.generate, lm, PROMPTS[0], options)
                until_waiting(batcher, count)
        assert tokens == ["short"] * 2 + ["long"] * 8


@pytest.mark.parametrize("tenant", ["other", "same"])  # an answer that is as long need wait for its own tenant's only
@pytest.mark.parametrize("backend", ["sdpa", "varlen"])  # a pass for each prompt of a prefill, or one for all of them
def test_who_need_not_wait_runs_between_two_passes_of_a_prefill(backend, tenant, llama):
    lms = [InvariantModel(llama, backend=backend, cache=KeyValueCache()) for _ in range(2)]
    lms[1] = lms[tenant == "other"]
    alone = [lms[0].with_cache(None).generate(prompt, **OPTIONS).token_ids for prompt in PROMPTS]
    batcher, others, at_token = MicroBatcher(), [], []

    def ask(passes):
        if len(passes) == 2:
            mine = {**OPTIONS, **deciding(lambda: at_token.append(len(passes)))}
            others.append(pool.submit(batcher.generate, lms[1], PROMPTS[0], mine))
            until_waiting(batcher)

    with ThreadPoolExecutor(1) as pool, forward_passes(llama, ask):
        found = batcher.generate_all(lms[0], [(prompt, OPTIONS) for prompt in PROMPTS])
        assert others[0].result().token_ids == alone[0]
    assert [each.token_ids for each in found] == alone
    assert (at_token[0] == 4) == (tenant == "other")  # with two of its own: documents, and question


def test_what_draws_between_two_steps_takes_nothing_from_the_draws_of_the_batch(llama):
    lm, began, batcher = InvariantModel(llama), Event(), MicroBatcher()
    options = {"max_new_tokens": 60, "eos_token_id": [], "do_sample": True, "typical_p": 0.9}  # from the global state
    alone = lm.generate(PROMPTS[0], seed=3, **options).token_ids
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(batcher.generate, lm, PROMPTS[0], {**options, "seed": 3, **deciding(began.set)})
        began.wait(10)
        batcher.generate(lm, PROMPTS[1], {**options, "max_new_tokens": 12})
        assert not first.done()
        assert first.result().token_ids == alone


def test_while_others_never_stop_asking_a_batch_has_the_model_for_half_of_the_time(llama, monkeypatch):
    lm, batcher, tokens = InvariantModel(llama), MicroBatcher(), []
    monkeypatch.setattr("invariant_rag.generation.batching.monotonic", lambda: float(len(tokens)))  # a token takes 1 s

    def options(name, length):
        return {"max_new_tokens": length, "eos_token_id": [], **deciding(partial(note, name))}

    def note(name):
        tokens.append(name)
        if name == "long" and not batcher.waiting:
            pool.submit(batcher.generate, lm, PROMPTS[1], options("short", 8))
            until_waiting(batcher)

    with ThreadPoolExecutor(16) as pool:
        batcher.generate(lm, PROMPTS[0], options("long", 64))
        theirs = tokens.count("short")  # the last one may be waiting still
    assert tokens[:10] == ["long", *["short"] * 8, "long"]
    assert 48 <= theirs <= 72


# --- prompts of a list are read in one padded forward pass ---


def bits(generations):
    return [(each.token_ids, each.logprobs) for each in generations]


FAMILIES = [
    *((method, "llama") for method in METHODS),
    *(("rotor", family) for family in ("qwen2", "gemma2", "gpt_neox", "mistral", "phi3")),
    ("set-based", "bloom"),
]


@pytest.mark.parametrize(("method", "family"), FAMILIES)
def test_a_batch_answers_alike_without_a_cache_with_a_cold_and_with_a_warm_one_and_one_by_one(method, family):
    plain = InvariantModel(tiny_model(family, eos_token_id=None), method=method, backend="varlen")
    lm, fresh = (plain.with_cache(KeyValueCache()) for _ in range(2))
    together, cold, warm = (each.generate(PROMPTS, **OPTIONS) for each in (plain, lm, lm))
    expected, alone, again = ([each.generate(prompt, **OPTIONS) for prompt in PROMPTS] for each in (plain, lm, fresh))
    sizes = [len(each.input_ids) - each.suffix_length for each in map(lm.prepare, PROMPTS)]
    for found in (warm, alone):
        assert [each.usage.cached_tokens for each in found] == sizes
    bound = math.inf
    if method in ("rotor", "pine", "structured") or family != "llama":
        bound = max(rounding(plain.generate, each, **OPTIONS) for each in PROMPTS)
        bound = min(bound, rounding(plain.generate, PROMPTS, **OPTIONS))
    for one, other in zip(together + cold + warm + again, expected * 4, strict=True):
        assert (one.token_ids, one.order) == (other.token_ids, other.order)
        assert one.logprobs == pytest.approx(other.logprobs, abs=bound)


def test_one_forward_pass_reads_all_prompts_of_a_batch_and_with_a_cache_all_sets_and_all_questions(llama):
    lm = InvariantModel(llama, backend="varlen")
    prepared = [lm.prepare(each) for each in PROMPTS]
    longest = max(len(each.input_ids) for each in prepared)
    sets = max(len(each.input_ids) - each.suffix_length for each in prepared)
    with forward_passes(llama) as passes:
        lm.generate(PROMPTS, max_new_tokens=3)
    assert passes == [(5, longest), (5, 1), (5, 1)]
    lm = lm.with_cache(KeyValueCache())
    lm.generate(random_prompt(random.Random(9), (1, 1)), max_new_tokens=1)  # measures, once, how large a token is
    with forward_passes(llama) as passes:
        lm.generate(PROMPTS, max_new_tokens=2)
        lm.generate(PROMPTS[::-1], max_new_tokens=2)
    assert passes == [(5, sets), (5, max(SUFFIXES)), (5, 1), (5, 1), (5, max(SUFFIXES)), (5, 1), (5, 1)]


@pytest.mark.parametrize("cache", [None, KeyValueCache()], ids=["uncached", "cached"])
def test_prompts_with_beams_or_without_segments_are_read_together(cache, llama):
    lm = InvariantModel(llama, backend="varlen", cache=cache)
    mixed = [PROMPTS[0], Prompt(prefix=[], segments=[], suffix=[5, 9, 33, 40]), PROMPTS[1]]
    for batch, beams in ((PROMPTS, 2), (mixed, 1), (mixed, 1)):  # the last one with what is cached by then
        expected = [lm.with_cache(None).generate(each, **OPTIONS, num_beams=beams).token_ids for each in batch]
        with forward_passes(llama) as passes:
            assert [each.token_ids for each in lm.generate(batch, **OPTIONS, num_beams=beams)] == expected
        assert beams == 1 or {rows for rows, count in passes if count > 1} == {len(batch)}


def test_a_set_that_several_prompts_of_a_batch_share_is_read_once(llama):
    lm = InvariantModel(llama, backend="varlen", cache=KeyValueCache())
    first, other, *_ = PROMPTS
    same = Prompt(first.prefix, first.segments[::-1], first.suffix)
    lm.generate(other, max_new_tokens=1)
    with forward_passes(llama) as passes:
        found = lm.generate([first, other, same], max_new_tokens=1)
    assert [rows for rows, _ in passes] == [1, 3, 3]  # a set; three questions; the first token of three answers
    assert [bool(each.usage.cached_tokens) for each in found] == [False, True, True]
    bound = rounding(lm.generate, first, max_new_tokens=1)  # they are two rows of one product
    assert found[0].logprobs == pytest.approx(found[2].logprobs, abs=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_order_of_segments_changes_a_bit_of_a_batch(dtype):
    chance, model = random.Random(0), tiny_model("llama", num_hidden_layers=2).to(dtype)
    for cache in (None, KeyValueCache()):
        lm = InvariantModel(model, backend="varlen", cache=cache)
        expected = bits(lm.generate(PROMPTS, max_new_tokens=4))
        for _ in range(4):
            assert bits(lm.generate([each.shuffled(chance) for each in PROMPTS], max_new_tokens=4)) == expected


@pytest.mark.parametrize(
    "choice",
    [{"deterministic": True}, {"backend": "sdpa"}, {"method": "sequential", "intervention": MsPoE(first_layer=0)}, {}],
)
def test_what_does_not_pay_or_would_change_answers_is_read_one_by_one(choice, llama):
    lm = InvariantModel(llama, **{"backend": "varlen", **choice})
    batch = PROMPTS if choice else [random_prompt(random.Random(0), (40, 40)), *PROMPTS[1:3]]  # mostly padding
    for each in (lm, InvariantModel(tiny_model("bloom"), backend="varlen")):  # ALiBi knows no padding
        with forward_passes(each.model) as passes:
            each.generate(batch, max_new_tokens=1)
        assert {rows for rows, count in passes if count > 1} == {1}


def test_with_deterministic_a_batch_changes_no_bit_of_an_answer():
    """Nor where the model's frequencies depend on the length of a prompt."""
    lm = InvariantModel(tiny_model("llama", num_hidden_layers=2).to(torch.bfloat16), deterministic=True)
    dynamic = InvariantModel(tiny_model("llama (dynamic scaling)", max_position_embeddings=16), backend="varlen")
    for each in (lm, dynamic):
        alone = bits([each.generate(prompt, max_new_tokens=8) for prompt in PROMPTS]) * 2
        assert bits(each.generate(PROMPTS * 2, max_new_tokens=8)) == alone
    assert lm.generate([], max_new_tokens=8) == []
    assert not lm.with_method(deterministic=False).deterministic
