"""Keywords of generate: what transformers would ignore, crash on or prefill by itself is a typed error beforehand."""

from functools import partial
from itertools import product

import pytest
from transformers import GenerationConfig

from invariant_rag import InvariantModel, Prompt
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import InvalidOption, InvalidPrompt, InvariantRAGError, UnsupportedCombination
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.structured import constrain

PROMPT = Prompt([3, 4], [[5, 6], [7], [8, 9, 10]], [11, 12])

WRONG = [
    *(("max_new_tokens", value, "at least 1") for value in (0, "4", 2.5, True)),
    ("num_beams", 0, "at least 1"),
    ("num_return_sequences", "2", "at least 1"),
    *(("seed", value, "whole number") for value in ("x", 1.5, True, 1 << 64)),
    ("do_sample", 2, "True or False"),
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
    ("use_cache", "x", "True or False"),
    ("bad_words_ids", 5, "non-empty list"),
    ("num_return_sequences", 2, "Greedy methods"),
]


@pytest.mark.parametrize(("name", "value", "expected"), WRONG, ids=str)
def test_a_value_of_another_kind_or_out_of_bounds_is_refused(llama, name, value, expected):
    lm = InvariantModel(llama)
    options = {"max_new_tokens": 2, name: value}
    for model in (lm, lm.with_routing()):
        with pytest.raises(InvalidOption, match=expected) as caught:
            model.generate(PROMPT, **options)
        assert caught.value.hint


def test_a_misspelt_keyword_is_refused_with_the_nearest_one(model):
    lm, prompt = model, model.chat_prompt("Why?", ["one", "two"])
    wrong = {"temprature": 1}
    calls = [
        lambda: lm.generate(prompt, **wrong),
        lambda: lm.generate([prompt, prompt], **wrong),
        lambda: lm.stream(prompt, **wrong),
        lambda: lm.with_routing().generate(prompt, **wrong),
        lambda: PermutationAverage(lm).generate(prompt, **wrong),
        lambda: RingAverage(lm).generate(prompt, **wrong),
        lambda: MicroBatcher().generate(lm, prompt, wrong),
        lambda: constrain(lm, {"type": "object"}, **wrong),
    ]
    for call in calls:
        with pytest.raises(InvalidOption, match="got 'temprature'") as caught:
            call()
        assert "'temperature'" in caught.value.hint


OURS = (
    *("attention_mask", "cache_config", "cache_position", "input_ids", "inputs", "inputs_embeds", "labels"),
    *("logits_to_keep", "past_key_values", "position_ids", "return_dict_in_generate", "custom_generate"),
    *("trust_remote_code", "max_length", "is_assistant", "penalty_alpha"),
)
ARRANGED = {
    "prompt_lookup_num_tokens": 3,
    "prefill_chunk_size": 4,
    "token_healing": True,
    "use_mtp": True,
    "generation_config": GenerationConfig(use_cache=False),
    "use_cache": False,
    "cache_implementation": "static",
}


@pytest.mark.parametrize("name", [*OURS, *ARRANGED])
def test_keywords_that_we_set_loops_from_elsewhere_and_other_prefills_are_refused(llama, name):
    with pytest.raises(UnsupportedCombination, match="arranged" if name in ARRANGED else name):
        InvariantModel(llama).generate(PROMPT, max_new_tokens=4, **{name: ARRANGED.get(name, 0.6)})


def test_a_config_with_padding_outside_of_the_vocabulary_pads_with_another_token(llama, monkeypatch):
    lm, shorter = InvariantModel(llama), Prompt([3], [[5]], [11])
    alone = lm.generate(shorter, max_new_tokens=3)
    monkeypatch.setattr(llama.generation_config, "pad_token_id", -1)
    assert lm.generate([PROMPT, shorter], max_new_tokens=3)[1].token_ids == alone.token_ids


def test_the_error_of_a_callers_own_function_stays_what_it_is(llama):
    def broken(input_ids, scores):
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller") as caught:
        InvariantModel(llama).generate(PROMPT, max_new_tokens=2, logits_processor=[broken])
    assert not isinstance(caught.value, InvariantRAGError)


NO_PROMPTS = {
    "expected a Prompt": ("text", None, 5, b"x", [PROMPT, "text"], [None]),
    "empty prompt": (Prompt(), Prompt([], [[], []], [])),
    r"below 128.*got 128": (Prompt([3], [[128]], [4]),),
}
NO_CANDIDATES = {
    "expected": (5, None, [5], [None], [["x"]], [[-1]], [[True]], [[1.5]]),
    "several candidates": ("text", "abc"),
    "at least one token": ([[]], [[4], []]),
    "below 128": ([[128]], [[10**9]]),
}


def test_what_are_no_prompts_or_candidates_is_refused(llama):
    lm = InvariantModel(llama)
    for message, wrong in NO_PROMPTS.items():
        for call, each in product((lm.generate, partial(lm.score, candidates=[[4]]), lm.logits), wrong):
            with pytest.raises(InvalidPrompt, match=message):
                call(each)
    for message, wrong in NO_CANDIDATES.items():
        for each in wrong:
            with pytest.raises(InvariantRAGError, match=message):
                lm.score(PROMPT, each)
