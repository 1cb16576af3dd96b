"""Contextual calibration: divide by the probabilities for content-free inputs (arXiv 2102.09690)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from invariant_rag.checks import check_function, check_kind
from invariant_rag.ensembles.base import Ensemble, Scores, count_cost
from invariant_rag.errors import InvalidChoice, InvalidPrompt
from invariant_rag.generation.model import InvariantModel
from invariant_rag.segments import Prompt, Segment, SegmentSet
from invariant_rag.shown import shown

Blank = str | Sequence[int]


def blank_segments(prompt: Prompt, blank: Blank) -> Prompt:
    """Return the prompt with every segment replaced by a content-free one without a title; texts are unchanged.

    >>> blank_segments(Prompt("Read:", ["one", "two"], "Which?"), "N/A").segments == SegmentSet(["N/A", "N/A"])
    True
    """
    check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
    return prompt.with_sets(SegmentSet([Segment.of(blank)] * len(each)) for each in prompt.sets)


class ContextualCalibration:
    """Candidate scores, calibrated with content-free prompts (arXiv 2102.09690, section 5).

    The probabilities of the candidates are divided by their mean over content-free prompts, and normalised over the
    candidates. The mean is taken before normalising, as in the published code (`get_p_content_free` in
    tonyzhaozh/few-shot-learning). The published method replaces the input of a classifier by a content-free text; here,
    the segments are replaced. This removes the model's preference for some candidates, but no order dependence: the
    result is invariant if `scorer` is.

    Args:
        scorer: A model, or a `PermutationAverage`, `RingAverage` or `AttentionSorting` of one.
        content_free: Content-free replacements for a segment: texts, or token ids for a model without a tokenizer. The
            default is the published list.
        blank: Function that makes a prompt content-free.

    Raises:
        InvalidChoice: `content_free` is empty.
    """

    def __init__(
        self,
        scorer: InvariantModel | Ensemble[Any],
        content_free: Sequence[Blank] = ("N/A", "[MASK]", ""),
        *,
        blank: Callable[[Prompt, Blank], Prompt] = blank_segments,
    ) -> None:
        if not isinstance(content_free, Sequence) or isinstance(content_free, str | bytes) or not content_free:
            raise InvalidChoice(
                f"content_free: expected at least one text, got {shown(content_free)}", hint="Give them as a list."
            )
        if not callable(getattr(scorer, "score", None)) or not hasattr(scorer, "model"):
            raise InvalidChoice(f"scorer: expected a model or an ensemble, got {shown(scorer)}")
        self.scorer = scorer
        self.content_free = tuple(content_free)
        self._blank = check_function("blank", blank)

    @property
    def invariant(self) -> bool:
        """Whether permuting the input segments changes no bit of the output."""
        return self.scorer.invariant

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> Scores:
        """Return the logarithms of the candidates' calibrated probabilities, which sum to one, and the cost."""
        with count_cost(self.scorer.model) as counter:
            logprobs = self.scorer.score(prompt, candidates)
            blank = [self._blank(prompt, each) for each in self.content_free]
            content_free = [self.scorer.score(each, candidates) for each in blank]
        # In log space throughout: the probability of a long candidate may underflow. Constants cancel out in the end.
        calibrated = np.subtract(logprobs, np.logaddexp.reduce(content_free, axis=0))
        return Scores((calibrated - np.logaddexp.reduce(calibrated)).tolist(), counter.cost)
