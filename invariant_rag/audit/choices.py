"""The choices of an audit: keywords of `audit()` and options of `invariant-rag audit` come from here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from invariant_rag.audit.plan import check_remedies
from invariant_rag.checks import MOST_CALLS, check_function, check_items, check_kind, check_number, check_real
from invariant_rag.errors import InvalidChoice


def _choice(default: Any, about: str, **bounds: Any) -> Any:
    """Return a field with what it means, for options and documentation."""
    return field(default=default, metadata={"about": about, **bounds})


@dataclass(frozen=True)
class AuditChoices:
    """How an audit is made.

    Attributes:
        remedies: What to compare with today: `sort`, `reverse`, `ends-first`, `vote`, and for an `InvariantModel` the
            names of invariant methods. None: those that are worth their calls, if the order matters; (): none.
        metric: A function `(answer, gold answers) -> number from 0 to 1`: an answer is right from 0.5 on. None: if it
            gives a gold answer as whole tokens; see `invariant_rag.audit.matching.is_right`.
        judge: Grades instead of the metric, and says which answers mean the same: a model, an `Endpoint`, a URL, or a
            function from a prompt to text; see `invariant_rag.audit.grading.AnswerJudge`.
        margin: Net sensitivity below which the order does not matter.
        k: Segments to retrieve, where a retriever is asked.
        seed: Seed of the orders.
        workers: Threads that make calls.
        retries: Tries of a failed call after the first one, with pauses that double.
        fields: Names of your fields by ours, such as `{"question": "frage"}`.
        generation: Keywords of `InvariantModel.generate`, for our models.

    Raises:
        InvalidChoice: One is no such number or function, or too small.
        UnknownName: There is no remedy of that name.
    """

    remedies: tuple[str, ...] | None = _choice(
        None,
        "sort, reverse, ends-first, vote, or a method. Repeatable.",
        option="--remedy",
        shown="if the order matters, a few",
    )
    metric: Any = None
    judge: Any = _choice(  # noqa: RUF009 - a field, as dataclasses.field makes one
        None, "Grade by this model or the server at this URL.", shown="none", metavar="MODEL|URL"
    )
    margin: float = _choice(0.05, "Net sensitivity below which the order does not matter.")
    k: int = _choice(10, "Segments to retrieve.", min=1)
    seed: int = _choice(0, "Seed of the orders.", min=0)
    workers: int = _choice(1, "Threads that make calls.", min=1, max=MOST_CALLS)
    retries: int = _choice(3, "Further tries of a failed call, with growing pauses.", min=0, max=MOST_CALLS)
    fields: Mapping[str, str] = field(
        default_factory=dict,
        metadata={"about": "A field of yours: question=frage. Repeatable.", "option": "--field", "shown": "none"},
    )
    generation: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            least = each.metadata.get("min")
            if least is not None:
                check_number(each.name, getattr(self, each.name), least, each.metadata.get("max"))
        if self.remedies is not None:
            object.__setattr__(self, "remedies", tuple(check_items("remedies", self.remedies, str)))
            check_remedies(self.remedies)
        if self.metric is not None:
            check_function("metric", self.metric)
        if not 0 < check_real("margin", self.margin) < 1:
            raise InvalidChoice(f"margin: expected a share between 0 and 1, got {self.margin}")
        for name in ("fields", "generation"):
            check_kind(name, getattr(self, name), Mapping)  # type: ignore[type-abstract]

    def changed(self, changes: Mapping[str, Any]) -> AuditChoices:
        """Return these choices with some changed."""
        known = [each.name for each in dataclasses.fields(self)]
        for name in changes:
            if name not in known:
                raise InvalidChoice(
                    f"audit takes no {name!r}",
                    hint=f"Choices are {', '.join(known)}; keywords of a model go into generation={{...}}.",
                )
        return replace(self, **changes)
