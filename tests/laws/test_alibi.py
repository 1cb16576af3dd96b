"""ALiBi in BLOOM, MPT and Falcon, and attention in a module's own code: what is refused, put back or combined.

`test_families` holds the other laws for these families; `tests/oracle` computes their logits.
"""

from __future__ import annotations

import copy
import random
import threading
from functools import cache, partial
from typing import Any

import pytest
import torch
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
from invariant_rag.testing import random_prompt
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

INLINE = ("bloom", "mpt", "falcon (ALiBi)", "falcon", "gptj", "codegen")
PROMPT = random_prompt(random.Random(0), (3, 4, 1, 2), prefix=3, suffix=3)


@cache
def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family, eos_token_id=None, num_hidden_layers=2)


def test_methods_that_read_later_positions_are_refused_for_alibi_and_only_these_have_such_rows() -> None:
    """The biases of ALiBi are those of keys at some distance before the query."""
    prompt = Prompt([3, 4], [[5, 6, 7], [8], [9, 10]], [11, 12])
    for name, method in METHODS.items():
        arrangement = InvariantModel(tiny_model("llama"), method=name).prepare(prompt).arrangement
        at, later = arrangement.positions, False
        for row in arrangement.rows:
            for query in range(row.queries.start, row.queries.stop):
                keys = [(key, at[key] + run.shift) for run in row.runs for key in range(run.start, run.stop)]
                hidden = row.queries.stop - 1 - query
                later |= any(position > at[query] for _, position in keys[: len(keys) - hidden])
        assert later == method.reads_later_positions, name
        if later:
            with pytest.raises(UnsupportedCombination, match=f"'{name}': mpt has ALiBi"):
                InvariantModel(model_of("mpt"), method=name)
            with pytest.raises(UnsupportedCombination, match=f"'{name}': bloom has ALiBi"):
                InvariantModel(model_of("bloom")).with_method(name)


@pytest.mark.parametrize(("family", "method"), [("bloom", "set-based"), ("gptj", "rotor")])
def test_a_warm_cache_scores_and_writes_as_a_cold_one_and_as_none(family: str, method: str) -> None:
    lm = InvariantModel(model_of(family), method=method)
    cached = lm.with_cache(KeyValueCache())
    wanted, bound = lm.generate(PROMPT, max_new_tokens=4).token_ids, rounding(lm.score, PROMPT, [[7], [8, 9]])
    for _ in range(2):
        assert cached.generate(PROMPT, max_new_tokens=4).token_ids == wanted
        assert cached.score(PROMPT, [[7], [8, 9]]) == pytest.approx(lm.score(PROMPT, [[7], [8, 9]]), abs=bound)
    assert cached.cache is not None
    assert cached.cache.stats().hits


def test_shared_positions_are_kept_while_decoding_so_guidance_is_refused_and_cuts_need_rotary_ones() -> None:
    """The model's own attention would take indices for positions. RoToR's positions, and one segment's, are indices."""
    model, options = model_of("bloom"), {"max_new_tokens": 2, "guidance_scale": 1.5}
    assert InvariantModel(model).generate(PROMPT, **options).token_ids
    with pytest.raises(UnsupportedCombination, match="guidance_scale"):
        InvariantModel(model, method="set-based").generate(PROMPT, **options)
    alone = Prompt(PROMPT.prefix, PROMPT.segments[:1], PROMPT.suffix)
    assert InvariantModel(model, method="set-based").generate(alone, **options).token_ids
    with pytest.raises(UnsupportedCombination, match="ALiBi"):
        RingAverage(InvariantModel(model_of("mpt")))
    assert PermutationAverage(InvariantModel(model_of("mpt")), 2).generate(PROMPT, max_new_tokens=2).token_ids


@pytest.mark.parametrize("family", ["bloom", "gptj"])
def test_the_attention_that_segments_are_sorted_by_is_the_models_own(family: str) -> None:
    model = model_of(family)
    if model._can_set_attn_implementation():
        model.set_attn_implementation("eager")  # others give no attention weights
    lm = InvariantModel(model, method="sequential")
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
    model = model_of(family)
    for intervention in (HiddenScaling(3, 1.0, [0, 1]), MsPoE(1.0, 1.0, first_layer=0)):
        lm = InvariantModel(model, method="sequential", intervention=intervention)
        bound = rounding(lm.logits, PROMPT)
        torch.testing.assert_close(lm.logits(PROMPT), plain_logits(model, PROMPT), atol=bound, rtol=0)


def test_interventions_at_work_flatten_slopes_and_change_the_last_token_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ms-PoE with one ratio for all heads divides every distance, and so every bias."""
    model: Any = tiny_model("mpt", num_hidden_layers=2)
    lm = InvariantModel(model, method="sequential", intervention=MsPoE(1.5, 1.5, first_layer=0))
    found, plain, body = lm.logits(PROMPT), plain_logits(model, PROMPT), model.transformer
    own, bound = body.build_mpt_alibi_tensor, rounding(lm.logits, PROMPT)
    changed = lm.with_method(intervention=HiddenScaling(3, -1.0, [0, 1])).logits(PROMPT)
    torch.testing.assert_close(changed[:-1], plain[:-1], atol=bound, rtol=0)
    assert float((changed[-1] - plain[-1]).abs().max()) > 1e-3
    monkeypatch.setattr(body, "build_mpt_alibi_tensor", lambda *args, **kwargs: own(*args, **kwargs) / 1.5)
    torch.testing.assert_close(found, plain_logits(model, PROMPT), atol=bound, rtol=0)


@pytest.mark.parametrize("family", INLINE)
def test_other_threads_get_the_models_own_attention_meanwhile(family: str) -> None:
    model, ids, results = model_of(family), torch.tensor([range(3, 16)]), list[torch.Tensor]()

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
    module.forward = partial(module.forward)
    replaced, wanted = module.forward, plain_logits(model, PROMPT)
    lm = InvariantModel(model, ordering="given")
    what = "in RoToR's first layer, the suffix reads as in the plain model"
    torch.testing.assert_close(lm.logits(PROMPT), wanted, atol=rounding(lm.logits, PROMPT), rtol=0, msg=what)
    assert module.forward is replaced


def test_biases_that_are_no_line_or_are_added_twice_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("falcon (ALiBi)")
    model.config._attn_implementation = "eager"  # adds the biases to the scores and once more with the mask
    with pytest.raises(UnsupportedModel, match="does not reproduce the model's own logits"):
        probe(model)
    model = tiny_model("mpt")
    own = model.transformer.build_mpt_alibi_tensor
    monkeypatch.setattr(model.transformer, "build_mpt_alibi_tensor", lambda *args, **kw: own(*args, **kw) ** 2)
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
