"""Interventions: changes to attention that are not arrangements. One file each; this registry finds them by name.

They lessen a model's position bias. They do not make its output invariant: with `sequential`, an ordering by content
does that, with an intervention or without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from invariant_rag.errors import UnknownName, UnsupportedCombination
from invariant_rag.interventions.base import Intervention, PromptBatch
from invariant_rag.interventions.hidden_scaling import HiddenScaling
from invariant_rag.interventions.ms_poe import MsPoE
from invariant_rag.methods import Sequential

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.methods import Method

INTERVENTIONS: dict[str, type[Intervention]] = {each.name: each for each in (HiddenScaling, MsPoE)}

__all__ = ["INTERVENTIONS", "HiddenScaling", "Intervention", "MsPoE", "PromptBatch", "resolve_intervention"]


def resolve_intervention(
    intervention: str | Intervention | None, method: Method, model: PreTrainedModel
) -> Intervention | None:
    """Return the intervention of that name, as it suits the model, or the instance as it is. None: none.

    Raises:
        UnknownName: No intervention has that name, or it has no published parameters for this model.
        UnsupportedCombination: The method is not `sequential`, or the intervention does not fit the model.
    """
    if intervention is None:
        return None
    if isinstance(intervention, str):
        if intervention not in INTERVENTIONS:
            raise UnknownName("intervention", intervention, INTERVENTIONS)
        intervention = INTERVENTIONS[intervention].for_model(model)
    if not isinstance(method, Sequential):
        raise UnsupportedCombination(
            f"the intervention {intervention.name!r} changes the plain model's attention, and the method "
            f"{method.name!r} replaces that attention; expected the method 'sequential'"
        )
    intervention.check(model)
    return intervention
