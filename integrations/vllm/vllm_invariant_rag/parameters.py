"""What a request to vLLM says about the keys and values that it starts from, and the check that they belong to it.

vLLM knows a prompt by its tokens only. Two prompts with the same tokens may be arranged differently, so a request names
how its keys and values were computed, and both the file that it starts from and the salt of vLLM's prefix cache follow
from everything that determines them. Neither is believed: the connector derives them again from the request's own
tokens and from the files of its own model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from invariant_rag.generation.kv_cache import key_of

from vllm_invariant_rag.errors import RequestRefused

FIELD = "invariant_rag"
"""The entry of a request's `kv_transfer_params` that holds the parameters."""

SALT_PREFIX = "invariant-rag:"
"""Every salt of ours begins with it. A request with such a salt has to name its set."""

PLAIN_SALT_PREFIX = "invariant-rag-plain:"
"""Salts of prompts that are plain causal attention. They share keys and values with other plain prompts of a tenant."""

COMPUTES_PROMPT = (
    "expected neither prompt_logprobs nor skip_reading_prefix_cache: with them vLLM computes the prompt again, "
    "causally; VLLMBackend.score gives log-probabilities of given continuations"
)
"""Why requests that name a set are refused if they ask for what vLLM reads no cached keys and values for."""

_FORMAT = 1  # part of every key: files of another version are never found


@dataclass(frozen=True)
class SetParameters:
    """The parameters of one request.

    Attributes:
        method: Name of the method.
        ordering: Name of the ordering.
        tenant: Whose documents these are. Tenants share no keys and values.
        tokens: The first tokens of the prompt, whose keys and values are loaded; vLLM computes the rest.
        contents: Digest of what determines the keys and values besides these tokens: the weights, the method with its
            parameters, the attention backend, and where each segment begins.
    """

    method: str
    ordering: str
    tenant: str
    tokens: int
    contents: str

    def key(self, model: str, token_ids: Sequence[int]) -> str:
        """Return the key of the keys and values.

        Args:
            model: Fingerprint of the model's files.
            token_ids: The prompt.
        """
        return key_of("vllm", _FORMAT, model, self.tenant, self.contents, tuple(token_ids[: self.tokens]))

    def salt(self, model: str, key: str) -> str:
        """Return the salt of vLLM's prefix cache.

        It differs for every set, not only for every method: the tokens of a set may begin like those of another one,
        and yet have other keys, because they attend to the segments behind them too.
        """
        return SALT_PREFIX + key_of("salt", _FORMAT, model, self.method, self.ordering, self.tenant, key)

    def as_json(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of a request."""
        return {FIELD: asdict(self)}

    @classmethod
    def parse(cls, value: object) -> SetParameters:
        """Parse the parameters of a request.

        Raises:
            RequestRefused: They are malformed.
        """
        expected = {each.name: int if each.name == "tokens" else str for each in fields(cls)}
        if not isinstance(value, Mapping) or set(value) != set(expected):
            got = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise RequestRefused(f"{FIELD}: expected an object with {', '.join(expected)}, got {got}")
        for name, kind in expected.items():
            if type(value[name]) is not kind:
                raise RequestRefused(f"{FIELD}.{name}: expected {kind.__name__}, got {type(value[name]).__name__}")
        return cls(**value)


@dataclass(frozen=True)
class Admitted:
    """A request whose parameters, tokens and salt belong together.

    Attributes:
        key: Key of its keys and values.
        tokens: Prompt tokens that they cover.
    """

    key: str
    tokens: int


def admit(value: object, model: str, token_ids: Sequence[int], cache_salt: str | None) -> Admitted | None:
    """Check that the parameters of a request, its tokens and its salt belong together.

    Args:
        value: The entry `FIELD` of its `kv_transfer_params`; None if there is none.
        model: Fingerprint of the files of the model that serves.
        token_ids: The prompt.
        cache_salt: The salt.

    Returns:
        What to load; None for a plain request.

    Raises:
        RequestRefused: They do not.
    """
    if value is None:
        if cache_salt is not None and cache_salt.startswith(SALT_PREFIX):
            raise RequestRefused(
                f"expected {FIELD} in kv_transfer_params beside a cache_salt that begins with {SALT_PREFIX!r}, got "
                "none: this request would leave plain keys and values where arranged ones are expected"
            )
        return None
    parameters = SetParameters.parse(value)
    if not 0 < parameters.tokens < len(token_ids):
        raise RequestRefused(
            f"{FIELD}.tokens: expected 1 to {len(token_ids) - 1} for a prompt of {len(token_ids)} tokens, "
            f"got {parameters.tokens}"
        )
    key = parameters.key(model, token_ids)
    if cache_salt != parameters.salt(model, key):
        raise RequestRefused(
            "expected the cache_salt of this model, this prompt and this set, got "
            + ("none" if cache_salt is None else f"{cache_salt[:100]!r}")
            + ": another salt would mix these keys and values with others in vLLM's prefix cache",
        )
    return Admitted(key, parameters.tokens)
