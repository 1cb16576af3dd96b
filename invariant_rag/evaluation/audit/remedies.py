"""Ways of asking a system: as it is, and with each remedy that can be put around it or into it."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from invariant_rag.errors import UnknownName, UnsupportedCombination
from invariant_rag.evaluation.audit.orders import Order, rotations, salted_hash, salted_order
from invariant_rag.evaluation.audit.questions import Question
from invariant_rag.evaluation.audit.systems import Reply, System, own_asker, own_name
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.orderings.base import Candidate, Ordering
from invariant_rag.segments import Segment

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

AS_IS = "as it is"
"""Name of the variant that is the system itself."""

VOTERS = 5
"""So many orders a vote asks, at most."""

KEPT = 3
"""So many segments are kept by score, at most."""

Asker = Callable[[Question, Sequence[Segment], str], Reply]

_TAG = re.compile(r"\[[0-9a-f]{8}\] ")


@dataclass(frozen=True)
class Call:
    """One call of a system.

    Attributes:
        asker: Name of the function to call.
        order: How the segments are listed for it.
        salt: Salt of the model's ordering; "" for its own ordering, and for what is not one of our models.
        tags: Salt of the hashes that the segments begin with; "" where they are as they came.
    """

    asker: str
    order: Order
    salt: str = ""
    tags: str = ""

    def listed(self, question: Question) -> tuple[Segment, ...]:
        """Return the segments as the function is given them."""
        segments = (question.segments[index] for index in self.order)
        return tuple(_tagged(segment, self.tags) if self.tags else segment for segment in segments)

    def cleaned(self, answer: str) -> str:
        """Return an answer without the hashes that this call put before the segments."""
        return _TAG.sub("", answer) if self.tags else answer


@dataclass(frozen=True)
class Salted(Ordering):
    """Segments in physical order by a hash of salt and content: one of many canonical orders."""

    salt: str
    name: ClassVar[str] = "salted"
    descending: ClassVar[bool] = True  # rank 0 is nearest to the suffix, hence last in physical order

    def sort_keys(self, candidates: Sequence[Candidate], query: str) -> list[str]:
        """Return the salted hashes."""
        return [salted_hash(candidate.segment, self.salt) for candidate in candidates]


@dataclass(frozen=True)
class Variant(ABC):
    """One way of asking: which calls make one answer. Several calls are settled by a majority.

    Nobody can look into an opaque system: it may order segments by a rule of its own. With a salt its segments are
    given in the salted order, and each begins with its salted hash. If it sorts by text it then reads them in that very
    order, and if it sorts by another rule in some other random order.

    Attributes:
        name: What reports call it.
        asker: Name of the function that is called.
        opaque: Whether that may order segments by itself, so that they need those hashes.
        collapses: Whether it reads the segments in an order of its own, so that every input order is the same call.
        has_salts: Whether a salt can put the segments into another canonical order.
    """

    name: str
    asker: str
    opaque: bool = False
    collapses: ClassVar[bool] = False
    has_salts: ClassVar[bool] = True

    @property
    def canonical(self) -> bool:
        """Whether the accuracy to expect is that over salts: one canonical order of many is read, untouched."""
        return self.collapses and self.has_salts and not self.opaque

    @abstractmethod
    def calls(self, question: Question, order: Order, salt: str | None) -> list[Call]:
        """Return the calls that make the answer, for an input order, and for a salt where one is set."""

    def _call(self, order: Order, salt: str | None) -> Call:
        """Return a call in an order that a salt, if any, has made."""
        return Call(self.asker, order, tags=salt if salt and self.opaque else "")


@dataclass(frozen=True)
class Listed(Variant):
    """Give the segments as they are listed: a salted order is one more input order."""

    def calls(self, question: Question, order: Order, salt: str | None) -> list[Call]:
        """Return one call."""
        return [self._call(order if salt is None else salted_order(question.segments, salt), salt)]


@dataclass(frozen=True)
class Arranged(Variant):
    """Let a model of ours order the segments by their contents; a salt replaces that ordering."""

    @property
    def canonical(self) -> bool:
        """Yes: its ordering is one of many."""
        return True

    def calls(self, question: Question, order: Order, salt: str | None) -> list[Call]:
        """Return one call."""
        return [Call(self.asker, order, salt or "")]


@dataclass(frozen=True)
class Sort(Variant):
    """List the segments by a hash of their contents before asking: invariant, and not fair."""

    collapses: ClassVar[bool] = True

    def calls(self, question: Question, order: Order, salt: str | None) -> list[Call]:
        """Return one call."""
        return [self._call(salted_order(question.segments, salt or ""), salt)]


@dataclass(frozen=True)
class Rerank(Variant):
    """List the segments by score, best first, equal scores by content: invariant; the scores decide the slots."""

    collapses: ClassVar[bool] = True
    has_salts: ClassVar[bool] = False

    def calls(self, question: Question, order: Order, salt: str | None) -> list[Call]:
        """Return one call."""
        return [self._call(self.listed(ranked(question.segments)), salt)]

    def listed(self, best_first: Order) -> Order:
        """Return how the segments are listed."""
        return best_first


@dataclass(frozen=True)
class Top(Rerank):
    """List the best segments only, best first: what a reranker with a cut-off does."""

    def listed(self, best_first: Order) -> Order:
        """Return the best ones."""
        return best_first[:KEPT]


@dataclass(frozen=True)
class Reorder(Rerank):
    """List the best segments at both ends, the worst in the middle, as LongContextReorder of both frameworks does."""

    def listed(self, best_first: Order) -> Order:
        """Return them with the best one first where they are odd in number, and last where they are even."""
        odd = len(best_first) % 2
        return best_first[1 - odd :: 2] + best_first[odd::2][::-1]


@dataclass(frozen=True)
class Vote(Variant):
    """Ask in evenly spread rotations of the sorted order, and take the answer that is given most often.

    Of answers that are given equally often, the one that came first in that fixed list wins. The cheap form of
    permutation self-consistency (arXiv 2310.07712): the orders are a function of the contents, so it is invariant.
    """

    collapses: ClassVar[bool] = True

    def calls(self, question: Question, order: Order, salt: str | None) -> list[Call]:
        """Return one call per voter."""
        first = salted_order(question.segments, salt or "")
        return [self._call(each, salt) for each in rotations(first, VOTERS)]


_LISTING: dict[str, type[Variant]] = {
    "sort": Sort,
    "rerank": Rerank,
    "top-3": Top,
    "long-context-reorder": Reorder,
    "vote": Vote,
}
"""Remedies that change how the segments are listed, which every system can be given."""

_BY_SCORE = {name for name, variant in _LISTING.items() if issubclass(variant, Rerank)}


def variants_of(
    system: System,
    questions: Sequence[Question],
    names: Sequence[str] | None,
    tags: bool = True,
) -> tuple[list[Variant], dict[str, Asker]]:
    """Return the system as it is and with every remedy, and the functions that they call, by name.

    Args:
        system: The system.
        questions: What it will be asked; remedies by score want every segment to have one.
        names: `sort`, `rerank`, `top-3`, `long-context-reorder`, `vote`, and for our models `plain` and the names of
            invariant methods. None: all that apply; of the methods, `rotor` and `pine`.
        tags: Whether the segments of a system that is not one of our models may begin with salted hashes.

    Raises:
        UnknownName: No remedy has that name.
        UnsupportedCombination: It does not apply to this system or to these questions.
    """
    scored = all(segment.score is not None for question in questions for segment in question.segments)
    methods = [name for name, method in METHODS.items() if method.invariant]
    model, opaque = system.model, system.model is None and tags
    askers: dict[str, Asker] = {system.name: _ignoring_salt(system.ask)}
    base, variants = system.name, list[Variant]()
    if model is None:
        variants.append(Listed(AS_IS, base, opaque))
    else:
        base, variants = _own_base(system, model, askers)
    for name in _chosen(names, scored, methods, model):
        if name in _LISTING:
            variants.append(_LISTING[name](name, base, opaque))
        elif name == "plain":
            variants.append(Listed(name, base))
        elif model is not None:
            with_method = _unrouted(model).with_method(resolve_method(name))
            asker = own_name(with_method, system.message, system.generation)
            askers.setdefault(asker, _salting(with_method, system.message, system.generation))
            variants.append(Arranged(name, asker))
    return variants, askers


def _own_base(system: System, model: InvariantModel, askers: dict[str, Asker]) -> tuple[str, list[Variant]]:
    """Return the name of the plain model, which order-changing remedies are put around, and the model as it is."""
    if model.ordering.invariant:
        askers[system.name] = _salting(model, system.message, system.generation)
        variant: Variant = Arranged(AS_IS, system.name)
    else:
        variant = Listed(AS_IS, system.name)
        if model.method.name == "sequential":
            return system.name, [variant]
    plain = _unrouted(model).with_method("sequential", ordering="given")
    name = own_name(plain, system.message, system.generation)
    askers[name] = _ignoring_salt(own_asker(plain, system.message, system.generation))
    return name, [variant]


def _unrouted(model: InvariantModel) -> InvariantModel:
    """Return the model that a method is tried on: of a routed one, the branch that reads by a method."""
    branch: InvariantModel = getattr(model, "invariant_branch", model)
    return branch


def _chosen(names: Sequence[str] | None, scored: bool, methods: list[str], model: InvariantModel | None) -> list[str]:
    """Return the remedies that were asked for, or those that apply, each once."""
    if names is None:
        return _applying(scored, model)
    known = [*_LISTING, "plain", *methods]
    for name in names:
        if name not in known:
            raise UnknownName("remedy", name, known)
        if model is None and name not in _LISTING:
            raise UnsupportedCombination(f"{name!r} changes the inside of a model, and this system is not one of ours")
        if name in _BY_SCORE and not scored:
            raise UnsupportedCombination(f"{name!r} needs a score for every segment")
    return list(dict.fromkeys(names))


def _applying(scored: bool, model: InvariantModel | None) -> list[str]:
    listing = [name for name in _LISTING if scored or name not in _BY_SCORE]
    if model is None:
        return listing
    is_plain = model.method.name == "sequential" and not model.ordering.invariant
    same = model.method.name if model.ordering.name == "lexical" else ""
    inside = [name for name in ("rotor", "pine") if name != same]
    return [*listing, *inside] if is_plain else ["plain", *listing, *inside]


def ranked(segments: Sequence[Segment]) -> Order:
    """Return the segments by score, best first, equal scores by content."""
    keys = [(-(each.score or 0.0), each.canonical_key) for each in segments]
    return tuple(sorted(range(len(keys)), key=keys.__getitem__))


def _ignoring_salt(ask: Callable[[Question, Sequence[Segment]], Reply]) -> Asker:
    return lambda question, segments, _: ask(question, segments)


def _salting(model: InvariantModel, message: str | None, generation: Mapping[str, Any]) -> Asker:
    """Return the function that asks a model of ours with its own ordering, or a salted one."""

    def ask(question: Question, segments: Sequence[Segment], salt: str) -> Reply:
        chosen = model.with_method(ordering=Salted(salt)) if salt else model
        return own_asker(chosen, message, generation)(question, segments)

    return ask


def _tagged(segment: Segment, salt: str) -> Segment:
    """Return the segment with its salted hash before its text (and title): sorting by text is sorting by hash."""
    tag = f"[{salted_hash(segment, salt)[:8]}] "
    return replace(segment, text=tag + segment.text, title=None if segment.title is None else tag + segment.title)
