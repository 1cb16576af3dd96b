"""Audits whose plots nobody looks at."""

from __future__ import annotations

import pytest

from invariant_rag.evaluation.audit import plots


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let reports be written without drawing their plots, which takes a second each: for tests of other things."""
    monkeypatch.setattr(plots, "draw", lambda audit, form=plots.WIDE: dict.fromkeys(("flips", "cost", "slots"), b""))
