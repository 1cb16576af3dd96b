"""Laws 6 and 7, and the keywords of `generate`: stock decoding behind an arranged prefill."""

from __future__ import annotations

import random
from threading import Event, Thread, get_ident

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
)

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidOption, InvalidPrompt, TokenizerRequired
from invariant_rag.testing import random_prompt
from invariant_rag.testing.contracts import plain_logits
from invariant_rag.testing.rounding import rounding

PROMPTS = [
    random_prompt(random.Random(seed), lengths) for seed, lengths in enumerate([(3, 5, 2), (1, 9), (4, 4, 4, 1)])
]
in_parallel = pytest.mark.parametrize("lm", ["rotor", "pine", "structured", "ape"], indirect=True)
"""Also methods whose positions go on behind the longest segment."""


@pytest.fixture(params=["rotor", "pine"])
def lm(request: pytest.FixtureRequest, llama: PreTrainedModel) -> InvariantModel:
    return InvariantModel(llama, method=request.param)


@pytest.fixture
def chat(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method="pine")


def longer(prompt: Prompt, tokens: list[int] | tuple[int, ...]) -> Prompt:
    return Prompt(prompt.prefix, prompt.segments, [*prompt.suffix, *tokens])


def logprobs_of(lm: InvariantModel, prompt: Prompt, tokens: list[int] | tuple[int, ...]) -> list[float]:
    """Log-probabilities of tokens behind a prompt, from `logits` alone."""
    logprobs = torch.log_softmax(lm.logits(longer(prompt, tokens)), dim=-1)[len(prompt.suffix) - 1 : -1]
    return [float(logprobs[step, token]) for step, token in enumerate(tokens)]


@in_parallel
def test_log_probabilities_and_scores_are_those_of_the_logits(lm: InvariantModel) -> None:
    written = lm.generate(PROMPTS[0], max_new_tokens=5)
    bound = rounding(lm.generate, PROMPTS[0], max_new_tokens=5)
    assert written.logprobs == pytest.approx(logprobs_of(lm, PROMPTS[0], written.token_ids), abs=bound)
    prompt, candidates = PROMPTS[2], [[5], [6, 7, 8], [9, 9]]
    expected = [sum(logprobs_of(lm, prompt, candidate)) for candidate in candidates]
    assert lm.score(prompt, candidates) == pytest.approx(expected, abs=rounding(lm.score, prompt, candidates))
    assert lm.score(prompt.shuffled(random.Random(0)), candidates) == lm.score(prompt, candidates)
    assert lm.score(prompt, []) == []


@in_parallel
def test_beams_equal_beams_over_full_recomputation(lm: InvariantModel) -> None:
    """Beam search by hand, from `logits` alone."""
    prompt, beams = PROMPTS[0], [((), 0.0)]
    for _ in range(4):
        grown = []
        for tokens, total in beams:
            scores = torch.log_softmax(lm.logits(longer(prompt, tokens))[-1], dim=-1)
            grown += [((*tokens, token), total + float(scores[token])) for token in range(len(scores))]
        beams = sorted(grown, key=lambda beam: -beam[1])[:3]
    assert lm.generate(prompt, max_new_tokens=4, num_beams=3).token_ids == beams[0][0]


@in_parallel
def test_a_batch_of_beams_equals_single_calls(lm: InvariantModel) -> None:
    options = {"max_new_tokens": 4, "num_beams": 3, "num_return_sequences": 2}
    single = [each for prompt in PROMPTS for each in lm.generate(prompt, **options)]
    batch = lm.generate(PROMPTS, **options)
    assert [(each.token_ids, each.order) for each in batch] == [(each.token_ids, each.order) for each in single]
    config = GenerationConfig(do_sample=False, num_beams=2, num_return_sequences=2, pad_token_id=0)
    assert len(lm.generate(PROMPTS[0], max_new_tokens=3, generation_config=config)) == 2


