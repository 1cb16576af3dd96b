"""Keywords of `generate`: names, kinds and bounds, defaults of the generation config, and unsupported combinations."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import partial
from math import inf
from numbers import Integral, Real
from traceback import walk_tb
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin, PreTrainedModel, PreTrainedTokenizerBase, StopStringCriteria

from invariant_rag.attention.per_model import once_per_model
from invariant_rag.checks import SEEDS, check_number, check_real, is_iterable
from invariant_rag.errors import InvalidOption, InvariantRAGError, TokenizerRequired, UnsupportedCombination
from invariant_rag.segments import replace_surrogates
from invariant_rag.shown import shown

_MOST = (1 << 63) - 1  # the largest whole number that PyTorch takes
_LONGEST_STOP = 1000  # characters: transformers compares every token with every position of a stop string


def _is_switch(value: Any) -> bool:
    return isinstance(value, int) and value in (0, 1)


def _are_functions(value: Any) -> bool:
    return is_iterable(value) and not isinstance(value, str | bytes) and all(map(callable, value))


def _are_stops(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(isinstance(each, str) and _are_stops(each) for each in value)
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_STOP and replace_surrogates(value) == value


def _is_seed(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(each is None or (not isinstance(each, list | tuple) and _is_seed(each)) for each in value)
    return isinstance(value, Integral) and not isinstance(value, bool) and SEEDS[0] <= int(value) <= SEEDS[1]


_NUMBERS: dict[str, tuple[type, float, float]] = {  # kind, least and most
    **dict.fromkeys(("max_new_tokens", "num_beams", "num_return_sequences"), (int, 1, _MOST)),
    **dict.fromkeys(("min_length", "min_new_tokens", "top_k", "top_logprobs"), (int, 0, _MOST)),
    **dict.fromkeys(("encoder_no_repeat_ngram_size", "no_repeat_ngram_size"), (int, 0, _MOST)),
    **dict.fromkeys(("diversity_penalty", "guidance_scale", "length_penalty"), (float, -inf, inf)),
    **dict.fromkeys(("encoder_repetition_penalty", "max_time", "repetition_penalty", "temperature"), (float, 0, inf)),
    **dict.fromkeys(("epsilon_cutoff", "eta_cutoff", "min_p", "top_h", "top_p", "typical_p"), (float, 0, 1)),
}
_SWITCHES = {
    *("disable_compile", "do_sample", "low_memory", "remove_invalid_values", "renormalize_logits"),
    *("output_attentions", "output_hidden_states", "output_logits", "output_scores", "synced_gpus", "use_cache"),
}
_TOKENS = {
    *("begin_suppress_tokens", "bos_token_id", "decoder_start_token_id", "eos_token_id", "forced_bos_token_id"),
    *("forced_eos_token_id", "suppress_tokens"),
}
_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {  # what others may be, in code and in words
    **dict.fromkeys(_SWITCHES, (_is_switch, "True or False")),
    **dict.fromkeys(("logits_processor", "stopping_criteria"), (_are_functions, "a list of functions")),
    "stop_strings": (_are_stops, f"texts of at most {_LONGEST_STOP} characters, none of them empty or no Unicode"),
    "seed": (_is_seed, f"a whole number from {SEEDS[0]} to {SEEDS[1]}"),
    "streamer": (lambda value: hasattr(value, "put") and hasattr(value, "end"), "an object with put and end"),
    "early_stopping": (lambda it: _is_switch(it) or (type(it), it) == (str, "never"), "True, False or 'never'"),
    "prefix_allowed_tokens_fn": (callable, "a function"),
}
_OWN_INPUTS = {  # the prompt and its arrangement determine these
    *("attention_mask", "cache", "cache_config", "cache_position", "input_ids", "inputs", "inputs_embeds", "labels"),
    *("logits_to_keep", "max_length", "past_key_values", "position_ids", "return_dict_in_generate"),
}
_FOREIGN_CODE = {  # another decoding loop, from a repository of a hub or of the caller
    *("constraints", "custom_generate", "dola_layers", "force_words_ids", "num_beam_groups", "penalty_alpha"),
    "trust_remote_code",
}
_OWN_PREFILL = {  # transformers prefills the prompt itself: assisted decoding and token healing
    *("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "is_assistant", "use_mtp"),
    "token_healing",
}
_REFUSING = ("transformers.generation", "transformers.configuration", "transformers.utils", "huggingface_hub", "torch")
"""Modules whose errors are about keywords. Those of models and callbacks are not among them."""


def generation_options(
    kwargs: Mapping[str, Any], model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, stock_decoding: bool
) -> dict[str, Any]:
    """Return the keyword arguments for transformers' `generate`, of those of `InvariantModel.generate`.

    Options that are not in `kwargs` come from its `generation_config`, and then from the model's; but decoding is
    greedy unless the first two say otherwise. `stock_decoding`: generated tokens use the model's own attention. Errors
    are those of `InvariantModel.generate`, and TokenizerRequired for stop strings without a tokenizer.
    """
    options = _chosen(kwargs)
    config = options.get("generation_config")
    called = options if config is None else {**_chosen(config), **options}
    known = {**_chosen(model.generation_config), **called}
    _refuse(options, called, known, stock_decoding)
    for name in _OWN_PREFILL & options.keys():  # which are off
        del options[name]
    check_options(options, model)
    options |= {
        "use_cache": True,
        "cache_implementation": None,
        "do_sample": bool(called.get("do_sample")),
        "num_beams": known.get("num_beams", 1) or 1,
        "num_return_sequences": known.get("num_return_sequences", 1) or 1,
        "eos_token_id": as_ids(known.get("eos_token_id")) or None,
    }
    if options["num_beams"] > 1 and known.get("top_logprobs"):
        raise UnsupportedCombination("expected one beam with top_logprobs: the steps of a beam are those of others")
    vocabulary = range(model.config.get_text_config(decoder=True).vocab_size)  # some configs say -1
    padding = (known.get("pad_token_id"), getattr(tokenizer, "pad_token_id", None), *(options["eos_token_id"] or ()), 0)
    options["pad_token_id"] = next(filter(vocabulary.__contains__, padding))
    criteria = options["stopping_criteria"] = list(options.get("stopping_criteria") or ())
    options.pop("stop_strings", None)
    if strings := known.get("stop_strings"):
        if tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer, which stop strings need; got none")
        options.setdefault("tokenizer", tokenizer)
        criteria.append(StopStringCriteria(tokenizer, strings))
    return options


def _chosen(source: Any) -> dict[str, Any]:
    """Return the options of keywords, or of a `GenerationConfig`, that are not None."""
    source = vars(source) if isinstance(source, GenerationConfig) else source
    return {name: value for name, value in source.items() if value is not None} if isinstance(source, Mapping) else {}


def _refuse(
    keywords: Mapping[str, Any], called: Mapping[str, Any], known: Mapping[str, Any], stock_decoding: bool
) -> None:
    """Raise for options with which the prompt would be prefilled, or decoded, with the plain model's attention."""
    reason, hint = "", "Remove the option."
    if names := sorted(_OWN_INPUTS & keywords.keys()):
        reason = f"options of decoding, got {', '.join(names)}, which the prompt and its arrangement determine"
        hint = "Remove the option. Token ids go into the Prompt; the length of an answer is max_new_tokens."
    elif names := sorted(filter(lambda name: is_set(known[name]), _FOREIGN_CODE & known.keys())):
        reason = f"a decoding loop of transformers itself, got {', '.join(names)}, for which it runs other code"
    elif names := sorted(filter(lambda name: known[name] is not False, _OWN_PREFILL & known.keys())):
        reason = f"decoding after an arranged prefill, got {', '.join(names)}, with which transformers prefills itself"
    elif called.get("use_cache") is False:
        reason = "decoding with a cache, got use_cache=False: the cache holds the arranged prefill"
    elif "prefill_chunk_size" in known:
        reason = "a prefill in one forward pass, got prefill_chunk_size: arranged attention needs all segments in it"
        hint = "Remove prefill_chunk_size; in the model's own generation_config, set it to None."
    elif not isinstance(cache := called.get("cache_implementation", "dynamic"), str) or cache != "dynamic":
        reason = f"cache_implementation 'dynamic', got {shown(cache)}: the cache is that of the arranged prefill"
    elif not stock_decoding and known.get("guidance_scale", 1) != 1:
        reason = "no guidance_scale: what changes attention while decoding would change that of the other prompt, too"
        hint = "Leave it away, or use a method with stock decoding, such as 'rotor', without an intervention."
    if reason:
        raise UnsupportedCombination(f"expected {reason}", hint=hint)


