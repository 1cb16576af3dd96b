"""Decoding: the model's own `generate`, starting from the cache of an arranged prefill."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import Cache, StoppingCriteriaList

from invariant_rag.attention.hook import override_only_over
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.logprobs import TokenLogprobs
from invariant_rag.generation.option_checks import translated_refusals

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Decoded:
    """The output of transformers' `generate`.

    Attributes:
        sequences: Left-padded prompt and generated tokens of each row.
        logprobs: Log-probabilities of each row's generated tokens.
        top_logprobs: For each row and token, the most likely tokens with their log-probabilities; empty if not wanted.
        start: Index of the first generated token.
        beam_lengths: Number of generated tokens of each row, with beam search; finished beams are padded after them.
            None: without beams.
        max_new_tokens: Maximum number of tokens that were to be generated.
    """

    sequences: list[list[int]]
    logprobs: list[list[float]]
    top_logprobs: list[list[tuple[tuple[int, float], ...]]]
    start: int
    beam_lengths: list[int] | None
    max_new_tokens: int


def decode(
    model: PreTrainedModel,
    ids: torch.Tensor,
    mask: torch.Tensor,
    cache: Cache,
    max_new_tokens: int,
    options: dict[str, Any],
) -> Decoded:
    """Run the model's own `generate`, which prefills the uncached tokens of the prompts and decodes.

    Args:
        model: The model.
        ids: Input ids `[B, L]` of the whole prompts.
        mask: Attention mask `[B, L]`.
        cache: Keys and values of the first tokens of the prompts.
        max_new_tokens: Maximum number of tokens to generate.
        options: From `generation_options`.

    Raises:
        InvalidOption: transformers refuses an option.
        UnsupportedCombination: The model dropped the cache while decoding.
    """
    top = options.pop("top_logprobs", 0)
    logprobs = TokenLogprobs(options["num_beams"], top)
    criteria = StoppingCriteriaList([*options["stopping_criteria"], logprobs])
    generate: Any = model.generate
    with logprobs.recording(model), override_only_over(model, cache), translated_refusals():
        output = generate(
            input_ids=ids,
            attention_mask=mask,
            past_key_values=cache,
            max_new_tokens=max_new_tokens,
            return_dict_in_generate=True,
            **{**options, "stopping_criteria": criteria},
        )
    if output.past_key_values is not cache:
        raise UnsupportedCombination(
            "expected a model that decodes from the cache of the arranged prefill, got one that dropped the cache and "
            "prefilled the prompt again with its own attention",
            hint="Phi-3 does so when an answer passes original_max_position_embeddings: reduce max_new_tokens.",
        )
    start, beams = ids.shape[1], output.get("beam_indices")
    return Decoded(
        sequences=output.sequences.tolist(),
        logprobs=logprobs.of(output.sequences, start, beams),
        top_logprobs=[logprobs.top_of(row) for row in range(len(output.sequences))] if top else [],
        start=start,
        beam_lengths=None if beams is None else (beams >= 0).sum(dim=1).tolist(),
        max_new_tokens=max_new_tokens,
    )
