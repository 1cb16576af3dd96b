"""Hidden scaling and Ms-PoE: the published logits, an oracle written from the papers, the laws, and what is refused."""

import itertools
import json
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.interventions import INTERVENTIONS, HiddenScaling, MsPoE
from invariant_rag.interventions.hidden_scaling import PUBLISHED
from invariant_rag.interventions.ms_poe import rank_heads
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.rounding import rounding
from tests.comparing import another_thread_at, assert_computes, gap, orders_of
from tests.oracle.attention import float64_throughout, layer_of, logits_with
from tests.oracle.methods import METHODS as ROWS
from tests.oracle.methods import Row, World
from tests.oracle.test_oracle import build

GOLDEN = Path(__file__).parents[1] / "golden"
AT_WORK = (HiddenScaling((5, 40), -1, range(1, 4)), MsPoE())
PROMPTS = [random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(9, 2, 11), (3, 4), (5, 1, 3)])]


@cache
def model_of(family):
    return tiny_model(family, eos_token_id=None)


@pytest.fixture(params=AT_WORK, ids=lambda intervention: intervention.name)
def lm(request):
    return InvariantModel(model_of("llama"), method="sequential", intervention=request.param)


def plain_of(lm):
    """The model without the intervention, for bounds: Ms-PoE ranks heads, and rounding makes no bound of ranks."""
    return lm.with_method("sequential")


# --- the published code ---

FILES = ("hidden_scaling", "hidden_scaling_settings")
RUNS = {name: json.loads((GOLDEN / f"{name}.json").read_text()) for name in FILES}
ENTRIES = [(name, entry) for name, runs in RUNS.items() for entry in runs["entries"]]


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[f"{each['case']}-{each['method']}" for _, each in ENTRIES])
def test_logits_and_greedy_tokens_equal_the_published_code(name, entry, golden_model):
    """Also with its settings last_recompute_tokens, change_value and skip_first; all tokens are its number then."""
    case, config = RUNS["hidden_scaling"]["cases"][entry["case"]], RUNS[name]["configs"][entry["method"]]
    settings = {}
    if name == "hidden_scaling_settings":
        last = None if entry["method"] == "hs_all" else config["last_recompute_tokens"]
        settings = {"last_tokens": last, "skip_first": config["skip_first"], "scale_values": config["change_value"]}
    scaling = HiddenScaling(config["dims"], config["factor"], config["layers"], **settings)
    lm = InvariantModel(golden_model, method="sequential", intervention=scaling)
    prompt = Prompt(case["prefix"], case["segs"], case["suffix"])
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        key = f"{entry['model']}/{entry['case']}/{entry['method']}"
        expected, greedy = torch.from_numpy(arrays[f"{key}/suffix_logits"]), arrays[f"{key}/greedy"].tolist()
    assert_computes(expected, lm.logits, prompt)
    if not scaling.skip_first:  # that code does not scale generated tokens then
        assert lm.generate(prompt, max_new_tokens=8).token_ids == tuple(greedy)


