"""Every family of the table: refused with a reason, or held to the laws on a tiny model.

ALiBi (BLOOM, MPT, Falcon) and attention in a module's own code: what is refused, put back or combined. `tests/oracle`
computes their logits.
"""

import copy
import random
from functools import cache, partial

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.attention.hook import active_attention, override_attention
from invariant_rag.attention.probe import check_config, probe
from invariant_rag.ensembles import PermutationAverage, RingAverage
from invariant_rag.errors import InvariantRAGError, UnsupportedCombination, UnsupportedModel
from invariant_rag.methods import METHODS
from invariant_rag.models.loading import context_window
from invariant_rag.testing import random_prompt
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.families import FAMILIES, FamilyReport, probe_families, tiny_model
from tests.comparing import assert_computes, gap, in_a_thread, orders_of

REFUSED = ("diffllama", "xglm", "mamba", "qwen3_next", "lfm2")
SUPPORTED = tuple(family for family in FAMILIES if family not in REFUSED)
ALIBI = ("bloom", "mpt", "falcon (ALiBi)")
INLINE = (*ALIBI, "falcon", "gptj", "codegen")
ROUTED = ("gpt_oss", "mixtral", "qwen3_moe")  # a router of random weights chooses experts by their last bits
OTHERS = [name for name in METHODS if name not in ("sequential", "rotor", "pine")]
of_families = pytest.mark.parametrize("family", SUPPORTED)


