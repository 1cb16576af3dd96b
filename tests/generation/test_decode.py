"""Decoding: log-probabilities, penalties, keywords that are refused; and objects, valid wherever there is room."""

import gc
import json
import socket
from contextlib import nullcontext, suppress
from copy import deepcopy
from datetime import date, datetime, timedelta
from functools import partial
from ipaddress import IPv4Address
from itertools import product
from random import Random
from typing import Annotated
from unittest.mock import Mock
from uuid import UUID

import pytest
import torch
from pydantic import AfterValidator, BaseModel, Field, create_model
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import GenerationConfig, MaxTimeCriteria, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, MicroBatcher, Prompt, errors
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import IncompleteObject, InvalidOption, InvalidPrompt, UnsupportedCombination
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.json_schema import validate_value
from invariant_rag.generation.structured import constrain, generate_structured, parse_object
from invariant_rag.prompts import control_tokens
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import rounding
from tests.generation.test_streaming import deciding

DECODING = [
    {},
    {"num_beams": 4, "num_return_sequences": 3},
    {"num_beams": 3, "num_return_sequences": 2, "do_sample": True, "seed": 5},
    {"do_sample": True, "seed": 3, "num_return_sequences": 4, "temperature": 2.0, "top_k": 0},
    {"repetition_penalty": 2.0, "no_repeat_ngram_size": 2},
    {"num_beams": 4, "repetition_penalty": 2.0, "length_penalty": -1.0},
    {"guidance_scale": 1.5},
]
PROMPT = Prompt("Say what you like: ", ["one", "two"], "\n")
PROMPTS = [random_prompt(Random(seed), (4, 2, 5)) for seed in range(3)]
ENDS = range(40, 60)


@pytest.fixture(scope="module")
def lm():
    """A model whose answers end."""
    return InvariantModel(tiny_model("llama", num_hidden_layers=2, eos_token_id=list(ENDS)))


@pytest.fixture(scope="module")
def bounds(lm):
    return [2 * rounding(lm.logits, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("decoding", DECODING, ids=str)
def test_log_probabilities_are_the_models_however_it_decodes_alone_and_in_a_batch(decoding, ends, lm, llama, bounds):
    """Also those of the most likely tokens."""
    lm, lengths, copies = lm if ends else InvariantModel(llama), [], decoding.get("num_return_sequences", 1)
    options = {**decoding, "max_new_tokens": 10, "top_logprobs": 0 if "num_beams" in decoding else 4}
    for batch in (PROMPTS[:1], PROMPTS[:2]):
        for index, answer in enumerate(lm.generate(batch, **options)):
            prompt, bound = batch[index // copies], bounds[index // copies]
            logits = lm.logits(Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *answer.token_ids]))
            logprobs = torch.log_softmax(logits[len(prompt.suffix) - 1 : -1], dim=-1)
            chosen = logprobs.gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0].tolist()
            assert answer.logprobs == pytest.approx(chosen, abs=bound)
            if "num_beams" not in decoding:
                told = torch.tensor([[value for _, value in step] for step in answer.top_logprobs])
                torch.testing.assert_close(told, logprobs.topk(4).values, rtol=0, atol=bound)
            lengths.append(len(answer.logprobs))
    assert min(lengths) > 0
    if not decoding.get("do_sample"):
        assert (min(lengths) < 10) == ends


