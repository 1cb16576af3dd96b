"""A test suite for methods: subclass `MethodContract`, set `method`, and run the class with pytest."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from functools import cache
from typing import Any, cast

import torch
from transformers import PreTrainedModel

from invariant_rag.attention.per_model import takes_position_ids
from invariant_rag.generation.model import InvariantModel
from invariant_rag.methods import Method, resolve_method
from invariant_rag.segments import Prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding
from invariant_rag.testing.toy_inputs import random_prompt

_LENGTHS = ((2, 2, 2), (1, 5, 3, 2), (4, 1, 1, 6, 2), (3, 3))


@cache
def _model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    model: Any = tiny_model(family, num_hidden_layers=2, eos_token_id=None)
    cast: PreTrainedModel = model.to(dtype)
    return cast


def plain_logits(model: PreTrainedModel, prompt: Prompt) -> torch.Tensor:
    """Return the plain model's logits at the suffix of a prompt of token ids, with its segments in input order.

    Those of other tokens are not computed, as in `InvariantModel.logits`: on several threads, products of more rows may
    be summed in another order.
    """
    segments = [token for segment in prompt.segments for token in segment.token_ids or ()]
    ids = torch.tensor([[*map(int, prompt.prefix), *segments, *map(int, prompt.suffix)]])
    count = len(prompt.suffix)
    keep = {"logits_to_keep": count} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    with torch.no_grad():
        logits: torch.Tensor = model(ids, **keep).logits[0, -count:].float()
    return logits


def recomputed_logits(lm: InvariantModel, prompt: Prompt, written: Sequence[int]) -> torch.Tensor:
    """Return the logits after a prompt and after each written token, without a cache: `[W + 1, vocabulary]`.

    The prompt and the generated tokens are one forward pass, as in training.
    """
    prepared = lm.prepare(prompt)
    ids = torch.tensor([[*prepared.input_ids, *written]])
    last = int(prepared.positions[-1])
    later = range(last + 1, last + 1 + len(written))
    positions = torch.tensor([[*prepared.positions, *later]])
    options = {"position_ids": positions} if takes_position_ids(lm.model) else {}
    with torch.no_grad(), lm.arranged([prepared]):
        output = lm.model(ids, attention_mask=torch.ones_like(ids), use_cache=False, **options)
    logits: torch.Tensor = output.logits[0, len(prepared.input_ids) - 1 :].float()
    return logits


@cache
def _exact(contract: Any) -> list[tuple[torch.Tensor, float]]:
    """Return the logits of the prompts of a contract with the slow reference in float64, and what float32 may cost.

    They are computed once for all fast backends.

    Args:
        contract: The subclass of `MethodContract`.
    """
    exact, fast = contract().wrapped(torch.float64, backend="reference"), contract().wrapped()
    return [(exact.logits(prompt), rounding(fast.logits, prompt)) for prompt in contract().prompts()]


class MethodContract:
    """The properties that every method must have. Set `method` in a subclass, and run it with pytest.

    Attributes:
        method: The method under test: a registry name or an instance.
        family: The family of the tiny models: a key of `invariant_rag.testing.families.FAMILIES`.
    """

    method: str | Method
    family: str = "llama"

    def wrapped(self, dtype: torch.dtype = torch.float32, **options: object) -> InvariantModel:
        """Return a tiny model with the method, the ordering `lexical`, and other options of `InvariantModel`."""
        options = {"ordering": "lexical", **options}
        return InvariantModel(_model(self.family, dtype), method=self.method, **options)  # type: ignore[arg-type]

    def prompts(self) -> list[Prompt]:
        """Return random prompts: equal and different segment lengths, a duplicate segment, and a single segment."""
        random_state = random.Random(0)
        prompts = [random_prompt(random_state, lengths) for lengths in _LENGTHS]
        twice = prompts[1].segments
        doubled = Prompt(prompts[1].prefix, [*twice, twice[1]], prompts[1].suffix)
        return [*prompts, doubled, random_prompt(random_state, (4,))]

    def test_permutations_change_no_bit_of_logits_and_tokens(self) -> None:
        """Permuting the segments gives bit-identical logits and tokens, in float32 and bfloat16."""
        for dtype in (torch.float32, torch.bfloat16):
            lm = self.wrapped(dtype)
            for prompt in self.prompts():
                shuffled = prompt.shuffled(random.Random(1))
                assert torch.equal(lm.logits(prompt), lm.logits(shuffled))
                assert lm.generate(prompt, max_new_tokens=4).token_ids == (
                    lm.generate(shuffled, max_new_tokens=4).token_ids
                )

    def test_one_segment_or_none_is_the_plain_model(self) -> None:
        """With one segment, or none, logits equal those of the plain model."""
        for segments in ([], [[5, 6, 7]]):
            prompt = Prompt(prefix=[3, 4], segments=segments, suffix=[8, 9])
            plain = plain_logits(_model(self.family, torch.float32), prompt)
            bound = rounding(self.wrapped().logits, prompt)
            torch.testing.assert_close(self.wrapped().logits(prompt), plain, atol=bound, rtol=0)

    def test_the_model_is_unchanged_after_a_call(self) -> None:
        """The plain model's logits are bit-identical before and after a call."""
        lm, prompt = self.wrapped(), self.prompts()[0]
        before = plain_logits(lm.model, prompt)
        implementation = lm.model.config._attn_implementation
        lm.generate(prompt, max_new_tokens=2)
        assert lm.model.config._attn_implementation == implementation
        assert torch.equal(before, plain_logits(lm.model, prompt))

    def test_sdpa_agrees_with_the_reference(self) -> None:
        """Law 4, for the backend `sdpa`."""
        self._agrees_with_the_reference("sdpa")

    def test_varlen_agrees_with_the_reference(self) -> None:
        """Law 4, for the backend `varlen`."""
        self._agrees_with_the_reference("varlen")

    def _agrees_with_the_reference(self, backend: str) -> None:
        """Compare with the reference in a float64 model, within what float32 may cost; see `rounding`."""
        lm, contract = self.wrapped(backend=backend), cast("Any", type(self))
        for prompt, (exact, bound) in zip(self.prompts(), _exact(contract), strict=True):
            torch.testing.assert_close(lm.logits(prompt), exact, atol=bound, rtol=0)

    def test_decoding_equals_recomputing_at_every_step(self) -> None:
        """Greedy decoding with the cache equals recomputation from scratch, for 16 tokens."""
        lm = self.wrapped()
        for prompt in self.prompts()[:2]:
            written = lm.generate(prompt, max_new_tokens=16).token_ids
            again = recomputed_logits(lm, prompt, written[:-1])
            assert tuple(again.argmax(dim=-1).tolist()) == written
            longer = lm.logits(Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *written[:-1]]))
            assert tuple(longer[len(prompt.suffix) - 1 :].argmax(dim=-1).tolist()) == written

    def test_a_batch_equals_single_calls(self) -> None:
        """Batched generation gives the tokens of single calls."""
        lm, prompts = self.wrapped(), self.prompts()
        single = [lm.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
        assert [each.token_ids for each in lm.generate(prompts, max_new_tokens=6)] == single

    def test_it_has_a_name_a_paper_and_a_docstring(self) -> None:
        """The method has the name, paper and docstring that generated tables show."""
        method = resolve_method(self.method)
        assert method.name
        assert method.paper
        assert type(method).__doc__
