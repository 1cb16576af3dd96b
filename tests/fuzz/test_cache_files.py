"""Mutated, truncated, renamed and foreign files in the folder of a cache: no wrong entry is served, nothing is lost."""

import os
from contextlib import suppress

import pytest
import torch
from safetensors.torch import save

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.errors import DamagedEntry
from invariant_rag.generation.kv_cache import read_entry, write_entry
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from tests.fuzz.mutations import full_disk, mutated

CUTS = (
    lambda each: each[1:],
    lambda each: [],
    lambda each: [(keys[:, :-1], values[:, :-1]) for keys, values in each],
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def entry(source):
    """One to twelve layers of any shapes, also without tokens."""
    dtype, shape = source.choice(DTYPES), (source.randint(1, 3), source.randrange(5), source.randint(1, 4))
    made = torch.Generator().manual_seed(source.randrange(1 << 30))
    keys, values = ([torch.randn(shape, generator=made).to(dtype) for _ in range(12)] for _ in range(2))
    return list(zip(keys, values, strict=True))[: source.randint(1, 12)]


def content(entry):
    """What two entries have in common that are the same, by bytes: what is no number equals itself."""
    flat = [each for pair in entry for each in pair]
    return [(each.dtype, each.shape, each.view(torch.uint8).numpy().tobytes()) for each in flat]


def of_another_format(source):
    tensors = {"0.keys": torch.ones(1, 2, 3), "0.values": torch.ones(1, 2, 3)}
    formats = [b"", b"%PDF-1.7\n", b"PK\x03\x04", b"{}", save(tensors), save(tensors, {"format": "pt"})]
    return source.choice([*formats, source.randbytes(300)])


@pytest.mark.rounds(100)
def test_whatever_happens_to_a_folder_every_key_gives_its_own_entry_or_none(rounds, tmp_path, ignored_size_signal):
    for number, source in enumerate(rounds()):
        treat(tmp_path / str(number), source)


def treat(folder, source):
    """Do twenty random things to a folder that two tenants use."""
    room = source.choice((0, 500, 5000, 1 << 20))
    caches = {each: KeyValueCache(0, folder=folder, max_disk_bytes=room, namespace=each) for each in ("", "a")}
    entries = {(tenant, key): entry(source) for tenant in caches for key in "wxyz"}  # a key determines its entry
    foreign = {}
    for _ in range(20):
        files = sorted(folder.glob("*.safetensors"))
        ours = [path for path in files if path not in foreign]
        tenant, key = source.choice(("", "a")), source.choice("wxyz")
        match source.randrange(8):
            case 0 | 1:
                caches[tenant].put(key, entries[tenant, key])
                assert all(path.stat().st_mode & 0o77 == 0 for path in folder.iterdir() if path not in foreign)
            case 2 if ours:
                path = source.choice(ours)
                path.write_bytes(mutated(path.read_bytes(), source))
            case 3 if len(ours) > 1:
                one, other = source.sample(ours, 2)
                one.replace(other)
            case 4:
                name = source.randbytes(32).hex() if source.random() < 0.5 else source.randrange(99)
                path = folder / f"{name}.safetensors"
                foreign[path] = of_another_format(source)
                path.write_bytes(foreign[path])
            case 5 if ours:
                os.truncate(source.choice(ours), source.randrange(200))
            case 6:
                caches[tenant].clear()
            case _:
                with full_disk(source.randrange(2000)):
                    caches[tenant].put(key, entries[tenant, key])
        for (tenant, key), expected in entries.items():
            served = caches[tenant].get(key)
            assert served is None or content(served) == content(expected)
        assert all(path.read_bytes() == content for path, content in foreign.items())


@pytest.mark.rounds(5)
def test_files_that_are_exchanged_or_mutated_change_no_answer(rounds, tmp_path):
    models = [InvariantModel(tiny_model("llama", seed=seed), ordering="lexical") for seed in (0, 1)]
    for number, source in enumerate(rounds()):
        folder = tmp_path / str(number)
        method = source.choice(("rotor", "ape", "pine"))
        prompts = [random_prompt(source, (3, 2, 3), prefix=3, suffix=2) for _ in range(2)]
        asked = [(lm.with_method(method, ordering="lexical"), prompt) for lm in models for prompt in prompts]
        expected = [lm.with_cache(KeyValueCache(folder=folder)).logits(prompt) for lm, prompt in asked]
        files = sorted(folder.glob("*.safetensors"))
        for path in source.sample(files, min(3, len(files))):
            other = source.choice(files)
            if not path.exists():
                continue
            match source.randrange(4):
                case 0:
                    path.replace(other)
                case 1:
                    other.write_bytes(path.read_bytes())
                case 2:  # its own name and a right checksum, but something is missing; what it holds has another layout
                    with suppress(DamagedEntry):
                        path.write_bytes(write_entry(source.choice(CUTS)(read_entry(path)), path.name))
                case _:
                    path.write_bytes(mutated(path.read_bytes(), source))
        found = [lm.with_cache(KeyValueCache(folder=folder)).logits(prompt) for lm, prompt in asked]
        assert all(map(torch.equal, found, expected))
