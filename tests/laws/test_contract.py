"""The laws of every method: invariance, the kit that method authors use, the published code, decoding, threads.

Law 5: the published implementations of five methods, on a random Llama, in float32. Exceptions of `guarantees.toml` are
tests, too, so that none outlives its reason.
"""

import copy
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, permutations
from pathlib import Path
from threading import Barrier, get_ident

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from invariant_rag import InvariantModel, KeyValueCache, Prompt, SegmentSet
from invariant_rag.attention import BACKENDS
from invariant_rag.errors import InvalidChoice, InvalidPrompt, TokenizerRequired
from invariant_rag.methods import APE, METHODS, PINEReverse
from invariant_rag.prompts import Retrieval, Turn, recognize
from invariant_rag.testing import MethodContract, random_prompt, tiny_model
from invariant_rag.testing.contracts import plain_logits, recomputed_logits
from invariant_rag.testing.rounding import rounding
from tests.comparing import assert_computes, gap, orders_of
from tests.prompts.test_recognition import DOCUMENTS, SETS, written

KIT = type("Kit", (MethodContract,), {"method": "rotor"})()
for _name, _method in {**{name: name for name in METHODS}, "instance": PINEReverse()}.items():
    globals()[f"Test{_name.title().replace('-', '')}"] = type(_name, (MethodContract,), {"method": _method})


def test_every_backend_has_its_law():
    laws = {f"test_{name}_agrees_with_the_reference" for name in BACKENDS if name != "reference"}
    assert laws
    assert laws <= {*dir(MethodContract)}


@pytest.mark.parametrize("method", METHODS)
def test_a_fair_method_ignores_the_ordering_and_no_other_does(method):
    lm, prompt = KIT.wrapped().with_method(method), KIT.prompts()[2]
    first, *others = (lm.with_method(ordering=each).logits(prompt) for each in ("lexical", "lexical-reversed", "given"))
    largest = max(gap(each, first) for each in others)
    assert largest <= rounding(lm.logits, prompt) if METHODS[method].fair else largest > 1e-1


def test_an_unknown_name_is_refused_with_the_valid_ones(llama):
    for kind, valid in (("method", "rotor"), ("ordering", "lexical"), ("backend", "sdpa")):
        with pytest.raises(ValueError, match=f"choose from.*'{valid}'"):
            InvariantModel(llama, **{kind: "nonsense"})
    for parameters in ((0.0, 0.9), (0.9, -1.0)):
        with pytest.raises(InvalidChoice, match="above 0"):
            APE(*parameters)


# --- the published code ---

OURS = {
    "vanilla": ("sequential", "given"),
    "rotor_lexical": ("rotor", "lexical"),
    "rotor_revlexical": ("rotor", "lexical-reversed"),
    "rotor_freq": ("rotor", "frequency"),
    "rotor_given": ("rotor", "given"),
    "pine": ("pine", "lexical"),
    "sbp": ("set-based", "lexical"),
}


def published_runs(published, manifest, arrays):
    """Return entry, prompt, suffix logits and greedy tokens of each golden run of a published method."""
    runs = []
    for entry in (entry for entry in manifest["entries"] if entry["method"] == published):
        case, key = manifest["cases"][entry["case"]], f"{entry['model']}/{entry['case']}/{published}"
        counts, distinct = Counter(chain(*case["segs"])), {*map(tuple, case["segs"])}
        ties = len({tuple(map(counts.get, each)) for each in distinct}) < len(distinct)
        if published == "rotor_freq" and ties:
            continue  # the published code falls back to the input order then
        order = entry["physical_order"] if published == "rotor_given" else range(len(case["segs"]))
        prompt = Prompt(case["prefix"], [case["segs"][index] for index in order], case["suffix"])
        logits, greedy = (arrays[f"{key}/{name}"] for name in ("suffix_logits", "greedy"))
        runs.append((entry, prompt, torch.from_numpy(logits), tuple(greedy.tolist())))
    assert len(runs) >= 5
    return runs


@pytest.mark.parametrize("published", OURS)
def test_logits_and_greedy_tokens_equal_the_published_code(published, golden_model, golden_manifest, golden_arrays):
    method, ordering = OURS[published]
    lm = InvariantModel(golden_model, method=method, ordering=ordering)
    for entry, prompt, expected, greedy in published_runs(published, golden_manifest, golden_arrays):
        bound = rounding(lm.logits, prompt)
        torch.testing.assert_close(lm.logits(prompt), expected, atol=bound, rtol=0)
        if entry["min_top2_margin"] > 2 * bound:
            generation = lm.generate(prompt, max_new_tokens=8)
            assert (generation.token_ids, generation.finish_reason) == (greedy, "length")


