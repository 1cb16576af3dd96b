"""Ensembles over permutations: average what the model thinks, or let its answers vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias, get_args, overload

import torch
from transformers import LogitsProcessor

from invariant_rag.ensembles.base import Ensemble, at_least_one, longest_of, refuse, unrouted, with_cost
from invariant_rag.ensembles.cost import EnsembleGeneration, Scores, counted
from invariant_rag.ensembles.listing import Listing, canonical_listing, random_permutations, rotations
from invariant_rag.errors import UnknownName
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.options import resolve_max_new_tokens
from invariant_rag.generation.outputs import Generation
from invariant_rag.segments import Prompt

Permutations: TypeAlias = Literal["rotations", "random"]

_GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
_REFUSED = (*_GREEDY, "generation_config", "streamer")
"""Keywords of `generate` that make several texts of one prompt, or hand one out while it grows."""


class _Permuted(Ensemble):
    """An ensemble over permutations of the segments.

    Args:
        lm: The model. Its method reads every permutation, and its ordering says which order is permuted: with one that
            reads contents only, the result is the same, bit for bit, for every order of the segments.
        count: How many permutations. None: as many as the largest set has segments.
        permutations: `rotations` cuts the order into a ring at evenly spaced places, so that with as many as there are
            segments each stands in every place once; more would repeat them, so there are never more. `random`
            permutations depend on the ordering and the seed alone.
        seed: Seed of random permutations.

    Raises:
        InvalidChoice: `count` is below 1.
        UnknownName: No such kind of permutations.
    """

    def __init__(
        self, lm: InvariantModel, count: int | None = None, *, permutations: Permutations = "rotations", seed: int = 0
    ) -> None:
        super().__init__(lm)
        if permutations not in get_args(Permutations):
            raise UnknownName("permutations", permutations, get_args(Permutations))
        self.count = at_least_one("count", count)
        self.permutations = permutations
        self.seed = seed

    def permuted(self, prompt: Prompt, new_tokens: int = 0) -> list[Listing]:
        """Return the prompt in every order in which it is read."""
        listing = canonical_listing(self.lm, prompt, new_tokens)
        if self.permutations == "rotations":
            return rotations(listing, self.count)
        return random_permutations(listing, self.count, self.seed)


class PermutationAverage(_Permuted):
    """Decode from the mean of log-probabilities over permutations, at every step.

    The permutations are rows of one batch that all write the same text. Over all rotations, a segment's place has no
    say in the mean, beyond which segments are its neighbours.

    Raises:
        UnsupportedCombination: The model is a routed one.
    """

    def __init__(
        self, lm: InvariantModel, count: int | None = None, *, permutations: Permutations = "rotations", seed: int = 0
    ) -> None:
        super().__init__(unrouted(lm), count, permutations=permutations, seed=seed)

    @overload
    def generate(self, prompt: Prompt, *, max_new_tokens: int | None = None, **kwargs: Any) -> EnsembleGeneration: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, **kwargs: Any
    ) -> list[EnsembleGeneration]: ...

    def generate(
        self, prompt: Prompt | Sequence[Prompt], *, max_new_tokens: int | None = None, **kwargs: Any
    ) -> EnsembleGeneration | list[EnsembleGeneration]:
        """Generate greedily: at every step, the token with the largest mean log-probability.

        Args:
            prompt: One prompt, or several, one after the other.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            **kwargs: As for `InvariantModel.generate`, but for what makes several texts of one prompt.

        Returns:
            Generations whose `logprobs` are the means, and whose `order` is the one that was permuted.

        Raises:
            UnsupportedCombination: Sampling, beams or a streamer were asked for.
        """
        options = one_text(kwargs)
        if not isinstance(prompt, Prompt):
            return [self.generate(each, max_new_tokens=max_new_tokens, **kwargs) for each in prompt]
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        with counted(self.model) as counter:
            listings = self.permuted(prompt, wanted)
            prompts = [each.prompt for each in listings]
            rows = self._reader.generate(prompts, max_new_tokens=wanted, **options)
        first = listings[0].translated(rows[0])
        logprobs = tuple(math.fsum(column) / len(rows) for column in zip(*(row.logprobs for row in rows), strict=True))
        return with_cost(replace(first, logprobs=logprobs, order=listings[0].base.order), counter.cost)

    def score(self, prompt: Prompt, candidates: Sequence[str | Sequence[int]]) -> Scores:
        """Return the mean log-probability of each candidate over the permutations, and what it cost."""
        with counted(self.model) as counter:
            listings = self.permuted(prompt, longest_of(candidates, self.tokenizer))
            scores = [self._reader.score(each.prompt, candidates) for each in listings]
        return Scores((math.fsum(column) / len(scores) for column in zip(*scores, strict=True)), counter.cost)


def one_text(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return keywords of `generate` with which all rows of a batch write one text: the one of their mean.

    Raises:
        UnsupportedCombination: Sampling, beams or a streamer were asked for.
    """
    refuse(kwargs, *_REFUSED)
    kept = {name: value for name, value in kwargs.items() if name not in _REFUSED}
    return {**kept, **_GREEDY, "logits_processor": [Mean(), *(kept.get("logits_processor") or ())]}


