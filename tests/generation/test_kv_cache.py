"""The cache: answers that equal cold ones, what is served to whom, room in memory and on disk, and files of its own."""

import copy
import functools
import multiprocessing
import os
import pickle
import random
import stat
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch.nn.modules import module

from invariant_rag import InvariantModel, KeyValueCache, Prompt, SegmentSet
from invariant_rag.errors import CacheWarning, DamagedEntry, InvalidChoice, UnsupportedCombination, UnusableFile
from invariant_rag.generation.kv_cache import checksum, read_entry, write_entry
from invariant_rag.interventions import MsPoE
from invariant_rag.methods import METHODS, RowMethod
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from tests.comparing import assert_computes
from tests.generation.test_streaming import runs_in_child

PROMPT = random_prompt(random.Random(0), (6, 9, 1, 4), prefix=4, suffix=3)  # longer than sliding windows
SHUFFLED = PROMPT.shuffled(random.Random(2))
AGAIN = Prompt(SHUFFLED.prefix, SHUFFLED.segments, [9, 8, 7, 6])  # the same documents, another question
SEVERAL = Prompt.of([3], SegmentSet([[5, 6], [7]]), [4], SegmentSet([[8], [9, 10, 11], [12]]), [13, 14])
FAMILIES = [
    *((method, "llama") for method in METHODS),
    *(("pine", family) for family in ("mistral (sliding window)", "gpt_oss")),
    *(("rotor", family) for family in ("gemma2", "gemma3_text")),
    *(("ape", family) for family in ("cohere2", "glm4")),
]


def entry(size):
    """An entry of `8 * size` bytes."""
    return [(torch.full((1, size, 1), 1.0), torch.full((1, size, 1), 2.0))]


@pytest.mark.parametrize(("method", "family"), FAMILIES)
def test_a_warm_answer_equals_a_cold_one_bit_for_bit_and_an_uncached_one_nearly(method, family):
    plain = InvariantModel(tiny_model(family, eos_token_id=None), method=method, ordering="lexical")
    lm, fresh = (plain.with_cache(KeyValueCache()) for _ in range(2))
    cold, scores = fresh.logits(AGAIN), fresh.score(AGAIN, [[5, 6], [7]])
    assert_computes(plain.logits(PROMPT), lm.logits, PROMPT, bounded=plain.logits)
    hits = lm.cache.stats().hits
    assert torch.equal(lm.logits(AGAIN), cold)
    assert lm.score(AGAIN, [[5, 6], [7]]) == scores
    assert lm.cache.stats().hits > hits
    assert lm.generate(AGAIN, max_new_tokens=8).token_ids == plain.generate(AGAIN, max_new_tokens=8).token_ids
    assert_computes(plain.logits(SEVERAL), lm.logits, SEVERAL, bounded=plain.logits)
    assert torch.equal(lm.logits(SEVERAL), fresh.logits(SEVERAL))
    for alone in (Prompt([], [], [3, 4]), Prompt([], [[], []], [3, 4])):  # there is nothing to cache
        assert_computes(plain.logits(alone), lm.logits, alone, bounded=plain.logits)


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if each.context_free_segments])
def test_a_segment_is_read_once_and_reused_in_any_set(method, llama):
    lm, alone = (InvariantModel(llama, method=method, cache=KeyValueCache()) for _ in range(2))
    segments = list(PROMPT.segments)
    lm.generate(PROMPT, max_new_tokens=1)
    other = Prompt(PROMPT.prefix, [segments[2], [50, 51, 52], segments[0]], PROMPT.suffix)
    assert lm.generate(other, max_new_tokens=1).usage.cached_tokens == 4 + 1 + 6
    assert torch.equal(lm.logits(other), alone.logits(other)), "what was cached before leaves no trace"
    elsewhere = Prompt([*PROMPT.prefix, 5], segments, PROMPT.suffix)
    assert lm.generate(elsewhere, max_new_tokens=1).usage.cached_tokens == 0, "it was read after another text"


