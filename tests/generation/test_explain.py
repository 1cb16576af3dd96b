"""Explanations say what happened: distances as arranged, attention as computed, confidence as scored."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, KeyValueCache, Prompt, Segment, SegmentSet
from invariant_rag.attention.reference import Reference, keys_of_queries
from invariant_rag.attention.trace import Sight
from invariant_rag.errors import InvalidChoice, InvalidPrompt, UnsupportedCombination
from invariant_rag.generation.explain import Explanation
from invariant_rag.interventions import MsPoE
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import rounding

LENGTHS = (5, 3, 7, 4)
PROMPT = random_prompt(random.Random(3), LENGTHS, prefix=6, suffix=5)
INVARIANT = [name for name in METHODS if name != "sequential"]
ALONE = {"isolated", "parallel-windows", "set-based", "structured", "ape"}


def explained(model: PreTrainedModel, method: str, prompt: Prompt = PROMPT, **choices: Any) -> Explanation:
    return InvariantModel(model, method=method, **choices).explain(prompt, max_new_tokens=3)


def distances(row: Mapping[int, Sight]) -> dict[int, float]:
    return {index: sight.distance for index, sight in row.items() if sight.distance is not None}


def test_in_the_ring_of_rotor_every_segment_stands_behind_all_others(llama: PreTrainedModel) -> None:
    explanation = explained(llama, "rotor")
    order = explanation.order
    for place, reader in enumerate(order):
        ring = [*order[place + 1 :], *order[: place + 1]]  # far to near
        nearer = {each: sum(LENGTHS[other] for other in ring[at + 1 :]) for at, each in enumerate(ring)}
        assert distances(explanation.sights[reader]) == nearer
    assert distances(explanation.sights[None]) == {
        each: 5 + sum(LENGTHS[other] for other in order[place + 1 :]) for place, each in enumerate(order)
    }


@pytest.mark.parametrize("method", METHODS)
def test_segments_that_are_read_alone_see_themselves_only(method: str, llama: PreTrainedModel) -> None:
    explanation = explained(llama, method)
    for reader in explanation.order:
        row = explanation.sights[reader]
        others = [each for each in explanation.order if each != reader]
        seen = [each for each in others if row[each].attention > 0]
        assert row[reader].distances
        assert row[reader].attention > 0
        assert {*seen} == {each for each in others if row[each].distances}
        if method in ALONE:
            assert not seen
        elif method != "sequential":
            assert seen == others


def test_the_attention_is_that_of_the_model() -> None:
    model = tiny_model("llama", num_hidden_layers=3, eos_token_id=None)
    explanation = explained(model, "sequential")
    tokens = [*PROMPT.prefix, *(i for each in PROMPT.segments for i in each.token_ids or ()), *PROMPT.suffix]
    tokens += explanation.answer.token_ids[:-1]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = model(torch.tensor([tokens]), output_attentions=True).attentions
    weights = torch.stack(layers).double().mean(dim=(0, 1, 2))
    bound = rounding(attentions, model, "sequential")
    starts = [6, 11, 14, 21, 25, 29]
    for reader, (start, stop) in {0: (6, 11), 2: (14, 21), None: (29, 32)}.items():
        for segment in range(4):
            expected = weights[start:stop, starts[segment] : starts[segment + 1]].sum(dim=-1).mean()
            assert explanation.sights[reader][segment].attention == pytest.approx(float(expected), abs=bound)


def attentions(model: PreTrainedModel, method: str, **options: Any) -> list[float]:
    """All that an explanation says about attention."""
    return [sight.attention for row in explained(model, method, **options).sights.values() for sight in row.values()]


@pytest.mark.parametrize("method", INVARIANT)
def test_an_explanation_is_the_same_for_every_order(method: str, llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama, method=method)
    first = lm.explain(PROMPT, max_new_tokens=3)
    moved = [2, 0, 3, 1]
    other = lm.explain(PROMPT.with_sets([PROMPT.sets[0].permuted(moved)]), max_new_tokens=3)
    assert [moved[each] for each in other.order] == [*first.order]
    assert {moved[each]: value for each, value in other.alone.items()} == first.alone
    assert (other.confidence, other.without, other.answer.text) == (first.confidence, first.without, first.answer.text)
    for reader, row in other.sights.items():
        mine = first.sights[None if reader is None else moved[reader]]
        assert {moved[each]: sight for each, sight in row.items()} == mine


@pytest.mark.parametrize(
    ("method", "backend"), [*((method, "sdpa") for method in METHODS), ("rotor", "varlen"), ("pine", "varlen")]
)
def test_every_backend_explains_as_the_reference_does(method: str, backend: str, llama: PreTrainedModel) -> None:
    expected, found = (explained(llama, method, backend=name) for name in ("reference", backend))
    bound = rounding(attentions, llama, method, backend="sdpa")
    for reader, row in expected.sights.items():
        for each, sight in row.items():
            assert found.sights[reader][each].attention == pytest.approx(sight.attention, abs=bound)
            assert found.sights[reader][each].distances == sight.distances


@pytest.mark.parametrize("family", ["bloom", "gemma2", "gpt_oss", "mistral (sliding window)"])
@pytest.mark.parametrize("method", ["rotor", "pine"])
def test_every_kind_of_attention_is_explained(family: str, method: str) -> None:
    model = tiny_model(family)
    found, expected = (explained(model, method, backend=name) for name in ("sdpa", "reference"))
    bound = rounding(attentions, model, method, backend="sdpa")
    for reader, row in expected.sights.items():
        attention = sum(sight.attention for sight in row.values())
        assert 0 < attention < 1 + bound * len(row), "the prefix and sinks get the rest"
        for each, sight in row.items():
            assert found.sights[reader][each].attention == pytest.approx(sight.attention, abs=bound)


class Watched(Reference):
    """The reference, which keeps where the last token of every segment lies in each row of PINE."""

    def __init__(self) -> None:
        self.rows_seen: list[dict[int, list[dict[int, int]]]] = []

    def attend(self, arrangement: Any, call: Any) -> torch.Tensor:
        last = [span.stop - 1 for span in arrangement.layout.set_spans[0]]
        if call.query_start == 0 and call.keys.shape[1] > arrangement.layout.length:  # prompt and answer together
            readers = [*last, *range(arrangement.layout.length - 1, call.keys.shape[1])]
            heads = [list(keys_of_queries(arrangement, call, head)) for head in range(call.queries.shape[0])]
            self.rows_seen.append(
                {query: [{key.token: key.position for key in rows[query]} for rows in heads] for query in readers}
            )
        return super().attend(arrangement, call)


@pytest.mark.parametrize("method", ["pine", "pine-reverse"])
def test_pines_distances_are_those_of_every_head_layer_and_token(method: str, llama: PreTrainedModel) -> None:
    watched = Watched()
    explanation = explained(llama, method, backend=watched)
    layers = watched.rows_seen[::2]  # each layer attends twice: to be measured, and to answer
    assert len(layers) == 2
    ends, end = [], 6
    for each in explanation.order:
        end += LENGTHS[each]
        ends.append(end - 1)
    for place, reader in enumerate(explanation.order):
        for other, segment in enumerate(explanation.order):
            rows = [row for layer in layers for row in layer[ends[place]]]
            expected = [row[ends[place]] - row[ends[other]] for row in rows]
            found = explanation.sights[reader][segment].distances
            assert [*found] == (expected if place != other else [0.0] * len(layers))
    for other, segment in enumerate(explanation.order):
        expected = [
            29 - row[ends[other]]
            for layer in layers
            for head in range(4)
            for row in (layer[query][head] for query in range(29, 32))
        ]
        found = explanation.sights[None][segment].distances
        assert [*found] == expected
        assert len({*found}) > 1


def test_the_confidence_is_the_probability_of_the_answer(llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama)
    explanation = lm.explain(PROMPT, max_new_tokens=1)
    answer = [list(explanation.answer.token_ids)]

    def probability(segments: list[Segment]) -> float:
        return math.exp(lm.score(Prompt(PROMPT.prefix, segments, PROMPT.suffix), answer)[0])

    bound = rounding(lm.score, PROMPT, answer)  # of a log-probability: relative, of a probability
    assert explanation.confidence == pytest.approx(probability([*PROMPT.segments]), rel=bound)
    assert explanation.without == pytest.approx(probability([]), rel=bound)
    assert explanation.alone == pytest.approx(
        {index: probability([segment]) for index, segment in enumerate(PROMPT.segments)}, rel=bound
    )


def test_segments_of_several_sets_see_the_sets_before_theirs(llama: PreTrainedModel) -> None:
    prompt = Prompt.of([9, 8], SegmentSet([[5, 6, 7], [4, 4]]), [11], SegmentSet([[12, 13], [14]]), [15, 16])
    for method in ("rotor", "pine"):
        explanation = explained(llama, method, prompt)
        assert {*explanation.order} == {0, 1, 2, 3}
        first = {index: {*distances(explanation.sights[index])} for index in range(4)}
        assert first == {0: {0, 1}, 1: {0, 1}, 2: {0, 1, 2, 3}, 3: {0, 1, 2, 3}}
        # a set sees the one before it as a text that ends one token, and its own other segment, before it
        assert min(explanation.sights[3][0].distances) >= 1 + 1 + 2


def test_an_empty_segment_takes_no_part(llama: PreTrainedModel) -> None:
    explanation = explained(llama, "rotor", Prompt([3, 4], [[5, 6], [], [7, 8, 9]], [10]))
    assert {*explanation.order} == {0, 2}


def test_a_cache_is_left_alone(llama: PreTrainedModel) -> None:
    cache = KeyValueCache()
    InvariantModel(llama, cache=cache).explain(PROMPT, max_new_tokens=2)
    assert cache.stats().entries == 0


def test_what_cannot_be_explained_is_refused(llama: PreTrainedModel) -> None:
    with pytest.raises(InvalidPrompt, match="got none with a token"):
        InvariantModel(llama).explain(Prompt([3, 4], [], [5]), max_new_tokens=1)
    with pytest.raises(UnsupportedCombination, match="ms-poe"):
        InvariantModel(llama, method="sequential", intervention=MsPoE(first_layer=1)).explain(PROMPT, max_new_tokens=1)


def test_text_and_figure_show_every_segment_and_the_answer(model: InvariantModel, tmp_path: Path) -> None:
    chunks = [Segment("The ferry leaves at noon.", title="$Ostra$"), Segment("The mill grinds barley. " * 4)]
    explanation = model.explain(model.chat_prompt("When?", chunks), max_new_tokens=4)
    for name in ("[0] $Ostra$", "[1] The mill grinds barley.…", "answer", "no segment"):
        assert name in explanation.text()
    assert str(explanation) == explanation.text()
    drawn = [text.get_text() for axis in explanation.figure().axes for text in axis.get_yticklabels()]
    assert {"[0] $Ostra$", "[1] The mill grinds barley.…", "answer"} <= {*drawn}
    explanation.save_figure(tmp_path / "out.svg")
    assert "<svg" in (tmp_path / "out.svg").read_text()
    with pytest.raises(InvalidChoice, match=r"\.png"):
        explanation.save_figure(tmp_path / "out.txt")
