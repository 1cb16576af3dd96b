"""Where keys and values lie between the prefill worker and vLLM: a folder, or Redis."""

from __future__ import annotations

import os
from collections.abc import Mapping
from string import Template
from typing import Any

from invariant_rag.checks import check_number
from invariant_rag.generation.kv_cache import KeyValueCache

from vllm_invariant_rag.errors import UnsupportedServer

_DEFAULT_MEMORY = 1 << 30


def open_cache(options: Mapping[str, Any], max_bytes: int | None = None) -> KeyValueCache:
    """Return the cache that the options of the connector describe.

    Args:
        options: `kv_connector_extra_config`.
        max_bytes: Size of the entries in memory. None: as the options say.

    Raises:
        ExtraRequired: Redis is wanted, and its client is not installed.
        InvalidChoice: The address of Redis is none.
        UnsupportedServer: The options name no place, two of them, something unknown, or a size that is none.
        UnusableFile: The folder cannot be created.
    """
    folder, address = place_of(options)
    size = check_number("memory_bytes", options.get("memory_bytes", _DEFAULT_MEMORY), 0, error=UnsupportedServer)
    return KeyValueCache(size if max_bytes is None else max_bytes, folder=folder, redis_url=address)


def place_of(options: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the folder or the address of Redis, in which `$NAME` stands for an environment variable.

    A launch line is shown by `ps` and in logs, so passwords do not belong into it.

    Raises:
        UnsupportedServer: The options name no place, two of them, or something unknown.
    """
    places = [options.get(name) for name in ("folder", "redis_url") if name in options]
    if len(places) != 1 or not isinstance(places[0], str) or set(options) - {"folder", "redis_url", "memory_bytes"}:
        raise UnsupportedServer(
            "kv_connector_extra_config: expected 'folder' or 'redis_url', and perhaps 'memory_bytes', got "
            f"{sorted(options)}",
            hint="It is the place that the prefill worker writes to.",
        )
    if "folder" in options:
        return places[0], None
    try:
        return None, Template(places[0]).substitute(os.environ)
    except (KeyError, ValueError) as error:
        raise UnsupportedServer(
            f"redis_url: expected the environment variables that it names to be set, got none for {error}",
            hint="A dollar sign itself is $$.",
        ) from error
