"""The cache: answers that equal cold ones, what is served to whom, room, threads, and a disk store that is killed."""

from __future__ import annotations

import copy
import itertools
import multiprocessing
import os
import pickle
import random
import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache, key_of
from invariant_rag.methods import METHODS, RowMethod
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 4), prefix=4, suffix=3)
SHUFFLED = PROMPT.shuffled(random.Random(2))
ALONE = [name for name, each in METHODS.items() if each.context_free_segments]


@pytest.fixture(scope="module")
def endless() -> PreTrainedModel:
    return tiny_model("llama", eos_token_id=None)


def asked(prompt: Prompt, suffix: list[int]) -> Prompt:
    """The same documents, another question."""
    return Prompt(prompt.prefix, prompt.segments, suffix)


@pytest.mark.parametrize("method", METHODS)
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
    torch.testing.assert_close(cold, plain.logits(PROMPT), atol=1e-4, rtol=1e-4)
    for prompt in (PROMPT, again):
        assert lm.generate(prompt, max_new_tokens=8).token_ids == plain.generate(prompt, max_new_tokens=8).token_ids
        scores = lm.score(prompt, [[5, 6], [7]])
        assert scores == pytest.approx(plain.score(prompt, [[5, 6], [7]]), abs=1e-4)


@pytest.mark.parametrize("method", ["rotor", "pine", "ape"])
@pytest.mark.parametrize("family", ["mistral (sliding window)", "gemma2", "gpt_oss", "cohere2", "glm4", "gemma3_text"])
def test_families_answer_from_the_cache_as_without(family: str, method: str) -> None:
    plain = InvariantModel(tiny_model(family, eos_token_id=None), method=method)
    lm = plain.with_cache(KeyValueCache())
    prompt = random_prompt(random.Random(4), (6, 9, 5), prefix=3, suffix=5)
    torch.testing.assert_close(lm.logits(prompt), plain.logits(prompt), atol=1e-3, rtol=1e-3)
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


def test_another_prefix_set_method_or_model_is_not_served(endless: PreTrainedModel) -> None:
    cache = KeyValueCache()
    lm = InvariantModel(endless, cache=cache)
    lm.logits(PROMPT)
    others = [
        (lm, Prompt([*PROMPT.prefix, 5], PROMPT.segments, PROMPT.suffix)),
        (lm, Prompt(PROMPT.prefix, list(PROMPT.segments)[1:], PROMPT.suffix)),
        (lm, Prompt(PROMPT.prefix, [*PROMPT.segments, [7]], PROMPT.suffix)),
        (lm.with_method("pine"), PROMPT),
        (InvariantModel(tiny_model("llama", seed=1), cache=cache), PROMPT),
    ]
    for model, prompt in others:
        model.logits(prompt)
    assert cache.stats().hits == 0
    assert cache.stats().misses == 1 + len(others)


def test_tokens_that_move_from_one_segment_to_the_next_are_another_set(endless: PreTrainedModel) -> None:
    lm = InvariantModel(endless, cache=KeyValueCache(), ordering="given")
    plain = lm.with_cache(None)
    for segments in ([[5, 6], [7]], [[5], [6, 7]], [[5, 6, 7]]):
        prompt = Prompt([3], segments, [9])
        torch.testing.assert_close(lm.logits(prompt), plain.logits(prompt), atol=1e-4, rtol=1e-4)


def test_several_sets_and_chats_are_cached_up_to_their_last_text(endless: PreTrainedModel) -> None:
    for method in METHODS:
        plain = InvariantModel(endless, method=method, ordering="lexical")
        lm = plain.with_cache(KeyValueCache())
        sets = [SegmentSet([[5, 6], [7]]), SegmentSet([[8], [9, 10, 11], [12]])]
        for suffix in ([13, 14], [15]):
            prompt = Prompt.of([3], sets[0], [4], sets[1], suffix)
            torch.testing.assert_close(lm.logits(prompt), plain.logits(prompt), atol=1e-4, rtol=1e-4)
        assert lm.cache.stats().hits == 1


def test_weights_that_change_in_place_are_noticed() -> None:
    model = tiny_model("llama")
    lm = InvariantModel(model, cache=KeyValueCache())
    before = lm.logits(PROMPT)
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.weight.mul_(2.0)
    after = lm.logits(PROMPT)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(after, lm.with_cache(None).logits(PROMPT), atol=1e-4, rtol=1e-4)


def test_weights_that_change_behind_the_version_counter_are_noticed() -> None:
    plain = InvariantModel(tiny_model("llama"), ordering="lexical")
    lm = plain.with_cache(KeyValueCache())
    lm.logits(PROMPT)
    weight = plain.model.model.layers[0].self_attn.v_proj.weight
    version = weight._version
    weight.data += 0.1  # as merged adapters do
    assert weight._version == version
    torch.testing.assert_close(lm.logits(PROMPT), plain.logits(PROMPT), atol=1e-4, rtol=1e-4)


def test_entries_belong_to_the_adapters_at_work() -> None:
    lm = InvariantModel(tiny_model("llama"), ordering="lexical", cache=KeyValueCache())
    adapted = lm.model.model.layers[0].self_attn.v_proj
    for adapters, misses in (["one"], 1), (["two"], 2), (["one"], 2):
        adapted.active_adapters = adapters  # as the layers of PEFT, which bring parameters of their own, say it
        lm.logits(PROMPT)
        assert lm.cache.stats().misses == misses


