"""Decoding from prefilled caches with the model's own `generate`, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList, StopStringCriteria

from invariant_rag.errors import TokenizerRequired, UnsupportedCombination
from invariant_rag.preparation import PreparedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_READ_AGAIN = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit", "use_mtp", "token_healing")
"""Options with which transformers reads the prompt by itself: assisted decoding, and what changes the prompt."""


@dataclass(frozen=True)
class Usage:
    """Tokens of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Tokens written.
        cached_tokens: Tokens of the prompt whose keys and values came from a cache instead of a prefill.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens read and written."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """What a model wrote.

    Attributes:
        text: The generated text, without special tokens. Empty for a model without a tokenizer.
        token_ids: The generated tokens, an end-of-sequence token included.
        logprobs: Log-probability of each of them under the model, before any sampling temperature.
        finish_reason: `stop` at an end-of-sequence token or stop string, `length` at `max_new_tokens`.
        usage: Tokens read and written.
        order: Physical order of the segments, farthest from the suffix first: indices into `prompt.segments`.
        dropped: Segments that `overflow="drop_last"` left out.
        trimmed: Segments that `overflow="trim_segments"` shortened.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    order: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    trimmed: tuple[int, ...] = ()


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

    asked = {name: chosen(options, name, of_model) for name in _READ_AGAIN}
    if again := [name for name, value in asked.items() if value is not None and value is not False]:
        raise UnsupportedCombination(
            f"expected decoding that goes on from an arranged prefill, got {', '.join(again)}: with that, transformers "
            "reads the prompt by itself, as the plain model does",
            hint="Leave it away.",
        )
    if chosen(options, "use_cache") is False:
        raise UnsupportedCombination(
            "expected decoding with a cache, got use_cache=False: the arranged prefill is what the cache holds",
            hint="Leave use_cache away.",
        )
    if (size := chosen(options, "prefill_chunk_size", of_model)) is not None:
        raise UnsupportedCombination(
            f"expected a prompt that is read at once, got prefill_chunk_size={size}: an arranged prefill reads its "
            "attention in blocks as it is",
            hint="Leave prefill_chunk_size away; in the model's own generation_config, set it to None.",
        )
    if not stock_decoding and chosen(options, "guidance_scale", of_model) not in (None, 1):
        raise UnsupportedCombination(
            "expected no guidance_scale with a method or an intervention that takes part in decoding, got one: the "
            "unguided prompt would be read as this one is arranged",
            hint="Use a method with stock decoding, such as 'rotor', without an intervention.",
        )
    options["use_cache"] = True
    options["do_sample"] = bool(chosen(options, "do_sample"))
    for name in ("num_beams", "num_return_sequences"):
        options[name] = chosen(options, name, of_model) or 1
    options["eos_token_id"] = chosen(options, "eos_token_id", of_model)
    padding = (chosen(options, "pad_token_id", of_model), getattr(tokenizer, "pad_token_id", None))
    known = [*padding, *_ids(options["eos_token_id"]), 0]
    options["pad_token_id"] = next(each for each in known if each is not None)
    criteria = list(options.get("stopping_criteria") or ())
    strings = chosen(options, "stop_strings", of_model)
    options.pop("stop_strings", None)
    if strings:
        if tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: stop strings are text")
        options.setdefault("tokenizer", tokenizer)
        criteria.append(StopStringCriteria(tokenizer, strings))
    options["stopping_criteria"] = StoppingCriteriaList([_Stops(criteria)] if criteria else [])
    return options


def most_new_tokens(asked: int | None, kwargs: Mapping[str, Any]) -> int:
    """Return how many tokens to generate at most: as asked, or as a `generation_config` says, or 64."""
    wanted = chosen({**kwargs, "max_new_tokens": asked}, "max_new_tokens")
    return 64 if wanted is None else wanted


def chosen(kwargs: Mapping[str, Any], name: str, *fallbacks: object) -> Any:
    """Return a keyword of `generate`: as given, as a `generation_config` among them says, as fallbacks do, or None."""
    said = (kwargs.get(name), *(getattr(each, name, None) for each in (kwargs.get("generation_config"), *fallbacks)))
    return next((each for each in said if each is not None), None)


