"""Penalties of tokens that an answer has already: OpenAI's formula, for the answer alone, in any batch."""

from __future__ import annotations

import pytest
import torch

from invariant_rag import InvariantModel, MicroBatcher, Prompt
from invariant_rag.generation.decode import TokenPenalties
from invariant_rag.generation.structured import constrain, parse_object
from invariant_rag.segments import Segment

PROMPT = Prompt("Say what you like: ", ["one", "two"], "\n")
LENGTH = {"max_new_tokens": 40, "eos_token_id": []}


def by_formula(lm: InvariantModel, presence: float, frequency: float) -> tuple[int, ...]:
    """Return the greedy answer: every token from the logits of all before it, by OpenAI's formula."""
    prompt = lm.prepare(PROMPT).input_ids
    answer: list[int] = []
    for _ in range(LENGTH["max_new_tokens"]):
        scores = lm.model(torch.tensor([[*prompt, *answer]])).logits[0, -1].tolist()
        for token in set(answer):
            scores[token] -= presence + frequency * answer.count(token)
        answer.append(max(range(len(scores)), key=scores.__getitem__))
    return tuple(answer)


@pytest.mark.parametrize(("presence", "frequency"), [(2.0, 0.0), (0.0, 0.5), (-1.0, 0.7), (1e4, 0.0)])
def test_an_answer_is_that_of_the_formula(model: InvariantModel, presence: float, frequency: float) -> None:
    lm = model.with_method("sequential", ordering="given")
    penalties = TokenPenalties(presence, frequency)
    found = [lm.generate(PROMPT, logits_processor=[penalties], **LENGTH).token_ids for _ in range(2)]
    assert found[0] == found[1] == by_formula(lm, presence, frequency)
    assert found[0] != lm.generate(PROMPT, **LENGTH).token_ids
    if presence > 1000:
        assert len(set(found[0])) == len(found[0])


def test_requests_with_equal_penalties_are_rows_of_one_batch_and_answered_as_alone(model: InvariantModel) -> None:
    prompts = [PROMPT, Prompt("A longer one than that: ", [Segment("three")], "?")]
    calls = [(prompt, {"logits_processor": [TokenPenalties(2.0, 0.5)], **LENGTH}) for prompt in prompts]
    alone = [model.generate(prompt, **options).token_ids for prompt, options in calls]
    together = MicroBatcher().generate_all(model, calls)
    assert [each.token_ids for each in together] == alone
    assert not any(each.bitwise for each in together)  # there was one batch
    calls[1][1]["logits_processor"] = [TokenPenalties(2.0, 0.6)]
    assert all(each.bitwise for each in MicroBatcher().generate_all(model, calls))


def test_an_object_stays_one_whatever_is_penalized(model: InvariantModel) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": ["aaaa", "bbbb"]}}, "required": ["a"]}
    options = {"logits_processor": [TokenPenalties(1e6, 1e6)], "sequence_bias": [[[each], -1e6] for each in range(50)]}
    text = model.generate(PROMPT, **constrain(model, schema, max_new_tokens=80, **options)).text
    assert parse_object(text, schema)["a"] in ("aaaa", "bbbb")


def test_a_routed_model_penalizes_each_of_its_answers_by_itself(model: InvariantModel) -> None:
    options = {"logits_processor": [TokenPenalties(1e4)], **LENGTH}
    kept = [model.with_routing(alpha).generate(PROMPT, **options).token_ids for alpha in (-2.0, 2.0)]
    branches = [model, model.with_routing().plain_branch]
    assert kept == [lm.generate(PROMPT, **options).token_ids for lm in branches]
