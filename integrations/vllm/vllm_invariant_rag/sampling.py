"""Keywords of `InvariantModel.generate`, which are those of transformers, as sampling parameters of vLLM.

`constrain` and `ToolCalling.constrain` hold a text by logits processors, which cannot run in vLLM. The same grammars
run there as structural tags, with xgrammar. One thing differs: log-probabilities are those among the allowed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from invariant_rag.checks import check_stops
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.options import as_ids, resolve_option
from invariant_rag.generation.streaming import StopOnEvent
from invariant_rag.generation.structured import GrammarProcessor

from vllm_invariant_rag.engines import Stopped

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
"""Those of transformers, for what neither the call nor the model sets."""

_KNOWN = {
    *_DEFAULTS, "do_sample", "eos_token_id", "generation_config", "logits_processor", "min_new_tokens", "num_beams",
    "num_return_sequences", "pad_token_id", "sequence_bias", "stop_strings", "stopping_criteria", "streamer",
    "top_logprobs", "use_cache",
}  # fmt: skip

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": (), "begin_suppress_tokens": (), "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1.0,), "epsilon_cutoff": (0.0,), "eta_cutoff": (0.0,),
    "exponential_decay_length_penalty": (), "forced_bos_token_id": (), "forced_eos_token_id": (),
    "guidance_scale": (1, 1.0), "max_time": (), "min_length": (0,), "no_repeat_ngram_size": (0,), "num_beams": (1,),
    "remove_invalid_values": (False,), "renormalize_logits": (False,), "suppress_tokens": (),
    "top_h": (), "typical_p": (1.0,), "watermarking_config": (),
}  # fmt: skip
"""Options that a generation_config may set and vLLM cannot follow, with the values that change nothing."""

_UNLIKELY, _MOST_BIASES = -100.0, 1024  # the least bias that vLLM takes, and how many
_NOTHING = torch.empty((1, 0))


def sampling_of(lm: InvariantModel, most: int, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Stopped | None]:
    """Translate the keywords of a call, or refuse what vLLM cannot do. What it leaves open is as in `lm.generate`.

    Return parameters by the names that `SamplingParams` and the completions API share, and whether nobody waits.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    defaults = lm.model.generation_config

    def option(name: str) -> Any:
        return resolve_option(options, name, defaults)

    chosen = {name: default if option(name) is None else option(name) for name, default in _DEFAULTS.items()}
    sampled, sequences = bool(resolve_option(options, "do_sample")), option("num_return_sequences") or 1
    stops, minimum = check_stops(option("stop_strings")), option("min_new_tokens") or 0
    ends, bias = as_ids(option("eos_token_id")), option("sequence_bias") or {}
    biases = list(bias.items() if isinstance(bias, dict) else bias)
    hooks_by_type: dict[type, list[Any]] = {TokenPenalties: [], GrammarProcessor: [], StopOnEvent: []}
    hooks = [*(options.get("logits_processor") or ()), *(options.get("stopping_criteria") or ())]
    others = ", ".join(type(each).__name__ for each in hooks if type(each) not in hooks_by_type)
    for each in hooks:
        hooks_by_type.setdefault(type(each), []).append(each)
    unknown = {name for name in options if name not in _KNOWN and options[name] not in _NEUTRAL.get(name, ())}
    unknown |= {name for name in _NEUTRAL if option(name) not in (None, *_NEUTRAL[name])}
    reasons = {
        f"options of decoding that vLLM knows, got {', '.join(sorted(unknown))}": bool(unknown),
        "decoding with a cache, got use_cache=False": options.get("use_cache") is False,
        f"do_sample=True for {sequences} sequences, which are equal without it": sequences > 1 and not sampled,
        "min_new_tokens or stop_strings, got both: vLLM stops at none before it": bool(minimum and stops),
        "a sequence_bias of single tokens, got one of several": any(len(tokens) != 1 for tokens, _ in biases),
        f"no logits processors and stopping criteria of other packages, got {others}: they run while tokens are made, "
        "and vLLM makes them in another process": bool(others),
        "the logits processor of one schema, got several": len(hooks_by_type[GrammarProcessor]) > 1,
    }
    for reason, applies in reasons.items():
        if applies:
            raise UnsupportedCombination(f"expected {reason}", hint=f"vLLM knows {', '.join(sorted(_KNOWN))}.")
    bias = {tokens[0]: value for tokens, value in biases}
    fields: dict[str, Any] = {
        "max_tokens": most,
        "min_tokens": minimum,
        "n": sequences,
        "temperature": chosen["temperature"] if sampled else 0.0,
        "top_p": chosen["top_p"] if sampled else 1.0,
        "top_k": chosen["top_k"] if sampled else 0,
        "min_p": (chosen["min_p"] or 0.0) if sampled else 0.0,
        "repetition_penalty": chosen["repetition_penalty"],
        "presence_penalty": sum(each.presence for each in hooks_by_type[TokenPenalties]),
        "frequency_penalty": sum(each.frequency for each in hooks_by_type[TokenPenalties]),
        "stop": stops,
        "include_stop_str_in_output": True,
        # The end of a text is decided here: vLLM's own default comes from its files.
        "stop_token_ids": sorted({*ends}),
        "ignore_eos": True,
        "logprobs": options.get("top_logprobs") or 0,
    }
    for processor in hooks_by_type[GrammarProcessor]:
        fields["structured_outputs"] = {"structural_tag": processor.tag}
        if not processor.trigger:  # what xgrammar would let into strings, control tokens first
            banned = sorted(processor.banned[b""], key=lambda token: token not in processor.words.controls)
            bias |= dict.fromkeys(banned[:_MOST_BIASES], _UNLIKELY)
    if bias:
        fields["logit_bias"] = bias
    events = hooks_by_type[StopOnEvent]
    stopped = (lambda: any(bool(each(_NOTHING, _NOTHING)) for each in events)) if events else None
    return fields, stopped
