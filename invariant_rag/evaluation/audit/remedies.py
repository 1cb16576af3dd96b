"""Remedies against order sensitivity, which an audit compares: other listings of the segments, and other methods."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from invariant_rag.checks import check_name
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.evaluation.audit.orders import Order, rotations, salted_hash, salted_order
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.systems import Reply, System, describe_lm, lm_ask_function, lm_identity
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.segments import Segment

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

AS_IS = "as it is"
"""Name of the system without a remedy, which every remedy is compared with."""

VOTES = 5
"""Most orders that a majority vote asks."""

TOP = 3
"""Most segments that are kept by score."""

AskFunction = Callable[[Question, Sequence[Segment], str], Reply]
"""Calls a system with a question, listed segments, and the salt of its ordering ("" for none)."""

_TAG = re.compile(r"\[[0-9a-f]{8}\] ")


@dataclass(frozen=True)
class CallSpec:
    """How the system is called about a question.

    Attributes:
        asker: Name of the function to call.
        order: How the segments are listed for it.
        salt: Salt of the ordering of an `InvariantModel`; "" for its own ordering, and for every other system.
        tags: Salt of the hashes that are put before the segments; "" for none.
    """

    asker: str
    order: Order
    salt: str = ""
    tags: str = ""

    def listed(self, question: Question) -> tuple[Segment, ...]:
        """Return the segments as the function gets them."""
        segments = (question.segments[index] for index in self.order)
        return tuple(_tagged(segment, self.tags) if self.tags else segment for segment in segments)

    def without_tags(self, answer: str) -> str:
        """Return an answer without the hashes that were put before the segments."""
        return _TAG.sub("", answer) if self.tags else answer


@dataclass(frozen=True)
class SaltedOrdering(Ordering):
    """Order segments by a hash of salt and content: every salt gives another canonical order."""

    salt: str
    name: ClassVar[str] = "salted"
    descending: ClassVar[bool] = True  # rank 0 is nearest to the suffix, hence last in physical order

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[str]:
        """Return the salted hashes."""
        return [salted_hash(candidate.segment, self.salt) for candidate in candidates]


@dataclass(frozen=True)
class Remedy(ABC):
    """A way to ask the system: as it is, or changed so that the order may matter less.

    A remedy says which calls make one answer; several calls are settled by majority vote. With a salt, the segments
    are put into another canonical order, which tells whether a slot of that order is favoured.

    A black-box system may re-sort its input. Prefixing each segment with a salted hash moves it even then: a system
    that sorts by text uses the salted order, and one that sorts by another rule some other random order.

    Attributes:
        name: Name in reports.
        asker: Name of the function that is called.
        black_box: Whether the system may re-sort its input, so that salted segments are prefixed with their hashes.
        fixes_order: Whether the calls are the same for every input order.
        can_salt: Whether a salt can put the segments into another canonical order.
    """

    name: str
    asker: str
    black_box: bool = False
    fixes_order: ClassVar[bool] = False
    can_salt: ClassVar[bool] = True

    @property
    def canonical(self) -> bool:
        """Whether the system gets one of many canonical orders, unchanged: expected accuracy is the mean over salts."""
        return self.fixes_order and self.can_salt and not self.black_box

    @abstractmethod
    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return the calls that make one answer, for an input order or, if a salt is given, for the salted order."""

    def _spec(self, order: Order, salt: str | None) -> CallSpec:
        return CallSpec(self.asker, order, tags=salt if salt and self.black_box else "")


@dataclass(frozen=True)
class InputOrder(Remedy):
    """List the segments in the input order. A salted order is one more input order."""

    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return one call."""
        return [self._spec(order if salt is None else salted_order(question.segments, salt), salt)]


@dataclass(frozen=True)
class Reverse(InputOrder):
    """List the segments in the reverse of the input order: what the retriever finds best comes last. Not invariant."""

    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return one call."""
        return super().call_specs(question, order[::-1], salt)


@dataclass(frozen=True)
class ModelOrdering(Remedy):
    """Let an `InvariantModel` order the segments by content. A salt replaces its ordering."""

    @property
    def canonical(self) -> bool:
        """True: its ordering is one of many."""
        return True

    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return one call."""
        return [CallSpec(self.asker, order, salt or "")]


@dataclass(frozen=True)
class Sort(Remedy):
    """List the segments by a hash of their content: invariant, and not fair."""

    fixes_order: ClassVar[bool] = True

    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return one call."""
        return [self._spec(salted_order(question.segments, salt or ""), salt)]


