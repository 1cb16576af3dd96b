"""Ask a model the cases of a benchmark, and make records of what it answers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import UnsupportedCombination
from invariant_rag.orderings.relevance import Relevance
from invariant_rag.prompts import tokenize_prompt

from invariant_rag_benchmarks import resolve_benchmark
from invariant_rag_benchmarks.base import Case, Record
from invariant_rag_benchmarks.config import BenchmarkConfig

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.segments import Prompt

_ROUTING_FIELDS = ("branch", "plain_confidence", "invariant_confidence")
"""Attributes of a routed result that go into its record."""


class Answerer:
    """Answers batches of cases with a model, as of `BenchmarkConfig.configure`."""

    def __init__(self, config: BenchmarkConfig, lm: InvariantModel) -> None:
        self._benchmark = resolve_benchmark(config.benchmark)
        self._lm = lm
        self._source = config.answering(lm)
        self._max_new_tokens = config.max_new_tokens or self._benchmark.max_new_tokens

    def __call__(self, batch: Sequence[Case]) -> list[Record]:
        """Generate or choose the outputs of a batch of cases, and return their records.

        Raises:
            UnsupportedCombination: The cases ask for texts, and the ensemble only scores candidates.
        """
        prompts = [case.prompt(self._lm) for case in batch]
        if all(case.candidates for case in batch):
            return [self._choose(case, prompt) for case, prompt in zip(batch, prompts, strict=True)]
        if not hasattr(self._source, "generate"):
            raise UnsupportedCombination(
                f"expected a benchmark with candidates for {type(self._source).__name__}, which generates no text; "
                f"got {self._benchmark.name!r}",
                hint="Some benchmarks have a setting with candidates: see `invariant-rag bench list`.",
            )
        generations: list[Any] = []
        for limit, same in groupby(zip(batch, prompts, strict=True), key=lambda each: self._limit(each[0])):
            generations += self._source.generate([prompt for _, prompt in same], max_new_tokens=limit)
        return [
            {**self._record(case, prompt, each.text, each, each), "perplexity": perplexity(each.logprobs)}
            for case, prompt, each in zip(batch, prompts, generations, strict=True)
        ]

    def _limit(self, case: Case) -> int:
        return min(case.max_new_tokens or self._max_new_tokens, self._max_new_tokens)

    def _choose(self, case: Case, prompt: Prompt) -> Record:
        logprobs = self._source.score(prompt, case.candidates)
        prepared = self._lm.prepare(prompt, new_tokens=1)
        record = self._record(case, prompt, _likeliest(case, logprobs), logprobs, prepared)
        return {**record, "logprobs": list(logprobs)}

    def _record(self, case: Case, prompt: Prompt, output: str, result: Any, prepared: Any) -> Record:
        """Score an output. `result` is a generation or scores, `prepared` says what was dropped and trimmed."""
        scored = self._benchmark.score(case, output)
        record = {
            "id": case.id,
            "question": case.question,
            "variant": case.variant,
            "group": case.group,
            "prompt": {
                "system": case.system,
                "prefix": case.prefix,
                "segments": list(case.segments),
                "suffix": case.suffix,
            },
            "gold": list(case.gold),
            "output": output,
            "answer": scored.answer,
            "scores": dict(scored.scores),
            "dropped": len(prepared.dropped),
            "trimmed": len(prepared.trimmed),
            **{name: getattr(result, name) for name in _ROUTING_FIELDS if hasattr(result, name)},
        }
        if self._counts_collisions:
            record["collisions"] = collisions(self._lm, prompt)
        if (rejected := getattr(result, "rejected", None)) is not None:
            text = _likeliest(case, rejected) if isinstance(rejected, list) else rejected.text
            other = self._benchmark.score(case, text)
            record["rejected"] = {"output": text, "answer": other.answer, "scores": dict(other.scores)}
        return record

    @property
    def _counts_collisions(self) -> bool:
        """Whether one ordering places the segments (PINE's places differ by token), and is cheap to ask again."""
        ordering = self._lm.ordering
        return ordering.invariant and self._lm.method.stock_decoding and not isinstance(ordering, Relevance)


def perplexity(logprobs: Sequence[float]) -> float:
    """Return the perplexity of generated tokens, given their log-probabilities; 1 for none."""
    return math.exp(-math.fsum(logprobs) / len(logprobs)) if logprobs else 1.0


def collisions(lm: InvariantModel, prompt: Prompt) -> float:
    """Return the share of a prompt's segments beyond the distinct sort keys (RoToR, Table 4c): 0 if all keys differ.

    Segments with equal keys are placed by their content, so that only exact duplicates are interchanged.
    """
    sets = [lm.ordering.sort_keys(each, prompt.query or "") for each in tokenize_prompt(prompt, lm.tokenizer).sets]
    count = sum(map(len, sets))
    return 1 - sum(len(set(keys)) for keys in sets) / count if count else 0.0


def _likeliest(case: Case, logprobs: Sequence[float]) -> str:
    return case.candidates[logprobs.index(max(logprobs))]
