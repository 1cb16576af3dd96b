"""The backend `varlen`: its windows say what the rows say, its kernels agree, and its calls do not grow.

Where there is no GPU, a double stands for the function that CUDA's kernel calls. It does what the documentation of that
function says, for the arguments that it was given.
"""

import random
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from invariant_rag.arrangement import Layout, Span
from invariant_rag.attention import backend_label
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.positions import Rotation
from invariant_rag.attention.reference import Reference
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.softmax import AttentionState
from invariant_rag.attention.varlen import Grouped, TorchVarlen, Varlen, difference, usable_kernel
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.testing.families import tiny_model
from tests.comparing import assert_computes, frequencies

HEADS, KEY_HEADS, SIZE = 4, 2, 16
CPU = torch.device("cpu")


class Dense:
    """Matrix products over all keys, and a mask, in float32 or wider; the number of operators does not grow."""

    name = "dense"

    def __call__(self, queries, keys, values, windows, scaling):
        wide, (count, heads, _) = torch.promote_types(queries.dtype, torch.float32), queries.shape
        grouped = queries.to(wide).unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("thgd,shd->thgs", grouped, keys.to(wide)) * scaling
        window = torch.repeat_interleave(windows.query_starts.diff(), output_size=count)
        place, query = torch.arange(len(keys), device=keys.device), torch.arange(count, device=keys.device)
        first = windows.key_starts[window]
        stop = first + windows.key_lengths[window]
        if windows.is_causal:
            stop = stop - (windows.query_starts[window + 1] - 1 - query)
        visible = (place >= first[:, None]) & (place < stop[:, None])
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        out = torch.einsum("thgs,shd->thgd", scores.softmax(dim=-1), values.to(wide))
        return AttentionState(out.flatten(1, 2).to(queries.dtype), scores.logsumexp(dim=-1).view(count, heads))


def _arrangement(method, chance):
    counts = chance.choice(([3], [1], [5], [2, 3], [1, 1, 2], [0, 4]))
    sets = tuple(tuple(chance.randint(1, 6) for _ in range(count)) for count in counts)
    texts = (chance.randint(0, 4), *(chance.randint(0, 5) for _ in counts[1:]), chance.randint(1, 5))
    return resolve_method(method).arrange(Layout(texts, sets))


def _batch(arrangements, num_queries=None, generated=0, **options):
    lengths = [each.layout.length + generated for each in arrangements]
    longest = max(lengths)
    keys, values = (torch.randn(len(lengths), KEY_HEADS, longest, SIZE, dtype=torch.float64) for _ in range(2))
    queries = torch.randn(len(lengths), HEADS, num_queries or longest, SIZE, dtype=torch.float64)
    rotation = Rotation(frequencies(10_000.0 ** -(torch.arange(0, SIZE, 2).double() / SIZE)), "inv_freq")
    call = AttentionCall(queries, keys, values, rotation, SIZE**-0.5, **options)
    return [longest - length for length in lengths], call


def _assert_by_reference(found, arrangements, padding, call):
    """Assert that each row of a batch `[B, Q, H, D]` is what the reference gives for it, in parts of float32."""
    assert found is not None
    assert torch.isfinite(found).all()
    for row, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        skipped = max(0, padded - (call.keys.shape[2] - call.queries.shape[2]))
        tensors = call.queries[row, :, skipped:], call.keys[row, :, padded:], call.values[row, :, padded:]
        one = AttentionCall(*tensors, call.rotation, call.scaling, sinks=call.sinks)
        assert_computes(found[row, skipped:].transpose(0, 1), Reference().attend, arrangement, one)


