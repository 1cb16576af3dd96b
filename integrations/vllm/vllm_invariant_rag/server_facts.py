"""What a vLLM serves, from its configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from invariant_rag.generation.kv_cache_redis import without_secrets

from vllm_invariant_rag.checkpoint import checkpoint_folder, fingerprint
from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.store import place_of

_CONNECTOR = "InvariantRAGConnector"


@dataclass(frozen=True)
class ServerFacts:
    """What vLLM serves.

    Attributes:
        source: Folder or hub id of the model.
        model: Fingerprint of its files.
        folder: Folder that the connector reads; None if it reads from Redis.
        redis_url: Address of that Redis, without user and password; None if it reads a folder.
        dtype: Dtype of the model, such as `bfloat16`.
        max_model_len: Tokens that prompt and answer may have together.
    """

    source: str
    model: str
    folder: str | None
    redis_url: str | None
    dtype: str
    max_model_len: int


def facts_of(vllm_config: Any) -> ServerFacts:
    """Return what a vLLM with this configuration serves.

    Raises:
        UnsupportedServer: It has another connector, or none.
    """
    transfer, model = vllm_config.kv_transfer_config, vllm_config.model_config
    if transfer is None or transfer.kv_connector != _CONNECTOR:
        raise UnsupportedServer(
            f"expected a vLLM with {_CONNECTOR}, got {getattr(transfer, 'kv_connector', None)}",
            hint="Pass kv_transfer_config, as the README shows.",
        )
    folder, address = place_of(transfer.kv_connector_extra_config)
    return ServerFacts(
        source=str(model.model),
        model=fingerprint(checkpoint_folder(model.model, model.revision)),
        folder=folder,
        redis_url=None if address is None else without_secrets(address),
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=int(model.max_model_len),
    )
