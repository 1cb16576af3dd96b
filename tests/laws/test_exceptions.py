"""Where a guarantee ends: each exception that `guarantees.toml` lists, so that none outlives its reason."""

from __future__ import annotations

import random

import pytest

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.testing import random_prompt
from invariant_rag.testing.contracts import recomputed_logits
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding


def test_falcon_with_alibi_decodes_otherwise_than_it_is_prefilled_beyond_256_tokens() -> None:
    model = tiny_model("falcon (ALiBi)", num_hidden_layers=2, eos_token_id=None, max_position_embeddings=1024)

    def difference(method: str, length: int) -> float:
        """Of the log-probabilities of eight tokens, decoded and recomputed from scratch, in units of their rounding."""
        lm, prompt = InvariantModel(model, method=method), random_prompt(random.Random(0), (length,) * 3)
        decoded = lm.generate(prompt, max_new_tokens=8)
        again = recomputed_logits(lm, prompt, decoded.token_ids[:-1]).log_softmax(-1)
        pairs = zip(again, decoded.token_ids, decoded.logprobs, strict=True)
        found = max(abs(float(row[token]) - logprob) for row, token, logprob in pairs)
        return found / rounding(lm.generate, prompt, max_new_tokens=8)

    assert max(difference("rotor", 40), difference("sequential", 110)) <= 1
    assert difference("rotor", 110) > 10


@pytest.mark.parametrize("backend", ["reference", "sdpa", "varlen"])
def test_with_deterministic_a_warm_cache_changes_no_bit(backend: str) -> None:
    model = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
    lm = InvariantModel(model, backend=backend, deterministic=True, cache=KeyValueCache())
    for seed in range(1 if backend == "reference" else 5):
        source = random.Random(seed)
        prompt = random_prompt(source, [source.randrange(1, 40) for _ in range(4)])
        cold, warm = (lm.generate(prompt, max_new_tokens=6) for _ in range(2))
        assert warm.usage.cached_tokens
        assert warm.logprobs == cold.logprobs
        other = Prompt(prompt.prefix, [*prompt.segments, [5, 6, 7]], prompt.suffix)
        assert lm.generate(other, max_new_tokens=4).logprobs == (
            lm.with_cache(KeyValueCache()).generate(other, max_new_tokens=4).logprobs
        )
