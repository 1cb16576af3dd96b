"""Several sets in one prompt, and chunks that keep their order. `test_invariance` permutes them."""

from __future__ import annotations

import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt
from invariant_rag.methods import METHODS
from invariant_rag.testing.rounding import rounding

RUBRICS = SegmentSet([[5, 6], [7], [8, 9, 10]])
ANSWERS = SegmentSet([[20], [21, 22, 23], [24, 25]])
PROMPT = Prompt.of([3], RUBRICS, [4, 4], ANSWERS, [11, 12])
KINDS = ("rotor", "pine", "parallel-windows", "ape")


def differ(lm: InvariantModel, one: Prompt, two: Prompt) -> bool:
    """Whether two prompts are far enough apart that rounding is no explanation."""
    return float((lm.logits(one) - lm.logits(two)).abs().max()) > 1e-3


@pytest.mark.parametrize("method", METHODS)
def test_what_is_no_permutation_of_a_set_changes_the_logits(llama: PreTrainedModel, method: str) -> None:
    lm = InvariantModel(llama, method=method, ordering="lexical")
    exchanged = SegmentSet([[20], [7], [8, 9, 10]]), SegmentSet([[5, 6], [21, 22, 23], [24, 25]])
    others = {
        "sets in another order": Prompt.of([3], ANSWERS, [4, 4], RUBRICS, [11, 12]),
        "two segments exchanged": Prompt.of([3], exchanged[0], [4, 4], exchanged[1], [11, 12]),
        "another text between": Prompt.of([3], RUBRICS, [4, 9], ANSWERS, [11, 12]),
        "an empty set": PROMPT.with_sets([RUBRICS, SegmentSet()]),
        "the tokens of a segment backwards": PROMPT.with_sets([SegmentSet([[6, 5], [7], [8, 9, 10]]), ANSWERS]),
    }
    for what, other in others.items():
        assert differ(lm, PROMPT, other), what
    together = Prompt.of([3], RUBRICS, ANSWERS, [11, 12])
    assert differ(lm, together, Prompt.of([3], ANSWERS, RUBRICS, [11, 12])), "sets without a text between"


@pytest.mark.parametrize("method", KINDS)
def test_an_empty_set_is_as_no_set_and_sets_of_one_are_text(llama: PreTrainedModel, method: str) -> None:
    """Texts are attended to one by one, which rounds differently."""
    lm = InvariantModel(llama, method=method)
    expected = lm.logits(Prompt([3, 4, 4], ANSWERS, [11, 12]))
    bound = rounding(lm.logits, Prompt([3, 4, 4], ANSWERS, [11, 12]))
    before = lm.logits(Prompt.of([3], SegmentSet(), [4, 4], ANSWERS, [11, 12]))
    behind = lm.logits(Prompt.of([3, 4, 4], ANSWERS, [], SegmentSet(), [11, 12]))
    for logits in (before, behind):
        torch.testing.assert_close(logits, expected, atol=bound, rtol=0)
    ones = Prompt.of([3], SegmentSet([[5, 6]]), [4], SegmentSet([[20]]), [7, 8], SegmentSet([[9]]), [11, 12])
    plain = llama(torch.tensor([[3, 5, 6, 4, 20, 7, 8, 9, 11, 12]])).logits[0, -2:].detach()
    torch.testing.assert_close(lm.logits(ones), plain, atol=rounding(lm.logits, ones), rtol=0)


def test_an_order_names_segments_of_all_sets_and_other_sets_are_as_many(llama: PreTrainedModel) -> None:
    order = InvariantModel(llama).generate(PROMPT, max_new_tokens=1).order
    assert (sorted(order[:3]), sorted(order[3:])) == ([0, 1, 2], [3, 4, 5])
    with pytest.raises(InvalidPrompt, match="expected 2 sets, got 1"):
        PROMPT.with_sets([RUBRICS])


def test_chunks_of_one_source_are_joined_by_whoever_knows_their_order(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = InvariantModel(chat_llama, tokenizer)
    story, note = "First it rained.\nThen it cleared.", "Nothing."
    prompt = lm.chat_prompt("And then?", [Segment(story, title="Diary"), note])
    assert torch.equal(lm.logits(prompt), lm.logits(lm.chat_prompt("And then?", [note, Segment(story, title="Diary")])))
    backwards = "\n".join(story.split("\n")[::-1])
    assert differ(lm, prompt, lm.chat_prompt("And then?", [Segment(backwards, title="Diary"), note]))
