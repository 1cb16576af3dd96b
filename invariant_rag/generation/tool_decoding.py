"""Decoding of answers with calls: text until a call begins, then nothing but well-formed calls."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from transformers import LogitsProcessor, StoppingCriteria

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.structured import ContinuingText
from invariant_rag.generation.tool_grammar import CallGrammar, Opening
from invariant_rag.prompts import ReasoningFormat


class _Phase(Enum):
    TEXT = "text"
    LITERAL = "literal"
    JSON = "json"
    DONE = "done"


@dataclass(frozen=True)
class _Branch:
    """Literal tokens that may come next, and what follows them: the JSON of a call, or the end of the answer."""

    tokens: tuple[int, ...]
    opening: Opening | None
    cost: int

    @property
    def rest(self) -> _Branch:
        return _Branch(self.tokens[1:], self.opening, self.cost - 1)


class CallDecoding:
    """One answer that grows token by token.

    Attributes:
        grammar: The calls that it may hold.
        forced: Whether it begins with a call.
        allowed: Whether it may hold calls at all.
        parallel: Whether it may hold several.
        stops: Tokens that end an answer.
        reasons: Whether the model reasons, with markers in which no call begins.

    Args:
        grammar: The calls that it may hold.
        max_new_tokens: The most tokens of the answer.
        forced: Whether it begins with a call.
        allowed: Whether it may hold calls at all.
        parallel: Whether it may hold several.
        stops: Tokens that end an answer.
        reasoning: Markers around reasoning, in which no call begins.
        reasoning_open: Whether the prompt opened the reasoning.
        sampled: Whether tokens are sampled.
    """

    def __init__(
        self,
        grammar: CallGrammar,
        max_new_tokens: int,
        *,
        forced: bool,
        allowed: bool,
        parallel: bool,
        stops: frozenset[int],
        reasoning: ReasoningFormat | None,
        reasoning_open: bool,
        sampled: bool,
    ) -> None:
        self.grammar = grammar
        self._max_new_tokens = max_new_tokens
        self.forced, self.allowed, self.parallel, self._sampled = forced, allowed, parallel, sampled
        self._markers = tuple(part.encode() for part in (reasoning.open, reasoning.close)) if reasoning else None
        self.reasons, self._reasoning_open = reasoning is not None, reasoning_open
        self.stops = stops
        ends = sorted(stops) if parallel else []
        self._endings = tuple((*grammar.closing, end) for end in ends) or (grammar.closing,)
        self._end_cost = min(map(len, self._endings))
        self._seen: list[int] | None = None
        self._start = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> CallDecoding:
        """Return an answer that has not begun, for a model that writes two."""
        other = copy.copy(self)
        other._seen = None
        return other

    @property
    def done(self) -> bool:
        """Whether the last call is finished."""
        return self._phase is _Phase.DONE

    @property
    def shortest(self) -> int:
        """The fewest tokens of an answer that begins with a call."""
        return min(branch.cost for branch in self._branches_to_call("first"))

    def advance(self, tokens: list[int]) -> None:
        """Follow what was appended to prompt and answer. Where that is not what was seen before, an answer begins.

        Raises:
            UnsupportedCombination: A token was appended that no call allows.
        """
        if self._seen is None or tokens[: len(self._seen)] != self._seen or len(tokens) <= self._start:
            self._seen, self._start, self._text = list(tokens), len(tokens), b""
            self._phase = _Phase.TEXT
            if self.forced:
                self._choose(self._branches_to_call("first"))
        for token in tokens[len(self._seen) :]:
            self._seen.append(token)
            self._step(token)

    def _step(self, token: int) -> None:
        if self._phase is _Phase.TEXT:
            self._text += self.grammar.words.words[token]
            if self._begins_call():
                self._choose(self._branches_to_call("resumed"))
        elif self._phase is _Phase.LITERAL:
            self._choose([branch.rest for branch in self._branches if branch.tokens[0] == token])
        elif self._phase is _Phase.JSON:
            self._json.advance(list(self._seen or ()))
            if self._json.complete:
                further = self._branches_to_call("again") if self.parallel else []
                self._choose([*further, *(_Branch(tokens, None, len(tokens)) for tokens in self._endings)])

    def _branches_to_call(self, literal: str) -> list[_Branch]:
        found = []
        for opening in self.grammar.openings:
            tokens = getattr(opening, literal)
            if tokens is not None:
                found.append(_Branch(tokens, opening, len(tokens) + opening.shortest + self._end_cost))
        return found

    def _choose(self, branches: list[_Branch]) -> None:
        """Go on with literals, or with what follows one that is finished."""
        if not branches:
            raise UnsupportedCombination(
                "expected a token of a call, got another, which something else than the tools chose",
                hint="Leave other logits processors and stopping criteria away.",
            )
        self._phase, self._branches = _Phase.LITERAL, branches
        finished = next((branch for branch in branches if not branch.tokens), None)
        if finished is None:
            return
        if finished.opening is None:
            self._phase = _Phase.DONE
            return
        self._phase, self._json = _Phase.JSON, copy.deepcopy(finished.opening.json)
        self._json.advance(list(self._seen or ()))
        self._continuing = ContinuingText(self._json, self._left - self._end_cost, sampled=self._sampled)

    @property
    def _left(self) -> int:
        """Tokens that may still be written."""
        return self._max_new_tokens - (len(self._seen or ()) - self._start)

    def _begins_call(self) -> bool:
        trigger = self.grammar.trigger
        found = self._text == trigger if self.grammar.anchored else self._text.endswith(trigger)
        return found and self.allowed and not self._in_reasoning()

    def _in_reasoning(self) -> bool:
        if not self._markers:
            return False
        opening, closing = self._markers
        return (self._reasoning_open or self._text.lstrip().startswith(opening)) and closing not in self._text

    def _before_trigger(self) -> bytes | None:
        """Return how much of the trigger the text ends with; None where it cannot begin."""
        trigger = self.grammar.trigger
        if self.grammar.anchored:
            return self._text if trigger.startswith(self._text) else None
        lengths = range(min(len(trigger) - 1, len(self._text)), 0, -1)
        return next((trigger[:n] for n in lengths if self._text.endswith(trigger[:n])), b"")

    def constrain(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[1, vocabulary]`, minus infinity for tokens that may not come next."""
        if self._phase is _Phase.JSON:
            return self._continuing(input_ids, scores)
        if self._phase is _Phase.LITERAL:
            fitting = {branch.tokens[0] for branch in self._branches if branch.cost <= self._left}
            only = torch.full_like(scores, -torch.inf)
            for token in fitting:
                only[0, token] = scores[0, token]
            if only.max() == -torch.inf:  # other processors ban every one of them
                only[0, sorted(fitting)] = 0.0
            return only
        before = None if self._in_reasoning() else self._before_trigger()
        if self._phase is _Phase.DONE or before is None:
            return scores
        completing, beyond = self.grammar.at_trigger(before)
        fewest = 1 + min(branch.cost for branch in self._branches_to_call("resumed"))
        banned = beyond if self.allowed and fewest <= self._left else [*beyond, *completing]
        masked = scores.clone()
        masked[0, banned] = -torch.inf
        return masked


class CallProcessor(LogitsProcessor):
    """Holds an answer to its tools.

    Attributes:
        decoding: The answer.
    """

    def __init__(self, decoding: CallDecoding) -> None:
        self.decoding = decoding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[1, vocabulary]`, minus infinity for tokens that may not come next."""
        if len(input_ids) != 1:
            raise UnsupportedCombination(f"expected one answer with tools, got a batch of {len(input_ids)}")
        self.decoding.advance(input_ids[0].tolist())
        return self.decoding.constrain(input_ids, scores)


class CallComplete(StoppingCriteria):
    """Ends the generation with the last call."""

    def __init__(self, decoding: CallDecoding) -> None:
        self._decoding = decoding

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """Say of the one answer whether it is finished: bool `[1]`."""
        self._decoding.advance(input_ids[0].tolist())
        return torch.full((input_ids.shape[0],), self._decoding.done, dtype=torch.bool, device=input_ids.device)