class Mean(LogitsProcessor):
    """Gives every row of a batch the mean of the rows' log-probabilities."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]`, all rows the same."""
        return torch.log_softmax(scores.float(), dim=-1).mean(dim=0, keepdim=True).repeat(scores.shape[0], 1)


@dataclass(frozen=True)
class VotedGeneration(EnsembleGeneration):
    """The answer that most permutations gave.

    Attributes:
        votes: Every answer with its number of votes, most first; equal ones in the order of their texts.
    """

    votes: tuple[tuple[str, int], ...] = ()

    @property
    def agreement(self) -> float:
        """Share of the votes that the answer got."""
        return self.votes[0][1] / sum(count for _, count in self.votes)


class SelfConsistency(_Permuted):
    """Let the answers to several permutations vote (permutation self-consistency, arXiv 2310.07712).

    Of answers with the same number of votes, the one whose text comes first in the alphabet is taken: a tie is decided
    by content. A tie says that the model does not know; see `VotedGeneration.agreement`.

    Args:
        lm: As for `PermutationAverage`, and so are the next three.
        count: How many permutations.
        permutations: `rotations` or `random`.
        seed: Seed of random permutations.
        answer: What of a text has a vote: texts with the same answer vote together. Without a tokenizer, the token ids
            vote.
    """

    def __init__(
        self,
        lm: InvariantModel,
        count: int | None = None,
        *,
        permutations: Permutations = "rotations",
        seed: int = 0,
        answer: Callable[[str], str] = str.strip,
    ) -> None:
        super().__init__(lm, count, permutations=permutations, seed=seed)
        self._answer = answer

    @overload
    def generate(
        self, prompt: Prompt, *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> VotedGeneration: ...

    @overload
    def generate(
        self, prompt: Sequence[Prompt], *, max_new_tokens: int | None = None, seed: int | None = None, **kwargs: Any
    ) -> list[VotedGeneration]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        *,
        max_new_tokens: int | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ) -> VotedGeneration | list[VotedGeneration]:
        """Generate from every permutation, in one batch, and return the generation that won.

        Args:
            prompt: One prompt, or several, one after the other.
            max_new_tokens: The most tokens to generate. None: as for `InvariantModel.generate`.
            seed: Seed for sampling. Sampling without one depends on the global random state.
            **kwargs: As for `InvariantModel.generate`. With `num_return_sequences`, every sequence has a vote.
        """
        if not isinstance(prompt, Prompt):
            return [self.generate(each, max_new_tokens=max_new_tokens, seed=seed, **kwargs) for each in prompt]
        wanted = resolve_max_new_tokens(max_new_tokens, kwargs)
        with counted(self.model) as counter:
            listings = self.permuted(prompt, wanted)
            prompts = [each.prompt for each in listings]
            rows = self._reader.generate(prompts, max_new_tokens=wanted, seed=seed, **kwargs)
        copies = len(rows) // len(listings)
        texts = [self._vote(row) for row in rows]
        votes = sorted(Counter(texts).items(), key=lambda item: (-item[1], item[0]))
        winners = [index for index, text in enumerate(texts) if text == votes[0][0]]
        best = min(winners, key=lambda index: (rows[index].text, rows[index].token_ids))
        generation = listings[best // copies].translated(rows[best])
        values = {each.name: getattr(generation, each.name) for each in fields(Generation)}
        return VotedGeneration(**values, cost=counter.cost, votes=tuple(votes))

    def _vote(self, row: Generation) -> str:
        return " ".join(map(str, row.token_ids)) if self.tokenizer is None else self._answer(row.text)
