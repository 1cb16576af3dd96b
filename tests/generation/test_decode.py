"""Decoding: log-probabilities of the model, whatever decodes; no logits are kept; penalties by OpenAI's formula."""

import gc
import random

import pytest
import torch

from invariant_rag import InvariantModel, MicroBatcher, Prompt
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.structured import constrain, parse_object
from invariant_rag.segments import Segment
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import rounding

DECODING = [
    {},
    {"num_beams": 4},
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


def logprobs_of(lm, prompt, answer):
    """The log-probabilities of all tokens, at each of an answer."""
    logits = lm.logits(Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *answer.token_ids]))
    return torch.log_softmax(logits[len(prompt.suffix) - 1 : -1], dim=-1)


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("decoding", DECODING, ids=str)
def test_log_probabilities_are_those_of_the_model_for_every_way_of_decoding_alone_and_in_a_batch(
    decoding, ends, lm, llama, bounds
):
    """Also those of the most likely tokens."""
    lm, lengths, copies = lm if ends else InvariantModel(llama), [], decoding.get("num_return_sequences", 1)
    options = {**decoding, "max_new_tokens": 10, "top_logprobs": 0 if "num_beams" in decoding else 4}
    for batch in (PROMPTS[:1], PROMPTS[:2]):
        for index, answer in enumerate(lm.generate(batch, **options)):
            logprobs, bound = logprobs_of(lm, batch[index // copies], answer), bounds[index // copies]
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

    def count(input_ids, scores, **_):
        alive = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        held.append(sum(each.numel() for each in alive if each.ndim and each.shape[-1] == vocabulary))
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    gc.freeze()  # hides what is there already: a million objects, which take long to look through
    try:
        InvariantModel(llama).generate(PROMPTS[:rows], max_new_tokens=30, stopping_criteria=[count], **decoding)
    finally:
        gc.unfreeze()
    assert len(held) == 30
    assert min(held[2:]) > 0, "the logits of a step are held while it is decided"
    assert max(held) <= held[2]


SAID = Prompt("Say what you like: ", ["one", "two"], "\n")
LONG = {"max_new_tokens": 40, "eos_token_id": []}


def by_formula(lm, presence, frequency):
    """Return the greedy answer: every token from the logits of all before it, by OpenAI's formula."""
    prompt, answer = lm.prepare(SAID).input_ids, []
    for _ in range(LONG["max_new_tokens"]):
        scores = lm.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        for token in set(answer):
            scores[token] -= presence + frequency * answer.count(token)
        answer.append(max(range(len(scores)), key=scores.__getitem__))
    return tuple(answer)


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.5), (-1.0, 0.7), (1e4, 0.0)])
def test_an_answer_is_that_of_the_formula(model, presence, frequency):
    lm = model.with_method("sequential", ordering="given")
    penalties = TokenPenalties(presence, frequency)
    found = [lm.generate(SAID, logits_processor=[penalties], **LONG).token_ids for _ in range(2)]
    assert found[0] == found[1] == by_formula(lm, presence, frequency)
    assert found[0] != lm.generate(SAID, **LONG).token_ids
    assert presence < 1000 or len(set(found[0])) == len(found[0])


def test_requests_with_equal_penalties_are_rows_of_one_batch_and_answered_as_alone(model):
    prompts = [SAID, Prompt("A longer one than that: ", [Segment("three")], "?")]
    calls = [(prompt, {"logits_processor": [TokenPenalties(2.0, 0.5)], **LONG}) for prompt in prompts]
    alone = [model.generate(prompt, **options).token_ids for prompt, options in calls]
    together = MicroBatcher().generate_all(model, calls)
    assert [each.token_ids for each in together] == alone
    assert not any(each.bitwise for each in together)  # there was one batch
    calls[1][1]["logits_processor"] = [TokenPenalties(2.0, 0.6)]
    assert all(each.bitwise for each in MicroBatcher().generate_all(model, calls))


def test_an_object_stays_one_whatever_is_penalized(model):
    schema = {"type": "object", "properties": {"a": {"enum": ["aaaa", "bbbb"]}}, "required": ["a"]}
    options = {"logits_processor": [TokenPenalties(1e6, 1e6)], "sequence_bias": [[[each], -1e6] for each in range(50)]}
    text = model.generate(SAID, **constrain(model, schema, max_new_tokens=80, **options)).text
    assert parse_object(text, schema)["a"] in ("aaaa", "bbbb")


def test_a_routed_model_penalizes_each_of_its_answers_by_itself(model):
    options = {"logits_processor": [TokenPenalties(1e4)], **LONG}
    kept = [model.with_routing(alpha).generate(SAID, **options).token_ids for alpha in (-2.0, 2.0)]
    branches = [model, model.with_routing().plain_branch]
    assert kept == [lm.generate(SAID, **options).token_ids for lm in branches]
