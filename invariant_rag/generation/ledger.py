"""The ledger of an answer: what was read as a set, in which order, and whether the order given could change it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt


def ledger(generation: Generation, prompt: Prompt, *, recognized: bool = True) -> dict[str, Any]:
    """Return what was read for an answer, as plain values that do not depend on the order given.

    Segments are named by their `content_hash`.

    Args:
        generation: The answer.
        prompt: Its prompt.
        recognized: Whether every document in the prompt is known to be a segment. If not, the answer may depend on the
            order in which the others were listed.

    Returns:
        `sets`: sizes of the sets; `order`: all segments in physical order, farthest from the suffix first; `dropped`
        and `trimmed`: segments that did not fit; `cached_tokens`: tokens of the prompt that came from a cache;
        `method`: name of the method; `invariant`: whether the order given could not change the answer, None without
        documents; `bitwise`: there, and False, if other requests in its batch may have changed its last bits.
    """
    segments = prompt.segments

    def hashes(indices: Sequence[int]) -> list[str]:
        return [segments[index].content_hash for index in indices]

    return {
        "sets": list(generation.sets),
        "order": hashes(generation.order),
        "dropped": sorted(hashes(generation.dropped)),
        "trimmed": sorted(hashes(generation.trimmed)),
        "cached_tokens": generation.usage.cached_tokens,
        "method": generation.method,
        "invariant": generation.invariant if recognized else False,
        **({} if generation.bitwise else {"bitwise": False}),
    }
