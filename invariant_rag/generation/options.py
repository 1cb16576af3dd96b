"""Keywords of `generate`: what was asked for, what the model's own config says, and what cannot be combined."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from invariant_rag.errors import TokenizerRequired, UnsupportedCombination

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_READ_AGAIN = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "token_healing")
"""Options with which transformers reads the prompt by itself: assisted decoding, and what changes the prompt."""


def generation_options(
    kwargs: dict[str, Any],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    stock_decoding: bool = True,
) -> dict[str, Any]:
    """Return keywords for transformers' `generate`, with what it needs to know about this model filled in.

    What is left open comes from a `generation_config` among the keywords, and then from the model's own; but decoding
    is greedy unless sampling was asked for.

    Raises:
        TokenizerRequired: Stop strings were asked for, and there is no tokenizer.
        UnsupportedCombination: Assisted decoding was asked for, token healing, decoding without a cache, or a prefill
            in chunks; or guidance without `stock_decoding`.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    of_model = model.generation_config

    asked = {name: resolve_option(options, name, of_model) for name in _READ_AGAIN}
    if again := [name for name, value in asked.items() if value is not None and value is not False]:
        raise UnsupportedCombination(
            f"expected decoding that goes on from an arranged prefill, got {', '.join(again)}: with that, transformers "
            "reads the prompt by itself, as the plain model does",
            hint="Leave it away.",
        )
    if resolve_option(options, "use_cache") is False:
        raise UnsupportedCombination(
            "expected decoding with a cache, got use_cache=False: the arranged prefill is what the cache holds",
            hint="Leave use_cache away.",
        )
    if (size := resolve_option(options, "prefill_chunk_size", of_model)) is not None:
        raise UnsupportedCombination(
            f"expected a prompt that is read at once, got prefill_chunk_size={size}: an arranged prefill reads its "
            "attention in blocks as it is",
            hint="Leave prefill_chunk_size away; in the model's own generation_config, set it to None.",
        )
    if not stock_decoding and resolve_option(options, "guidance_scale", of_model) not in (None, 1):
        raise UnsupportedCombination(
            "expected no guidance_scale with a method or an intervention that takes part in decoding, got one: the "
            "unguided prompt would be read as this one is arranged",
            hint="Use a method with stock decoding, such as 'rotor', without an intervention.",
        )
    options["use_cache"] = True
    options["do_sample"] = bool(resolve_option(options, "do_sample"))
    for name in ("num_beams", "num_return_sequences"):
        options[name] = resolve_option(options, name, of_model) or 1
    options["eos_token_id"] = resolve_option(options, "eos_token_id", of_model)
    padding = (resolve_option(options, "pad_token_id", of_model), getattr(tokenizer, "pad_token_id", None))
    known = [*padding, *as_ids(options["eos_token_id"]), 0]
    options["pad_token_id"] = next(each for each in known if each is not None)
    criteria = list(options.get("stopping_criteria") or ())
    strings = resolve_option(options, "stop_strings", of_model)
    options.pop("stop_strings", None)
    if strings:
        if tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: stop strings are text")
        options.setdefault("tokenizer", tokenizer)
        criteria.append(StopStringCriteria(tokenizer, strings))
    options["stopping_criteria"] = StoppingCriteriaList([_Stops(criteria)] if criteria else [])
    return options


def resolve_max_new_tokens(asked: int | None, kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens to generate at most: as asked, or as a `generation_config` says, or 64."""
    wanted = resolve_option({**kwargs, "max_new_tokens": asked}, "max_new_tokens")
    return 64 if wanted is None else wanted


def resolve_option(kwargs: Mapping[str, Any], name: str, *fallbacks: object) -> Any:
    """Return a keyword of `generate`: as given, as a `generation_config` among them says, as fallbacks do, or None."""
    said = (kwargs.get(name), *(getattr(each, name, None) for each in (kwargs.get("generation_config"), *fallbacks)))
    return next((each for each in said if each is not None), None)


class _Stops(StoppingCriteria):
    """Stopping criteria that remember how long each row of the batch was when it stopped.

    Without an end-of-sequence token, transformers lets the rows that stopped go on until all of them have.
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
    """Return token ids as a list, however a config gives them."""
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [int(each) for each in value.flatten()]
    return [value] if isinstance(value, int) else list(value)