def decode(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: DynamicCache,
    max_new_tokens: int,
    options: dict[str, Any],
) -> Any:
    """Run a model's own `generate` over what a cache does not hold of its input, and on.

    Args:
        model: The model.
        ids: Input ids `[B, L]`.
        mask: Attention mask `[B, L]`.
        cache: Keys and values of what was read.
        max_new_tokens: The most tokens to generate.
        options: From `generation_options`.

    Raises:
        UnsupportedCombination: The model gave the cache up on the way.
    """
    generate: Any = model.generate
    output = generate(
        input_ids=ids,
        attention_mask=mask,
        past_key_values=cache,
        max_new_tokens=max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    if output.past_key_values is not cache:
        raise UnsupportedCombination(
            "expected a model that goes on from an arranged prefill, got one that gave its cache up and read the "
            "prompt again, as the plain model does",
            hint="Phi-3 does so where an answer grows beyond original_max_position_embeddings: ask for fewer tokens.",
        )
    return output


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


def stacked_cache(caches: Sequence[DynamicCache], padding: Sequence[int], copies: int) -> DynamicCache:
    """Make one batch of the caches of single prompts, padded on the left; each row `copies` times."""
    if len(caches) == 1:
        cache = caches[0]
    else:
        cache = DynamicCache()
        for index in range(len(caches[0].layers)):
            layers: list[Any] = [each.layers[index] for each in caches]
            keys = [_padded(layer.keys, extra) for layer, extra in zip(layers, padding, strict=True)]
            values = [_padded(layer.values, extra) for layer, extra in zip(layers, padding, strict=True)]
            cache.update(torch.cat(keys), torch.cat(values), index)
    if copies > 1:
        cache.batch_repeat_interleave(copies)
    return cache


def _padded(states: torch.Tensor, extra: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, extra, 0))


def padded_batch(
    prepared: Sequence[PreparedPrompt], pad_token_id: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
    """Return input ids and attention mask `[B, L]`, padded on the left, and the padding of each row."""
    longest = max(len(each.input_ids) for each in prepared)
    padding = [longest - len(each.input_ids) for each in prepared]
    pairs = list(zip(prepared, padding, strict=True))
    ids = [[pad_token_id] * extra + list(each.input_ids) for each, extra in pairs]
    mask = [[0] * extra + [1] * (longest - extra) for extra in padding]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device), padding


def padded_positions(prepared: Sequence[PreparedPrompt], padding: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the rotary positions `[B, L]` of a batch that is padded on the left."""
    rows = [[0] * extra + list(each.positions) for each, extra in zip(prepared, padding, strict=True)]
    return torch.tensor(rows, device=device)


def read_output(
    output: Any,
    prepared: Sequence[PreparedPrompt],
    cached: Sequence[int],
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> list[Generation]:
    """Turn what `generate` returned into one generation per prompt and returned sequence.

    `cached` says how many tokens of each prompt came from a cache.
    """
    compute_scores: Any = model.compute_transition_scores
    scores = compute_scores(output.sequences, output.logits, output.get("beam_indices"), normalize_logits=True)
    start = output.sequences.shape[1] - scores.shape[1]
    copies = options["num_return_sequences"]
    generations = []
    for row, (sequence, logprobs) in enumerate(zip(output.sequences, scores.tolist(), strict=True)):
        source = prepared[row // copies]
        tokens, finished = _cut(row, sequence.tolist(), start, options)
        generations.append(
            Generation(
                text="" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True)),
                token_ids=tuple(tokens),
                logprobs=tuple(logprobs[: len(tokens)]),
                finish_reason="stop" if finished else "length",
                usage=Usage(len(source.input_ids), len(tokens), cached[row // copies]),
                order=source.order,
                dropped=source.dropped,
                trimmed=source.trimmed,
            )
        )
    return generations


def _cut(row: int, sequence: list[int], start: int, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Generated tokens of a row without what follows its end, and whether it ended by itself."""
    last = _ids(options["eos_token_id"])
    ends = [index + 1 for index, token in enumerate(sequence[start:]) if token in last][:1]
    if options["num_beams"] == 1:
        ends += [each.lengths[row] - start for each in options["stopping_criteria"] if row in each.lengths]
        return sequence[start:][: min(ends, default=None)], bool(ends)
    # Beams change rows while they grow, and the finished ones are padded.
    tokens = sequence[start:][: min(ends, default=None)]
    while tokens and not ends and tokens[-1] == options["pad_token_id"]:
        tokens.pop()
    return tokens, bool(ends) or len(tokens) < len(sequence) - start


def _ids(value: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    if value is None:
        return []
    if isinstance(value, torch.Tensor):
        return [int(each) for each in value.flatten()]
    return [value] if isinstance(value, int) else list(value)
