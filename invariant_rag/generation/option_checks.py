"""Checks of the keywords of `generate`: their names, kinds and bounds, before anything is computed.

What transformers itself refuses later, with errors of many classes, is translated to the same typed error.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from traceback import walk_tb
from typing import Any

from torch import OutOfMemoryError
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel

from invariant_rag.attention.per_model import once_per_model
from invariant_rag.checks import SEEDS, check_number, check_real, is_iterable
from invariant_rag.errors import InvalidOption, InvariantRAGError
from invariant_rag.segments import replace_surrogates
from invariant_rag.shown import shown

_INFINITY = float("inf")
_WHOLE = {
    "encoder_no_repeat_ngram_size": 0,
    "max_new_tokens": 1,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "top_k": 0,
    "top_logprobs": 0,
}
"""Whole numbers, and the least that each may be."""

_LONGEST_STOP = 1000
"""Characters of a stop string: transformers compares every token with every place in it."""

_REFUSING = ("transformers.generation", "transformers.configuration", "transformers.utils", "huggingface_hub", "torch")
"""Modules whose errors are about keywords. Those of models and callbacks are not among them."""

_MOST = (1 << 63) - 1
"""The largest whole number that PyTorch takes."""

_REAL = {
    "diversity_penalty": (-_INFINITY, _INFINITY),
    "encoder_repetition_penalty": (0, _INFINITY),
    "epsilon_cutoff": (0, 1),
    "eta_cutoff": (0, 1),
    "guidance_scale": (-_INFINITY, _INFINITY),
    "length_penalty": (-_INFINITY, _INFINITY),
    "max_time": (0, _INFINITY),
    "min_p": (0, 1),
    "repetition_penalty": (0, _INFINITY),
    "temperature": (0, _INFINITY),
    "top_h": (0, 1),
    "top_p": (0, 1),
    "typical_p": (0, 1),
}
"""Finite numbers, and the least and the most that each may be."""

_SWITCHES = {
    "compile",
    "disable_compile",
    "do_sample",
    "low_memory",
    "output_attentions",
    "output_hidden_states",
    "output_logits",
    "output_scores",
    "remove_invalid_values",
    "renormalize_logits",
    "synced_gpus",
    "use_cache",
}
_TOKENS = (
    "begin_suppress_tokens",
    "bos_token_id",
    "decoder_start_token_id",
    "eos_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "suppress_tokens",
)
_LISTS = {"logits_processor", "stopping_criteria"}
_NO_KEYWORDS = {"args", "kwargs", "labels", "logits_to_keep", "self", "transformers_version"}


def check_options(kwargs: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Check names, kinds and bounds of keywords of `generate`, a seed among them, and of its `generation_config`.

    Raises:
        InvalidOption: There is no such keyword, or its value is of another kind or out of bounds.
    """
    check_seed(kwargs.get("seed"))
    _check_names(kwargs, model)
    config = kwargs.get("generation_config")
    if not isinstance(config, GenerationConfig | None):
        raise _unexpected("generation_config", "a GenerationConfig of transformers", config)
    given = {name: getattr(config, name, None) for name in (*_WHOLE, *_REAL, *_SWITCHES)}
    given |= {name: value for name, value in kwargs.items() if value is not None}
    given = {name: value for name, value in given.items() if value is not None}
    _check_numbers(given)
    for name in given.keys() & _LISTS:
        _check_functions(name, given[name])
    _check_tokens(given, model)
    _check_others(given)


def check_seed(seed: object) -> None:
    """Check a seed of PyTorch; None is none.

    Raises:
        InvalidOption: It is no whole number, or beyond 64 bits.
    """
    least, most = SEEDS
    if seed is not None and not least <= check_number("seed", seed, error=InvalidOption) <= most:
        raise _unexpected("seed", f"a whole number from {least} to {most}", seed)


def check_token_ids(name: str, value: Any) -> list[int]:
    """Return a token id, or several, as a list.

    Raises:
        InvalidOption: They are none.
    """
    listed = value.flatten().tolist() if hasattr(value, "flatten") else value
    listed = list(listed) if is_iterable(listed) and not isinstance(listed, str | bytes) else [listed]
    return [check_number(name, each, error=InvalidOption) for each in listed]