@pytest.mark.parametrize(
    ("method", "kernel"), [*((method, Dense()) for method in METHODS), ("rotor", Grouped()), ("pine", Grouped())]
)
def test_a_padded_batch_gets_what_each_prompt_gets_by_the_reference(method, kernel):
    """Also the last queries alone, and with sinks. PINE ranks for all tokens of a segment."""
    chance = random.Random(method)
    last = [{"num_queries": count, "sinks": torch.randn(HEADS)} for count in (1, 3)]
    for size, options in ((1, {}), (3, {}), *((3, each) for each in last if method not in ("pine", "pine-reverse"))):
        arrangements = [_arrangement(method, chance) for _ in range(size)]
        padding, call = _batch(arrangements, **options)
        _assert_by_reference(Varlen(kernel).batch(arrangements, padding, call, {}), arrangements, padding, call)


@pytest.mark.parametrize(("method", "kernel"), [("pine", Dense()), ("pine-reverse", Grouped())])
def test_every_decoded_token_gets_what_it_gets_by_the_reference(method, kernel):
    chance, generated = random.Random(method), 3
    for size in (1, 3, 3):
        arrangements = [_arrangement(method, chance) for _ in range(size)]
        sinks = torch.randn(HEADS) if size == 1 else None
        padding, whole = _batch(arrangements, generated + 1, generated, sinks=sinks)
        plans, scratch = {}, {}
        for token in range(generated + 1):
            behind = whole.keys.shape[2] - generated + token
            parts = {name: getattr(whole, name)[:, :, :behind] for name in ("keys", "values")}
            queries = whole.queries[:, :, token : token + 1]
            call = AttentionCall(**{**vars(whole), **parts, "queries": queries, "scratch": scratch})
            _assert_by_reference(Varlen(kernel).batch(arrangements, padding, call, plans), arrangements, padding, call)


# --- what a layer costs ---

WAITS = ("equal", "item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")
"""Parts of the names of operators that wait for the device, or bring numbers of the host to it."""


class _Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that are called, and what they return that shares no memory with their inputs."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.sizes = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.calls[str(function)] += 1
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.sizes.append(each.numel())
        return out


@pytest.mark.parametrize("decoding", [False, True], ids=["prefill", "decoding"])
@pytest.mark.parametrize("method", ["rotor", "set-based", "ape", "pine"])
def test_the_operators_of_a_layer_do_not_grow_with_segments_or_prompts(method, decoding):
    def count(prompts, segments):
        layout = Layout((3, 4), ((3,) * segments,))
        arrangements = [resolve_method(method).arrange(layout) for _ in range(prompts)]
        padding, call = _batch(arrangements, 1 if decoding else None)
        backend, plans = Varlen(Dense()), {}
        assert backend.batch(arrangements, padding, call, plans) is not None
        with _Operators() as operators:
            backend.batch(arrangements, padding, call, plans)
        return operators.calls

    few = count(2, 3)
    assert count(2, 30) == few
    assert count(8, 5) == few
    most = 4 if method == "pine" and not decoding else 2
    assert 1 <= few["aten.repeat_interleave.Tensor"] <= most, "calls of the kernel per layer"
    assert not [name for name in few if any(part in name for part in WAITS)], "the device would be waited for"


def test_the_test_above_sees_what_waits_for_the_device():
    numbers = torch.ones(3)
    waiting = (lambda: torch.equal(numbers, numbers), numbers.sum().item, numbers.nonzero, lambda: torch.tensor([1, 2]))
    for part, call in zip(("equal", "_local_scalar_dense", "nonzero", "lift_fresh"), waiting, strict=True):
        with _Operators() as operators:
            call()
        assert any(part in name for name in operators.calls)


def test_another_token_of_the_batch_copies_no_keys():
    """Windows of a cache are packed as it lies: all that is as large as the keys is made at the first token."""
    arrangements = [resolve_method("pine").arrange(Layout((3, 4), ((50, 50, 50),))) for _ in range(4)]
    padding, call = _batch(arrangements, 1)
    backend, plans = Varlen(Grouped()), {}
    backend.batch(arrangements, padding, call, plans)
    with _Operators() as operators:
        backend.batch(arrangements, padding, call, plans)
    assert max(operators.sizes) < call.keys.numel() / 4


# --- kernels ---


