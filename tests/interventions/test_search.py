"""The search finds the dimension that was built to be positional, and what it found survives a file."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from invariant_rag import InvariantModel, Prompt
from invariant_rag.cli import app
from invariant_rag.errors import ContextOverflow, InvalidChoice, TokenizerRequired, UnknownName, UnsupportedModel
from invariant_rag.interventions import HiddenScaling
from invariant_rag.interventions.positional_dimensions import averaged_dimensions, published_dimensions
from invariant_rag.interventions.search import FACTORS, SearchResult, search_dimension
from invariant_rag.interventions.search_prompts import (
    CHARACTERS,
    Example,
    key_value_examples,
    random_texts,
    uuid_examples,
)
from invariant_rag.testing import tiny_model
from invariant_rag.testing.rounding import rounding

DECOY, PLANTED, SOURCE, CONSTANT, IDENTITY = 4, 5, 6, 7, 8
SLOW = 7  # the pair of rotary dimensions that turns slowest in a head of 16


@pytest.fixture(scope="module")
def planted() -> PreTrainedModel:
    """The planted model in four layers."""
    return _planted(4)


@pytest.fixture(scope="module")
def deep() -> PreTrainedModel:
    """The planted model with empty layers after it, since the published procedure ignores three layers."""
    return _planted(8)


def _planted(layers: int) -> PreTrainedModel:
    """A model that says what it reads, and reads early tokens more, because of one hidden dimension.

    Its first layer averages over all tokens, and so leaves in the planted dimension how much of that is the first
    token: a value that falls with position. Its third layer attends to where this value is large, and copies the
    tokens that it finds there to the output. A decoy rises with position, more smoothly, and nothing reads it.
    """
    model: Any = tiny_model("llama", num_hidden_layers=layers, eos_token_id=None)
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
def examples() -> list[Example]:
    """A few tokens of one kind, then many of another, which are the answer."""
    state, examples = random.Random(0), []
    for _ in range(12):
        early, late = state.sample(range(2, 18), 2)
        examples.append(Example((1, *[early] * 12, *[late] * 60, 0), (late,)))
    return examples


@pytest.fixture(scope="module")
def result(planted: PreTrainedModel, examples: list[Example]) -> SearchResult:
    return search_dimension(planted, examples=examples, procedure="averaged")


@pytest.fixture(scope="module")
def published(deep: PreTrainedModel, examples: list[Example]) -> SearchResult:
    state = random.Random(1)
    texts = [[1, *state.choices(range(2, 18), k=199)] for _ in range(20)]
    return search_dimension(deep, examples=examples, texts=texts)


def test_the_planted_dimension_is_found(result: SearchResult) -> None:
    assert result.found.dimensions == (PLANTED,)
    assert result.trials[0].dimension == DECOY, "smoothness alone does not decide"
    assert result.found.layers == (1, 2, 3)
    assert result.loss == min(trial.loss for trial in result.trials) < 0.8 * result.plain_loss


def test_the_published_procedure_finds_it_too_with_factor_zero_first(published: SearchResult) -> None:
    assert published.procedure == "published"
    assert published.found.dimensions == (PLANTED,)
    assert published.found.layers == (2, 3, 4, 5, 6)
    at_zero = [trial for trial in published.trials if trial.factor == 0]
    assert published.trials[: len(at_zero)] == tuple(at_zero)
    assert min(at_zero, key=lambda trial: trial.loss).dimension == PLANTED
    assert [trial.factor for trial in published.trials[len(at_zero) :]] == [0.5, -0.5, -1.0]
    assert {trial.dimension for trial in published.trials[len(at_zero) :]} == {PLANTED}


def test_the_published_loss_is_the_mean_over_tokens(planted: PreTrainedModel) -> None:
    """Each answer of three tokens weighs as much as one token."""
    examples = [Example((1, *[7] * 40, 0), (7, 8, 9)), Example((1, *[9] * 30, 0), (9, 7, 7))]
    texts = [[1, *random.Random(0).choices(range(2, 18), k=99)]]
    lm = InvariantModel(_planted(8), method="sequential")
    result = search_dimension(lm.model, examples=examples, texts=texts)
    prompts = [Prompt([], [], each.prompt) for each in examples]
    scores = [lm.score(prompt, [each.answer])[0] / 3 for prompt, each in zip(prompts, examples, strict=True)]
    bound = max(rounding(lm.score, prompt, [each.answer]) for prompt, each in zip(prompts, examples, strict=True))
    assert result.plain_loss == pytest.approx(-sum(scores) / 2, abs=bound / 3)


def test_the_published_layers_are_those_of_a_model_that_has_them() -> None:
    texts, examples = [[1, *range(2, 60)]] * 2, [Example((1, *range(2, 40)), (3,))]
    model = tiny_model("llama", num_hidden_layers=27)
    assert search_dimension(model, examples=examples, texts=texts, keep=1, factors=[0]).found.layers == (
        *range(10, 26),
    )


@pytest.mark.parametrize(
    ("layers", "seed", "ranked"),
    [
        (8, 0, [7, 3, 10, 9, 2, 22, 5, 16, 6, 23, 12, 4, 17, 0, 11, 13]),
        (8, 1, [20, 11, 15, 18, 14, 5, 0, 2, 21, 22, 23, 12, 3, 8, 16, 10, 19]),
        (12, 2, [16, 13, 14, 20, 8, 0, 23, 5, 4, 11, 18, 19, 17, 12, 9, 7, 6, 15, 1, 21, 3, 2]),
    ],
)
def test_dimensions_are_ranked_as_by_the_published_code(layers: int, seed: int, ranked: list[int]) -> None:
    """The expected ranks are what `search_by_statistic` at commit f3bcd55 returns for the same values."""
    generator = np.random.default_rng(seed)
    positions = np.linspace(0, 1, 1000)[None, :, None]
    slope, bend = generator.normal(size=(layers, 1, 24)), generator.normal(size=(layers, 1, 24))
    noise = 10.0 ** generator.uniform(-3, 0, size=(layers, 1, 24))
    values = slope * positions + 0.5 * bend * positions**2 + noise * generator.normal(size=(layers, 1000, 24))
    assert published_dimensions(values) == ranked
    assert averaged_dimensions(values, 100)[:10] != ranked[:10]


def test_models_with_few_layers_need_the_other_procedure(planted: PreTrainedModel, examples: list[Example]) -> None:
    with pytest.raises(UnsupportedModel, match=r"at least 5 layers for the published procedure.*got 4"):
        search_dimension(planted, examples=examples, texts=[[1, *range(2, 60)]])
    with pytest.raises(UnknownName, match="'averaged', 'published'"):
        search_dimension(planted, examples=examples, procedure="ours")


def test_random_texts_have_no_special_tokens_and_the_published_characters(tokenizer: PreTrainedTokenizerFast) -> None:
    texts = random_texts(tokenizer, 300, 3)
    assert [len(text) for text in texts] == [300] * 3
    assert texts == random_texts(tokenizer, 300, 3)
    assert set(tokenizer.decode([*texts[0], *texts[1], *texts[2]])) == set(CHARACTERS)
    assert len(CHARACTERS) == 26 + 26 + 10 + 27


def test_uuid_examples_are_chat_prompts_that_ask_at_the_quarters(tokenizer: PreTrainedTokenizerFast) -> None:
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
    bare = copy.deepcopy(tokenizer)
    bare.chat_template = None
    with pytest.raises(TokenizerRequired, match="chat template"):
        uuid_examples(bare)


def test_the_loss_is_that_of_scoring_the_answers(
    planted: PreTrainedModel, examples: list[Example], result: SearchResult
) -> None:
    lm = InvariantModel(planted, method="sequential")
    for loss, wrapped in (
        (result.plain_loss, lm),
        (result.loss, lm.with_method(intervention=result.found)),
    ):
        scores = [wrapped.score(Prompt([], [], each.prompt), [each.answer])[0] for each in examples]
        bound = max(rounding(wrapped.score, Prompt([], [], each.prompt), [each.answer]) for each in examples)
        assert loss == pytest.approx(-sum(scores) / len(scores), abs=bound)


def test_the_found_dimension_is_measured_where_it_was_planted(result: SearchResult) -> None:
    assert result.positions[0] == 74 // 4
    for curve in result.curves:
        assert len(curve) == len(result.positions)
        assert np.mean(curve[:20]) > 1.5 * np.mean(curve[20:40]) > 1.5 * np.mean(curve[40:]) > 0


def test_only_monotone_dimensions_are_kept_and_the_smoothest_comes_first() -> None:
    positions = np.linspace(0, 1, 200)
    noise = np.random.default_rng(0).normal(size=200)
    values = np.zeros((8, 200, 5))
    values[:, :, 0] = np.sin(9 * positions)  # smooth, and not monotone
    values[:, :, 1] = 3 * positions + 0.05 * noise  # monotone, and rough
    values[:, :, 2] = 1e6 * positions**3  # monotone, smooth, and large
    values[:2, :, 3] = positions  # monotone in a quarter of the layers and no more
    values[:3, :, 4] = -1e-6 * positions  # monotone in more, and tiny
    values = np.concatenate((values, np.zeros((1, 200, 5))))  # the last layer does not count
    assert averaged_dimensions(values, 0) == [4, 2, 1]
    turning = values.copy()
    turning[:4, :, 2] *= -1
    turning[:2, :, 4] *= -1
    assert averaged_dimensions(turning, 0) == [2, 1], "layers of the other direction do not count"
    values[:, :100, 1] = 100.0
    assert 1 in averaged_dimensions(values, 100), "what is skipped does not count"


def test_a_result_survives_a_file_and_is_loaded_as_an_intervention(result: SearchResult, tmp_path: Path) -> None:
    path = tmp_path / "search.json"
    for saved in (result, result.found):
        saved.save(path)
        assert HiddenScaling.load(path) == result.found
    for text in ("{", "[]", "{}", '{"dimensions": [1], "factor": null, "layers": [1]}'):
        path.write_text(text)
        with pytest.raises(InvalidChoice, match=r"dimensions, factor and layers"):
            HiddenScaling.load(path)


def test_the_picture_is_a_picture(result: SearchResult, tmp_path: Path) -> None:
    result.draw(tmp_path / "dimension.png")
    assert (tmp_path / "dimension.png").read_bytes().startswith(b"\x89PNG")


def test_a_model_without_positional_dimensions_is_refused(examples: list[Example]) -> None:
    model = tiny_model("llama", num_hidden_layers=2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.zero_()
    with pytest.raises(UnsupportedModel, match="no hidden dimension is monotone"):
        search_dimension(model, examples=examples, procedure="averaged")


def test_a_search_needs_examples(llama: PreTrainedModel) -> None:
    with pytest.raises(TokenizerRequired):
        search_dimension(llama, procedure="averaged")
    for nothing in ([], [Example((1, 2), (3,))]):
        with pytest.raises(InvalidChoice, match="at least 16 tokens"):
            search_dimension(llama, examples=nothing, procedure="averaged")
    with pytest.raises(TokenizerRequired):
        search_dimension(_planted(8), examples=[Example((1, 2), (3,))])


def test_built_in_examples_ask_for_keys_at_every_place_and_fit_the_window(tokenizer: PreTrainedTokenizerFast) -> None:
    examples = key_value_examples(tokenizer, 5, pairs=5)
    places = []
    for example in examples:
        text, answer = tokenizer.decode(example.prompt), tokenizer.decode(example.answer)
        key = text.rsplit('"', 3)[1]
        lines = text.splitlines()[1:-1]
        places.append(lines.index(f'"{key}": "{answer}"'))
    assert places == [0, 1, 2, 3, 4]
    assert key_value_examples(tokenizer, 5, pairs=5) == examples
    small = key_value_examples(tokenizer, 5, pairs=5, window=200)
    assert max(len(each.prompt) + len(each.answer) for each in small) <= 200
    with pytest.raises(ContextOverflow, match="60 tokens"):
        key_value_examples(tokenizer, 5, window=60)


def test_the_command_writes_what_the_library_loads(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    chat_llama.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    options = ["--out", str(tmp_path / "out"), "--examples", "2", "--pairs", "3", "--keep", "1"]
    options += ["--procedure", "averaged"]
    ran = CliRunner().invoke(app, ["search-dimension", str(tmp_path / "model"), *options, "--json"])
    assert ran.exit_code == 0, ran.output
    found = json.loads((tmp_path / "out" / "search.json").read_text())
    assert json.loads(ran.stdout)["dimensions"] == found["dimensions"]
    assert [factor for _, factor, _ in found["trials"]] == list(FACTORS)
    assert (tmp_path / "out" / "dimension.png").exists()
    ran = CliRunner().invoke(app, ["search-dimension", str(tmp_path / "model"), *options])
    assert "validation loss" in ran.stdout
    ran = CliRunner().invoke(app, ["search-dimension", str(tmp_path / "model"), *options[:-1], "published"])
    assert ran.exit_code == 2
    assert "Use the procedure 'averaged'" in " ".join(ran.stderr.split())
    ran = CliRunner().invoke(app, ["search-dimension", str(tmp_path / "model"), *options[:-1], "ours"])
    assert ran.exit_code == 2
    assert "unknown search procedure" in ran.stderr
    (tmp_path / "taken").write_text("a file")
    ran = CliRunner().invoke(app, ["search-dimension", str(tmp_path / "model"), "--out", str(tmp_path / "taken")])
    assert ran.exit_code == 2
    assert "cannot make the folder" in ran.stderr
    assert "Loading model" not in ran.stderr
    ran = CliRunner().invoke(app, ["search-dimension", str(tmp_path / "nowhere"), *options])
    assert ran.exit_code == 2
    assert "expected a causal LM" in ran.stderr
