"""Explanations: which segment saw which, at what distance, and what the answer owes to each of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from invariant_rag.attention.hook import ArrangedAttention, PromptState, override_attention
from invariant_rag.attention.trace import Sight, TracingBackend
from invariant_rag.checks import require_extra
from invariant_rag.errors import InvalidChoice, InvalidPrompt, UnsupportedCombination
from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt, SegmentSet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.prepare import PreparedPrompt

_NAME = 24  # characters of a segment's name in tables and figures
_ATTENTION, _ALONE = "#0072b2", "#e69f00"  # of the Okabe-Ito palette, which is safe for colour-blind readers
_KINDS = (".png", ".svg", ".pdf")
_MOST_NUMBERS = 12  # segments up to which cells hold their numbers


@dataclass(frozen=True)
class Explanation:
    """How the segments of one prompt saw each other, and what one answer owes to each.

    Segments are named by their index in `prompt.segments`. Only those that were read and have tokens take part.

    Attributes:
        prompt: The prompt.
        answer: The answer, decoded greedily.
        setting: Names of the model, method, ordering and backend.
        order: The segments in physical order, farthest from the suffix first.
        sights: For each reader, a segment or None for the answer, how it sees each segment.
        confidence: Mean probability of the answer's tokens in the prompt.
        alone: For each segment, the same if it is the only one of its set.
        without: The same with all sets empty.
    """

    prompt: Prompt
    answer: Generation
    setting: Mapping[str, str]
    order: tuple[int, ...]
    sights: Mapping[int | None, Mapping[int, Sight]]
    confidence: float
    alone: Mapping[int, float]
    without: float

    @property
    def elsewhere(self) -> float:
        """Share of the answer's attention that goes to no segment: to the texts, to the answer itself, to a sink."""
        return max(0.0, 1.0 - math.fsum(sight.attention for sight in self.sights[None].values()))

    def name(self, index: int | None) -> str:
        """Return a short name of a segment: its index and its title, or the beginning of its text; of None: answer."""
        if index is None:
            return "answer"
        segment = self.prompt.segments[index]
        words = " ".join((segment.title or segment.text or f"{len(segment.token_ids or ())} tokens").split())
        return f"[{index}] {words if len(words) <= _NAME else words[: _NAME - 1] + '…'}"

    def text(self) -> str:
        """Return the explanation as text: who saw whom at what distance, and the answer by segment."""
        names = {index: self.name(index) for index in self.sights}
        wide = max(map(len, names.values()))
        columns = [f"[{index}]" for index in self.order]
        width = max([6, *(len(_distance(sight)) for row in self.sights.values() for sight in row.values())])
        setting = self.setting
        lines = [
            f"{setting['method']}, {setting['ordering']}: {self.answer.text!r}, confidence {self.confidence:.2f}",
            "",
            "Distance in tokens from the end of the reader (line) back to the end of the segment (column): mean and",
            "range over layers, heads and tokens. - is not seen; a negative distance lies behind the reader.",
            f"{'':{wide}}  {'  '.join(f'{each:>{width}}' for each in columns)}",
        ]
        for reader, row in self.sights.items():
            cells = ["itself" if reader == each else _distance(row[each]) for each in self.order]
            lines.append(f"{names[reader]:{wide}}  {'  '.join(f'{cell:>{width}}' for cell in cells)}")
        lines += ["", f"{'The answer owes to':{wide}}  attention  in layers  confidence with it alone"]
        for each in self.order:
            sight = self.sights[None][each]
            lines.append(f"{names[each]:{wide}}  {sight.attention:9.1%}  {sight.layers:9.0%}  {self.alone[each]:.2f}")
        lines.append(f"{'no segment':{wide}}  {self.elsewhere:9.1%}  {'':9}  {self.without:.2f}")
        return "\n".join(lines)

    __str__ = text

    def figure(self) -> Figure:
        """Draw the explanation: distances as a map, and attention and confidence by segment as bars.

        Raises:
            ExtraRequired: matplotlib is not installed.
        """
        return draw(self)

    def save_figure(self, path: str | Path) -> None:
        """Draw the explanation into a file, of the kind that its name says: `.png`, `.svg` or `.pdf`.

        Raises:
            InvalidChoice: The file is of another kind.
        """
        self.figure().savefig(check_figure_file(path), dpi=144)

    def as_dict(self) -> dict[str, Any]:
        """Return the explanation as plain values, for JSON."""
        return {
            "setting": dict(self.setting),
            "answer": self.answer.text,
            "order": list(self.order),
            "readers": [
                {
                    "segment": reader,
                    "sees": [
                        {
                            "segment": each,
                            "distance": sight.distance,
                            "closest": min(sight.distances, default=None),
                            "farthest": max(sight.distances, default=None),
                            "attention": sight.attention,
                            "layers": sight.layers,
                        }
                        for each, sight in row.items()
                    ],
                }
                for reader, row in self.sights.items()
            ],
            "confidence": {"together": self.confidence, "alone": dict(self.alone), "without": self.without},
        }


