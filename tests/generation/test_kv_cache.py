"""The cache: answers that equal cold ones, what is served to whom, room in memory, and threads."""

import copy
import functools
import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from invariant_rag import InvariantModel, KeyValueCache, Prompt, SegmentSet
from invariant_rag.errors import CacheWarning, InvalidChoice, UnsupportedCombination, UnusableFile
from invariant_rag.interventions import MsPoE
from invariant_rag.methods import METHODS, RowMethod
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.generation.test_kv_cache_files import entry

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 4), prefix=4, suffix=3)
SHUFFLED = PROMPT.shuffled(random.Random(2))
AGAIN = Prompt(SHUFFLED.prefix, SHUFFLED.segments, [9, 8, 7, 6])  # the same documents, another question
SEVERAL = Prompt.of([3], SegmentSet([[5, 6], [7]]), [4], SegmentSet([[8], [9, 10, 11], [12]]), [13, 14])
ALONE = [name for name, each in METHODS.items() if each.context_free_segments]


def check_near(lm, plain, prompt):
    bound = rounding(plain.logits, prompt)
    torch.testing.assert_close(lm.logits(prompt), plain.logits(prompt), atol=bound, rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_warm_answer_equals_a_cold_one_bit_for_bit_and_an_uncached_one_nearly(method, llama):
    plain = InvariantModel(llama, method=method, ordering="lexical")
    lm, fresh = (plain.with_cache(KeyValueCache()) for _ in range(2))
    cold, scores = fresh.logits(AGAIN), fresh.score(AGAIN, [[5, 6], [7]])
    check_near(lm, plain, PROMPT)
    hits = lm.cache.stats().hits
    assert torch.equal(lm.logits(AGAIN), cold)
    assert lm.score(AGAIN, [[5, 6], [7]]) == scores
    assert lm.cache.stats().hits > hits
    assert lm.generate(AGAIN, max_new_tokens=8).token_ids == plain.generate(AGAIN, max_new_tokens=8).token_ids
    check_near(lm, plain, SEVERAL)
    assert torch.equal(lm.logits(SEVERAL), fresh.logits(SEVERAL))
    for alone in (Prompt([], [], [3, 4]), Prompt([], [[], []], [3, 4])):  # there is nothing to cache
        check_near(lm, plain, alone)


FAMILIES = [
    *(("mistral (sliding window)", "pine"), ("gemma2", "rotor"), ("gpt_oss", "pine"), ("cohere2", "ape")),
    *(("glm4", "ape"), ("gemma3_text", "rotor")),
]


@pytest.mark.parametrize(("family", "method"), FAMILIES)
def test_families_answer_from_the_cache_as_without(family, method):
    plain = InvariantModel(tiny_model(family, eos_token_id=None), method=method)
    lm, prompt = plain.with_cache(KeyValueCache()), random_prompt(random.Random(4), (6, 9, 5), prefix=3, suffix=5)
    check_near(lm, plain, prompt)
    assert lm.generate(prompt, max_new_tokens=6).token_ids == plain.generate(prompt, max_new_tokens=6).token_ids


@pytest.mark.parametrize("method", ALONE)
def test_a_segment_is_read_once_and_reused_in_any_set(method, llama):
    lm, alone = (InvariantModel(llama, method=method, cache=KeyValueCache()) for _ in range(2))
    segments = list(PROMPT.segments)
    lm.generate(PROMPT, max_new_tokens=1)
    other = Prompt(PROMPT.prefix, [segments[2], [50, 51, 52], segments[0]], PROMPT.suffix)
    assert lm.generate(other, max_new_tokens=1).usage.cached_tokens == 4 + 1 + 3
    assert torch.equal(lm.logits(other), alone.logits(other)), "what was cached before leaves no trace"
    elsewhere = Prompt([*PROMPT.prefix, 5], segments, PROMPT.suffix)
    assert lm.generate(elsewhere, max_new_tokens=1).usage.cached_tokens == 0, "it was read after another text"


def test_another_prefix_set_method_backend_model_or_environment_is_not_served(llama, monkeypatch):
    cache = KeyValueCache()
    lm, segments = InvariantModel(llama, cache=cache), list(PROMPT.segments)
    asked = [
        (lm, PROMPT),
        (lm, Prompt([*PROMPT.prefix, 5], segments, PROMPT.suffix)),
        (lm, Prompt(PROMPT.prefix, segments[1:], PROMPT.suffix)),
        (lm, Prompt(PROMPT.prefix, [*segments, [7]], PROMPT.suffix)),
        *((lm.with_method(**choice), PROMPT) for choice in ({"method": "pine"}, {"backend": "reference"})),
        (lm.with_method(deterministic=True), PROMPT),
        (InvariantModel(tiny_model("llama", seed=1), cache=cache), PROMPT),
    ]
    for model, prompt in asked:
        model.logits(prompt)
    assert (cache.stats().hits, cache.stats().misses) == (0, len(asked))
    for method in ("set-based", "ape"):  # their segments have the same keys and values, and entries of their own
        lm.with_method(method).logits(PROMPT)
    assert cache.stats().hits == 0
    lm = InvariantModel(tiny_model("llama"), ordering="lexical", cache=cache)

    def missed():
        before = cache.stats().misses
        lm.logits(PROMPT)
        return cache.stats().misses - before

    assert (missed(), missed()) == (1, 0)
    lm.model(torch.tensor([[5, 6]]), output_hidden_states=True, output_attentions=True)
    assert missed() == 0, "what transformers records is no other model"
    lm.model.set_attn_implementation("eager")
    assert (missed(), missed()) == (1, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert (missed(), missed()) == (1, 0)
    assert missed() == 0
    monkeypatch.setattr(torch, "__version__", "9.0")
    assert missed() == 1


def test_a_method_that_was_changed_is_not_served_what_it_read_before(llama):
    class Turns(RowMethod):
        name, paper, cost, invariant = "turns", "none", "none", False
        step = 1

        def row(self, segment, count):
            return [(segment + type(self).step * j) % count for j in range(1, count + 1)]

    lm = InvariantModel(llama, method=Turns(), ordering="lexical")
    cached = lm.with_cache(KeyValueCache())
    before = cached.logits(PROMPT)
    Turns.step = -1
    check_near(cached, lm, PROMPT)
    assert not torch.allclose(cached.logits(PROMPT), before, atol=1e-2)


def test_what_a_model_read_before_and_after_its_weights_changed_is_kept_apart(llama, tmp_path):
    plain = InvariantModel(copy.deepcopy(llama))
    lm = plain.with_cache(KeyValueCache(folder=tmp_path))
    lm.logits(PROMPT)
    for factor in (1.5, 0.5):
        lm.model.get_input_embeddings().weight.data.mul_(factor)
        fresh = plain.with_cache(KeyValueCache()).logits(PROMPT)
        assert torch.equal(lm.logits(PROMPT), fresh)
        reloaded = InvariantModel(copy.deepcopy(lm.model), cache=KeyValueCache(folder=tmp_path))
        assert torch.equal(reloaded.logits(PROMPT), fresh)
        assert reloaded.cache.stats().disk_hits == 1


def of_its_own(model, patch):
    norm = model.model.norm
    patch.setattr(norm, "forward", functools.wraps(norm.forward)(lambda x: type(norm).forward(norm, x) * 2))


def of_all(_, patch):
    patch.setattr(torch.nn.modules.module, "_global_forward_pre_hooks", {1: lambda *_: None})


FOREIGN = {
    "a hook of model.layers.0": lambda model, _: model.model.layers[0].register_forward_hook(lambda *of: of[2] + 0.5),
    "a hook of model.layers.1": lambda model, _: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "a hook of the model": lambda model, _: model.register_forward_hook(functools.partial(lambda *_: None)),
    "a forward of its own in model.norm": of_its_own,
    "a hook of all modules": of_all,
}


@pytest.mark.parametrize("where", FOREIGN)
def test_a_model_with_hooks_is_asked_without_the_cache_and_a_warning_says_so(where, monkeypatch):
    plain = InvariantModel(tiny_model("llama", num_hidden_layers=2), ordering="lexical")
    lm = plain.with_cache(KeyValueCache())
    lm.logits(PROMPT)
    before = lm.cache.stats()
    FOREIGN[where](lm.model, monkeypatch)
    with pytest.warns(CacheWarning, match=f"not used: the model has {where}"):
        check_near(lm, plain, PROMPT)
    with pytest.warns(CacheWarning):
        assert lm.generate(PROMPT, max_new_tokens=2).usage.cached_tokens == 0
    assert lm.cache.stats() == before


def test_what_cannot_be_cached_is_refused(llama):
    with pytest.raises(UnsupportedCombination, match="rotary frequencies"):
        InvariantModel(tiny_model("llama (dynamic scaling)"), cache=KeyValueCache())
    scaled = InvariantModel(llama, method="sequential", intervention=MsPoE(first_layer=0))
    spread, offloaded = tiny_model("llama"), tiny_model("llama")
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    wrappers = [InvariantModel(model) for model in (spread, offloaded)]  # probed, as only a whole model can be
    offloaded.lm_head.to("meta")
    for lm, message in zip([scaled, *wrappers], ("without an intervention", "one device", "offloaded"), strict=True):
        with pytest.raises(UnsupportedCombination, match=message):
            lm.with_cache(KeyValueCache())


def test_the_least_recently_used_entries_make_room():
    cache = KeyValueCache(max_bytes=3 * 80)
    for name in "abc":
        cache.put(name, entry(10))
    assert cache.get("a") is not None
    cache.put("d", entry(10))
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]
    cache.put("huge", entry(100))
    assert cache.get("huge") is None
    found = cache.stats()
    assert (found.entries, found.bytes, found.evictions) == (3, 240, 1)
    cache.put("d", entry(5))
    assert (cache.stats().entries, cache.stats().bytes) == (3, 200), "one key has one entry"
    cache.clear()
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)


