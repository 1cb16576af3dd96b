"""Constrained decoding: random models write valid objects or say `length`, and what cannot be done is refused."""

import json
import socket
from contextlib import suppress
from copy import deepcopy
from datetime import date, datetime, timedelta
from ipaddress import IPv4Address
from random import Random
from typing import Annotated
from uuid import UUID

import pytest
import torch
from pydantic import AfterValidator, BaseModel, Field, create_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, Prompt, errors
from invariant_rag.errors import IncompleteObject, InvalidObject, InvalidSchema, UnsupportedCombination
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.json_schema import validate_value
from invariant_rag.generation.structured import constrain, generate_structured, parse_object
from invariant_rag.prompts import control_tokens
from invariant_rag.testing import tiny_model

PROMPT = Prompt("Say what you like: ", ["one", "two"], "\n")
WILD = {"do_sample": True, "temperature": 2.0, "top_k": 0}


class Short(BaseModel):
    text: str = Field(max_length=20)
    sure: bool


NEAR = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
PLACE = {"type": "object", "properties": {"at": {"type": "string", "maxLength": 2}, "near": NEAR}, "required": ["at"]}
SCALARS = [
    *({"type": kind} for kind in ("string", "integer", "number", "boolean", "null")),
    {"type": "string", "maxLength": 3},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": "^[a-c]{2}(-[0-9])?$"},
    {"type": "string", "format": "date"},
    {"type": "integer", "minimum": -5, "maximum": 50},
    {"enum": ["a", 'é"\\', 3, None]},
    {"const": "ж"},
    {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    {"$ref": "#/$defs/Place"},
]
SPECIAL = [
    *(datetime, date, UUID, IPv4Address, timedelta, Annotated[int, Field(ge=1000, le=99999)]),
    *(Annotated[str, Field(pattern=each)] for each in (r"^\w{1,8}ing$", r"^[ab]?é{1,2}$", r"^.{3}$")),
]


def random_schema(random):
    """Return a schema of an object with up to three fields, some of them lists or objects."""

    def value(depth):
        kind = random.choice(["scalar", "scalar", "list", "object"]) if depth else "scalar"
        if kind == "list":
            return {"type": "array", "items": value(depth - 1), "minItems": random.randint(0, 1), "maxItems": 2}
        return fields(depth - 1) if kind == "object" else random.choice(SCALARS)

    def fields(depth):
        names = random.choices(["a", "key", "größe", "名前", "with space", "$x"], k=3)
        properties = {name: value(depth) for name in names}
        return {"type": "object", "properties": properties, "required": [*properties][: random.randint(0, 3)]}

    return {**fields(2), "$defs": {"Place": PLACE}}


def test_a_text_is_complete_and_valid_or_says_length(model):
    """A sample of 200 schemas at 1 to 40 tokens. A whole text may say `length`: its end token is missing."""
    random, ends = Random(0), set()
    for _ in range(14):
        schema = random_schema(random)
        for budget in [*random.sample(range(1, 41), 3), 120]:
            options = {**WILD, "seed": random.randint(0, 99)}
            generation = model.generate(PROMPT, **constrain(model, schema, max_new_tokens=budget, **options))
            ends.add(generation.finish_reason)
            if generation.finish_reason == "stop":
                parse_object(generation.text, schema)
            else:
                assert len(generation.token_ids) == budget
                with suppress(IncompleteObject):
                    parse_object(generation.text, schema)
    assert ends == {"stop", "length"}


def test_a_text_that_runs_out_of_tokens_is_the_beginning_of_the_one_with_room_if_there_is_one(model):
    whole = model.generate(PROMPT, **constrain(model, Short, max_new_tokens=120))
    assert isinstance(parse_object(whole.text, Short), Short)
    length = len(whole.token_ids)
    for budget in (1, length - 2, length - 1):
        cut = model.generate(PROMPT, **constrain(model, Short, max_new_tokens=budget))
        assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:budget])
    for options in ({"max_new_tokens": length - 2}, {"stopping_criteria": [MaxTimeCriteria(0.0)]}):
        with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
            generate_structured(model, PROMPT, Short, **options)
    endless = create_model("Endless", next=("Endless", ...))
    generation = model.generate(PROMPT, **constrain(model, endless, max_new_tokens=30))
    assert (generation.finish_reason, len(generation.token_ids)) == ("length", 30)


@pytest.mark.parametrize("kind", SPECIAL, ids=str)
def test_special_values_parse(model, kind):
    schema = create_model("Field", x=(kind, ...))
    for seed in range(2):
        text = model.generate(PROMPT, **constrain(model, schema, max_new_tokens=3000, seed=seed, **WILD)).text
        if kind is timedelta and '"P' in text and len(text) > 15:  # its format has no bounds, and `timedelta` has some
            continue
        assert isinstance(parse_object(text, schema), schema)


