"""Answers that are objects: decoding in which only JSON of a schema can be written (with xgrammar).

A text that runs out of tokens ends there, with `finish_reason` "length", and parsing it raises `IncompleteObject`.

>>> class Departure(BaseModel):  # doctest: +SKIP
...     vessel: Literal["ferry", "barge"]
...     hour: int = Field(ge=0, le=23)
>>> generate_structured(lm, lm.chat_prompt("When does it leave?", documents), Departure)  # doctest: +SKIP
Departure(vessel='ferry', hour=12)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

from invariant_rag.checks import check_kind
from invariant_rag.errors import InvalidChoice, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.grammar import Grammar, GrammarComplete, GrammarProcessor, json_format, vocabulary
from invariant_rag.generation.json_schema import check_complete, json_schema, parse_object
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import as_ids, check_options, resolve_max_new_tokens, resolve_option

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.segments import Prompt

__all__ = ["Constraint", "check_complete", "constrain", "generate_structured", "json_schema", "parse_object"]

T = TypeVar("T")

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
    """What holds texts to a schema.

    Attributes:
        options: Keywords for `InvariantModel.generate` or `stream`: those that were given to `constrain`, and what
            constrains the texts. They are for one call at a time.
    """

    options: dict[str, Any]


def constrain(lm: InvariantModel, schema: Any, *, max_new_tokens: int | None = None, **kwargs: Any) -> Constraint:
    """Return keywords with which a model generates JSON that follows a schema.

    Control tokens of the tokenizer are never chosen. Rules for prose do not apply inside the schema, wherever they come
    from: `repetition_penalty`, `no_repeat_ngram_size`, `min_new_tokens`, `min_length`, and `eos_token_id`. The schema's
    own text ends the generation, with `finish_reason` "stop"; a text that needs more tokens than there are ends with
    "length".

    Args:
        lm: The model.
        schema: A pydantic class, another type that pydantic knows, or a JSON schema as dict or string.
        max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
        **kwargs: Further keywords of `generate`.

    Raises:
        ExtraRequired: xgrammar is not installed.
        InvalidSchema: It is no schema, or uses what xgrammar does not know.
        TokenizerRequired: The model has no tokenizer.
        UnsupportedCombination: There are beams, stop strings, or other keywords that would break the object.
    """
    check_kind("lm", lm, InvariantModel)
    if lm.tokenizer is None:
        raise TokenizerRequired("expected a model with a tokenizer: an object is written as text")
    check_options(kwargs, lm.model)
    return follow(lm, Grammar(json_format(json_schema(schema))), max_new_tokens, kwargs)


def follow(
    lm: InvariantModel,
    grammar: Grammar,
    max_new_tokens: int | None,
    kwargs: dict[str, Any],
    stops: Iterable[int] = (),
) -> Constraint:
    """Return keywords with which texts follow a grammar; `constrain` says more.

    Args:
        lm: The model, which has a tokenizer.
        grammar: The grammar.
        max_new_tokens: The most tokens of a text.
        kwargs: Further keywords of `generate`.
        stops: Tokens that end a text, besides those of the model.
    """
    defaults = lm.model.generation_config
    check_keywords(kwargs, defaults)
    size = lm.model.config.get_text_config(decoder=True).vocab_size
    ends = {index for name in (kwargs, {}) for index in as_ids(resolve_option(name, "eos_token_id", defaults))}
    words = vocabulary(cast("PreTrainedTokenizerBase", lm.tokenizer), size, ends)
    processor = GrammarProcessor(words, grammar, frozenset(each for each in {*ends, *stops} if each < size))
    rules = () if grammar.trigger else NEUTRAL.items()  # free text has its rules
    neutral = {name: value for name, value in rules if resolve_option(kwargs, name, defaults) not in (None, value)}
    return Constraint(
        {
            **kwargs,
            **neutral,
            "max_new_tokens": resolve_max_new_tokens(max_new_tokens, kwargs),
            "logits_processor": [*(kwargs.get("logits_processor") or ()), processor],
            "stopping_criteria": [*(kwargs.get("stopping_criteria") or ()), GrammarComplete(processor)],
        }
    )


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
        IncompleteObject: The text was cut off: it needs more tokens than `max_new_tokens`.
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
    beams = resolve_option(kwargs, "num_beams", defaults) or 1
    if beams > 1:
        raise UnsupportedCombination(
            f"expected texts that follow a schema, got num_beams={beams}: beams would share a place in the grammar",
            hint="Leave num_beams away.",
        )
    if given := [name for name in _REFUSED if resolve_option(kwargs, name, defaults)]:
        raise UnsupportedCombination(
            f"expected keywords that leave an object whole, got {', '.join(given)}",
            hint="Leave them away; those of a generation_config too.",
        )
