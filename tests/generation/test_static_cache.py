"""Decoding with a cache of a fixed size: the same answers, and a refusal where it cannot be."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import GenerationConfig, PreTrainedModel, StaticCache

from invariant_rag import InvariantModel
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model

PROMPTS = [random_prompt(random.Random(number), shape) for number, shape in enumerate([(3, 5, 2), (4, 1), (6, 3)])]


@pytest.mark.parametrize("family", ["llama", "qwen2", "mistral", "gemma2", "gpt_neox", "phi3"])
def test_the_answers_are_those_of_a_cache_that_grows(family: str) -> None:
    lm = InvariantModel(tiny_model(family))
    for options in ({}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True, "seed": 3}):
        expected = lm.generate(PROMPTS, max_new_tokens=6, **options)
        for wanted in ({"cache_implementation": "static"}, {"compile": True}):
            found = lm.generate(PROMPTS, max_new_tokens=6, **wanted, **options)
            assert [each.token_ids for each in found] == [each.token_ids for each in expected]


@pytest.mark.parametrize(
    "options", [{"generation_config": GenerationConfig(cache_implementation="static")}, {"compile": True}]
)
def test_the_model_decodes_over_a_static_cache(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = tiny_model("llama"), []
    forward = model.forward

    def listening(*args: object, **kwargs: object) -> object:
        seen.append(type(kwargs.get("past_key_values")))
        return forward(*args, **kwargs)

    lm = InvariantModel(model)
    expected = lm.generate(PROMPTS[0], max_new_tokens=3)
    monkeypatch.setattr(model, "forward", listening)
    assert lm.generate(PROMPTS[0], max_new_tokens=3, **options).token_ids == expected.token_ids
    assert seen[-3:] == [StaticCache] * 3


def test_what_the_model_s_own_configuration_wants_is_not_asked(llama: PreTrainedModel) -> None:
    model = tiny_model("llama")
    expected = InvariantModel(model, method="pine").generate(PROMPTS[0], max_new_tokens=3)
    model.generation_config.cache_implementation = "static"
    assert InvariantModel(model, method="pine").generate(PROMPTS[0], max_new_tokens=3) == expected


@pytest.mark.parametrize(("method", "kind"), [("pine", "static"), ("ape", "static"), ("rotor", "quantized")])
def test_what_cannot_be_is_refused(method: str, kind: str, llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="cache"):
        InvariantModel(llama, method=method).generate(PROMPTS[0], max_new_tokens=3, cache_implementation=kind)


@pytest.mark.parametrize("options", [{"cache_implementation": "dynamic"}, {"disable_compile": True}])
def test_decoding_is_compiled_from_a_static_cache_alone(options: dict[str, Any], llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="compile=True"):
        InvariantModel(llama).generate(PROMPTS[0], max_new_tokens=3, compile=True, **options)
    with pytest.raises(UnsupportedCombination, match="no static cache"):
        InvariantModel(llama, method="pine").generate(PROMPTS[0], max_new_tokens=3, compile=True)
