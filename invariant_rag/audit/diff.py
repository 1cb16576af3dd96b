"""Two audits of the same questions compared: what got better, what got worse, and is that more than noise?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from invariant_rag.audit.folder import read_result
from invariant_rag.audit.statistics import Estimate, mean_difference, mean_of_shares, paired_p_value
from invariant_rag.errors import AuditFailed

TODAY = ("today", "placebo")
"""Calls that are distinct draws of today."""


@dataclass(frozen=True)
class AuditDiff:
    """Two audits compared on the questions of both.

    Attributes:
        before: Name of the first system.
        after: Name of the second.
        common: Questions that both asked, with gold answers.
        accuracy: Accuracy today of both, on these questions.
        gain: That of the second minus that of the first.
        p: Two-tailed p-value of the gain.
        fixed: Questions that are right now in every call of today, and wrong before.
        broken: Questions that are wrong now, and right before.
    """

    before: str
    after: str
    common: int
    accuracy: tuple[Estimate, Estimate]
    gain: Estimate
    p: float
    fixed: list[str]
    broken: list[str]


def diff_audits(before: Path, after: Path) -> AuditDiff:
    """Compare two audits, by their folders.

    Raises:
        AuditFailed: A folder has no audit, or no question with gold answers is in both.
    """
    results = [read_result(each) for each in (before, after)]
    shares = [
        {_name(each): share for each in found["questions"] if (share := _share(each)) is not None} for found in results
    ]
    names = [name for name in shares[0] if name in shares[1]]
    if not names:
        raise AuditFailed("the audits share no question with gold answers", hint="Audit the same questions.")
    old, new = (np.array([each[name] for name in names]) for each in shares)
    p = 2 * min(paired_p_value(new - old), paired_p_value(old - new))
    return AuditDiff(
        str(results[0]["system"]),
        str(results[1]["system"]),
        len(names),
        (mean_of_shares(old), mean_of_shares(new)),
        mean_difference(new, old),
        min(1.0, p),
        [text for (_, text), was, now in zip(names, old, new, strict=True) if (was, now) == (0, 1)],
        [text for (_, text), was, now in zip(names, old, new, strict=True) if (was, now) == (1, 0)],
    )


def _name(record: Mapping[str, Any]) -> tuple[str, str]:
    return str(record.get("id")), str(record.get("question"))


def _share(record: Mapping[str, Any]) -> float | None:
    """Return the share of right answers of today; None if they are neither right nor wrong."""
    said = [call["outcome"] for call in record["calls"] if call["call"] in TODAY]
    known = [each for each in said if each in {"right", "wrong", "failed"}]
    return None if not known or not record.get("answers") else known.count("right") / len(known)
