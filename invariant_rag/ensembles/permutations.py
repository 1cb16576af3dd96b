"""Prompts with permuted segments, and ensembles over them: averaged log-probabilities, or a vote over answers."""

from __future__ import annotations

import math
import random
from abc import ABC
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Literal, NoReturn, TypeAlias, get_args

import torch
from transformers import LogitsProcessor

from invariant_rag.checks import check_function, check_name, check_number
from invariant_rag.ensembles.base import (
    Candidates,
    Ensemble,
    EnsembleGeneration,
    G,
    Scores,
    check_positive,
    count_cost,
    refuse_options,
    require_unrouted,
)
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.prepare import PreparedPrompt
from invariant_rag.segments import Prompt, Segment, SegmentSet

Permutations: TypeAlias = Literal["rotations", "random"]
_GREEDY: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1}
_REFUSED = (*_GREEDY, "generation_config", "streamer")
"""Keyword arguments of `generate` that return several sequences for one prompt, or stream single rows."""


Orders = Sequence[Sequence[int]]
"""For each set, indices of its segments in physical order."""


@dataclass(frozen=True)
class PermutedPrompt:
    """A prompt whose segments were permuted: `source`, which its model prepares as `base`.

    `orders` has for each set its segments, farthest from the suffix first: indices into the segments of the source.
    Segments that do not fit the context window are missing.
    """

    source: Prompt
    orders: Orders
    base: PreparedPrompt

    @cached_property
    def prompt(self) -> Prompt:
        """The permuted prompt, for a model with the ordering `given`."""
        segments, sets = self.source.segments, self.source.sets
        orders = zip(self.orders, sets, strict=True)
        return self.source.with_sets(in_slots([segments[index] for index in order], each) for order, each in orders)

    @property
    def order(self) -> list[int]:
        """Index in the input prompt of each segment of the permuted prompt."""
        return [index for order in self.orders for index in order]

    def with_orders(self, orders: Orders) -> PermutedPrompt:
        """Return the same segments in other orders."""
        return PermutedPrompt(self.source, orders, self.base)

    def to_input_indices(self, generation: Generation) -> Generation:
        """Return a generation for the permuted prompt with segment indices of the input prompt."""
        order = tuple(self.order[index] for index in generation.order)
        return replace(generation, order=order, dropped=self.base.dropped, trimmed=self.base.trimmed)


def in_canonical_order(lm: InvariantModel, prompt: Prompt, new_tokens: int) -> PermutedPrompt:
    """Sort the segments by the model's ordering, without those that do not fit beside `new_tokens`.

    With an ordering by content, the result is the same for every input order.
    """
    base = lm.prepare(prompt, new_tokens=new_tokens)
    stops = list(accumulate(map(len, prompt.sets), initial=0))
    orders = [[i for i in base.order if start <= i < stop] for start, stop in pairwise(stops)]
    return PermutedPrompt(prompt, orders, base)


def in_slots(segments: Sequence[Segment], template: SegmentSet) -> SegmentSet:
    """Return segments as a set, in the first slots of a template set."""
    return SegmentSet(segments, slots=None if template.slots is None else template.slots[: len(segments)])