@pytest.mark.parametrize("beams", [1, 3])
def test_an_answer_has_stopped_if_its_last_token_is_an_end_and_else_its_room_was_too_small(beams, lm):
    found = set()
    for prompt in PROMPTS:
        for room in range(1, 12):
            answer = lm.generate(prompt, max_new_tokens=room, num_beams=beams)
            ended = answer.token_ids[-1] in ENDS
            assert answer.finish_reason == ("stop" if ended else "length")
            found.add((ended, len(answer.token_ids) == room))
    assert found >= {(True, False), (True, True), (False, True)}


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("decoding", [{}, {"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_no_more_logits_are_held_after_thirty_tokens_than_after_three(llama, rows, decoding):
    vocabulary, held = llama.config.vocab_size, []

    def count():
        alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        held.append(sum(each.numel() for each in alive if each.ndim and each.shape[-1] == vocabulary))

    gc.freeze()  # hides what is there already: a million objects, which take long to look through
    try:
        InvariantModel(llama).generate(PROMPTS[:rows], max_new_tokens=30, **deciding(count), **decoding)
    finally:
        gc.unfreeze()
    assert len(held) == 30
    assert min(held[2:]) > 0, "the logits of a step are held while it is decided"
    assert max(held) <= held[2]


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.5), (-1.0, 0.7), (1e4, 0.0)])
def test_a_greedy_answer_is_that_of_the_formula_from_the_logits_of_all_tokens_before(model, presence, frequency):
    lm, expected = model.with_method("sequential", ordering="given"), []
    for _ in range(40):
        scores = lm.model(torch.tensor([[*lm.prepare(PROMPT).input_ids, *expected]])).logits[0, -1].tolist()
        for token in set(expected):
            scores[token] -= presence + frequency * expected.count(token)
        expected.append(max(range(len(scores)), key=scores.__getitem__))
    options = {"max_new_tokens": 40, "eos_token_id": [], "logits_processor": [TokenPenalties(presence, frequency)]}
    found = [lm.generate(PROMPT, **options).token_ids for _ in range(2)]
    assert found == [tuple(expected)] * 2
    assert found[0] != lm.generate(PROMPT, **{**options, "logits_processor": None}).token_ids
    assert presence < 1000 or len(set(found[0])) == len(found[0])


