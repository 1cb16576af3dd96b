"""Streams, and calls within calls, threads and forks: each gets its own text and attention, or an error."""

import multiprocessing
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from multiprocessing.pool import ThreadPool
from threading import Event, Thread
from threading import enumerate as running_threads

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidOption, UnsupportedCombination
from invariant_rag.generation.answer_parsing import trim_at_stop_string, until_stop_string
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.streaming import TextQueueStreamer, TextStream, replay
from invariant_rag.interventions import HiddenScaling
from invariant_rag.locks import ForkSafeLock
from invariant_rag.testing import toy_tokenizer
from tests.comparing import in_a_thread

BYTES = toy_tokenizer()
PROMPT = Prompt([3, 4], [[5, 6], [7], [8, 9, 10]], [11, 12])
OTHER = Prompt([5], [[9, 8], [7, 7]], [13])
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
SCALED = {"method": "sequential", "intervention": HiddenScaling([3], 0.5, [0, 1])}
WRAPPERS = [*({"method": name} for name in ("rotor", "pine", "ape", "structured")), SCALED]
PIECES = ["<unk>", "\n", "▁", "▁a", "▁▁b", "c", "é", "文", "."]
WORDS = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(PIECES)}, unk_token="<unk>"))
WORDS.pre_tokenizer, WORDS.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
METASPACE = PreTrainedTokenizerFast(tokenizer_object=WORDS, unk_token="<unk>", clean_up_tokenization_spaces=False)
"""Words begin with a mark for their space, which the decoder strips from the beginning of a text."""


def streamed(tokens, tokenizer):
    streamer = TextQueueStreamer(tokenizer)
    return list(TextStream(partial(replay, tokens, streamer), streamer, Event(), lambda: None))


def lists(most):
    return st.lists(st.integers(0, most), max_size=20) | st.lists(st.integers(0, most), min_size=60, max_size=80)