def _distance(sight: Sight) -> str:
    if not sight.distances:
        return "-"
    nearest, farthest = min(sight.distances), max(sight.distances)
    mean = f"{sight.distance:.4g}"
    return mean if nearest == farthest else f"{mean} ({nearest:.4g} to {farthest:.4g})"


def explain(lm: InvariantModel, prompt: Prompt, max_new_tokens: int | None = None) -> Explanation:
    """Answer a prompt and explain the answer; see `InvariantModel.explain`.

    Raises:
        InvalidPrompt: No segment has tokens.
        UnsupportedCombination: The model has an intervention.
    """
    if lm.intervention is not None:
        raise UnsupportedCombination(
            f"expected a model without an intervention, got {lm.intervention.name!r}, which changes attention weights",
            hint='Explain the model without it: lm.with_method("sequential", ordering="lexical").explain(prompt).',
        )
    lm = lm.with_cache(None)
    answer = lm.generate(prompt, max_new_tokens=max_new_tokens)
    prepared = lm.prepare(prompt, new_tokens=len(answer.token_ids))
    lengths = [length for lengths in prepared.arrangement.layout.sets for length in lengths]
    read = [(place, index) for place, index in enumerate(prepared.order) if lengths[place]]
    if not read:
        raise InvalidPrompt("expected a prompt with segments, got none with a token")
    sights = _trace(lm, prepared, answer.token_ids)
    readers = [*read, (len(lengths), None)]
    setting = {"model": lm.name, "method": lm.method.name, "ordering": lm.ordering.name, "backend": lm.backend.name}
    return Explanation(
        prompt=prompt,
        answer=answer,
        setting=setting,
        order=tuple(index for _, index in read),
        sights={reader: {index: sights[line][place] for place, index in read} for line, reader in readers},
        confidence=_mean_probability(answer.logprobs),
        alone={index: _confidence(lm, _only(prompt, index), answer.token_ids) for _, index in read},
        without=_confidence(lm, _only(prompt, None), answer.token_ids),
    )


def _trace(lm: InvariantModel, prepared: PreparedPrompt, answer: Sequence[int]) -> list[list[Sight]]:
    """Return how every reader sees every segment, in memory order; one forward pass over prompt and answer."""
    prefiller = lm.prefiller
    backend = TracingBackend(lm.backend, prepared.arrangement.layout)
    attention = ArrangedAttention([PromptState(prepared.arrangement)], backend, prefiller.rotations)
    with prefiller.exclusive(), override_attention(lm.model, attention):
        prefiller.forward(prepared, 1, answer=answer[:-1], use_cache=False)
    return backend.sights()


def _confidence(lm: InvariantModel, prompt: Prompt, answer: Sequence[int]) -> float:
    """Return the mean probability of an answer's tokens after a prompt."""
    prepared = lm.prepare_to_generate(prompt, len(answer))
    with lm.prefiller.exclusive():
        logits = lm.prefiller.continuation_logits(prepared, [tuple(answer)])
    logprobs = torch.log_softmax(logits[0].float(), dim=-1)
    return _mean_probability(logprobs[torch.arange(len(answer)), torch.tensor(answer)].tolist())


def _mean_probability(logprobs: Sequence[float]) -> float:
    return math.fsum(map(math.exp, logprobs)) / len(logprobs)


def _only(prompt: Prompt, index: int | None) -> Prompt:
    """Return a prompt with one segment of one set, and all other sets as they are; with None, all sets empty."""
    if index is None:
        return prompt.with_sets(each[:0] for each in prompt.sets)
    sets, start = [], 0
    for each in prompt.sets:
        place = index - start
        sets.append(_one(each, place) if 0 <= place < len(each) else each)
        start += len(each)
    return prompt.with_sets(sets)


