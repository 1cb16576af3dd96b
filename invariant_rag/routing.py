"""Selective Routing: ask the plain model and the invariant one, and keep one answer (arXiv 2502.08662, section 3.3).

Some prompts are sets, and in some the order means something ("none of the above"). The router takes the invariant
answer only where that model is the more confident one by a margin. It costs both answers.

A router that looks at the plain model inherits its order dependence: with `plain_order="given"`, as published, the
answer may change with the order of the segments. With `plain_order="canonical"` it does not, and the plain model no
longer sees the order in which the segments were given.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast, get_args, overload

import torch

from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.streaming import Abandoned
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

Branch: TypeAlias = Literal["plain", "invariant"]
PlainOrder: TypeAlias = Literal["given", "canonical"]

_REMEMBERING = ("logits_processor", "stopping_criteria")

ALPHA = 0.2
"""The published margin, chosen on the validation set of MMLU."""
ALPHAS = (-0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The margins that were tried for it (arXiv 2502.08662, appendix E)."""


def route(plain_confidence: float, invariant_confidence: float, alpha: float = ALPHA) -> Branch:
    """Choose a branch: the invariant one if `plain_confidence + alpha < invariant_confidence`, as published.

    >>> route(0.5, 0.75), route(0.5, 0.7), route(0.9, 0.95)
    ('invariant', 'plain', 'plain')

    Args:
        plain_confidence: Confidence of the plain model, from 0 to 1.
        invariant_confidence: Confidence of the invariant model.
        alpha: How much more confident the invariant model has to be.
    """
    return "invariant" if plain_confidence + alpha < invariant_confidence else "plain"


def text_confidence(logprobs: Sequence[float]) -> float:
    """Return the geometric mean of token probabilities: how confident a model is in a text. No token: 0.

    Args:
        logprobs: Log-probability of each token.
    """
    return math.exp(math.fsum(logprobs) / len(logprobs)) if logprobs else 0.0


def candidate_confidence(logprobs: Sequence[float]) -> float:
    """Return the largest probability of a candidate. It is the model's own, not a share among the candidates.

    Args:
        logprobs: Log-probability of each candidate; at least one.
    """
    return math.exp(max(logprobs))


@dataclass(frozen=True)
class RoutingRecord:
    """Both branches on one labelled question.

    Attributes:
        plain_confidence: Confidence of the plain model.
        invariant_confidence: Confidence of the invariant model.
        plain_score: How good the plain answer is: right or wrong, or any measure of which more is better.
        invariant_score: How good the invariant answer is.
    """

    plain_confidence: float
    invariant_confidence: float
    plain_score: float
    invariant_score: float


@dataclass(frozen=True)
class TunedAlpha:
    """What `tune_alpha` found.

    Attributes:
        alpha: The best margin.
        score: Mean score of the routed answers at this margin.
        scores: The same for every margin that was tried.
    """

    alpha: float
    score: float
    scores: dict[float, float]


def tune_alpha(records: Iterable[RoutingRecord], alphas: Sequence[float] = ALPHAS) -> TunedAlpha:
    """Find the margin with the best mean score on a labelled set.

    Of margins that are equally good, the one nearest to 0 is taken; of two as near, the positive one, which trusts the
    plain model more.

    Args:
        records: Both branches on each question.
        alphas: Margins to try; the published ones where nothing is given.

    Raises:
        InvalidChoice: There is no record, or no margin.
    """
    known = list(records)
    if not known or not alphas:
        raise InvalidChoice(f"expected records and margins to choose from, got {len(known)} and {len(alphas)}")

    def mean(alpha: float) -> float:
        branches = [route(each.plain_confidence, each.invariant_confidence, alpha) for each in known]
        scores = [
            each.plain_score if branch == "plain" else each.invariant_score
            for each, branch in zip(known, branches, strict=True)
        ]
        return math.fsum(scores) / len(scores)

    scores = {alpha: mean(alpha) for alpha in alphas}
    best = max(scores, key=lambda alpha: (scores[alpha], -abs(alpha), alpha))
    return TunedAlpha(best, scores[best], scores)


@dataclass(frozen=True)
class RoutedGeneration(Generation):
    """The answer that was kept.

    Attributes:
        branch: Whose answer it is.
        plain_confidence: Geometric mean of the token probabilities of the plain answer.
        invariant_confidence: The same of the invariant answer.
    """

    branch: Branch = "plain"
    plain_confidence: float = 0.0
    invariant_confidence: float = 0.0


class RoutedScores(list[float]):
    """Log-probabilities of candidates, from the branch that was taken.

    Attributes:
        branch: Which one.
        plain_confidence: Largest probability that the plain model gives a candidate.
        invariant_confidence: The same of the invariant model.
    """

    def __init__(
        self, values: Iterable[float], branch: Branch, plain_confidence: float, invariant_confidence: float
    ) -> None:
        super().__init__(values)
        self.branch = branch
        self.plain_confidence = plain_confidence
        self.invariant_confidence = invariant_confidence


