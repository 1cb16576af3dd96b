"""`ArrangedPrompt`: which tokens of a request are documents, and the method that arranges their attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Self

from invariant_rag.arrangement import Arrangement, Layout, natural_positions
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.digest import describe
from invariant_rag.methods import METHODS, Method
from invariant_rag.shown import shown

from vllm_invariant_rag.errors import RequestRefused

FIELD = "invariant_rag"
"""The entry of a request's `kv_transfer_params` that holds its method and layout."""


@dataclass(frozen=True)
class ArrangedPrompt:
    """How the tokens of one request attend.

    Attributes:
        method: Name of the method.
        layout: The token positions of its texts and segments. Tokens after it continue the last text.
    """

    method: str
    layout: Layout

    @property
    @lru_cache(maxsize=256)  # noqa: B019 - few are cached
    def arrangement(self) -> Arrangement:
        """Which keys every token attends to."""
        return METHODS[self.method]().arrange(self.layout)

    @property
    def sets_end(self) -> int:
        """The position at which the last text begins."""
        return self.layout.text_spans[-1].start

    @cached_property
    def is_causal_after_sets(self) -> bool:
        """Whether the last text and the answer attend to all tokens before them, as in a plain causal model."""
        return self.arrangement.rows[-1].is_causal and self._is_natural

    @property
    def ranks(self) -> bool:
        """Whether tokens rank segments by the queries of whole segments, which no cache has."""
        return any(row.ranked for row in self.arrangement.rows)

    @cached_property
    def _is_natural(self) -> bool:
        return self.arrangement.positions == natural_positions(self.layout)

    def is_arranged(self, start: int) -> bool:
        """Return whether a token from `start` on attends otherwise than in a plain causal model."""
        rows = self.arrangement.rows_from(start, max(start + 1, self.layout.length))
        return not (self._is_natural and all(row.is_causal for row in rows))

    def as_params(self) -> dict[str, Any]:
        """Return the `kv_transfer_params` of a request."""
        return {FIELD: {"method": self.method, "texts": self.layout.texts, "sets": self.layout.sets}}

    @classmethod
    def parse(cls, params: object, token_ids: Sequence[int]) -> Self | None:
        """Parse the `kv_transfer_params` of a request; None where it is a plain one. Refuse what is malformed."""
        value = params.get(FIELD) if isinstance(params, Mapping) else None
        if value is None:
            return None
        if not isinstance(value, Mapping) or set(value) != {"method", "texts", "sets"}:
            raise RequestRefused(f"{FIELD}: expected an object with method, texts and sets, got {shown(value)}")
        if not isinstance(value["method"], str) or value["method"] not in METHODS:
            raise RequestRefused(f"{FIELD}.method: expected one of {', '.join(METHODS)}, got {shown(value['method'])}")
        texts, sets = _tuples("texts", value["texts"], 1), _tuples("sets", value["sets"], 2)
        if len(texts) != len(sets) + 1 or not sets or not texts[-1]:
            raise RequestRefused(f"{FIELD}.texts: expected one text more than sets, the last not empty, got {texts}")
        prompt = cls(value["method"], Layout(texts, sets))
        length = max(prompt.layout.length, *map(len, sets))
        if length > len(token_ids):  # before anything is made that is as long
            raise RequestRefused(f"{FIELD}: expected at most {len(token_ids)} tokens, as in the prompt, got {length}")
        return prompt


def check_method(method: Method) -> None:
    """Raise UnsupportedCombination if vLLM cannot look a method up by its name."""
    known = METHODS.get(method.name)
    if known is None or describe(known()) != describe(method):
        raise UnsupportedCombination(
            f"expected a method with its own parameters, as vLLM looks it up by its name, got {method!r}",
            hint=f"Known are {', '.join(METHODS)}.",
        )


def _tuples(name: str, value: object, depth: int) -> Any:
    """Return nested lists of numbers as tuples; RequestRefused if they are something else."""
    if depth and isinstance(value, list | tuple):
        return tuple(_tuples(name, each, depth - 1) for each in value)
    if depth or type(value) is not int or value < 0:
        raise RequestRefused(f"{FIELD}.{name}: expected lists of whole numbers from 0 on, got {shown(value)}")
    return value
