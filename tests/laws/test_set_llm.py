"""Set-LLM against the model itself, with SetMask and SetPE written down from the paper."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.attention import available_backends
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from tests.laws.masked import answer_gradients, masked_logits

PREFIX, SUFFIX, ANSWER = [3, 4, 2], [11, 12], [21, 22, 23]
SETS = {
    "none": [],
    "one": [[5, 6, 7]],
    "two": [[5, 6, 7], [8]],
    "six": [[5, 6, 7], [8], [9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19, 20]],
    "twins": [[5, 6], [7], [5, 6]],
}


def set_positions(parts: Sequence[Any]) -> list[int]:
    """Algorithm 1: tokens are numbered one by one, and the elements of a set each from where the set starts."""
    positions, index = [], 0
    for part in parts:
        if isinstance(part, SegmentSet):
            for element in part:
                positions += range(index, index + len(element.token_ids))
            index += sum(len(element.token_ids) for element in part)
        else:
            positions += range(index, index + len(part))
            index += len(part)
    return positions


def explicit(model: PreTrainedModel, parts: Sequence[Any], answer: Sequence[int] = ()) -> torch.Tensor:
    """All logits, with SetMask (section 3.2): no edges between elements of one set; the answer is causal."""
    ids: list[int] = []
    owners: list[tuple[int, int]] = []  # q(t) and s(t) of the paper
    for number, part in enumerate(parts):
        elements = [each.token_ids for each in part] if isinstance(part, SegmentSet) else [part]
        for name, element in enumerate(elements):
            ids += element
            owners += [(number, name)] * len(element)
    prompt = len(ids)
    ids += answer

    def sees(i: int, j: int) -> bool:
        apart = owners[i : i + 1] != owners[j : j + 1] and i < prompt and j < prompt and owners[i][0] == owners[j][0]
        return not apart and (j <= i or i < prompt > j)

    return masked_logits(model, ids, set_positions([*parts, answer]), sees)


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma2 without windows"])
def float64(request: pytest.FixtureRequest) -> PreTrainedModel:
    if request.param == "llama":
        model: Any = tiny_model("llama", num_hidden_layers=2)
    elif request.param == "qwen2":
        model = tiny_model("qwen2", num_hidden_layers=2)
    else:  # soft-capped scores; the eager attention of the model itself has them too
        model = tiny_model("gemma2", num_hidden_layers=2, layer_types=["full_attention"] * 2)
        model.set_attn_implementation("eager")
    return model.double()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("backend", available_backends())
def test_logits_are_those_of_the_paper(float64: PreTrainedModel, name: str, backend: str) -> None:
    lm = InvariantModel(float64, method="set-llm", ordering="given", backend=backend)
    with torch.no_grad():
        expected = explicit(float64, [PREFIX, SegmentSet(SETS[name]), SUFFIX])[-len(SUFFIX) :]
    prompt = Prompt(PREFIX, SETS[name], SUFFIX)
    bound = rounding(lm.logits, prompt, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(prompt), expected.float(), atol=bound, rtol=0)


def test_several_sets_see_each_other(float64: PreTrainedModel) -> None:
    parts = [[3], SegmentSet(SETS["two"]), [4, 2], SegmentSet(SETS["twins"]), [6], SegmentSet([[9]]), SUFFIX]
    with torch.no_grad():
        expected = explicit(float64, parts)[-len(SUFFIX) :]
    lm = InvariantModel(float64, method="set-llm", ordering="given")
    bound = rounding(lm.logits, Prompt.of(*parts), dtype=torch.float64)
    torch.testing.assert_close(lm.logits(Prompt.of(*parts)), expected.float(), atol=bound, rtol=0)


def test_generated_tokens_and_candidates_follow_the_prompt_one_way(float64: PreTrainedModel) -> None:
    lm = InvariantModel(float64, method="set-llm", ordering="given")
    chosen = SegmentSet(SETS["six"])
    prompt = Prompt(PREFIX, chosen, SUFFIX)
    written = lm.generate(prompt, max_new_tokens=8, eos_token_id=-1).token_ids
    with torch.no_grad():
        logits = explicit(float64, [PREFIX, chosen, SUFFIX], written)
    start = len(PREFIX) + sum(len(each.token_ids) for each in chosen) + len(SUFFIX) - 1
    assert tuple(logits[start:-1].argmax(dim=-1).tolist()) == written
    logprobs = torch.log_softmax(logits[start:-1], dim=-1)
    expected = sum(float(logprobs[step, token]) for step, token in enumerate(written))
    assert lm.score(prompt, [written, [3]])[0] == pytest.approx(
        expected, abs=rounding(lm.score, prompt, [written, [3]], dtype=torch.float64)
    )
    other = Prompt([3], [[5]], [9])
    assert lm.generate([other, prompt], max_new_tokens=8, eos_token_id=-1)[1].token_ids == written


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_permutation_gives_the_same_bits(dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
    lm = InvariantModel(model.to(dtype), method="set-llm")
    prompts = [Prompt(PREFIX, order, SUFFIX) for order in itertools.permutations(SETS["six"][:4])]
    expected, written = lm.logits(prompts[0]), lm.generate(prompts[0], max_new_tokens=4).token_ids
    for prompt in prompts[1:]:
        assert torch.equal(lm.logits(prompt), expected)
        assert lm.generate(prompt, max_new_tokens=4).token_ids == written


def test_gradients_of_an_answer_are_those_of_the_paper(float64: PreTrainedModel) -> None:
    """Fine-tuning: the loss on an answer behind the prompt, and its gradient at every weight."""
    chosen = SegmentSet(SETS["six"])
    lm = InvariantModel(float64, method="set-llm", ordering="given")
    prepared = lm.prepare(Prompt(PREFIX, chosen, SUFFIX))
    behind = range(prepared.positions[-1] + 1, prepared.positions[-1] + 1 + len(ANSWER))
    ids, positions = torch.tensor([[*prepared.input_ids, *ANSWER]]), torch.tensor([[*prepared.positions, *behind]])
    assert positions[0].tolist() == set_positions([PREFIX, chosen, SUFFIX, ANSWER])

    options = {"attention_mask": torch.ones_like(ids), "position_ids": positions, "use_cache": False}
    with lm.arranged([prepared]):
        ours = answer_gradients(float64, float64(ids, **options).logits[0], ANSWER)
    theirs = answer_gradients(float64, explicit(float64, [PREFIX, chosen, SUFFIX], ANSWER), ANSWER)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_model_learns_an_answer_and_gives_it_for_every_order(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama).train()
    lm = InvariantModel(model, method="set-llm")
    prompt = Prompt(PREFIX, SETS["six"][:3], SUFFIX)
    prepared = lm.prepare(prompt)
    behind = range(prepared.positions[-1] + 1, prepared.positions[-1] + 1 + len(ANSWER))
    ids, positions = torch.tensor([[*prepared.input_ids, *ANSWER]]), torch.tensor([[*prepared.positions, *behind]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(20):
        with lm.arranged([prepared]):
            logits = model(ids, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False).logits[0]
        loss = cross_entropy(logits[-len(ANSWER) - 1 : -1], torch.tensor(ANSWER))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    for order in itertools.permutations(SETS["six"][:3]):
        assert lm.generate(Prompt(PREFIX, order, SUFFIX), max_new_tokens=3).token_ids == tuple(ANSWER)


def test_what_would_depend_on_the_suffix_is_not_cached(llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="see earlier ones only"):
        InvariantModel(llama, method="set-llm", cache=KeyValueCache())
    with pytest.raises(UnsupportedCombination, match="set-llm"):
        InvariantModel(llama, cache=KeyValueCache()).with_method("set-llm")


def test_sliding_windows_are_refused() -> None:
    model = tiny_model("mistral (sliding window)", num_hidden_layers=2)
    lm = InvariantModel(model, method="set-llm")
    for backend in available_backends():
        with pytest.raises(UnsupportedCombination, match="without a sliding window"):
            lm.with_method(backend=backend).logits(Prompt(PREFIX, SETS["two"], SUFFIX))
