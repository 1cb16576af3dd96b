"""ALiBi in BLOOM, MPT and Falcon, and attention in a module's own code: what is refused, put back or combined.

`test_families` holds the other laws for these families, and `tests/oracle` computes their logits.
"""

import copy
import random
from functools import cache, partial

import pytest
import torch
from transformers import AutoConfig

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.attention.hook import override_attention
from invariant_rag.attention.probe import probe
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import UnsupportedCombination, UnsupportedModel
from invariant_rag.methods import METHODS
from invariant_rag.models.loading import context_window
from invariant_rag.testing import random_prompt
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.families import tiny_model
from tests.comparing import assert_computes, gap, in_a_thread

INLINE = ("bloom", "mpt", "falcon (ALiBi)", "falcon", "gptj", "codegen")
PROMPT = random_prompt(random.Random(0), (3, 4, 1, 2), prefix=3, suffix=3)


@cache
def model_of(family):
    return tiny_model(family, eos_token_id=None, num_hidden_layers=2)


def test_methods_that_read_later_positions_are_refused_for_alibi_and_only_these_have_such_rows():
    """The biases of ALiBi are those of keys at some distance before the query."""
    for name, method in METHODS.items():
        arrangement = InvariantModel(model_of("gptj"), method=name).prepare(PROMPT).arrangement
        at, later = arrangement.positions, False
        for row in arrangement.rows:
            for query in range(row.queries.start, row.queries.stop):
                keys = [at[key] + run.shift for run in row.runs for key in range(run.start, run.stop)]
                later |= any(position > at[query] for position in keys[: len(keys) + query + 1 - row.queries.stop])
        assert later == method.reads_later_positions, name
        if later:
            with pytest.raises(UnsupportedCombination, match=f"'{name}': mpt has ALiBi"):
                InvariantModel(model_of("mpt"), method=name)
            with pytest.raises(UnsupportedCombination, match=f"'{name}': bloom has ALiBi"):
                InvariantModel(model_of("bloom")).with_method(name)


@pytest.mark.parametrize(("family", "method"), [("bloom", "set-based"), ("gptj", "rotor")])
def test_a_warm_cache_scores_and_writes_as_a_cold_one_and_as_none(family, method):
    lm = InvariantModel(model_of(family), method=method)
    cached = lm.with_cache(KeyValueCache())
    for _ in range(2):
        assert cached.generate(PROMPT, max_new_tokens=4).token_ids == lm.generate(PROMPT, max_new_tokens=4).token_ids
        assert_computes(cached.score(PROMPT, [[7], [8, 9]]), lm.score, PROMPT, [[7], [8, 9]])
    assert cached.cache is not None
    assert cached.cache.stats().hits


def test_shared_positions_are_kept_while_decoding_so_guidance_is_refused_and_cuts_need_rotary_ones():
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


@pytest.mark.parametrize("family", INLINE)
def test_other_threads_get_the_models_own_attention_meanwhile(family):
    model, ids = model_of(family), torch.tensor([range(3, 16)])

    def plain():
        return model(ids).logits.detach()

    expected, before = plain(), [dict(vars(module)) for module in model.modules()]
    with override_attention(model, lambda inputs: torch.zeros_like(inputs.queries.transpose(1, 2))):
        assert torch.equal(in_a_thread(plain), expected)
        assert not torch.equal(plain(), expected), "the thread inside the block must get the other attention"
    assert torch.equal(plain(), expected)
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]


def test_a_forward_pass_that_accelerate_replaced_is_put_back():
    model = tiny_model("bloom", num_hidden_layers=1)
    module = model.transformer.h[0].self_attention
    module.forward = replaced = partial(module.forward)
    wanted = plain_logits(model, PROMPT)  # in RoToR's first layer, the suffix reads as in the plain model
    assert_computes(wanted, InvariantModel(model, ordering="given").logits, PROMPT)
    assert module.forward is replaced


def test_biases_that_are_no_line_or_are_added_twice_are_refused(monkeypatch):
    model = tiny_model("falcon (ALiBi)")
    model.config._attn_implementation = "eager"  # adds the biases to the scores and once more with the mask
    with pytest.raises(UnsupportedModel, match="does not reproduce the model's own logits"):
        probe(model)
    model = tiny_model("mpt")
    own = model.transformer.build_mpt_alibi_tensor
    monkeypatch.setattr(model.transformer, "build_mpt_alibi_tensor", lambda *args, **kw: own(*args, **kw) ** 2)
    with pytest.raises(UnsupportedModel, match="mpt: layer 0 adds biases"):
        probe(model)


def test_half_precision_costs_no_more_than_in_the_model_itself():
    """Positions beyond 256 do not fit into bfloat16, in which BLOOM itself keeps its biases."""
    prompt = random_prompt(random.Random(0), (150, 150), prefix=2, suffix=2)
    half = tiny_model("bloom", num_hidden_layers=1).to(torch.bfloat16)
    double = copy.deepcopy(half).double()
    cost = gap(plain_logits(half, prompt), plain_logits(double, prompt))
    for method in ("rotor", "pine", "set-based"):
        one, exact = (InvariantModel(each, method=method).logits(prompt) for each in (half, double))
        assert gap(one, exact) <= cost


def test_mpt_has_a_context_window_and_bloom_has_none():
    """MPT builds its biases for `max_seq_len` keys."""
    windows = {name: context_window(AutoConfig.for_model(name)) for name in ("mpt", "bloom")}
    assert windows == {"mpt": 2048, "bloom": None}
