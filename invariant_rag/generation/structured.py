"""Answers that are objects: decoding in which only JSON of a schema can be written (with xgrammar).

A text is never cut off in the middle. A token is chosen only if the text can be finished with the tokens that are left
after it, which a known ending proves.

>>> class Departure(BaseModel):  # doctest: +SKIP
...     vessel: Literal["ferry", "barge"]
...     hour: int = Field(ge=0, le=23)
>>> generate_structured(lm, lm.chat_prompt("When does it leave?", documents), Departure)  # doctest: +SKIP
Departure(vessel='ferry', hour=12)
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from transformers import LogitsProcessor, StoppingCriteria

from invariant_rag.checks import check_kind
from invariant_rag.errors import InvalidChoice, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.grammar import GrammarText, vocabulary
from invariant_rag.generation.json_schema import check_complete, json_schema, parse_object
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.option_checks import check_options
from invariant_rag.generation.options import as_ids, resolve_max_new_tokens, resolve_option

if TYPE_CHECKING:
    from invariant_rag.segments import Prompt

__all__ = ["Constraint", "check_complete", "constrain", "generate_structured", "json_schema", "parse_object"]

T = TypeVar("T")

_CANDIDATES = 50
"""Tokens to choose from at each step: the likeliest ones. It is transformers' own default of `top_k`."""

NEUTRAL = {
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "min_length": 0,
    "min_new_tokens": 0,
    "no_repeat_ngram_size": 0,
    "repetition_penalty": 1.0,
}
"""Rules for prose, which would ban the names and punctuation of JSON: without effect inside a schema."""

_REFUSED = (
    "bad_words_ids",
    "exponential_decay_length_penalty",
    "force_words_ids",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "stop_strings",
)


@dataclass(frozen=True)
class Constraint:
    """What holds one text to a schema.

    Attributes:
        options: Keywords for `InvariantModel.generate` or `stream` with one prompt: those that were given to
            `constrain`, and what constrains the text.
        min_new_tokens: The fewest tokens in which a text of this schema is known.
    """

    options: dict[str, Any]
    min_new_tokens: int


def constrain(lm: InvariantModel, schema: Any, *, max_new_tokens: int | None = None, **kwargs: Any) -> Constraint:
    """Return keywords with which a model generates one JSON text that follows a schema, and finishes it.

    Control tokens of the tokenizer are never chosen. Rules for prose do not apply inside the schema, wherever they come
    from: `repetition_penalty`, `no_repeat_ngram_size`, `min_new_tokens`, `min_length`, and `eos_token_id`. The schema's
    own text ends the generation. Sampling draws from the 50 likeliest tokens that fit.

    Args:
        lm: The model.
        schema: A pydantic class, another type that pydantic knows, or a JSON schema as dict or string. It should
            describe an object or an array: a bare number ends at its first digit.
        max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
        **kwargs: Further keywords of `generate`.

    Raises:
        ExtraRequired: xgrammar is not installed.
        InvalidSchema: It is no schema, or uses what xgrammar does not know.
        TokenizerRequired: The model has no tokenizer.
        UnsupportedCombination: No text of the schema is known to fit into `max_new_tokens`; or there are beams, several
            answers for one prompt, stop strings, or other keywords that would break the object.
    """
    check_kind("lm", lm, InvariantModel)
    if lm.tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: an object is written as text")
    defaults = lm.model.generation_config
    check_options(kwargs, lm.model)
    check_keywords(kwargs, defaults)
    wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
    size = lm.model.config.get_text_config(decoder=True).vocab_size
    ends = {index for name in (kwargs, {}) for index in as_ids(resolve_option(name, "eos_token_id", defaults))}
    text = GrammarText(vocabulary(lm.tokenizer, size, ends), json.dumps(json_schema(schema)))
    shortest = len(text.ending() or ())
    if shortest > wanted:
        raise UnsupportedCombination(
            f"expected max_new_tokens of at least {shortest} for this schema, got {wanted}",
            hint="Raise it, or ask for less: fewer fields, shorter names.",
        )
    neutral = {
        name: value for name, value in NEUTRAL.items() if resolve_option(kwargs, name, defaults) not in (None, value)
    }
    processor = ContinuingText(text, wanted, sampled=bool(resolve_option(kwargs, "do_sample")))
    options = {
        **kwargs,
        **neutral,
        "max_new_tokens": wanted,
        "logits_processor": [*(kwargs.get("logits_processor") or ()), processor],
        "stopping_criteria": [*(kwargs.get("stopping_criteria") or ()), TextComplete(text)],
    }
    return Constraint(options, shortest)


