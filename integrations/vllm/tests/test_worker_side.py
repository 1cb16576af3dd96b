"""Where keys and values go: heads of tensor-parallel workers, slots of blocks, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.kv_cache_files import Entry

from vllm_invariant_rag import UnsupportedServer
from vllm_invariant_rag.heads import local_heads
from vllm_invariant_rag.scheduler_side import Load
from vllm_invariant_rag.store import open_cache
from vllm_invariant_rag.worker_side import CacheShape, WorkerSide

HEADS, TOKENS, SIZE, LAYERS = 4, 11, 8, 2


class Layer:
    """An attention layer with a cache of slots `[slots, heads, size]`, written as vLLM's layers write."""

    def __init__(self, heads: int, slots: int) -> None:
        self.kv_cache = torch.zeros(2, slots, heads, SIZE)
        self.impl = self

    def do_kv_cache_update(
        self, layer: Layer, keys: torch.Tensor, values: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor
    ) -> None:
        assert layer is self
        assert cache is self.kv_cache
        cache[0, slots], cache[1, slots] = keys, values


def entry(heads: int = HEADS, tokens: int = TOKENS, dtype: torch.dtype = torch.float32) -> Entry:
    generator = torch.Generator().manual_seed(1)
    tensors = [torch.randn(heads, tokens, SIZE, generator=generator).to(dtype) for _ in range(2 * LAYERS)]
    return list(zip(tensors[::2], tensors[1::2], strict=True))


def worker(
    cache: KeyValueCache, size: int = 1, rank: int = 0, block_size: int = 4
) -> tuple[WorkerSide, dict[int, Any]]:
    heads = local_heads(HEADS, size, rank)
    side = WorkerSide(cache, CacheShape(LAYERS, HEADS, heads, SIZE, torch.float32, block_size))
    layers = {index: Layer(heads.stop - heads.start, slots=20 * block_size) for index in range(LAYERS)}
    side.register_layers(layers)
    return side, layers


@pytest.fixture(params=["folder", "redis"])
def cache(request: pytest.FixtureRequest, tmp_path: Path) -> KeyValueCache:
    """Another cache than the one into which the entry was put, as in vLLM."""
    place = {"folder": str(tmp_path)}
    if request.param == "redis":
        place = {"redis_url": request.getfixturevalue("redis").url}
    open_cache(place).put("key", entry())
    return open_cache(place)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_workers_together_hold_every_head(size: int, cache: KeyValueCache) -> None:
    stored = entry()
    for layer in range(LAYERS):
        held: list[torch.Tensor] = []
        for rank in range(size):
            side, layers = worker(cache, size, rank)
            side.load(Load("a", "key", TOKENS, 0, (7, 3, 9)))
            slots = list(Load("a", "key", TOKENS, 0, (7, 3, 9)).slots(4).values())
            held.append(layers[layer].kv_cache[0, slots].transpose(0, 1))
            assert side.take_failed_blocks() == set()
        copies = max(1, size // HEADS)
        assert torch.equal(torch.cat(held[::copies]), stored[layer][0])
        assert all(
            torch.equal(one, other) for one, other in zip(held[::copies], held[copies - 1 :: copies], strict=True)
        )


@pytest.mark.parametrize(("heads", "size"), [(4, 3), (3, 4), (6, 4)])
def test_heads_that_cannot_be_shared_evenly_are_refused(heads: int, size: int) -> None:
    with pytest.raises(UnsupportedServer, match="evenly"):
        local_heads(heads, size, 0)


@pytest.mark.parametrize("block_size", [1, 4, 16, 128])
@pytest.mark.parametrize("start", [0, 4, 10])
def test_blocks_of_any_size_hold_the_tokens_from_the_first_that_is_missing(
    block_size: int, start: int, cache: KeyValueCache
) -> None:
    side, layers = worker(cache, block_size=block_size)
    blocks = tuple(reversed(range(1, 1 + -(-TOKENS // block_size))))
    load = Load("a", "key", TOKENS, start, blocks)
    side.load(load)
    expected = torch.zeros(20 * block_size, HEADS, SIZE)
    for token in range(start, TOKENS):
        expected[blocks[token // block_size] * block_size + token % block_size] = entry()[1][0][:, token]
    assert torch.equal(layers[1].kv_cache[0], expected)


def test_tokens_that_a_sliding_window_left_behind_are_neither_written_nor_reported(cache: KeyValueCache) -> None:
    side, layers = worker(cache)
    side.load(Load("a", "key", TOKENS, 0, (0, 0, 9)))
    side.load(Load("b", "nothing", TOKENS, 0, (0, 2, 4)))
    assert not layers[0].kv_cache[:, :36].any()
    assert torch.equal(layers[0].kv_cache[0, 36:39].transpose(0, 1), entry()[0][0][:, 8:])
    assert side.take_failed_blocks() == {2, 4}


def refusals() -> Sequence[tuple[str, Entry]]:
    return [
        ("tokens", entry(tokens=TOKENS + 1)),
        ("heads", entry(heads=HEADS - 1)),
        ("layers", entry()[:1]),
        ("float32", entry(dtype=torch.float16)),
        ("size of a head", [(keys[..., :4], values[..., :4]) for keys, values in entry()]),
        ("size of a head", [(keys.flatten(), values.flatten()) for keys, values in entry()]),
        ("size of a head", [(keys[None], values[None]) for keys, values in entry()]),
    ]


@pytest.mark.parametrize(("why", "wrong"), refusals())
def test_what_does_not_fit_is_written_nowhere_and_its_blocks_are_failures(
    why: str, wrong: Entry, cache: KeyValueCache, caplog: pytest.LogCaptureFixture
) -> None:
    cache.put("wrong", wrong)
    side, layers = worker(cache)
    side.load(Load("a", "wrong", TOKENS, 5, (7, 3, 9)))
    side.load(Load("b", "nothing", TOKENS, 0, (1, 2, 4)))
    side.load(Load("c", None, TOKENS, 0, (11, 12, 13)))
    assert not layers[0].kv_cache.any()
    assert side.take_failed_blocks() == {3, 9, 1, 2, 4, 11, 12, 13}
    assert side.take_failed_blocks() == set()
    assert why in caplog.text


def test_a_kernel_that_fails_costs_one_request(cache: KeyValueCache, caplog: pytest.LogCaptureFixture) -> None:
    side, layers = worker(cache)
    layers[1].kv_cache = torch.zeros(2, 1, HEADS, SIZE)  # too few slots: an IndexError
    side.load(Load("a", "key", TOKENS, 0, (7, 3, 9)))
    assert side.take_failed_blocks() == {7, 3, 9}
    assert "request a fails: IndexError" in caplog.text
