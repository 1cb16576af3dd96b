"""Law 1: every permutation gives the same tokens and arrangement, and so the same bits; everything else does not."""

import copy
import random
from itertools import chain, permutations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from invariant_rag import InvariantModel, KeyValueCache, Prompt, SegmentSet
from invariant_rag.methods import METHODS
from invariant_rag.prompts import Retrieval, Turn, recognize
from tests.comparing import orders_of
from tests.prompts.test_recognition import DOCUMENTS, SETS, written

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
