"""Selective Routing: run the plain and the invariant model, and return one answer (arXiv 2502.08662, section 3.3).

The router returns the invariant answer only if that model is more confident than the plain one by a margin. It costs
two generations. With `plain_order="given"`, as published, the answer may change with the order of the segments.

Confidences are those of the published code, which its margin of 0.2 was chosen for. But a candidate of several tokens
is scored whole, and a token counts with its probability under the model, not with the largest one after processors.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from numbers import Real
from typing import Any, Literal, Self, TypeAlias, cast, get_args, overload

from invariant_rag.checks import check_items, check_kind, check_name, check_real
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import check_options
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.streaming import StopOnEvent, replay
from invariant_rag.segments import Prompt

Branch: TypeAlias = Literal["plain", "invariant"]
PlainOrder: TypeAlias = Literal["given", "canonical"]

ALPHA = 0.2
"""The published margin, chosen on the validation set of MMLU."""
ALPHAS = (-0.5, -0.4, -0.3, -0.2, -0.1, 0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
"""The candidate margins of the paper (arXiv 2502.08662, appendix E)."""


def route(plain_confidence: float, invariant_confidence: float, alpha: float = ALPHA) -> Branch:
    """Choose a branch: the plain one if `plain_confidence + alpha > invariant_confidence`, else the invariant one.

    On a tie the invariant answer is taken, as in the paper (section 3.3) and in the published `run.py`.
    """
    plain = check_real("plain_confidence", plain_confidence)
    invariant = check_real("invariant_confidence", invariant_confidence)
    return "plain" if plain + check_real("alpha", alpha) > invariant else "invariant"


def text_confidence(logprobs: Sequence[float]) -> float:
    """Return the mean of the token probabilities of a text, its end token included; 0 for no tokens."""
    listed = check_items("logprobs", logprobs, Real)
    return math.fsum(map(math.exp, listed)) / len(listed) if listed else 0.0


def candidate_confidence(logprobs: Sequence[float]) -> float:
    """Return the largest probability in a softmax over the candidates alone, given the log-probability of each."""
    listed = check_items("logprobs", logprobs, Real)
    if not listed:
        raise InvalidChoice("logprobs: expected at least one number, got none")
    largest = max(listed)
    return 1 / math.fsum(math.exp(each - largest) for each in listed)


@dataclass(frozen=True)
class RoutingRecord:
    """Confidences and scores of both branches for one labelled question; higher ones are better."""

    plain_confidence: float
    invariant_confidence: float
    plain_score: float
    invariant_score: float

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            check_real(each.name, int(value) if isinstance(value, bool) else value)

    def score(self, alpha: float) -> float:
        """Return the score of the answer that this margin chooses."""
        branch = route(self.plain_confidence, self.invariant_confidence, alpha)
        return self.plain_score if branch == "plain" else self.invariant_score


@dataclass(frozen=True)
class TunedAlpha:
    """The best margin, the mean score of the routed answers at it, and that at every candidate margin."""

    alpha: float
    score: float
    scores: dict[float, float]


def tune_alpha(records: Iterable[RoutingRecord], alphas: Sequence[float] = ALPHAS) -> TunedAlpha:
    """Find the margin with the best mean score on a labelled set; both must not be empty.

    Ties are broken towards 0, and then towards the positive margin, which prefers the plain model.
    """
    records = check_items("records", records, RoutingRecord)
    alphas = [check_real("alphas", each) for each in check_items("alphas", alphas, Real)]
    if not records or not alphas:
        raise InvalidChoice(f"expected at least one record and one margin, got {len(records)} and {len(alphas)}")
    scores = {alpha: math.fsum(each.score(alpha) for each in records) / len(records) for alpha in alphas}
    best = max(scores, key=lambda alpha: (scores[alpha], -abs(alpha), alpha))
    return TunedAlpha(best, scores[best], scores)


@dataclass(frozen=True)
class RoutedGeneration(Generation):
    """The answer of the selected branch, the means of the token probabilities of both, and the other one's answer."""

    branch: Branch = "plain"
    plain_confidence: float = 0.0
    invariant_confidence: float = 0.0
    rejected: Generation | None = None

    @property
    def details(self) -> Mapping[str, Any]:
        """Which branch was taken, and how sure both were."""
        names = ("branch", "plain_confidence", "invariant_confidence")
        return {"routing": {name: getattr(self, name) for name in names}}


class RoutedScores(list[float]):
    """Log-probabilities of candidates from the selected branch; largest shares of both, and those of the other one."""

    def __init__(self, plain: list[float], invariant: list[float], alpha: float) -> None:
        self.plain_confidence = candidate_confidence(plain)
        self.invariant_confidence = candidate_confidence(invariant)
        self.branch: Branch = route(self.plain_confidence, self.invariant_confidence, alpha)
        chosen, self.rejected = (plain, invariant) if self.branch == "plain" else (invariant, plain)
        super().__init__(chosen)


