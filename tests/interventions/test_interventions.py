"""Hidden scaling and Ms-PoE: the published logits, an oracle written from the papers, the laws, and what is refused.

The search finds the dimension that was built to be positional, and what it found survives a file.
"""

import copy
import itertools
import json
import random
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch

from invariant_rag import InvariantModel, Prompt, errors
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.interventions import INTERVENTIONS, HiddenScaling, MsPoE, search
from invariant_rag.interventions.hidden_scaling import PUBLISHED
from invariant_rag.interventions.ms_poe import rank_heads
from invariant_rag.interventions.search import TokenExample, positional_dimensions, search_dimension, uuid_examples
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


def test_parameters_without_a_meaning_or_beyond_the_model_and_other_methods_are_refused(llama):
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


# --- the search for the dimension to scale ---

DECOY, PLANTED, SOURCE, CONSTANT, IDENTITY = 4, 5, 6, 7, 8
SLOW = 7  # the pair of rotary dimensions that turns slowest in a head of 16


@pytest.fixture(scope="module")
def planted():
    """A model that says what it reads, and reads early tokens more, because of one hidden dimension.

    Its first layer averages over all tokens, and so leaves in the planted dimension how much of that is the first
    token: a value that falls with position. Its third layer attends to where this value is large, and copies the
    tokens that it finds there to the output. A decoy rises with position, more smoothly, and nothing reads it.
    Empty layers follow, since three layers do not count.
    """
    model = tiny_model("llama", num_hidden_layers=8, eos_token_id=None)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" not in name:
                weight.zero_()
        embeddings = model.model.embed_tokens.weight
        embeddings[:, CONSTANT] = 1.0
        embeddings[:, PLANTED] = torch.linspace(-0.05, 0.05, 128)
        embeddings[1, SOURCE] = 8.0
        for token in range(2, 58):
            embeddings[token, IDENTITY + token - 2] = 1.0
            model.lm_head.weight[token, IDENTITY + token - 2] = 4.0
        first, third = model.model.layers[0].self_attn, model.model.layers[2].self_attn
        first.v_proj.weight[0, SOURCE] = 1.0
        first.o_proj.weight[PLANTED, 0] = 2.0
        first.o_proj.weight[DECOY, 0] = -0.1
        third.q_proj.weight[SLOW, CONSTANT] = third.q_proj.weight[16 + SLOW, CONSTANT] = 8.0
        third.k_proj.weight[SLOW, PLANTED] = 8.0
        for channel in range(16):  # both query heads of the first pair of heads share these values
            third.v_proj.weight[channel, IDENTITY + channel] = 1.0
            third.o_proj.weight[IDENTITY + channel, channel] = 4.0
    return model


@pytest.fixture(scope="module")
def examples():
    """A few tokens of one kind, then many of another, which are the answer."""
    state, examples = random.Random(0), []
    for _ in range(12):
        early, late = state.sample(range(2, 18), 2)
        examples.append(TokenExample((1, *[early] * 12, *[late] * 60, 0), (late,)))
    return examples


@pytest.fixture(scope="module")
def result(planted, examples):
    state = random.Random(1)
    texts = [[1, *state.choices(range(2, 18), k=199)] for _ in range(20)]
    return search_dimension(planted, examples=examples, texts=texts)


def test_the_planted_dimension_is_found_with_factor_zero_first(result):
    assert result.found.dimensions == (PLANTED,)
    assert result.found.layers == (2, 3, 4, 5, 6)
    at_zero = [trial for trial in result.trials if trial.factor == 0]
    assert DECOY in [trial.dimension for trial in at_zero], "monotone, and nothing reads it"
    assert result.trials[: len(at_zero)] == tuple(at_zero)
    assert min(at_zero, key=lambda trial: trial.loss).dimension == PLANTED
    assert [trial.factor for trial in result.trials[len(at_zero) :]] == [0.5, -0.5, -1.0]
    assert {trial.dimension for trial in result.trials[len(at_zero) :]} == {PLANTED}
    assert result.loss == min(trial.loss for trial in result.trials) < 0.8 * result.plain_loss


def test_the_loss_is_that_of_scoring_the_answers_over_their_tokens(planted):
    """Each answer of three tokens weighs as much as one token."""
    examples = [TokenExample((1, *[7] * 40, 0), (7, 8, 9)), TokenExample((1, *[9] * 30, 0), (9,))]
    texts = [[1, *random.Random(0).choices(range(2, 18), k=99)]]
    found = search_dimension(planted, examples=examples, texts=texts, keep=2)
    lm = InvariantModel(planted, method="sequential")
    for loss, wrapped in ((found.plain_loss, lm), (found.loss, lm.with_method(intervention=found.found))):
        asked = [(Prompt([], [], each.prompt), [each.answer]) for each in examples]
        scores = [wrapped.score(*each)[0] / len(each[1][0]) for each in asked]
        bound = max(rounding(wrapped.score, *each) for each in asked)
        assert loss == pytest.approx(-sum(scores) / 2, abs=bound)


