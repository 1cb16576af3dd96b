"""Parallel context-of-experts decoding: one expert per segment, the best-supported token wins (arXiv 2601.08670)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from transformers import LogitsProcessor

from invariant_rag.checks import check_kind, check_real
from invariant_rag.ensembles.base import (
    Candidates,
    Cost,
    Ensemble,
    EnsembleGeneration,
    Scores,
    count_cost,
    require_unrouted,
)
from invariant_rag.ensembles.permutations import averaging_options, in_slots
from invariant_rag.errors import InvalidChoice, InvalidPrompt, InvalidSegment, UnsupportedCombination
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Usage
from invariant_rag.segments import Prompt, Segment

Beta: TypeAlias = float | Literal["dynamic"]

_LEAST = 1e-9  # the least probability, as in the published code


class ContextExperts(Ensemble[EnsembleGeneration]):
    """Decode with one expert per segment, contrasted with the prompt without segments (PCED).

    With logits s_k of the prompt with segment k alone, s_0 of the prompt without segments, and relevance r_k, which is
    `Segment.score`, the next token is the v with the largest max_k of

        (1 + beta) s_k(v) - beta s_0(v) + gamma log r_k

    and every expert continues with it. The maximum over a set has no order, and the rows of the batch are sorted by
    content: the result is bit-for-bit the same for every input order, whatever the ordering of the model. An expert
    has one segment, so the model's method makes no difference, and the segments need not fit the context window
    together. Decoding is greedy.

    The paper fuses a retriever's score a and a reranker's score b, both mapped to (0, 1), into r = 2ab / (a + b). Its
    beta is dynamic: computed for the first token, and then constant; see `resolve_beta`.

    Args:
        lm: The model.
        beta: Strength of the contrast with the prompt without segments: `dynamic`, or a number; 0: no contrast.
        gamma: Weight of the relevance; 2.5 as published. 0: segments need no score.

    Raises:
        InvalidChoice: `beta` or `gamma` is negative or not finite, or another word than `dynamic`.
        UnsupportedCombination: The model is a `RoutedModel`; later, the prompt has several sets, or sampling, beams or
            a streamer were asked for.
        InvalidSegment: In `generate` and `score`: a segment has no score in (0, 1], and `gamma` is not 0.
    """

    def __init__(self, lm: InvariantModel, *, beta: Beta = "dynamic", gamma: float = 2.5) -> None:
        super().__init__(require_unrouted(lm))
        self.gamma = check_real("gamma", gamma)
        self.beta: Beta = (
            "dynamic" if isinstance(beta, str) and beta == "dynamic" else check_real('"dynamic", or beta', beta)
        )
        if self.gamma < 0 or (self.beta != "dynamic" and self.beta < 0):
            raise InvalidChoice(
                f'expected a beta from 0 on or "dynamic", and a gamma from 0 on, got {beta} and {gamma}'
            )

    @property
    def invariant(self) -> bool:
        """Whether permuting the input segments changes no bit of the output: always."""
        return True

    def _generate_one(self, prompt: Prompt, max_new_tokens: int, options: dict[str, Any]) -> EnsembleGeneration:
        experts = self._experts(prompt, max_new_tokens)
        fusion = ExpertFusion(experts.priors, self.beta)
        options = averaging_options(options, fusion)
        rows = self._one_batch_lm.generate(experts.prompts, max_new_tokens=max_new_tokens, **options)
        prompt_tokens, cached = (
            sum(getattr(row.usage, name) for row in rows) for name in ("prompt_tokens", "cached_tokens")
        )
        return EnsembleGeneration.extend(
            rows[0],
            logprobs=fusion.logprobs(rows[0].token_ids),
            usage=Usage(prompt_tokens, len(rows[0].token_ids), cached),
            order=tuple(experts.order),
            dropped=experts.dropped,
            trimmed=tuple(index for index, row in zip(experts.order, rows[1:], strict=True) if row.trimmed),
            sets=(len(experts.order),) if experts.order else (),
        )

    def score(self, prompt: Prompt, candidates: Candidates) -> Scores:
        """Return the log-probability of each candidate under the softmax of the fused scores, and the cost."""
        lm, options = self._given_order_lm, self.lm.candidate_ids(candidates)
        if not options:
            return Scores([], Cost())
        longest = max(map(len, options))
        experts = self._experts(prompt, longest)
        with count_cost(self.model) as counter, lm.prefiller.exclusive():
            prepared = [lm.prepare_to_generate(each, longest) for each in experts.prompts]
            rows = (lm.prefiller.continuation_logits(each, options).float() for each in prepared)
            amateur = next(rows)
            contrasted = ((row, resolve_beta(self.beta, amateur[0, 0], row[0, 0])) for row in rows)
            fused = fuse_experts(amateur, contrasted, experts.priors)
        logprobs = torch.log_softmax(fused, dim=-1)
        chosen = (logprobs[row, torch.arange(len(ids)), torch.tensor(ids)] for row, ids in enumerate(options))
        return Scores((float(each.double().sum()) for each in chosen), counter.cost)

    def _experts(self, prompt: Prompt, new_tokens: int) -> _Experts:
        check_kind("prompt", prompt, Prompt, error=InvalidPrompt)
        if len(prompt.sets) > 1:
            raise UnsupportedCombination(
                f"expected a prompt with one set of segments, got {len(prompt.sets)}: an expert attends to one segment",
                hint="Put the segments into one set, or use PermutationAverage.",
            )
        lm, segments = self._given_order_lm, prompt.segments
        ranked = sorted(range(len(segments)), key=lambda index: segments[index].canonical_key)
        alone = {index: prompt.with_sets([in_slots([segments[index]], prompt.sets[0])]) for index in ranked}
        fit = [index for index in ranked if not lm.prepare(alone[index], new_tokens=new_tokens).dropped]
        return _Experts(
            prompts=[prompt.with_sets(in_slots([], each) for each in prompt.sets), *(alone[index] for index in fit)],
            order=fit,
            priors=[self._prior(segments[index]) for index in fit],
            dropped=tuple(index for index in range(len(segments)) if index not in fit),
        )

    def _prior(self, segment: Segment) -> float:
        """Return gamma log r of a segment."""
        if not self.gamma:
            return 0.0
        if segment.score is None or not 0 < segment.score <= 1:
            raise InvalidSegment(
                f"expected a score above 0 and at most 1 on every segment, got {segment.score!r}",
                hint="Map the retriever's scores to (0, 1], or set gamma=0 to ignore relevance.",
            )
        return self.gamma * math.log(segment.score)


@dataclass(frozen=True)
class _Experts:
    """The prompts of one decoding: without segments, then with each segment alone, in `order`."""

    prompts: list[Prompt]
    order: list[int]  # indices into the input prompt
    priors: list[float]  # gamma log r of each expert
    dropped: tuple[int, ...]  # segments that do not fit the context window, even alone


def resolve_beta(beta: Beta, amateur: torch.Tensor, expert: torch.Tensor) -> float | torch.Tensor:
    """Return the strength of the contrast of an expert, given its logits `[vocabulary]` and those without segments.

    A dynamic one, `[vocabulary]`, is that of the first author's code (`get_jsd` in giulio98/langchain-pced), the term
    of token v in a Jensen-Shannon divergence, which is not summed over v: with p_0 and p_k the probabilities of the
    first token without segments and with k alone,

        beta_k(v) = (p_0(v) log(p_0(v) / m(v)) + p_k(v) log(p_k(v) / m(v))) / 2,  m = (p_0 + p_k) / 2
    """
    if beta != "dynamic":
        return beta
    p, q = (torch.softmax(each, dim=-1).clamp_min(_LEAST) for each in (amateur, expert))
    middle = (p + q) / 2
    return ((p * (p / middle).log() + q * (q / middle).log()) / 2).clamp_min(0)


def fuse_experts(
    amateur: torch.Tensor, experts: Iterable[tuple[torch.Tensor, float | torch.Tensor]], priors: Sequence[float]
) -> torch.Tensor:
    """Return the largest score `[..., vocabulary]` of every token over the experts; without any, those of the amateur.

    `experts` are the logits of each, and the strength of its contrast; `priors` are added to the logits.
    """
    fused: torch.Tensor | None = None
    for (logits, beta), prior in zip(experts, priors, strict=True):
        scores = (1 + beta) * logits - beta * amateur + prior
        # A token that is forbidden to one row has a logit of minus infinity there, of which no difference makes sense.
        scores = scores.masked_fill(torch.isneginf(logits) | torch.isneginf(amateur), float("-inf"))
        fused = scores if fused is None else torch.maximum(fused, scores)
    return amateur if fused is None else fused


class ExpertFusion(LogitsProcessor):
    """A logits processor that gives every row the fused scores. The first row is the prompt without segments."""

    def __init__(self, priors: Sequence[float], beta: Beta) -> None:
        self._priors, self._beta = priors, beta
        self._contrasts: list[float | torch.Tensor] = []
        self._last: torch.Tensor | None = None
        self._logprobs: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Return scores `[B, vocabulary]` with identical rows."""
        self._record(int(input_ids[0, -1]))
        if not self._contrasts:  # the first token
            self._contrasts = [resolve_beta(self._beta, scores[0], each) for each in scores[1:]]
        fused = fuse_experts(scores[0], zip(scores[1:], self._contrasts, strict=True), self._priors)
        self._last = torch.log_softmax(fused, dim=-1)
        return fused.expand(scores.shape[0], -1).clone()

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Return the log-probability of each generated token under the fused scores, after generation."""
        if tokens:
            self._record(tokens[-1])
        return tuple(self._logprobs[: len(tokens)])

    def _record(self, token: int) -> None:
        """Keep the log-probability of the token of the last step, which is known in the next."""
        if self._last is not None:
            self._logprobs.append(float(self._last[token]))
            self._last = None
