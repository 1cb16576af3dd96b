"""Which weights a model computes with: a digest of them, and a cheap test for whether they changed since."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def fingerprint(model: PreTrainedModel, *more: object) -> str:
    """Return a digest of a model's config, of samples and sums of its weights, and of whatever else is given."""
    digest = hashlib.sha256(f"{model.config.to_json_string(use_diff=False)} {more}".encode())
    for name, tensor in model.state_dict().items():
        flat = tensor.detach().flatten()
        sample = flat[:: max(1, flat.numel() // 64)].float().cpu()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {float(flat.float().sum())!r}".encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class WeightVersion:
    """Detect changed weights cheaply: storage addresses, version counters, one sampled weight per tensor, adapters.

    In-place changes increase the version counter of a tensor, but those made through `.data` (merged adapters) do not;
    for these there is the sampled weight.

    Attributes:
        addresses: Storage address of each parameter.
        samples: A view of the middle weight of each parameter, in groups that can be stacked.
        adapters: Layers with adapters, as PEFT has them.
    """

    addresses: list[int]
    samples: list[list[torch.Tensor]]
    adapters: list[Any]

    @classmethod
    def of(cls, model: PreTrainedModel) -> WeightVersion:
        """Prepare the test for a model."""
        groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
        for each in model.parameters():
            if each.numel():
                middle = each.detach()[tuple(size // 2 for size in each.shape)]
                groups.setdefault((each.device, each.dtype), []).append(middle)
        layers = [module for module in model.modules() if module is not model and hasattr(module, "active_adapters")]
        return cls(addresses_of(model), list(groups.values()), layers)

    def active_adapters(self) -> list[tuple[Any, bool]]:
        """Return which adapters each layer applies, and whether they are disabled."""
        return [(each.active_adapters, getattr(each, "disable_adapters", False)) for each in self.adapters]

    def state(self, model: PreTrainedModel) -> object:
        """Return a value that changes when the weights, or the active adapters, do."""
        sampled = [value for group in self.samples for value in torch.stack(group).tolist()]
        return self.addresses, sampled, self.active_adapters(), [each._version for each in model.parameters()]


def addresses_of(model: PreTrainedModel) -> list[int]:
    """Return the storage address of each parameter."""
    return [parameter.data_ptr() for parameter in model.parameters()]