def test_another_prefix_set_method_backend_model_or_environment_is_not_served(llama, monkeypatch):
    cache = KeyValueCache()
    lm, segments = InvariantModel(llama, cache=cache), list(PROMPT.segments)
    asked = [
        *((lm.with_method(**each), PROMPT) for each in ({}, {"method": "pine"}, {"backend": "reference"})),
        (lm.with_method(deterministic=True), PROMPT),
        (InvariantModel(tiny_model("llama", seed=1), cache=cache), PROMPT),
        *((lm, Prompt(PROMPT.prefix, each, PROMPT.suffix)) for each in (segments[1:], [*segments, [7]])),
        (lm, Prompt([*PROMPT.prefix, 5], segments, PROMPT.suffix)),
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


def test_what_a_method_or_a_model_read_before_and_after_it_changed_is_kept_apart(llama, tmp_path):
    class Turns(RowMethod):
        name, paper, cost, invariant = "turns", "none", "none", False
        step = 1

        def row(self, segment, count):
            return [(segment + type(self).step * j) % count for j in range(1, count + 1)]

    lm = InvariantModel(llama, method=Turns(), ordering="lexical")
    cached = lm.with_cache(KeyValueCache())
    before = cached.logits(PROMPT)
    Turns.step = -1
    assert_computes(lm.logits(PROMPT), cached.logits, PROMPT, bounded=lm.logits)
    assert not torch.allclose(cached.logits(PROMPT), before, atol=1e-2)
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


FOREIGN = {
    "a hook of model.layers.0": lambda model, _: model.model.layers[0].register_forward_hook(lambda *of: of[2] + 0.5),
    "a hook of model.layers.1": lambda model, _: model.model.layers[1].register_forward_pre_hook(lambda *_: None),
    "a hook of the model": lambda model, _: model.register_forward_hook(functools.partial(lambda *_: None)),
    "a forward of its own in model.norm": lambda model, patch: patch.setattr(
        model.model.norm, "forward", functools.wraps(model.model.norm.forward)(lambda states: states * 2)
    ),
    "a hook of all modules": lambda _, patch: patch.setattr(module, "_global_forward_pre_hooks", {1: lambda *_: None}),
}


@pytest.mark.parametrize("where", FOREIGN)
def test_a_model_with_hooks_is_asked_without_the_cache_and_a_warning_says_so(where, monkeypatch):
    plain = InvariantModel(tiny_model("llama", num_hidden_layers=2), ordering="lexical")
    lm = plain.with_cache(KeyValueCache())
    lm.logits(PROMPT)
    before = lm.cache.stats()
    FOREIGN[where](lm.model, monkeypatch)
    with pytest.warns(CacheWarning, match=f"not used: the model has {where}"):
        assert_computes(plain.logits(PROMPT), lm.logits, PROMPT, bounded=plain.logits)
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
    assert (cache.stats().entries, cache.stats().bytes, cache.stats().evictions) == (3, 240, 1)
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


def test_a_pickled_model_answers_alike_with_a_cache_of_its_own(llama, tmp_path):
    lm = InvariantModel(llama, cache=KeyValueCache(max_bytes=1 << 20, folder=tmp_path, namespace="a"))
    expected = lm.generate(PROMPT, max_new_tokens=4)
    copied = pickle.loads(pickle.dumps(lm))
    assert copied.cache.stats().entries == 0
    assert copied.generate(SHUFFLED, max_new_tokens=4).token_ids == expected.token_ids
    assert copied.cache.stats().disk_hits == 1


WRONG = [
    *((name, each) for name in ("max_bytes", "max_disk_bytes") for each in (Path("x"), -1, None, 1.5)),
    *(("device", "gpu"), ("device", 1.5), ("folder", ""), ("folder", 1.5), ("namespace", None), ("namespace", 1.5)),
]


def test_a_wrong_argument_is_named_and_only_keys_and_values_are_stored():
    for name, value in WRONG:
        with pytest.raises(InvalidChoice, match=f"{name}: expected"):
            KeyValueCache(**{name: value})
    for folder, named in (("null\x00character", "null"), (f"{__file__}/below", "test_kv_cache")):
        with pytest.raises((InvalidChoice, UnusableFile), match=named):
            KeyValueCache(folder=folder)
    for wrong in ([], None, [5], [(torch.ones(1, 1, 1),)], [(torch.ones(1, 1, 1), None)]):
        with pytest.raises(InvalidChoice, match="keys and values"):
            KeyValueCache().put("x", wrong)
    with pytest.raises(InvalidChoice, match="key: expected a str"):
        KeyValueCache().get(5)


# --- files: bound to their keys, private, within room, and nobody else's are touched ---

UNFINISHED = "invariant-rag-x.unfinished"


def file_of(folder, key, namespace=""):
    """Write an entry, and return its file, in a folder without others."""
    KeyValueCache(folder=folder, namespace=namespace).put(key, entry(20))
    return next(filter(Path.is_file, folder.glob("invariant-rag-*.safetensors")))


def size_of(folder):
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def has(folder, *keys, namespace=""):
    return [KeyValueCache(folder=folder, namespace=namespace).get(str(key)) is not None for key in keys]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_only_their_owner_can_read_the_files_with_any_program_as_the_docstring_says(dtype, tmp_path):
    stored = [(torch.randn(2, 5, 3).to(dtype), torch.randn(2, 5, 4).to(dtype)) for _ in range(11)]
    named = {f"{n}.{side}": stored[n][place] for n in range(11) for place, side in enumerate(("keys", "values"))}
    folder, before = tmp_path / "a" / "b", os.umask(0)
    try:
        KeyValueCache(folder=folder, namespace="a tenant").put("x", stored)
    finally:
        os.umask(before)
    (path,) = folder.glob("invariant-rag-*.safetensors")
    modes = {each.name: stat.S_IMODE(each.stat().st_mode) for each in (folder, *folder.iterdir())}
    assert modes == {"b": 0o700, path.name: 0o600, "key-value-cache.lock": 0o600}
    tensors = load_file(path)
    assert tensors.keys() == named.keys()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"sha256": checksum(path.name, tensors)}
    assert all(torch.equal(each, named[name]) for name, each in tensors.items())
    assert all(map(torch.equal, chain(*read_entry(path)), named.values()))