def test_logits_and_greedy_tokens_are_those_of_the_published_functions(golden_model, golden_manifest):
    """The last logits and 8 greedy tokens, in float32, of two golden cases in `windows.npz`.

    PCW: `combine_past_key_values` and `generate_pcw_position_ids` of AI21Labs/Parallel-Context-Windows (e6d3100) with
    transformers' Llama. Structured Prompting: `make_positions` and the rescaling of `MultiheadAttention.forward` of
    microsoft/LMOps (4f2a9de) in that Llama; there, the prefix is the first token, as in all of its prompts.
    """
    with np.load(Path(__file__).parents[1] / "golden" / "windows.npz") as arrays:
        golden = dict(arrays)
    names = {tuple(key.split("/")[:2]) for key in golden}
    assert len(names) == 4
    for method, name in names:
        case = golden_manifest["cases"][name]
        prefix = case["prefix"][:1] if method == "structured" else case["prefix"]
        prompt, lm = Prompt(prefix, case["segs"], case["suffix"]), InvariantModel(golden_model, method=method)
        expected = torch.from_numpy(golden[f"{method}/{name}/last_logits"])
        assert_computes(expected, lambda lm=lm, prompt=prompt: lm.logits(prompt)[-1])
        written = lm.generate(prompt, max_new_tokens=8).token_ids
        assert written == tuple(golden[f"{method}/{name}/greedy"].tolist())


# --- invariance ---

token = st.integers(3, 127)
text = st.lists(token, max_size=4)
segments = st.one_of(
    st.lists(st.lists(token, max_size=6), max_size=6),
    st.lists(st.sampled_from([[5], [5, 6], [7]]), min_size=2, max_size=6),  # duplicates and shared beginnings
)
SINGLE, HALF = torch.float32, torch.bfloat16
INVARIANT = [name for name in METHODS if name != "sequential"]


def drawn(*lengths):
    state = random.Random(7)
    return Prompt([3, 8], [[state.randrange(5, 500) for _ in range(length)] for length in lengths], [11, 12])


FOUR = Prompt([3, 8], [[9, 4, 77], [30], [9, 4], [200, 201, 202, 203, 204]], [11, 12])
LONG = drawn(300, 3, 250, 1)  # shifts reach twice the length: a reader moves one way and what it reads the other
MANY = drawn(*(1 + number * 7 % 5 for number in range(30)))
PAIRS = [
    *((method, (SINGLE, HALF)[n % 2], ("sdpa", "varlen")[n % 2], FOUR, 1) for n, method in enumerate(INVARIANT)),
    *((method, (HALF, SINGLE)[n % 2], ("varlen", "sdpa")[n % 2], FOUR, 5) for n, method in enumerate(INVARIANT)),
    *((method, (SINGLE, HALF)[n % 2], "reference", FOUR, 11) for n, method in enumerate(INVARIANT[::3])),
    *((method, SINGLE, "sdpa", LONG, 13) for method in INVARIANT),
    *((method, HALF, "sdpa", MANY, None) for method in INVARIANT if method != "pine"),
]
"""Every method with both fast backends and both dtypes; every `step`-th permutation, or a random one."""


@pytest.fixture(scope="module")
def models(golden_model):
    """The golden Llama in two dtypes."""
    return {SINGLE: golden_model, HALF: copy.deepcopy(golden_model).to(HALF)}


CASES = {
    "method": st.sampled_from(sorted(METHODS)),
    "ordering": st.sampled_from(["lexical", "lexical-reversed", "frequency"]),
    "backend": st.sampled_from(["sdpa", "varlen"]),
    "dtype": st.sampled_from([SINGLE, HALF]),
    "prefix": text,
    "sets": st.lists(st.tuples(segments, text), min_size=1, max_size=3),
    "suffix": st.lists(token, min_size=1, max_size=4),
    "shuffle": st.randoms(),
}


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=st.fixed_dictionaries(CASES))
def test_logits_and_tokens_ignore_the_order_of_segments(models, case):
    """Already before a forward pass: tokens and arrangement are all that a model computes with."""
    lm = InvariantModel(models[case["dtype"]], **{name: case[name] for name in ("method", "ordering", "backend")})
    *before, (last, _) = case["sets"]
    parts = chain.from_iterable((SegmentSet(each), between) for each, between in before)
    prompt = Prompt.of(case["prefix"], *parts, SegmentSet(last), case["suffix"])
    prepared, logits, written = lm.prepare(prompt), lm.logits(prompt), lm.generate(prompt, max_new_tokens=2)
    backwards = prompt.with_sets(each.permuted(range(len(each))[::-1]) for each in prompt.sets)
    for other in (backwards, prompt.shuffled(case["shuffle"])):
        found = lm.prepare(other)
        assert (found.input_ids, found.arrangement) == (prepared.input_ids, prepared.arrangement)
        assert [other.segments[i] for i in found.order] == [prompt.segments[i] for i in prepared.order]
    again = lm.generate(other, max_new_tokens=2)
    assert torch.equal(lm.logits(other), logits)
    assert (again.token_ids, again.logprobs, again.order) == (written.token_ids, written.logprobs, found.order)
    numbers, order = iter(range(len(prompt.segments))), iter(written.order)
    of_sets = [{next(numbers) for _ in each} for each in prompt.sets]
    assert [{next(order) for _ in each} for each in of_sets] == of_sets, "the sets one after the other"


