"""Methods whose segments do not see each other, against the model itself and against loops written from the papers."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AttentionInterface, PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import APE
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

PROMPT = random_prompt(random.Random(0), (3, 5, 1, 2), prefix=4, suffix=3)


def owners(prompt: Prompt) -> list[int]:
    """Which segment each token of the prompt belongs to: -1 for the texts before and behind the set."""
    segments = [[index] * len(each.token_ids) for index, each in enumerate(prompt.segments)]
    return [-1] * len(prompt.prefix) + [index for each in segments for index in each] + [-1] * len(prompt.suffix)


def flat(prompt: Prompt) -> torch.Tensor:
    """All tokens, in the order given."""
    tokens = [token for each in prompt.segments for token in each.token_ids]
    return torch.tensor([[*prompt.prefix, *tokens, *prompt.suffix]])


def side_by_side(prompt: Prompt) -> torch.Tensor:
    """Positions: segments start behind the prefix, the suffix behind the longest of them."""
    lengths = [len(each.token_ids) for each in prompt.segments]
    start = len(prompt.prefix)
    at = [start + offset for length in lengths for offset in range(length)]
    behind = start + max(lengths)
    return torch.tensor([[*range(start), *at, *range(behind, behind + len(prompt.suffix))]])


def seen(prompt: Prompt) -> torch.Tensor:
    """Boolean `[L, L]`: a token sees the texts before it and its own segment, and the suffix sees all before it."""
    owner = torch.tensor(owners(prompt))
    causal = torch.ones(len(owner), len(owner), dtype=torch.bool).tril()
    reads_all = torch.arange(len(owner)) >= len(owner) - len(prompt.suffix)
    return causal & ((owner[:, None] == owner) | (owner == -1) | reads_all[:, None])


@pytest.mark.parametrize("method", ["isolated", "set-based"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "gpt_neox"])
def test_logits_are_those_of_the_model_with_an_explicit_mask(method: str, family: str) -> None:
    """NIA (PINE, section 4.1) and Set-Based Prompting are a mask and positions."""
    model = tiny_model(family).double()
    ids = flat(PROMPT)
    positions = torch.arange(ids.shape[1])[None] if method == "isolated" else side_by_side(PROMPT)
    mask = torch.zeros(ids.shape[1], ids.shape[1], dtype=torch.float64).masked_fill(~seen(PROMPT), -torch.inf)
    with torch.no_grad():
        expected = model(ids, position_ids=positions, attention_mask=mask[None, None], use_cache=False).logits[0, -3:]
    lm = InvariantModel(model, method=method, ordering="given")
    bound = rounding(lm.logits, PROMPT, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(PROMPT), expected.float(), atol=bound, rtol=0)


def reading_in_parts(prompt: Prompt, temperature: float, scale: float) -> Any:
    """APE's attention of one layer as the paper writes it, one head and one query at a time, in float64."""
    owner, sees = torch.tensor(owners(prompt)), seen(prompt)
    suffix = len(owner) - len(prompt.suffix)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **_: Any) -> Any:
        out = torch.zeros_like(query)
        for head in range(query.shape[1]):
            kv = head // (query.shape[1] // key.shape[1])
            for token in range(query.shape[2]):
                scores = (key[0, kv] @ query[0, head, token]) * scaling
                inside, outside = sees[token] & (owner >= 0), sees[token] & (owner < 0)
                if token < suffix:
                    weights = torch.where(sees[token], scores.exp(), 0.0)
                else:  # 2502.05431: (sum of exp(s / T)) ^ (scale T) for the contexts, softmax(s / T) within them
                    sharp = torch.where(inside, (scores / temperature).exp(), 0.0)
                    weights = sharp / sharp.sum() * sharp.sum() ** (scale * temperature)
                    weights = weights + torch.where(outside, scores.exp(), 0.0)
                out[0, head, token] = weights @ value[0, kv] / weights.sum()
        return out.transpose(1, 2), None

    return attention


