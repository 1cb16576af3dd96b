"""What holds for every intervention, in families whose attention differs: the laws, combinations and refusals."""

from __future__ import annotations

import itertools
import random
from functools import cache
from threading import Thread, current_thread, main_thread

import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.attention.hook import PromptState
from invariant_rag.attention.probe import probe
from invariant_rag.errors import UnknownName, UnsupportedCombination
from invariant_rag.interventions import INTERVENTIONS, HiddenScaling, MsPoE, PromptBatch
from invariant_rag.methods import METHODS
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.rounding import rounding

FAMILIES = (
    "llama",
    "llama (yarn scaling)",
    "mistral (sliding window)",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm4",
    "cohere2",
    "gpt_neox",
    "gpt_oss",
)
AT_WORK = (HiddenScaling((5, 40), -1, range(1, 4)), MsPoE())
IDLE = (HiddenScaling((5, 40), 1, range(1, 4)), MsPoE(1.0, 1.0))
PROMPTS = [random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(9, 2, 11), (3, 4), (5, 1, 3)])]


@cache
def _model(family):
    return tiny_model(family, eos_token_id=None)


@cache
def _rotations(family):
    return probe(_model(family))


@pytest.fixture(params=AT_WORK, ids=lambda intervention: intervention.name)
def lm(request):
    return InvariantModel(_model("llama"), method="sequential", intervention=request.param)


def test_every_intervention_is_held_to_these_laws():
    assert {intervention.name for intervention in AT_WORK} == set(INTERVENTIONS)
    assert all(name == each.name and each.paper and each.__doc__ for name, each in INTERVENTIONS.items())


def plain_of(lm):
    """The model without the intervention, for bounds: Ms-PoE ranks heads, and rounding makes no bound of ranks."""
    return lm.with_method("sequential")


@pytest.mark.parametrize(("family", "intervention"), list(zip(FAMILIES, itertools.cycle(AT_WORK))), ids=str)
def test_decoding_equals_recomputing(family, intervention):
    """All tokens in one pass without a cache, told where the prompt ended."""
    model, prompt = _model(family), PROMPTS[0]
    lm = InvariantModel(model, method="sequential", intervention=intervention)
    written, ids = lm.generate(prompt, max_new_tokens=6), lm.prepare(prompt).input_ids
    batch = PromptBatch([PromptState(lm.prepare(prompt).arrangement)], _rotations(family))
    with torch.no_grad(), intervention.applied(model, batch):
        again = model(torch.tensor([[*ids, *written.token_ids]]), use_cache=False).logits[0, len(ids) - 1 : -1]
    logprobs = torch.log_softmax(again, dim=-1)
    assert tuple(logprobs.argmax(dim=-1).tolist()) == written.token_ids
    assert written.logprobs == pytest.approx(
        logprobs.amax(dim=-1).tolist(), abs=rounding(plain_of(lm).generate, prompt, max_new_tokens=6)
    )
    torch.testing.assert_close(lm.logits(prompt)[-1], again[0], atol=rounding(plain_of(lm).logits, prompt), rtol=0)


