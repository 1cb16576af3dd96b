"""ALiBi: BLOOM, MPT and Falcon against forward passes in float64 that are written here, from the papers."""

from __future__ import annotations

import copy
import math
import random
import threading
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch.nn.functional import gelu, layer_norm, linear
from transformers import AutoConfig, PreTrainedModel

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.attention.hook import override_attention
from invariant_rag.attention.probe import probe
from invariant_rag.ensembles import AttentionSorting, PermutationAverage, RingAverage
from invariant_rag.ensembles.attention_sorting import segment_attention
from invariant_rag.errors import UnsupportedCombination, UnsupportedModel
from invariant_rag.interventions import HiddenScaling, MsPoE
from invariant_rag.methods import METHODS
from invariant_rag.models.loading import context_window
from invariant_rag.testing import MethodContract, random_prompt
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

ALIBI = ("bloom", "mpt", "falcon (ALiBi)")
INLINE = (*ALIBI, "falcon", "gptj", "codegen")
PROMPT = random_prompt(random.Random(0), (3, 4, 1, 2), prefix=3, suffix=3)

Weights = Callable[[int, int, torch.Tensor, torch.Tensor], torch.Tensor]
"""From the index of a head, the index of a query, that query and all keys: the weight of every key."""


@cache
def model_of(family: str, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    return tiny_model(family, eos_token_id=None, num_hidden_layers=2, num_attention_heads=4).to(dtype)


def slopes(heads: int) -> list[float]:
    """The geometric sequence of Press et al., section 3, for a power of two: 2^(-8/n), 2^(-16/n)..."""
    return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]


# The forward passes. Every head attends by `weights`; nothing else mixes tokens.


def logits_of(model: PreTrainedModel, ids: Sequence[int], weights: Weights) -> torch.Tensor:
    forward = {"bloom": _bloom, "mpt": _mpt, "falcon": _falcon}[model.config.model_type]
    with torch.no_grad():
        return forward(model, torch.tensor(ids), weights)


def _mix(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, weights: Weights) -> torch.Tensor:
    """Attention over `[T, H, D]`, one head and one query after the other; fewer heads of keys are shared by all."""
    out = torch.zeros_like(q)
    for head in range(q.shape[1]):
        at = head if k.shape[1] == q.shape[1] else 0
        for query in range(len(q)):
            out[query, head] = weights(head, query, q[:, head], k[:, at]) @ v[:, at]
    return out.flatten(1)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    return layer_norm(x, x.shape[-1:], module.weight, module.bias, module.eps)


def _bloom(model: Any, ids: torch.Tensor, weights: Weights) -> torch.Tensor:
    body = model.transformer
    x = _norm(body.word_embeddings_layernorm, body.word_embeddings.weight[ids])
    for block in body.h:
        qkv = linear(
            _norm(block.input_layernorm, x),
            block.self_attention.query_key_value.weight,
            block.self_attention.query_key_value.bias,
        )
        q, k, v = qkv.reshape(len(ids), 4, 3, -1).unbind(2)
        x = x + block.self_attention.dense(_mix(q, k, v, weights))
        x = x + block.mlp.dense_4h_to_h(
            gelu(block.mlp.dense_h_to_4h(_norm(block.post_attention_layernorm, x)), approximate="tanh")
        )
    return model.lm_head(_norm(body.ln_f, x))


def _mpt(model: Any, ids: torch.Tensor, weights: Weights) -> torch.Tensor:
    body = model.transformer
    x = body.wte.weight[ids]
    for block in body.blocks:
        q, k, v = (each.reshape(len(ids), 4, -1) for each in block.attn.Wqkv(_norm(block.norm_1, x)).chunk(3, -1))
        x = x + block.attn.out_proj(_mix(q, k, v, weights))
        x = x + block.ffn.down_proj(gelu(block.ffn.up_proj(_norm(block.norm_2, x))))
    return model.lm_head(_norm(body.norm_f, x))


