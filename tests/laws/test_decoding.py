"""Laws 6 and 7, and the keywords of `generate`: stock decoding behind an arranged prefill; and where these laws end."""

import random
from concurrent.futures import ThreadPoolExecutor
from threading import Event, get_ident

import pytest
import torch
from transformers import GenerationConfig

from invariant_rag import InvariantModel, KeyValueCache, Prompt
from invariant_rag.errors import InvalidPrompt, TokenizerRequired
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.contracts import plain_logits, recomputed_logits
from invariant_rag.testing.rounding import rounding
from tests.comparing import assert_computes

PROMPTS = [
    random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(3, 5, 2), (1, 9), (4, 4, 4, 1)])
]
in_parallel = pytest.mark.parametrize("lm", ["rotor", "pine", "structured", "ape"], indirect=True)
"""Also methods whose positions go on behind the longest segment."""


@pytest.fixture(params=["rotor", "pine"])
def lm(request, llama):
    return InvariantModel(llama, method=request.param)


def next_logprobs(lm, prompt, tokens):
    """Log-probabilities of the token behind the prompt, and behind each token after it, from `logits` alone."""
    longer = Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *tokens])
    return torch.log_softmax(lm.logits(longer), dim=-1)[len(prompt.suffix) - 1 :]


@in_parallel
def test_log_probabilities_and_scores_are_those_of_the_logits(lm):
    def logprobs_of(prompt, tokens):
        return [float(row[token]) for row, token in zip(next_logprobs(lm, prompt, tokens), tokens, strict=False)]

    tokens = lm.generate(PROMPTS[0], max_new_tokens=5).token_ids
    assert_computes(logprobs_of(PROMPTS[0], tokens), lm.generate, PROMPTS[0], max_new_tokens=5)
    prompt, candidates = PROMPTS[2], [(5,), (6, 7, 8), (9, 9)]
    scores = assert_computes([sum(logprobs_of(prompt, each)) for each in candidates], lm.score, prompt, candidates)
    assert lm.score(prompt.shuffled(random.Random(0)), candidates) == scores
    assert lm.score(prompt, []) == []


@in_parallel
def test_beams_equal_beams_over_full_recomputation_alone_and_in_a_batch(lm):
    """Beam search by hand, from `logits` alone."""
    beams = [((), 0.0)]
    for _ in range(4):
        grown = []
        for tokens, total in beams:
            scores = next_logprobs(lm, PROMPTS[0], tokens)[-1]
            grown += [((*tokens, token), total + float(scores[token])) for token in range(len(scores))]
        beams = sorted(grown, key=lambda beam: -beam[1])[:3]
    options = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2}
    single = [each for prompt in PROMPTS for each in lm.generate(prompt, **options)]
    assert single[0].token_ids == beams[0][0]
    batch = lm.generate(PROMPTS, **options)
    assert [(each.token_ids, each.order) for each in batch] == [(each.token_ids, each.order) for each in single]
    config = GenerationConfig(do_sample=False, num_beams=2, num_return_sequences=2, pad_token_id=0)
    assert len(lm.generate(PROMPTS[0], max_new_tokens=3, generation_config=config)) == 2


def test_sampling_with_a_seed_repeats_itself_in_every_order(lm):
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8, "seed": 3}
    one = lm.generate(PROMPTS[0], **options)
    assert lm.generate(PROMPTS[0].shuffled(random.Random(0)), **options).token_ids == one.token_ids
    assert lm.generate(PROMPTS[0], **{**options, "seed": 4}).token_ids != one.token_ids


def test_logits_processors_see_the_prompt_in_physical_order(lm):
    seen = []

    def spy(input_ids, scores):
        seen.append(input_ids[0].tolist())
        return torch.where(torch.arange(scores.shape[-1]) == 9, 0.0, float("-inf")).expand_as(scores)

    written = lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=[spy])
    assert written.token_ids == (9, 9, 9)
    physical = [token for index in written.order for token in PROMPTS[0].segments[index].token_ids]
    assert seen[0] == [*PROMPTS[0].prefix, *physical, *PROMPTS[0].suffix]