@pytest.mark.parametrize(("method", "dtype", "backend", "prompt", "step"), PAIRS)
def test_every_permutation_of_four_segments_gives_the_same_bits(models, method, dtype, backend, prompt, step):
    """And another order of very long segments, and of many."""
    lm = InvariantModel(models[dtype], method=method, backend=backend)
    others = orders_of(prompt, step)[1:] if step else [prompt.shuffled(random.Random(7))]
    assert others
    expected = lm.logits(prompt)
    assert expected.isfinite().all()
    assert all(torch.equal(lm.logits(other), expected) for other in others)


@pytest.mark.parametrize("method", METHODS)
def test_sets_of_one_are_text_and_promise_nothing(llama, method):
    lm = InvariantModel(llama, method=method, ordering="lexical")
    ones = Prompt.of([3], SegmentSet([[5, 6]]), [4], SegmentSet([[20]]), [7, 8], SegmentSet(), SegmentSet([[9]]), [11])
    prepared = lm.prepare(ones)
    assert (prepared.input_ids, prepared.arrangement.is_plain) == ((3, 5, 6, 4, 20, 7, 8, 9, 11), True)
    verdicts = [lm.generate(each, max_new_tokens=1).invariant for each in (Prompt([3], [], [4]), ones)]
    assert verdicts == [None, False]


# --- prompts whose slots were recognised ---


def recognized(template, listed):
    """The prompt as a framework passes it: as text, with the variable that it was filled in with."""
    slot = written(SETS[template], listed)
    found = recognize([Turn("user", (f"Read:\n{slot}\nWhich?",))], [Retrieval(tuple(listed), "Which?")], [slot])
    assert not found.findings
    return Prompt.of(*found.turns[0].parts)


@pytest.mark.parametrize("template", [repr("\n\n"), "tags", "source", "pages"])
def test_a_recognized_slot_is_what_its_template_writes_for_the_canonical_order_and_answered_alike(model, template):
    lm, listings = model.with_cache(KeyValueCache()), list(permutations(DOCUMENTS))
    prompts = [recognized(template, listed) for listed in listings]
    (ids, *others) = (lm.prepare(each).input_ids for each in prompts)
    assert all(other == ids for other in others)
    texts = [written(SETS[template], listed) for listed in listings]
    assert sum(each in model.tokenizer.decode(ids) for each in texts) == 1
    cold, warm, *_ = answers = [lm.generate(each, max_new_tokens=3) for each in prompts]
    assert {(each.token_ids, each.usage.prompt_tokens, each.sets) for each in answers} == {
        (cold.token_ids, len(ids), (3,))
    }
    assert warm.usage.cached_tokens > cold.usage.cached_tokens == 0
    assert all(each.invariant for each in answers)
    assert len({model.generate(Prompt(f"Read:\n{each}"), max_new_tokens=3).logprobs for each in texts}) == 6, "text"


# --- decoding ---

PROMPTS = [
    random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(3, 5, 2), (1, 9), (4, 4, 4, 1)])
]
in_parallel = pytest.mark.parametrize("lm", ["rotor", "pine", "structured", "ape"], indirect=True)
"""Also methods whose positions go on behind the longest segment."""


@pytest.fixture(params=["rotor", "pine"])
def lm(request, llama):
    return InvariantModel(llama, method=request.param)


def longer_logits(lm, prompt, written):
    """Return the logits behind a prompt and behind each token after it, from `logits` alone."""
    return lm.logits(Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *written]))[len(prompt.suffix) - 1 :]


