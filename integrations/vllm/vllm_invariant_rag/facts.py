"""What a vLLM serves, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from vllm_invariant_rag.errors import UnsupportedServer

FACTS_PATH = "/v1/invariant_rag"
"""Answers what the server serves, to whom it also answers /v1/models."""

COMPLETIONS_PATH = FACTS_PATH + "/completions"
"""Takes what /v1/completions takes."""

_CONNECTOR = "InvariantRAGConnector"


@dataclass(frozen=True)
class ServerFacts:
    """What vLLM serves.

    Attributes:
        source: Folder or hub id of the model, where its tokenizer is too.
        served_name: What requests call it.
        max_tokens: Tokens that prompt and answer may have together.
        sliding_window: Tokens that a layer sees back. None: all.
        arranges_decoding: Whether methods may have an attention of their own for the answer: CUDA graphs replay vLLM's.
    """

    source: str
    served_name: str
    max_tokens: int
    sliding_window: int | None
    arranges_decoding: bool


def facts_of(vllm_config: Any) -> ServerFacts:
    """Return what a vLLM with this configuration serves.

    Raises:
        UnsupportedServer: It has another connector, or none, so that it would read documents causally.
    """
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    if transfer is None or transfer.kv_connector != _CONNECTOR:
        raise UnsupportedServer(
            f"expected a vLLM with {_CONNECTOR}, got {getattr(transfer, 'kv_connector', None)}",
            hint="Pass kv_transfer_config, as the README shows.",
        )
    graphs, name = vllm_config.compilation_config.cudagraph_mode, model.served_model_name
    return ServerFacts(
        source=str(model.model),
        served_name=name if isinstance(name, str) else str(name[0]),
        max_tokens=int(model.max_model_len),
        sliding_window=model.get_sliding_window(),
        arranges_decoding=graphs is None or not graphs.has_full_cudagraphs(),
    )
