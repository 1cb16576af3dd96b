"""Where a guarantee ends: each exception that `guarantees.toml` lists, so that none outlives its reason."""

from __future__ import annotations

import random

import pytest
import torch

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.attention import available_backends
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model


def test_falcon_with_alibi_itself_decodes_otherwise_than_it_reads_beyond_256_tokens() -> None:
    def difference(length: int) -> float:
        model = tiny_model("falcon (ALiBi)", num_hidden_layers=2, eos_token_id=None)
        ids = torch.randint(3, 90, (1, length), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            whole = model(ids).logits[0, -1]
            cache = model(ids[:, :-1], use_cache=True).past_key_values
            step = model(ids[:, -1:], attention_mask=torch.ones_like(ids), past_key_values=cache).logits[0, -1]
        return float((whole.log_softmax(-1) - step.log_softmax(-1)).abs().max())

    assert difference(200) < 1e-5
    assert difference(330) > 1e-4


@pytest.mark.parametrize("backend", ["reference", "sdpa", "varlen"])
def test_with_deterministic_a_warm_cache_changes_no_bit(backend: str) -> None:
    if backend not in available_backends():
        pytest.skip(f"the backend {backend!r} does not work here")
    model = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
    lm = InvariantModel(model, backend=backend, deterministic=True, cache=KeyValueCache())
    for seed in range(6):
        source = random.Random(seed)
        prompt = random_prompt(source, [source.randrange(1, 40) for _ in range(4)])
        cold, warm = (lm.generate(prompt, max_new_tokens=6) for _ in range(2))
        assert warm.usage.cached_tokens
        assert warm.logprobs == cold.logprobs
        other = Prompt(prompt.prefix, [*prompt.segments, [5, 6, 7]], prompt.suffix)
        assert lm.generate(other, max_new_tokens=4).logprobs == (
            lm.with_cache(KeyValueCache()).generate(other, max_new_tokens=4).logprobs
        )
