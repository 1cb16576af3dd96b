"""Decoding: log-probabilities of the model, whatever decodes; no logits are kept; penalties by OpenAI's formula.

Keywords that transformers would ignore, crash on or prefill by itself are typed errors beforehand.
"""

import gc
import random
from functools import partial
from itertools import product

import pytest
import torch
from transformers import GenerationConfig

from invariant_rag import InvariantModel, MicroBatcher, Prompt
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import InvalidOption, InvalidPrompt, InvariantRAGError, UnsupportedCombination
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.structured import constrain
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
PROMPTS = [random_prompt(random.Random(seed), (4, 2, 5)) for seed in range(3)]
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


SAID = Prompt("Say what you like: ", ["one", "two"], "\n")


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.5), (-1.0, 0.7), (1e4, 0.0)])
def test_a_greedy_answer_is_that_of_the_formula_from_the_logits_of_all_tokens_before(model, presence, frequency):
    lm, expected = model.with_method("sequential", ordering="given"), []
    for _ in range(40):
        scores = lm.model(torch.tensor([[*lm.prepare(SAID).input_ids, *expected]])).logits[0, -1].tolist()
        for token in set(expected):
            scores[token] -= presence + frequency * expected.count(token)
        expected.append(max(range(len(scores)), key=scores.__getitem__))
    options = {"max_new_tokens": 40, "eos_token_id": [], "logits_processor": [TokenPenalties(presence, frequency)]}
    found = [lm.generate(SAID, **options).token_ids for _ in range(2)]
    assert found == [tuple(expected)] * 2
    assert found[0] != lm.generate(SAID, **{**options, "logits_processor": None}).token_ids
    assert presence < 1000 or len(set(found[0])) == len(found[0])


# --- keywords ---

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
        InvariantModel(llama).generate(PROMPTS[0], max_new_tokens=4, **{name: ARRANGED.get(name, 0.6)})


def test_the_error_of_a_callers_own_function_stays_what_it_is(llama):
    def broken(input_ids, scores):
        raise ValueError("of the caller")

    with pytest.raises(ValueError, match="of the caller") as caught:
        InvariantModel(llama).generate(PROMPTS[0], max_new_tokens=2, logits_processor=[broken])
    assert not isinstance(caught.value, InvariantRAGError)


NO_PROMPTS = {
    "expected a Prompt": ("text", None, 5, b"x", [PROMPTS[0], "text"], [None]),
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
                lm.score(PROMPTS[0], each)
