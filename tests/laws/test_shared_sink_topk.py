"""Shared sink and top segments against the model itself, with positions, scores and choices from the published code."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb, repeat_kv

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.attention import available_backends
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.methods import SharedSinkTopK
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

PREFIX, SUFFIX = [3, 4, 2], [11, 12, 30, 31]
SETS = {
    "none": [],
    "one": [[5, 6, 7]],
    "two": [[5, 6, 7], [8]],
    "three": [[5, 6, 7], [8], [9, 10, 11, 12]],
    "six": [[5, 6, 7], [8], [9, 10, 11, 12], [13], [14, 15], [16, 17, 18, 19, 20, 21, 22]],
    "twins": [[5, 6], [7], [5, 6]],
}


def top_sum(values: torch.Tensor) -> torch.Tensor:
    """The sum of the five largest, or of all if there are fewer."""
    return values.sort(dim=-1, descending=True).values[..., :5].sum(dim=-1)


def published(
    model: Any, prefix: Sequence[int], segments: Sequence[Sequence[int]], steps: Sequence[Sequence[int]], top: int = 2
) -> torch.Tensor:
    """All logits of a Llama, layer by layer: each of `steps` (a question, a token) is a forward pass of its own."""
    longest = max(map(len, segments), default=0)
    ids, owners, positions, passes = list(prefix), [0] * len(prefix), [float(i) for i in range(len(prefix))], []
    for number, segment in enumerate(segments, start=1):
        ids += segment
        owners += [number] * len(segment)
        positions += [len(prefix) + i * (longest / len(segment)) for i in range(len(segment))]
    passes.append(len(ids))
    at = len(prefix) + longest
    for step in steps:
        ids += step
        owners += [0] * len(step)
        positions += [float(at + i) for i in range(len(step))]
        at += len(step)
        passes.append(len(ids))
    names = torch.tensor(owners)
    apart = (names[:, None] != names) & (names[:, None] > 0) & (names > 0)
    mask = torch.ones(len(ids), len(ids)).tril().bool() & ~apart
    hidden = model.model.embed_tokens(torch.tensor([ids]))
    rotary = model.model.rotary_emb(hidden, torch.tensor([positions]))
    for layer in model.model.layers:
        normed, module = layer.input_layernorm(hidden), layer.self_attn
        q, k, v = (
            part(normed).view(1, len(ids), -1, module.head_dim).transpose(1, 2)
            for part in (module.q_proj, module.k_proj, module.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *rotary)
        k, v = (repeat_kv(each, module.num_key_value_groups)[0] for each in (k, v))
        scores = (q[0] @ k.transpose(1, 2)) * module.scaling
        weights = torch.softmax(scores.masked_fill(~mask, -torch.inf), dim=-1)
        for start, stop in itertools.pairwise(passes):
            part = weights[:, start:stop]
            if len(segments) > 1:
                support = [top_sum(top_sum(part[..., names == n]).flatten()) for n in range(1, len(segments) + 1)]
                seen = torch.stack(support).topk(min(top, len(segments))).indices + 1
                part = part * ((names == 0) | torch.isin(names, seen))
            weights[:, start:stop] = part / part.sum(dim=-1, keepdim=True)
        hidden = hidden + module.o_proj((weights @ v).transpose(0, 1).reshape(1, len(ids), -1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    logits: torch.Tensor = model.lm_head(model.model.norm(hidden))[0]
    return logits


@pytest.fixture(scope="module", params=[0, 1])
def float64(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A random Llama whose keys are large, so that segments are told apart."""
    torch.manual_seed(request.param)
    model: Any = tiny_model("llama", num_hidden_layers=3, num_key_value_heads=2 + 2 * request.param)
    for layer in model.model.layers:
        layer.self_attn.k_proj.weight.data *= 8
    return model.double()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("backend", available_backends())
@pytest.mark.parametrize("top", [1, 2])
def test_logits_are_those_of_the_published_code(float64: PreTrainedModel, name: str, backend: str, top: int) -> None:
    lm = InvariantModel(float64, method=SharedSinkTopK(top), ordering="given", backend=backend)
    with torch.no_grad():
        expected = published(float64, PREFIX, SETS[name], [SUFFIX], top)[-len(SUFFIX) :]
    prompt = Prompt(PREFIX, SETS[name], SUFFIX)
    bound = rounding(lm.logits, prompt, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(prompt), expected.float(), atol=bound, rtol=0)


def test_layers_and_tokens_choose_for_themselves(float64: PreTrainedModel) -> None:
    """Another number of segments, and a choice that never changed, would give other logits."""
    prompt = Prompt(PREFIX, SETS["six"], SUFFIX)
    logits = [InvariantModel(float64, method=SharedSinkTopK(top), ordering="given").logits(prompt) for top in (1, 2, 6)]
    assert not any(torch.allclose(one, other, atol=1e-4) for one, other in itertools.combinations(logits, 2))