@pytest.mark.parametrize(
    ("seed", "ranked"),
    [(1, [1, 7, 3, 5, 2, 4, 0, 6]), (7, [7, 0, 3, 1, 6, 5, 4, 2]), (20, [4, 0, 1, 6, 7, 2, 3, 5])],
)
def test_heads_are_ranked_as_by_the_published_code(seed, ranked):
    """The expected ranks are what `_calculate_outlier` at commit a46c3d1 returns, with its threshold of 3."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(8, 1, 400, generator=generator, dtype=torch.float64)
    sharpness = torch.linspace(0.8, 3.0, 8, dtype=torch.float64)[torch.randperm(8, generator=generator)]
    weights = torch.softmax(scores * sharpness[:, None, None], dim=-1)[:, 0]
    assert rank_heads(weights, MsPoE().threshold).tolist() == ranked
    assert rank_heads(weights, 4.0).tolist() != ranked
    even = torch.tensor([[0.75, 0.25, 0.0, 0.0], [0.76, 0.24, 0.0, 0.0]])
    assert rank_heads(even, 3.0).tolist() == [1, 0], "three times the mean is not more than that"


# --- the papers, in float64 ---


def scaled_attention(model, scaling, world, first):
    """Equations 4 and 5 of arXiv 2406.02536, with the ablations of table 3; generated tokens are last tokens."""

    def attend(module, hidden):
        plain = layer_of(module, model.config, hidden, len(hidden) - 1)
        outputs = plain.outputs(world, ROWS["sequential"])
        if module.layer_idx in scaling.layers:
            states = hidden.clone()
            states[scaling.skip_first :, scaling.dimensions] *= scaling.factor
            layer = layer_of(module, model.config, states, len(hidden) - 1)
            layer = layer if scaling.scale_values else replace(layer, values=plain.values)
            outputs[first:] = layer.outputs(world, ROWS["sequential"])[first:]
        return outputs

    return attend


def multi_scale_attention(model, world, last, assigned):
    """Equations 1 and 2 of arXiv 2403.04797, from the third layer on; `assigned` gets the ratios of each layer."""

    def shrunk(ratio):
        return lambda world, token, importance: Row(token / ratio, [(key, key / ratio) for key in range(token + 1)])

    def attend(module, hidden):
        layer = layer_of(module, model.config, hidden, len(hidden) - 1)
        if module.layer_idx < 2:
            return layer.outputs(world, ROWS["sequential"])
        heads = len(layer.queries)
        weights = replace(layer, values=np.eye(len(hidden))[None].repeat(len(layer.keys), axis=0))
        seen = max(0, last + 1 - (layer.sliding_window or last + 1))
        rows = [weights.output(world, ROWS["sequential"], head, last)[seen : last + 1] for head in range(heads)]
        aware = [sum(row > 3 * row.mean()) / len(row) for row in rows]
        ranked = sorted(range(heads), key=lambda head: -aware[head])
        ratios = [1.2 + ranked.index(head) * (1.8 - 1.2) / (heads - 1) for head in range(heads)]
        assigned.append(ratios)
        return layer.outputs(world, *map(shrunk, ratios))

    return attend


SETTINGS = [  # others are those of the published code, above
    {},
    {"last_tokens": None, "skip_first": 5, "scale_values": True},
    {"skip_first": 1000},  # beyond the prompt
    {"last_tokens": 3, "skip_first": 5, "scale_values": True},
]
SCALINGS = [HiddenScaling((5, 20), (-1.0, 0.2)[n % 2], (1, 3), **settings) for n, settings in enumerate(SETTINGS)]
COMPARED = [
    *zip(("llama", "gemma2", "glm4", "gpt_oss"), SCALINGS, strict=True),
    *zip(("phi3", "gpt_neox", "gptj"), SCALINGS, strict=False),
    *((family, MsPoE()) for family in ("llama", "llama (yarn scaling)", "gemma2", "qwen3", "gpt_oss", "mpt")),
]


@pytest.mark.parametrize(("family", "intervention"), COMPARED, ids=str)
def test_logits_scores_and_decoding_are_what_the_papers_say(family, intervention):
    model, prompt = build(family, num_hidden_layers=4), random_prompt(random.Random(4), (4, 12, 7))
    assigned = []
    with float64_throughout():
        lm = InvariantModel(model, method="sequential", intervention=intervention)
        plain = InvariantModel(model, method="sequential").logits(prompt)
        ids, written = list(lm.prepare(prompt).input_ids), lm.generate(prompt, max_new_tokens=3)
        logits, scores = lm.logits(prompt), lm.score(prompt, [written.token_ids, written.token_ids[:2], [7, 8, 9]])
        world = World.of((len(ids) + 3,), ())
        if isinstance(intervention, MsPoE):
            attend = multi_scale_attention(model, world, len(ids) - 1, assigned)
        else:
            first = 0 if intervention.last_tokens is None else len(ids) - intervention.last_tokens
            attend = scaled_attention(model, intervention, world, first)
        exact = logits_with(model, [*ids, *written.token_ids], attend)
    logprobs = exact[len(ids) - 1 : -1].log_softmax(dim=1)
    assert gap(logits, exact[len(ids) - len(prompt.suffix) : len(ids)]) < 1e-11 * float(exact.abs().max())
    assert tuple(logprobs.argmax(dim=1).tolist()) == written.token_ids
    assert written.logprobs == pytest.approx(logprobs.amax(dim=1).tolist(), rel=1e-11)
    assert scores[:2] == pytest.approx([sum(written.logprobs), sum(written.logprobs[:2])], rel=1e-11)
    assert all(each != sorted(each) for each in assigned) or len(assigned) == 2, "not the order of the heads"
    has_effect = isinstance(intervention, MsPoE) or intervention.skip_first < len(ids)
    assert (gap(logits, plain) > 1e-6) == has_effect


# --- laws ---

FAMILIES = [
    *("llama", "mistral (sliding window)", "gemma3_text", "phi3", "bloom", "mpt"),
    *("falcon", "falcon (ALiBi)", "gptj"),
]
IDLE = (HiddenScaling((5, 40), 1, range(1, 4)), MsPoE(1.0, 1.0))


@pytest.mark.parametrize(("family", "number"), list(zip(FAMILIES, itertools.cycle((0, 1)))), ids=str)
def test_one_that_changes_nothing_is_the_plain_model_which_no_call_changes(family, number):
    model, prompt = model_of(family), PROMPTS[0]
    plain, lm = plain_logits(model, prompt), InvariantModel(model, method="sequential", intervention=IDLE[number])
    implementation = model.config._attn_implementation
    assert_computes(plain, lm.logits, prompt, bounded=plain_of(lm).logits)
    expected = plain_of(lm).generate(prompt, max_new_tokens=4)
    assert_computes(expected, lm.generate, prompt, max_new_tokens=4, bounded=plain_of(lm).generate)
    for busy in AT_WORK:
        changed = lm.with_method(intervention=busy)
        assert gap(changed.logits(prompt)[-1], plain[-1]) > 1e-3 * plain.abs().max()
        if isinstance(busy, HiddenScaling):
            assert gap(changed.logits(prompt)[:-1], plain[:-1]) <= rounding(plain_of(lm).logits, prompt)
        changed.generate(prompt, max_new_tokens=2)
        with pytest.raises(RuntimeError, match="stop"), changed.arranged([lm.prepare(prompt)]):
            raise RuntimeError("stop")
    assert torch.equal(plain_logits(model, prompt), plain)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_pre_hooks for module in model.modules())


SKIPPING = [HiddenScaling((5, 40), -1.0, (1, 3), **settings) for settings in SETTINGS[1::2]]


@pytest.mark.parametrize("intervention", [*AT_WORK, *SKIPPING], ids=str)
def test_a_padded_batch_of_answers_or_beams_equals_single_calls(intervention):
    lm = InvariantModel(model_of("llama"), method="sequential", intervention=intervention)
    for prompt, together in zip(PROMPTS, lm.generate(PROMPTS, max_new_tokens=4), strict=True):
        bounded = plain_of(lm).generate if isinstance(intervention, MsPoE) else None
        alone = assert_computes(together, lm.generate, prompt, max_new_tokens=4, bounded=bounded)
        assert together.token_ids == alone.token_ids
    options = {"max_new_tokens": 3, "num_beams": 3, "num_return_sequences": 2}
    beams = [each.token_ids for prompt in PROMPTS for each in lm.generate(prompt, **options)]
    assert [each.token_ids for each in lm.generate(PROMPTS, **options)] == beams


def test_the_ordering_makes_it_invariant_and_not_the_intervention(lm):
    prompt, shuffled = orders_of(PROMPTS[0], 4)
    assert not lm.ordering.invariant
    assert gap(lm.logits(prompt), lm.logits(shuffled)) > 1e-2
    canonical = lm.with_method(ordering="lexical")
    assert canonical.intervention == lm.intervention
    assert torch.equal(canonical.logits(prompt), canonical.logits(shuffled))


def test_other_threads_meanwhile_get_the_plain_model(lm):
    """One calls the model right before a layer's attention is computed."""
    prompt, prepared = PROMPTS[0], lm.prepare(PROMPTS[0])
    expected, layer = plain_logits(lm.model, prompt), lm.model.get_submodule("model.layers.2.self_attn")
    with lm.arranged([prepared]), another_thread_at([layer], lambda: plain_logits(lm.model, prompt)) as seen:
        own = lm.model(torch.tensor([prepared.input_ids]), use_cache=False).logits[0, -1].detach()
    assert torch.equal(*seen, expected)
    assert_computes(own, lambda: lm.logits(prompt)[-1], bounded=lambda: plain_of(lm).logits(prompt))


