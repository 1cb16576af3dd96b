"""Every family of the table: refused with a reason, or held to the laws on a tiny model."""

import random
from functools import cache

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from invariant_rag import InvariantModel, Prompt
from invariant_rag.attention.probe import check_config, probe
from invariant_rag.errors import InvariantRAGError, UnsupportedModel
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.families import FAMILIES, FamilyReport, probe_families, tiny_model
from tests.comparing import assert_computes

REFUSED = ("diffllama", "xglm", "mamba", "qwen3_next", "lfm2")
SUPPORTED = tuple(family for family in FAMILIES if family not in REFUSED)
ALIBI = ("bloom", "mpt", "falcon (ALiBi)")
ROUTED = ("gpt_oss", "mixtral", "qwen3_moe")  # a router of random weights chooses experts by their last bits
OTHERS = [name for name in METHODS if name not in ("sequential", "rotor", "pine")]


def methods_for(family):
    """RoToR or PINE, and one of the other methods in turn, so that each of them meets every kind of attention.

    PINE in place reads keys at later positions, for which ALiBi has no biases. `tests/oracle` has more pairs.
    """
    others = [name for name in OTHERS if not (family in ALIBI and METHODS[name].reads_later_positions)]
    turn = SUPPORTED.index(family)
    return ("pine", "rotor")[turn % 2], others[turn // 2 % len(others)]


@cache
def _model(family, dtype=torch.float32):
    model = tiny_model(family, eos_token_id=None)
    if model.config._experts_implementation == "grouped_mm":
        model.set_experts_implementation("eager")  # the grouped one has no float64
    return model.to(dtype)


def _prompt(family, seed=0):
    """A prompt longer than the sliding windows (16), and for dynamic scaling longer than the trained length (64)."""
    lengths = (30, 4, 31) if "dynamic" in family else (9, 2, 11)
    return random_prompt(random.Random(seed), lengths, suffix=5)


@pytest.mark.parametrize("family", SUPPORTED)
def test_permutations_change_no_bit(family):
    """Half of the families in bfloat16."""
    prompt, halved = _prompt(family), SUPPORTED.index(family) // 2 % 2 and family not in ROUTED
    for method in methods_for(family):
        lm = InvariantModel(_model(family, torch.bfloat16 if halved else torch.float32), method=method)
        logits, written = lm.logits(prompt), lm.generate(prompt, max_new_tokens=2).logprobs
        for order in ([2, 0, 1], [1, 2, 0]):
            shuffled = prompt.with_sets([prompt.segments.permuted(order)])
            assert torch.equal(lm.logits(shuffled), logits)
        assert lm.generate(shuffled, max_new_tokens=2).logprobs == written


@pytest.mark.parametrize("family", SUPPORTED)
def test_one_segment_or_none_and_sequential_are_the_untouched_model(family):
    model, prompt = _model(family), _prompt(family)
    before = plain_logits(model, prompt)
    for segments in ([], prompt.segments[:1]):
        single = Prompt(prompt.prefix, segments, prompt.suffix)
        for method in methods_for(family):
            assert torch.equal(InvariantModel(model, method=method).logits(single), plain_logits(model, single))
    assert torch.equal(InvariantModel(model, method="sequential").logits(prompt), before)
    InvariantModel(model).generate(prompt, max_new_tokens=2)
    assert torch.equal(plain_logits(model, prompt), before), "the model must be as it was"


@pytest.mark.parametrize("family", SUPPORTED)
def test_sdpa_agrees_with_the_reference(family):
    """The slow backend computes in float64, and the bound is what float32 may cost in sums of that size."""
    prompt, method = _prompt(family), methods_for(family)[SUPPORTED.index(family) // 4 % 2]
    exact = InvariantModel(_model(family, torch.float64), method=method, backend="reference").logits(prompt)
    assert_computes(exact, InvariantModel(_model(family), method=method, backend="sdpa").logits, prompt)


@pytest.mark.parametrize("family", [family for family in SUPPORTED if "dynamic" not in family])
def test_decoding_equals_recomputing_for_sixteen_tokens(family):
    """Not for dynamic scaling beyond the trained length, where transformers changes frequencies while decoding."""
    prompt = _prompt(family)
    for method in methods_for(family):
        lm = InvariantModel(_model(family), method=method)
        written = lm.generate(prompt, max_new_tokens=16).token_ids
        again = lm.logits(Prompt(prompt.prefix, prompt.segments, [*map(int, prompt.suffix), *written[:-1]]))
        assert tuple(again[len(prompt.suffix) - 1 :].argmax(dim=-1).tolist()) == written


def test_dynamic_scaling_remembers_no_earlier_prompt():
    """A prompt beyond the trained length must not change the answer to a short one, nor the plain model's memory."""
    model = tiny_model("llama (dynamic scaling)", eos_token_id=None)
    lm, short = InvariantModel(model), random_prompt(random.Random(1), (3, 4, 2))
    before = lm.logits(short)
    lm.generate(_prompt("llama (dynamic scaling)"), max_new_tokens=4)
    assert torch.equal(lm.logits(short), before)
    assert model.model.rotary_emb.max_seq_len_cached == 64


# --- what is refused ---


@pytest.mark.parametrize("family", REFUSED)
def test_a_model_that_cannot_be_arranged_is_refused_by_name_and_reason(family):
    with pytest.raises(UnsupportedModel, match=family) as caught:
        InvariantModel(tiny_model(family))
    assert isinstance(caught.value, InvariantRAGError)
    assert "invariant-rag models" in caught.value.hint


LEARNED = {"gpt2": {"n_embd": 32, "n_head": 2, "n_layer": 2}, "opt": {"hidden_size": 32, "word_embed_proj_dim": 32}}


@pytest.mark.parametrize("family", LEARNED)
def test_learned_positions_are_refused(family):
    sizes = {"vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, **LEARNED[family]}
    with pytest.raises(UnsupportedModel):
        probe(AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes)).eval())


def test_tokens_that_meet_outside_of_attention_are_refused(monkeypatch):
    model = tiny_model("llama", num_hidden_layers=2)
    own = model.model.layers[0].mlp.forward
    monkeypatch.setattr(model.model.layers[0].mlp, "forward", lambda states: own(states) + own(states).roll(1, dims=1))
    with pytest.raises(UnsupportedModel, match="influence later ones outside of attention"):
        probe(model)


def test_a_configuration_alone_refuses_in_the_words_of_the_probe_and_nothing_that_the_probe_accepts():
    reports = {report.family: report for report in probe_families()}
    refused = {}
    for family in FAMILIES:
        try:
            check_config(tiny_model(family).config)
        except UnsupportedModel as error:
            refused[family] = str(error)
    assert refused.keys() == {*REFUSED} - {"diffllama"}, "whose attention is called twice, which only a pass shows"
    assert refused == {family: reports[family].detail for family in refused}


def test_a_refused_configuration_costs_no_weights(tmp_path):
    tiny_model("mamba").config.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="mamba: its forward pass takes no position_ids"):
        InvariantModel.from_pretrained(tmp_path)  # a folder without weights


def test_the_table_is_what_the_probe_says():
    reports = list(probe_families())
    assert all(isinstance(report, FamilyReport) for report in reports)
    assert [report.family for report in reports if report.supported] == list(SUPPORTED)
    interleaved = {report.family for report in reports if "interleaved" in report.detail}
    assert interleaved == {"glm4", "cohere", "cohere2", "helium", "ernie4_5", "gptj", "codegen"}
    assert all(each.interleaved for each in probe(_model("glm4", torch.bfloat16)))  # also in half precision
