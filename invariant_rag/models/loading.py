"""Load a causal LM and its tokenizer with transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from invariant_rag.errors import InvalidChoice, ModelNotFound
from invariant_rag.models.embedded import EMBEDDED

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_KEYWORDS = ("revision", "token", "trust_remote_code", "cache_dir")
_logger = logging.getLogger(__name__)


def load_model(
    name: str | Path | None,
    *,
    dtype: str | torch.dtype,
    device_map: str | Mapping[str, Any] | None,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase | None]:
    """Load a causal LM in evaluation mode, and its tokenizer.

    Args:
        name: A hub id or a folder. None: the embedded generator; "native": the embedded model fine-tuned with RoToR
            attention.
        dtype: As in `from_pretrained`; for the embedded models "auto" means float32.
        device_map: As in `from_pretrained`.
        **kwargs: Passed on to `from_pretrained` of the model; those that select files also to the tokenizer's.

    Returns:
        The model and its tokenizer. The tokenizer is None, with a warning in the log, if none is found.

    Raises:
        InvalidChoice: torch has no such dtype.
        ModelNotFound: There is no such model, or it is not a causal LM.
    """
    dtype = resolve_dtype(dtype)
    source: str | Path
    if name is None or name == "native":
        source = EMBEDDED["native" if name else "generator"]
        dtype = torch.float32 if dtype == "auto" else dtype
    else:
        source = name
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map, **kwargs)
    except (OSError, ValueError) as error:  # OSError: not found; ValueError: not a causal LM
        raise ModelNotFound(f"expected a causal LM at {str(source)!r}: {error}") from error
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        tokenizer_kwargs = {key: kwargs[key] for key in _TOKENIZER_KEYWORDS if key in kwargs}
        tokenizer = AutoTokenizer.from_pretrained(source, **tokenizer_kwargs)
    except (OSError, ValueError) as error:
        _logger.warning("found no tokenizer at %r, so prompts must be token ids: %s", str(source), error)
    return model.eval(), tokenizer


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Convert the name of a torch dtype to the dtype; "auto" is returned unchanged, for transformers.

    Raises:
        InvalidChoice: torch has no such dtype.
    """
    found = dtype if dtype == "auto" or isinstance(dtype, torch.dtype) else getattr(torch, dtype, None)
    if found != "auto" and not isinstance(found, torch.dtype):
        raise InvalidChoice(f"dtype: expected auto, float32, bfloat16, float16 or another torch dtype, got {dtype!r}")
    return found


def context_window(config: PreTrainedConfig) -> int | None:
    """Return the largest number of tokens the model supports, or None if its config does not say.

    For dynamic RoPE scaling this is `max_position_embeddings` times the scaling factor.
    """
    text = config.get_text_config(decoder=True)
    window: int | None = getattr(text, "max_position_embeddings", None)
    rope = getattr(text, "rope_parameters", None) or {}
    if window is not None and rope.get("rope_type") == "dynamic":
        window = int(window * rope["factor"])
    return window
