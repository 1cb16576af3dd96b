"""Hidden scaling: the published code's logits, a float64 loop, the published table, and what it refuses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.interventions import HiddenScaling
from invariant_rag.interventions.hidden_scaling import PUBLISHED
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.rounding import rounding

GOLDEN = Path(__file__).parents[1] / "golden"
RUNS: dict[str, Any] = {
    name: json.loads((GOLDEN / f"{name}.json").read_text()) for name in ("hidden_scaling", "hidden_scaling_settings")
}
ENTRIES = [(name, entry) for name, runs in RUNS.items() for entry in runs["entries"]]


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=[f"{each['case']}-{each['method']}" for _, each in ENTRIES])
def test_logits_and_greedy_tokens_equal_the_published_code(
    name: str, entry: dict[str, Any], golden_model: PreTrainedModel
) -> None:
    """Also with its settings last_recompute_tokens, change_value and skip_first; all tokens are its number then."""
    case, config = RUNS["hidden_scaling"]["cases"][entry["case"]], RUNS[name]["configs"][entry["method"]]
    settings: dict[str, Any] = {}
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
def test_logits_and_decoding_equal_a_float64_loop_written_from_the_paper(
    settings: dict[str, Any], factor: float, llama_logits: Callable[..., torch.Tensor]
) -> None:
    """Equations 4 and 5 with the ablations of table 3; every generated token is a last token."""
    model: Any = tiny_model("llama", eos_token_id=None).double()
    scaling = HiddenScaling((5, 40), factor, (1, 3), **settings)
    lm = InvariantModel(model, method="sequential", intervention=scaling)
    prompt = random_prompt(random.Random(2), (4, 7, 12))
    ids, written = list(lm.prepare(prompt).input_ids), lm.generate(prompt, max_new_tokens=3)
    assert len(ids) > 16 + 5
    first = 0 if scaling.last_tokens is None else len(ids) - scaling.last_tokens

    def reads(layer: int, token: int, states: torch.Tensor) -> torch.Tensor:
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
def test_a_padded_batch_equals_single_calls(settings: dict[str, Any]) -> None:
    scaling = HiddenScaling((5, 40), -1.0, (1, 3), **settings)
    lm = InvariantModel(tiny_model("llama", eos_token_id=None), method="sequential", intervention=scaling)
    prompts = [random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(9, 2, 11), (3, 4)])]
    for prompt, together in zip(prompts, lm.generate(prompts, max_new_tokens=3), strict=True):
        alone = lm.generate(prompt, max_new_tokens=3)
        assert together.token_ids == alone.token_ids
        assert together.logprobs == pytest.approx(alone.logprobs, abs=rounding(lm.generate, prompt, max_new_tokens=3))


def test_settings_survive_a_file(tmp_path: Path) -> None:
    scaling = HiddenScaling((5, 40), -1, (1, 3), last_tokens=None, skip_first=2, scale_values=True)
    scaling.save(tmp_path / "scaling.json")
    assert HiddenScaling.load(tmp_path / "scaling.json") == scaling
    (tmp_path / "scaling.json").write_text('{"dimensions": [5], "factor": 0, "layers": [1]}')
    assert HiddenScaling.load(tmp_path / "scaling.json") == HiddenScaling(5, 0, [1])


def test_the_published_table_is_found_by_id_and_by_the_last_part_of_it() -> None:
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


def test_by_name_it_has_the_parameters_published_for_the_model(llama: PreTrainedModel) -> None:
    with pytest.raises(UnknownName, match="'llama'"):
        InvariantModel(llama, method="sequential", intervention="hidden-scaling")
    model = tiny_model("llama", num_hidden_layers=26, hidden_size=216)
    model.config._name_or_path = "mistralai/Mistral-7B-Instruct-v0.2"
    lm = InvariantModel(model, method="sequential", intervention="hidden-scaling")
    assert lm.intervention == HiddenScaling(213, 0, range(10, 26))


def test_parameters_without_a_meaning_or_beyond_the_model_are_refused(llama: PreTrainedModel) -> None:
    for parameters in (((), 0, [1]), (5, 0, []), (-1, 0, [1]), (5, 0, [-1, 2])):
        with pytest.raises(InvalidChoice, match="one or more indices"):
            HiddenScaling(*parameters)  # type: ignore[arg-type]
    with pytest.raises(InvalidChoice, match="last_tokens: expected at least 1"):
        HiddenScaling(5, 0, [1], last_tokens=0)
    with pytest.raises(InvalidChoice, match="skip_first: expected at least 0"):
        HiddenScaling(5, 0, [1], skip_first=-1)
    dimension, layer = HiddenScaling(64, 0, [1]), HiddenScaling(5, 0, [0, 2])
    for scaling, expected in ((dimension, "dimensions: expected indices below 64"), (layer, "layers: .* below 2")):
        with pytest.raises(UnsupportedCombination, match=f"{expected} for llama"):
            InvariantModel(llama, method="sequential", intervention=scaling)