def test_sampling_with_a_seed_repeats_itself_and_leaves_the_global_state_alone(lm: InvariantModel) -> None:
    state = torch.get_rng_state()
    options = {"do_sample": True, "temperature": 1.5, "max_new_tokens": 8, "seed": 3}
    one = lm.generate(PROMPTS[0], **options)
    assert lm.generate(PROMPTS[0].shuffled(random.Random(0)), **options).token_ids == one.token_ids
    assert lm.generate(PROMPTS[0], **{**options, "seed": 4}).token_ids != one.token_ids
    assert torch.equal(torch.get_rng_state(), state)


def test_logits_processors_see_the_prompt_in_physical_order(lm: InvariantModel) -> None:
    seen: list[list[int]] = []

    class Spy(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen.append(input_ids[0].tolist())
            return torch.where(torch.arange(scores.shape[-1]) == 9, 0.0, float("-inf")).expand_as(scores)

    written = lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=LogitsProcessorList([Spy()]))
    assert written.token_ids == (9, 9, 9)
    physical = [token for index in written.order for token in PROMPTS[0].segments[index].token_ids]
    assert seen[0] == [*PROMPTS[0].prefix, *physical, *PROMPTS[0].suffix]


def test_an_end_of_sequence_token_ends_one_prompt_of_a_batch_and_not_the_others(lm: InvariantModel) -> None:
    single = [lm.generate(prompt, max_new_tokens=8) for prompt in PROMPTS]
    end = single[0].token_ids[2]
    batch = lm.generate(PROMPTS, max_new_tokens=8, eos_token_id=end)
    for alone, together in zip(single, batch, strict=True):
        cut = alone.token_ids.index(end) + 1 if end in alone.token_ids else 8
        assert together.token_ids == alone.token_ids[:cut]
        assert together.finish_reason == ("stop" if end in alone.token_ids else "length")
        assert together.usage.completion_tokens == cut == len(together.logprobs)