def methods_for(family):
    """RoToR or PINE, and one of the other methods in turn, so that each of them meets every kind of attention.

    PINE in place reads keys at later positions, for which ALiBi has no biases. `tests/oracle` has more pairs.
    """
    others = [name for name in OTHERS if not (family in ALIBI and METHODS[name].attends_to_later_positions)]
    turn = SUPPORTED.index(family)
    return ("pine", "rotor")[turn % 2], others[turn // 2 % len(others)]


@cache
def model_of(family, dtype=torch.float32):
    model = tiny_model(family, eos_token_id=None)
    if model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.to(dtype)


def prompt_for(family):
    """A prompt longer than the sliding windows (16), and for dynamic scaling longer than the trained length (64)."""
    return random_prompt(random.Random(0), (30, 4, 31) if "dynamic" in family else (9, 2, 11), suffix=5)


PROMPT = prompt_for("llama")


@of_families
def test_permutations_change_no_bit(family):
    """Half of the families in bfloat16."""
    halved = SUPPORTED.index(family) // 2 % 2 and family not in ROUTED
    for method in methods_for(family):
        lm = InvariantModel(model_of(family, torch.bfloat16 if halved else torch.float32), method=method)
        one, *others = orders_of(prompt_for(family), 2)
        assert all(torch.equal(lm.logits(other), lm.logits(one)) for other in others)
        written, again = (lm.generate(each, max_new_tokens=2).logprobs for each in (one, others[-1]))
        assert written == again


@of_families
def test_one_segment_or_none_and_sequential_are_the_untouched_model(family):
    model, prompt = model_of(family), prompt_for(family)
    before = plain_logits(model, prompt)
    for segments in ([], prompt.segments[:1]):
        single = Prompt(prompt.prefix, segments, prompt.suffix)
        for method in methods_for(family):
            assert torch.equal(InvariantModel(model, method=method).logits(single), plain_logits(model, single))
    assert torch.equal(InvariantModel(model, method="sequential").logits(prompt), before)
    InvariantModel(model).generate(prompt, max_new_tokens=2)
    assert torch.equal(plain_logits(model, prompt), before), "the model must be as it was"


@of_families
def test_sdpa_agrees_with_the_reference(family):
    """The slow backend computes in float64, and the bound is what float32 may cost in sums of that size."""
    prompt, method = prompt_for(family), methods_for(family)[SUPPORTED.index(family) // 4 % 2]
    exact = InvariantModel(model_of(family, torch.float64), method=method, backend="reference").logits(prompt)
    assert_computes(exact, InvariantModel(model_of(family), method=method, backend="sdpa").logits, prompt)


@pytest.mark.parametrize("family", [family for family in SUPPORTED if "dynamic" not in family])
def test_decoding_equals_recomputing_for_sixteen_tokens(family):
    """Also from a cold and a warm cache, where attention is in the module's own code.

    Not for dynamic scaling beyond the trained length, where transformers changes frequencies while decoding.
    """
    prompt = prompt_for(family)
    for method in methods_for(family):
        lm = InvariantModel(model_of(family), method=method)
        written = lm.generate(prompt, max_new_tokens=16).token_ids
        again = lm.logits(Prompt(prompt.prefix, prompt.segments, [*map(int, prompt.suffix), *written[:-1]]))
        assert tuple(again[len(prompt.suffix) - 1 :].argmax(dim=-1).tolist()) == written
        cached = lm.with_cache(KeyValueCache())
        for _ in range(2 if family in INLINE else 0):
            assert cached.generate(prompt, max_new_tokens=4).token_ids == written[:4]
            assert_computes(cached.score(prompt, [[7], [8, 9]]), lm.score, prompt, [[7], [8, 9]])
        assert bool(cached.cache.stats().hits) == (family in INLINE)


# --- what is refused ---

LEARNED = {"gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2}, "opt": {"hidden_size": 32, "word_embed_proj_dim": 32}}
"""Families whose positions are learned."""


@pytest.mark.parametrize("family", [*REFUSED, *LEARNED])
def test_a_model_that_cannot_be_arranged_is_refused_by_name_and_reason(family):
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **LEARNED.get(family, {})}
    config = tiny_model(family).config if family in REFUSED else AutoConfig.for_model(family, **sizes)
    with pytest.raises(UnsupportedModel, match=family) as caught:
        InvariantModel(AutoModelForCausalLM.from_config(config).eval())
    assert isinstance(caught.value, InvariantRAGError)
    assert "invariant-rag models" in caught.value.hint


def test_tokens_that_meet_outside_of_attention_and_biases_that_are_no_line_are_refused():
    llama, mpt, falcon = map(tiny_model, ("llama", "mpt", "falcon (ALiBi)"))
    llama.model.layers[0].mlp.register_forward_hook(lambda _module, _inputs, out: out + out.roll(1, dims=1))
    own = mpt.transformer.build_mpt_alibi_tensor
    mpt.transformer.build_mpt_alibi_tensor = lambda *args, **options: own(*args, **options) ** 2
    falcon.config._attn_implementation = "eager"  # adds the biases to the scores and once more with the mask
    for model, reason in (
        (llama, "influence later ones outside of attention"),
        (mpt, "mpt: layer 0 adds biases"),
        (falcon, "does not reproduce the model's own logits"),
    ):
        with pytest.raises(UnsupportedModel, match=reason):
            probe(model)


def test_the_table_is_what_the_probe_says_and_a_configuration_alone_refuses_in_its_words(tmp_path):
    reports = {report.family: report for report in probe_families()}
    assert all(isinstance(report, FamilyReport) for report in reports.values())
    assert [family for family, report in reports.items() if report.supported] == list(SUPPORTED)
    interleaved = {family for family, report in reports.items() if "interleaved" in report.detail}
    assert interleaved == {"glm4", "cohere", "cohere2", "helium", "ernie4_5", "gptj", "codegen"}
    assert all(each.interleaved for each in probe(model_of("glm4", torch.bfloat16)))  # also in half precision
    refused = {}
    for family in FAMILIES:
        try:
            check_config(tiny_model(family).config)
        except UnsupportedModel as error:
            refused[family] = str(error)
    assert refused.keys() == {*REFUSED} - {"diffllama"}, "whose attention is called twice, which only a pass shows"
    assert refused == {family: reports[family].detail for family in refused}
    windows = {name: context_window(AutoConfig.for_model(name)) for name in ("mpt", "bloom")}
    assert windows == {"mpt": 2048, "bloom": None}, "MPT builds its biases for `max_seq_len` keys"
    tiny_model("mamba").config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="mamba: its forward pass takes no position_ids"):
        InvariantModel.from_pretrained(tmp_path)  # a folder without weights


# --- ALiBi, and attention in a module's own code ---


def test_methods_that_read_later_positions_are_refused_for_alibi_and_only_these_have_such_rows():
    """The biases of ALiBi are those of keys at some distance before the query."""
    for name, method in METHODS.items():
        arrangement = InvariantModel(model_of("gptj"), method=name).prepare(PROMPT).arrangement
        at, later = arrangement.positions, False
        for row in arrangement.rows:
            for query in range(row.queries.start, row.queries.stop):
                keys = [at[key] + run.shift for run in row.runs for key in range(run.start, run.stop)]
                later |= any(position > at[query] for position in keys[: len(keys) + query + 1 - row.queries.stop])
        assert later == method.attends_to_later_positions, name
        if later:
            with pytest.raises(UnsupportedCombination, match=f"'{name}': mpt has ALiBi"):
                InvariantModel(model_of("mpt"), method=name)
            with pytest.raises(UnsupportedCombination, match=f"'{name}': bloom has ALiBi"):
                InvariantModel(model_of("bloom")).with_method(name)


def test_shared_positions_are_kept_while_decoding_so_guidance_is_refused_and_cuts_need_rotary_ones():
    """The model's own attention would take indices for positions. RoToR's positions, and one segment's, are indices."""
    model, options = model_of("bloom"), {"max_new_tokens": 2, "guidance_scale": 1.5}
    assert InvariantModel(model).generate(PROMPT, **options).token_ids
    shared = InvariantModel(model, method="set-based")
    with pytest.raises(UnsupportedCombination, match="guidance_scale"):
        shared.generate(PROMPT, **options)
    assert shared.generate(Prompt(PROMPT.prefix, PROMPT.segments[:1], PROMPT.suffix), **options).token_ids
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
    with pytest.raises(KeyError, match="inside"), override_attention(model, lambda inputs: {}["inside"]):
        plain()
    assert active_attention() is None, "a failure leaves the model and the thread as they were"
    assert torch.equal(plain(), expected)
    assert [vars(module).keys() for module in model.modules()] == [each.keys() for each in before]


def test_a_forward_pass_that_accelerate_replaced_is_put_back():
    model = tiny_model("bloom", num_hidden_layers=1)
    module = model.transformer.h[0].self_attention
    module.forward = replaced = partial(module.forward)
    wanted = plain_logits(model, PROMPT)  # in RoToR's first layer, the suffix reads as in the plain model
    assert_computes(wanted, InvariantModel(model, ordering="given").logits, PROMPT)
    assert module.forward is replaced


def test_half_precision_costs_no_more_than_in_the_model_itself():
    """Positions beyond 256 do not fit into bfloat16, in which BLOOM itself keeps its biases."""
    prompt = random_prompt(random.Random(0), (150, 150), prefix=2, suffix=2)
    half = tiny_model("bloom", num_hidden_layers=1).to(torch.bfloat16)
    double = copy.deepcopy(half).double()
    cost = gap(plain_logits(half, prompt), plain_logits(double, prompt))
    for method in ("rotor", "pine", "set-based"):
        one, exact = (InvariantModel(each, method=method).logits(prompt) for each in (half, double))
        assert gap(one, exact) <= cost