WRONG = [
    *(("max_new_tokens", value, "at least 1") for value in (0, "4", 2.5, True)),
    *((name, value, "at least 1") for name, value in (("num_beams", 0), ("num_return_sequences", "2"))),
    *(("seed", value, "whole number") for value in ("x", 1.5, True, 1 << 64)),
    *((name, value, "True or False") for name, value in (("do_sample", 2), ("use_cache", "x"))),
    *(("temperature", value, "temperature") for value in (-1, "hot", float("nan"))),
    ("top_p", 2, "top_p"),
    *(("top_k", value, "at least 0") for value in (-1, 1.5)),
    ("top_k", 1 << 63, "64 bits"),
    *((name, 10**30, name) for name in ("num_beams", "num_return_sequences")),  # beyond what PyTorch takes
    *((name, [value], name) for name, value in (("begin_suppress_tokens", None), ("suppress_tokens", "a"))),
    *(("stop_strings", value, "none of them empty") for value in (5, [5], "", [""], "\ud800", "a" * 1001)),
    *(("pad_token_id", value, "pad_token_id") for value in ("x", -5, 10**9)),
    *((name, [4, -3], f"{name}: expected token ids of at least 0") for name in ("eos_token_id", "suppress_tokens")),
    *((name, value, "list of functions") for name in ("logits_processor", "stopping_criteria") for value in (5, ["x"])),
    ("eos_token_id", "x", "whole number"),
    ("generation_config", {}, "GenerationConfig"),
    ("generation_config", GenerationConfig(num_beams=0), "at least 1"),
    ("prefix_allowed_tokens_fn", 5, "a function"),
    ("repetition_penalty", 0, "strictly positive"),
    ("streamer", 5, "put and end"),
    ("stop", "x", "Did you mean 'stop_strings'"),  # which no spelling is near to
    ("bad_words_ids", 5, "non-empty list"),
    ("num_return_sequences", 2, "Greedy methods"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=str)
def test_a_value_of_another_kind_or_out_of_bounds_is_refused(llama, name, value, expected):
    lm = InvariantModel(llama)
    options = {"max_new_tokens": 2, name: value}
    for model in (lm, lm.with_routing()):
        with pytest.raises(InvalidOption, match=expected) as caught:
            model.generate(PROMPTS[0], **options)
        assert caught.value.hint


def test_a_misspelt_keyword_is_refused_with_the_nearest_one(model):
    lm, prompt, wrong = model, model.chat_prompt("Why?", ["one", "two"]), {"temprature": 1}
    for call in (
        lambda: lm.generate(prompt, **wrong),
        lambda: lm.generate([prompt, prompt], **wrong),
        lambda: lm.stream(prompt, **wrong),
        lambda: lm.with_routing().generate(prompt, **wrong),
        lambda: PermutationAverage(lm).generate(prompt, **wrong),
        lambda: RingAverage(lm).generate(prompt, **wrong),
        lambda: MicroBatcher().generate(lm, prompt, wrong),
        lambda: constrain(lm, {"type": "object"}, **wrong),
    ):
        with pytest.raises(InvalidOption, match="got 'temprature'") as caught:
            call()
        assert "'temperature'" in caught.value.hint


OURS = (
    *("attention_mask", "cache_config", "cache_position", "input_ids", "inputs", "inputs_embeds", "labels"),
    *("logits_to_keep", "past_key_values", "position_ids", "return_dict_in_generate", "custom_generate"),
    *("trust_remote_code", "max_length", "is_assistant", "penalty_alpha"),
)
OTHERS = {"prompt_lookup_num_tokens": 3, "prefill_chunk_size": 4, "token_healing": True, "use_mtp": True}
OTHERS |= {"use_cache": False, "cache_implementation": "static", "generation_config": GenerationConfig(use_cache=False)}


@pytest.mark.parametrize("name", [*OURS, *OTHERS])
def test_keywords_that_we_set_loops_from_elsewhere_and_other_prefills_are_refused(llama, name):
    with pytest.raises(UnsupportedCombination, match="arranged" if name in OTHERS else name):
        InvariantModel(llama).generate(PROMPTS[0], max_new_tokens=4, **{name: OTHERS.get(name, 0.6)})


def test_the_error_of_a_callers_own_function_stays_what_it_is(llama):
    broken = Mock(side_effect=ValueError("of the caller"))
    with pytest.raises(ValueError, match="of the caller") as caught:
        InvariantModel(llama).generate(PROMPTS[0], max_new_tokens=2, logits_processor=[broken])
    assert not isinstance(caught.value, errors.InvariantRAGError)


NO_PROMPTS = {
    "expected a Prompt": ("text", None, 5, b"x", [PROMPTS[0], "text"], [None]),
    "at least one token.*empty prompt": (Prompt(), Prompt("", ["", ""], ""), Prompt([], [[], []], []), Prompt.of()),
    r"below 261.*got 261": (Prompt([3], [[261]], [4]),),
}
NO_CANDIDATES = {
    "expected": (5, None, [5], [None], [["x"]], [[-1]], [[True]], [[1.5]]),
    "several candidates": ("text", "abc"),
    "at least one token": ([[]], [[4], []]),
    "below 261": ([[261]], [[10**9]]),
}


def test_what_are_no_prompts_or_candidates_is_refused(model):
    for message, wrong in NO_PROMPTS.items():
        for call, each in product((model.generate, partial(model.score, candidates=[[4]]), model.logits), wrong):
            with pytest.raises(InvalidPrompt, match=message):
                call(each)
    for message, wrong in NO_CANDIDATES.items():
        for each in wrong:
            with pytest.raises(errors.InvariantRAGError, match=message):
                model.score(PROMPTS[0], each)


# --- objects ---

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
            is_cut = generation.finish_reason == "length"
            assert not is_cut or len(generation.token_ids) == budget
            with suppress(IncompleteObject) if is_cut else nullcontext():
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
    with pytest.raises(errors.InvalidSchema, match=said):
        constrain(model, schema, max_new_tokens=30)


def test_values_that_break_a_schema_or_that_a_type_refuses_are_errors(model):
    def refuse(_):
        raise ValueError("neither will do")

    picky = Annotated[bool, AfterValidator(refuse)]
    for each in (picky, create_model("Picky", x=(picky, ...))):
        with pytest.raises(errors.InvalidObject, match="neither will do"):
            generate_structured(model, PROMPT, each, max_new_tokens=120)
    names = {"patternProperties": {"^x-": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
    references = {"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"type": "null"}}}
    for value, schema, said in (
        (True, {"not": {"type": "object"}, "const": 1}, "1 was expected"),
        ({"x-a": 1}, names, "1 is not of type 'string'"),
        ({"a": "1"}, names, "'1' is not of type 'integer'"),
        ({"b": 1}, {"properties": {"a": {}}, "additionalProperties": False}, "additionalProperties"),
        ("ab", {"pattern": "^a$"}, r"'ab' does not match '\^a\$'"),
        ([1, 1], {"uniqueItems": True}, "non-unique elements .uniqueItems"),
        ({"a": 1}, references, "type 'null'"),
    ):
        with pytest.raises(errors.InvalidObject, match=said):
            validate_value(value, schema)
    validate_value({"x-a": "1", "b": 2}, names)
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
            with pytest.raises(errors.InvalidSchema, match="schema"):
                parse_object('"a"', schema)
        with pytest.raises(TimeoutError):
            listening.accept()
