"""What a server is made from: `EngineConfig`, `Settings` and `Scale` are also the options of `invariant-rag serve`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Self

from invariant_rag.api_models import STRATEGIES
from invariant_rag.checks import check_path, check_real
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import METHODS
from invariant_rag.models.devices import DType
from invariant_rag.orderings import ORDERINGS, Relevance
from invariant_rag.shown import reason, shown

KEY_VARIABLE = "INVARIANT_RAG_API_KEY"
OPERATOR_KEY_VARIABLE = "INVARIANT_RAG_OPERATOR_KEY"
UPSTREAM_KEY_VARIABLE = "INVARIANT_RAG_UPSTREAM_KEY"
"""The environment variable with the key of the vLLM or of the API behind a server."""

_IN_PROCESS = ("dtype", "device_map", "deterministic", "cache_gb", "cache_folder", "together")
_MEANINGLESS = {"vllm": (*_IN_PROCESS, "votes"), "upstream": (*_IN_PROCESS, "overflow"), None: ("votes",)}
"""Fields that do not apply to an engine on vLLM, to one behind an API, and to one in process."""


def _option(default: Any, about: str, **more: Any) -> Any:
    """Return a field that is an option of the command line, with what `cli.options.with_fields` shows of it."""
    return field(default=default, metadata={"about": about, **more})


@dataclass(frozen=True)
class EngineConfig:
    """What an engine is made from, as `invariant-rag serve --help` says. Picklable, and without secrets.

    Raises:
        InvalidChoice: There are two engines, or a choice that does not apply to the engine.
    """

    model: str | None = _option(
        None,
        "Model id or folder; with --upstream, its name there.",
        shown="the embedded model, or vLLM's",
        argument=True,
    )
    name: str | None = _option(
        None, "What requests call the model.", shown="MODEL, or invariant-rag", option="--served-name"
    )
    method: str | None = _option(
        None,
        "See `invariant-rag methods`. With --upstream: canonical, vote or sequential.",
        shown="rotor; with --upstream, canonical",
    )
    ordering: str | None = _option(None, "See `invariant-rag orderings`.", shown="the method's default")
    overflow: Literal["error", "drop_last", "trim_segments"] = _option(
        "error", "What to do with prompts that are longer than the context window."
    )
    dtype: DType = _option("auto", "As in transformers.")  # noqa: RUF009 - a field
    device_map: str = _option("auto", "As in transformers: auto spreads a large model over all devices.")
    deterministic: bool = _option(
        False, "Read and decode prompts one by one: slower under load, but other requests change no bit."
    )
    cache_gb: float = _option(1.0, "Keys and values kept in memory, for all tenants.", min=0)
    cache_folder: Path | None = _option(None, "Keep them on disk, too.")  # noqa: RUF009 - a field
    together: int = _option(
        8,
        "Requests to decode as one batch. Under load, what else is in it may change log-probabilities by rounding, "
        "about 1e-6 in float32; see --deterministic.",
        min=1,
    )
    vllm: str | None = _option(
        None,
        f"Let a vLLM with the plug-in vllm-invariant-rag answer. {UPSTREAM_KEY_VARIABLE} is its key.",
        metavar="URL",
    )
    upstream: str | None = _option(
        None,
        f"Let an OpenAI-compatible API answer, with sorted documents. {UPSTREAM_KEY_VARIABLE} is its key.",
        metavar="URL",
    )
    votes: int = _option(5, "Orders that the method vote requests, with --upstream.", min=2)

    def __post_init__(self) -> None:
        if self.vllm is not None and self.upstream is not None:
            raise InvalidChoice("expected vllm or upstream, got both", hint="One engine is behind a server.")
        engine = "vllm" if self.vllm is not None else "upstream" if self.upstream is not None else None
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in _MEANINGLESS[engine] and value != each.default:
                where, hint = engine or "a model in this process", "It would change nothing. Leave it away."
                raise InvalidChoice(f"expected no {each.name} with {where}, got {shown(value)}", hint=hint)
        folder = None if self.cache_folder is None else check_path("cache_folder", self.cache_folder)
        if folder and any(os.path.isfile(each) for each in (folder, *folder.parents)):  # noqa: PTH113 - it never raises
            raise InvalidChoice(f"cache_folder: expected a folder, got {shown(str(folder))}, a file or in one")


@dataclass(frozen=True)
class Settings:
    """What a server allows: limits, keys, choices of a request; what is no option of `invariant-rag serve` besides.

    Attributes:
        keys: Tenant of each bearer key. Empty: nobody needs one.
        operator_key: The key of `/metrics`, which shows sums over all tenants. None: with keys, it is closed.
        max_body_bytes: A longer body is refused with 413.
        default_new_tokens: Length of answers where a request sets none.
        max_choices: The most answers of a request (`n`).
        body_timeout: Seconds for the head of a request, and then for its body; then 408.

    Raises:
        InvalidChoice: A limit is too small, or an allowed choice does not exist.
    """

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    max_body_bytes: int = 4 << 20
    default_new_tokens: int = 256
    max_choices: int = 8
    body_timeout: float = 20.0
    max_requests: int = _option(
        64, "Requests that run or wait; more get 429. No tenant gets the places of all others.", min=1
    )
    max_connections: int = _option(
        128, "Connections of one address; beyond them, the oldest idle one is closed.", min=1
    )
    trusted_proxies: frozenset[str] = _option(
        frozenset(),
        "A proxy: its connections are not limited, and its X-Forwarded-For is believed.",
        option="--trusted-proxy",
        metavar="ADDRESS",
    )
    max_prompt_tokens: int | None = _option(
        None,
        "Longest prompt of a chat, a completion or a judge, with its documents; longer ones get 413. Overflow cuts to "
        "the context window only, never to this limit.",
        min=1,
        shown="the context window",
    )
    max_new_tokens: int = _option(4096, "The most tokens that a request may generate.", min=1)
    timeout: float = _option(300.0, "Seconds for an answer; then 504.", min=0.1)
    methods: frozenset[str] = _option(
        frozenset(), "A method that requests may choose. Repeatable.", option="--allow-method", shown="all"
    )
    orderings: frozenset[str] = _option(
        frozenset(name for name, each in ORDERINGS.items() if not issubclass(each, Relevance)),
        "An ordering that requests may choose. Repeatable.",
        option="--allow-ordering",
        shown="those without a model",
    )
    log_contents: bool = _option(False, "Log requests with their texts.")

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type == "int" and value < 1:
                raise InvalidChoice(f"{each.name}: expected at least 1, got {value}")
            if each.name.endswith("timeout") and check_real(each.name, value) <= 0:
                raise InvalidChoice(f"{each.name}: expected more than 0 seconds, got {value}")
        for address in self.trusted_proxies:
            try:
                ip_address(address)
            except ValueError:
                raise InvalidChoice(f"trusted_proxies: expected addresses such as 10.0.0.2, got {address!r}") from None
        _check_allowed("method", self.methods, STRATEGIES | METHODS.keys())
        _check_allowed("ordering", self.orderings, ORDERINGS.keys())

    @property
    def tenants(self) -> int:
        """How many tenants there are."""
        return max(len(set(self.keys.values())), 1)

    def within(self, methods: frozenset[str]) -> Self:
        """Return the settings of a server whose engine has these methods."""
        _check_allowed("method", self.methods, methods)
        return replace(self, methods=self.methods or methods)

    def without_keys(self) -> Self:
        """Return the settings for another process, which has to know the tenants, but no key."""
        return replace(self, keys={tenant: tenant for tenant in self.keys.values()}, operator_key=None)


@dataclass(frozen=True)
class Scale:
    """How many replicas on Ray there are, and what each needs.

    Attributes:
        replicas: Replicas of the model.
        max_replicas: The most, between which Ray Serve chooses by load. None: as many as `replicas`.
        replica_gpus: GPUs of each, or a part of one. None: none, and only without a model.
        replica_cpus: CPU cores of each, which are also its threads.
        ingresses: Processes that take requests.
    """

    replicas: int = 1
    max_replicas: int | None = None
    replica_gpus: float | None = None
    replica_cpus: float = 1.0
    ingresses: int = 1

    def __post_init__(self) -> None:
        least = {"replicas": 1, "ingresses": 1, "max_replicas": self.replicas, "replica_gpus": 0, "replica_cpus": 0}
        for name, bound in least.items():
            value = getattr(self, name)
            if value is not None and value < bound:
                raise InvalidChoice(f"{name}: expected at least {bound}, got {value}")


def _check_allowed(kind: str, allowed: Set[str], known: Set[str]) -> None:
    if unknown := sorted(allowed - known):
        raise InvalidChoice(f"expected allowed {kind}s of {', '.join(sorted(known))}, got {', '.join(unknown)}")


def key_of_environment(variable: str) -> str | None:
    """Return the key in a variable of the environment; None if there is none."""
    return os.environ.get(variable, "").strip() or None


def read_keys(path: Path | None) -> dict[str, str]:
    """Return the tenant of each key: from a file, and from the environment."""
    keys = {key: "default"} if (key := key_of_environment(KEY_VARIABLE)) else {}
    try:
        lines = path.read_text("utf-8").splitlines() if path else []
    except (OSError, ValueError) as error:
        raise InvalidChoice(
            f"cannot read {path}: {reason(error)}", hint="It has a line `TENANT KEY` for each key."
        ) from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or keys.get(words[1], words[0]) != words[0]:
            raise InvalidChoice(
                f"{path}, line {number}: expected `TENANT KEY`, with a key that is nobody else's",
                hint="One line for each key; a tenant may have several.",
            )
        keys[words[1]] = words[0]
    return keys
