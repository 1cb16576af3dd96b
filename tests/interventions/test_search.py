"""The search finds the dimension that was built to be positional, and what it found survives a file."""

import copy
import json
import random

import numpy as np
import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import ContextOverflow, InvalidChoice, TokenizerRequired, UnsupportedModel
from invariant_rag.interventions import HiddenScaling, search
from invariant_rag.interventions.search import TokenExample, positional_dimensions, search_dimension, uuid_examples
from invariant_rag.testing import tiny_model
from invariant_rag.testing.rounding import rounding

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


def test_random_texts_have_no_special_tokens_and_the_published_characters(tokenizer):
    texts = search.random_texts(tokenizer, 300, 3)
    assert [len(text) for text in texts] == [300] * 3
    assert texts == search.random_texts(tokenizer, 300, 3)
    assert set(tokenizer.decode([*texts[0], *texts[1], *texts[2]])) == set(search.CHARACTERS)
    assert len(search.CHARACTERS) == 26 + 26 + 10 + 27


def test_uuid_examples_are_chat_prompts_that_ask_at_the_quarters(tokenizer):
    places = []
    for example in uuid_examples(tokenizer, 4):
        text, answer = tokenizer.decode(example.prompt), tokenizer.decode(example.answer)
        asked = tokenizer.apply_chat_template(
            [{"role": "user", "content": "PLACE"}], tokenize=False, add_generation_prompt=True
        ).split("PLACE")
        assert text.startswith(asked[0] + "Extract the value corresponding to the specified key in the JSON object")
        assert text.endswith("\nCorresponding value:" + asked[1])
        pairs = json.loads(text.partition("JSON data:\n")[2].partition("\n\nKey: ")[0])
        key = text.partition('Key: "')[2][:36]
        assert pairs[key] == answer
        places.append(list(pairs).index(key))
    assert len(pairs) == 50
    assert places == [12, 24, 36, 12]
    small = uuid_examples(tokenizer, 4, window=800)
    assert max(len(each.prompt) + len(each.answer) for each in small) <= 800
    assert small == uuid_examples(tokenizer, 4, window=800)
    with pytest.raises(ContextOverflow, match="200 tokens"):
        uuid_examples(tokenizer, 4, window=200)
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(TokenizerRequired, match="chat template"):
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
    with pytest.raises(UnsupportedModel, match=r"at least 5 layers for the published search.*got 4"):
        search_dimension(tiny_model("llama", num_hidden_layers=4), examples=examples, texts=texts)
    model = tiny_model("llama", num_hidden_layers=5)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with pytest.raises(UnsupportedModel, match="no hidden dimension is monotone"):
        search_dimension(model, examples=examples, texts=texts)
    for given in ({}, {"examples": [TokenExample((1, 2), (3,))]}, {"texts": [[1] * 20]}):
        with pytest.raises(TokenizerRequired):
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