def resolve_option(kwargs: Mapping[str, Any], name: str, *fallbacks: object) -> Any:
    """Resolve an option: keyword argument, then `generation_config`, then the attribute of a fallback, else None."""
    value = kwargs.get(name)
    for source in (kwargs.get("generation_config"), *fallbacks):
        if value is not None:
            return value
        value = getattr(source, name, None)
    return value


def resolve_max_new_tokens(max_new_tokens: int | None, kwargs: Mapping[str, Any]) -> int:
    """Resolve the number of new tokens, at least 1: the argument, then `generation_config`, else 64."""
    if max_new_tokens is None:
        max_new_tokens = getattr(kwargs.get("generation_config"), "max_new_tokens", None)
    return 64 if max_new_tokens is None else check_number("max_new_tokens", max_new_tokens, 1, error=InvalidOption)


def is_set(value: Any) -> bool:
    """Return whether an option is at another value than those that disable it: None, False, 0 and 1."""
    return value is True or not (value is None or (isinstance(value, Real) and value in (0, 1)))


def as_ids(value: Any, name: str = "eos_token_id") -> list[int]:
    """Return a token id, several (also as a tensor), or None as a list; or raise InvalidOption."""
    listed = value.flatten().tolist() if hasattr(value, "flatten") else [] if value is None else value
    listed = list(listed) if is_iterable(listed) and not isinstance(listed, str | bytes) else [listed]
    return list(map(partial(check_number, name, error=InvalidOption), listed))