def test_bytes_of_a_character_are_never_torn():
    """With a tokenizer as sentencepiece makes them: words, and bytes for the rest."""
    words = ["{", "}", '"', "x", ":", ",", "[", "]", "▁", '▁"', '":', '"}', "a", "▁a", '{"', "é"]
    names = ["<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *words]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, [], byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(["<s>", "</s>"])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    lm = InvariantModel(tiny_model("llama", num_hidden_layers=1, vocab_size=288, eos_token_id=1), fast)
    texts, letters = (
        {"type": "object", "properties": {"x": {"type": "string", **said}}, "required": ["x"]}
        for said in ({"maxLength": 60}, {"pattern": "^[é-ü]{2}$"})
    )
    for seed in range(4):
        options = {"do_sample": True, "temperature": 3.0, "seed": seed, "max_new_tokens": 400}
        assert "\ufffd" not in generate_structured(lm, PROMPT, texts, **options)["x"]
        assert len(generate_structured(lm, PROMPT, letters, **options)["x"]) == 2


def test_an_object_is_one_whatever_is_penalized_or_wanted_and_has_neither_control_tokens_nor_ends(model):
    schema = {"type": "object", "properties": {"a": {"enum": ["aaaa", "bbbb"]}}, "required": ["a"]}
    options = {"logits_processor": [TokenPenalties(1e6, 1e6)], "sequence_bias": [[[each], -1e6] for each in range(50)]}
    assert generate_structured(model, PROMPT, schema, max_new_tokens=80, **options)["a"] in ("aaaa", "bbbb")
    controls = control_tokens(model.tokenizer)
    loved = torch.tensor([*controls, *model.tokenizer.encode("\t", add_special_tokens=False)])
    wanting = {"logits_processor": [lambda _, scores: scores.index_fill(1, loved, 1e6)]}
    generation = model.generate(PROMPT, **constrain(model, Short, max_new_tokens=120, **wanting))
    assert controls.keys().isdisjoint(generation.token_ids[:-1])
    assert "\t" not in generation.text  # which would be no JSON within a string
    assert isinstance(parse_object(generation.text, Short), Short)


def test_what_would_break_an_object_is_refused_or_an_error_where_something_else_chooses(model, chat_llama, monkeypatch):
    def other(_, scores):
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([50]), 1e6)

    options = constrain(model, Short, max_new_tokens=40)
    own = options.pop("logits_processor")
    for processors, said in (([*own, other], "something else than the schema"), ([other, *own], "ban all")):
        with pytest.raises(UnsupportedCombination, match=said):
            model.generate(PROMPT, logits_processor=processors, **options)
    config, wrong_end = GenerationConfig(stop_strings=["text"]), "eos_token_id: expected token ids of at least 0"
    for options, error, named in (
        ({"stop_strings": ["text"]}, UnsupportedCombination, "stop_strings"),
        ({"generation_config": config}, UnsupportedCombination, "stop_strings"),
        ({"num_beams": 2}, UnsupportedCombination, "num_beams"),
        ({"eos_token_id": -3}, errors.InvalidOption, wrong_end),
    ):
        with pytest.raises(error, match=named):
            constrain(model, Short, max_new_tokens=40, **options)
    with pytest.raises(errors.TokenizerRequired):
        constrain(InvariantModel(chat_llama), Short, max_new_tokens=120)
    with pytest.raises(errors.InvalidChoice, match="one prompt"):
        generate_structured(model, [PROMPT, PROMPT], Short)
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", [-1, 7, 5000])
    assert constrain(model, Short)["eos_token_id"] == [7], "tokens that the model does not have end nothing"
    monkeypatch.setattr(model.model.generation_config, "eos_token_id", -1)
    with pytest.raises(UnsupportedCombination, match="an end token"):
        constrain(model, Short)


def test_texts_of_a_batch_another_prompt_and_each_branch_of_a_router_begin_anew_and_a_stream_is_the_object(model):
    constraint = constrain(model, Short, max_new_tokens=120, seed=1, **WILD)
    generations = model.generate([PROMPT, Prompt("Another: ", [], "")], **constraint)
    generations += model.generate(PROMPT, num_return_sequences=3, **constraint)
    assert len({each.text for each in generations}) == 5
    assert all(isinstance(parse_object(each.text, Short), Short) for each in generations)
    options = constrain(model, Short, max_new_tokens=120)
    (given,) = options["logits_processor"]
    assert (copied := deepcopy(given)) == given  # so that it shares batches, and the vocabulary
    assert copied is not given
    routed, branches = [model.with_routing(alpha) for alpha in (-2.0, 2.0)], [model, model.with_routing().plain_branch]
    for each in (options, {"logits_processor": [TokenPenalties(1e4)], "max_new_tokens": 40, "eos_token_id": []}):
        kept, alone = ([lm.generate(PROMPT, **each).token_ids for lm in lms] for lms in (routed, branches))
        assert kept == alone
    streamed = parse_object("".join(model.stream(PROMPT, **options)), Short)
    assert streamed == generate_structured(routed[0], PROMPT, Short, max_new_tokens=120)


