"""Options of `generate`: keyword arguments, defaults of the generation config, and unsupported combinations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from transformers import CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from invariant_rag.checks import check_number
from invariant_rag.errors import InvalidOption, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.option_checks import check_options, check_token_ids
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_OWN_PREFILL = (
    "assistant_model",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "is_assistant",
    "use_mtp",
    "token_healing",
)
"""Options with which transformers prefills the prompt itself: assisted decoding and token healing."""

_OWN_INPUTS = (
    "attention_mask",
    "cache_config",
    "cache_position",
    "input_ids",
    "inputs",
    "inputs_embeds",
    "labels",
    "logits_to_keep",
    "past_key_values",
    "position_ids",
    "return_dict_in_generate",
)
"""Options of transformers' `generate` that the prompt and its arrangement determine."""

_CACHES = (None, "dynamic", "static")
"""Kinds of caches for decoding. What the model's own `generation_config` says is not asked."""

_FOREIGN_CODE = (
    "constraints",
    "custom_generate",
    "dola_layers",
    "force_words_ids",
    "num_beam_groups",
    "penalty_alpha",
    "trust_remote_code",
)
"""Options with which transformers runs another decoding loop, from a repository of a hub or of the caller."""


def generation_options(
    kwargs: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    stock_decoding: bool = True,
) -> dict[str, Any]:
    """Return the keyword arguments for transformers' `generate`.

    Options that are not in `kwargs` come from its `generation_config`, and then from the model's. Decoding is greedy
    unless `kwargs` or their `generation_config` enable sampling.

    Args:
        kwargs: Keyword arguments of `InvariantModel.generate`.
        model: The model.
        tokenizer: Its tokenizer.
        stock_decoding: Whether generated tokens use the model's own attention.

    Raises:
        InvalidOption: There is no such keyword, or its value is of another kind or out of bounds.
        TokenizerRequired: Stop strings without a tokenizer.
        UnsupportedCombination: Assisted decoding, token healing, `use_cache=False` or chunked prefill; guidance or a
            static cache without `stock_decoding`; or a cache that is neither dynamic nor static, or not with `compile`.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    defaults = model.generation_config
    _refuse_own_prefill(options, defaults, stock_decoding)
    options = {name: value for name, value in options.items() if name not in _OWN_PREFILL}  # False
    check_options(options, model)
    options["use_cache"] = True
    if options.pop("compile", False):  # transformers compiles decoding from a static cache, and says where it cannot
        options = {"cache_implementation": "static", "compile_config": CompileConfig(), **options}
        _check_compiles(options)
    options["cache_implementation"] = _cache_implementation(options, stock_decoding)
    options["do_sample"] = bool(resolve_option(options, "do_sample"))
    for name in ("num_beams", "num_return_sequences"):
        options[name] = resolve_option(options, name, defaults) or 1
    if options["num_beams"] > 1 and options.get("top_logprobs"):
        raise UnsupportedCombination(
            "expected one beam with top_logprobs: the steps of a beam are those of others",
            hint="Leave one of them away.",
        )
    options["eos_token_id"] = resolve_option(options, "eos_token_id", defaults)
    padding = (resolve_option(options, "pad_token_id", defaults), getattr(tokenizer, "pad_token_id", None))
    candidates = [*padding, *as_ids(options["eos_token_id"]), 0]
    vocabulary = range(model.config.get_text_config(decoder=True).vocab_size)  # some configs say -1
    options["pad_token_id"] = next(each for each in candidates if each is not None and each in vocabulary)
    criteria = list(options.get("stopping_criteria") or ())
    strings = resolve_option(options, "stop_strings", defaults)
    options.pop("stop_strings", None)
    if strings:
        if tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer, which stop strings need; got none")
        options.setdefault("tokenizer", tokenizer)
        criteria.append(StopStringCriteria(tokenizer, strings))
    options["stopping_criteria"] = StoppingCriteriaList([_StopRecorder(criteria)] if criteria else [])
    return options


def _refuse_own_prefill(options: Mapping[str, Any], defaults: object, stock_decoding: bool) -> None:
    """Raise for options with which transformers would prefill the prompt with the plain model's attention."""
    if own := [name for name in _OWN_INPUTS if name in options]:
        raise UnsupportedCombination(
            f"expected options of decoding, got {', '.join(own)}, which the prompt and its arrangement determine",
            hint="Remove the option. Token ids go into the Prompt.",
        )
    if "max_length" in options:
        raise UnsupportedCombination(
            "expected the length of the answer, got max_length, which counts the prompt too",
            hint="Give max_new_tokens instead.",
        )
    if refused := [name for name, value in _chosen(_FOREIGN_CODE, options, defaults).items() if is_set(value)]:
        raise UnsupportedCombination(
            f"expected a decoding loop of transformers itself, got {', '.join(refused)}, for which it runs code from "
            "elsewhere",
            hint="Remove the option.",
        )
    if refused := [name for name, value in _chosen(_OWN_PREFILL, options, defaults).items() if value is not False]:
        raise UnsupportedCombination(
            f"expected decoding that continues an arranged prefill, got {', '.join(refused)}, with which transformers "
            "prefills the prompt itself, with the plain model's attention",
            hint="Remove the option.",
        )
    if resolve_option(options, "use_cache") is False:
        raise UnsupportedCombination(
            "expected decoding with a cache, got use_cache=False: the cache holds the arranged prefill",
            hint="Remove use_cache.",
        )
    if (size := resolve_option(options, "prefill_chunk_size", defaults)) is not None:
        raise UnsupportedCombination(
            f"expected a prefill in one forward pass, got prefill_chunk_size={shown(size)}: arranged attention needs "
            "all segments in one forward pass, and limits memory by computing attention in blocks",
            hint="Remove prefill_chunk_size; in the model's own generation_config, set it to None.",
        )
    if not stock_decoding and resolve_option(options, "guidance_scale", defaults) not in (None, 1):
        raise UnsupportedCombination(
            "expected no guidance_scale with a method or an intervention that changes attention while decoding: the "
            "unconditional prompt would get the attention of this prompt",
            hint="Use a method with stock decoding, such as 'rotor', without an intervention.",
        )