@pytest.mark.parametrize(
    ("layers", "seed", "ranked"),
    [
        (8, 0, [7, 3, 10, 9, 2, 22, 5, 16, 6, 23, 12, 4, 17, 0, 11, 13]),
        (8, 1, [20, 11, 15, 18, 14, 5, 0, 2, 21, 22, 23, 12, 3, 8, 16, 10, 19]),
        (12, 2, [16, 13, 14, 20, 8, 0, 23, 5, 4, 11, 18, 19, 17, 12, 9, 7, 6, 15, 1, 21, 3, 2]),
    ],
)
def test_dimensions_are_ranked_as_by_the_published_code(layers, seed, ranked):
    """The expected ranks are what `search_by_statistic` at commit f3bcd55 returns for the same values."""
    generator = np.random.default_rng(seed)
    positions = np.linspace(0, 1, 1000)[None, :, None]
    slope, bend = generator.normal(size=(layers, 1, 24)), generator.normal(size=(layers, 1, 24))
    noise = 10.0 ** generator.uniform(-3, 0, size=(layers, 1, 24))
    values = slope * positions + 0.5 * bend * positions**2 + noise * generator.normal(size=(layers, 1000, 24))
    assert positional_dimensions(values) == ranked


def test_random_texts_have_the_published_characters_and_uuid_examples_ask_at_the_quarters_in_the_chat_template(
    tokenizer,
):
    texts = search.random_texts(tokenizer, 300, 3)
    assert [len(text) for text in texts] == [300] * 3
    assert texts == search.random_texts(tokenizer, 300, 3)
    assert set(tokenizer.decode([*texts[0], *texts[1], *texts[2]])) == set(search.CHARACTERS)
    assert len(search.CHARACTERS) == 26 + 26 + 10 + 27
    places = []
    for example in uuid_examples(tokenizer, 4):
        text, answer = tokenizer.decode(example.prompt), tokenizer.decode(example.answer)
        messages = [{"role": "user", "content": "PLACE"}]
        chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True).split("PLACE")
        assert text.startswith(chat[0] + "Extract the value corresponding to the specified key in the JSON object")
        assert text.endswith("\nCorresponding value:" + chat[1])
        pairs = json.loads(text.partition("JSON data:\n")[2].partition("\n\nKey: ")[0])
        key = text.partition('Key: "')[2][:36]
        assert pairs[key] == answer
        places.append(list(pairs).index(key))
    assert len(pairs) == 50
    assert places == [12, 24, 36, 12]
    small = uuid_examples(tokenizer, 4, window=800)
    assert max(len(each.prompt) + len(each.answer) for each in small) <= 800
    assert small == uuid_examples(tokenizer, 4, window=800)
    with pytest.raises(errors.ContextOverflow, match="200 tokens"):
        uuid_examples(tokenizer, 4, window=200)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(errors.TokenizerRequired, match="chat template"):
        uuid_examples(bare)


def test_a_result_is_measured_and_drawn_and_loaded_as_an_intervention_whose_settings_survive_a_file(result, tmp_path):
    """What was planted is the share of the first token among those that are averaged: one over their number."""
    assert result.positions == tuple(range(50, 200))
    for curve in result.curves:
        assert np.corrcoef(curve, 1 / (1 + np.array(result.positions)))[0, 1] > 0.99
    path = tmp_path / "search.json"
    scaling = HiddenScaling((5, 40), -1, (1, 3), last_tokens=None, skip_first=2, scale_values=True)
    for saved, found in ((result, result.found), (result.found, result.found), (scaling, scaling)):
        saved.save(path)
        assert HiddenScaling.load(path) == found
    path.write_text('{"dimensions": [5], "factor": 0, "layers": [1]}')
    assert HiddenScaling.load(path) == HiddenScaling(5, 0, [1])
    for text in ("{", "[]", "{}", '{"dimensions": [1], "factor": null, "layers": [1]}'):
        path.write_text(text)
        with pytest.raises(InvalidChoice, match=r"dimensions, factor and layers"):
            HiddenScaling.load(path)
    result.draw(tmp_path / "dimension.png")
    assert (tmp_path / "dimension.png").read_bytes().startswith(b"\x89PNG")


def test_models_without_positional_dimensions_and_searches_without_texts_are_refused(planted, examples):
    texts = [[1, *range(2, 60)]]
    with pytest.raises(errors.UnsupportedModel, match=r"at least 5 layers for the published search.*got 4"):
        search_dimension(tiny_model("llama", num_hidden_layers=4), examples=examples, texts=texts)
    zeros = tiny_model("llama", num_hidden_layers=5)
    for weight in zeros.parameters():
        weight.detach().zero_()
    with pytest.raises(errors.UnsupportedModel, match="no hidden dimension is monotone"):
        search_dimension(zeros, examples=examples, texts=texts)
    for given in ({}, {"examples": [TokenExample((1, 2), (3,))]}, {"texts": [[1] * 20]}):
        with pytest.raises(errors.TokenizerRequired):
            search_dimension(planted, **given)
    for nothing in ([], [TokenExample((1, 2), (3,))]):
        with pytest.raises(InvalidChoice, match="at least 16 tokens"):
            search_dimension(planted, examples=nothing, texts=[[1] * 20])


def test_a_search_saves_what_the_library_loads_with_the_published_layers_of_a_model_that_has_them(tokenizer, tmp_path):
    texts, few = [[1, *range(2, 60)]] * 2, [TokenExample((1, *range(2, 40)), (3,))]
    deep = search_dimension(tiny_model("llama", num_hidden_layers=27), examples=few, texts=texts, keep=1, factors=[0])
    assert deep.found.layers == tuple(range(10, 26))
    model = tiny_model("llama", num_hidden_layers=5, vocab_size=261, max_position_embeddings=512)
    examples = uuid_examples(tokenizer, 2, pairs=2)
    found = search_dimension(model, tokenizer, examples, keep=1)
    found.save(tmp_path / "search.json")
    saved = json.loads((tmp_path / "search.json").read_text())
    assert HiddenScaling.load(tmp_path / "search.json").dimensions == found.found.dimensions
    assert sorted(factor for _, factor, _ in saved["trials"]) == sorted(search.FACTORS)
