"""Hidden scaling and Ms-PoE: the published code's logits, loops written from the papers, and what they refuse."""

from __future__ import annotations

import json
import random
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.interventions import HiddenScaling, MsPoE
from invariant_rag.interventions.hidden_scaling import PUBLISHED
from invariant_rag.interventions.ms_poe import rank_heads
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.rounding import rounding

GOLDEN = Path(__file__).parents[1] / "golden"
# --- a Llama in loops, one token and one head at a time in float64 ---


def _turned(states, angles):
    """Rotate the pairs (0, D/2), (1, D/2 + 1)... of vectors `[..., D]` by angles `[..., D/2]`."""
    a, b = states.chunk(2, dim=-1)
    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), dim=-1)


def llama_logits(
    model,
    ids,
    *,
    reads=lambda _layer, _token, states: states,
    values_read=lambda _layer, _token, states: states,
    ratios=lambda _layer, weights: [1.0] * len(weights),
    last=-1,
):
    """Return logits `[T, vocabulary]` of a Llama in float64.

    Args:
        model: The model.
        ids: Tokens.
        reads: Attention inputs `[T, hidden]` from which queries and keys are made for one layer and one query.
        values_read: The same for values.
        ratios: What each head divides positions by, from its attention at natural positions at the token `last`.
        last: Index of the prompt's last token.
    """
    size, frequencies = model.config.head_dim, model.model.rotary_emb.inv_freq.double()
    groups = model.config.num_attention_heads // model.config.num_key_value_heads

    def heads(projection, states):
        return projection(states).view(len(ids), -1, size).transpose(0, 1)

    def weights(queries, keys, head, token, ratio):
        places = torch.arange(token + 1, dtype=torch.float64)[:, None] / ratio
        own = _turned(queries[head, token], frequencies * places[-1])
        moved = _turned(keys[head // groups, : token + 1], frequencies * places)
        return torch.softmax(moved @ own / size**0.5, dim=0)

    hidden = model.model.embed_tokens(torch.tensor(ids))
    for index, layer in enumerate(model.model.layers):
        attention, states = layer.self_attn, layer.input_layernorm(hidden)
        queries, keys = heads(attention.q_proj, states), heads(attention.k_proj, states)
        natural = [weights(queries, keys, head, last % len(ids), 1.0).tolist() for head in range(len(queries))]
        divisors = ratios(index, natural)
        out = torch.zeros(len(ids), len(queries), size, dtype=torch.float64)
        for token in range(len(ids)):
            seen = reads(index, token, states)
            queries, keys = heads(attention.q_proj, seen), heads(attention.k_proj, seen)
            values = heads(attention.v_proj, values_read(index, token, states))
            for head, ratio in enumerate(divisors):
                out[token, head] = weights(queries, keys, head, token, ratio) @ values[head // groups, : token + 1]
        hidden = hidden + attention.o_proj(out.flatten(1))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return model.lm_head(model.model.norm(hidden)).detach()


# --- hidden scaling ---

RUNS: dict[str, Any] = {
    name: json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("hidden_scaling", "hidden_scaling_settings")
}
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
    logits, untouched, bound = lm.logits(prompt), plain_logits(golden_model, prompt), rounding(lm.logits, prompt)
    torch.testing.assert_close(logits, expected, atol=bound, rtol=0)
    if not scaling.skip_first:  # that code does not scale generated tokens then
        assert lm.generate(prompt, max_new_tokens=8).token_ids == tuple(greedy)
    if not settings:
        torch.testing.assert_close(logits[:-1], untouched[:-1], atol=bound, rtol=0)
        assert (logits[-1] - untouched[-1]).abs().max() > 1e-2, "the last row is another one"


SETTINGS: list[dict[str, Any]] = [  # the others are those of the published code, above
    {},
    {"last_tokens": None, "skip_first": 5, "scale_values": True},
    {"skip_first": 1000},  # beyond the prompt
    {"last_tokens": 3, "skip_first": 5, "scale_values": True},
]


@pytest.mark.parametrize(("settings", "factor"), list(zip(SETTINGS, cycle((-1.0, 0.2)))), ids=str)
def test_logits_and_decoding_of_hidden_scaling_equal_a_float64_loop_written_from_the_paper(settings, factor):
    """Equations 4 and 5 with the ablations of table 3; every generated token is a last token."""
    model = tiny_model("llama", eos_token_id=None).double()
    scaling = HiddenScaling((5, 40), factor, (1, 3), **settings)
    lm = InvariantModel(model, method="sequential", intervention=scaling)
    prompt = random_prompt(random.Random(2), (4, 7, 12))
    ids, written = list(lm.prepare(prompt).input_ids), lm.generate(prompt, max_new_tokens=3)
    assert len(ids) > 16 + 5
    first = 0 if scaling.last_tokens is None else len(ids) - scaling.last_tokens

    def reads(layer, token, states):
        if layer not in scaling.layers or token < first:
            return states
        scaled = states.clone()
        scaled[scaling.skip_first :, scaling.dimensions] *= factor
        return scaled

    values_read = {"values_read": reads} if scaling.scale_values else {}
    exact = llama_logits(model, [*ids, *written.token_ids], reads=reads, **values_read)
    suffix, bound = exact[len(ids) - len(prompt.suffix) : len(ids)], rounding(lm.logits, prompt)
    torch.testing.assert_close(lm.logits(prompt), suffix.float(), atol=bound, rtol=0)
    logprobs = torch.log_softmax(exact[len(ids) - 1 : -1], dim=1)
    assert tuple(logprobs.argmax(dim=1).tolist()) == written.token_ids
    best = logprobs.amax(dim=1)
    assert written.logprobs == pytest.approx(best.tolist(), abs=rounding(lm.generate, prompt, max_new_tokens=3))
    scored = lm.score(prompt, [written.token_ids])[0]
    assert scored == pytest.approx(float(best.sum()), abs=rounding(lm.score, prompt, [written.token_ids]))
    plain = InvariantModel(model, method="sequential")
    moved = float((lm.logits(prompt)[-1] - plain.logits(prompt)[-1]).abs().max())
    assert (moved > bound) == (scaling.skip_first < len(ids))


@pytest.mark.parametrize("settings", SETTINGS[1::2], ids=str)
def test_a_padded_batch_equals_single_calls(settings):
    scaling = HiddenScaling((5, 40), -1.0, (1, 3), **settings)
    lm = InvariantModel(tiny_model("llama", eos_token_id=None), method="sequential", intervention=scaling)
    prompts = [random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(9, 2, 11), (3, 4)])]
    for prompt, together in zip(prompts, lm.generate(prompts, max_new_tokens=3), strict=True):
        alone = lm.generate(prompt, max_new_tokens=3)
        assert together.token_ids == alone.token_ids
        assert together.logprobs == pytest.approx(alone.logprobs, abs=rounding(lm.generate, prompt, max_new_tokens=3))


def test_settings_survive_a_file(tmp_path):
    scaling = HiddenScaling((5, 40), -1, (1, 3), last_tokens=None, skip_first=2, scale_values=True)
    scaling.save(tmp_path / "scaling.json")
    assert HiddenScaling.load(tmp_path / "scaling.json") == scaling
    (tmp_path / "scaling.json").write_text('{"dimensions": [5], "factor": 0, "layers": [1]}')
    assert HiddenScaling.load(tmp_path / "scaling.json") == HiddenScaling(5, 0, [1])


def test_the_published_table_is_found_by_id_and_by_the_last_part_of_it():
    mistral = HiddenScaling((213,), 0.0, range(10, 26))
    for name in PUBLISHED:
        assert HiddenScaling.published(name).layers[0] == 10
    assert HiddenScaling.published("mistralai/Mistral-7B-Instruct-v0.2") == mistral
    assert HiddenScaling.published("/models/mistral-7b-instruct-v0.2/") == mistral
    assert HiddenScaling.published("Llama-2-13b-chat") == HiddenScaling(4283, -1, range(10, 35))
    assert HiddenScaling.published("Qwen1.5-7B-Chat").factor == 0.2
    assert HiddenScaling.published("gemma-1.1-7b-it").layers[-1] == 22
    with pytest.raises(UnknownName, match=r"Mistral-7B-Instruct-v0\.2"):
        HiddenScaling.published("mistralai/Mistral-7B-Instruct-v0.3")


def test_by_name_it_has_the_parameters_published_for_the_model(llama):
    with pytest.raises(UnknownName, match="'llama'"):
        InvariantModel(llama, method="sequential", intervention="hidden-scaling")
    model = tiny_model("llama", num_hidden_layers=26, hidden_size=216)
    model.config._name_or_path = "mistralai/Mistral-7B-Instruct-v0.2"
    lm = InvariantModel(model, method="sequential", intervention="hidden-scaling")
    assert lm.intervention == HiddenScaling(213, 0, range(10, 26))


def test_parameters_without_a_meaning_or_beyond_the_model_are_refused(llama):
    for parameters in (((), 0, [1]), (5, 0, []), (-1, 0, [1]), (5, 0, [-1, 2])):
        with pytest.raises(InvalidChoice, match="one or more indices"):
            HiddenScaling(*parameters)
    with pytest.raises(InvalidChoice, match="last_tokens: expected at least 1"):
        HiddenScaling(5, 0, [1], last_tokens=0)
    with pytest.raises(InvalidChoice, match="skip_first: expected at least 0"):
        HiddenScaling(5, 0, [1], skip_first=-1)
    dimension, layer = HiddenScaling(64, 0, [1]), HiddenScaling(5, 0, [0, 2])
    for scaling, expected in ((dimension, "dimensions: expected indices below 64"), (layer, "layers: .* below 2")):
        with pytest.raises(UnsupportedCombination, match=f"{expected} for llama"):
            InvariantModel(llama, method="sequential", intervention=scaling)


# --- Ms-PoE ---


def _from_the_paper(layer, weights):
    """Equations 1 and 2, from the third layer on."""
    if layer < 2:
        return [1.0] * len(weights)
    aware = []
    for head in weights:
        mean = sum(head) / len(head)
        aware.append(sum(weight > 3 * mean for weight in head) / len(head))
    ranked = sorted(range(len(weights)), key=lambda head: -aware[head])
    return [1.2 + ranked.index(head) * (1.8 - 1.2) / (len(weights) - 1) for head in range(len(weights))]


def test_logits_and_decoding_of_ms_poe_equal_a_float64_loop_written_from_the_paper():
    seed = 4
    model = tiny_model("llama", seed, eos_token_id=None).double()
    lm = InvariantModel(model, method="sequential", intervention="ms-poe")
    prompt = random_prompt(random.Random(seed), (4, 12, 7))
    plain = lm.with_method("sequential")  # for bounds: which head ranks first has none
    ids, written = list(lm.prepare(prompt).input_ids), lm.generate(prompt, max_new_tokens=3)
    assigned = []

    def ratios(layer, weights):
        assigned.append(_from_the_paper(layer, weights))
        return assigned[-1]

    exact = llama_logits(model, [*ids, *written.token_ids], ratios=ratios, last=len(ids) - 1)
    assert any(each != sorted(each) for each in assigned), "ranks must differ from the order of the heads"
    suffix = exact[len(ids) - len(prompt.suffix) : len(ids)]
    torch.testing.assert_close(lm.logits(prompt), suffix.float(), atol=rounding(plain.logits, prompt), rtol=0)
    logprobs = torch.log_softmax(exact[len(ids) - 1 : -1], dim=1)
    assert tuple(logprobs.argmax(dim=1).tolist()) == written.token_ids
    assert written.logprobs == pytest.approx(
        logprobs.amax(dim=1).tolist(), abs=rounding(plain.generate, prompt, max_new_tokens=len(written.token_ids))
    )
    assert lm.score(prompt, [written.token_ids])[0] == pytest.approx(
        float(logprobs.amax(dim=1).sum()), abs=rounding(plain.score, prompt, [written.token_ids])
    )


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


def test_ratios_without_a_meaning_and_models_that_end_before_the_first_layer_are_refused(llama):
    options = [{"smallest": 0.0}, {"smallest": 2.0}, {"largest": -1.0}, {"first_layer": -1}]
    for each in options:
        with pytest.raises(InvalidChoice):
            MsPoE(**each)
    with pytest.raises(UnsupportedCombination, match="less than 2, the layers of llama"):
        InvariantModel(llama, method="sequential", intervention="ms-poe")
    InvariantModel(llama, method="sequential", intervention=MsPoE(first_layer=1))