@pytest.mark.parametrize(("temperature", "scale"), [(0.9, 0.9), (0.5, 0.7), (1.3, 1.2)])
def test_logits_are_those_of_a_loop_written_from_the_paper(temperature: float, scale: float) -> None:
    model = tiny_model("llama").double()
    AttentionInterface.register("paper", reading_in_parts(PROMPT, temperature, scale))
    model.set_attn_implementation("paper")
    with torch.no_grad():
        expected = model(flat(PROMPT), position_ids=side_by_side(PROMPT), use_cache=False).logits[0, -3:]
    model.set_attn_implementation("sdpa")
    for backend in ("sdpa", "reference"):
        lm = InvariantModel(model, method=APE(temperature, scale), ordering="given", backend=backend)
        bound = rounding(lm.logits, PROMPT, dtype=torch.float64)
        torch.testing.assert_close(lm.logits(PROMPT), expected.float(), atol=bound, rtol=0)


@settings(deadline=None, max_examples=15)
@given(st.lists(st.integers(0, 6), min_size=0, max_size=4), st.lists(st.integers(0, 6), min_size=0, max_size=4))
def test_several_sets_are_weighed_alike_by_both_backends(first: list[int], second: list[int]) -> None:
    draw = random.Random(repr((first, second)))
    sets = [SegmentSet([[draw.randrange(3, 128) for _ in range(n)] for n in lengths]) for lengths in (first, second)]
    prompt = Prompt.of([3, 4], sets[0], [5], sets[1], [6, 7])
    for method in ("parallel-windows", "structured", "ape"):
        fast, slow = (InvariantModel(_float64(), method=method, backend=each) for each in ("sdpa", "reference"))
        bound = rounding(fast.logits, prompt, dtype=torch.float64)
        torch.testing.assert_close(fast.logits(prompt), slow.logits(prompt), atol=bound, rtol=0)


def _float64() -> PreTrainedModel:
    model: Any = tiny_model("llama", num_hidden_layers=2)
    return model.double()


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mistral (sliding window)", "cohere2"])
@pytest.mark.parametrize("method", ["parallel-windows", "structured", "ape"])
def test_soft_caps_sinks_and_windows_are_kept(family: str, method: str) -> None:
    prompt = random_prompt(random.Random(3), (9, 4, 11, 6))
    model = tiny_model(family)
    fast, slow = (InvariantModel(model, method=method, backend=each) for each in ("sdpa", "reference"))
    bound = rounding(fast.logits, prompt)
    torch.testing.assert_close(fast.logits(prompt), slow.logits(prompt), atol=bound, rtol=0)


@pytest.mark.parametrize("method", ["set-based", "parallel-windows", "structured", "ape"])
def test_positions_go_on_behind_the_longest_segment_while_decoding(method: str) -> None:
    """Beams and a batch of different prompts; by single steps, decoding is compared in the contract."""
    lm = InvariantModel(tiny_model("llama", eos_token_id=None), method=method)
    other = random_prompt(random.Random(5), (7, 7, 2), suffix=2)
    beams = lm.generate([PROMPT, other], max_new_tokens=6, num_beams=3)
    assert [each.token_ids for each in beams] == [
        lm.generate(each, max_new_tokens=6, num_beams=3).token_ids for each in (PROMPT, other)
    ]
    for prompt in (PROMPT, other):
        candidate = [9, 8, 7]
        longer = Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *candidate])
        logprobs = torch.log_softmax(lm.logits(longer), dim=-1)[len(prompt.suffix) - 1 : -1]
        expected = sum(float(logprobs[step, token]) for step, token in enumerate(candidate))
        bound = rounding(lm.score, prompt, [candidate, [3]])
        assert lm.score(prompt, [candidate, [3]])[0] == pytest.approx(expected, abs=bound)


def test_ape_refuses_what_is_not_positive() -> None:
    for bad in ((0.0, 0.9), (0.9, -1.0)):
        with pytest.raises(InvalidChoice, match="above 0"):
            APE(*bad)