# --- parameters, and what is refused ---


def test_the_published_table_is_found_by_id_and_by_the_last_part_of_it_also_as_the_name_of_a_model(llama):
    mistral = HiddenScaling((213,), 0.0, range(10, 26))
    assert {HiddenScaling.published(name).layers[0] for name in PUBLISHED} == {10}
    for name in ("mistralai/Mistral-7B-Instruct-v0.2", "/models/mistral-7b-instruct-v0.2/"):
        assert HiddenScaling.published(name) == mistral
    assert HiddenScaling.published("Llama-2-13b-chat") == HiddenScaling(4283, -1, range(10, 35))
    assert HiddenScaling.published("Qwen1.5-7B-Chat").factor == 0.2
    assert HiddenScaling.published("gemma-1.1-7b-it").layers[-1] == 22
    with pytest.raises(UnknownName, match=r"Mistral-7B-Instruct-v0\.2"):
        HiddenScaling.published("mistralai/Mistral-7B-Instruct-v0.3")
    with pytest.raises(UnknownName, match="'llama'"):
        InvariantModel(llama, method="sequential", intervention="hidden-scaling")
    model = tiny_model("llama", num_hidden_layers=26, hidden_size=216)
    model.config._name_or_path = "mistralai/Mistral-7B-Instruct-v0.2"
    assert InvariantModel(model, method="sequential", intervention="hidden-scaling").intervention == mistral


