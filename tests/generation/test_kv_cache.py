"""The cache: answers that equal cold ones, what is served to whom, room in memory, and threads."""

from __future__ import annotations

import copy
import functools
import pickle
import random
import re
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.errors import CacheWarning, InvalidChoice, UnsupportedCombination, UnusableFile
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.kv_cache_files import Entry, read_entry, to_bytes
from invariant_rag.methods import METHODS, RowMethod
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.generation.test_kv_cache_files import entry

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 4), prefix=4, suffix=3)
SHUFFLED = PROMPT.shuffled(random.Random(2))
CACHEABLE = list(METHODS)
ALONE = [name for name, each in METHODS.items() if each.context_free_segments]


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


def asked(prompt: Prompt, suffix: list[int]) -> Prompt:
    """The same documents, another question."""
    return Prompt(prompt.prefix, prompt.segments, suffix)


@pytest.mark.parametrize("method", CACHEABLE)
def test_a_warm_answer_equals_a_cold_one_bit_for_bit_and_an_uncached_one_nearly(
    method: str, endless: PreTrainedModel
) -> None:
    plain = InvariantModel(endless, method=method, ordering="lexical")
    lm = plain.with_cache(KeyValueCache())
    cold = lm.logits(PROMPT)
    again = asked(SHUFFLED, [9, 8, 7, 6])
    fresh = plain.with_cache(KeyValueCache()).logits(again)
    hits = lm.cache.stats().hits
    assert torch.equal(lm.logits(SHUFFLED), cold)
    assert torch.equal(lm.logits(again), fresh)
    assert lm.cache.stats().hits > hits
    torch.testing.assert_close(cold, plain.logits(PROMPT), atol=rounding(plain.logits, PROMPT), rtol=0)
    for prompt in (PROMPT, again):
        assert lm.generate(prompt, max_new_tokens=8).token_ids == plain.generate(prompt, max_new_tokens=8).token_ids
        scores = lm.score(prompt, [[5, 6], [7]])
        assert scores == pytest.approx(
            plain.score(prompt, [[5, 6], [7]]), abs=rounding(plain.score, prompt, [[5, 6], [7]])
        )


@pytest.mark.parametrize("method", ["rotor", "pine", "ape"])
@pytest.mark.parametrize("family", ["mistral (sliding window)", "gemma2", "gpt_oss", "cohere2", "glm4", "gemma3_text"])
def test_families_answer_from_the_cache_as_without(family: str, method: str) -> None:
    plain = InvariantModel(tiny_model(family, eos_token_id=None), method=method)
    lm = plain.with_cache(KeyValueCache())
    prompt = random_prompt(random.Random(4), (6, 9, 5), prefix=3, suffix=5)
    torch.testing.assert_close(lm.logits(prompt), plain.logits(prompt), atol=rounding(plain.logits, prompt), rtol=0)
    for _ in range(2):
        assert lm.generate(prompt, max_new_tokens=6).token_ids == plain.generate(prompt, max_new_tokens=6).token_ids


def test_usage_says_how_many_tokens_were_cached(endless: PreTrainedModel) -> None:
    lm = InvariantModel(endless, cache=KeyValueCache())
    assert lm.generate(PROMPT, max_new_tokens=1).usage.cached_tokens == 0
    first, second = lm.generate([SHUFFLED, random_prompt(random.Random(9), (2, 2))], max_new_tokens=1)
    assert first.usage.cached_tokens == 4 + 3 + 5 + 1 + 4
    assert second.usage.cached_tokens == 0


@pytest.mark.parametrize("method", ALONE)
def test_a_segment_is_read_once_and_reused_in_any_set(method: str, endless: PreTrainedModel) -> None:
    lm = InvariantModel(endless, method=method, cache=KeyValueCache())
    segments = list(PROMPT.segments)
    lm.generate(PROMPT, max_new_tokens=1)
    other = Prompt(PROMPT.prefix, [segments[2], [50, 51, 52], segments[0]], PROMPT.suffix)
    assert lm.generate(other, max_new_tokens=1).usage.cached_tokens == 4 + 1 + 3
    alone = InvariantModel(endless, method=method, cache=KeyValueCache())
    assert torch.equal(lm.logits(other), alone.logits(other)), "what was cached before leaves no trace"


