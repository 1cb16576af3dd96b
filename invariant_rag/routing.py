"""Selective Routing: run the plain and the invariant model, and return one answer (arXiv 2502.08662, section 3.3).

In some prompts the order of the segments carries meaning ("none of the above" as the last option). The router returns
the invariant answer only if that model is more confident than the plain one by a margin. It costs two generations.

The router inherits the order dependence of the plain model: with `plain_order="given"`, as published, the answer may
change with the order of the segments. With `plain_order="canonical"` it does not, but then the plain model cannot use
the input order either.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias, cast, get_args, overload

import torch

from invariant_rag.errors import InvalidChoice, UnknownName, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.streaming import StopOnEvent
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from transformers.generation.streamers import BaseStreamer

Branch: TypeAlias = Literal["plain", "invariant"]
PlainOrder: TypeAlias = Literal["given", "canonical"]

_STATEFUL_OPTIONS = ("logits_processor", "stopping_criteria")

ALPHA = 0.2
"""The published margin, chosen on the validation set of MMLU."""
ALPHAS = (-0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The candidate margins of the paper (arXiv 2502.08662, appendix E)."""


def route(plain_confidence: float, invariant_confidence: float, alpha: float = ALPHA) -> Branch:
    """Choose a branch: the invariant one if `plain_confidence + alpha < invariant_confidence`, as published.

    >>> route(0.5, 0.75), route(0.5, 0.7), route(0.9, 0.95)
    ('invariant', 'plain', 'plain')

    Args:
        plain_confidence: Confidence of the plain model, from 0 to 1.
        invariant_confidence: Confidence of the invariant model.
        alpha: Margin by which the invariant model must be more confident.
    """
    return "invariant" if plain_confidence + alpha < invariant_confidence else "plain"


def text_confidence(logprobs: Sequence[float]) -> float:
    """Return the confidence in a text: the geometric mean of its token probabilities, or 0 for no tokens.

    Args:
        logprobs: Log-probability of each token.
    """
    return math.exp(math.fsum(logprobs) / len(logprobs)) if logprobs else 0.0


def candidate_confidence(logprobs: Sequence[float]) -> float:
    """Return the largest probability of a candidate, not normalised over the candidates.

    Args:
        logprobs: Log-probability of each candidate; at least one.
    """
    return math.exp(max(logprobs))


@dataclass(frozen=True)
class RoutingRecord:
    """The results of both branches for one labelled question.

    Attributes:
        plain_confidence: Confidence of the plain model.
        invariant_confidence: Confidence of the invariant model.
        plain_score: Quality of the plain answer: correct or not, or any metric where higher is better.
        invariant_score: Quality of the invariant answer.
    """

    plain_confidence: float
    invariant_confidence: float
    plain_score: float
    invariant_score: float


@dataclass(frozen=True)
class TunedAlpha:
    """The result of `tune_alpha`.

    Attributes:
        alpha: The best margin.
        score: Mean score of the routed answers at this margin.
        scores: Mean score for every candidate margin.
    """

    alpha: float
    score: float
    scores: dict[float, float]


def tune_alpha(records: Iterable[RoutingRecord], alphas: Sequence[float] = ALPHAS) -> TunedAlpha:
    """Find the margin with the best mean score on a labelled set.

    Ties are broken towards 0, and then towards the positive margin, which prefers the plain model.

    Args:
        records: The results of both branches for each question.
        alphas: Candidate margins; the published ones by default.

    Raises:
        InvalidChoice: `records` or `alphas` is empty.
    """
    records = list(records)
    if not records or not alphas:
        raise InvalidChoice(f"expected at least one record and one margin, got {len(records)} and {len(alphas)}")

    def mean(alpha: float) -> float:
        branches = [route(each.plain_confidence, each.invariant_confidence, alpha) for each in records]
        scores = [
            each.plain_score if branch == "plain" else each.invariant_score
            for each, branch in zip(records, branches, strict=True)
        ]
        return math.fsum(scores) / len(scores)

    scores = {alpha: mean(alpha) for alpha in alphas}
    best = max(scores, key=lambda alpha: (scores[alpha], -abs(alpha), alpha))
    return TunedAlpha(best, scores[best], scores)


@dataclass(frozen=True)
class RoutedGeneration(Generation):
    """The answer of the selected branch.

    Attributes:
        branch: The selected branch.
        plain_confidence: Geometric mean of the token probabilities of the plain answer.
        invariant_confidence: The same for the invariant answer.
    """

    branch: Branch = "plain"
    plain_confidence: float = 0.0
    invariant_confidence: float = 0.0


class RoutedScores(list[float]):
    """Log-probabilities of candidates, from the selected branch.

    Attributes:
        branch: The selected branch.
        plain_confidence: Largest probability of a candidate under the plain model.
        invariant_confidence: The same for the invariant model.
    """

    def __init__(
        self, values: Iterable[float], branch: Branch, plain_confidence: float, invariant_confidence: float
    ) -> None:
        super().__init__(values)
        self.branch = branch
        self.plain_confidence = plain_confidence
        self.invariant_confidence = invariant_confidence