def _falcon(model: Any, ids: torch.Tensor, weights: Weights) -> torch.Tensor:
    body = model.transformer
    x = body.word_embeddings.weight[ids]
    for block in body.h:  # attention and MLP read the same input, and the heads share one key and one value
        read = _norm(block.input_layernorm, x)
        qkv = (read @ block.self_attention.query_key_value.weight.T).reshape(len(ids), 6, -1)
        attended = _mix(qkv[:, :4], qkv[:, 4:5], qkv[:, 5:], weights) @ block.self_attention.dense.weight.T
        x = x + attended + gelu(read @ block.mlp.dense_h_to_4h.weight.T) @ block.mlp.dense_4h_to_h.weight.T
    return model.lm_head(_norm(body.ln_f, x))


# What every token sees, and how far away, from the papers' descriptions.


def parts_of(prompt: Prompt) -> tuple[int, list[range], int]:
    """Length of the prefix, tokens of each segment, and length of the whole prompt."""
    start, segments = len(prompt.prefix), []
    for segment in prompt.segments:
        segments.append(range(start, start + len(segment.token_ids or ())))
        start = segments[-1].stop
    return len(prompt.prefix), segments, start + len(prompt.suffix)


def rows_of(method: str, prompt: Prompt, importance: Callable[[int, int, int], float]) -> dict[int, list[int]]:
    """For every token, the keys that it sees, far to near. `importance(query, own, other)` ranks segments for PINE."""
    prefix, segments, length = parts_of(prompt)
    owner = {token: index for index, tokens in enumerate(segments) for token in tokens}
    rows = {}
    for query in range(length):
        own = owner.get(query)
        if query < prefix:
            rows[query] = [*range(query + 1)]
            continue
        order = list(range(len(segments)))
        if own is not None and method == "rotor":
            order = [*order[own + 1 :], *order[: own + 1]]
        elif own is not None and method in ("isolated", "set-based"):
            order = [own]
        elif own is not None and method == "sequential":
            order = order[: own + 1]
        elif method == "pine":
            order.sort(key=lambda other, own=own, query=query: importance(query, -1 if own is None else own, other))
        seen = [token for index in order for token in segments[index] if index != own or token <= query]
        behind = [*range(segments[-1].stop, query + 1)] if own is None else []
        rows[query] = [*range(prefix), *seen, *behind]
    return rows


def distances_of(method: str, prompt: Prompt, row: list[int]) -> list[int]:
    """How far the last token of a row is from each of its keys."""
    prefix, segments, length = parts_of(prompt)
    natural = list(range(length))
    if method == "set-based":  # segments start alike, and the suffix follows the longest
        longest = max(map(len, segments))
        for tokens in segments:
            natural[tokens.start : tokens.stop] = range(prefix, prefix + len(tokens))
        natural[segments[-1].stop :] = range(prefix + longest, prefix + longest + length - segments[-1].stop)
    if method in ("isolated", "set-based", "sequential"):
        return [natural[row[-1]] - natural[key] for key in row]
    return [len(row) - 1 - index for index in range(len(row))]


