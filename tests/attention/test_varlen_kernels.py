"""Variable-length kernels: they agree, wrong ones are found out, and CUDA's is called as documented.

Where there is no GPU, a double stands for the function that the kernel calls. It does what the documentation of that
function says, for the arguments that it was given.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention import backend_label
from invariant_rag.attention.call import AttentionCall
from invariant_rag.attention.positions import Rotation
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.softmax import AttentionState
from invariant_rag.attention.varlen import Grouped, TorchVarlen, Varlen, difference, usable_kernel
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

CPU = torch.device("cpu")


class Dense:
    """Matrix products over all keys, and a mask, in float32 or wider; the number of operators does not grow."""

    name = "dense"

    def __call__(
        self, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, windows: PackedWindows, scaling: float
    ) -> AttentionState:
        wide, (count, heads, _) = torch.promote_types(queries.dtype, torch.float32), queries.shape
        grouped = queries.to(wide).unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("thgd,shd->thgs", grouped, keys.to(wide)) * scaling
        window = torch.repeat_interleave(windows.query_starts.diff(), output_size=count)
        place, query = torch.arange(len(keys), device=keys.device), torch.arange(count, device=keys.device)
        first = windows.key_starts[window]
        stop = first + windows.key_lengths[window]
        if windows.is_causal:
            stop = stop - (windows.query_starts[window + 1] - 1 - query)
        visible = (place >= first[:, None]) & (place < (first + windows.key_lengths[window])[:, None])
        visible &= place < stop[:, None]
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        out = torch.einsum("thgs,shd->thgd", scores.softmax(dim=-1), values.to(wide))
        return AttentionState(out.flatten(1, 2).to(queries.dtype), scores.logsumexp(dim=-1).view(count, heads))


class Late(Dense):
    """Every window begins one key late."""

    def __call__(self, queries: Any, keys: Any, values: Any, windows: PackedWindows, scaling: float) -> AttentionState:
        return super().__call__(queries, keys.roll(1, 0), values.roll(1, 0), windows, scaling)


def test_a_kernel_that_is_wrong_is_found_out() -> None:
    assert not difference(Dense(), CPU, torch.float32)
    assert not difference(Grouped(), CPU, torch.bfloat16)
    assert "not those" in difference(Late(), CPU, torch.float32)


def test_kernels_agree_on_windows_that_overlap() -> None:
    queries, keys = torch.randn(9, 4, 16), torch.randn(14, 2, 16)
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 5), [Span(0, 9), Span(3, 14)], is_causal, CPU)
        bound = rounding(Dense(), queries, keys, keys, windows, 0.3)
        found, expected = (each(queries, keys, keys, windows, 0.3) for each in (Grouped(), Dense()))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=bound, rtol=0)


def test_a_kernel_gets_no_more_windows_than_a_gpu_can_start_blocks() -> None:
    class Limited(Dense):
        calls = 0

        def __call__(self, queries: Any, keys: Any, values: Any, windows: PackedWindows, scaling: float) -> Any:
            assert len(windows.key_lengths) < 1 << 16
            self.calls += 1
            return super().__call__(queries, keys, values, windows, scaling)

    kernel, lengths = Limited(), [1, 2] * 35_000
    spans = [Span(index % 3, index % 3 + 2) for index in range(len(lengths))]
    queries, keys = torch.randn(sum(lengths), 1, 2), torch.randn(5, 1, 2)
    for is_causal in (True, False):
        windows = PackedWindows.of(lengths, spans, is_causal, CPU)
        call = AttentionCall(queries, keys, keys, Rotation(None), scaling=1.0)
        found = PackedLayer(kernel, call, queries, keys, keys).attend(windows, queries)
        for each, expected in zip(found, Dense()(queries, keys, keys, windows, 1.0), strict=True):
            torch.testing.assert_close(each, expected)
    assert kernel.calls == 4


def test_a_backend_says_which_kernel_it_takes() -> None:
    labels = [backend_label(each, tiny_model("llama")) for each in (SDPA(), Varlen(), Varlen(Dense()))]
    assert labels == ["sdpa", "varlen (grouped)", "varlen (dense)"]


def test_without_a_usable_kernel_rows_are_computed_one_by_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("no varlen here")

    monkeypatch.setattr(TorchVarlen, "__call__", missing)
    usable_kernel.cache_clear()
    assert Varlen().kernel_for(torch.device("meta"), torch.bfloat16, 64) is None
    assert "one by one: ImportError: no varlen here" in caplog.text
    usable_kernel.cache_clear()


def test_the_kernel_for_cuda_computes_all_windows_if_its_function_does_what_is_documented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason=f"PyTorch {torch.__version__} has none")

    def documented(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,
    ) -> Any:
        assert return_aux.lse
        assert {each.dtype for each in (cu_seq_q, cu_seq_k, seqused_k)} == {torch.int32}
        assert len(cu_seq_q) == len(cu_seq_k) == len(seqused_k) + 1
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
        windows = PackedWindows(cu_seq_q, cu_seq_k, seqused_k, max_q, max_k, window_size == (-1, 0))
        out, lse = Dense()(query, key, value, windows, scale)
        return out, lse.T

    assert difference(TorchVarlen(), CPU, torch.float32), "this cannot be computed on a CPU"
    monkeypatch.setattr(varlen, "varlen_attn", documented)
    assert not difference(TorchVarlen(), CPU, torch.float32)


def test_the_function_of_the_installed_pytorch_takes_the_arguments() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason=f"PyTorch {torch.__version__} has none")
    if not hasattr(varlen, "AuxRequest"):
        pytest.skip(f"in PyTorch {torch.__version__} it returns no log-sum-exps on request")
    meta = torch.device("meta")
    queries, keys = (
        torch.empty(count, heads, 64, dtype=torch.bfloat16, device=meta) for count, heads in ((12, 4), (9, 2))
    )
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 8), [Span(0, 5), Span(0, 9)], is_causal, meta)
        out, lse = TorchVarlen()(queries, keys, keys, windows, 0.125)
        assert (out.shape, out.dtype) == ((12, 4, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((12, 4), torch.float32)
