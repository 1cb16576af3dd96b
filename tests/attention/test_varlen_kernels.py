"""Variable-length kernels: they agree, wrong ones are found out, and those for CUDA call what they call as documented.

Where there is no GPU, a double stands for the function that a kernel calls. It does what the documentation of that
function says, window by window, for the arguments that it was given.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from invariant_rag.arrangement import Span
from invariant_rag.attention import backend_label
from invariant_rag.attention.sdpa import SDPA
from invariant_rag.attention.varlen import Dense, Grouped, Varlen, VarlenKernel, difference, fastest_kernel
from invariant_rag.attention.varlen.cuda_kernels import (
    CUDA_KERNELS,
    AtenEfficient,
    AtenFlash,
    FlashAttention3,
    FlashInfer,
    TorchVarlen,
)
from invariant_rag.attention.varlen.kernels import PackedWindows, attend_windows
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike, rounding

CPU = torch.device("cpu")
Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def test_a_kernel_that_is_wrong_is_found_out() -> None:
    class Wrong(Dense):
        def __call__(self, queries: Any, keys: Any, values: Any, windows: PackedWindows, scaling: float) -> Any:
            out, lse = super().__call__(queries, keys, values, windows, scaling)
            return out, lse + 1

    assert not difference(Dense(), CPU, torch.float32)
    assert not difference(Grouped(), CPU, torch.bfloat16)
    assert "not those" in difference(Wrong(), CPU, torch.float32)
    assert fastest_kernel(CPU, torch.float32).name == "grouped"


def test_kernels_agree_on_windows_that_overlap() -> None:
    queries, keys = torch.randn(9, 4, 16), torch.randn(14, 2, 16)
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 5), [Span(0, 9), Span(3, 14)], is_causal, CPU)
        bound = rounding(Dense(), queries, keys, keys, windows, 0.3)
        for found, expected in zip(
            Grouped()(queries, keys, keys, windows, 0.3), Dense()(queries, keys, keys, windows, 0.3), strict=True
        ):
            torch.testing.assert_close(found, expected, atol=bound, rtol=0)


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
        found = attend_windows(kernel, queries, keys, keys, windows, 1.0)
        for each, expected in zip(found, Dense()(queries, keys, keys, windows, 1.0), strict=True):
            assert_rounded_alike(each, expected)
    assert kernel.calls == 4


def test_a_backend_says_which_kernel_it_takes() -> None:
    assert Varlen().kernel_for(CPU, torch.float32, 64).name == "grouped"
    assert Varlen(Dense()).kernel_for(CPU, torch.float32, 64).name == "dense"
    labels = [backend_label(each, tiny_model("llama")) for each in (SDPA(), Varlen(), Varlen(Dense()))]
    assert labels == ["sdpa", "varlen (grouped)", "varlen (dense)"]


def _window_by_window(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, tables: Tables, scale: float, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `[T, H, D]` and log-sum-exps `[H, T]` for starts of queries, starts of keys, and used lengths of keys."""
    outs, lses = [], []
    for table, more in zip(tables, (1, 1, 0), strict=True):
        assert table.dtype == torch.int32
        assert len(table) == len(tables[2]) + more
    starts, key_starts, used = (each.tolist() for each in tables)
    assert starts[-1] == len(queries)
    for first, stop, start, length in zip(starts, starts[1:], key_starts, used, strict=False):
        seen = slice(start, start + length)
        groups = queries.shape[1] // keys.shape[1]
        heads = [
            (queries[first:stop, head] @ keys[seen, head // groups].T * scale, values[seen, head // groups])
            for head in range(queries.shape[1])
        ]
        for scores, _ in heads if is_causal else ():
            for query in range(stop - first):
                scores[query, length - (stop - first) + query + 1 :] = -torch.inf
        outs.append(torch.stack([scores.softmax(dim=-1) @ value for scores, value in heads], dim=1))
        lses.append(torch.stack([scores.logsumexp(dim=-1) for scores, _ in heads]))
    return torch.cat(outs), torch.cat(lses, dim=1)


def _varlen_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    def documented(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,
        cu_seq_k: torch.Tensor,
        max_q: int,
        max_k: int,
        *,
        return_aux: Any = None,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
        seqused_k: torch.Tensor | None = None,
    ) -> Any:
        assert return_aux.lse
        assert scale is not None
        assert seqused_k is not None
        assert enable_gqa or query.shape[1] == key.shape[1]
        assert (max_q, max_k) == (int(cu_seq_q.diff().max()), int(seqused_k.max()))
        tables = cu_seq_q, cu_seq_k, seqused_k
        return _window_by_window(query, key, value, tables, scale, window_size == (-1, 0))

    monkeypatch.setattr(varlen, "varlen_attn", documented)


def _flash_attention_3(monkeypatch: pytest.MonkeyPatch) -> None:
    def documented(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        return_attn_probs: bool = False,
    ) -> Any:
        assert seqused_q is None
        assert seqused_k is not None
        assert softmax_scale is not None
        assert (max_seqlen_q, max_seqlen_k) == (int(cu_seqlens_q.diff().max()), int(seqused_k.max()))
        found = _window_by_window(q, k, v, (cu_seqlens_q, cu_seqlens_k, seqused_k), softmax_scale, causal)
        return found if return_attn_probs else found[0]

    module = ModuleType("flash_attn_interface")
    vars(module)["flash_attn_varlen_func"] = documented
    monkeypatch.setitem(sys.modules, "flash_attn_interface", module)


class _PagedWrapper:
    """Does what FlashInfer documents for `BatchPrefillWithPagedKVCacheWrapper`."""

    planned = 0

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD") -> None:
        assert (float_workspace_buffer.dtype, float_workspace_buffer.numel(), kv_layout) == (
            torch.uint8,
            1 << 27,
            "NHD",
        )

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: str | torch.dtype = "float16",
    ) -> None:
        _PagedWrapper.planned += 1
        tables = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert {each.dtype for each in tables} == {torch.int32}
        assert (page_size, paged_kv_last_page_len.unique().tolist()) == (1, [1])
        assert (len(qo_indptr), len(paged_kv_indices)) == (len(paged_kv_indptr), int(paged_kv_indptr[-1]))
        assert sm_scale is not None
        self._heads = num_qo_heads, num_kv_heads, head_dim_qk, q_data_type
        self._tables, self._scale, self._causal = (qo_indptr, paged_kv_indptr), sm_scale, causal
        self._pages = paged_kv_indices.long()

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, return_lse: bool = False
    ) -> Any:
        keys, values = paged_kv_cache
        assert (q.shape[1], keys.shape[2], q.shape[2], q.dtype) == self._heads
        assert keys.shape[1] == values.shape[1] == 1
        query_starts, ends = self._tables
        gathered = keys[self._pages, 0], values[self._pages, 0]
        tables = query_starts, ends, ends.diff()
        out, lse = _window_by_window(q, *gathered, tables, self._scale, self._causal)
        assert return_lse
        return out, lse.T / math.log(2)


