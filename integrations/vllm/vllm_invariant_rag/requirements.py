"""What a vLLM must be like to arrange requests. Whatever is not known to be exact is refused with its reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from invariant_rag.attention.positions import Rotation, of_table
from vllm.model_executor.layers.rotary_embedding import _ROPE_DICT
from vllm.model_executor.models.utils import extract_layer_index
from vllm.utils.torch_utils import is_quantized_kv_cache

from vllm_invariant_rag.attention import ArrangedAttentionImpl
from vllm_invariant_rag.backends import BACKENDS
from vllm_invariant_rag.errors import RequestRefused, UnsupportedServer

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose layers all rotate queries and keys alike, and whose answers are compared in the tests."""


def check_engine(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> None:
    """Raise UnsupportedServer for a configuration that cannot be served; the message says why."""
    transfer, model, parallel = vllm_config.kv_transfer_config, vllm_config.model_config, vllm_config.parallel_config
    scheduler, kind = vllm_config.scheduler_config, model.hf_text_config.model_type
    groups, dtype = len(kv_cache_config.kv_cache_groups), vllm_config.cache_config.cache_dtype
    is_cut = scheduler.enable_chunked_prefill or scheduler.long_prefill_token_threshold > 0
    is_known, is_quantized = kind in MODEL_TYPES, is_quantized_kv_cache(dtype)
    contexts = max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
    reasons = {
        "expected no chunked prefill, which would cut a set in two; pass --no-enable-chunked-prefill and "
        "--max-num-batched-tokens of at least --max-model-len": is_cut,
        f"kv_role: expected 'kv_both', got {transfer.kv_role!r}": transfer.kv_role != "kv_both",
        f"kv_load_failure_policy: expected 'fail', got {transfer.kv_load_failure_policy!r}, with which vLLM "
        "computes refused requests causally": transfer.kv_load_failure_policy != "fail",
        f"expected a model of {', '.join(MODEL_TYPES)}, with which this was compared, got {kind!r}": not is_known,
        "expected keys and values of each head, got a model with latent attention (MLA)": model.use_mla,
        f"expected one group of layers, got {groups}; pass --disable-hybrid-kv-cache-manager": groups != 1,
        f"expected keys and values as they are computed, got {dtype}; leave --kv-cache-dtype away": is_quantized,
        "expected no speculative decoding, which was not tested": vllm_config.speculative_config is not None,
        "expected no dual batch overlap, which cuts batches in two": parallel.enable_dbo,
        "expected no context parallelism, which spreads the tokens of a block over workers": contexts > 1,
    }
    _raise_first(reasons, UnsupportedServer)


def check_worker(vllm_config: VllmConfig, kv_caches: dict[str, torch.Tensor]) -> None:
    """Raise UnsupportedServer for attention layers of a worker that cannot be arranged; the message says why."""
    modules = vllm_config.compilation_config.static_forward_context
    layers = {extract_layer_index(name): modules[name] for name in kv_caches}
    expected = vllm_config.model_config.get_num_layers(vllm_config.parallel_config)
    implementations = [layer.impl for layer in layers.values()]
    others = {type(each).__name__ for each in implementations if not isinstance(each, ArrangedAttentionImpl)}
    has_alibi = any(getattr(each, "alibi_slopes", None) is not None for each in implementations)
    reasons = {
        f"expected one cache for each of {expected} layers, got {len(kv_caches)}: models that share keys and "
        "values between layers are not supported": len(kv_caches) != expected or len(layers) != expected,
        f"expected one of vLLM's attention backends {', '.join(BACKENDS)}, with the plug-in invariant_rag in "
        f"VLLM_PLUGINS if that is set, got {', '.join(sorted(others))}": bool(others),
        "expected rotary positions, got a model with ALiBi": has_alibi,
    }
    _raise_first(reasons, UnsupportedServer)


def rotation_of_model() -> tuple[Rotation, torch.Tensor]:
    """Return the position encoding of all layers and its factors (see `Step`); UnsupportedServer if there are more."""
    if len(_ROPE_DICT) != 1:
        raise UnsupportedServer(f"expected one rotary embedding for all layers, got {len(_ROPE_DICT)}")
    (rope,) = _ROPE_DICT.values()
    cosines, sines = rope.cos_sin_cache.chunk(2, dim=-1)
    rotation = of_table(torch.cat((sines, cosines), dim=-1), interleaved=not rope.is_neox_style)
    return rotation, torch.complex(cosines.double(), sines.double())


def check_request(request: Request) -> None:
    """Raise RequestRefused for a kind of request that cannot be arranged; the message says why."""
    is_text = not request.mm_features and request.prompt_embeds is None
    reasons = {
        "expected no LoRA adapter, which was not tested": request.lora_request is not None,
        "expected a prompt of tokens, got images, audio or embeddings": not is_text,
        "expected a whole prompt, got one that is still being sent": request.resumable,
    }
    _raise_first(reasons, RequestRefused)


def _raise_first(reasons: dict[str, bool], error: type[UnsupportedServer | RequestRefused]) -> None:
    for reason, applies in reasons.items():
        if applies:
            raise error(reason)