def weights_of(method: str, prompt: Prompt, heads: int, scaling: float, bias_scale: float = 1.0) -> Weights:
    """Softmax of `q k scaling - slope distance` over the keys of a row; PINE ranks by `q k scaling` alone."""
    _, segments, length = parts_of(prompt)

    def weights(head: int, query: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        def importance(token: int, own: int, other: int) -> float:
            if other == own:
                return math.inf
            tokens = [each for index, part in enumerate(segments) if index != own for each in part]
            readers = [token] if own < 0 else segments[own]
            total = torch.zeros(length, dtype=keys.dtype)
            for reader in readers:
                total[tokens] += torch.softmax(keys[tokens] @ queries[reader] * scaling, 0)
            return float(total[list(segments[other])].mean())

        row = rows_of(method, prompt, importance)[query]
        distance = torch.tensor(distances_of(method, prompt, row), dtype=keys.dtype)
        scores = keys[row] @ queries[query] * scaling - slopes(heads)[head] * bias_scale * distance
        return torch.zeros(length, dtype=keys.dtype).index_put((torch.tensor(row),), torch.softmax(scores, 0))

    return weights


def flat(prompt: Prompt) -> list[int]:
    return [*prompt.prefix, *(token for each in prompt.segments for token in each.token_ids or ()), *prompt.suffix]


def expected(method: str, family: str, prompt: Prompt) -> torch.Tensor:
    model = model_of(family)
    scaling = 1 / math.sqrt(model.config.hidden_size // 4)
    weights = weights_of(method, prompt, 4, scaling, scaling if "falcon" in family else 1.0)
    return logits_of(model, flat(prompt), weights)[-len(prompt.suffix) :]


@pytest.mark.parametrize("family", ALIBI)
def test_the_forward_passes_written_here_are_those_of_the_models(family: str) -> None:
    bound = rounding(plain_logits, model_of(family), PROMPT, dtype=torch.float64)
    plain = plain_logits(model_of(family), PROMPT)
    torch.testing.assert_close(expected("sequential", family, PROMPT).float(), plain, atol=bound, rtol=0)


@pytest.mark.parametrize("method", ["isolated", "set-based", "rotor", "pine"])
@pytest.mark.parametrize("family", ALIBI)
def test_logits_are_those_of_a_float64_forward_pass_from_the_papers(family: str, method: str) -> None:
    exact = expected(method, family, PROMPT).float()
    assert float((exact - expected("sequential", family, PROMPT).float()).abs().max()) > 1e-2
    for backend in ("reference", "sdpa"):
        lm = InvariantModel(model_of(family), method=method, ordering="given", backend=backend)
        torch.testing.assert_close(lm.logits(PROMPT), exact, atol=rounding(lm.logits, PROMPT), rtol=0)


@pytest.mark.parametrize("method", METHODS)
def test_permuting_four_segments_changes_no_bit(method: str) -> None:
    for family in ALIBI:
        if METHODS[method].reads_later_positions:
            continue
        lm = InvariantModel(model_of(family, torch.float32), method=method, ordering="lexical")
        wanted, written = lm.logits(PROMPT), lm.generate(PROMPT, max_new_tokens=3).token_ids
        for order in ([3, 1, 0, 2], [1, 2, 3, 0], [2, 0, 3, 1]):
            shuffled = Prompt(PROMPT.prefix, PROMPT.segments.permuted(order), PROMPT.suffix)
            assert torch.equal(lm.logits(shuffled), wanted)
            assert lm.generate(shuffled, max_new_tokens=3).token_ids == written


class TestRoToRWithBloom(MethodContract):
    method, family = "rotor", "bloom"


class TestSetBasedWithFalcon(MethodContract):
    method, family = "set-based", "falcon (ALiBi)"


class TestAPEWithMPT(MethodContract):
    method, family = "ape", "mpt"


@pytest.mark.parametrize("method", [name for name, each in METHODS.items() if each.reads_later_positions])
def test_a_method_that_reads_later_positions_is_refused_for_alibi(method: str) -> None:
    """The biases of ALiBi are those of keys at some distance before the query."""
    lm = InvariantModel(model_of("bloom", torch.float32))
    with pytest.raises(UnsupportedCombination, match=f"'{method}': bloom has ALiBi"):
        lm.with_method(method)
    with pytest.raises(UnsupportedCombination, match=f"'{method}': mpt has ALiBi"):
        InvariantModel(model_of("mpt", torch.float32), method=method)


def test_no_other_method_has_a_row_with_later_positions() -> None:
    """What `reads_later_positions` says, seen in the arrangements."""
    prompt = Prompt([3, 4], [[5, 6, 7], [8], [9, 10]], [11, 12])
    for name in METHODS:
        lm = InvariantModel(tiny_model("llama"), method=name)
        arrangement: Any = lm.prepare(prompt).arrangement
        at, later = arrangement.positions, False
        for row in getattr(arrangement, "rows", ()):
            for query in range(row.queries.start, row.queries.stop):
                keys = [(key, at[key] + run.shift) for run in row.runs for key in range(run.start, run.stop)]
                hidden = row.queries.stop - 1 - query
                later |= any(position > at[query] for _, position in keys[: len(keys) - hidden])
        assert later == METHODS[name].reads_later_positions, name


@pytest.mark.parametrize("method", ["rotor", "set-based"])
def test_a_warm_cache_scores_and_writes_as_a_cold_one_and_as_none(method: str) -> None:
    for family in ("bloom", "gptj"):
        lm = InvariantModel(model_of(family, torch.float32), method=method)
        cached = lm.with_cache(KeyValueCache())
        wanted = lm.generate(PROMPT, max_new_tokens=4).token_ids
        for _ in range(2):
            assert cached.generate(PROMPT, max_new_tokens=4).token_ids == wanted
            assert cached.score(PROMPT, [[7], [8, 9]]) == pytest.approx(
                lm.score(PROMPT, [[7], [8, 9]]), abs=rounding(lm.score, PROMPT, [[7], [8, 9]])
            )
        assert cached.cache is not None
        assert cached.cache.stats().hits


def test_shared_positions_are_kept_while_decoding_so_guidance_is_refused() -> None:
    """The model's own attention would take indices for positions. RoToR's positions are indices."""
    model = model_of("bloom", torch.float32)
    assert InvariantModel(model).generate(PROMPT, max_new_tokens=2, guidance_scale=1.5).token_ids
    with pytest.raises(UnsupportedCombination, match="guidance_scale"):
        InvariantModel(model, method="set-based").generate(PROMPT, max_new_tokens=2, guidance_scale=1.5)
    alone = InvariantModel(model, method="set-based").generate(
        Prompt(PROMPT.prefix, PROMPT.segments[:1], PROMPT.suffix), max_new_tokens=2, guidance_scale=1.5
    )
    assert alone.token_ids


def test_an_average_over_cuts_needs_rotary_positions() -> None:
    lm = InvariantModel(model_of("mpt", torch.float32))
    with pytest.raises(UnsupportedCombination, match="ALiBi"):
        RingAverage(lm)
    assert PermutationAverage(lm, 2).generate(PROMPT, max_new_tokens=2).token_ids


@pytest.mark.parametrize("family", ["bloom", "mpt", "gptj"])
def test_the_attention_that_segments_are_sorted_by_is_the_models_own(family: str) -> None:
    lm = InvariantModel(model_of(family, torch.float32), method="sequential")
    prepared = lm.prepare(PROMPT)
    with torch.no_grad():
        attentions = lm.model(torch.tensor([prepared.input_ids]), output_attentions=True).attentions
    weights = torch.stack(attentions)[:, 0, :, -1].mean(dim=(0, 1))
    spans = prepared.arrangement.layout.set_spans[0]
    own = [float(weights[span.start : span.stop].mean()) for span in spans]
    assert segment_attention(lm, prepared) == pytest.approx(own, abs=rounding(segment_attention, lm, prepared))
    assert AttentionSorting(lm).generate(PROMPT, max_new_tokens=1).token_ids


@pytest.mark.parametrize("family", INLINE)
def test_interventions_that_change_nothing_are_the_plain_model(family: str) -> None:
    model = model_of(family, torch.float32)
    for intervention in (HiddenScaling(3, 1.0, [0, 1]), MsPoE(1.0, 1.0, first_layer=0)):
        lm = InvariantModel(model, method="sequential", intervention=intervention)
        torch.testing.assert_close(
            lm.logits(PROMPT), plain_logits(model, PROMPT), atol=rounding(lm.logits, PROMPT), rtol=0
        )


def test_scaled_positions_are_a_flatter_slope() -> None:
    """Ms-PoE with one ratio for all heads divides every distance, and so every bias."""
    model = model_of("bloom")
    lm = InvariantModel(model, method="sequential", intervention=MsPoE(1.5, 1.5, first_layer=0))
    flatter = weights_of("sequential", PROMPT, 4, 1 / 4, 1 / 1.5)
    exact = logits_of(model, flat(PROMPT), flatter)[-len(PROMPT.suffix) :].float()
    torch.testing.assert_close(lm.logits(PROMPT), exact, atol=rounding(lm.logits, PROMPT), rtol=0)


def test_scaling_a_hidden_dimension_changes_the_last_token_alone() -> None:
    model = model_of("mpt", torch.float32)
    scaled = InvariantModel(model, method="sequential", intervention=HiddenScaling(3, -1.0, [0, 1]))
    plain, changed = plain_logits(model, PROMPT), scaled.logits(PROMPT)
    torch.testing.assert_close(changed[:-1], plain[:-1], atol=rounding(scaled.logits, PROMPT), rtol=0)
    assert float((changed[-1] - plain[-1]).abs().max()) > 1e-3


@pytest.mark.parametrize("family", INLINE)
def test_other_threads_get_the_models_own_attention_meanwhile(family: str) -> None:
    model, ids = model_of(family, torch.float32), torch.tensor([flat(PROMPT)])
    results: list[torch.Tensor] = []

    def plain() -> None:
        with torch.no_grad():
            results.append(model(ids).logits)

    plain()
    before = [dict(vars(module)) for module in model.modules()]
    with override_attention(model, lambda inputs: torch.zeros_like(inputs.queries.transpose(1, 2))):
        thread = threading.Thread(target=plain)
        thread.start()
        thread.join()
        plain()
    plain()
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2]), "the thread inside the block must get the other attention"
    assert torch.equal(results[0], results[3])
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]


