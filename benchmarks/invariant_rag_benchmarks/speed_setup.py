"""What the speed benchmark runs: models of real sizes with random weights, random prompts, and the machine."""

from __future__ import annotations

import platform
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from invariant_rag.errors import InvalidChoice, UnknownName
from invariant_rag.models.loading import resolve_dtype

if TYPE_CHECKING:
    from invariant_rag.segments import Prompt
    from transformers import PreTrainedModel

_SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "layers")
SHAPES: dict[str, dict[str, int]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "tiny": (64, 128, 4, 2, 2),
        "0.5b": (896, 4864, 14, 2, 24),
        "1b": (2048, 8192, 32, 8, 16),
        "8b-layer": (4096, 14336, 32, 8, 1),
        "8b": (4096, 14336, 32, 8, 32),
    }.items()
}
"""Sizes of Qwen2.5-0.5B, Llama-3.2-1B, Llama-3.1-8B and one layer of it, and a tiny model for tests."""

_TEXT_TOKENS = 32  # tokens of the prefix, and of the suffix
VOCABULARY = 4096


@dataclass(frozen=True)
class SpeedConfig:
    """What is measured.

    Attributes:
        shape: Size of the model, a key of `SHAPES`.
        layers: Number of layers; None for that of the shape.
        tokens: Tokens of a prompt.
        segments: Number of segments. Their lengths differ from their mean by up to 30%.
        new_tokens: Tokens to decode after the first.
        batch: Prompts of a batch.
        dtype: Of weights and computation.
        device: As in torch.
        backend: The attention backend.
        repeats: Number of rounds; every round runs everything once.
    """

    shape: str = "1b"
    layers: int | None = None
    tokens: int = 2500
    segments: int = 20
    new_tokens: int = 16
    batch: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    backend: str = "auto"
    repeats: int = 3


def bidirectional_floor(config: SpeedConfig) -> float:
    """Return the least multiply-adds per token of bidirectional attention between segments, over the plain model's.

    `(w + 2 d T) / (w + d T)` for w weights of a layer, hidden size d and T tokens.
    """
    sizes = SHAPES[config.shape]
    width, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    kept = width // heads * sizes["num_key_value_heads"]
    weights = 2 * width * width + 2 * width * kept + 3 * width * sizes["intermediate_size"]
    attention = width * config.tokens
    return (weights + 2 * attention) / (weights + attention)


def build_model(config: SpeedConfig) -> PreTrainedModel:
    """Return a Llama of the configured shape with random weights.

    Raises:
        UnknownName: There is no such shape.
        InvalidChoice: There is no such dtype, or the device is not available.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    if config.shape not in SHAPES:
        raise UnknownName("shape", config.shape, SHAPES)
    sizes: dict[str, Any] = dict(SHAPES[config.shape])
    layers = sizes.pop("layers")
    dtype: Any = resolve_dtype(config.dtype)
    try:
        torch.empty(0, device=config.device)
    except (RuntimeError, AssertionError) as error:  # what torch raises depends on how it was built
        raise InvalidChoice(f"device: {config.device!r} cannot be used here: {error}") from error
    model_config = LlamaConfig(
        num_hidden_layers=config.layers or layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=1 << 18,
        eos_token_id=None,
        **sizes,
    )
    with torch.device(config.device):
        model: Any = LlamaForCausalLM(model_config)
    built: PreTrainedModel = model.to(dtype).eval()
    return built


def random_prompt(config: SpeedConfig, seed: int = 0) -> Prompt:
    """Return a prompt of random token ids."""
    from invariant_rag.segments import Prompt

    source = random.Random(seed)
    room = config.tokens - 2 * _TEXT_TOKENS
    shares = [source.uniform(0.7, 1.3) for _ in range(config.segments)]
    lengths = [max(1, round(room * share / sum(shares))) for share in shares]
    ids = [
        [source.randrange(3, VOCABULARY) for _ in range(length)] for length in (_TEXT_TOKENS, *lengths, _TEXT_TOKENS)
    ]
    return Prompt(ids[0], ids[1:-1], ids[-1])


def environment(config: SpeedConfig) -> dict[str, Any]:
    """Return device, threads and versions of this machine."""
    from invariant_rag import __version__

    device = torch.cuda.get_device_name() if config.device.startswith("cuda") else _processor()
    return {
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "invariant_rag": __version__,
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