@settings(deadline=None, max_examples=60)
@example([5] + [0] * 40 + [2, 5], [], "")  # a long run of special tokens, then a space
@given(lists(8), lists(260), st.text(max_size=60))
def test_pieces_join_to_the_text(words, some_bytes, text):
    """Where a decoder strips white space, of any bytes, and where characters are several tokens."""
    assert "".join(streamed(words, METASPACE)) == METASPACE.decode(words, skip_special_tokens=True)
    assert "".join(streamed(some_bytes, BYTES)) == BYTES.decode(some_bytes, skip_special_tokens=True)
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokens, BYTES)
    assert "".join(pieces) == BYTES.decode(tokens, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@pytest.fixture
def prompt(model):
    return model.chat_prompt("Why?", ["one", "two"])


def test_a_stream_ends_with_its_generation_or_when_its_reader_leaves(model, prompt):
    stream = model.stream(prompt, max_new_tokens=8)
    first = next(stream)
    assert stream.generation is None
    expected = model.generate(prompt, max_new_tokens=8)
    assert first + "".join(stream) == expected.text
    assert stream.generation == expected
    drawn = {"max_new_tokens": 8, "do_sample": True, "temperature": 1.5, "seed": 3}
    assert "".join(model.stream(prompt, **drawn)) == model.generate(prompt, **drawn).text
    passes = []
    for leave in (TextStream.close, lambda stream: None):  # closed, or dropped
        with model.model.register_forward_pre_hook(lambda *_: passes.append(1)):
            left = model.stream(prompt, max_new_tokens=1000)
            next(left)
            leave(left)
            assert left.generation is None
            _kept = left if leave is TextStream.close else None  # so that nothing but `close` ends it
            del left
        assert "invariant-rag-stream" not in [each.name for each in running_threads()], "the generation is over"
    assert len(passes) < 1000, "the model rests"
    for elsewhere in (in_a_thread, lambda close: close()):
        stream = model.stream(prompt, max_new_tokens=500, **processing(lambda: elsewhere(stream.close)))  # noqa: B023
        in_time(partial(list, stream))
        assert stream.generation is None
    with pytest.raises(InvalidOption, match="beam"):
        list(model.stream(prompt, num_beams=2))
    with pytest.raises(UnsupportedCombination, match="one sequence to stream, got 2"):
        list(model.stream(prompt, do_sample=True, num_return_sequences=2))


def before_stop(pieces, stops):
    return (each.content for each in until_stop_string(map(AnswerDelta, pieces), stops))


@settings(deadline=None)
@example(["a", "a", "ab"], ["aab"])  # a beginning within a beginning
@example(["ab", "c"], ["bd", "abc"])  # two may have begun
@example(["b", "aa", "b"], ["a", "baab"])  # one is over while another, which began before it, is not
@example(["b", "aa"], ["a", "baab"])
@given(st.lists(st.text("ab", max_size=4), max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_up_to_a_stop_string_join_to_the_text_before_it(pieces, stops):
    text = "".join(pieces)
    before = "".join(before_stop(pieces, stops))
    assert before == trim_at_stop_string(text, stops)
    assert text.startswith(before)
    if found := [stop for stop in stops if stop in text]:
        assert any(text.startswith(before + stop) for stop in found)
        assert not any(stop in before for stop in found)
    else:
        assert before == text


def test_pieces_come_one_by_one_but_for_special_tokens_and_what_may_be_a_stop_string_and_all_are_consumed():
    assert streamed(BYTES("<bos>ab<eos>c", add_special_tokens=False)["input_ids"], BYTES) == ["a", "b", "c"]
    assert list(before_stop(["xa", "b", "y"], ["abc"])) == ["x", "aby"]
    assert next(before_stop(iter(["hello "]), ["stop"])) == "hello "
    pieces = iter(["a", "b", "c"])
    assert list(before_stop(pieces, ["b"])) == ["a"]
    assert list(pieces) == []


# --- calls within calls, threads and forks ---


def processing(function):
    """A logits processor that calls a function at every step, and changes no score."""
    return {"logits_processor": [lambda ids, scores: (function(), scores)[1]]}


def deciding(function):
    """A stopping criterion that calls a function at every step, and stops nothing."""
    return {"stopping_criteria": [lambda ids, _, **more: (function(), torch.zeros(len(ids), dtype=torch.bool))[1]]}


def in_time(function):
    """Call a function in a daemon thread; fail, instead of hanging, if it does not end."""
    with ThreadPool(1) as pool:
        return pool.apply_async(function).get(60)


@pytest.mark.parametrize(("choices", "beams"), [*zip(WRAPPERS, (1, 2, 2, 1, 1), strict=True)], ids=str)
def test_calls_by_a_processor_or_a_criterion_or_within_an_arranged_block_change_nothing(llama, choices, beams):
    lm, options = InvariantModel(llama, **choices), {"max_new_tokens": 4, "num_beams": beams}
    lms = (lm, lm.with_method("rotor"), lm.with_method("sequential"))

    def others():
        return [*(each.generate(OTHER, max_new_tokens=3) for each in lms), lm.score(OTHER, [[4], [5, 6]])]

    def call():
        with torch.no_grad():
            assert torch.equal(llama(input_ids=IDS).logits, plain)
        if not calls:
            assert others() == inner
        calls.append(1)

    expected, inner, plain = lm.generate(PROMPT, **options), others(), llama(input_ids=IDS).logits.detach()
    for within in (processing(call), deciding(call)):
        calls = []
        found = in_time(partial(lm.generate, PROMPT, **options, **within))
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert len(calls) >= 4
    with lm.arranged([lm.prepare(PROMPT)]):
        assert others() == inner


def test_a_stream_that_could_never_begin_is_refused(model, prompt):
    def stream():
        return "".join(model.with_method("pine").stream(prompt, max_new_tokens=2))

    def arranged():
        with model.arranged([model.prepare(prompt)]):
            stream()

    for call in (
        arranged,
        partial(model.generate, prompt, max_new_tokens=2, **processing(stream)),
        partial(model.generate, prompt, max_new_tokens=2, **deciding(stream)),
        lambda: list(model.stream(prompt, max_new_tokens=2, **processing(stream))),
    ):
        with pytest.raises(UnsupportedCombination, match="wait for ever"):
            in_time(call)
    in_time(stream)  # the lock is free again


def test_a_thread_that_the_holder_waits_for_is_refused_and_others_wait(llama):
    lm = InvariantModel(llama)
    prepared, ask = lm.prepare(PROMPT), partial(lm.generate, OTHER, max_new_tokens=1)
    with ThreadPoolExecutor(2) as pool:
        with lm.arranged([prepared]):
            context = copy_context()
            child = pool.submit(context.run, ask)  # as asyncio.to_thread does
            with pytest.raises(UnsupportedCombination):
                child.result(60)
            stranger = pool.submit(ask)
            with pytest.raises(TimeoutError):
                stranger.result(0.3)
        assert stranger.result(60), "it has waited"
        with lm.arranged([prepared]):
            again = copy_context()
        for ended in (again, context):
            assert pool.submit(ended.copy().run, ask).result(60)


def runs_in_child(work, seconds=20.0):
    """Whether a forked process does some work, in time and without an error."""
    child = multiprocessing.get_context("fork").Process(target=work)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says what these tests are about
        child.start()
    child.join(seconds)
    child.kill()
    child.join()
    return child.exitcode == 0


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")
def test_a_child_that_was_forked_while_another_thread_generates_generates_and_locks_are_its_own(model, prompt):
    expected = model.generate(prompt, max_new_tokens=3).token_ids
    begun, go = Event(), Event()

    def generate():
        torch.set_num_threads(1)  # the threads of OpenMP are not in the child
        assert model.generate(prompt, max_new_tokens=3).token_ids == expected

    waiting = processing(lambda: (begun.set(), go.wait(30)))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(model.generate, prompt, max_new_tokens=1, **waiting)
        try:
            assert begun.wait(30)
            assert runs_in_child(generate)
        finally:
            go.set()
    assert model.generate(prompt, max_new_tokens=3).token_ids == expected
    lock = ForkSafeLock()

    def work():
        free = Event()
        other = Thread(target=lambda: (lock.__enter__(), free.set()), daemon=True)
        other.start()
        assert not free.wait(0.1)
        lock.__exit__()
        assert free.wait(5)

    with lock:
        assert runs_in_child(work), "the forking thread holds the lock in the child, too"
