"""Answers that are objects or calls of tools: the grammars of the core, as structural tags that vLLM follows itself.

`constrain` and `ToolCalling.constrain` hold a text by logits processors, which cannot run in vLLM. The same grammars
run there with xgrammar. Two things differ. vLLM does not look ahead to `max_new_tokens`, so a text may be cut there; it
then ends with `finish_reason` "length", and parsing it raises IncompleteObject. And log-probabilities are those among
the tokens that the grammar allows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.ending_search import import_xgrammar
from invariant_rag.generation.options import as_ids, resolve_option
from invariant_rag.generation.structured import ContinuingText, TextComplete
from invariant_rag.generation.tool_decoding import CallComplete, CallProcessor
from invariant_rag.prompts import control_tokens

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.generation.tool_decoding import CallDecoding
    from transformers import StoppingCriteria

_UNLIKELY = -100.0  # the least that vLLM takes


@dataclass(frozen=True)
class Structure:
    """What holds one text to its grammar.

    Attributes:
        fields: Sampling parameters of vLLM.
        stops: Tokens that end the text, besides those of the model.
        complete: Tells where the text is finished.
    """

    fields: dict[str, Any]
    stops: frozenset[int]
    complete: StoppingCriteria

    def end(self, prompt: Sequence[int], tokens: Sequence[int]) -> int | None:
        """Return with how many of its tokens a text is finished; None if it is not."""
        nothing = torch.empty((1, 0))
        for count in range(len(tokens) + 1):
            if bool(self.complete(torch.tensor([[*prompt, *tokens[:count]]]), nothing)):
                return count
        return None


def structure_of(lm: InvariantModel, processors: Sequence[Any], criteria: Sequence[Any]) -> Structure | None:
    """Return what `constrain`, or `ToolCalling.constrain`, wants of vLLM; None if there are no processors.

    Args:
        lm: The model.
        processors: `logits_processor` of a call.
        criteria: `stopping_criteria` of the call.

    Raises:
        UnsupportedCombination: There are other processors, which would have to run in vLLM, or free text with tools
            that vLLM cannot hold to its grammar.
    """
    if not processors:
        return None
    complete = [each for each in criteria if isinstance(each, TextComplete | CallComplete)]
    if len(processors) == len(complete) == 1:
        if isinstance(processors[0], ContinuingText):
            fields = _fields(_json(processors[0].text.schema)) | _without_control_tokens(lm)
            return Structure(fields, frozenset(), complete[0])
        if isinstance(processors[0], CallProcessor):
            decoding = processors[0].decoding
            if not decoding.forced:
                return Structure(_fields(_text_or_calls(decoding)), decoding.stops, complete[0])
            banned = _without_control_tokens(lm, decoding.stops, _literals(decoding))
            return Structure(_fields(_calls(decoding, "first")) | banned, decoding.stops, complete[0])
    raise UnsupportedCombination(
        f"expected no logits processors, got {', '.join(type(each).__name__ for each in processors)}: they change "
        "scores while tokens are made, and vLLM makes them elsewhere",
        hint="Leave logits_processor away, or run this call without vLLM. Schemas and tools work.",
    )


def _fields(tag: dict[str, Any]) -> dict[str, Any]:
    return {"structured_outputs": {"structural_tag": json.dumps({"type": "structural_tag", "format": tag})}}


def _without_control_tokens(lm: InvariantModel, *needed: Iterable[int]) -> dict[str, Any]:
    """Return what bans control tokens, which xgrammar would take for their names inside strings."""
    if lm.tokenizer is None:
        return {}
    ends = as_ids(resolve_option({}, "eos_token_id", lm.model.generation_config))
    banned = set(control_tokens(lm.tokenizer)).difference(ends, *needed)
    return {"logit_bias": {str(token): _UNLIKELY for token in sorted(banned)}}


def _literals(decoding: CallDecoding) -> set[int]:
    """Return the tokens of literals, some of which are control tokens."""
    grammar = decoding.grammar
    literals = [(*each.first, *each.resumed, *(each.again or ())) for each in grammar.openings]
    return {token for tokens in (*literals, grammar.closing) for token in tokens}


def _json(schema: str) -> dict[str, Any]:
    """Return JSON of a schema, written as `constrain` has it written."""
    return {
        "type": "grammar",
        "grammar": str(import_xgrammar().Grammar.from_json_schema(schema, any_whitespace=False)),
    }


def _calls(decoding: CallDecoding, literal: str) -> dict[str, Any]:
    """Return `literal JSON (again JSON)* closing`."""
    openings = decoding.grammar.openings
    words = decoding.grammar.words.words

    def text(tokens: Sequence[int]) -> list[dict[str, Any]]:
        # By its bytes. xgrammar 0.2.8 takes the mask of another grammar for one whose tokens are told by their ids.
        return (
            [{"type": "const_string", "value": b"".join(words[token] for token in tokens).decode()}] if tokens else []
        )

    first = [_sequence(*text(getattr(each, literal)), _json(each.json.schema)) for each in openings]
    again = [_sequence(*text(each.again), _json(each.json.schema)) for each in openings if each.again is not None]
    further = [{"type": "star", "content": _either(again)}] if again and decoding.parallel else []
    return _sequence(_either(first), *further, *text(decoding.grammar.closing))


def _text_or_calls(decoding: CallDecoding) -> dict[str, Any]:
    """Return any text, until a call begins."""
    trigger = decoding.grammar.trigger.decode()
    if decoding.grammar.anchored or decoding.reasons:
        raise UnsupportedCombination(
            "expected calls behind a marker, of a model that does not reason, for text with tools on vLLM, got "
            + ("a model that reasons" if decoding.reasons else f"calls that begin with {trigger!r}"),
            hint="Use tool_choice='required' or the name of a tool, or run this call without vLLM.",
        )
    if not decoding.allowed:
        return {"type": "any_text", "excludes": [trigger]}
    return {"type": "dispatch", "rules": [[trigger, _calls(decoding, "resumed")]], "loop": False}


def _sequence(*elements: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": list(elements)}


def _either(elements: list[dict[str, Any]]) -> dict[str, Any]:
    return elements[0] if len(elements) == 1 else {"type": "or", "elements": elements}
