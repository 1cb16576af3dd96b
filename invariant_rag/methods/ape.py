"""APE: adaptive parallel encoding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from invariant_rag.arrangement import Arrangement, Layout, Span, Weighting
from invariant_rag.checks import check_real
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods.rows import SetBased


@dataclass(frozen=True)
class APE(SetBased):
    """Parallel segments after a shared prefix, attended to with temperature and scale (arXiv 2502.05431, section 4).

    Tokens after a set divide the scores of its keys by `temperature`, and multiply their log-sum-exp by
    `scale * temperature` before it is merged with that of all other keys. A set of one segment gets plain attention.

    Attributes:
        temperature: Below 1, attention to the segments is sharper.
        scale: Below 1, the segments together weigh less.

    Raises:
        InvalidChoice: A value is not positive.
    """

    temperature: float = 0.9
    scale: float = 0.9
    name: ClassVar[str] = "ape"
    paper: ClassVar[str] = "arXiv 2502.05431"
    stock_decoding: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("temperature", "scale"):
            object.__setattr__(self, name, check_real(name, getattr(self, name)))
        if min(self.temperature, self.scale) <= 0:
            raise InvalidChoice(
                f"expected a temperature and a scale above 0, got {self.temperature} and {self.scale}",
                hint="The published defaults are 0.9 and 0.9.",
            )

    def arrange(self, layout: Layout) -> Arrangement:
        """Return which keys every token of a prompt with this layout attends to."""
        adapted = Weighting(self.temperature, self.scale * self.temperature)
        sets = [
            ((Span(before.stop, after.start), adapted),) if count > 1 else ()
            for before, after, count in zip(layout.text_spans, layout.text_spans[1:], layout.counts, strict=False)
        ]
        weighted = tuple(sum(sets[:ended], ()) for ended in range(len(layout.texts)))
        return super().arrange(layout).weighted(weighted)
