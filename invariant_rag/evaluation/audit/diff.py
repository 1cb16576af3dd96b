"""Compare two audits: which questions got better or worse, and is that more than noise?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.checks import check_path
from invariant_rag.errors import AuditFailed
from invariant_rag.evaluation.audit.folder import read_result
from invariant_rag.evaluation.audit.result import GIVEN
from invariant_rag.evaluation.audit.scoring import RIGHT
from invariant_rag.evaluation.statistics import Estimate, mean_difference, mean_interval, paired_p_value


@dataclass(frozen=True)
class Change:
    """How one measure differs between two audits, on the questions of both.

    Attributes:
        measure: Name of the measure.
        before: In the first audit.
        after: In the second.
        difference: Of paired questions.
        p: Two-tailed p-value.
    """

    measure: str
    before: Estimate
    after: Estimate
    difference: Estimate
    p: float


@dataclass(frozen=True)
class AuditDiff:
    """The difference between two audits.

    Attributes:
        before: System and date of the first.
        after: System and date of the second.
        common: Number of questions of both.
        only_before: Number of questions that only the first asked.
        only_after: Number of questions that only the second asked.
        changes: Measures that both have.
        fixed: Questions that are wrong today in the first, and right in the second.
        broken: Questions that are right today in the first, and wrong in the second.
        steadied: Questions that flip in the first only.
        unsettled: Questions that flip in the second only.
    """

    before: str
    after: str
    common: int
    only_before: int
    only_after: int
    changes: tuple[Change, ...]
    fixed: tuple[str, ...]
    broken: tuple[str, ...]
    steadied: tuple[str, ...]
    unsettled: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return asdict(self)


def diff_audits(before: str | Path, after: str | Path) -> AuditDiff:
    """Compare the audits in two folders, on the questions that both asked. Questions are matched by text and documents.

    Raises:
        AuditFailed: A folder has no result of an audit, no question was asked by both, or they measure other things.
    """
    first, second = (read_result(check_path("folder", each, error=AuditFailed)) for each in (before, after))
    _check_alike(first, second)
    ours, theirs = (_by_content(each) for each in (first, second))
    common = [key for key in ours if key in theirs]
    if not common:
        raise AuditFailed(
            f"no question was asked by both {str(before)!r} and {str(after)!r}",
            hint="Audit the same questions, with the same documents, in two folders.",
        )
    names = {
        "today": [(_today(ours[key]), _today(theirs[key])) for key in common],
        "flip_rate": [(float(ours[key]["flips"]), float(theirs[key]["flips"])) for key in common],
    }
    changes = tuple(change for name, pairs in names.items() if (change := _change(name, pairs)) is not None)
    right = {key: (_today(ours[key]), _today(theirs[key])) for key in common}
    return AuditDiff(
        before=f"{first['system']} ({first['date']})",
        after=f"{second['system']} ({second['date']})",
        common=len(common),
        only_before=len(ours) - len(common),
        only_after=len(theirs) - len(common),
        changes=changes,
        fixed=tuple(ours[key]["question"] for key, (one, other) in right.items() if one < RIGHT <= other),
        broken=tuple(ours[key]["question"] for key, (one, other) in right.items() if other < RIGHT <= one),
        steadied=tuple(ours[key]["question"] for key in common if ours[key]["flips"] and not theirs[key]["flips"]),
        unsettled=tuple(ours[key]["question"] for key in common if theirs[key]["flips"] and not ours[key]["flips"]),
    )


def _check_alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raise for audits that score answers in different ways, or flip the more often the more orders they try."""
    for name, own, other in [
        ("metric", first["metric"], second["metric"]),
        *((name, first["design"][name], second["design"][name]) for name in ("orders", "repeats")),
    ]:
        if own != other:
            raise AuditFailed(
                f"{name}: expected the same of both audits, got {own} and {other}",
                hint=f"Audit one of them again, with the other's --{name}.",
            )


def _by_content(result: Mapping[str, Any]) -> dict[tuple[Any, ...], Mapping[str, Any]]:
    """Return questions by their texts and those of their documents, in whatever order."""
    return {
        (each["question"], *sorted((one["title"] or "", one["text"]) for one in each["segments"])): each
        for each in result["asked"]
    }


def _today(asked: Mapping[str, Any]) -> float:
    """Return the mean score in the given order; NaN without gold answers."""
    own = asked["asked"][0]["remedy"]
    scores = [
        each["score"]
        for each in asked["asked"]
        if each["remedy"] == own and each["kind"] == GIVEN and each["score"] is not None
    ]
    return float(np.mean(scores)) if scores else float("nan")


def _change(name: str, pairs: list[tuple[float, float]]) -> Change | None:
    known = [(one, other) for one, other in pairs if np.isfinite(one) and np.isfinite(other)]
    if not known:
        return None
    before, after = ([pair[index] for pair in known] for index in (0, 1))
    differences = np.subtract(after, before)
    p = min(1.0, 2 * min(paired_p_value(differences), paired_p_value(-differences)))
    return Change(name, mean_interval(before), mean_interval(after), mean_difference(after, before), p)