class RoutedModel(InvariantModel):
    """An `InvariantModel` that generates and scores with two branches, and returns one result; see `with_routing`.

    `generate`, `stream` and `score` are routed. `logits`, `prepare` and `arranged` use the invariant branch.
    """

    alpha: float  # margin by which the invariant branch must be more confident
    plain_order: PlainOrder  # of the segments in the plain branch: `given`, or `canonical` (the model's ordering)

    @classmethod
    def over(cls, lm: InvariantModel, *, alpha: float = ALPHA, plain_order: PlainOrder = "given") -> Self:
        """Return a model that routes between `lm` and the plain model, with shared weights."""
        check_kind("lm", lm, InvariantModel)
        alpha = check_real("alpha", alpha)
        check_name("plain_order", plain_order, get_args(PlainOrder))
        routed = object.__new__(cls)
        vars(routed).update(vars(lm), alpha=alpha, plain_order=plain_order)
        return routed

    def with_routing(self, alpha: float | None = None, *, plain_order: PlainOrder | None = None) -> RoutedModel:
        """Return a model with another margin or order of the plain branch; None: as it is."""
        alpha = self.alpha if alpha is None else alpha
        return self.over(self.invariant_branch, alpha=alpha, plain_order=plain_order or self.plain_order)

    def __repr__(self) -> str:
        return f"RoutedModel({self.invariant_branch!r}, alpha={self.alpha}, plain_order={self.plain_order!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(RoutedModel.over, alpha=self.alpha, plain_order=self.plain_order), (self.invariant_branch,)

    @property
    def invariant_branch(self) -> InvariantModel:
        """The model without routing."""
        lm = object.__new__(InvariantModel)
        vars(lm).update({name: each for name, each in vars(self).items() if name not in ("alpha", "plain_order")})
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
    def generate(self, prompt: Prompt, **kwargs: Any) -> RoutedGeneration: ...

    @overload
    def generate(self, prompt: Sequence[Prompt], **kwargs: Any) -> list[Generation]: ...

    def generate(self, prompt: Prompt | Sequence[Prompt], **kwargs: Any) -> Generation | list[Generation]:
        """Generate with both branches, and return one answer for one prompt, and a list for several.

        Keywords are those of `InvariantModel.generate`. A streamer receives the tokens after both branches have
        finished. With `num_return_sequences`, the i-th sequences of both branches are compared.
        """
        check_options(kwargs, self.model)
        streamer = kwargs.pop("streamer", None)
        streamers = kwargs.pop("streamers", [streamer])
        stateful = {each: value for each, value in kwargs.items() if each in ("logits_processor", "stopping_criteria")}
        plain = self.plain_branch.generate(prompt, **kwargs | _copy_stateful(stateful))
        invariant = self.invariant_branch.generate(prompt, **kwargs)
        single = isinstance(plain, Generation) and isinstance(invariant, Generation)
        pairs = [(plain, invariant)] if single else zip(cast(list[Any], plain), cast(list[Any], invariant), strict=True)
        routed = [self._select(*pair) for pair in pairs]
        if streamer is not None and len(routed) != 1:
            raise UnsupportedCombination(f"expected one answer to stream, got {len(routed)}")
        for each, generation in zip(streamers, routed, strict=False):
            if each is not None:
                replay(generation.token_ids, each)
        return routed[0] if single else list(routed)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> list[float]:
        """Score candidates with both branches, and return the scores of one as `RoutedScores`."""
        plain = self.plain_branch.score(prompt, candidates)
        invariant = self.invariant_branch.score(prompt, candidates)
        return RoutedScores(plain, invariant, self.alpha) if plain else []

    def _select(self, plain: Generation, invariant: Generation) -> RoutedGeneration:
        """Return the generation of the more confident branch, by the margin `alpha`."""
        confidences = text_confidence(plain.logprobs), text_confidence(invariant.logprobs)
        branch = route(*confidences, self.alpha)
        chosen, rejected = (plain, invariant) if branch == "plain" else (invariant, plain)
        return RoutedGeneration.extend(
            chosen,
            rejected=rejected,
            invariant=plain.invariant and invariant.invariant,  # the choice depends on both
            branch=branch,
            plain_confidence=confidences[0],
            invariant_confidence=confidences[1],
        )


def _copy_stateful(options: dict[str, Any]) -> dict[str, Any]:
    """Copy options that may hold the state of one generation, such as a grammar; one event stops both generations."""
    criteria = [each for each in options.get("stopping_criteria") or () if isinstance(each, StopOnEvent)]
    try:
        return copy.deepcopy(options, {id(each): each for each in criteria})
    except TypeError as error:
        raise UnsupportedCombination(
            f"expected {' and '.join(options)} that can be copied, since a routed model generates twice: {error}",
            hint="Use the model without routing: model.invariant_branch.",
        ) from error
