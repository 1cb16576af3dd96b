"""Load a causal LM and its tokenizer with transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from invariant_rag.checks import check_path
from invariant_rag.errors import InvalidChoice, ModelNotFound, OutOfMemory, UnsupportedModel
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.models.hub import what_to_do
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_FILE_KEYWORDS = ("revision", "token", "trust_remote_code", "cache_dir", "local_files_only")
"""Keywords of the model's `from_pretrained` that its configuration and its tokenizer take too."""

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
        InvalidChoice: torch has no such dtype, this machine no such device, or the model no such option.
        ModelNotFound: There is no such model, or it is not a causal LM.
        OutOfMemory: The weights do not fit into the memory of the device.
    """
    dtype, source = resolve_dtype(dtype), model_location(name)
    if name in (None, "native") and dtype == "auto":
        dtype = torch.float32
    try:
        model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, device_map=device_map, **kwargs)
    except (OSError, ValueError, SafetensorError) as error:  # not found; not a causal LM; a torn file of weights
        raise _not_found("a causal LM", source, error) from error
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(f"the weights of {str(source)!r} do not fit: {error}") from error
    except TypeError as error:  # a keyword that the class of the model does not have
        raise InvalidChoice(
            f"cannot load {str(source)!r}: {error}",
            hint="Options are those of InvariantModel.from_pretrained, and then of from_pretrained in transformers.",
        ) from error
    except (AssertionError, RuntimeError) as error:  # what torch raises for a device depends on how it was built
        raise InvalidChoice(
            f"cannot load {str(source)!r} with device_map={device_map!r}: {error}",
            hint="Choose a device that this machine has, such as cpu, or auto.",
        ) from error
    tokenizer: PreTrainedTokenizerBase | None = None
    try:
        tokenizer = load_tokenizer(name, **kwargs)
    except ModelNotFound as error:
        _logger.warning("found no tokenizer at %r, so prompts must be token ids: %s", str(source), error.__cause__)
    return model.eval(), tokenizer


def check_model(model: object) -> None:
    """Check that an object is a model of transformers, or one that wraps it; or UnsupportedModel."""
    if not isinstance(model, torch.nn.Module) or not callable(getattr(model, "generate", None)):
        raise UnsupportedModel(
            f"expected a causal LM of transformers, got {shown(model)}",
            hint="InvariantModel.from_pretrained takes the name of a model.",
        )


def load_tokenizer(name: str | Path | None, **kwargs: Any) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model, without its weights, or raise ModelNotFound; see `load_config`."""
    tokenizer: PreTrainedTokenizerBase = _load_files(AutoTokenizer, "a tokenizer", name, kwargs)
    return tokenizer


def load_config(name: str | Path | None, *, local_files_only: bool = False, **kwargs: Any) -> PreTrainedConfig:
    """Load the configuration of a model, without its weights, or raise ModelNotFound.

    Arguments are those of `load_model`; what concerns weights has no effect. With `local_files_only`, no hub is used.
    """
    options = {**kwargs, "local_files_only": local_files_only}
    config: PreTrainedConfig = _load_files(AutoConfig, "a causal LM", name, options)
    return config


def _load_files(auto: Any, what: str, name: str | Path | None, kwargs: Mapping[str, Any]) -> Any:
    """Load what an auto class finds in the files of a model, by the keywords that select files."""
    source = model_location(name)
    try:
        return auto.from_pretrained(source, **{key: kwargs[key] for key in _FILE_KEYWORDS if key in kwargs})
    except (OSError, ValueError) as error:
        raise _not_found(what, source, error) from error


def _not_found(what: str, source: str | Path, error: Exception) -> ModelNotFound:
    return ModelNotFound(f"expected {what} at {str(source)!r}: {error}", hint=what_to_do(str(source), error))


def model_location(name: str | Path | None) -> str | Path:
    """Return the hub id or the folder of a model; None and `native` are the embedded ones."""
    if name is not None:
        check_path("name of a model", name)
    if name is None or name == "native":
        return EMBEDDED["native" if name else "generator"]
    return name


def resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    """Convert the name of a torch dtype to the dtype, or raise InvalidChoice; "auto" stays, for transformers."""
    resolved = getattr(torch, dtype, dtype) if isinstance(dtype, str) else dtype
    # Eight bits and fewer are formats of quantization, in which torch computes nothing.
    usable = isinstance(resolved, torch.dtype) and resolved.is_floating_point and resolved.itemsize > 1
    if not usable and not (isinstance(resolved, str) and resolved == "auto"):
        raise InvalidChoice(f"dtype: expected auto, float32, bfloat16, float16 or float64, got {shown(dtype)}")
    return resolved


def context_window(config: PreTrainedConfig) -> int | None:
    """Return the largest number of tokens the model supports, or None if its config does not say.

    For dynamic RoPE scaling this is `max_position_embeddings` times the scaling factor.
    """
    text = config.get_text_config(decoder=True)
    window: int | None = getattr(text, "max_position_embeddings", getattr(text, "max_seq_len", None))  # MPT
    rope = getattr(text, "rope_parameters", None) or {}
    if window is not None and rope.get("rope_type") == "dynamic":
        window = int(window * rope["factor"])
    return window