@pytest.mark.parametrize(("kind", "method"), [("a token", "rotor"), ("a string", "pine")])
def test_what_ends_a_text_ends_one_of_a_batch_and_not_the_others(model, kind, method):
    chat = model.with_method(method)
    prompts = [chat.chat_prompt("Why?", ["one", "two"]), chat.chat_prompt("Who?", ["three", "four", "five"])]
    letters = chat.tokenizer("abcdefgh ", add_special_tokens=False)["input_ids"]  # else it writes few of them
    options = {"max_new_tokens": 12, "suppress_tokens": sorted({*range(len(chat.tokenizer))} - {*letters})}
    whole = chat.generate(prompts, **options)
    end, letter = whole[0].token_ids[3], whole[0].text[3]
    stop = {"eos_token_id": end} if kind == "a token" else {"stop_strings": [letter]}
    for before, stopped in zip(whole, chat.generate(prompts, **stop, **options), strict=True):
        cut = before.token_ids.index(end) + 1 if end in before.token_ids else 12
        assert stopped.token_ids == before.token_ids[:cut]
        assert stopped.finish_reason == ("stop" if cut < 12 else "length")
        assert stopped.usage.completion_tokens == cut == len(stopped.logprobs)
        assert kind == "a token" or stopped.text == before.text[:cut]
    assert chat.generate(prompts[0], **stop, **options).finish_reason == "stop"


def test_text_needs_a_tokenizer_and_a_continuation_needs_a_suffix(lm, model):
    bare = Prompt([3], [[4, 5], [6]], [])
    for call, error in (
        (lambda: lm.stream(PROMPTS[0]), TokenizerRequired),
        (lambda: lm.generate(PROMPTS[0], stop_strings=["x"]), TokenizerRequired),
        (lambda: lm.generate(Prompt("text", ["more"], "text")), TokenizerRequired),
        (lambda: lm.chat_prompt("Why?", ["one"]), TokenizerRequired),
        (lambda: lm.generate(bare), InvalidPrompt),
        (lambda: lm.score(bare, [[1]]), InvalidPrompt),
    ):
        with pytest.raises(error, match=r"tokenizer|suffix"):
            call()
    assert lm.logits(bare).shape == (0, 128)
    prompt, ids = model.chat_prompt("Why?", ["a", "b"]), model.tokenizer("no", add_special_tokens=False)["input_ids"]
    assert model.score(prompt, ["no"]) == model.score(prompt, [ids]), "a score of text is one of its tokens"


# --- other threads ---


def test_other_threads_keep_the_plain_model_while_ours_is_at_work(llama):
    """One model object serves plain and invariant calls at the same time."""
    lm, prompt = InvariantModel(llama, method="pine"), PROMPTS[0]
    calls = {"plain": lambda: plain_logits(llama, prompt), "ours": lambda: lm.logits(prompt)}
    expected = {name: call() for name, call in calls.items()}

    def run(name):
        return all(torch.equal(calls[name](), expected[name]) for _ in range(15))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, ("plain", "ours", "plain", "ours")))


def test_a_thread_that_calls_the_model_across_the_call_of_a_processor_disturbs_neither(llama):
    """It begins before that call does, and ends before it."""
    lm, ids, main = InvariantModel(llama, method="pine"), torch.tensor([[5, 6, 7, 8]]), get_ident()
    expected, plain = lm.generate(PROMPTS[0], max_new_tokens=3), llama(ids).logits.detach()
    begun, called, others, found = Event(), Event(), [], []

    def call_model():
        return llama(ids).logits.detach()

    def call_it_twice(input_ids, scores):
        begun.clear()
        called.clear()
        thread = pool.submit(call_model)
        assert begun.wait(60)
        others.append(thread)
        found.extend((call_model(), others.pop().result(60)))
        return scores

    def meet(*_):
        if get_ident() != main:
            begun.set()
            called.wait(60)
        elif others:
            called.set()
            others[0].result(60)

    with ThreadPoolExecutor(1) as pool, llama.model.layers[0].register_forward_pre_hook(meet):
        written = lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=[call_it_twice])
    assert (written.token_ids, written.logprobs) == (expected.token_ids, expected.logprobs)
    assert len(found) == 6
    assert all(torch.equal(each, plain) for each in found)


# --- where a guarantee ends: the exceptions of `guarantees.toml`, so that none outlives its reason ---


def test_falcon_with_alibi_decodes_otherwise_than_it_is_prefilled_beyond_256_tokens():
    model = tiny_model("falcon (ALiBi)", num_hidden_layers=2, eos_token_id=None, max_position_embeddings=1024)

    def difference(method, length):
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
def test_with_deterministic_a_warm_cache_changes_no_bit(backend, llama):
    lm = InvariantModel(llama, backend=backend, deterministic=True, cache=KeyValueCache())
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