def file_with(*names):
    """The content of a file with tensors of these names, whose checksum is right."""
    tensors = {name: torch.ones(1, 2, 3) for name in names}
    return lambda _, path: save(tensors, {"sha256": checksum(path, tensors)})


DAMAGE = {
    "cut": lambda content, _: content[:-5],
    "flip": lambda content, _: content[:-1] + bytes([content[-1] ^ 1]),
    "empty": lambda *_: b"",
    "another's": lambda *_: write_entry(entry(20), "invariant-rag-another.safetensors"),
    "a header": lambda content, _: content[:8] + b"[" * (len(content) - 8),
    "metadata": lambda content, _: content.replace(b'"sha256":"', b'"sha255":"'),
    "no tensors": file_with(),
    "no values": file_with("0.keys"),
    "no pairs": file_with("0.keys", "1.values"),
    "more tensors": file_with("0.keys", "0.values", "0.more"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_a_miss_and_is_removed(damage, tmp_path):
    path = file_of(tmp_path, "x")
    path.write_bytes(DAMAGE[damage](path.read_bytes(), path.name))
    with pytest.raises(DamagedEntry, match=path.name):
        read_entry(path)
    cache = KeyValueCache(folder=tmp_path)
    assert cache.get("x") is None
    assert (cache.stats().damaged, cache.stats().misses) == (1, 1)
    assert not path.exists()


FORGED = {
    "a layer less": lambda entry: entry[:-1],
    "a token less": lambda entry: [(k[:, 1:], v[:, 1:]) for k, v in entry],
    "a head less": lambda entry: [(k[1:], v[1:]) for k, v in entry],
    "another dtype": lambda entry: [(k.half(), v.half()) for k, v in entry],
    "no tokens": lambda entry: [(k[:, :0], v[:, :0]) for k, v in entry],
}


@pytest.mark.parametrize("method", ["rotor", "ape"])
@pytest.mark.parametrize("wrong", FORGED)
def test_an_entry_that_is_not_what_was_asked_for_changes_no_answer(wrong, method, llama, tmp_path):
    lm = InvariantModel(llama, method=method)
    expected = lm.with_cache(KeyValueCache(folder=tmp_path)).logits(PROMPT)
    contents = {path: path.read_bytes() for path in tmp_path.glob("*.safetensors")}
    for path in contents:
        path.write_bytes(write_entry(FORGED[wrong](read_entry(path)), path.name))
    cache, count = KeyValueCache(folder=tmp_path), 1 if method == "rotor" else 1 + len(PROMPT.segments)
    assert torch.equal(lm.with_cache(cache).logits(PROMPT), expected)
    assert (cache.stats().damaged, cache.stats().disk_hits, cache.stats().misses) == (count, 0, count)
    assert {path: path.read_bytes() for path in contents} == contents, "the right ones were written again"
    again = KeyValueCache(folder=tmp_path)
    assert torch.equal(lm.with_cache(again).logits(PROMPT), expected)
    assert again.stats().disk_hits == count


def test_entries_of_one_namespace_are_not_served_to_another(tmp_path):
    names = ["", "a", "b", "('x', 'a')", "\ud800"]
    for name in names:
        assert has(tmp_path, "x", namespace=name) == [False]
        file_of(tmp_path, "x", name)
        assert has(tmp_path, "x", namespace=name) == [True]
    KeyValueCache(folder=tmp_path, namespace="a").clear()
    assert [has(tmp_path, "x", namespace=each)[0] for each in names] == [each != "a" for each in names]


def test_clearing_and_making_room_touch_nobody_elses_files(tmp_path):
    """Each is larger than the room, and its name looks like ours. The least recently used entries make room."""
    names = ("model.safetensors", f"{'a' * 64}.safetensors", "x.unfinished", "unfinished-notes", "invariant-rag-x.pdf")
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 999)
        os.utime(tmp_path / name, (0, 0))
    folders = [tmp_path / UNFINISHED, tmp_path / "invariant-rag-x.safetensors"]
    for each in folders:
        each.mkdir()
    foreign, size = size_of(tmp_path), file_of(tmp_path, "x").stat().st_size
    cache = KeyValueCache(max_bytes=0, folder=tmp_path, max_disk_bytes=3 * size)
    for number in range(5):
        time.sleep(0.01)
        if number == 4:
            assert cache.get("1") is not None  # used now
            time.sleep(0.01)
        cache.put(str(number), entry(20))
        assert size_of(tmp_path) <= 3 * size + foreign
    assert has(tmp_path, *range(5)) == [False, True, False, True, True]
    for room in (0, 1, size - 1):  # larger ones are not written
        small = KeyValueCache(folder=tmp_path / "small", max_disk_bytes=room)
        small.put("x", entry(20))
        assert size_of(tmp_path / "small") == 0
        assert (small.stats().entries, small.stats().disk_errors) == (1, 0)
    cache.clear()
    assert not any(has(tmp_path, *range(5)))
    assert all((tmp_path / name).read_bytes() == name.encode() * 999 for name in names)
    assert all(each.is_dir() for each in folders)


@pytest.mark.parametrize("kind", ["a pipe", "a folder"])
def test_a_disk_that_refuses_costs_no_answer_and_is_an_error_of_clear(kind, llama, tmp_path, caplog, monkeypatch):
    path = file_of(tmp_path / "a", "x")
    monkeypatch.setattr(os, "utime", Mock(side_effect=PermissionError("read-only")))
    cache = KeyValueCache(folder=path.parent)
    assert cache.get("x") is not None, "a store that may only be read serves"
    assert (cache.stats().disk_hits, cache.stats().disk_errors) == (1, 0)
    path.unlink()
    os.mkfifo(path) if kind == "a pipe" else path.mkdir()
    cache = KeyValueCache(max_bytes=0, folder=path.parent)
    assert cache.get("x") is None
    assert cache.stats().disk_errors == 1
    cache.clear()
    assert path.exists()
    path.parent.rename(tmp_path / "b")
    path.parent.write_text("a file where the folder was")
    plain = InvariantModel(llama, ordering="lexical")
    assert_computes(plain.logits(PROMPT), plain.with_cache(cache).logits, PROMPT, bounded=plain.logits)
    assert cache.stats().disk_errors == 3  # one entry was looked for, and written
    assert "cannot write" in caplog.text
    with pytest.raises(UnusableFile, match="cannot clear"):
        cache.clear()


def _write_for_ever(folder, start, room):
    cache = KeyValueCache(max_bytes=0, folder=folder, max_disk_bytes=room)
    for number in cycle([*range(start, 40), *range(start)]):
        cache.put(str(number), [(torch.full((2, 4000, 8), float(number)), torch.zeros(2, 4000, 8))])


def test_a_store_whose_writers_are_killed_serves_intact_entries_and_keeps_to_its_room(tmp_path):
    """Twenty kills, of two processes that write at the same time."""
    room = 5 * len(write_entry([(torch.ones(2, 4000, 8), torch.zeros(2, 4000, 8))], "x")) + 1000
    draw, processes, served = random.Random(0), multiprocessing.get_context("fork"), 0
    for _ in range(10):
        writers = [processes.Process(target=_write_for_ever, args=(tmp_path, start, room)) for start in (0, 7)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.005, 0.05))
        for writer in writers:
            writer.kill()
            writer.join()
        assert size_of(tmp_path) <= room
        cache = KeyValueCache(folder=tmp_path)
        for number in range(40):
            found = cache.get(str(number))
            assert found is None or torch.equal(found[0][0], torch.full((2, 4000, 8), float(number)))
        assert cache.stats().damaged == 0
        served += cache.stats().disk_hits
    assert served
    left = tmp_path / UNFINISHED
    for act in (lambda cache: cache.put("x", entry(10)), KeyValueCache.clear):
        left.write_bytes(b"torn")
        act(KeyValueCache(folder=tmp_path))
        assert not left.exists()


@pytest.mark.skipif(not hasattr(os, "fork") or os.getuid() != 0, reason="only root can become another user")
def test_a_folder_of_another_user_holds_nothing_for_this_one():
    with TemporaryDirectory() as outside:  # those of pytest lie in a folder that other users cannot enter
        Path(outside).chmod(0o755)
        folder = Path(outside) / "cache"
        file_of(folder, "x")

        def look():
            os.setuid(65534)
            assert has(folder, "x") == [False]

        assert runs_in_child(look)
        assert has(folder, "x") == [True]