class _PermutationEnsemble(Ensemble[G], ABC):
    """An ensemble over permutations of the segments.

    Args:
        lm: The model. Its ordering gives the base order to permute: with an ordering by content, the result is
            bit-for-bit the same for every input order.
        count: Number of permutations. None: as many as the largest set has segments.
        permutations: `rotations`: evenly spaced rotations of the base order, at most as many as there are segments;
            over all of them, each segment takes each slot once. `random`: random permutations of the base order.
        seed: Seed of random permutations.

    Raises:
        InvalidChoice: `count` is below 1.
        UnknownName: Unknown kind of permutations.
    """

    def __init__(
        self, lm: InvariantModel, count: int | None = None, *, permutations: Permutations = "rotations", seed: int = 0
    ) -> None:
        super().__init__(lm)
        check_name("permutations", permutations, get_args(Permutations))
        self.count = check_positive("count", count)
        self.permutations = permutations
        self.seed = check_number("seed", seed)

    def permute(self, prompt: Prompt, new_tokens: int = 0) -> list[PermutedPrompt]:
        """Return the permutations of a prompt, with room for `new_tokens` in the context window."""
        base = in_canonical_order(self.lm, prompt, new_tokens)
        largest = max(map(len, base.orders), default=1) or 1
        if self.permutations == "random":
            source = random.Random(self.seed)
            return [
                base.with_orders([source.sample(order, len(order)) for order in base.orders])
                for _ in range(self.count or largest)
            ]
        count = min(self.count or largest, largest)
        starts = [[number * len(order) // count for order in base.orders] for number in range(count)]
        return [
            base.with_orders([[*order[by:], *order[:by]] for order, by in zip(base.orders, each, strict=True)])
            for each in starts
        ]


class PermutationAverage(_PermutationEnsemble[EnsembleGeneration]):
    """Average next-token log-probabilities over permutations at every decoding step.

    The permutations are rows of one batch, and all rows generate the same tokens. Averaged over all rotations, the
    result depends on which segments are neighbours, but not on the slot of a segment. In a generation, `logprobs` are
    the means, and `order` is the base order.

    Raises:
        UnsupportedCombination: The model is a `RoutedModel`; or, in `generate`, sampling, beams or a streamer.
    """

    def __init__(
        self, lm: InvariantModel, count: int | None = None, *, permutations: Permutations = "rotations", seed: int = 0
    ) -> None:
        super().__init__(require_unrouted(lm), count, permutations=permutations, seed=seed)

    def _generate_one(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> EnsembleGeneration:
        options = averaging_options(options)
        permuted = self.permute(prompt, max_new_tokens)
        prompts = [each.prompt for each in permuted]
        rows = self._one_batch_lm.generate(prompts, max_new_tokens=max_new_tokens, **options)
        first = permuted[0].to_input_indices(rows[0])
        return EnsembleGeneration.extend(replace(first, logprobs=mean_logprobs(rows), order=permuted[0].base.order))

    def score(self, prompt: Prompt, candidates: Candidates) -> Scores:
        """Return the mean log-probability of each candidate over the permutations, and the cost."""
        with count_cost(self.model) as counter:
            permuted = self.permute(prompt, self._max_candidate_tokens(candidates))
            scores = [self._given_order_lm.score(each.prompt, candidates) for each in permuted]
        return Scores((math.fsum(column) / len(scores) for column in zip(*scores, strict=True)), counter.cost)


def averaging_options(options: dict[str, Any], combine: LogitsProcessor | None = None) -> dict[str, Any]:
    """Return keyword arguments of `generate` with which all rows of a batch greedily decode one text.

    `combine` gives every row the same scores; None: their mean. An `UnsupportedCombination` refuses sampling, beams and
    streamers.
    """
    refuse_options(options, *_REFUSED)
    allowed = {name: value for name, value in options.items() if name not in _REFUSED}
    return {
        **allowed,
        **_GREEDY,
        "logits_processor": [combine or MeanLogitsProcessor(), *(allowed.get("logits_processor") or ())],
    }


class MeanLogitsProcessor(LogitsProcessor):
    """A logits processor that replaces every row's scores by the mean log-probabilities over the rows."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]` with identical rows."""
        return torch.log_softmax(scores.float(), dim=-1).mean(dim=0, keepdim=True).repeat(scores.shape[0], 1)


def mean_logprobs(rows: list[Generation]) -> tuple[float, ...]:
    """Return the mean log-probability of each token, over rows that generated the same tokens."""
    return tuple(math.fsum(column) / len(rows) for column in zip(*(row.logprobs for row in rows), strict=True))


@dataclass(frozen=True)
class VotedGeneration(EnsembleGeneration):
    """The answer that most permutations gave. `votes`: each answer with its votes, most first; ties sorted by text."""

    votes: tuple[tuple[str, int], ...] = ()

    @property
    def agreement(self) -> float:
        """Share of the votes for the winning answer."""
        return self.votes[0][1] / sum(count for _, count in self.votes)


class SelfConsistency(_PermutationEnsemble[VotedGeneration]):
    """Take a majority vote over the answers to several permutations (permutation self-consistency, arXiv 2310.07712).

    A tie is broken by content: the answer whose text sorts first wins. `VotedGeneration.agreement` is the share of
    votes; a low one means that the model is unsure. All permutations are decoded in one batch; with
    `num_return_sequences`, every returned sequence votes. Sampling is reproducible with the keyword `seed` of
    `generate`.

    Args:
        lm: As for `PermutationAverage`; the next three also.
        count: Number of permutations.
        permutations: `rotations` or `random`.
        seed: Seed of random permutations.
        answer: Extracts the answer to vote for from a generated text. Without a tokenizer, the token ids are compared
            instead.
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
        self._extract_answer = check_function("answer", answer)

    def _generate_one(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> VotedGeneration:
        permuted = self.permute(prompt, max_new_tokens)
        prompts = [each.prompt for each in permuted]
        rows = self._given_order_lm.generate(prompts, max_new_tokens=max_new_tokens, **options)
        copies = len(rows) // len(permuted)
        as_ids = self.tokenizer is None
        answers = [" ".join(map(str, row.token_ids)) if as_ids else self._extract_answer(row.text) for row in rows]
        votes = sorted(Counter(answers).items(), key=lambda item: (-item[1], item[0]))
        winners = [index for index, answer in enumerate(answers) if answer == votes[0][0]]
        best = min(winners, key=lambda index: (rows[index].text, rows[index].token_ids))
        generation = permuted[best // copies].to_input_indices(rows[best])
        return VotedGeneration.extend(generation, votes=tuple(votes))

    def score(self, prompt: Prompt, candidates: Candidates) -> NoReturn:
        """Raise `UnsupportedCombination`: votes are for generated answers, and have no log-probabilities."""
        raise UnsupportedCombination(
            "expected an ensemble that averages log-probabilities, got SelfConsistency, which counts votes",
            hint="Use PermutationAverage, which scores candidates over the same permutations; or `votes` of generate.",
        )
