"""What a generation returns, and how it is made of the output of transformers' `generate`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self

from invariant_rag.generation.decode import Decoded
from invariant_rag.generation.options import as_ids
from invariant_rag.generation.prepare import PreparedPrompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Usage:
    """Tokens of one generation.

    Attributes:
        prompt_tokens: Tokens of the prompt.
        completion_tokens: Generated tokens.
        cached_tokens: Tokens of the prompt whose keys and values came from a cache instead of a prefill.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        """Tokens of the prompt and of the answer."""
        return self.prompt_tokens + self.completion_tokens


@dataclass(frozen=True)
class Generation:
    """A generated answer.

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

    @classmethod
    def extend(cls, generation: Generation, **extra: Any) -> Self:
        """Return a generation as an instance of this subclass, with the fields that the subclass adds."""
        return cls(**{field.name: getattr(generation, field.name) for field in fields(Generation)}, **extra)


def to_generations(
    decoded: Decoded,
    prompts: Sequence[PreparedPrompt],
    cached_tokens: Sequence[int],
    tokenizer: PreTrainedTokenizerBase | None,
    options: dict[str, Any],
) -> list[Generation]:
    """Make one generation of every prompt and returned sequence.

    Args:
        decoded: From `decode`.
        prompts: The prompts.
        cached_tokens: Tokens of each prompt that came from a cache.
        tokenizer: The model's tokenizer; None leaves the texts empty.
        options: The options of `decode`.
    """
    copies = options["num_return_sequences"]
    generations = []
    for row, (sequence, logprobs) in enumerate(zip(decoded.sequences, decoded.logprobs, strict=True)):
        prompt = prompts[row // copies]
        tokens, stopped = trim_at_stop(row, sequence, decoded.start, options)
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
            )
        )
    return generations


def trim_at_stop(row: int, sequence: list[int], start: int, options: dict[str, Any]) -> tuple[list[int], bool]:
    """Return the generated tokens of a row without those behind its end, and whether it stopped by itself."""
    generated = sequence[start:]
    end_tokens = as_ids(options["eos_token_id"])
    ends = [index + 1 for index, token in enumerate(generated) if token in end_tokens][:1]
    if options["num_beams"] == 1:
        ends += [each.lengths[row] - start for each in options["stopping_criteria"] if row in each.lengths]
        return generated[: min(ends, default=None)], bool(ends)
    # Beams change rows while they grow, and finished ones are padded.
    tokens = generated[: min(ends, default=None)]
    while tokens and not ends and tokens[-1] == options["pad_token_id"]:
        tokens.pop()
    return tokens, bool(ends) or len(tokens) < len(generated)
