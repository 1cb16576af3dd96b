"""InvICL against the model itself, with the mask and the positions written down from the paper."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.attention import available_backends
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.laws.masked import answer_gradients, masked_logits

PREFIX, SUFFIX = [3, 4, 2], [11, 12]
SETS = {
    "none": [],
    "one": [[5, 6, 7]],
    "two": [[5, 6, 7], [8]],
    "six": [[5, 6, 7], [8], [9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19, 20]],
    "twins": [[5, 6], [7], [5, 6]],
    "an empty one": [[5, 6], [], [7, 8, 9]],
}


def explicit(model: PreTrainedModel, parts: Sequence[Any]) -> torch.Tensor:
    """All logits for the examples twice (figure 2d), each from the position of the first (figure 5b).

    A token is (part, example, copy). First copies attend to themselves; second copies to the first copies of all other
    examples and to themselves; texts to all texts before them and to second copies.
    """
    ids: list[int] = []
    owners: list[tuple[int, int, int]] = []
    positions: list[int] = []
    start = 0
    for number, part in enumerate(parts):
        if not isinstance(part, SegmentSet):
            ids += part
            owners += [(number, -1, 2)] * len(part)
            positions += range(start, start + len(part))
            start += len(part)
            continue
        examples = [each.token_ids for each in part]
        for copy, (name, tokens) in itertools.product((1, 2), list(enumerate(examples))):
            ids += tokens
            owners += [(number, name, copy)] * len(tokens)
            positions += range(start, start + len(tokens))
        start += max(map(len, examples), default=0)

    def sees(query: int, key: int) -> bool:
        reader, read = owners[query], owners[key]
        if reader == read:
            return key <= query
        if reader[0] == read[0]:
            return reader[2] == 2 and read[2] == 1 and reader[1] != read[1]
        return read[0] < reader[0] and read[2] == 2

    return masked_logits(model, ids, positions, sees)


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def float64(request: pytest.FixtureRequest) -> PreTrainedModel:
    model: Any = tiny_model(request.param, num_hidden_layers=2)
    return model.double()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("backend", available_backends())
def test_logits_are_those_of_the_paper(float64: PreTrainedModel, name: str, backend: str) -> None:
    lm = InvariantModel(float64, method="invicl", ordering="given", backend=backend)
    with torch.no_grad():
        expected = explicit(float64, [PREFIX, SegmentSet(SETS[name]), SUFFIX])[-len(SUFFIX) :]
    prompt = Prompt(PREFIX, SETS[name], SUFFIX)
    bound = rounding(lm.logits, prompt, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(prompt), expected.float(), atol=bound, rtol=0)


def test_several_sets_see_the_second_readings_before_them(float64: PreTrainedModel) -> None:
    parts = [[3], SegmentSet(SETS["two"]), [4, 2], SegmentSet(SETS["twins"]), [6], SegmentSet([[9]]), SUFFIX]
    with torch.no_grad():
        expected = explicit(float64, parts)[-len(SUFFIX) :]
    lm = InvariantModel(float64, method="invicl", ordering="given")
    bound = rounding(lm.logits, Prompt.of(*parts), dtype=torch.float64)
    torch.testing.assert_close(lm.logits(Prompt.of(*parts)), expected.float(), atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_permutation_gives_the_same_bits(dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
    lm = InvariantModel(model.to(dtype), method="invicl")
    prompts = [Prompt(PREFIX, order, SUFFIX) for order in itertools.permutations(SETS["six"][:4])]
    expected, written = lm.logits(prompts[0]), lm.generate(prompts[0], max_new_tokens=4).token_ids
    for prompt in prompts[1:]:
        assert torch.equal(lm.logits(prompt), expected)
        assert lm.generate(prompt, max_new_tokens=4).token_ids == written


def test_decoding_scoring_batches_beams_and_the_cache_agree(float64: PreTrainedModel) -> None:
    lm = InvariantModel(float64, method="invicl", ordering="given")
    chosen = SegmentSet(SETS["six"])
    prompt, other = Prompt(PREFIX, chosen, SUFFIX), Prompt([3], SETS["two"], [9])
    written = lm.generate(prompt, max_new_tokens=8, eos_token_id=-1).token_ids
    with torch.no_grad():
        logits = explicit(float64, [PREFIX, chosen, [*SUFFIX, *written]])[-len(written) - 1 : -1]
    assert tuple(logits.argmax(dim=-1).tolist()) == written
    logprobs = torch.log_softmax(logits, dim=-1)
    expected = sum(float(logprobs[step, token]) for step, token in enumerate(written))
    assert lm.score(prompt, [written, [3]])[0] == pytest.approx(
        expected, abs=rounding(lm.score, prompt, [written, [3]], dtype=torch.float64)
    )
    assert lm.generate([other, prompt], max_new_tokens=8, eos_token_id=-1)[1].token_ids == written
    beams = lm.generate([other, prompt], max_new_tokens=4, num_beams=2, eos_token_id=-1)
    assert beams[1].token_ids == lm.generate(prompt, max_new_tokens=4, num_beams=2, eos_token_id=-1).token_ids
    cached = lm.with_cache(KeyValueCache())
    cold, warm = (cached.generate(prompt, max_new_tokens=8, eos_token_id=-1) for _ in range(2))
    assert cold.token_ids == warm.token_ids == written
    assert warm.usage.cached_tokens


def test_a_segment_does_not_see_its_own_draft(llama: PreTrainedModel) -> None:
    """One segment among empty ones is read as if alone: all that it could see more is its own draft."""
    lm = InvariantModel(llama, method="invicl")
    alone, among = Prompt(PREFIX, [[5, 6, 7]], SUFFIX), Prompt(PREFIX, [[5, 6, 7], [], []], SUFFIX)
    torch.testing.assert_close(lm.logits(among), lm.logits(alone), atol=rounding(lm.logits, alone), rtol=0)


def test_gradients_are_those_of_the_paper(float64: PreTrainedModel) -> None:
    chosen, answer = SegmentSet(SETS["six"]), [21, 22, 23]
    prepared = InvariantModel(float64, method="invicl", ordering="given").prepare(Prompt(PREFIX, chosen, SUFFIX))
    behind = range(prepared.positions[-1] + 1, prepared.positions[-1] + 1 + len(answer))
    ids, positions = torch.tensor([[*prepared.input_ids, *answer]]), torch.tensor([[*prepared.positions, *behind]])

    with InvariantModel(float64, method="invicl").arranged([prepared]):
        options = {"attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
        ours = answer_gradients(float64, float64(ids, **options).logits[0], answer)
    theirs = answer_gradients(float64, explicit(float64, [PREFIX, chosen, [*SUFFIX, *answer]]), answer)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-6)