class RoutedModel(InvariantModel):
    """An `InvariantModel` that generates and scores twice, and keeps one result. Made by `with_routing`.

    `generate`, `stream` and `score` are routed. `logits`, `prepare` and `arranged` are those of the invariant branch.
    """

    @classmethod
    def over(cls, lm: InvariantModel, *, alpha: float = ALPHA, plain_order: PlainOrder = "given") -> Self:
        """Return a model that routes between `lm` and the plain model; same weights.

        Raises:
            InvalidChoice: `alpha` is no finite number.
            UnknownName: No such order.
        """
        if not math.isfinite(alpha):
            raise InvalidChoice(f"alpha: expected a finite number, got {alpha}")
        if plain_order not in get_args(PlainOrder):
            raise UnknownName("plain_order", plain_order, get_args(PlainOrder))
        routed = object.__new__(cls)
        vars(routed).update(vars(lm), _routing=(alpha, plain_order))
        return routed

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (self.invariant_branch, self.alpha, self.plain_order)

    @property
    def alpha(self) -> float:
        """How much more confident the invariant branch has to be."""
        alpha: float = vars(self)["_routing"][0]
        return alpha

    @property
    def plain_order(self) -> PlainOrder:
        """The order of the segments in the plain branch: `given`, or `canonical` (the ordering of the model)."""
        plain_order: PlainOrder = vars(self)["_routing"][1]
        return plain_order

    @property
    def invariant_branch(self) -> InvariantModel:
        """The model without routing."""
        lm = object.__new__(InvariantModel)
        vars(lm).update({name: value for name, value in vars(self).items() if name != "_routing"})
        return lm

    @property
    def plain_branch(self) -> InvariantModel:
        """The plain model, on the same weights."""
        ordering = "given" if self.plain_order == "given" else self.ordering
        return self.invariant_branch.with_method("sequential", ordering=ordering)

    @property
    def invariant(self) -> bool:
        """Whether the order in which segments are given changes no bit of the output."""
        return self.ordering.invariant and self.plain_order == "canonical"

    @property
    def name(self) -> str:
        """Name of the model, with its routing: what caches know an answer by has to tell the two apart."""
        return f"{super().name} (routed, alpha={self.alpha}, plain_order={self.plain_order})"

    @overload
    def generate(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> RoutedGeneration: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> list[Generation]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> Generation | list[Generation]:
        """Generate with both branches, and keep one answer for each prompt.

        Args:
            prompt: One prompt, or several.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            seed: Seed for sampling, the same for both branches.
            **kwargs: As for `InvariantModel.generate`. A streamer gets the answer once it is known which one it is.
                With `num_return_sequences`, the first answers of both branches are compared, then the second ones...

        Returns:
            One `RoutedGeneration` for one prompt, and a list for several.

        Raises:
            UnsupportedCombination: A streamer was given for several answers, or a logits processor or a stopping
                criterion that can be used for one text only.
        """
        streamer = kwargs.pop("streamer", None)
        again = {**kwargs, **_copied({name: kwargs[name] for name in _REMEMBERING if name in kwargs})}
        plain = self.plain_branch.generate(prompt, max_new_tokens=max_new_tokens, seed=seed, **again)
        ours = self.invariant_branch.generate(prompt, max_new_tokens=max_new_tokens, seed=seed, **kwargs)
        one = isinstance(plain, Generation) and isinstance(ours, Generation)
        pairs = [(plain, ours)] if one else zip(cast(list[Any], plain), cast(list[Any], ours), strict=True)
        routed = [self._routed(*pair) for pair in pairs]
        if streamer is not None:
            _replay(routed, streamer)
        return routed[0] if one else list(routed)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> list[float]:
        """Score candidates with both branches, and return those of one as `RoutedScores`."""
        plain = self.plain_branch.score(prompt, candidates)
        ours = self.invariant_branch.score(prompt, candidates)
        if not plain:
            return []
        confidences = candidate_confidence(plain), candidate_confidence(ours)
        branch = route(*confidences, self.alpha)
        return RoutedScores(plain if branch == "plain" else ours, branch, *confidences)

    def _routed(self, plain: Generation, ours: Generation) -> RoutedGeneration:
        confidences = text_confidence(plain.logprobs), text_confidence(ours.logprobs)
        branch = route(*confidences, self.alpha)
        kept = plain if branch == "plain" else ours
        values = {field.name: getattr(kept, field.name) for field in fields(Generation)}
        return RoutedGeneration(
            **values, branch=branch, plain_confidence=confidences[0], invariant_confidence=confidences[1]
        )


def _unpickled(lm: InvariantModel, alpha: float, plain_order: PlainOrder) -> RoutedModel:
    return RoutedModel.over(lm, alpha=alpha, plain_order=plain_order)


def _copied(options: dict[str, Any]) -> dict[str, Any]:
    """Copy what may remember the text that it has seen, such as a grammar: there are two texts.

    What one of the options shares with another, their copies share too. An event that ends a generation stays the same.
    """
    criteria = [each for each in options.get("stopping_criteria") or () if isinstance(each, Abandoned)]
    try:
        return copy.deepcopy(options, {id(each): each for each in criteria})
    except TypeError as error:
        raise UnsupportedCombination(
            f"expected {' and '.join(options)} that can be copied, as a routed model writes two texts: {error}",
            hint="Use the model without routing, model.invariant_branch.",
        ) from error


def _replay(routed: Sequence[RoutedGeneration], streamer: BaseStreamer) -> None:
    """Hand a finished answer to a streamer as transformers would have: the prompt, then each token."""
    if len(routed) != 1:
        raise UnsupportedCombination(f"expected one answer to stream, got {len(routed)}")
    streamer.put(torch.empty((1, 0), dtype=torch.long))
    for token in routed[0].token_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