def test_another_prefix_set_method_backend_or_model_is_not_served(endless: PreTrainedModel) -> None:
    cache = KeyValueCache()
    lm = InvariantModel(endless, cache=cache)
    lm.logits(PROMPT)
    others = [
        (lm, Prompt([*PROMPT.prefix, 5], PROMPT.segments, PROMPT.suffix)),
        (lm, Prompt(PROMPT.prefix, list(PROMPT.segments)[1:], PROMPT.suffix)),
        (lm, Prompt(PROMPT.prefix, [*PROMPT.segments, [7]], PROMPT.suffix)),
        (lm.with_method("pine"), PROMPT),
        (lm.with_method(backend="reference"), PROMPT),
        (lm.with_method(deterministic=True), PROMPT),
        (InvariantModel(tiny_model("llama", seed=1), cache=cache), PROMPT),
    ]
    for model, prompt in others:
        model.logits(prompt)
    assert cache.stats().hits == 0
    assert cache.stats().misses == 1 + len(others)
    lm.with_method("set-based").logits(PROMPT)
    lm.with_method("ape").logits(PROMPT)  # its segments have the same keys and values, and entries of their own
    assert cache.stats().hits == 0


def test_several_sets_and_chats_are_cached_up_to_their_last_text(endless: PreTrainedModel) -> None:
    for method in CACHEABLE:
        plain = InvariantModel(endless, method=method, ordering="lexical")
        lm = plain.with_cache(KeyValueCache())
        sets = [SegmentSet([[5, 6], [7]]), SegmentSet([[8], [9, 10, 11], [12]])]
        for suffix in ([13, 14], [15]):
            prompt = Prompt.of([3], sets[0], [4], sets[1], suffix)
            torch.testing.assert_close(
                lm.logits(prompt), plain.logits(prompt), atol=rounding(plain.logits, prompt), rtol=0
            )
        assert lm.cache.stats().hits == 1


def test_entries_belong_to_the_adapters_at_work() -> None:
    lm = InvariantModel(tiny_model("llama"), ordering="lexical", cache=KeyValueCache())
    adapted = lm.model.model.layers[0].self_attn.v_proj
    for adapters, misses in (["one"], 1), (["two"], 2), (["one"], 2):
        adapted.active_adapters = adapters  # as the layers of PEFT say it, which bring parameters of their own
        lm.logits(PROMPT)
        assert lm.cache.stats().misses == misses


def test_what_cannot_be_cached_is_refused(endless: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="rotary frequencies"):
        InvariantModel(tiny_model("llama (dynamic scaling)"), cache=KeyValueCache())
    lm = InvariantModel(endless, method="sequential", intervention="ms-poe")
    with pytest.raises(UnsupportedCombination, match="without an intervention for a key-value cache"):
        lm.with_cache(KeyValueCache())
    spread, offloaded = tiny_model("llama"), tiny_model("llama")
    spread.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    wrappers = [InvariantModel(model) for model in (spread, offloaded)]  # probed, as only a whole model can be
    offloaded.lm_head.to("meta")
    for lm, message in zip(wrappers, ("one device", "offloaded"), strict=True):
        with pytest.raises(UnsupportedCombination, match=message):
            lm.with_cache(KeyValueCache())


@pytest.mark.parametrize("prompt", [Prompt([], [], [3, 4]), Prompt([], [[], []], [3, 4])])
@pytest.mark.parametrize("method", CACHEABLE)
def test_a_suffix_alone_needs_no_cache(method: str, prompt: Prompt, endless: PreTrainedModel) -> None:
    lm = InvariantModel(endless, method=method)
    torch.testing.assert_close(
        lm.with_cache(KeyValueCache()).logits(prompt), lm.logits(prompt), atol=rounding(lm.logits, prompt), rtol=0
    )