class Letters(LogitsProcessor):
    """Random weights write few letters by themselves: leave them letters and spaces to choose from."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.allowed = tokenizer("abcdefgh    ", add_special_tokens=False)["input_ids"]

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        kept = torch.full_like(scores, float("-inf"))
        kept[:, self.allowed] = scores[:, self.allowed]
        return kept


def test_stop_strings_end_a_generation_alone_and_in_a_batch(chat: InvariantModel) -> None:
    prompts = [chat.chat_prompt("Why?", ["one", "two"]), chat.chat_prompt("Who?", ["three", "four", "five"])]
    options = {"max_new_tokens": 12, "logits_processor": LogitsProcessorList([Letters(chat.tokenizer)])}
    whole = chat.generate(prompts, **options)
    stop = whole[0].text[3]
    for before, stopped in zip(whole, chat.generate(prompts, stop_strings=[stop], **options), strict=True):
        cut = before.text.index(stop) + 1 if stop in before.text else 12
        assert stopped.text == before.text[:cut]
        assert stopped.finish_reason == ("stop" if cut < 12 else "length")
    assert chat.generate(prompts[0], stop_strings=[stop], **options).finish_reason == "stop"


def test_stopping_criteria_end_a_generation(lm: InvariantModel) -> None:
    class AfterTwo(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
            done = input_ids.shape[1] >= len(lm.prepare(PROMPTS[0]).input_ids) + 2
            return torch.full((input_ids.shape[0],), done)

    short = lm.generate(PROMPTS[0], max_new_tokens=8, stopping_criteria=StoppingCriteriaList([AfterTwo()]))
    assert (len(short.token_ids), short.finish_reason) == (2, "stop")


def test_a_stream_joined_is_the_generated_text(chat: InvariantModel) -> None:
    prompt = chat.chat_prompt("Why?", ["one", "two", "three"])
    options = {"max_new_tokens": 40, "logits_processor": LogitsProcessorList([Letters(chat.tokenizer)])}
    pieces = list(chat.stream(prompt, **options))
    assert "".join(pieces) == chat.generate(prompt, **options).text
    assert len(pieces) > 1


def test_a_stream_that_is_closed_or_fails_frees_the_model(chat: InvariantModel) -> None:
    pieces = chat.stream(chat.chat_prompt("Why?", ["one", "two", "three"]), max_new_tokens=2000)
    next(pieces)
    pieces.close()
    with pytest.raises(InvalidOption, match="not_a_keyword"):
        list(chat.stream(chat.chat_prompt("Why?", ["one"]), not_a_keyword=1))
    assert chat.generate(chat.chat_prompt("Why?", ["one"]), max_new_tokens=1).token_ids


def test_text_needs_a_tokenizer_and_a_score_of_text_is_one_of_its_tokens(
    lm: InvariantModel, chat: InvariantModel
) -> None:
    for needs in (
        lambda: lm.stream(PROMPTS[0]),
        lambda: lm.generate(PROMPTS[0], stop_strings=["x"]),
        lambda: lm.generate(Prompt("text", ["more"], "text")),
        lambda: lm.chat_prompt("Why?", ["one"]),
    ):
        with pytest.raises(TokenizerRequired):
            needs()
    prompt = chat.chat_prompt("Why?", ["one", "two"])
    ids = chat.tokenizer("no", add_special_tokens=False)["input_ids"]
    assert chat.score(prompt, ["no"]) == chat.score(prompt, [ids])


def test_generation_needs_a_suffix_and_logits_of_none_are_empty(lm: InvariantModel) -> None:
    prompt = Prompt([3], [[4, 5], [6]], [])
    for needs in (lambda: lm.generate(prompt), lambda: lm.score(prompt, [[1]])):
        with pytest.raises(InvalidPrompt, match="suffix"):
            needs()
    assert lm.logits(prompt).shape == (0, 128)
    assert lm.generate([]) == []


def test_other_threads_keep_the_plain_model_while_ours_is_at_work(llama: PreTrainedModel) -> None:
    """One model object serves plain and invariant calls at the same time."""
    lm, prompt = InvariantModel(llama, method="pine"), PROMPTS[0]
    calls = {"plain": lambda: plain_logits(llama, prompt), "ours": lambda: lm.logits(prompt)}
    expected, wrong = {name: call() for name, call in calls.items()}, list[str]()

    def run(name: str) -> None:
        wrong.extend(name for _ in range(15) if not torch.equal(calls[name](), expected[name]))

    threads = [Thread(target=run, args=(name,)) for name in ("plain", "ours", "plain", "ours")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_thread_that_calls_the_model_across_the_call_of_a_processor_disturbs_neither(llama: PreTrainedModel) -> None:
    """It begins before that call does, and ends before it."""
    lm, ids, found, main = InvariantModel(llama, method="pine"), torch.tensor([[5, 6, 7, 8]]), [], get_ident()
    expected, plain = lm.generate(PROMPTS[0], max_new_tokens=3), llama(ids).logits.detach()
    begun, called = Event(), Event()

    def run() -> None:
        with torch.no_grad():
            found.append(llama(ids).logits)

    class Calls(LogitsProcessor):
        other: Thread | None = None

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            begun.clear()
            called.clear()
            thread = Thread(target=run)
            thread.start()
            assert begun.wait(60)
            self.other = thread
            run()
            self.other = None
            return scores

    calls = Calls()

    def meet(*_: object) -> None:
        if get_ident() != main:
            begun.set()
            called.wait(60)
        elif calls.other is not None:
            called.set()
            calls.other.join(60)

    hook = llama.model.layers[0].register_forward_pre_hook(meet)
    try:
        written = lm.generate(PROMPTS[0], max_new_tokens=3, logits_processor=LogitsProcessorList([calls]))
    finally:
        hook.remove()
    assert (written.token_ids, written.logprobs) == (expected.token_ids, expected.logprobs)
    assert len(found) == 6
    assert all(torch.equal(each, plain) for each in found)
