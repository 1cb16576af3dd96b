"""Constrained decoding: random models write valid objects, finish them in time, and say what cannot be done."""

from __future__ import annotations

import json
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from ipaddress import IPv4Address
from random import Random
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


class Short(BaseModel):
    text: str = Field(max_length=20)
    sure: bool


def field(kind: Any) -> type[BaseModel]:
    return create_model("Field", x=(kind, ...))


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


SCALARS: list[dict[str, Any]] = [
    {"type": "string"},
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2}(-[0-9])?$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -5, "maximum": 50},
    {"type": "number"},
    {"type": "boolean"},
    {"enum": ["a", 'é"\\', 3, None]},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
]


def random_schema(random: Random) -> dict[str, Any]:
    """Return a schema of an object with up to three fields, some of them lists or objects."""

    def value(depth: int) -> dict[str, Any]:
        kind = random.choice(["scalar", "scalar", "list", "object"]) if depth else "scalar"
        if kind == "list":
            return {"type": "array", "items": value(depth - 1), "maxItems": 2}
        return fields(depth - 1) if kind == "object" else random.choice(SCALARS)

    def fields(depth: int) -> dict[str, Any]:
        properties = {random.choice(["a", "key", "größe", "with space"]): value(depth) for _ in range(3)}
        return {"type": "object", "properties": properties, "required": [*properties][: random.randint(0, 3)]}

    return fields(2)


@pytest.mark.parametrize("number", range(20))
def test_a_text_is_complete_and_valid_or_says_length(model: InvariantModel, number: int) -> None:
    random, ends = Random(number), set()
    for _ in range(10):
        schema = random_schema(random)
        for budget in [*random.sample(range(1, 41), 4), 150]:
            options = {"do_sample": True, "temperature": 2.0, "top_k": 0, "seed": random.randint(0, 99)}
            constraint = constrain(model, schema, max_new_tokens=budget, **options)
            generation = model.generate(PROMPT, **constraint.options)
            ends.add(generation.finish_reason)
            if generation.finish_reason == "stop":
                parse_object(generation.text, schema)
            else:
                assert len(generation.token_ids) == budget
                with pytest.raises(IncompleteObject):
                    parse_object(generation.text, schema)
    assert ends == {"stop", "length"}


def test_a_text_that_runs_out_of_tokens_is_the_beginning_of_the_one_with_room(model: InvariantModel) -> None:
    whole = model.generate(PROMPT, **constrain(model, Short, max_new_tokens=120).options)
    assert isinstance(parse_object(whole.text, Short), Short)
    for budget in range(1, len(whole.token_ids)):
        cut = model.generate(PROMPT, **constrain(model, Short, max_new_tokens=budget).options)
        assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:budget])
    with pytest.raises(IncompleteObject):
        generate_structured(model, PROMPT, Short, max_new_tokens=len(whole.token_ids) - 1)


@pytest.mark.parametrize("seed", range(5))
def test_what_a_random_model_samples_is_an_object(model: InvariantModel, seed: int) -> None:
    options = {"max_new_tokens": 3000, "do_sample": True, "temperature": 2.0, "top_k": 0, "seed": seed}
    assert isinstance(generate_structured(model, PROMPT, Everything, **options), Everything)


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
    "loop and end": Annotated[str, Field(pattern=r"^\w{1,8}ing$")],
    "optional group": Annotated[str, Field(pattern=r"^\d(\.\d+)?$")],
    "beyond ASCII": Annotated[str, Field(pattern=r"^[ab]?é{1,2}$")],
    "any character": Annotated[str, Field(pattern=r"^.{3}$")],
    "long": Annotated[str, Field(min_length=30, max_length=40)],
    "number": Annotated[int, Field(ge=1000, le=99999)],
}


@pytest.mark.parametrize("kind", FIELDS.values(), ids=FIELDS)
def test_special_strings_parse(model: InvariantModel, kind: Any) -> None:
    schema = field(kind)
    for seed in range(3):
        options = {"max_new_tokens": 1500, "do_sample": True, "temperature": 2.0, "top_k": 0, "seed": seed}
        assert isinstance(generate_structured(model, PROMPT, schema, **options), schema)


def test_an_email_address_has_a_domain_that_anybody_can_own(model: InvariantModel) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "string", "format": "email"}}, "required": ["x"]}
    for seed in range(5):
        found = generate_structured(model, PROMPT, schema, max_new_tokens=400, do_sample=True, seed=seed)
        name, domain = found["x"].split("@")
        assert name
        assert "." in domain
        assert domain.rsplit(".")[-1].isalpha()


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
        fewest = 400
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

    constraint = constrain(model, Short, max_new_tokens=120, logits_processor=[Loved()])
    generation = model.generate(PROMPT, **constraint.options)
    assert control_tokens(model.tokenizer).keys().isdisjoint(generation.token_ids)
    assert isinstance(parse_object(generation.text, Short), Short)


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
        with pytest.raises(InvalidSchema, match="of which none does"):
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
    ],
    ids=str,
)
def test_what_would_break_an_object_is_refused(model: InvariantModel, options: dict[str, Any]) -> None:
    name = next(name for name in ("stop_strings", "bad_words", "forced_eos", "num_beams") if name in str(options))
    with pytest.raises(UnsupportedCombination, match=name):
        constrain(model, Short, max_new_tokens=40, **options)


