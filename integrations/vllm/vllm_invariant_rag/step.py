"""What the connector tells the attention layers of a worker: who is arranged in this step, and how positions turn.

vLLM hands a backend batches without names. A row of the batch is found by the first block of its request: requests
that share it have the same sets, since the connector salts vLLM's prefix cache for each set.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from invariant_rag.arrangement import Arrangement, Span
from invariant_rag.attention.rope import Rotation
from invariant_rag.attention.varlen.passes import shifts_of

from vllm_invariant_rag.errors import UnsupportedServer
from vllm_invariant_rag.reading import Reading

_FOUND = "_invariant_rag_prompts"


@dataclass(frozen=True)
class ArrangedPrompt:
    """One row of a batch whose tokens are arranged in this step.

    Attributes:
        queries: Its tokens, among those of the batch.
        computed: Its tokens that were computed before.
        row: Its row in the block table.
        arrangement: What its tokens see.
        plans: What the layers of the step share.
        query_shifts: From indices, which vLLM has as positions, to those of the method `[Q, 1]`; None: none is moved.
        key_shifts: The same for all of its keys `[S, 1]`.
    """

    queries: Span
    computed: int
    row: int
    arrangement: Arrangement
    plans: dict[Any, Any]
    query_shifts: torch.Tensor | None
    key_shifts: torch.Tensor | None


@dataclass
class Step:
    """What a worker's layers know. A process has one.

    Attributes:
        readings: By the first block of a request: how it reads its documents. Only requests that are arranged now.
        block_size: Tokens of a block.
        rotation: The position encoding of all layers.
    """

    readings: Mapping[int, Reading] = field(default_factory=dict)
    block_size: int = 0
    rotation: Rotation | None = None

    def arranged(self, metadata: Any, kernel_block: int, device: Any) -> list[ArrangedPrompt]:
        """Return the arranged prompts of a batch. They are found once for all layers of a step.

        Args:
            metadata: vLLM's metadata of the batch.
            kernel_block: Tokens of a block as the kernel sees it; a block of vLLM may be several of these.
            device: Where the batch is.

        Raises:
            UnsupportedServer: A request that has to be arranged is not in the batch.
        """
        if not self.readings or metadata is None:
            return []
        found: list[ArrangedPrompt] | None = getattr(metadata, _FOUND, None)
        if found is None:
            found = self._find(metadata, kernel_block, device)
            setattr(metadata, _FOUND, found)
        return found

    def _find(self, metadata: Any, kernel_block: int, device: Any) -> list[ArrangedPrompt]:
        starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
        firsts = (metadata.block_table[:, 0] * kernel_block // self.block_size).tolist()
        found, missing = [], set(self.readings)
        for row, (start, stop, length, first) in enumerate(zip(starts, starts[1:], lengths, firsts, strict=False)):
            reading = self.readings.get(first)
            if stop > start and reading is not None:
                missing.discard(first)
                computed = length - (stop - start)
                if reading.is_arranged(computed):
                    found.append(_prompt(reading, Span(start, stop), computed, row, device))
        if missing:
            raise UnsupportedServer(
                f"expected {len(missing)} more requests with documents in a batch of vLLM, got none"
            )
        return found


def _prompt(reading: Reading, queries: Span, computed: int, row: int, device: Any) -> ArrangedPrompt:
    arrangement, num_keys = reading.arrangement, computed + len(queries)
    positions = arrangement.positions[:num_keys]
    later = [position - index for index, position in enumerate(positions)]
    later += later[-1:] * (num_keys - len(later))
    shifts = shifts_of(later[computed:], device), shifts_of(later, device)
    return ArrangedPrompt(queries, computed, row, arrangement, {}, *shifts)


STEP = Step()
