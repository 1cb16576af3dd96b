"""Generations: results of `InvariantModel.generate`, built from the output of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from invariant_rag.checks import check_kind
from invariant_rag.generation.answers import Usage
from invariant_rag.prompts.labels import Labels

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.decode import Decoded
    from invariant_rag.generation.prepare import PreparedPrompt


__all__ = ["Generation", "Usage", "to_generations", "trim_at_stop"]


@dataclass(frozen=True)
class Generation:
    """A generated answer.

    Attributes:
        text: The generated text, without special tokens. Empty for a model without a tokenizer.
        token_ids: The generated tokens, including the end-of-sequence token.
        logprobs: Log-probability of each generated token under the model, before logits processors and temperature.
        top_logprobs: For each generated token, the most likely ones with their log-probabilities, as many as the
            keyword `top_logprobs` says; empty without it.
        finish_reason: `stop` at an end-of-sequence token or stop string, `length` at `max_new_tokens`.
        usage: Token counts.
        order: Physical order of the segments, farthest from the suffix first: indices into `prompt.segments`.
        dropped: Segments dropped by `overflow="drop_last"`.
        trimmed: Segments truncated by `overflow="trim_segments"`.
        sets: Number of segments of each set that was read.
        method: Name of the method.
        labels: Label of a document in the prompt, such as the 2 of `[2]` -> index of its segment in `prompt.segments`.
            The text stays as the model wrote it.
        invariant: Whether the order in which the segments were listed could not change the answer; None without
            segments. It is the same for all orders of the same segments; see `invariant_rag.segments.verdict`.
        bitwise: Whether no bit of it depends on what else was decoded: False for a prompt that was decoded in a batch
            with those of others, without `deterministic=True`.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: Literal["stop", "length"]
    usage: Usage
    order: tuple[int, ...]
    dropped: tuple[int, ...] = ()
    trimmed: tuple[int, ...] = ()
    sets: tuple[int, ...] = ()
    method: str = ""
    labels: Labels = field(default_factory=dict)
    invariant: bool | None = None
    bitwise: bool = True
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] = ()

    @property
    def details(self) -> Mapping[str, Any]:
        """What else an answer's ledger says: which branch a router took. Plain values."""
        return {}

    @classmethod
    def extend(cls, generation: Generation, **extra: Any) -> Self:
        """Return a generation as an instance of this subclass, with the fields that the subclass adds or changes."""
        check_kind("generation", generation, Generation)
        return cls(**{each.name: getattr(generation, each.name) for each in fields(Generation)} | extra)


def to_generations(
    decoded: Decoded,
    prompts: Sequence[PreparedPrompt],
    cached_tokens: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> list[Generation]:
    """Convert decoded sequences to generations, one per prompt and returned sequence.

    Args:
        decoded: From `decode`.
        prompts: The prompts.
        cached_tokens: Number of cached tokens of each prompt.
        tokenizer: The model's tokenizer. None: texts are empty.
        options: From `generation_options`.
    """
    copies = options["num_return_sequences"]
    generations = []
    for row, logprobs in enumerate(decoded.logprobs):
        prompt = prompts[row // copies]
        tokens, stopped = trim_at_stop(row, decoded, options)
        generations.append(
            Generation(
                text="" if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True)),
                token_ids=tuple(tokens),
                logprobs=tuple(logprobs[: len(tokens)]),
                finish_reason="stop" if stopped else "length",
                usage=Usage(len(prompt.input_ids), len(tokens), cached_tokens[row // copies]),
                order=prompt.order,
                dropped=prompt.dropped,
                trimmed=prompt.trimmed,
                sets=prompt.sets,
                method=prompt.method,
                labels=prompt.labels,
                invariant=prompt.invariant,
                top_logprobs=tuple(decoded.top_logprobs[row][: len(tokens)]) if decoded.top_logprobs else (),
            )
        )
    return generations


def trim_at_stop(row: int, decoded: Decoded, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Return the generated tokens of a row up to its end, and whether it ended before `max_new_tokens`."""
    from invariant_rag.generation.options import as_ids  # torch, which `Generation` does not need

    generated, end_tokens = decoded.sequences[row][decoded.start :], as_ids(options["eos_token_id"])
    if decoded.beam_lengths is not None:  # beams move between rows during the search, so recorded lengths do not apply
        generated = generated[: decoded.beam_lengths[row]]
        return generated, generated[-1:] in [[each] for each in end_tokens] or len(generated) < decoded.max_new_tokens
    ends = [index + 1 for index, token in enumerate(generated) if token in end_tokens][:1]
    ends += [each.lengths[row] - decoded.start for each in options["stopping_criteria"] if row in each.lengths]
    return generated[: min(ends, default=None)], bool(ends)
