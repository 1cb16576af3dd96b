"""Several sets in one prompt, and chunks that keep their order, for every method of the registry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt
from invariant_rag.methods import METHODS
from invariant_rag.testing.contracts import recomputed_logits
from invariant_rag.testing.rounding import rounding

quick = settings(max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
token = st.integers(3, 120)
words = st.lists(token, min_size=1, max_size=4)
texts = st.lists(token, max_size=3)
sets = st.lists(words, max_size=4).map(SegmentSet)

RUBRICS = SegmentSet([[5, 6], [7], [8, 9, 10]])
ANSWERS = SegmentSet([[20], [21, 22, 23], [24, 25]])


@pytest.fixture(params=sorted(METHODS))
def lm(request: pytest.FixtureRequest, llama: PreTrainedModel) -> InvariantModel:
    """Every method, on an ordering that reads contents only: then even the plain model is invariant."""
    return InvariantModel(llama, method=request.param, ordering="lexical")


# --- several sets ---------------------------------------------------------------------------------------------------


@quick
@given(around=st.tuples(texts, texts, texts, words), chosen=st.tuples(sets, sets, sets), shuffle=st.randoms())
def test_shuffling_every_set_changes_no_bit(
    lm: InvariantModel, around: tuple[list[int], ...], chosen: tuple[SegmentSet, ...], shuffle: object
) -> None:
    first, second, third, suffix = around
    prompt = Prompt.of(first, chosen[0], second, chosen[1], third, chosen[2], suffix)
    other = prompt.shuffled(shuffle)  # type: ignore[arg-type]
    assert torch.equal(lm.logits(prompt), lm.logits(other))
    one, two = lm.generate(prompt, max_new_tokens=2), lm.generate(other, max_new_tokens=2)
    assert (one.token_ids, one.logprobs) == (two.token_ids, two.logprobs)


def differ(lm: InvariantModel, one: Prompt, two: Prompt) -> bool:
    """Whether two prompts are far enough apart that rounding is no explanation."""
    return float((lm.logits(one) - lm.logits(two)).abs().max()) > 1e-3


def test_what_is_no_permutation_of_a_set_changes_the_logits(lm: InvariantModel) -> None:
    prompt = Prompt.of([3], RUBRICS, [4, 4], ANSWERS, [11, 12])
    exchanged = SegmentSet([[20], [7], [8, 9, 10]]), SegmentSet([[5, 6], [21, 22, 23], [24, 25]])
    others = {
        "sets in another order": Prompt.of([3], ANSWERS, [4, 4], RUBRICS, [11, 12]),
        "two segments exchanged": Prompt.of([3], exchanged[0], [4, 4], exchanged[1], [11, 12]),
        "another text between": Prompt.of([3], RUBRICS, [4, 9], ANSWERS, [11, 12]),
        "an empty set": prompt.with_sets([RUBRICS, SegmentSet()]),
        "the tokens of a segment backwards": prompt.with_sets([SegmentSet([[6, 5], [7], [8, 9, 10]]), ANSWERS]),
    }
    for what, other in others.items():
        assert differ(lm, prompt, other), what
    together = Prompt.of([3], RUBRICS, ANSWERS, [11, 12])
    assert differ(lm, together, Prompt.of([3], ANSWERS, RUBRICS, [11, 12])), "sets without a text between"


def test_an_empty_set_is_as_no_set(lm: InvariantModel) -> None:
    expected = lm.logits(Prompt([3, 4, 4], ANSWERS, [11, 12]))
    before = lm.logits(Prompt.of([3], SegmentSet(), [4, 4], ANSWERS, [11, 12]))
    behind = lm.logits(Prompt.of([3, 4, 4], ANSWERS, [], SegmentSet(), [11, 12]))
    bound = rounding(lm.logits, Prompt([3, 4, 4], ANSWERS, [11, 12]))
    for logits in (before, behind):  # texts are read one by one, which rounds differently
        torch.testing.assert_close(logits, expected, atol=bound, rtol=0)


def test_sets_of_one_are_text(lm: InvariantModel, llama: PreTrainedModel) -> None:
    prompt = Prompt.of([3], SegmentSet([[5, 6]]), [4], SegmentSet([[20]]), [7, 8], SegmentSet([[9]]), [11, 12])
    torch.testing.assert_close(
        lm.logits(prompt),
        lm.logits(Prompt([3, 5, 6, 4, 20, 7, 8, 9], [], [11, 12])),
        atol=rounding(lm.logits, prompt),
        rtol=0,
    )
    plain = llama(torch.tensor([[3, 5, 6, 4, 20, 7, 8, 9, 11, 12]])).logits[0, -2:].detach()
    torch.testing.assert_close(lm.logits(prompt), plain, atol=rounding(lm.logits, prompt), rtol=0)


def test_decoding_behind_several_sets_equals_recomputing(lm: InvariantModel) -> None:
    prompt = Prompt.of([3], RUBRICS, [4, 4], ANSWERS, [11, 12])
    written = lm.generate(prompt, max_new_tokens=6).token_ids
    assert tuple(recomputed_logits(lm, prompt, written[:-1]).argmax(dim=-1).tolist()) == written
    again = lm.logits(Prompt.of([3], RUBRICS, [4, 4], ANSWERS, [11, 12, *written[:-1]]))
    assert tuple(again[1:].argmax(dim=-1).tolist()) == written


def test_an_order_names_segments_of_all_sets(lm: InvariantModel) -> None:
    order = lm.generate(Prompt.of([3], RUBRICS, [4, 4], ANSWERS, [11, 12]), max_new_tokens=1).order
    assert sorted(order[:3]) == [0, 1, 2]
    assert sorted(order[3:]) == [3, 4, 5]


def test_other_sets_for_a_prompt_are_as_many(llama: PreTrainedModel) -> None:
    prompt = Prompt.of([3], RUBRICS, [4, 4], ANSWERS, [11, 12])
    with pytest.raises(InvalidPrompt, match="expected 2 sets, got 1"):
        prompt.with_sets([RUBRICS])


def test_chunks_of_one_source_are_joined_by_whoever_knows_their_order(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = InvariantModel(chat_llama, tokenizer)
    story, note = "First it rained.\nThen it cleared.", "Nothing."
    prompt = lm.chat_prompt("And then?", [Segment(story, title="Diary"), note])
    assert torch.equal(lm.logits(prompt), lm.logits(lm.chat_prompt("And then?", [note, Segment(story, title="Diary")])))
    backwards = "\n".join(story.split("\n")[::-1])
    assert differ(lm, prompt, lm.chat_prompt("And then?", [Segment(backwards, title="Diary"), note]))