class RoutedModel(InvariantModel):
    """An `InvariantModel` that generates and scores with two branches, and returns one result; see `with_routing`.

    `generate`, `stream` and `score` are routed. `logits`, `prepare` and `arranged` use the invariant branch.
    """

    @classmethod
    def over(cls, lm: InvariantModel, *, alpha: float = ALPHA, plain_order: PlainOrder = "given") -> Self:
        """Return a model that routes between `lm` and the plain model, with shared weights.

        Raises:
            InvalidChoice: `alpha` is not finite.
            UnknownName: Unknown `plain_order`.
        """
        if not math.isfinite(alpha):
            raise InvalidChoice(f"alpha: expected a finite number, got {alpha}")
        if plain_order not in get_args(PlainOrder):
            raise UnknownName("plain_order", plain_order, get_args(PlainOrder))
        routed = object.__new__(cls)
        vars(routed).update(vars(lm), _routing=(alpha, plain_order))
        return routed

    def with_routing(self, alpha: float | None = None, *, plain_order: PlainOrder | None = None) -> RoutedModel:
        """Return a model with another margin or order of the plain branch. What is not given stays as it is."""
        return self.over(
            self.invariant_branch,
            alpha=self.alpha if alpha is None else alpha,
            plain_order=self.plain_order if plain_order is None else plain_order,
        )

    def __repr__(self) -> str:
        return f"RoutedModel({self.invariant_branch!r}, alpha={self.alpha}, plain_order={self.plain_order!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _restore, (self.invariant_branch, self.alpha, self.plain_order)

    @property
    def alpha(self) -> float:
        """Margin by which the invariant branch must be more confident."""
        alpha: float = vars(self)["_routing"][0]
        return alpha

    @property
    def plain_order(self) -> PlainOrder:
        """Order of the segments in the plain branch: `given`, or `canonical` (the model's ordering)."""
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
        """The plain model, with the same weights."""
        ordering = "given" if self.plain_order == "given" else self.ordering
        return self.invariant_branch.with_method("sequential", ordering=ordering)

    @property
    def invariant(self) -> bool:
        """Whether permuting the input segments changes no bit of the output."""
        return self.ordering.invariant and self.plain_order == "canonical"

    @property
    def name(self) -> str:
        """Name of the model with its routing, so that caches keyed by name separate routed and unrouted answers."""
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
        """Generate with both branches, and return one answer per prompt.

        Args:
            prompt: One prompt, or several.
            max_new_tokens: Maximum number of tokens to generate. None: the default of `InvariantModel.generate`.
            seed: Seed for sampling, the same for both branches.
            **kwargs: As for `InvariantModel.generate`. A streamer receives the tokens after both branches have
                finished. With `num_return_sequences`, the i-th sequences of both branches are compared.

        Returns:
            One `RoutedGeneration` for one prompt, and a list for several.

        Raises:
            UnsupportedCombination: A streamer with several answers, or a logits processor or stopping criterion that
                cannot be copied.
        """
        streamer = kwargs.pop("streamer", None)
        stateful = {name: kwargs[name] for name in _STATEFUL_OPTIONS if name in kwargs}
        plain_kwargs = {**kwargs, **_copy_stateful(stateful)}
        plain = self.plain_branch.generate(prompt, max_new_tokens=max_new_tokens, seed=seed, **plain_kwargs)
        invariant = self.invariant_branch.generate(prompt, max_new_tokens=max_new_tokens, seed=seed, **kwargs)
        single = isinstance(plain, Generation) and isinstance(invariant, Generation)
        pairs = [(plain, invariant)] if single else zip(cast(list[Any], plain), cast(list[Any], invariant), strict=True)
        routed = [self._select(*pair) for pair in pairs]
        if streamer is not None:
            _replay(routed, streamer)
        return routed[0] if single else list(routed)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> list[float]:
        """Score candidates with both branches, and return the scores of one as `RoutedScores`."""
        plain = self.plain_branch.score(prompt, candidates)
        invariant = self.invariant_branch.score(prompt, candidates)
        if not plain:
            return []
        confidences = candidate_confidence(plain), candidate_confidence(invariant)
        branch = route(*confidences, self.alpha)
        return RoutedScores(plain if branch == "plain" else invariant, branch, *confidences)

    def _select(self, plain: Generation, invariant: Generation) -> RoutedGeneration:
        """Return the generation of the more confident branch, by the margin `alpha`."""
        confidences = text_confidence(plain.logprobs), text_confidence(invariant.logprobs)
        branch = route(*confidences, self.alpha)
        return RoutedGeneration.extend(
            plain if branch == "plain" else invariant,
            invariant=plain.invariant and invariant.invariant,  # the choice depends on both
            branch=branch,
            plain_confidence=confidences[0],
            invariant_confidence=confidences[1],
        )


def _restore(lm: InvariantModel, alpha: float, plain_order: PlainOrder) -> RoutedModel:
    return RoutedModel.over(lm, alpha=alpha, plain_order=plain_order)


def _copy_stateful(options: dict[str, Any]) -> dict[str, Any]:
    """Copy options that may hold the state of one generation, such as a grammar, since there are two generations.

    Objects shared between options are shared between their copies too. `StopOnEvent` criteria are not copied: one event
    stops both generations.
    """
    criteria = [each for each in options.get("stopping_criteria") or () if isinstance(each, StopOnEvent)]
    try:
        return copy.deepcopy(options, {id(each): each for each in criteria})
    except TypeError as error:
        raise UnsupportedCombination(
            f"expected {' and '.join(options)} that can be copied, since a routed model generates twice: {error}",
            hint="Use the model without routing: model.invariant_branch.",
        ) from error


def _replay(routed: Sequence[RoutedGeneration], streamer: BaseStreamer) -> None:
    """Pass a finished answer to a streamer as transformers does: the prompt, then each token."""
    if len(routed) != 1:
        raise UnsupportedCombination(f"expected one answer to stream, got {len(routed)}")
    streamer.put(torch.empty((1, 0), dtype=torch.long))
    for token in routed[0].token_ids:
        streamer.put(torch.tensor([token]))
    streamer.end()