def test_a_forward_pass_that_accelerate_replaced_is_put_back() -> None:
    model = tiny_model("bloom", num_hidden_layers=1)
    module: Any = model.transformer.h[0].self_attention
    own = module.forward
    module.forward = partial(own)
    replaced, wanted = module.forward, plain_logits(model, PROMPT)
    lm = InvariantModel(model, ordering="given")
    what = "in RoToR's first layer, the suffix reads as in the plain model"
    torch.testing.assert_close(lm.logits(PROMPT), wanted, atol=rounding(lm.logits, PROMPT), rtol=0, msg=what)
    assert module.forward is replaced


def test_falcon_with_eager_attention_adds_its_biases_twice_and_is_refused() -> None:
    """In transformers, the eager code adds the biases to the scores and once more with the mask."""
    model = tiny_model("falcon (ALiBi)")
    model.config._attn_implementation = "eager"
    with pytest.raises(UnsupportedModel, match="does not reproduce the model's own logits"):
        probe(model)


def test_biases_that_are_no_line_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("mpt")
    body: Any = model.transformer
    own = body.build_mpt_alibi_tensor
    monkeypatch.setattr(body, "build_mpt_alibi_tensor", lambda *args, **kwargs: own(*args, **kwargs) ** 2)
    with pytest.raises(UnsupportedModel, match="mpt: layer 0 adds biases"):
        probe(model)


def test_half_precision_costs_no_more_than_in_the_model_itself() -> None:
    """Positions beyond 256 do not fit into bfloat16, in which BLOOM itself keeps its biases."""
    prompt = random_prompt(random.Random(0), (150, 150), prefix=2, suffix=2)
    half = tiny_model("bloom", num_hidden_layers=1).to(torch.bfloat16)
    double = copy.deepcopy(half).double()
    cost = float((plain_logits(half, prompt) - plain_logits(double, prompt)).abs().max())
    for method in ("rotor", "pine", "set-based"):
        exact = InvariantModel(double, method=method).logits(prompt)
        assert float((InvariantModel(half, method=method).logits(prompt) - exact).abs().max()) <= cost


def test_mpt_has_a_context_window_and_bloom_has_none() -> None:
    """MPT builds its biases for `max_seq_len` keys."""
    windows = {name: context_window(AutoConfig.for_model(name)) for name in ("mpt", "bloom")}
    assert windows == {"mpt": 2048, "bloom": None}