def check_options(kwargs: Mapping[str, Any], model: PreTrainedModel) -> None:
    """Check names, kinds and bounds of keywords of `generate` and of its config, or raise InvalidOption."""
    if not kwargs:
        return
    known = _parameters(model)
    for name in kwargs.keys() - known:
        near = [each for each in sorted(known) if each.startswith(f"{name}_")] or get_close_matches(str(name), known, 1)
        hint = f"Did you mean {near[0]!r}?" if near else "They are those of transformers' GenerationConfig."
        raise InvalidOption(f"expected keywords of generate, got {name!r}, which is none", hint=hint)
    config = kwargs.get("generation_config")
    if not isinstance(config, GenerationConfig | None):
        raise _unexpected("generation_config", "a GenerationConfig of transformers", config)
    checked = _NUMBERS.keys() | _SWITCHES
    own = {} if config is None else {name: each for name, each in _chosen(config).items() if name in checked}
    chosen = own | _chosen(kwargs)
    vocabulary = model.config.get_text_config(decoder=True).vocab_size
    for name, value in chosen.items():
        kind, least, most = _NUMBERS.get(name, (None, 0, 0))
        if kind is int and check_number(name, value, int(least), error=InvalidOption) > most:
            raise _unexpected(name, "a whole number of 64 bits", value)
        if kind is float and not least <= check_real(name, value, error=InvalidOption) <= most:
            raise _unexpected(name, f"at least {least}" if most == inf else f"{least} to {most}", value)
        if name in _TOKENS and min(as_ids(value, name), default=0) < 0:
            raise _unexpected(name, "token ids of at least 0", value)
        if name in _KINDS and not _KINDS[name][0](value):
            raise _unexpected(name, _KINDS[name][1], value)
        if name == "pad_token_id":
            check_number(name, value, 0, vocabulary - 1, error=InvalidOption)


def check_seed(seed: object) -> None:
    """Check a seed of PyTorch, or a list of some; None is none. Raise InvalidOption for anything else."""
    if seed is not None and not _is_seed(seed):
        raise _unexpected("seed", _KINDS["seed"][1], seed)


@contextmanager
def refusals() -> Iterator[None]:
    """Raise what transformers' own code of generation refuses as `InvalidOption`; errors of callbacks as they are."""
    try:
        yield
    except (InvariantRAGError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(error.__traceback__)]
        within = next((at for at, name in enumerate(modules) if name.startswith("transformers.")), len(modules))
        if within == len(modules) or not all(each.startswith(_REFUSING) for each in modules[within:]):
            raise
        raise InvalidOption(f"expected keywords that transformers' generate takes; it says: {error}") from error


@once_per_model
def _parameters(model: PreTrainedModel) -> frozenset[str]:
    """Return the keywords of transformers' `generate` and of the model, to which it passes others on."""
    functions = (GenerationMixin.generate, model.forward)
    names = {name for function in functions for name in inspect.signature(function).parameters}
    names |= vars(GenerationConfig()).keys() | {"assistant_tokenizer", "seed", "streamers", "tokenizer", "top_logprobs"}
    return frozenset(names - {"args", "kwargs", "labels", "logits_to_keep", "self", "transformers_version"})


def _unexpected(name: str, expected: str, value: object) -> InvalidOption:
    return InvalidOption(f"{name}: expected {expected}, got {shown(value)}")
