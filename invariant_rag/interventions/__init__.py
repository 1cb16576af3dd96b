"""Interventions: changes to the plain model's attention that reduce its position bias. One file each; a registry.

An intervention does not make the output invariant; an ordering by content does, with or without an intervention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag.errors import UnknownName, UnsupportedCombination
from invariant_rag.interventions.base import Intervention, PromptBatch
from invariant_rag.interventions.hidden_scaling import HiddenScaling
from invariant_rag.interventions.ms_poe import MsPoE
from invariant_rag.methods import Sequential
from invariant_rag.models.loading import check_model

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.methods import Method

INTERVENTIONS: dict[str, type[Intervention]] = {each.name: each for each in (HiddenScaling, MsPoE)}

__all__ = ["INTERVENTIONS", "HiddenScaling", "Intervention", "MsPoE", "PromptBatch", "resolve_intervention"]


def resolve_intervention(
    intervention: str | Intervention | None, method: Method, model: PreTrainedModel
) -> Intervention | None:
    """Return an intervention, by name with its parameters for the model, or as an instance. None: no intervention.

    An `UnknownName` or an `UnsupportedCombination` says why the model or the method has none.
    """
    if intervention is None:
        return None
    check_model(model)
    if isinstance(intervention, str):
        if intervention not in INTERVENTIONS:
            raise UnknownName("intervention", intervention, INTERVENTIONS)
        intervention = INTERVENTIONS[intervention].for_model(model)
    if not isinstance(intervention, Intervention):
        raise UnknownName("intervention", intervention, INTERVENTIONS)
    if not isinstance(method, Sequential):
        raise UnsupportedCombination(
            f"expected the method 'sequential' with the intervention {intervention.name!r}, got {method.name!r}, "
            "which replaces the attention that the intervention changes"
        )
    intervention.check(model)
    return intervention