def test_a_token_that_ends_texts_is_not_part_of_one(model: InvariantModel) -> None:
    (letter,) = model.tokenizer.encode("e", add_special_tokens=False)
    schema = field(Annotated[str, Field(pattern="^[def]{30}$")])
    assert "e" not in generate_structured(model, PROMPT, schema, max_new_tokens=40, eos_token_id=letter).x


def test_a_text_that_something_else_cut_off_is_an_error(model: InvariantModel) -> None:
    with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
        generate_structured(model, PROMPT, Short, max_new_tokens=40, stopping_criteria=[MaxTimeCriteria(0.0)])


def test_a_token_that_somebody_else_forces_is_an_error(model: InvariantModel) -> None:
    constraint = constrain(model, Short, max_new_tokens=40)

    class Forcing(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([50]), 0.0)

    options = {**constraint.options, "logits_processor": [*constraint.options["logits_processor"], Forcing()]}
    with pytest.raises(UnsupportedCombination, match="something else than the schema"):
        model.generate(PROMPT, **options)


def test_texts_of_a_batch_follow_the_schema_each_by_itself(model: InvariantModel) -> None:
    constraint = constrain(model, Short, max_new_tokens=120, do_sample=True, temperature=2.0, seed=1)
    generations = model.generate([PROMPT, Prompt("Another: ", [], "")], **constraint.options)
    generations += model.generate(PROMPT, num_return_sequences=3, **constraint.options)
    assert len({each.text for each in generations}) == 5
    assert all(isinstance(parse_object(each.text, Short), Short) for each in generations)
    with pytest.raises(InvalidChoice, match="one prompt"):
        generate_structured(model, [PROMPT, PROMPT], Note)  # type: ignore[call-overload]


def test_a_constraint_starts_anew_with_another_prompt(model: InvariantModel) -> None:
    constraint = constrain(model, Short, max_new_tokens=120)
    first = model.generate(PROMPT, **constraint.options)
    other = model.generate(Prompt("A longer prompt than the one before, by far: ", [], ""), **constraint.options)
    assert parse_object(other.text, Short) != parse_object(first.text, Short)
    assert model.generate(PROMPT, **constraint.options) == first


def test_a_routed_model_writes_two_objects_and_keeps_one(model: InvariantModel) -> None:
    kept = [generate_structured(model.with_routing(alpha), PROMPT, Short, max_new_tokens=120) for alpha in (-2.0, 2.0)]
    branches = [model, model.with_routing().plain_branch]
    assert kept == [generate_structured(lm, PROMPT, Short, max_new_tokens=120) for lm in branches]


def test_a_stream_is_the_object_in_pieces(model: InvariantModel) -> None:
    constraint = constrain(model, Short, max_new_tokens=120)
    text = "".join(model.stream(PROMPT, **constraint.options))
    assert text == model.generate(PROMPT, **constraint.options).text
    assert isinstance(parse_object(text, Short), Short)


# --- schemas ---


def test_a_schema_may_be_a_class_a_dict_or_a_string(model: InvariantModel) -> None:
    schema = Short.model_json_schema()
    found = [
        generate_structured(model, PROMPT, each, max_new_tokens=120) for each in (Short, schema, json.dumps(schema))
    ]
    assert found == [Short(**found[1]), found[1], found[1]]


def test_other_types_that_pydantic_knows_are_schemas_too(model: InvariantModel) -> None:
    found = generate_structured(model, PROMPT, list[Literal["a", "b"]], max_new_tokens=120)
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


def test_a_schema_without_a_finite_text_takes_all_tokens(model: InvariantModel) -> None:
    generation = model.generate(PROMPT, **constrain(model, Endless, max_new_tokens=30).options)
    assert (generation.finish_reason, len(generation.token_ids)) == ("length", 30)


def test_a_pattern_that_no_text_can_match_is_refused(model: InvariantModel) -> None:
    with pytest.raises(InvalidSchema, match="quotes"):
        generate_structured(model, PROMPT, field(Annotated[str, Field(pattern="^a\n$")]), max_new_tokens=30)


class Picky(BaseModel):
    x: bool

    @field_validator("x")
    @classmethod
    def _never(cls, value: bool) -> bool:
        raise ValueError("neither will do")


def test_what_only_a_validator_knows_is_an_error_afterwards(model: InvariantModel) -> None:
    with pytest.raises(InvalidObject, match="neither will do"):
        generate_structured(model, PROMPT, Picky, max_new_tokens=120)


def test_a_json_schema_is_validated_with_what_the_grammar_ignores(model: InvariantModel) -> None:
    number = {"type": "number", "multipleOf": 1000, "minimum": 1, "maximum": 9}
    schema = {"type": "object", "properties": {"x": number}, "required": ["x"]}
    with pytest.raises(InvalidObject, match="multiple of 1000"):
        generate_structured(model, PROMPT, schema, max_new_tokens=120)


def test_names_and_values_called_format_stay_as_they_are() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"type": "string", "enum": ["uri"], "default": {"type": "string", "format": "uri"}}},
    }
    assert json_schema(schema) == schema


def test_an_object_needs_a_tokenizer(chat_llama: PreTrainedModel) -> None:
    with pytest.raises(TokenizerRequired):
        constrain(InvariantModel(chat_llama), Note, max_new_tokens=120)
