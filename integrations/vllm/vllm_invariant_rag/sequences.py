"""Rows of an arranged prompt as sequences of a batch for vLLM's own kernel, on a CPU.

That kernel returns no log-sum-exps, by which attention to the runs of a row could be merged, but takes blocks in any
order. So the rows of a prompt are a batch of their own: keys at one shift are copied into blocks once for all rows that
attend to them, and each sequence ends with keys that fill no block, and the row's own tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any, Self

import torch
from invariant_rag.arrangement import Row
from invariant_rag.attention.positions import Rotation
from torch.nn.utils.rnn import pad_sequence

_BLOCK = 32  # tokens; kernels of CPUs take multiples of it
_MOST_COPIES = 16  # of each key, on average, so that memory stays linear


@dataclass(frozen=True)
class Sequences:
    """The batch, which the layers of a step share. S keys are copied into slots of blocks, M of them shifted."""

    keys: torch.Tensor  # the key of each slot, the shifted ones first `[S]`
    slots: torch.Tensor  # `[S]`
    shifts: torch.Tensor  # `[M, 1]`
    reach: int  # more than every shift, and rounded up, so that tables of angles are rarely rebuilt
    longest: int  # tokens of a sequence
    num_blocks: int
    metadata: Any  # vLLM's, of the batch
    blocks: list[torch.Tensor] = field(default_factory=list)  # allocated by the first layer

    @classmethod
    def of(cls, rows: Sequence[Row], num_keys: int, another: Callable[..., Any]) -> Self | None:
        """Return the sequences of rows.

        `another` builds vLLM's metadata for a batch. None: the rows are not one softmax over keys at known shifts each,
        or there is nothing to gain.
        """
        if len(rows) == 1 or any(row.ranked or row.is_weighted for row in rows):
            return None
        content, tables = _block_contents(rows)
        if len(content) > _MOST_COPIES * num_keys:
            return None
        keys, shifts = torch.tensor(content).unbind(dim=1)
        slots, count = torch.argsort(shifts == 0, stable=True), int(shifts.count_nonzero())
        queries, lengths = [len(row.queries) for row in rows], [row.length for row in rows]
        table = pad_sequence([torch.tensor(each, dtype=torch.int32) for each in tables], True)
        metadata = another(queries, lengths, table)
        shifted, reach = shifts[slots[:count], None], 256 * (1 + int(shifts.abs().max()) // 256)
        return cls(keys[slots], slots, shifted, reach, max(lengths), len(content) // _BLOCK, metadata)

    def fill(
        self, keys: torch.Tensor, values: torch.Tensor, rotation: Rotation, write: Callable[..., None]
    ) -> torch.Tensor:
        """Copy a layer's keys and values `[K, H_kv, D]` into blocks `[N, H_kv, B, 2 D]`; return these."""
        if not self.blocks:
            self.blocks.append(keys.new_empty(self.num_blocks, keys.shape[1], _BLOCK, 2 * keys.shape[2]))
        (blocks,), count = self.blocks, len(self.shifts)
        shifted = rotation.rotate_each(keys[self.keys[:count]], self.shifts, self.reach).to(keys.dtype)
        for some, part in ((shifted, slice(count)), (keys[self.keys[count:]], slice(count, None))):
            write(some, values[self.keys[part]], blocks, self.slots[part])
        return blocks


def _block_contents(rows: Sequence[Row]) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Return the key and the shift in each slot of all blocks, and the blocks of each row."""
    content: list[tuple[int, int]] = []
    shared: dict[tuple[int, int], int] = {}
    tables = []
    for row in rows:
        table: list[int] = []
        rest: list[tuple[int, int]] = []
        *before, own = row.runs
        for run in (*before, replace(own, stop=row.queries.start)):
            start = min(-(-run.start // _BLOCK) * _BLOCK, run.stop)
            stop = max(start, run.stop // _BLOCK * _BLOCK)  # whole blocks are between the two
            for first in range(start, stop, _BLOCK):
                if (first, run.shift) not in shared:
                    shared[first, run.shift] = len(content) // _BLOCK
                    content += [(key, run.shift) for key in range(first, first + _BLOCK)]
                table.append(shared[first, run.shift])
            rest += [(key, run.shift) for key in chain(range(run.start, start), range(stop, run.stop))]
        rest += [(key, own.shift) for key in range(row.queries.start, row.queries.stop)]
        rest += rest[-1:] * (-len(rest) % _BLOCK)  # in unused slots
        table += range(len(content) // _BLOCK, (len(content) + len(rest)) // _BLOCK)
        content += rest
        tables.append(table)
    return content, tables
