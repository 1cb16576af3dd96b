"""Constrained decoding: random models write valid objects, finish them in time, and say what cannot be done."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address
from typing import Annotated, Any, Literal
from uuid import UUID

import pytest
import torch
from pydantic import AwareDatetime, BaseModel, Field, HttpUrl, NaiveDatetime, PastDate, create_model, field_validator
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, LogitsProcessor, MaxTimeCriteria, PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import (
    IncompleteObject,
    InvalidChoice,
    InvalidObject,
    InvalidSchema,
    TokenizerRequired,
    UnsupportedCombination,
)
from invariant_rag.generation.structured import constrain, generate_structured, json_schema, parse_object
from invariant_rag.prompts import control_tokens
from invariant_rag.testing import tiny_model

PROMPT = Prompt("Say what you like: ", ["one", "two"], "\n")


class Item(BaseModel):
    name: str
    tags: list[str] = Field(min_length=1)


class Everything(BaseModel):
    text: str
    count: int
    ratio: float
    sure: bool
    kind: Literal["a", 'b"\\é']
    short: str = Field(min_length=1, max_length=4)
    maybe: str | None = None
    item: Item
    others: list[Item] = []


class Tree(BaseModel):
    child: Tree | None
    leaf: Any


class Note(BaseModel):
    text: str


def field(kind: Any) -> type[BaseModel]:
    return create_model("Field", x=(kind, ...))


def least(lm: InvariantModel, schema: Any) -> int:
    return constrain(lm, schema, max_new_tokens=4096).min_new_tokens


@pytest.fixture(scope="module")
def embedded() -> InvariantModel:
    return InvariantModel.from_pretrained()


@pytest.fixture(scope="module")
def byte_fallback() -> InvariantModel:
    """A random model with a tokenizer as sentencepiece makes them: words, and bytes for the rest."""
    words = ["{", "}", '"', "x", ":", ",", "[", "]", "▁", '▁"', '":', '"}', "a", "▁a", '{"', "é"]
    vocabulary = {
        name: index for index, name in enumerate(["<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words])
    }
    tokenizer = Tokenizer(BPE(vocabulary, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    model = tiny_model("llama", num_hidden_layers=1, vocab_size=288, eos_token_id=1)
    return InvariantModel(model, fast)


# --- every answer is an object ---


@pytest.mark.parametrize("seed", range(0, 30, 3))
def test_what_a_random_model_samples_is_an_object(model: InvariantModel, seed: int) -> None:
    limit = least(model, Everything) + 3 * seed
    found = generate_structured(
        model, PROMPT, Everything, max_new_tokens=limit, do_sample=True, temperature=2.0, top_k=0, seed=seed
    )
    assert isinstance(found, Everything)


@pytest.mark.parametrize("more", [0, 1, 7, 60])
@pytest.mark.parametrize("schema", [Everything, Tree, Note])
def test_the_likeliest_text_is_an_object_that_ends_in_time(model: InvariantModel, schema: Any, more: int) -> None:
    constraint = constrain(model, schema, max_new_tokens=least(model, schema) + more)
    generation = model.generate(PROMPT, **constraint.options)
    assert isinstance(parse_object(generation.text, schema), schema)
    assert generation.finish_reason == "stop"
    assert len(generation.token_ids) <= constraint.min_new_tokens + more


FIELDS = {
    "url": HttpUrl,
    "duration": timedelta,
    "datetime": datetime,
    "aware": AwareDatetime,
    "naive": NaiveDatetime,
    "date": date,
    "past": PastDate,
    "time": time,
    "uuid": UUID,
    "decimal": Annotated[Decimal, Field(max_digits=5, decimal_places=2)],
    "ipv4": IPv4Address,
    "bytes": bytes,
    "words": Annotated[str, Field(pattern=r"^\w+$")],
    "loop and end": Annotated[str, Field(pattern=r"^\w+ing$")],
    "optional group": Annotated[str, Field(pattern=r"^\d(\.\d+)?$")],
    "beyond ASCII": Annotated[str, Field(pattern=r"^[ab]?é{1,2}$")],
    "any character": Annotated[str, Field(pattern=r"^.{3}$")],
    "long": Annotated[str, Field(min_length=30, max_length=40)],
    "number": Annotated[int, Field(ge=1000, le=99999)],
}


@pytest.mark.parametrize("kind", FIELDS.values(), ids=FIELDS)
def test_special_strings_are_short_where_they_can_be_and_parse(model: InvariantModel, kind: Any) -> None:
    schema = field(kind)
    fewest = least(model, schema)
    assert fewest < 50
    for seed in range(3):
        options = {"max_new_tokens": fewest + 9 * seed, "do_sample": seed > 0, "seed": seed}
        assert isinstance(generate_structured(model, PROMPT, schema, **options), schema)


def test_an_email_address_has_a_domain_that_anybody_can_own(model: InvariantModel) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": "email"}}, "required": ["x"]}
    for seed in range(5):
        found = generate_structured(model, PROMPT, schema, max_new_tokens=45, do_sample=True, seed=seed)
        name, domain = found["x"].split("@")
        assert name
        assert "." in domain
        assert domain.rsplit(".")[-1].isalpha()


def test_twelve_fields_fit_into_as_many_tokens_as_their_names_and_quotes_take(
    model: InvariantModel, embedded: InvariantModel
) -> None:
    schema = create_model("Twelve", **dict.fromkeys((f"field_{i}" for i in range(12)), (str, ...)))
    shortest = json.dumps({f"field_{i}": "" for i in range(12)})
    assert least(model, schema) == len(shortest)
    for lm in (model, embedded):
        fewest = least(lm, schema)
        assert fewest <= len(lm.tokenizer.encode(shortest, add_special_tokens=False))
        assert isinstance(generate_structured(lm, PROMPT, schema, max_new_tokens=fewest), schema)


def test_the_embedded_model_writes_an_object_from_documents(embedded: InvariantModel) -> None:
    documents = ["The ferry to Ostra leaves the harbour at noon.", "The mill of Brenn grinds barley."]
    schema = create_model("Departure", vessel=(Literal["ferry", "barge"], ...), where=(str, Field(max_length=20)))
    found = [
        generate_structured(embedded, embedded.chat_prompt("What leaves?", order), schema, max_new_tokens=40)
        for order in (documents, documents[::-1])
    ]
    assert isinstance(found[0], schema)
    assert found[0] == found[1]


def test_bytes_of_a_character_are_never_torn(byte_fallback: InvariantModel) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^[é-ü]{2}$"}}, "required": ["x"]}
    for seed in range(8):
        fewest = least(byte_fallback, Note)
        options = {"do_sample": True, "temperature": 3.0, "seed": seed}
        note = generate_structured(byte_fallback, PROMPT, Note, max_new_tokens=fewest + seed, **options)
        assert "\ufffd" not in note.text
        found = generate_structured(byte_fallback, PROMPT, schema, max_new_tokens=20, **options)
        assert len(found["x"]) == 2


def test_control_tokens_are_not_part_of_an_object(model: InvariantModel) -> None:
    class Loved(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            scores[:, sorted(control_tokens(model.tokenizer))] += 1e6
            return scores

    constraint = constrain(model, Note, max_new_tokens=40, logits_processor=[Loved()])
    generation = model.generate(PROMPT, **constraint.options)
    assert control_tokens(model.tokenizer).keys().isdisjoint(generation.token_ids)
    assert isinstance(parse_object(generation.text, Note), Note)


# --- other keywords of generate ---


@pytest.mark.parametrize(
    "options",
    [
        {"no_repeat_ngram_size": 1},
        {"repetition_penalty": 50.0},
        {"min_new_tokens": 40},
        {"eos_token_id": list(range(5, 261))},
        {"generation_config": GenerationConfig(no_repeat_ngram_size=2, repetition_penalty=50.0)},
    ],
    ids=str,
)
def test_rules_for_prose_do_not_change_an_object(model: InvariantModel, options: dict[str, Any]) -> None:
    schema = create_model("Pair", one=(Literal["aa", "bb"], ...), two=(Literal["aa", "bb"], ...))
    expected = generate_structured(model, PROMPT, schema, max_new_tokens=40)
    if "eos_token_id" in options:
        with pytest.raises(InvalidSchema, match="in the tokens of the model"):
            generate_structured(model, PROMPT, schema, max_new_tokens=40, **options)
    else:
        assert generate_structured(model, PROMPT, schema, max_new_tokens=40, **options) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"stop_strings": ["text"]},
        {"generation_config": GenerationConfig(stop_strings=["text"])},
        {"bad_words_ids": [[7]]},
        {"forced_eos_token_id": 2},
        {"num_beams": 2},
        {"do_sample": True, "num_return_sequences": 2},
    ],
    ids=str,
)
def test_what_would_break_an_object_is_refused(model: InvariantModel, options: dict[str, Any]) -> None:
    name = next(
        name for name in ("stop_strings", "bad_words", "forced_eos", "num_beams", "num_return") if name in str(options)
    )
    with pytest.raises(UnsupportedCombination, match=name):
        constrain(model, Note, max_new_tokens=40, **options)


def test_a_token_that_ends_texts_is_not_part_of_one(model: InvariantModel) -> None:
    (letter,) = model.tokenizer.encode("e", add_special_tokens=False)
    schema = create_model("Choice", x=(Literal["free", "none", "all"], ...))
    assert generate_structured(model, PROMPT, schema, max_new_tokens=40, eos_token_id=letter).x == "all"


def test_too_few_tokens_are_an_error_before_anything_is_generated(model: InvariantModel) -> None:
    fewest = least(model, Everything)
    with pytest.raises(UnsupportedCombination, match=f"at least {fewest} for this schema, got {fewest - 1}"):
        constrain(model, Everything, max_new_tokens=fewest - 1)


def test_a_text_that_something_else_cut_off_is_an_error(model: InvariantModel) -> None:
    with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
        generate_structured(model, PROMPT, Note, max_new_tokens=40, stopping_criteria=[MaxTimeCriteria(0.0)])


def test_a_token_that_somebody_else_forces_is_an_error(model: InvariantModel) -> None:
    constraint = constrain(model, Note, max_new_tokens=40)

    class Forcing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([50]), 0.0)

    options = {**constraint.options, "logits_processor": [*constraint.options["logits_processor"], Forcing()]}
    with pytest.raises(UnsupportedCombination, match="something else than the schema"):
        model.generate(PROMPT, **options)


def test_one_constraint_is_for_one_text(model: InvariantModel) -> None:
    constraint = constrain(model, Note, max_new_tokens=20)
    with pytest.raises(UnsupportedCombination, match="a batch of 2"):
        model.generate([PROMPT, PROMPT], **constraint.options)
    with pytest.raises(InvalidChoice, match="one prompt"):
        generate_structured(model, [PROMPT, PROMPT], Note)  # type: ignore[call-overload]


def test_a_constraint_starts_anew_with_another_prompt(model: InvariantModel) -> None:
    constraint = constrain(model, Note, max_new_tokens=20)
    first = model.generate(PROMPT, **constraint.options)
    other = model.generate(Prompt("A longer prompt than the one before, by far: ", [], ""), **constraint.options)
    assert parse_object(other.text, Note) != parse_object(first.text, Note)
    assert model.generate(PROMPT, **constraint.options) == first


def test_a_routed_model_writes_two_objects_and_keeps_one(model: InvariantModel) -> None:
    kept = [generate_structured(model.with_routing(alpha), PROMPT, Item, max_new_tokens=60) for alpha in (-2.0, 2.0)]
    branches = [model, model.with_routing().plain_branch]
    assert kept == [generate_structured(lm, PROMPT, Item, max_new_tokens=60) for lm in branches]


def test_a_stream_is_the_object_in_pieces(model: InvariantModel) -> None:
    constraint = constrain(model, Note, max_new_tokens=30)
    text = "".join(model.stream(PROMPT, **constraint.options))
    assert text == model.generate(PROMPT, **constraint.options).text
    assert isinstance(parse_object(text, Note), Note)


# --- schemas ---


def test_a_schema_may_be_a_class_a_dict_or_a_string(model: InvariantModel) -> None:
    schema = Note.model_json_schema()
    found = [generate_structured(model, PROMPT, each, max_new_tokens=30) for each in (Note, schema, json.dumps(schema))]
    assert found == [Note(**found[1]), found[1], found[1]]


def test_other_types_that_pydantic_knows_are_schemas_too(model: InvariantModel) -> None:
    found = generate_structured(model, PROMPT, list[Literal["a", "b"]], max_new_tokens=20)
    assert set(found) <= {"a", "b"}


@pytest.mark.parametrize(
    "schema", ["{", 5, None, type("Plain", (), {}), {"type": "no such type"}, {"$ref": "#/$defs/Nowhere"}], ids=str
)
def test_what_is_no_schema_is_refused(model: InvariantModel, schema: Any) -> None:
    with pytest.raises(InvalidSchema):
        constrain(model, schema, max_new_tokens=30)


class Endless(BaseModel):
    """No finite text is one."""

    next: Endless


def test_a_schema_without_a_finite_text_is_refused(model: InvariantModel) -> None:
    with pytest.raises(InvalidSchema, match="finite text"):
        constrain(model, Endless, max_new_tokens=30)


def test_a_pattern_that_xgrammar_cannot_write_as_json_is_refused(model: InvariantModel) -> None:
    with pytest.raises(InvalidSchema, match="quotes"):
        constrain(model, field(Annotated[str, Field(pattern='^a"b$')]), max_new_tokens=30)


class Picky(BaseModel):
    x: bool

    @field_validator("x")
    @classmethod
    def _never(cls, value: bool) -> bool:
        raise ValueError("neither will do")


def test_what_only_a_validator_knows_is_an_error_afterwards(model: InvariantModel) -> None:
    with pytest.raises(InvalidObject, match="neither will do"):
        generate_structured(model, PROMPT, Picky, max_new_tokens=20)


def test_a_json_schema_is_validated_with_what_the_grammar_ignores(model: InvariantModel) -> None:
    number = {"type": "number", "multipleOf": 1000, "minimum": 1, "maximum": 9}
    schema = {"type": "object", "properties": {"x": number}, "required": ["x"]}
    with pytest.raises(InvalidObject, match="multiple of 1000"):
        generate_structured(model, PROMPT, schema, max_new_tokens=20)


def test_names_and_values_called_format_stay_as_they_are() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "enum": ["uri"], "default": {"type": "string", "format": "uri"}}},
    }
    assert json_schema(schema) == schema


def test_an_object_needs_a_tokenizer(chat_llama: PreTrainedModel) -> None:
    with pytest.raises(TokenizerRequired):
        constrain(InvariantModel(chat_llama), Note, max_new_tokens=20)
