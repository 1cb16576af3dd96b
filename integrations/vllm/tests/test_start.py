"""What would be computed causally, or was not compared, is refused: configurations at the start, requests as they come.

`test_families` starts engines that are refused.
"""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from invariant_rag import Prompt
from invariant_rag.arrangement import Layout
from invariant_rag.errors import UnsupportedCombination

from vllm_invariant_rag import InvariantRAGConnector, UnsupportedServer, VLLMBackend
from vllm_invariant_rag.arranged_prompt import ArrangedPrompt
from vllm_invariant_rag.attention import STEP, ArrangedAttentionImpl
from vllm_invariant_rag.engines import ServerFacts


def with_change(config: Any, path: str, value: Any) -> Any:
    """A copy of vLLM's configuration in which one field differs."""
    changed, (first, _, rest) = copy(config), path.partition(".")
    vars(changed)[first] = with_change(getattr(config, first), rest, value) if rest else value
    return changed


SILENT = {
    "vllm.scheduler_config.enable_chunked_prefill": (True, "--no-enable-chunked-prefill"),
    "vllm.scheduler_config.long_prefill_token_threshold": (64, "--no-enable-chunked-prefill"),
    "vllm.kv_transfer_config.kv_role": ("kv_consumer", "kv_role"),
    "vllm.kv_transfer_config.kv_load_failure_policy": ("recompute", "computes refused requests causally"),
    "vllm.model_config.hf_text_config.model_type": ("gpt_oss", "expected a model of llama, mistral, qwen2, qwen3"),
    "vllm.cache_config.cache_dtype": ("fp8", "--kv-cache-dtype"),
    "vllm.speculative_config": ({"method": "ngram"}, "speculative decoding"),
    "vllm.parallel_config.enable_dbo": (True, "dual batch overlap"),
    "vllm.parallel_config.decode_context_parallel_size": (2, "context parallelism"),
    "caches.kv_cache_groups": ([None, None], "--disable-hybrid-kv-cache-manager"),
}


@pytest.mark.parametrize("field", SILENT)
def test_a_configuration_that_is_not_exact_is_refused(field: str, llm: Any) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

    (value, words), core = SILENT[field], llm.llm_engine.engine_core.engine_core
    changed = with_change(SimpleNamespace(vllm=core.vllm_config, caches=core.scheduler.kv_cache_config), field, value)
    with pytest.raises(UnsupportedServer, match=words):
        InvariantRAGConnector(changed.vllm, KVConnectorRole.SCHEDULER, changed.caches)


LAYOUT = Layout((4, 9), ((20, 20),))
SPECIAL = {"lora_request": "adapter", "mm_features": ["image"], "prompt_embeds": [[0.0]] * 53, "resumable": True}


@pytest.mark.parametrize("field", SPECIAL)
def test_a_request_that_was_not_compared_fails_with_all_of_its_tokens(field: str, llm: Any) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    arranged = ArrangedPrompt("rotor", LAYOUT).as_params()
    params = SamplingParams(max_tokens=4, extra_args={"kv_transfer_params": arranged})
    for more, failing in (({}, 0), ({field: SPECIAL[field]}, 52)):
        request: Any = Request("name", list(range(53)), params, None, **more)  # type: ignore[arg-type]
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (failing, False)
        connector.request_finished(request, [])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("arranges_decoding", False, "CUDA graphs replay"), ("sliding_window", 48, "sliding window of 48 tokens")],
)
def test_an_answer_that_would_be_decoded_otherwise_is_refused(
    field: str, value: Any, words: str, llm: Any, on_vllm: VLLMBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
    for holder, name in ((connector, "_facts"), (on_vllm._engine, "facts")):
        monkeypatch.setattr(holder, name, replace(connector._facts, **{field: value}))
    for method, failing in (("rotor", 0), ("set-based", 52)):
        params = SamplingParams(extra_args={"kv_transfer_params": ArrangedPrompt(method, LAYOUT).as_params()})
        request: Any = Request("name", list(range(53)), params, None)
        connector.on_new_request(request)
        assert connector.get_num_new_matched_tokens(request, 0) == (failing, False)
        connector.request_finished(request, [])
    prompt = Prompt(prefix=[5], segments=[[6] * 30, [7] * 30], suffix=[8])
    on_vllm.with_method("rotor").generate(prompt, max_new_tokens=1)
    with pytest.raises(UnsupportedCombination, match=words):
        on_vllm.with_method("set-based").generate(prompt, max_new_tokens=1)


def test_graphs_of_whole_batches_replay_what_vllm_would_attend_to(llm: Any) -> None:
    from vllm.config import CUDAGraphMode

    config = llm.llm_engine.engine_core.engine_core.vllm_config
    for mode, arranges in (("NONE", True), ("PIECEWISE", True), ("FULL_DECODE_ONLY", False), ("FULL", False)):
        changed = with_change(config, "compilation_config.cudagraph_mode", CUDAGraphMode[mode])
        assert ServerFacts.of(changed).arranges_decoding is arranges


def test_a_batch_that_lacks_an_arranged_request_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, tokens = ArrangedPrompt("rotor", LAYOUT), torch.zeros(53, 1, 8)
    batch = {"query_start_loc": [0, 53], "seq_lens": [53], "block_table": [[4, 5]]}
    metadata = SimpleNamespace(**{name: torch.tensor(each) for name, each in batch.items()})
    monkeypatch.setattr(STEP, "block_size", 32)
    monkeypatch.setattr(STEP, "prompts", {3: prompt})
    with pytest.raises(UnsupportedServer, match="expected 1 more requests"):
        ArrangedAttentionImpl().forward(None, tokens, tokens, tokens, torch.zeros(2, 1, 32, 16), metadata, tokens)