def logprobs_of(lm, prompt, tokens, logits=longer_logits):
    """Return the log-probability of each token behind a prompt, from one forward pass without a cache."""
    rows = logits(lm, prompt, tokens[:-1]).log_softmax(dim=-1)
    return [float(row[token]) for row, token in zip(rows, tokens, strict=True)]


@in_parallel
def test_log_probabilities_and_scores_are_those_of_the_logits_and_a_seed_gives_one_text_in_every_order(lm):
    tokens = lm.generate(PROMPTS[0], max_new_tokens=5).token_ids
    assert_computes(logprobs_of(lm, PROMPTS[0], tokens), lm.generate, PROMPTS[0], max_new_tokens=5)
    prompt, candidates = PROMPTS[2], [(5,), (6, 7, 8), (9, 9)]
    expected = [sum(logprobs_of(lm, prompt, each)) for each in candidates]
    scores = assert_computes(expected, lm.score, prompt, candidates)
    assert lm.score(prompt.shuffled(random.Random(0)), candidates) == scores
    assert lm.score(prompt, []) == []
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8}
    one, other = (lm.generate(prompt, seed=seed, **options).token_ids for seed in (3, 4))
    assert lm.generate(prompt.shuffled(random.Random(0)), seed=3, **options).token_ids == one != other


@in_parallel
def test_beams_equal_beams_over_full_recomputation_alone_and_in_a_batch(lm):
    """Beam search by hand, from `logits` alone."""
    beams = [((), 0.0)]
    for _ in range(4):
        rows = [(*beam, longer_logits(lm, PROMPTS[0], beam[0])[-1].log_softmax(dim=-1)) for beam in beams]
        grown = [((*ids, token), total + float(row[token])) for ids, total, row in rows for token in range(len(row))]
        beams = sorted(grown, key=lambda beam: -beam[1])[:3]
    options = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2}
    single = [each for prompt in PROMPTS for each in lm.generate(prompt, **options)]
    assert single[0].token_ids == beams[0][0]
    batch = lm.generate(PROMPTS, **options)
    assert [(each.token_ids, each.order) for each in batch] == [(each.token_ids, each.order) for each in single]
    config = GenerationConfig(do_sample=False, num_beams=2, num_return_sequences=2, pad_token_id=0)
    assert len(lm.generate(PROMPTS[0], max_new_tokens=3, generation_config=config)) == 2


def test_logits_processors_see_the_prompt_in_physical_order(lm):
    seen = []

    def spy(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return torch.where(torch.arange(scores.shape[-1]) == 9, 0.0, float("-inf")).expand_as(scores)

    written = lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=[spy])
    assert written.token_ids == (9, 9, 9)
    physical = [token for index in written.order for token in PROMPTS[0].segments[index].token_ids]
    assert seen[0] == [*PROMPTS[0].prefix, *physical, *PROMPTS[0].suffix]


@pytest.mark.parametrize(("kind", "method"), [("a token", "rotor"), ("a string", "pine")])
def test_what_ends_a_text_ends_one_of_a_batch_and_not_the_others(model, kind, method):
    chat = model.with_method(method)
    prompts = [chat.chat_prompt("Why?", ["one", "two"]), chat.chat_prompt("Who?", ["three", "four", "five"])]
    letters = chat.tokenizer("abcdefgh ", add_special_tokens=False)["input_ids"]  # else it writes few of them
    options = {"max_new_tokens": 12, "suppress_tokens": sorted({*range(len(chat.tokenizer))} - {*letters})}
    whole = chat.generate(prompts, **options)
    end, letter = whole[0].token_ids[3], whole[0].text[3]
    stop = {"eos_token_id": end} if kind == "a token" else {"stop_strings": [letter]}
    for before, stopped in zip(whole, chat.generate(prompts, **stop, **options), strict=True):
        cut = before.token_ids.index(end) + 1 if end in before.token_ids else 12
        assert stopped.token_ids == before.token_ids[:cut]
        assert stopped.finish_reason == ("stop" if cut < 12 else "length")
        assert stopped.usage.completion_tokens == cut == len(stopped.logprobs)
        assert kind == "a token" or stopped.text == before.text[:cut]
    assert chat.generate(prompts[0], **stop, **options).finish_reason == "stop"


