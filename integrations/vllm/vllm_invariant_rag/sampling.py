"""Keywords of `InvariantModel.generate`, which are those of transformers, as sampling parameters of vLLM.

`constrain` and `ToolCalling.constrain` hold a text by logits processors, which cannot run in vLLM. The same grammars
run there as structural tags, with xgrammar. One thing differs: log-probabilities are those among the allowed tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from invariant_rag.checks import check_stops
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.options import as_ids, resolve_option
from invariant_rag.generation.sampling import TokenPenalties
from invariant_rag.generation.streaming import StopOnEvent
from invariant_rag.generation.structured import GrammarProcessor

from vllm_invariant_rag.engines import Stopped

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from transformers.generation.streamers import BaseStreamer

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


@dataclass(frozen=True)
class Sampling:
    """How a call decodes."""

    fields: dict[str, Any]  # parameters, by the names that vLLM's `SamplingParams` and its completions API share
    streamer: BaseStreamer | None  # receives the tokens
    stopped: Stopped | None

    def with_seed(self, seed: int | None) -> Sampling:
        """Return how a prompt with a seed of its own decodes."""
        return self if seed is None else replace(self, fields={**self.fields, "seed": seed})


def sampling_of(lm: InvariantModel, max_new_tokens: int, kwargs: Mapping[str, Any]) -> Sampling:
    """Translate the keywords of a call. What it leaves open is as in `lm.generate`.

    Raises:
        UnsupportedCombination: vLLM cannot do what a keyword, or the model's generation_config, asks for.
    """
    options = {name: value for name, value in kwargs.items() if value is not None}
    defaults = lm.model.generation_config
    _refuse_unknown(options, defaults)
    sampled = bool(resolve_option(options, "do_sample"))
    chosen = {name: resolve_option(options, name, defaults) for name in _DEFAULTS}
    chosen = {name: _DEFAULTS[name] if value is None else value for name, value in chosen.items()}
    stops = check_stops(resolve_option(options, "stop_strings", defaults))
    sequences = resolve_option(options, "num_return_sequences", defaults) or 1
    if sequences > 1 and not sampled:
        raise UnsupportedCombination(f"expected do_sample=True for {sequences} sequences, which are equal without it")
    minimum = resolve_option(options, "min_new_tokens", defaults) or 0
    if minimum and stops:
        raise UnsupportedCombination("expected min_new_tokens or stop_strings, got both: vLLM stops at none before it")
    given: Sequence[Any] = options.get("logits_processor") or ()
    penalties = [each for each in given if isinstance(each, TokenPenalties)]
    processor = _grammar([each for each in given if each not in penalties])
    ends = set(as_ids(resolve_option(options, "eos_token_id", defaults)))
    bias = _logit_bias(resolve_option(options, "sequence_bias", defaults) or ())
    fields: dict[str, Any] = {
        "max_tokens": max_new_tokens,
        "min_tokens": minimum,
        "n": sequences,
        "temperature": chosen["temperature"] if sampled else 0.0,
        "top_p": chosen["top_p"] if sampled else 1.0,
        "top_k": chosen["top_k"] if sampled else 0,
        "min_p": (chosen["min_p"] or 0.0) if sampled else 0.0,
        "repetition_penalty": chosen["repetition_penalty"],
        "stop": stops,
        "include_stop_str_in_output": True,
        # The end of a text is decided here: vLLM's own default comes from its files.
        "stop_token_ids": sorted(ends),
        "ignore_eos": True,
        "logprobs": options.get("top_logprobs") or 0,
    }
    for each in penalties[:1]:
        fields |= {"presence_penalty": each.presence, "frequency_penalty": each.frequency}
    if processor is not None:
        if not processor.trigger:  # what xgrammar would let into strings; control tokens are the last ones
            bias |= {str(token): _UNLIKELY for token in processor.banned[b""][-_MOST_BIASES:]}
        fields["structured_outputs"] = {"structural_tag": processor.tag}
    if bias:
        fields["logit_bias"] = bias
    return Sampling(fields, options.get("streamer"), _stopped(options.get("stopping_criteria") or ()))


def _grammar(processors: Sequence[Any]) -> GrammarProcessor | None:
    """Return what `constrain` wants of vLLM. Other processors would have to run there: refused."""
    if len(processors) == 1 and isinstance(processors[0], GrammarProcessor):
        return processors[0]
    if processors:
        raise UnsupportedCombination(
            f"expected no logits processors, got {', '.join(type(each).__name__ for each in processors)}: they change "
            "scores while tokens are made, and vLLM makes them elsewhere",
            hint="Leave logits_processor away, or run this call without vLLM. Schemas and tools work.",
        )
    return None


def _logit_bias(sequences: Any) -> dict[str, float]:
    """Return transformers' biases of single tokens as those of vLLM."""
    pairs = list(sequences.items() if isinstance(sequences, dict) else sequences)
    if any(len(tokens) != 1 for tokens, _ in pairs):
        raise UnsupportedCombination("expected a sequence_bias of single tokens on vLLM, got one of several")
    return {str(tokens[0]): bias for tokens, bias in pairs}


def _refuse_unknown(options: Mapping[str, Any], defaults: object) -> None:
    own = {name for name in options if name not in _KNOWN and options[name] not in _NEUTRAL.get(name, ())}
    configured = {name for name in _NEUTRAL if resolve_option(options, name, defaults) not in (None, *_NEUTRAL[name])}
    if refused := sorted(own | configured):
        raise UnsupportedCombination(
            f"expected options of decoding that vLLM knows, got {', '.join(refused)}",
            hint=f"Known are {', '.join(sorted(_KNOWN))}. Others run without vLLM.",
        )
    if options.get("use_cache") is False:
        raise UnsupportedCombination("expected decoding with a cache, got use_cache=False")


def _stopped(criteria: Sequence[Any]) -> Stopped | None:
    """Return the test whether the caller has left. Other criteria look at tokens while they are made: refused."""
    if others := [type(each).__name__ for each in criteria if not isinstance(each, StopOnEvent)]:
        raise UnsupportedCombination(
            f"expected no stopping criteria but StopOnEvent, got {', '.join(others)}: they look at tokens while "
            "these are made, and vLLM makes them elsewhere"
        )
    return (lambda: any(bool(each(_NOTHING, _NOTHING)) for each in criteria)) if criteria else None