@contextmanager
def translated_refusals() -> Iterator[None]:
    """Raise what transformers' own code of generation refuses as `InvalidOption`; errors of callbacks stay."""
    try:
        yield
    except (InvariantRAGError, MemoryError, OutOfMemoryError):
        raise
    except Exception as error:
        frames = list(walk_tb(error.__traceback__))[1:]  # without this one
        modules = [str(frame.f_globals.get("__name__")) for frame, _ in frames]
        within = next((at for at, name in enumerate(modules) if name.startswith("transformers.")), len(modules))
        if within == len(modules) or not all(each.startswith(_REFUSING) for each in modules[within:]):
            raise
        raise InvalidOption(f"expected keywords that transformers' generate takes; it says: {error}") from error


@once_per_model
def _parameters(model: PreTrainedModel) -> frozenset[str]:
    """Return the named parameters of transformers' `generate` and of the model, which it hands on."""
    functions = (GenerationMixin.generate, model.forward)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    return frozenset({*names, "assistant_tokenizer", "tokenizer"} - _NO_KEYWORDS)


def _check_names(kwargs: Mapping[str, Any], model: PreTrainedModel) -> None:
    known = _parameters(model) | vars(GenerationConfig()).keys() | {"compile", "seed", "top_logprobs"}
    for name in kwargs.keys() - known:
        near = get_close_matches(str(name), known, 1)
        raise InvalidOption(
            f"expected keywords of generate, got {name!r}, which is none",
            hint=f"Did you mean {near[0]!r}?" if near else "They are those of transformers' GenerationConfig.",
        )


def _check_numbers(given: Mapping[str, Any]) -> None:
    for name in given.keys() & _WHOLE.keys():
        if check_number(name, given[name], _WHOLE[name], error=InvalidOption) > _MOST:
            raise _unexpected(name, "a whole number of 64 bits", given[name])
    for name in given.keys() & _REAL.keys():
        least, most = _REAL[name]
        if not least <= check_real(name, given[name], error=InvalidOption) <= most:
            raise _unexpected(name, f"at least {least}" if most == _INFINITY else f"{least} to {most}", given[name])
    for name in given.keys() & _SWITCHES:
        if not (isinstance(given[name], int) and given[name] in (0, 1)):
            raise _unexpected(name, "True or False", given[name])


def _check_functions(name: str, value: Any) -> None:
    if not is_iterable(value) or isinstance(value, str | bytes) or not all(map(callable, value)):
        raise _unexpected(name, "a list of functions", value)


def _check_tokens(given: Mapping[str, Any], model: PreTrainedModel) -> None:
    for name in _TOKENS:
        if name in given:
            check_token_ids(name, given[name])
    if "pad_token_id" in given:
        vocabulary = model.config.get_text_config(decoder=True).vocab_size
        if not 0 <= check_number("pad_token_id", given["pad_token_id"], error=InvalidOption) < vocabulary:
            raise _unexpected("pad_token_id", f"0 to {vocabulary - 1}, a token of the model", given["pad_token_id"])


def _check_others(given: Mapping[str, Any]) -> None:
    if "stop_strings" in given:
        strings = given["stop_strings"]
        listed = [strings] if isinstance(strings, str) else strings
        if not isinstance(listed, list | tuple) or not all(isinstance(each, str) and each for each in listed):
            raise _unexpected("stop_strings", "a text or a list of texts, none of them empty", strings)
        if max(map(len, listed), default=0) > _LONGEST_STOP:
            raise _unexpected("stop_strings", f"texts of at most {_LONGEST_STOP} characters", strings)
        if any(replace_surrogates(each) != each for each in listed):
            raise _unexpected("stop_strings", "texts without lone surrogates, which no model writes", strings)
    if "streamer" in given and not all(callable(getattr(given["streamer"], name, None)) for name in ("put", "end")):
        raise _unexpected("streamer", "an object with put and end", given["streamer"])
    stopping = given.get("early_stopping", False)
    if not (isinstance(stopping, bool | int) and stopping in (0, 1)) and not (
        isinstance(stopping, str) and stopping == "never"
    ):
        raise _unexpected("early_stopping", "True, False or 'never'", stopping)
    if "prefix_allowed_tokens_fn" in given and not callable(given["prefix_allowed_tokens_fn"]):
        raise _unexpected("prefix_allowed_tokens_fn", "a function", given["prefix_allowed_tokens_fn"])


def _unexpected(name: str, expected: str, value: object) -> InvalidOption:
    return InvalidOption(f"{name}: expected {expected}, got {shown(value)}")