def test_text_needs_a_tokenizer_and_a_continuation_needs_a_suffix(llama, model):
    lm, bare = InvariantModel(llama), Prompt([3], [[4, 5], [6]], [])
    for call, error in (
        (lambda: lm.stream(PROMPTS[0]), TokenizerRequired),
        (lambda: lm.generate(PROMPTS[0], stop_strings=["x"]), TokenizerRequired),
        (lambda: lm.generate(Prompt("text", ["more"], "text")), TokenizerRequired),
        (lambda: lm.chat_prompt("Why?", ["one"]), TokenizerRequired),
        (lambda: lm.generate(bare), InvalidPrompt),
        (lambda: lm.score(bare, [[1]]), InvalidPrompt),
    ):
        with pytest.raises(error, match=r"tokenizer|suffix"):
            call()
    assert all(lm.with_method(each).logits(bare).shape == (0, 128) for each in METHODS)
    prompt, ids = model.chat_prompt("Why?", ["a", "b"]), model.tokenizer("no", add_special_tokens=False)["input_ids"]
    assert model.score(prompt, ["no"]) == model.score(prompt, [ids]), "a score of text is one of its tokens"


# --- other threads ---


def test_other_threads_keep_the_plain_model_while_ours_is_at_work(llama):
    """One model object serves plain and invariant calls at the same time."""
    lm, prompt = InvariantModel(llama, method="pine"), PROMPTS[0]
    assert lm.prefiller.shared is InvariantModel(llama).prefiller.shared, "wrapping twice probes once"
    calls = {"plain": lambda: plain_logits(llama, prompt), "ours": lambda: lm.logits(prompt)}
    expected = {name: call() for name, call in calls.items()}

    def run(name):
        return all(torch.equal(calls[name](), expected[name]) for _ in range(15))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, ("plain", "ours", "plain", "ours")))


def test_a_thread_that_calls_the_model_across_the_call_of_a_processor_disturbs_neither(llama):
    """It begins before that call does, and ends before it."""
    lm, ids, main = InvariantModel(llama, method="pine"), torch.tensor([[5, 6, 7, 8]]), get_ident()
    expected, plain = lm.generate(PROMPTS[0], max_new_tokens=3), llama(ids).logits.detach()
    meeting, others, found = Barrier(2, timeout=60), [], []

    def call_model():
        return llama(ids).logits.detach()

    def call_it_twice(input_ids, scores):
        thread = pool.submit(call_model)
        meeting.wait()  # the thread is in its first layer
        others.append(thread)
        found.extend((call_model(), others.pop().result(60)))
        return scores

    def meet(*_):
        if get_ident() != main:
            meeting.wait()
            meeting.wait()
        elif others:
            meeting.wait()  # both are
            others[0].result(60)

    with ThreadPoolExecutor(1) as pool, llama.model.layers[0].register_forward_pre_hook(meet):
        written = lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=[call_it_twice])
    assert (written.token_ids, written.logprobs) == (expected.token_ids, expected.logprobs)
    assert len(found) == 6
    assert all(torch.equal(each, plain) for each in found)


# --- where a guarantee ends: the exceptions of `guarantees.toml`, so that none outlives its reason ---


def test_falcon_with_alibi_decodes_otherwise_than_it_is_prefilled_beyond_256_tokens():
    model = tiny_model("falcon (ALiBi)", num_hidden_layers=2, eos_token_id=None, max_position_embeddings=1024)

    def difference(method, length):
        """Of the log-probabilities of eight tokens, decoded and recomputed from scratch, in units of their rounding."""
        lm, prompt = InvariantModel(model, method=method), random_prompt(random.Random(0), (length,) * 3)
        decoded = lm.generate(prompt, max_new_tokens=8)
        gaps = np.subtract(decoded.logprobs, logprobs_of(lm, prompt, decoded.token_ids, recomputed_logits))
        return np.abs(gaps).max() / rounding(lm.generate, prompt, max_new_tokens=8)

    assert max(difference("rotor", 40), difference("sequential", 110)) <= 1
    assert difference("rotor", 110) > 10


@pytest.mark.parametrize("backend", ["reference", "sdpa", "varlen"])
def test_with_deterministic_a_warm_cache_changes_no_bit(backend, llama):
    lm = InvariantModel(llama, backend=backend, deterministic=True, cache=KeyValueCache())
    for seed in range(1 if backend == "reference" else 5):
        source = random.Random(seed)
        prompt = random_prompt(source, [source.randrange(1, 40) for _ in range(4)])
        cold, warm = (lm.generate(prompt, max_new_tokens=6) for _ in range(2))
        assert warm.usage.cached_tokens
        assert warm.logprobs == cold.logprobs
        other = Prompt(prompt.prefix, [*prompt.segments, [5, 6, 7]], prompt.suffix)
        cold, warm = (each.generate(other, max_new_tokens=4) for each in (lm.with_cache(KeyValueCache()), lm))
        assert warm.logprobs == cold.logprobs