def test_decoding_scoring_and_batches_choose_anew_for_every_token(float64: PreTrainedModel) -> None:
    lm = InvariantModel(float64, method="shared-sink-topk", ordering="given")
    prompt, other = Prompt(PREFIX, SETS["six"], SUFFIX), Prompt([3], [[5]], [9])
    written = lm.generate(prompt, max_new_tokens=8, eos_token_id=-1).token_ids
    with torch.no_grad():
        steps = [SUFFIX, *([token] for token in written)]
        logits = published(float64, PREFIX, SETS["six"], steps)[-len(written) - 1 : -1]
    assert tuple(logits.argmax(dim=-1).tolist()) == written
    logprobs = torch.log_softmax(logits, dim=-1)
    expected = sum(float(logprobs[step, token]) for step, token in enumerate(written))
    assert lm.score(prompt, [written, [3]])[0] == pytest.approx(
        expected,
        abs=rounding(lm.with_method("set-based").score, prompt, [written, [3]]),  # a choice has no bound
    )
    assert lm.generate([other, prompt], max_new_tokens=8, eos_token_id=-1)[1].token_ids == written
    beams = lm.generate([other, prompt], max_new_tokens=4, num_beams=2, eos_token_id=-1)
    assert beams[1].token_ids == lm.generate(prompt, max_new_tokens=4, num_beams=2, eos_token_id=-1).token_ids


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_permutation_gives_the_same_bits(dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
    lm = InvariantModel(model.to(dtype), method="shared-sink-topk")
    for name in ("six", "twins"):
        prompts = [Prompt(PREFIX, order, SUFFIX) for order in itertools.permutations(SETS[name][:4])]
        expected, written = lm.logits(prompts[0]), lm.generate(prompts[0], max_new_tokens=4).token_ids
        for prompt in prompts[1:]:
            assert torch.equal(lm.logits(prompt), expected)
            assert lm.generate(prompt, max_new_tokens=4).token_ids == written


def test_one_segment_or_none_is_the_plain_model(llama: PreTrainedModel) -> None:
    for segments in SETS["none"], SETS["one"]:
        prompt = Prompt(PREFIX, segments, SUFFIX)
        plain = InvariantModel(llama, method="sequential").logits(prompt)
        assert torch.equal(InvariantModel(llama, method="shared-sink-topk").logits(prompt), plain)


def test_positions_are_spread_evenly_over_the_longest_segment(llama: PreTrainedModel) -> None:
    prepared = InvariantModel(llama, method="shared-sink-topk", ordering="given").prepare(
        Prompt([3], [[5, 6, 7, 8], [9], [10, 11, 12]], [13, 14])
    )
    assert prepared.positions == pytest.approx([0, 1, 2, 3, 4, 1, 1, 1 + 4 / 3, 1 + 8 / 3, 5, 6])


@pytest.mark.parametrize("family", ["gpt_neox", "cohere", "gpt_oss", "phi", "qwen3"])
def test_fractional_positions_rotate_in_every_kind_of_model(family: str) -> None:
    model: Any = tiny_model(family, num_hidden_layers=1)
    options: dict[str, Any] = {"attention_mask": torch.ones(1, 2), "use_cache": False}
    with torch.no_grad():
        below, between, above = (
            model(torch.tensor([[5, 6]]), position_ids=torch.tensor([[0, distance]]), **options).logits[0, -1]
            for distance in (1, 1.5, 2)
        )
    assert not torch.allclose(between, below, atol=1e-7, rtol=0)
    assert not torch.allclose(between, above, atol=1e-7, rtol=0)


def test_what_depends_on_the_suffix_is_not_cached_and_sliding_windows_are_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedCombination, match="shared-sink-topk"):
        InvariantModel(llama, method="shared-sink-topk", cache=KeyValueCache())
    lm = InvariantModel(tiny_model("mistral (sliding window)", num_hidden_layers=2), method="shared-sink-topk")
    for backend in available_backends():
        with pytest.raises(UnsupportedCombination, match="without a sliding window"):
            lm.with_method(backend=backend).logits(Prompt(PREFIX, SETS["three"], SUFFIX))


def test_wrong_numbers_of_segments_are_refused() -> None:
    for top in (0, -1, 1.5, "two"):
        with pytest.raises(InvalidChoice, match="top"):
            SharedSinkTopK(top)  # type: ignore[arg-type]


def test_every_set_is_chosen_from_and_an_empty_one_is_none(float64: PreTrainedModel) -> None:
    lm = InvariantModel(float64, method="shared-sink-topk", ordering="given")
    alone = lm.logits(Prompt(PREFIX, SETS["six"], SUFFIX))
    before = Prompt.of([], SegmentSet(), PREFIX, SegmentSet(SETS["six"]), SUFFIX)
    bound = rounding(lm.logits, before, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(before), alone, atol=bound, rtol=0)
    one, two = SegmentSet(SETS["six"]), SegmentSet(SETS["six"][::-1])
    prompts = [Prompt.of(PREFIX, one, [7], chosen, SUFFIX) for chosen in (two, SegmentSet(SETS["six"][3:]))]
    for backend in available_backends():
        logits = [lm.with_method(backend=backend).logits(prompt) for prompt in prompts]
        for found, prompt in zip(logits, prompts, strict=True):
            reference = lm.with_method(backend="reference")
            bound = rounding(reference.logits, prompt, dtype=torch.float64)
            torch.testing.assert_close(found, reference.logits(prompt), atol=bound, rtol=0)
        assert not torch.allclose(*logits, atol=1e-3)


@pytest.mark.parametrize("family", ["gptj", "codegen"])
def test_a_model_that_looks_positions_up_has_no_fractional_ones(family: str) -> None:
    lm = InvariantModel(tiny_model(family), method="shared-sink-topk")
    assert lm.generate(Prompt([3], [[5, 6], [7, 8]], [9]), max_new_tokens=2).token_ids
    spread = Prompt([3], [[5, 6], [7, 8, 10]], [9])
    for ask in (lm.logits, lambda prompt: lm.generate(prompt, max_new_tokens=2)):
        with pytest.raises(UnsupportedCombination, match="expected whole positions"):
            ask(spread)