def test_threads_get_the_same_answers(llama):
    lm = InvariantModel(llama, method="ape", cache=KeyValueCache(max_bytes=20_000))
    prompts = [random_prompt(random.Random(seed % 3), (3, 4, 2), suffix=2 + seed % 4) for seed in range(12)]
    expected = [lm.with_cache(None).generate(each, max_new_tokens=4).token_ids for each in prompts]
    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(lambda each: lm.generate(each, max_new_tokens=4).token_ids, prompts)) == expected


def test_a_disk_that_refuses_costs_no_answer(tmp_path, llama, caplog):
    plain, folder = InvariantModel(llama, ordering="lexical"), tmp_path / "store"
    lm = plain.with_cache(KeyValueCache(folder=folder))
    folder.rmdir()
    folder.write_text("a file where the folder was")
    check_near(lm, plain, PROMPT)
    assert lm.cache.stats().disk_errors == 2  # one entry was looked for, and written
    assert "cannot write" in caplog.text


def test_a_pickled_model_answers_alike_with_a_cache_of_its_own(llama, tmp_path):
    lm = InvariantModel(llama, cache=KeyValueCache(max_bytes=1 << 20, folder=tmp_path, namespace="a"))
    expected = lm.generate(PROMPT, max_new_tokens=4)
    copied = pickle.loads(pickle.dumps(lm))
    assert copied.cache.stats().entries == 0
    assert copied.generate(SHUFFLED, max_new_tokens=4).token_ids == expected.token_ids
    assert copied.cache.stats().disk_hits == 1


WRONG = [
    *(({"max_bytes": value}, "max_bytes") for value in ("folder", Path("folder"), -1, 1.5, True, None)),
    *(({"max_disk_bytes": value}, "max_disk_bytes") for value in (-1, None)),
    *(({"device": value}, "device") for value in ("gpu", 1.5)),
    *(({"folder": value}, "folder: expected a path") for value in (5, "")),
    *(({"namespace": value}, "namespace") for value in (None, 5)),
    ({"folder": "null\x00character"}, "null"),
    ({"folder": f"{__file__}/below"}, "test_kv_cache"),
]


def test_a_wrong_argument_is_named_and_only_keys_and_values_are_stored():
    for keywords, message in WRONG:
        with pytest.raises((InvalidChoice, UnusableFile), match=message):
            KeyValueCache(**keywords)
    for wrong in ([], None, [5], [(torch.ones(1, 1, 1),)], [(torch.ones(1, 1, 1), None)]):
        with pytest.raises(InvalidChoice, match="keys and values"):
            KeyValueCache().put("x", wrong)
    with pytest.raises(InvalidChoice, match="key: expected a str"):
        KeyValueCache().get(5)