def test_a_method_that_was_changed_is_not_served_what_it_read_before(endless: PreTrainedModel) -> None:
    class Turns(RowMethod):
        name, paper, cost, invariant = "turns", "none", "none", False
        step = 1

        def row(self, segment: int, count: int) -> list[int]:
            return [(segment + type(self).step * j) % count for j in range(1, count + 1)]

    lm, cache = InvariantModel(endless, method=Turns(), ordering="lexical"), KeyValueCache()
    before = lm.with_cache(cache).logits(PROMPT)
    Turns.step = -1
    after = lm.with_cache(cache).logits(PROMPT)
    torch.testing.assert_close(after, lm.logits(PROMPT), atol=rounding(lm.logits, PROMPT), rtol=0)
    assert not torch.allclose(after, before, atol=1e-2)


def test_the_least_recently_used_entries_make_room() -> None:
    cache = KeyValueCache(max_bytes=3 * 80)
    for name in "abc":
        cache.put(name, entry(10))
    assert cache.get("a") is not None
    cache.put("d", entry(10))
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]
    cache.put("huge", entry(100))
    assert cache.get("huge") is None
    stats = cache.stats()
    assert (stats.entries, stats.bytes, stats.evictions) == (3, 240, 1)
    cache.clear()
    assert (cache.stats().entries, cache.stats().bytes) == (0, 0)