def test_a_schema_is_a_class_a_dict_or_a_string_and_what_looks_like_a_keyword_and_is_none_is_followed(model):
    schema = Short.model_json_schema()
    given = (Short, schema, json.dumps(schema))
    found = [generate_structured(model, PROMPT, each, max_new_tokens=120) for each in given]
    assert found == [Short(**found[1]), found[1], found[1]]
    pattern = r'^[^"\\]{2}[.]\.$'
    properties = {"not": {"type": "string", "pattern": pattern}, "if": {"const": {"contains": 1}, "type": "object"}}
    schema = {"type": "object", "properties": properties, "required": ["not", "if"], "title": "T", "uniqueItems": False}
    found = generate_structured(model, PROMPT, schema, max_new_tokens=120, seed=1, **WILD)
    assert found["if"] == {"contains": 1}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        *((each, "schema") for each in ("{", 5, None, type("Plain", (), {}), {"type": "no such type"})),
        ({"$ref": "#/$defs/Nowhere"}, "schema"),
        ({"not": {"type": "object"}, "type": "integer"}, "got 'not'"),
        ({"type": "array", "items": {"type": "integer"}, "uniqueItems": True}, "got 'uniqueItems'"),
        ({"type": "array", "contains": {"const": 1}}, "got 'contains'"),
        ({"type": "object", "if": {"required": ["a"]}, "then": False}, "got 'if'"),
        ({"type": "object", "properties": {"a": {"dependentRequired": {"a": ["b"]}}}}, "got 'dependentRequired'"),
        ({"items": {"allOf": [{"type": "string"}, {"maxLength": 4}]}}, "got 'allOf'"),
        *(({"type": "string", "pattern": each}, "got 'pattern'") for each in ('^a"b$', r"^\\$", r"^\[\n]$", r"^\x22$")),
    ],
    ids=str,
)
def test_what_decoding_cannot_follow_is_refused_and_named(model, schema, said):
    with pytest.raises(InvalidSchema, match=said):
        constrain(model, schema, max_new_tokens=30)


# --- validation ---

NAMES = {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": {"type": "integer"}}


def test_values_that_break_a_schema_or_that_a_type_refuses_are_errors(model):
    def refuse(_):
        raise ValueError("neither will do")

    picky = Annotated[bool, AfterValidator(refuse)]
    for each in (picky, create_model("Picky", x=(picky, ...))):
        with pytest.raises(InvalidObject, match="neither will do"):
            generate_structured(model, PROMPT, each, max_new_tokens=120)
    references = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}
    for value, schema, said in (
        (True, {"not": {"type": "object"}, "const": 1}, "1 was expected"),
        ({"x-a": 1}, NAMES, "1 is not of type 'string'"),
        ({"a": "1"}, NAMES, "'1' is not of type 'integer'"),
        ({"b": 1}, {"properties": {"a": {}}, "additionalProperties": False}, "additionalProperties"),
        ("ab", {"pattern": "^a$"}, r"'ab' does not match '\^a\$'"),
        ([1, 1], {"uniqueItems": True}, "non-unique elements .uniqueItems"),
        ({"a": 1}, references, "type 'null'"),
    ):
        with pytest.raises(InvalidObject, match=said):
            validate_value(value, schema)
    validate_value({"x-a": "1", "b": 2}, NAMES)
    validate_value({"$schema": 1}, {"$schema": "http://json-schema.org/draft-07/schema#", "required": ["$schema"]})
    assert parse_object('"\\ud83d\\ude00"', {}) == "\U0001f600"
    with pytest.raises(IncompleteObject, match="surrogates"):  # half of a pair is no character
        parse_object('{"a": "\\ud83d"}', {})


def test_nothing_is_fetched_and_what_is_no_schema_validates_nothing():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(0.2)
        elsewhere = f"http://127.0.0.1:{listening.getsockname()[1]}/schema.json"
        wrong = [{"$ref": each} for each in (elsewhere, "#/$defs/nowhere", "#")]
        for schema in [*wrong, {"type": []}, {"pattern": "("}]:
            with pytest.raises(InvalidSchema, match="schema"):
                parse_object('"a"', schema)
        with pytest.raises(TimeoutError):
            listening.accept()
