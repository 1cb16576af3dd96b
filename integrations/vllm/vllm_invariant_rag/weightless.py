"""A model without its weights: configuration and tokenizer, by which prompts are written for a vLLM that has them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from invariant_rag.generation.digest import digest_of
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.prefill import RUNS_ELSEWHERE, SharedState
from invariant_rag.models.loading import load_config, load_tokenizer, model_location
from transformers import AutoModelForCausalLM, GenerationConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class RemoteState(SharedState):
    """State of a model that runs in vLLM.

    Attributes:
        source: Folder or hub id that vLLM loaded it from.
    """

    source: str = ""

    def weights_digest(self, model: PreTrainedModel) -> str:
        """Return what tells the model from others: its weights are elsewhere."""
        return digest_of("vllm", self.source, repr(model.config))


def load_without_weights(source: str | Path) -> InvariantModel:
    """Load configuration, generation configuration and tokenizer of a model.

    Raises:
        ModelNotFound: They are not there.
    """
    tokenizer, config = load_tokenizer(source), load_config(source)
    with torch.device("meta"):
        model = cast("PreTrainedModel", AutoModelForCausalLM.from_config(config))
    with suppress(OSError):  # there is none: that of the configuration stays
        model.generation_config = GenerationConfig.from_pretrained(model_location(source))
    config._name_or_path = str(source)
    setattr(model, RUNS_ELSEWHERE, True)
    return InvariantModel(model.eval(), tokenizer)
