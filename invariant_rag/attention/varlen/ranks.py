"""PINE's importance and shifts, from log-sum-exps.

The importance of segment j to a token t is the mean weight of its keys, without rotary positions (arXiv 2407.01100,
section 3.3). With the log-sum-exp `L[t, j]` over the keys of j, it is `exp(L[t, j] - logsumexp_k L[t, k]) / len(j)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress

import torch

from invariant_rag.attention.varlen.windows import Ranked


@dataclass(frozen=True)
class Ranks:
    """What readers need to know of the segments that they rank. N is the largest number of segments, R that of readers.

    Attributes:
        lengths: Tokens of each segment `[N, R, 1]`; 0 where a set has fewer.
        places: Index of each segment's first token in its prompt `[N, R, 1]`.
        is_own: Where a reader is a token of the segment itself `[N, R, 1]`.
        starts: Where a reader sees the first token of its set, relative to its own index `[R, 1]`.
        members: Readers that are tokens of segments of the set `[M]`; they rank as whole segments.
        counts: Tokens of these segments `[G]`.
        groups: The segment of each member `[M]`.
        signs: -1 where the most important segment is placed farthest, else 1 `[R, 1]`.
    """

    lengths: torch.Tensor
    places: torch.Tensor
    is_own: torch.Tensor
    starts: torch.Tensor
    members: torch.Tensor
    counts: torch.Tensor
    groups: torch.Tensor
    signs: torch.Tensor

    def shifts(self, lses: torch.Tensor) -> torch.Tensor:
        """Return by how much each reader sees each segment later than it lies `[N, R, H]`.

        Args:
            lses: Log-sum-exps over the keys of each segment, without positions `[N, R, H]`; minus infinity where a set
                has fewer segments.
        """
        importance = self._importance(lses)
        rank = (self.signs * importance).masked_fill(self.is_own, torch.inf)
        far_to_near = torch.sort(rank, dim=0, stable=True).indices  # ties in physical order
        lengths = self.lengths.expand_as(rank).gather(0, far_to_near)
        starts = torch.empty_like(lengths).scatter_(0, far_to_near, lengths.cumsum(dim=0) - lengths)
        return starts + self.starts - self.places

    def _importance(self, lses: torch.Tensor) -> torch.Tensor:
        """Return the importance of each segment to each reader `[N, R, H]`; that of its own segment is 0."""
        others = lses.masked_fill(self.is_own, -torch.inf)
        importance = (others - others.logsumexp(dim=0)).exp().nan_to_num(0.0) / self.lengths.clamp(min=1)
        if len(self.members):
            tokens = importance[:, self.members].transpose(0, 1)
            segments = torch.segment_reduce(tokens.contiguous(), "sum", lengths=self.counts, axis=0, unsafe=True)
            importance[:, self.members] = segments[self.groups].transpose(0, 1)
        return importance


def make_ranks(readers: Sequence[Ranked], device: torch.device) -> Ranks:
    """Return what readers need to know of the segments that they rank.

    Args:
        readers: The readers, in the order of the queries.
        device: Where the tables are to be.
    """
    slots = max(len(each.set.segments) for each in readers)
    counts = [len(each.queries) for each in readers]

    def per_reader(numbers: Sequence[Sequence[float]]) -> torch.Tensor:
        """Return numbers of each stretch of readers `[R, n]`."""
        return torch.tensor(numbers).repeat_interleave(torch.tensor(counts), dim=0).to(device)

    def per_slot(numbers: Sequence[Sequence[int]], missing: int) -> torch.Tensor:
        """Return numbers of the segments of each stretch of readers `[N, R, 1]`."""
        padded = [[*some, *[missing] * (slots - len(some))] for some in numbers]
        return per_reader(padded).T[..., None]

    pooled = [each.set.own is not None for each in readers]
    return Ranks(
        lengths=per_slot([list(map(len, each.set.segments)) for each in readers], 0),
        places=per_slot([[span.start for span in each.set.segments] for each in readers], 0),
        is_own=per_slot([[slot == each.set.own for slot in range(slots)] for each in readers], False),
        starts=per_reader([[each.set.first_position] for each in readers]),
        members=per_reader([[each] for each in pooled])[:, 0].nonzero()[:, 0],
        counts=torch.tensor(list(compress(counts, pooled)), device=device),
        groups=torch.tensor(
            [group for group, count in enumerate(compress(counts, pooled)) for _ in range(count)], device=device
        ),
        signs=per_reader([[-1.0 if each.set.reverse else 1.0] for each in readers]),
    )