def _chosen(names: Iterable[str], options: Mapping[str, Any], defaults: object) -> dict[str, Any]:
    """Return what is chosen of these options, anywhere where `resolve_option` looks."""
    config, found = options.get("generation_config"), {}
    for name in names:
        for value in (options.get(name), getattr(config, name, None), getattr(defaults, name, None)):
            if value is not None:
                found[name] = value
                break
    return found


def _check_compiles(options: Mapping[str, Any]) -> None:
    if options["cache_implementation"] != "static" or options.get("disable_compile"):
        raise UnsupportedCombination(
            "expected a static cache, and not disable_compile, with compile=True",
            hint="Leave cache_implementation and disable_compile away.",
        )


def _cache_implementation(options: Mapping[str, Any], stock_decoding: bool) -> str | None:
    """Return `static`, or None for a cache that grows."""
    wanted = resolve_option(options, "cache_implementation")
    if wanted not in _CACHES:
        raise UnsupportedCombination(
            f"expected cache_implementation 'dynamic' or 'static', got {wanted!r}: the cache starts with the arranged "
            "prefill",
            hint="Remove the option.",
        )
    if wanted == "static" and not stock_decoding:
        raise UnsupportedCombination(
            "expected no static cache with a method or an intervention that changes attention while decoding: it would "
            "read the room that is not filled yet",
            hint="Remove cache_implementation and compile, or use a method with stock decoding, such as 'rotor'.",
        )
    return "static" if wanted == "static" else None


def is_set(value: Any) -> bool:
    """Return whether an option is at another value than those that disable it: None, False, 0 and 1."""
    return value is True or not (value is None or (isinstance(value, Real) and value in (0, 1)))


def resolve_max_new_tokens(max_new_tokens: int | None, kwargs: Mapping[str, Any]) -> int:
    """Resolve the number of new tokens: the argument, then `generation_config`, else 64.

    Raises:
        InvalidOption: It is no whole number of at least 1.
    """
    resolved = resolve_option({**kwargs, "max_new_tokens": max_new_tokens}, "max_new_tokens")
    return 64 if resolved is None else check_number("max_new_tokens", resolved, 1, error=InvalidOption)


def resolve_option(kwargs: Mapping[str, Any], name: str, *fallbacks: object) -> Any:
    """Resolve an option: keyword argument, then `generation_config`, then the attribute of a fallback, else None."""
    value = kwargs.get(name)
    for source in (kwargs.get("generation_config"), *fallbacks):
        if value is not None:
            return value
        value = getattr(source, name, None)
    return value


class _StopRecorder(StoppingCriteria):
    """A stopping criterion that combines others and records the length at which each row of the batch stopped.

    Without an end-of-sequence token, transformers appends tokens to stopped rows until all rows have stopped.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria]) -> None:
        self._criteria = criteria
        self.lengths: dict[int, int] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        stopped = torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)
        for each in self._criteria:
            stopped |= torch.as_tensor(each(input_ids, scores, **kwargs), device=input_ids.device)
        for row in stopped.nonzero().flatten().tolist():
            self.lengths.setdefault(row, input_ids.shape[1])
        return stopped


def as_ids(value: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    """Return token ids of a generation config (None, an int, a list or a tensor) as a list."""
    return [] if value is None else check_token_ids("eos_token_id", value)