def _flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("flashinfer")
    vars(module)["BatchPrefillWithPagedKVCacheWrapper"] = _PagedWrapper
    monkeypatch.setitem(sys.modules, "flashinfer", module)


def test_flashinfer_plans_windows_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    _flashinfer(monkeypatch)
    kernel, queries, keys = FlashInfer(), torch.randn(9, 4, 16), torch.randn(14, 2, 16)
    before = _PagedWrapper.planned
    windows = PackedWindows.of((4, 5), [Span(0, 9), Span(3, 14)], True, CPU)
    for _ in range(3):
        kernel(queries, keys, keys, windows, 0.3)
    assert _PagedWrapper.planned == before + 1
    kernel(queries, keys, keys, PackedWindows.of((4, 5), [Span(0, 9), Span(3, 14)], True, CPU), 0.3)
    assert _PagedWrapper.planned == before + 2


def _aten_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    def documented(*given: Any, **more: Any) -> Any:
        named = _named("_flash_attention_forward", given, more)
        assert (named["dropout_p"], named["return_debug_mask"]) == (0.0, False)
        tables = named["cum_seq_q"], named["cum_seq_k"], named["seqused_k"]
        assert (named["max_q"], named["max_k"]) == (int(tables[0].diff().max()), int(tables[2].max()))
        tensors = named["query"], named["key"], named["value"]
        return *_window_by_window(*tensors, tables, named["scale"], named["is_causal"]), None, None, None

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", documented)


