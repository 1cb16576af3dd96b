"""What a server allows: limits, keys, choices of a request."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Self

from invariant_rag.api_models import STRATEGIES
from invariant_rag.checks import check_real
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import METHODS
from invariant_rag.orderings import ORDERINGS, Relevance


def cheap_orderings() -> frozenset[str]:
    """Return the orderings that load no model of their own: a request may choose them without delay for others."""
    return frozenset(name for name, each in ORDERINGS.items() if not issubclass(each, Relevance))


@dataclass(frozen=True)
class Settings:
    """Settings of a server.

    Attributes:
        keys: Tenant of each bearer key. Empty: nobody needs one.
        operator_key: The key of `/metrics`, which shows sums over all tenants. None: with keys, nobody sees it.
        trusted_proxies: Addresses of proxies: what they say of their clients is believed, and their connections are
            those of many.
        methods: What a request may choose by `invariant.method`. Empty: all that the engine has.
        orderings: What a request may choose by `invariant.ordering`.
        max_body_bytes: A longer body is refused with 413.
        max_requests: Requests that run or wait; one more is refused with 429. With several tenants, a part is kept for
            those who are not there.
        max_connections: Connections of one address. The oldest one that waits for a request ends when there are more.
        max_prompt_tokens: A longer prompt is refused with 413. None: the context window is the limit.
        max_new_tokens: The most that a request may ask for.
        default_new_tokens: Length of answers where a request says nothing.
        max_choices: The most answers of a request (`n`).
        timeout: Seconds for an answer; then 504.
        body_timeout: Seconds for the head of a request, and then for its body; then 408.
        check_order: Share of requests that are asked again in another order, to measure what order does.
        log_contents: Whether logs hold requests.

    Raises:
        InvalidChoice: A limit is too small, or an allowed choice does not exist.
    """

    keys: Mapping[str, str] = field(default_factory=dict, repr=False)
    operator_key: str | None = field(default=None, repr=False)
    trusted_proxies: frozenset[str] = frozenset()
    methods: frozenset[str] = frozenset()
    orderings: frozenset[str] = field(default_factory=cheap_orderings)
    max_body_bytes: int = 4 << 20
    max_requests: int = 64
    max_connections: int = 128
    max_prompt_tokens: int | None = None
    max_new_tokens: int = 4096
    default_new_tokens: int = 256
    max_choices: int = 8
    timeout: float = 300.0
    body_timeout: float = 20.0
    check_order: float = 0.0
    log_contents: bool = False

    def __post_init__(self) -> None:
        counts = ("body_bytes", "requests", "connections", "new_tokens", "choices")
        for name in ("default_new_tokens", *(f"max_{each}" for each in counts)):
            if getattr(self, name) < 1:
                raise InvalidChoice(f"{name}: expected at least 1, got {getattr(self, name)}")
        for name in ("timeout", "body_timeout"):
            if check_real(name, getattr(self, name)) <= 0:
                raise InvalidChoice(f"{name}: expected more than 0 seconds, got {getattr(self, name)}")
        if not 0 <= self.check_order <= 1:
            raise InvalidChoice(f"check_order: expected a share from 0 to 1, got {self.check_order}")
        _check_allowed("method", self.methods, STRATEGIES | METHODS.keys())
        _check_allowed("ordering", self.orderings, ORDERINGS.keys())

    @property
    def tenants(self) -> int:
        """How many tenants there are."""
        return max(len(set(self.keys.values())), 1)

    def within(self, methods: frozenset[str]) -> Self:
        """Return the settings of a server whose engine has these methods.

        Raises:
            InvalidChoice: One is allowed that the engine does not have.
        """
        _check_allowed("method", self.methods, methods)
        return replace(self, methods=self.methods or methods)


def _check_allowed(kind: str, allowed: Set[str], known: Set[str]) -> None:
    if unknown := sorted(allowed - known):
        raise InvalidChoice(f"expected allowed {kind}s of {', '.join(sorted(known))}, got {', '.join(unknown)}")
