"""Answers that are objects or calls of tools: the grammars of the core, as structural tags that vLLM follows itself.

`constrain` and `ToolCalling.constrain` hold a text by logits processors, which cannot run in vLLM. The same grammars
run there with xgrammar. One thing differs: log-probabilities are those among the tokens that the grammar allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.structured import GrammarProcessor
from invariant_rag.prompts import control_tokens

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel

_UNLIKELY = -100.0  # the least that vLLM takes


@dataclass(frozen=True)
class Structure:
    """What holds one text to its grammar.

    Attributes:
        fields: Sampling parameters of vLLM.
        stops: Tokens that end the text, besides those of the model.
    """

    fields: dict[str, Any]
    stops: frozenset[int]


def structure_of(lm: InvariantModel, processors: Sequence[Any]) -> Structure | None:
    """Return what `constrain`, or `ToolCalling.constrain`, wants of vLLM; None if there are no processors.

    Args:
        lm: The model.
        processors: `logits_processor` of a call.

    Raises:
        UnsupportedCombination: There are other processors, which would have to run in vLLM.
    """
    if not processors:
        return None
    if len(processors) == 1 and isinstance(processors[0], GrammarProcessor):
        processor = processors[0]
        banned = {} if processor.trigger else _without_control_tokens(lm, processor)
        fields = {"structured_outputs": {"structural_tag": processor.tag}}
        return Structure(fields | banned, processor.stops)
    raise UnsupportedCombination(
        f"expected no logits processors, got {', '.join(type(each).__name__ for each in processors)}: they change "
        "scores while tokens are made, and vLLM makes them elsewhere",
        hint="Leave logits_processor away, or run this call without vLLM. Schemas and tools work.",
    )


def _without_control_tokens(lm: InvariantModel, processor: GrammarProcessor) -> dict[str, Any]:
    """Return what bans control tokens, which xgrammar would take for their names inside strings."""
    if lm.tokenizer is None:
        return {}
    names = control_tokens(lm.tokenizer).items()
    banned = {token for token, name in names if name not in processor.literals} - processor.stops
    return {"logit_bias": {str(token): _UNLIKELY for token in sorted(banned)}}