def test_threads_get_the_same_answers(endless: PreTrainedModel) -> None:
    lm = InvariantModel(endless, method="ape", cache=KeyValueCache(max_bytes=20_000))
    prompts = [random_prompt(random.Random(seed % 3), (3, 4, 2), suffix=2 + seed % 4) for seed in range(12)]
    expected = [InvariantModel(endless, method="ape").generate(each, max_new_tokens=4).token_ids for each in prompts]
    got: dict[int, Any] = {}

    def work(index: int) -> None:
        got[index] = lm.generate(prompts[index], max_new_tokens=4).token_ids

    threads = [Thread(target=work, args=(index,)) for index in range(12)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [got[index] for index in range(12)] == expected


def test_a_disk_that_refuses_costs_no_answer(
    tmp_path: Path, endless: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    plain = InvariantModel(endless, ordering="lexical")
    folder = tmp_path / "store"
    lm = plain.with_cache(KeyValueCache(folder=folder))
    folder.rmdir()
    folder.write_text("a file where the folder was")
    torch.testing.assert_close(lm.logits(PROMPT), plain.logits(PROMPT), atol=rounding(plain.logits, PROMPT), rtol=0)
    assert lm.cache.stats().disk_errors == 2  # one entry was looked for, and written
    assert "cannot write" in caplog.text


def test_a_pickled_model_answers_alike_with_a_cache_of_its_own(endless: PreTrainedModel, tmp_path: Path) -> None:
    lm = InvariantModel(endless, method="rotor", cache=KeyValueCache(max_bytes=1 << 20, folder=tmp_path))
    expected = lm.generate(PROMPT, max_new_tokens=4)
    copied: InvariantModel = pickle.loads(pickle.dumps(lm))
    assert copied.cache is not None
    assert copied.cache.stats().entries == 0
    found = copied.generate(SHUFFLED, max_new_tokens=4)
    assert (found.token_ids, found.text) == (expected.token_ids, expected.text)
    assert copied.cache.stats().disk_hits == 1


def test_what_a_model_read_before_and_after_its_weights_changed_is_kept_apart(
    endless: PreTrainedModel, tmp_path: Path
) -> None:
    plain = InvariantModel(copy.deepcopy(endless), method="rotor")
    lm = plain.with_cache(KeyValueCache(folder=tmp_path))
    lm.logits(PROMPT)
    for factor in (1.5, 0.5):
        with torch.no_grad():
            lm.model.get_input_embeddings().weight.mul_(factor)
        fresh = plain.with_cache(KeyValueCache()).logits(PROMPT)
        assert torch.equal(lm.logits(PROMPT), fresh)
        reloaded = InvariantModel(copy.deepcopy(lm.model), cache=KeyValueCache(folder=tmp_path))
        assert torch.equal(reloaded.logits(PROMPT), fresh)
        assert reloaded.cache is not None
        assert reloaded.cache.stats().disk_hits == 1


def _steered(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
    return output + 0.5


def _of_its_own(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    norm = model.model.norm
    patch.setattr(norm, "forward", functools.wraps(norm.forward)(lambda x: type(norm).forward(norm, x) * 2))


def _of_all(model: PreTrainedModel, patch: pytest.MonkeyPatch) -> None:
    hooks = {1: lambda module, arguments: None}
    patch.setattr(torch.nn.modules.module, "_global_forward_pre_hooks", hooks)


FOREIGN = {
    "a hook of model.layers.0.self_attn.v_proj": lambda model, _: model.model.layers[
        0
    ].self_attn.v_proj.register_forward_hook(_steered),
    "a hook of model.layers.1": lambda model, _: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "a hook of the model": lambda model, _: model.register_forward_hook(functools.partial(lambda *_: None)),
    "a forward of its own in model.norm": _of_its_own,
    "a hook of all modules": _of_all,
}


@pytest.mark.parametrize("where", FOREIGN)
def test_a_model_with_hooks_is_asked_without_the_cache_and_a_warning_says_so(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = InvariantModel(tiny_model("llama"), ordering="lexical")
    lm = plain.with_cache(KeyValueCache())
    lm.logits(PROMPT)
    before = lm.cache.stats()
    FOREIGN[where](lm.model, monkeypatch)
    with pytest.warns(CacheWarning, match=f"not used: the model has {where}"):
        hooked = lm.logits(PROMPT)
    with pytest.warns(CacheWarning):
        assert lm.generate(PROMPT, max_new_tokens=2).usage.cached_tokens == 0
    torch.testing.assert_close(hooked, plain.logits(PROMPT), atol=rounding(plain.logits, PROMPT), rtol=0)
    assert lm.cache.stats() == before


def test_what_transformers_records_of_a_model_is_no_reason_to_go_without_the_cache() -> None:
    lm = InvariantModel(tiny_model("llama"), cache=KeyValueCache())
    lm.model(torch.tensor([[5, 6]]), output_hidden_states=True, output_attentions=True)
    lm.logits(PROMPT)
    lm.logits(SHUFFLED)
    assert lm.cache.stats().hits == 1


def test_entries_of_another_attention_implementation_or_precision_are_not_served() -> None:
    lm = InvariantModel(tiny_model("llama"), ordering="lexical", cache=KeyValueCache())

    def missed() -> int:
        before = lm.cache.stats().misses
        lm.logits(PROMPT)
        return lm.cache.stats().misses - before

    assert (missed(), missed()) == (1, 0)
    lm.model.set_attn_implementation("eager")
    assert (missed(), missed()) == (1, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert (missed(), missed()) == (1, 0)
    assert missed() == 0
    lm.model.to(torch.bfloat16)
    assert (missed(), missed()) == (1, 0)
    lm.model.to(torch.float32)
    lm.model.set_attn_implementation("sdpa")
    assert missed() == 1, "weights that were rounded are other weights"


def test_entries_of_another_version_of_pytorch_are_not_served(
    endless: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = InvariantModel(endless, cache=KeyValueCache())
    lm.logits(PROMPT)
    monkeypatch.setattr(torch, "__version__", "9.0")
    lm.logits(PROMPT)
    assert lm.cache.stats().misses == 2


def _renamed(path: Path, other: Path) -> None:
    path.replace(other)


def _forged(path: Path, other: Path, change: Callable[[Entry], Entry]) -> None:
    other.write_bytes(to_bytes(change(read_entry(path)), other.stem))


WRONG_ENTRIES: dict[str, Callable[[Path, Path], None]] = {
    "renamed": _renamed,
    "no layer": lambda path, other: _forged(path, other, lambda _: []),
    "a layer less": lambda path, other: _forged(path, other, lambda entry: entry[:-1]),
    "a token less": lambda path, other: _forged(path, other, lambda entry: [(k[:, 1:], v[:, 1:]) for k, v in entry]),
    "a head less": lambda path, other: _forged(path, other, lambda entry: [(k[1:], v[1:]) for k, v in entry]),
    "another dtype": lambda path, other: _forged(path, other, lambda entry: [(k.half(), v.half()) for k, v in entry]),
    "no tokens": lambda path, other: _forged(path, other, lambda entry: [(k[:, :0], v[:, :0]) for k, v in entry]),
}


@pytest.mark.parametrize("wrong", WRONG_ENTRIES)
def test_an_entry_that_is_not_what_was_asked_for_changes_no_answer(wrong: str, tmp_path: Path) -> None:
    """The entries of one model, under the names of those of another."""
    one, other = (InvariantModel(tiny_model("llama", seed=seed), ordering="lexical") for seed in (0, 1))
    for lm, folder in ((one, "one"), (other, "other")):
        lm.with_cache(KeyValueCache(folder=tmp_path / folder)).logits(PROMPT)
    (path,), (theirs,) = ((tmp_path / folder).glob("*.kv") for folder in ("one", "other"))
    WRONG_ENTRIES[wrong](path, theirs)
    lm = other.with_cache(KeyValueCache(folder=tmp_path / "other"))
    assert torch.equal(lm.logits(PROMPT), other.with_cache(KeyValueCache()).logits(PROMPT))
    stats = lm.cache.stats()
    assert (stats.damaged, stats.disk_hits, stats.misses) == (1, 0, 1)
    assert read_entry(theirs), "the right one was written again"


WRONG_ARGUMENTS: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    (("folder",), {}, r"KeyValueCache\(folder=...\)"),
    ((Path("folder"),), {}, r"KeyValueCache\(folder=...\)"),
    ((-1,), {}, "max_bytes: expected at least 0"),
    ((1.5,), {}, "max_bytes"),
    ((True,), {}, "max_bytes"),
    ((None,), {}, "max_bytes"),
    ((), {"max_disk_bytes": -1}, "max_disk_bytes: expected at least 0"),
    ((), {"max_disk_bytes": None}, "max_disk_bytes"),
    ((), {"device": "gpu"}, "device"),
    ((), {"device": 1.5}, "device"),
    ((), {"folder": 5}, "folder: expected a path"),
    ((), {"folder": ""}, "folder: expected a path"),
    ((), {"namespace": None}, "namespace"),
    ((), {"namespace": 5}, "namespace"),
]


@pytest.mark.parametrize(("arguments", "keywords", "message"), WRONG_ARGUMENTS, ids=repr)
def test_a_wrong_argument_is_named(arguments: tuple[Any, ...], keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidChoice) as raised:
        KeyValueCache(*arguments, **keywords)
    assert re.search(message, f"{raised.value} {raised.value.hint}")


@pytest.mark.parametrize("folder", ["file/below", "null\x00character"])
def test_a_folder_that_cannot_be_made_is_named(folder: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((UnusableFile, InvalidChoice), match=r"file|null"):
        KeyValueCache(folder=tmp_path / folder)


@pytest.mark.parametrize("wrong", [[], None, [5], [(torch.ones(1, 1, 1),)], [(torch.ones(1, 1, 1), None)]], ids=repr)
def test_only_keys_and_values_are_stored(wrong: Any) -> None:
    cache = KeyValueCache()
    with pytest.raises(InvalidChoice, match="keys and values"):
        cache.put("x", wrong)
    with pytest.raises(InvalidChoice, match="key: expected a str"):
        cache.get(5)  # type: ignore[arg-type]