@pytest.mark.parametrize(("family", "number"), list(zip(FAMILIES, itertools.cycle((1, 0)))), ids=str)
def test_one_that_changes_nothing_is_the_plain_model(family, number):
    idle, busy = IDLE[number], AT_WORK[number]
    model, prompt = _model(family), PROMPTS[0]
    plain, lm = plain_logits(model, prompt), InvariantModel(model, method="sequential", intervention=idle)
    torch.testing.assert_close(lm.logits(prompt), plain, atol=rounding(plain_of(lm).logits, prompt), rtol=0)
    assert lm.generate(prompt, max_new_tokens=4).logprobs == pytest.approx(
        lm.with_method("sequential").generate(prompt, max_new_tokens=4).logprobs,
        abs=rounding(plain_of(lm).generate, prompt, max_new_tokens=4),
    )
    changed = lm.with_method(intervention=busy).logits(prompt)
    assert (changed[-1] - plain[-1]).abs().max() > 1e-2 * plain.abs().max()
    if isinstance(busy, HiddenScaling):
        torch.testing.assert_close(changed[:-1], plain[:-1], atol=rounding(plain_of(lm).logits, prompt), rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_is_unchanged_after_a_call(family):
    model, prompt = _model(family), PROMPTS[0]
    before, implementation = plain_logits(model, prompt), model.config._attn_implementation
    for intervention in AT_WORK:
        lm = InvariantModel(model, method="sequential", intervention=intervention)
        lm.generate(prompt, max_new_tokens=2)
        with pytest.raises(RuntimeError, match="stop"), lm.arranged([lm.prepare(prompt)]):
            raise RuntimeError("stop")
    assert torch.equal(plain_logits(model, prompt), before)
    assert model.config._attn_implementation == implementation
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_batch_of_answers_or_beams_and_scores_equal_single_calls(lm):
    single = [lm.generate(prompt, max_new_tokens=4) for prompt in PROMPTS]
    bound = rounding(plain_of(lm).generate, PROMPTS, max_new_tokens=4)
    for alone, together in zip(single, lm.generate(PROMPTS, max_new_tokens=4), strict=True):
        assert together.token_ids == alone.token_ids
        assert together.logprobs == pytest.approx(alone.logprobs, abs=bound)
    options = {"max_new_tokens": 3, "num_beams": 3, "num_return_sequences": 2}
    beams = [each.token_ids for prompt in PROMPTS for each in lm.generate(prompt, **options)]
    assert [each.token_ids for each in lm.generate(PROMPTS, **options)] == beams
    candidates = [single[0].token_ids, single[0].token_ids[:2], [7, 8, 9]]
    assert lm.score(PROMPTS[0], candidates)[:2] == pytest.approx(
        [sum(single[0].logprobs), sum(single[0].logprobs[:2])],
        abs=rounding(plain_of(lm).score, PROMPTS[0], candidates),
    )


def test_a_stream_is_what_generate_returns(tokenizer):
    model = tiny_model("llama", vocab_size=261, eos_token_id=None)
    for intervention in AT_WORK:
        lm = InvariantModel(model, tokenizer, method="sequential", intervention=intervention)
        prompt = lm.chat_prompt("Why?", ["one", "two"])
        stream = lm.stream(prompt, max_new_tokens=6)
        assert "".join(stream) == lm.generate(prompt, max_new_tokens=6).text
        assert stream.generation == lm.generate(prompt, max_new_tokens=6)


def test_the_ordering_makes_it_invariant_and_not_the_intervention(lm):
    prompt, shuffled = PROMPTS[0], Prompt(PROMPTS[0].prefix, PROMPTS[0].segments.permuted([2, 0, 1]), PROMPTS[0].suffix)
    assert not lm.ordering.invariant
    assert not torch.allclose(lm.logits(prompt), lm.logits(shuffled), atol=1e-2)
    canonical = lm.with_method(ordering="lexical")
    assert canonical.intervention == lm.intervention
    assert torch.equal(canonical.logits(prompt), canonical.logits(shuffled))


def test_other_threads_meanwhile_get_the_plain_model(lm):
    """One calls the model right before a layer's attention is computed."""
    prompt, seen = PROMPTS[0], []
    expected, layer = plain_logits(lm.model, prompt), lm.model.get_submodule("model.layers.2.self_attn")

    def interrupt(module, inputs):
        if current_thread() is main_thread():
            thread = Thread(target=lambda: seen.append(plain_logits(lm.model, prompt)))
            thread.start()
            thread.join()

    with lm.arranged([lm.prepare(prompt)]):
        hook = layer.register_forward_pre_hook(interrupt)
        own = lm.model(torch.tensor([lm.prepare(prompt).input_ids]), use_cache=False).logits[0, -1]
        hook.remove()
    assert torch.equal(*seen, expected)
    torch.testing.assert_close(own, lm.logits(prompt)[-1], atol=rounding(plain_of(lm).logits, prompt), rtol=0)


def test_only_sequential_can_be_intervened_in(lm):
    for method in sorted(set(METHODS) - {"sequential"}):
        with pytest.raises(UnsupportedCombination, match=f"expected the method 'sequential'.*{method}"):
            InvariantModel(lm.model, method=method, intervention=lm.intervention)
        with pytest.raises(UnsupportedCombination, match=method):
            lm.with_method(method, intervention=lm.intervention)
        assert lm.with_method(method).intervention is None, "a new method brings none"
    with pytest.raises(UnknownName, match="'hidden-scaling', 'ms-poe'"):
        lm.with_method(intervention="ms_poe")