def test_a_kernel_that_is_wrong_is_found_out():
    def late(queries, keys, values, windows, scaling):
        """Every window begins one key late."""
        return Dense()(queries, keys.roll(1, 0), values.roll(1, 0), windows, scaling)

    assert not difference(Dense(), CPU, torch.float32)
    assert not difference(Grouped(), CPU, torch.bfloat16)
    assert "not those" in difference(late, CPU, torch.float32)


def test_a_kernel_gets_no_more_windows_than_a_gpu_can_start_blocks():
    def limited(queries, keys, values, windows, scaling):
        counts.append(len(windows.key_lengths))
        return Dense()(queries, keys, values, windows, scaling)

    counts, lengths = [], [1, 2] * 35_000
    spans = [Span(index % 3, index % 3 + 2) for index in range(len(lengths))]
    queries, keys = torch.randn(sum(lengths), 1, 2), torch.randn(5, 1, 2)
    layer = PackedLayer(limited, AttentionCall(queries, keys, keys, Rotation(None), scaling=1.0), queries, keys, keys)
    for is_causal in (True, False):
        windows = PackedWindows.of(lengths, spans, is_causal, CPU)
        found = layer.attend(windows, queries)
        for each, expected in zip(found, Dense()(queries, keys, keys, windows, 1.0), strict=True):
            torch.testing.assert_close(each, expected)
    assert len(counts) == 4
    assert max(counts) < 1 << 16


def test_a_backend_says_which_kernel_it_takes_and_without_one_or_for_other_layers_takes_none(monkeypatch, caplog):
    arrangements = [_arrangement("rotor", random.Random(0))]
    for change in ({"softcap": 5.0}, {"dropout": 0.1}, {"sliding_window": 3}):
        padding, call = _batch(arrangements, **change)
        assert Varlen().batch(arrangements, padding, call, {}) is None, "it is left to the other backend"
    labels = [backend_label(each, tiny_model("llama")) for each in (SDPA(), Varlen(), Varlen(Dense()))]
    assert labels == ["sdpa", "varlen (grouped)", "varlen (dense)"]

    def missing(*_):
        raise ImportError("no varlen here")

    monkeypatch.setattr(TorchVarlen, "__call__", missing)
    usable_kernel.cache_clear()
    assert Varlen().kernel_for(torch.device("meta"), torch.bfloat16, 64) is None
    assert "one by one: ImportError: no varlen here" in caplog.text
    usable_kernel.cache_clear()


def test_the_kernel_for_cuda_computes_all_windows_if_its_operator_does_what_is_documented():
    def documented(q, k, v, starts, key_starts, most, most_keys, dropout, causal, debug, *, scale, **keywords):
        lengths = keywords["seqused_k"]
        assert {each.dtype for each in (starts, key_starts, lengths)} == {torch.int32}
        assert len(starts) == len(key_starts) == len(lengths) + 1
        assert (most, most_keys) == (int(starts.diff().max()), int(lengths.max()))
        assert (dropout, debug, causal) == (0.0, False, keywords["window_size_right"] == 0)
        assert keywords["window_size_left"] == -1
        out, lse = Dense()(q, k, v, PackedWindows(starts, key_starts, lengths, most, most_keys, causal), scale)
        return out, lse.T, *(torch.empty(0) for _ in range(3))

    assert difference(TorchVarlen(), CPU, torch.float32), "this cannot be computed on a CPU"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", documented, "CPU")
        assert not difference(TorchVarlen(), CPU, torch.float32)
    meta = torch.device("meta")  # the operator of the installed PyTorch takes the arguments
    queries = torch.empty(12, 4, 64, dtype=torch.bfloat16, device=meta)
    keys = torch.empty(9, 2, 64, dtype=torch.bfloat16, device=meta)
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 8), [Span(0, 5), Span(0, 9)], is_causal, meta)
        out, lse = TorchVarlen()(queries, keys, keys, windows, 0.125)
        assert (out.shape, out.dtype) == ((12, 4, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((12, 4), torch.float32)