def _aten_efficient(monkeypatch: pytest.MonkeyPatch) -> None:
    def documented(*given: Any, **more: Any) -> Any:
        named = _named("_efficient_attention_forward", given, more)
        assert (named["dropout_p"], named["compute_log_sumexp"], named["bias"]) == (0.0, True, None)
        tables = named["cu_seqlens_q"], named["cu_seqlens_k"], named["seqlen_k"]
        longest = int(tables[0].diff().max())
        assert (named["max_seqlen_q"], named["max_seqlen_k"]) == (longest, int(tables[2].max()))
        (query,), (key,), (value,) = named["query"], named["key"], named["value"]
        assert query.shape[1] == key.shape[1] == value.shape[1]
        is_causal = {0: False, 2: True}[named["custom_mask_type"]]  # 2: to the bottom right
        out, lse = _window_by_window(query, key, value, tables, named["scale"], is_causal)
        padded = torch.full((len(tables[2]), query.shape[1], math.ceil(longest / 32) * 32), torch.inf)
        for window, (first, stop) in enumerate(zip(tables[0].tolist(), tables[0].tolist()[1:], strict=False)):
            padded[window, :, : stop - first] = lse[:, first:stop]
        return out[None], padded, None, None, longest, int(tables[2].max())

    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", documented)


def _named(operator: str, given: tuple[Any, ...], more: dict[str, Any]) -> dict[str, Any]:
    """Return arguments by the names that they have in the schema of an operator of the installed PyTorch."""
    schema = torch._C._get_schema(f"aten::{operator}", "")
    names = [argument.name for argument in schema.arguments]
    assert len(given) <= sum(not argument.kwarg_only for argument in schema.arguments)
    assert set(more) <= set(names[len(given) :])
    return {**dict.fromkeys(names), **dict(zip(names, given, strict=False)), **more}


DOUBLES: list[tuple[VarlenKernel, Callable[[pytest.MonkeyPatch], None]]] = [
    (TorchVarlen(), _varlen_attn),
    (FlashAttention3(), _flash_attention_3),
    (FlashInfer(), _flashinfer),
    (AtenFlash(), _aten_flash),
    (AtenEfficient(), _aten_efficient),
]


def test_each_kernel_for_cuda_has_a_double() -> None:
    assert [kernel.name for kernel, _ in DOUBLES] == [kernel.name for kernel in CUDA_KERNELS]


@pytest.mark.parametrize(("kernel", "stand_in"), DOUBLES, ids=[kernel.name for kernel, _ in DOUBLES])
def test_a_kernel_computes_all_windows_if_what_it_calls_does_what_its_documentation_says(
    kernel: VarlenKernel, stand_in: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(kernel, TorchVarlen):
        _varlen_or_skip()
    assert difference(kernel, CPU, torch.float32), "this cannot be computed on a CPU"
    stand_in(monkeypatch)
    assert not difference(kernel, CPU, torch.float32)


@pytest.mark.parametrize("kernel", [TorchVarlen(), AtenFlash(), AtenEfficient()], ids=lambda each: each.name)
def test_the_operators_of_the_installed_pytorch_take_the_arguments(kernel: VarlenKernel) -> None:
    if isinstance(kernel, TorchVarlen):
        _varlen_or_skip()
    meta = torch.device("meta")
    queries, keys = (
        torch.empty(count, heads, 64, dtype=torch.bfloat16, device=meta) for count, heads in ((12, 4), (9, 2))
    )
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 8), [Span(0, 5), Span(0, 9)], is_causal, meta)
        out, lse = kernel(queries, keys, keys, windows, 0.125)
        assert (out.shape, out.dtype) == ((12, 4, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((12, 4), torch.float32)


def _varlen_or_skip() -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen", reason=f"PyTorch {torch.__version__} has none")
    if not hasattr(varlen, "AuxRequest"):
        pytest.skip(f"in PyTorch {torch.__version__} it returns no log-sum-exps on request")