@dataclass(frozen=True)
class Rerank(Remedy):
    """List the segments by score, best first, ties by content: invariant; the scores choose the slots."""

    fixes_order: ClassVar[bool] = True
    can_salt: ClassVar[bool] = False

    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return one call."""
        return [self._spec(self.arrange(order_by_score(question.segments)), salt)]

    def arrange(self, best_first: Order) -> Order:
        """Return how the segments are listed."""
        return best_first


@dataclass(frozen=True)
class TopK(Rerank):
    """List only the best segments, best first: a reranker with a cut-off."""

    def arrange(self, best_first: Order) -> Order:
        """Return the first `TOP` segments."""
        return best_first[:TOP]


@dataclass(frozen=True)
class LongContextReorder(Rerank):
    """List the best segments at both ends, the worst in the middle: LongContextReorder of LangChain and LlamaIndex."""

    def arrange(self, best_first: Order) -> Order:
        """Return the best segment first if their number is odd, last if it is even."""
        return tuple(best_first[rank] for rank in self.places(len(best_first)))

    @staticmethod
    def places(count: int) -> Order:
        """Return the rank by score, 0 for the best, of the segment in each place."""
        ranks, odd = tuple(range(count)), count % 2
        return ranks[1 - odd :: 2] + ranks[odd::2][::-1]


@dataclass(frozen=True)
class MajorityVote(Remedy):
    """Ask in evenly spread rotations of the sorted order, and take the most frequent answer.

    Of equally frequent answers the first in that list wins. This is the cheap form of permutation self-consistency
    (arXiv 2310.07712). Invariant, since the orders depend on the content only.
    """

    fixes_order: ClassVar[bool] = True

    def call_specs(self, question: Question, order: Order, salt: str | None) -> list[CallSpec]:
        """Return one call per vote."""
        first = salted_order(question.segments, salt or "")
        return [self._spec(each, salt) for each in rotations(first, VOTES)]


_LISTINGS: dict[str, type[Remedy]] = {
    "sort": Sort,
    "rerank": Rerank,
    "top-3": TopK,
    "long-context-reorder": LongContextReorder,
    "vote": MajorityVote,
    "reverse": Reverse,
}
"""Remedies that change how the segments are listed: they apply to every system."""

_ON_REQUEST = {"reverse"}
"""Of these, those that are compared only if they are named: they make answers no steadier."""

_BY_SCORE = {name for name, remedy in _LISTINGS.items() if issubclass(remedy, Rerank)}


def build_remedies(
    system: System,
    questions: Sequence[Question],
    names: Sequence[str] | None,
    tags: bool = True,
) -> tuple[list[Remedy], dict[str, AskFunction]]:
    """Return the system as it is, then every remedy; and the functions that they call, by name.

    Args:
        system: The system.
        questions: What it will be asked; remedies by score need a score for every segment.
        names: `sort`, `rerank`, `top-3`, `long-context-reorder`, `vote`, `reverse`, and for an `InvariantModel` also
            `plain` and the names of invariant methods. None: all that apply but `reverse`; of the methods, `rotor` and
            `pine`.
        tags: Whether the segments of a black-box system may be prefixed with salted hashes.

    Raises:
        UnknownName: There is no remedy of that name.
        UnsupportedCombination: A remedy does not apply to this system or to these questions.
    """
    scored = all(segment.score is not None for question in questions for segment in question.segments)
    lm, black_box = system.lm, system.lm is None and tags
    askers: dict[str, AskFunction] = {system.key: _without_salt(system.ask)}
    base, remedies = system.key, list[Remedy]()
    if lm is None:
        remedies.append(InputOrder(AS_IS, base, black_box))
    else:
        base, remedies = _baseline(system, lm, askers)
    for name in _chosen(names, scored, lm):
        if name in _LISTINGS:
            remedies.append(_LISTINGS[name](name, base, black_box))
        elif name == "plain":
            remedies.append(InputOrder(name, base))
        elif lm is not None:
            with_method = _unrouted(lm).with_method(resolve_method(name))
            asker = _key(system, with_method)
            askers.setdefault(asker, _with_salt(with_method, system.message, system.generation))
            remedies.append(ModelOrdering(name, asker))
    return remedies, askers


def _baseline(system: System, lm: InvariantModel, askers: dict[str, AskFunction]) -> tuple[str, list[Remedy]]:
    """Return the name of the plain model, whose input the listing remedies change, and the model as it is."""
    if lm.ordering.invariant:
        askers[system.key] = _with_salt(lm, system.message, system.generation)
        as_is: Remedy = ModelOrdering(AS_IS, system.key)
    else:
        as_is = InputOrder(AS_IS, system.key)
        if lm.method.name == "sequential":
            return system.key, [as_is]
    plain = _unrouted(lm).with_method("sequential", ordering="given")
    name = _key(system, plain)
    askers[name] = _without_salt(lm_ask_function(plain, system.message, system.generation))
    return name, [as_is]


def _key(system: System, lm: InvariantModel) -> str:
    """Return the name of a model that replaces that of the system, in keys of stored answers."""
    name = describe_lm(lm, system.message, system.generation)
    return replace(system, name=name, identity=lm_identity(lm)).key


def _unrouted(lm: InvariantModel) -> InvariantModel:
    """Return the invariant branch of a routed model, any other model as it is."""
    branch: InvariantModel = getattr(lm, "invariant_branch", lm)
    return branch


def check_remedies(names: Sequence[str] | None) -> None:
    """Check the names of remedies. Takes no time: whether they apply is found out by `build_remedies`.

    Raises:
        UnknownName: There is no remedy of that name; the message lists the names.
    """
    known = [*_LISTINGS, "plain", *(name for name, method in METHODS.items() if method.invariant)]
    for name in names or ():
        check_name("remedy", name, known)


def _chosen(names: Sequence[str] | None, scored: bool, lm: InvariantModel | None) -> list[str]:
    """Return the remedies that were asked for, or all that apply, each once."""
    if names is None:
        return _applicable(scored, lm)
    check_remedies(names)
    for name in names:
        if lm is None and name not in _LISTINGS:
            raise UnsupportedCombination(f"{name!r} changes the inside of a model, and this system is not one of ours")
        if name in _BY_SCORE and not scored:
            raise UnsupportedCombination(f"{name!r} needs a score for every segment")
    return list(dict.fromkeys(names))


def _applicable(scored: bool, lm: InvariantModel | None) -> list[str]:
    listings = [name for name in _LISTINGS if name not in _ON_REQUEST and (scored or name not in _BY_SCORE)]
    if lm is None:
        return listings
    is_plain = lm.method.name == "sequential" and not lm.ordering.invariant
    same = lm.method.name if lm.ordering.name == "lexical" else ""
    methods = [name for name in ("rotor", "pine") if name != same and _runs(lm, name)]
    return [*listings, *methods] if is_plain else ["plain", *listings, *methods]


def _runs(lm: InvariantModel, method: str) -> bool:
    """Return whether a model can run a method. On vLLM, not every one can be decoded."""
    try:
        _unrouted(lm).with_method(method)
    except UnsupportedCombination:
        return False
    return True


def order_by_score(segments: Sequence[Segment]) -> Order:
    """Return the segments by score, best first, ties by content."""
    keys = [(-(each.score or 0.0), each.canonical_key) for each in segments]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def is_listed_by_score(segments: Sequence[Segment]) -> bool:
    """Whether segments are listed best first, or the best at both ends, as far as their scores differ."""
    scores = [each.score or 0.0 for each in segments]
    best_first = sorted(scores, reverse=True)
    at_ends = [best_first[index] for index in LongContextReorder.places(len(scores))]
    return scores in (best_first, at_ends)


def _without_salt(ask: Callable[[Question, Sequence[Segment]], Reply]) -> AskFunction:
    return lambda question, segments, _: ask(question, segments)


def _with_salt(lm: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> AskFunction:
    """Return the function that asks a model with its own ordering, or a salted one."""

    def ask(question: Question, segments: Sequence[Segment], salt: str) -> Reply:
        chosen = lm.with_method(ordering=SaltedOrdering(salt)) if salt else lm
        return lm_ask_function(chosen, message, generation)(question, segments)

    return ask


def _tagged(segment: Segment, salt: str) -> Segment:
    """Return the segment with its salted hash before text and title, so that sorting by text is sorting by hash."""
    tag = f"[{salted_hash(segment, salt)[:8]}] "
    return replace(segment, text=tag + segment.text, title=None if segment.title is None else tag + segment.title)
