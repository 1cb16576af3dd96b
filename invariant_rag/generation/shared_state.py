"""What all wrappers of one model share: its rotary embeddings, a lock, and the digest of its weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from threading import RLock
from typing import TYPE_CHECKING

from invariant_rag.attention.per_model import once_per_model
from invariant_rag.attention.probe import probe
from invariant_rag.generation.weight_version import WeightVersion, addresses_of, fingerprint

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from invariant_rag.attention.rope import Rotation


@dataclass
class SharedState:
    """State of a model that belongs to no single wrapper.

    Attributes:
        rotations: The rotary embedding of each layer.
        lock: Held during every call of the model.
    """

    rotations: list[Rotation]
    lock: RLock = field(default_factory=RLock)
    _version: WeightVersion | None = None
    _digest: tuple[object, str] | None = None

    def fingerprint(self, model: PreTrainedModel) -> str:
        """Return a digest of the weights; computed again after the weights or the active adapters changed."""
        if self._version is None or self._version.addresses != addresses_of(model):
            self._version = WeightVersion.of(model)
        state = self._version.state(model)
        if self._digest is None or self._digest[0] != state:
            self._digest = (state, fingerprint(model, self._version.active_adapters()))
        return self._digest[1]


@once_per_model
def shared_state(model: PreTrainedModel) -> SharedState:
    """Return the state that all wrappers of a model share; the model is probed the first time.

    Raises:
        UnsupportedModel: Its attention cannot be arranged; the message says why.
    """
    return SharedState(probe(model))