def test_parameters_without_a_meaning_are_refused():
    scaling, numbers = partial(HiddenScaling, 5, 0, [1]), (((), 0, [1]), (5, 0, []), (-1, 0, [1]), (5, 0, [-1, 2]))
    ratios = {"smallest": 0.0}, {"smallest": 2.0}, {"largest": -1.0}
    for build_it, said in (
        *((partial(HiddenScaling, *each), "one or more indices") for each in numbers),
        (partial(scaling, last_tokens=0), "last_tokens: expected at least 1"),
        (partial(scaling, skip_first=-1), "skip_first: expected at least 0"),
        *((partial(MsPoE, **each), "0 < smallest <= largest") for each in ratios),
        (partial(MsPoE, first_layer=-1), "first_layer"),
    ):
        with pytest.raises(InvalidChoice, match=said):
            build_it()


def test_parameters_beyond_the_model_and_other_methods_are_refused(llama):
    for intervention, said in (
        (HiddenScaling(64, 0, [1]), "dimensions: expected indices below 64 for llama"),
        (HiddenScaling(5, 0, [0, 2]), "layers: expected indices .*below 2 for llama"),
        ("ms-poe", "less than 2, the layers of llama"),
    ):
        with pytest.raises(UnsupportedCombination, match=said):
            InvariantModel(llama, method="sequential", intervention=intervention)
    lm = InvariantModel(llama, method="sequential", intervention=MsPoE(first_layer=1))
    for method in sorted(set(METHODS) - {"sequential"}):
        with pytest.raises(UnsupportedCombination, match=f"expected the method 'sequential'.*{method}"):
            InvariantModel(llama, method=method, intervention=lm.intervention)
        with pytest.raises(UnsupportedCombination, match=method):
            lm.with_method(method, intervention=lm.intervention)
        assert lm.with_method(method).intervention is None, "a new method brings none"
    with pytest.raises(UnknownName, match="'hidden-scaling', 'ms-poe'"):
        lm.with_method(intervention="ms_poe")
    assert {each.name for each in AT_WORK} == set(INTERVENTIONS), "every intervention is held to these laws"
    assert all(name == each.name and each.paper and each.__doc__ for name, each in INTERVENTIONS.items())
