"""Interventions and ensembles of a run, by the names of the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import UnknownName

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.interventions import HiddenScaling

ENSEMBLES: dict[str, str] = {
    "permutation-average": "PermutationAverage",
    "ring-average": "RingAverage",
    "self-consistency": "SelfConsistency",
    "attention-sorting": "AttentionSorting",
    "contextual-calibration": "ContextualCalibration",
}
"""Class of every ensemble in `invariant_rag.ensembles`, by its name on the command line."""


def resolve_intervention(described: str) -> str | HiddenScaling:
    """Return an intervention: its name, or the parameters in a file of `invariant-rag search-dimension`.

    Raises:
        UnknownName: There is no such intervention, and no such file.
        InvalidChoice: The file holds no parameters.
    """
    from invariant_rag.interventions import INTERVENTIONS, HiddenScaling

    if described in INTERVENTIONS:
        return described
    if not Path(described).is_file():
        raise UnknownName("intervention", described, INTERVENTIONS, hint="Or give a file of search-dimension.")
    return HiddenScaling.load(described)


def build_ensemble(name: str, lm: InvariantModel) -> Any:
    """Return the ensemble of that name over a model, with its defaults.

    Raises:
        UnknownName: There is none; the message lists them.
        UnsupportedCombination: It does not support the model or its method.
    """
    if name not in ENSEMBLES:
        raise UnknownName("ensemble", name, ENSEMBLES)
    from invariant_rag import ensembles

    return getattr(ensembles, ENSEMBLES[name])(lm)
