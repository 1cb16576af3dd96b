"""What a generation returns, and how it is made of the output of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import DynamicCache, PreTrainedModel

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.options import as_ids
from invariant_rag.generation.prepare import PreparedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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


def to_generations(
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
    last = as_ids(options["eos_token_id"])
    ends = [index + 1 for index, token in enumerate(sequence[start:]) if token in last][:1]
    if options["num_beams"] == 1:
        ends += [each.lengths[row] - start for each in options["stopping_criteria"] if row in each.lengths]
        return sequence[start:][: min(ends, default=None)], bool(ends)
    # Beams change rows while they grow, and the finished ones are padded.
    tokens = sequence[start:][: min(ends, default=None)]
    while tokens and not ends and tokens[-1] == options["pad_token_id"]:
        tokens.pop()
    return tokens, bool(ends) or len(tokens) < len(sequence) - start
