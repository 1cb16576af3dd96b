"""Model families: configs of tiny random models, and the probe's result for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.positions import PositionEncoding

_SIZE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _rope(kind: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **options}}


_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama (llama3 scaling)": ("llama", _rope("llama3", **_LLAMA3)),
    "llama (linear scaling)": ("llama", _rope("linear", factor=4.0)),
    "llama (yarn scaling)": ("llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "llama (dynamic scaling)": ("llama", {**_rope("dynamic", factor=2.0), "max_position_embeddings": 64}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral (sliding window)": ("mistral", {"sliding_window": 16}),
    "mixtral": ("mixtral", {**_EXPERTS, "sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _EXPERTS),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"sliding_window": 16, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 4.0}),
    "gemma3_text": ("gemma3_text", {"sliding_window": 16, "query_pre_attn_scalar": 16}),
    "phi": ("phi", {}),
    "phi3": ("phi3", {"sliding_window": None}),
    "glm4": ("glm4", {}),
    "cohere": ("cohere", {}),
    "cohere2": ("cohere2", {"sliding_window": 16}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {}),
    "starcoder2": ("starcoder2", {"sliding_window": None}),
    "stablelm": ("stablelm", {}),
    "gpt_neox": ("gpt_neox", {}),
    "smollm3": ("smollm3", {}),
    "gpt_oss": ("gpt_oss", {**_EXPERTS, "sliding_window": 16}),
    "exaone4": ("exaone4", {"sliding_window": 16}),
    "nemotron": ("nemotron", {}),
    "helium": ("helium", {}),
    "ernie4_5": ("ernie4_5", {}),
    "diffllama": ("diffllama", {}),
    "bloom": ("bloom", {}),
    "mpt": ("mpt", {}),
    "falcon": ("falcon", {"head_dim": ...}),  # a property there
    "falcon (ALiBi)": ("falcon", {"head_dim": ..., "alibi": True}),
    "gptj": ("gptj", {"rotary_dim": 8}),
    "codegen": ("codegen", {"rotary_dim": 8}),
    "xglm": ("xglm", {"d_model": 32, "attention_heads": 4, "ffn_dim": 48, "num_layers": 4}),
    "mamba": ("mamba", {}),
    "qwen3_next": ("qwen3_next", _EXPERTS),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}),
}
"""Name in the table -> (model type in transformers, config entries besides the common sizes)."""


@dataclass(frozen=True)
class FamilyReport:
    """The result of the probe for one family."""

    family: str
    supported: bool
    detail: str


def tiny_model(family: str, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """Build a tiny random model of a family of `FAMILIES`, in float32 on the CPU.

    Args:
        family: A key of `FAMILIES`.
        seed: Seed of the weights.
        overrides: Config entries that replace those of the family.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, special = FAMILIES[family]
    entries = {**_SIZE, **special, **overrides}
    config = AutoConfig.for_model(model_type, **{name: value for name, value in entries.items() if value is not ...})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    return model


def probe_families() -> Iterator[FamilyReport]:
    """Probe a tiny model of every family in the table."""
    from invariant_rag.attention.probe import probe

    for family in FAMILIES:
        try:
            encodings = probe(tiny_model(family))
        except UnsupportedModel as error:
            yield FamilyReport(family, supported=False, detail=str(error))
        else:
            yield FamilyReport(family, supported=True, detail=_detail(encodings))


def _detail(encodings: Sequence[PositionEncoding]) -> str:
    """Return in words what the probe found in the layers of a model."""
    from invariant_rag.attention.positions import Rotation

    rotations = [each for each in encodings if isinstance(each, Rotation)]
    if not rotations:
        return "ALiBi"
    no_rope = sum(each.module is None for each in rotations)
    layout = "interleaved" if any(each.interleaved for each in rotations) else "half-split"
    return f"rotary, {layout}" + (f"; {no_rope} of {len(rotations)} layers do not rotate" if no_rope else "")