@overload
def generate_structured(lm: InvariantModel, prompt: Prompt, schema: type[T], **kwargs: Any) -> T: ...


@overload
def generate_structured(lm: InvariantModel, prompt: Prompt, schema: dict[str, Any] | str, **kwargs: Any) -> Any: ...


def generate_structured(lm: InvariantModel, prompt: Prompt, schema: Any, **kwargs: Any) -> Any:
    """Generate an object: an instance of a pydantic class, or what JSON of a schema says.

    Args:
        lm: The model. A routed one writes two texts, and one is kept.
        prompt: One prompt. That it should describe the schema is up to the caller.
        schema: As for `constrain`.
        **kwargs: Keywords of `generate`, as for `constrain`.

    Raises:
        ExtraRequired: xgrammar is not installed.
        IncompleteObject: Something else than the schema ended the text.
        InvalidChoice: There is more than one prompt.
        InvalidObject: The class rejects the text, with a rule that no grammar expresses.
        InvalidSchema: It is no schema, or uses what xgrammar does not know.
        UnsupportedCombination: As for `constrain`.
    """
    if isinstance(prompt, list | tuple):
        raise InvalidChoice(f"expected one prompt for an object, got {len(prompt)}", hint="Ask for one after another.")
    options = constrain(lm, schema, **kwargs).options
    generation = lm.generate(prompt, **options)
    return parse_object(generation.text, schema)


def check_keywords(kwargs: dict[str, Any], defaults: Any) -> None:
    """Refuse keywords of `generate` that would break an object.

    Raises:
        UnsupportedCombination: There is one.
    """
    for name in ("num_beams", "num_return_sequences"):
        count = resolve_option(kwargs, name, defaults) or 1
        if count > 1:
            raise UnsupportedCombination(
                f"expected one text that follows a schema, got {name}={count}: beams and further answers would share "
                "its place in the grammar",
                hint=f"Leave {name} away.",
            )
    if given := [name for name in _REFUSED if resolve_option(kwargs, name, defaults)]:
        raise UnsupportedCombination(
            f"expected keywords that leave an object whole, got {', '.join(given)}",
            hint="Leave them away; those of a generation_config too.",
        )


class ContinuingText(LogitsProcessor):
    """Leaves only tokens that continue the text, and after which it can be finished with the tokens left.

    Attributes:
        text: The text.
    """

    def __init__(self, text: GrammarText, max_new_tokens: int, *, sampled: bool) -> None:
        self.text = text
        self._max_new_tokens = max_new_tokens
        self._sampled = sampled

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[1, vocabulary]`, minus infinity but for tokens that may be chosen."""
        if len(input_ids) != 1:
            raise UnsupportedCombination(f"expected one text that follows a schema, got a batch of {len(input_ids)}")
        self.text.advance(input_ids[0].tolist())
        scores = self.text.mask_scores(scores)
        left = self._max_new_tokens - self.text.written - 1
        chosen = self._fitting(scores[0], left)
        only = torch.full_like(scores, -torch.inf)
        if chosen:
            only[0, chosen] = scores[0, chosen]
        else:
            only[0, self._ending(left + 1)[0]] = 0.0
        return only

    def _fitting(self, scores: torch.Tensor, left: int) -> list[int]:
        """Return tokens, likeliest first, that leave a text which `left` tokens can finish; the first, if greedy."""
        best = scores.topk(min(_CANDIDATES, len(scores)))
        fitting = []
        for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True):
            if score > -torch.inf and self.text.ending(token, left) is not None:
                fitting.append(token)
                if not self._sampled:
                    break
        return fitting

    def _ending(self, most: int) -> tuple[int, ...]:
        ending = self.text.ending(most=most)
        if not ending:
            raise UnsupportedCombination(
                "expected scores that leave a token of the schema, got none",
                hint="Leave other logits processors away.",
            )
        return ending


class TextComplete(StoppingCriteria):
    """Ends the generation with the text."""

    def __init__(self, text: GrammarText) -> None:
        self.text = text

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Say of the one text whether it is finished: bool `[1]`."""
        self.text.advance(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), self.text.complete, dtype=torch.bool, device=input_ids.device)