def _one(segments: SegmentSet, place: int) -> SegmentSet:
    """Return a set with one of its segments."""
    slots = None if segments.slots is None else segments.slots[place : place + 1]
    return SegmentSet([segments[place]], slots=slots)


# The figure is drawn without pyplot, whose state is global.


def check_figure_file(path: str | Path) -> str | Path:
    """Return the path of a figure that can be drawn.

    Raises:
        InvalidChoice: Its name ends with none of the kinds of files.
        ExtraRequired: matplotlib is not installed.
    """
    require_extra("matplotlib", "plots")
    if Path(path).suffix.lower() not in _KINDS:
        raise InvalidChoice(
            f"expected a figure in a file of {', '.join(_KINDS)}, got {str(path)!r}", hint="Name it so: explain.png."
        )
    return path


def draw(explanation: Explanation) -> Figure:
    """Return a figure of three panels: distances as a map, and attention and confidence by segment as bars."""
    require_extra("matplotlib", "plots")
    from matplotlib.figure import Figure

    count = len(explanation.order)
    side = max(3.0, min(0.5 * count, 10.0))
    figure = Figure(figsize=(side + 6.5, side + 1.6), layout="constrained")
    grid, attention, confidence = figure.subplots(1, 3, width_ratios=(side + 1.5, 2.0, 2.0))
    _draw_distances(grid, explanation, figure)
    _draw_bars(
        attention,
        [explanation.sights[None][each].attention for each in explanation.order],
        explanation.elsewhere,
        _ATTENTION,
        "attention of the answer",
    )
    _draw_bars(
        confidence,
        [explanation.alone[each] for each in explanation.order],
        explanation.without,
        _ALONE,
        "confidence with it alone",
    )
    confidence.axvline(explanation.confidence, color="#555555", lw=1, ls="--")
    confidence.set_xlabel("dashed: together", size=8)
    said = explanation.answer.text if len(explanation.answer.text) <= 60 else explanation.answer.text[:59] + "…"
    figure.suptitle(_printable(f"{explanation.setting['method']}: {said}"), size=10, parse_math=False)
    return figure


def _draw_distances(axis: Axes, explanation: Explanation, figure: Figure) -> None:
    order, readers = explanation.order, list(explanation.sights)
    rows = [[explanation.sights[reader][each].distance for each in order] for reader in readers]
    values = [[float("nan") if value is None else value for value in row] for row in rows]
    image = axis.imshow(values, cmap="viridis_r", aspect="auto")
    figure.colorbar(image, ax=axis, location="bottom", label="distance in tokens; white: not seen", shrink=0.8)
    axis.set_xticks(range(len(order)), [f"[{each}]" for each in order], size=8)
    names = [_printable(explanation.name(each)) for each in readers]
    axis.set_yticks(range(len(readers)), names, size=8, parse_math=False)
    axis.xaxis.tick_top()
    axis.set_title("this segment is seen", size=9)
    axis.set_ylabel("by this reader")
    known = [value for row in rows for value in row if value is not None]
    middle = (min(known) + max(known)) / 2
    for line, row in enumerate(rows if len(order) <= _MOST_NUMBERS else ()):
        for column, value in enumerate(row):
            if value is not None:
                shown = "self" if readers[line] == order[column] else f"{value:.0f}"
                axis.text(column, line, shown, ha="center", va="center", size=7, color="wk"[value < middle])


def _draw_bars(axis: Axes, values: list[float], last: float, colour: str, title: str) -> None:
    """Draw one bar for each segment, in line with the map's readers, and a pale one for no segment."""
    axis.barh(range(len(values)), values, color=colour)
    axis.barh([len(values)], [last], color=colour, alpha=0.35)
    axis.set_ylim(len(values) + 0.5, -0.5)
    axis.set_yticks([len(values)], ["no\nsegment"], size=8)
    axis.set_xlim(0, max(1e-9, *values, last) * 1.1)
    axis.set_title(title, size=9)
    axis.spines[["top", "right"]].set_visible(False)


def _printable(text: str) -> str:
    """Return text in which nothing is a control character, for which fonts have no glyph."""
    return "".join(each if each.isprintable() else "\ufffd" for each in text)
