"""The backend `varlen`: its windows say what the rows say, its kernels agree, and its calls do not grow."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from invariant_rag import InvariantModel
from invariant_rag.arrangement import Arrangement, Layout
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.positions import Rotation
from invariant_rag.attention.reference import Reference
from invariant_rag.attention.varlen import Grouped, Varlen, VarlenKernel
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.testing import random_prompt
from invariant_rag.testing.rounding import rounding
from tests.attention.test_varlen_kernels import Dense

HEADS, KEY_HEADS, SIZE = 4, 2, 16
WINDOWED = list(METHODS)


class _Frequencies(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 10_000.0 ** -(torch.arange(0, SIZE, 2).double() / SIZE))


def _arrangement(method: str, chance: random.Random) -> Arrangement:
    counts = chance.choice(([3], [1], [5], [2, 3], [1, 1, 2], [0, 4]))
    sets = tuple(tuple(chance.randint(1, 6) for _ in range(count)) for count in counts)
    texts = (chance.randint(0, 4), *(chance.randint(0, 5) for _ in counts[1:]), chance.randint(1, 5))
    return resolve_method(method).arrange(Layout(texts, sets))


def _batch(
    arrangements: Sequence[Arrangement], num_queries: int | None = None, generated: int = 0
) -> tuple[list[int], AttentionCall]:
    lengths = [each.layout.length + generated for each in arrangements]
    longest = max(lengths)
    keys, values = (torch.randn(len(lengths), KEY_HEADS, longest, SIZE, dtype=torch.float64) for _ in range(2))
    queries = torch.randn(len(lengths), HEADS, num_queries or longest, SIZE, dtype=torch.float64)
    rotation = Rotation(_Frequencies(), "inv_freq")
    return [longest - length for length in lengths], AttentionCall(queries, keys, values, rotation, SIZE**-0.5)


def _by_reference(arrangement: Arrangement, padding: int, call: AttentionCall, row: int) -> torch.Tensor:
    skipped = max(0, padding - (call.keys.shape[2] - call.queries.shape[2]))
    one = AttentionCall(
        call.queries[row, :, skipped:],
        call.keys[row, :, padding:],
        call.values[row, :, padding:],
        call.rotation,
        call.scaling,
        sinks=call.sinks,
    )
    return Reference().attend(arrangement, one).transpose(0, 1)


@pytest.mark.parametrize("kernel", [Dense(), Grouped()], ids=lambda each: each.name)
@pytest.mark.parametrize("method", WINDOWED)
def test_a_padded_batch_gets_what_each_prompt_gets_by_the_reference(method: str, kernel: VarlenKernel) -> None:
    chance = random.Random(method)
    for size in (1, 3):
        arrangements = [_arrangement(method, chance) for _ in range(size)]
        padding, call = _batch(arrangements)
        found = Varlen(kernel).batch(arrangements, padding, call, {})
        assert found is not None
        for row, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
            expected = _by_reference(arrangement, padded, call, row)
            bound = rounding(_by_reference, arrangement, padded, call, row)  # parts merge in float32
            torch.testing.assert_close(found[row, padded:], expected, atol=bound, rtol=0)
        assert torch.isfinite(found).all()


def test_the_last_text_alone_and_sinks_are_attended_to_in_a_batch() -> None:
    chance = random.Random(1)
    arrangements = [_arrangement("rotor", chance) for _ in range(3)]
    padding, call = _batch(arrangements, num_queries=1)
    call = AttentionCall(**{**vars(call), "sinks": torch.randn(HEADS)})
    found = Varlen(Dense()).batch(arrangements, padding, call, {})
    assert found is not None
    for row, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        expected = _by_reference(arrangement, padded, call, row)
        bound = rounding(_by_reference, arrangement, padded, call, row, dtype=torch.float64)
        torch.testing.assert_close(found[row], expected, atol=bound, rtol=0)


@pytest.mark.parametrize("change", [{"softcap": 5.0}, {"dropout": 0.1}, {"sliding_window": 3}])
def test_layers_that_no_such_kernel_computes_are_left_to_the_other_backend(change: dict[str, Any]) -> None:
    arrangements = [_arrangement("rotor", random.Random(0))]
    padding, call = _batch(arrangements)
    assert Varlen().batch(arrangements, padding, AttentionCall(**{**vars(call), **change}), {}) is None


@pytest.mark.parametrize("method", METHODS)
def test_the_logits_are_those_of_the_reference(llama: PreTrainedModel, method: str) -> None:
    prompt = random_prompt(random.Random(0), (3, 5, 2))
    expected = InvariantModel(llama, method=method, backend="reference").logits(prompt)
    found = InvariantModel(llama, method=method, backend="varlen").logits(prompt)
    torch.testing.assert_close(
        found, expected, atol=rounding(InvariantModel(llama, method=method).logits, prompt), rtol=0
    )


class _Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Counter[str]()

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kernel", [Dense(), Grouped()], ids=lambda each: each.name)
@pytest.mark.parametrize("method", ["pine", "pine-reverse"])
def test_every_decoded_token_gets_what_it_gets_by_the_reference(method: str, kernel: VarlenKernel) -> None:
    chance, generated = random.Random(method), 4
    for size in (1, 3, 3, 3):
        arrangements = [_arrangement(method, chance) for _ in range(size)]
        padding, whole = _batch(arrangements, generated + 1, generated)
        whole = AttentionCall(**{**vars(whole), "sinks": torch.randn(HEADS) if size == 1 else None})
        plans, scratch = dict[Any, Any](), dict[str, Any]()
        for token in range(generated + 1):
            behind = whole.keys.shape[2] - generated + token
            parts = {name: getattr(whole, name)[:, :, :behind] for name in ("keys", "values")}
            queries = whole.queries[:, :, token : token + 1]
            call = AttentionCall(**{**vars(whole), **parts, "queries": queries, "scratch": scratch})
            found = Varlen(kernel).batch(arrangements, padding, call, plans)
            assert found is not None
            for row, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
                expected = _by_reference(arrangement, padded, call, row)
                bound = rounding(_by_reference, arrangement, padded, call, row, dtype=torch.float64)
                torch.testing.assert_close(found[row], expected, atol=bound, rtol=0)


METHODS_IN_WINDOWS = ["rotor", "isolated", "set-based", "parallel-windows", "ape", "structured", "pine"]
WAITS = ("equal", "item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")
"""Parts of the names of operators that wait for the device, or bring numbers of the host to it."""


@pytest.mark.parametrize("decoding", [False, True], ids=["prefill", "decoding"])
@pytest.mark.parametrize("method", METHODS_IN_WINDOWS)
def test_the_operators_of_a_layer_do_not_grow_with_segments_or_prompts(method: str, decoding: bool) -> None:
    def count(prompts: int, segments: int) -> Counter[str]:
        layout = Layout((3, 4), ((3,) * segments,))
        arrangements = [resolve_method(method).arrange(layout) for _ in range(prompts)]
        padding, call = _batch(arrangements, 1 if decoding else None)
        backend, plans = Varlen(Dense()), dict[Any, Any]()
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


def test_the_test_above_sees_what_waits_for_the_device() -> None:
    numbers = torch.ones(3)
    with _Operators() as operators:
        torch.equal(numbers, numbers)
        numbers.sum().item()
        numbers.tolist()
        numbers.nonzero()
        torch.tensor([1, 2])
    for part in ("equal", "_local_scalar_dense", "nonzero", "lift_fresh"):
        assert any(part in name for name in operators.calls)


def test_another_token_of_the_batch_copies_no_keys() -> None:
    """Windows of a cache are packed as it lies: all that is as large as the keys is made at the first token."""
    arrangements = [resolve_method("pine").arrange(Layout((3, 4), ((50, 50, 50),))) for _ in range(4)]
    padding, call = _batch(arrangements, 1)
    backend, plans = Varlen(Grouped()), dict[Any, Any]()
    backend.batch(arrangements, padding, call, plans)
    with _Sizes() as sizes:
        backend.batch(arrangements, padding, call, plans)
    assert max(sizes.elements) < call.keys.numel() / 4


class _Sizes(TorchDispatchMode):
    """Keeps the sizes of what operators return that shares no memory with what they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[int] = []

    def __torch_dispatch__(self, function: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.elements.append(each.numel())
        return out