def test_what_cannot_be_cached_is_refused(endless: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="rotary frequencies"):
        InvariantModel(tiny_model("llama (dynamic scaling)"), cache=KeyValueCache())
    with pytest.raises(InvalidChoice, match="at least 0"):
        KeyValueCache(-1)
    lm = InvariantModel(endless, method="sequential", intervention="ms-poe")
    with pytest.raises(UnsupportedCombination, match="without an intervention for a key-value cache"):
        lm.with_cache(KeyValueCache())


def test_a_model_on_several_devices_is_refused() -> None:
    model = tiny_model("llama")
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(UnsupportedCombination, match="one device"):
        InvariantModel(model, cache=KeyValueCache())


@pytest.mark.parametrize("prompt", [Prompt([], [], [3, 4]), Prompt([], [[], []], [3, 4])])
@pytest.mark.parametrize("method", METHODS)
def test_a_suffix_alone_needs_no_cache(method: str, prompt: Prompt, endless: PreTrainedModel) -> None:
    lm = InvariantModel(endless, method=method)
    torch.testing.assert_close(lm.with_cache(KeyValueCache()).logits(prompt), lm.logits(prompt), atol=1e-4, rtol=1e-4)


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
    torch.testing.assert_close(after, lm.logits(PROMPT), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(after, before, atol=1e-2)


def entry(size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """An entry of `8 * size` bytes."""
    return [(torch.full((1, size, 1), 1.0), torch.full((1, size, 1), 2.0))]


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


def test_a_disk_store_serves_a_later_process(tmp_path: Path, endless: PreTrainedModel) -> None:
    first = InvariantModel(endless, cache=KeyValueCache(folder=tmp_path))
    cold = first.logits(PROMPT)
    second = InvariantModel(tiny_model("llama", eos_token_id=None), cache=KeyValueCache(folder=tmp_path))
    assert torch.equal(second.logits(SHUFFLED), cold)
    assert second.cache.stats().disk_hits == 1


def test_a_store_that_may_only_be_read_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    KeyValueCache(folder=tmp_path).put(key_of("x"), entry(10))

    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(os, "utime", refuse)
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get(key_of("x")) is not None
    assert (cache.stats().disk_hits, cache.stats().disk_errors) == (1, 0)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty"])
def test_a_damaged_file_is_a_miss_and_is_removed(damage: str, tmp_path: Path) -> None:
    KeyValueCache(folder=tmp_path).put(key_of("x"), entry(10))
    (file,) = tmp_path.glob("*.kv")
    content = file.read_bytes()
    flipped = bytes([content[-1] ^ 1])
    file.write_bytes({"cut": content[:-5], "flip": content[:-1] + flipped, "empty": b""}[damage])
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get(key_of("x")) is None
    assert cache.stats().damaged == 1
    assert not list(tmp_path.glob("*.kv"))


def test_the_disk_store_keeps_to_its_room(tmp_path: Path) -> None:
    cache = KeyValueCache(max_bytes=0, folder=tmp_path, max_disk_bytes=1000)
    for number in range(10):
        cache.put(str(number), entry(20))
        os.utime(tmp_path / f"{number}.kv", (number, number))
    assert sum(file.stat().st_size for file in tmp_path.glob("*.kv")) <= 1000
    assert cache.get("9") is not None
    assert cache.get("0") is None


def _write_for_ever(folder: Path, start: int) -> None:
    cache = KeyValueCache(max_bytes=0, folder=folder)
    for number in itertools.cycle([*range(start, 40), *range(start)]):
        cache.put(str(number), [(torch.full((2, 4000, 8), float(number)), torch.zeros(2, 4000, 8))])


def test_a_disk_that_refuses_costs_no_answer(
    tmp_path: Path, endless: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    plain = InvariantModel(endless, ordering="lexical")
    folder = tmp_path / "store"
    lm = plain.with_cache(KeyValueCache(folder=folder))
    folder.rmdir()
    folder.write_text("a file where the folder was")
    torch.testing.assert_close(lm.logits(PROMPT), plain.logits(PROMPT), atol=1e-4, rtol=1e-4)
    assert lm.cache.stats().disk_errors == 2  # one entry was looked for, and written
    assert "cannot write" in caplog.text


def test_what_killed_writers_left_is_removed_once_nobody_can_be_writing_it(tmp_path: Path) -> None:
    old, new = tmp_path / "unfinished-old", tmp_path / "unfinished-new"
    old.write_bytes(b"torn")
    new.write_bytes(b"being written")
    os.utime(old, (0, 0))
    KeyValueCache(folder=tmp_path).put("x", entry(10))
    assert (old.exists(), new.exists()) == (False, True)


def test_a_store_whose_writers_are_killed_serves_intact_entries_only(tmp_path: Path) -> None:
    """Fifty kills, of two processes that write at the same time."""
    draw, processes = random.Random(0), multiprocessing.get_context("fork")
    for _ in range(25):
        writers = [processes.Process(target=_write_for_ever, args=(tmp_path, start)) for start in (0, 7)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.005, 0.05))
        for writer in writers:
            writer.kill()
            writer.join()
        cache = KeyValueCache(folder=tmp_path)
        found = {number: cache.get(str(number)) for number in range(40)}
        for number, served in found.items():
            assert served is None or torch.equal(served[0][0], torch.full((2, 4000, 8), float(number)))
        assert cache.stats().damaged == 0
    assert any(found.values())
    assert list(tmp_path.glob("unfinished-*")), "at least one writer was killed while it wrote"


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
