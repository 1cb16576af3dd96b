"""Calls within calls, threads and forks: what calls the model while it runs gets its own attention, or an error."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from threading import Event, Thread

import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.errors import InvalidPrompt, UnsupportedCombination
from invariant_rag.interventions import HiddenScaling
from invariant_rag.locks import ForkSafeLock

PROMPT = Prompt([3, 4], [[5, 6], [7], [8, 9, 10]], [11, 12])
OTHER = Prompt([5], [[9, 8], [7, 7]], [13])
IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11]])
WRAPPERS = {
    "rotor": {"method": "rotor"},
    "pine": {"method": "pine"},
    "ape": {"method": "ape"},
    "structured": {"method": "structured"},
    "intervention": {"method": "sequential", "intervention": HiddenScaling([3], 0.5, [0, 1])},
}


def processing(function):
    """A logits processor that calls a function at every step, and changes no score."""
    return {"logits_processor": [lambda ids, scores: (function(), scores)[1]]}


def deciding(function):
    """A stopping criterion that calls a function at every step, and stops nothing."""
    return {"stopping_criteria": [lambda ids, _, **more: (function(), torch.zeros(len(ids), dtype=torch.bool))[1]]}


def in_time(function):
    """Run a function in a thread, and return or raise what it does; fail, instead of hanging, if it does not end."""
    done = Future()

    def run():
        try:
            done.set_result(function())
        except BaseException as error:  # noqa: BLE001 - raised below
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done.result(60)


@pytest.mark.parametrize(
    ("name", "beams"), [("rotor", 1), ("pine", 2), ("ape", 2), ("structured", 1), ("intervention", 1)]
)
def test_a_processor_and_a_criterion_may_call_the_model_and_change_nothing(llama, name, beams):
    lm, options = InvariantModel(llama, **WRAPPERS[name]), {"max_new_tokens": 4, "num_beams": beams}
    rotor = lm.with_method("rotor")
    with torch.no_grad():
        plain = llama(input_ids=IDS).logits
    inner = [each.generate(OTHER, max_new_tokens=3) for each in (lm, rotor)]
    expected, calls = lm.generate(PROMPT, **options), []

    def call():
        with torch.no_grad():
            assert torch.equal(llama(input_ids=IDS).logits, plain)
        if not calls:
            assert [each.generate(OTHER, max_new_tokens=3) for each in (lm, rotor)] == inner
        calls.append(1)

    for within in (processing(call), deciding(call)):
        calls.clear()
        found = in_time(partial(lm.generate, PROMPT, **options, **within))
        assert (found.token_ids, found.logprobs) == (expected.token_ids, expected.logprobs)
        assert len(calls) >= 4


@pytest.mark.parametrize("name", WRAPPERS)
def test_calls_within_an_arranged_block_have_nothing_of_its_attention(llama, name):
    lm = InvariantModel(llama, **WRAPPERS[name])
    lms = (lm, lm.with_method("sequential"))

    def call():
        return [*(each.generate(OTHER, max_new_tokens=3) for each in lms), lm.score(OTHER, [[4], [5, 6]])]

    expected = call()
    with lm.arranged([lm.prepare(PROMPT)]):
        assert call() == expected


@pytest.mark.parametrize("method", ["rotor", "pine"])
def test_other_texts_within_an_arranged_block_are_refused(llama, method):
    lm = InvariantModel(llama, method=method)
    prepared = lm.prepare(PROMPT)
    with lm.arranged([prepared]), pytest.raises(InvalidPrompt, match="at least the 10 tokens"):
        llama(input_ids=IDS)
    with lm.arranged([prepared, prepared]), pytest.raises(InvalidPrompt, match="2 arranged prompts, got 1 rows"):
        llama(input_ids=torch.tensor([prepared.input_ids]))


def test_a_stream_that_could_never_begin_is_refused(model):
    lm, prompt = model, model.chat_prompt("Why?", ["one", "two"])

    def stream():
        return "".join(lm.with_method("pine").stream(prompt, max_new_tokens=2))

    def arranged():
        with lm.arranged([lm.prepare(prompt)]):
            stream()

    refused = [
        arranged,
        lambda: lm.generate(prompt, max_new_tokens=2, **processing(stream)),
        lambda: lm.generate(prompt, max_new_tokens=2, **deciding(stream)),
        lambda: list(lm.stream(prompt, max_new_tokens=2, **processing(stream))),
    ]
    for call in refused:
        with pytest.raises(UnsupportedCombination, match="wait for ever"):
            in_time(call)
    in_time(stream)  # the lock is free again


def test_a_thread_that_the_holder_waits_for_is_refused_and_others_wait(llama):
    lm = InvariantModel(llama)
    errors = []

    def ask():
        try:
            lm.generate(OTHER, max_new_tokens=1)
        except UnsupportedCombination as error:
            errors.append(error)

    stranger = Thread(target=ask)
    context = []

    def block():
        with lm.arranged([lm.prepare(PROMPT)]):
            context.append(copy_context())
            child = Thread(target=context[0].run, args=(ask,))  # as asyncio.to_thread does
            child.start()
            child.join()
            stranger.start()
            stranger.join(0.3)
            assert stranger.is_alive(), "it waits"

    in_time(block)
    stranger.join(60)
    assert not stranger.is_alive()
    assert len(errors) == 1, "only the child is refused"
    with lm.arranged([lm.prepare(PROMPT)]):
        context.append(copy_context())
    for ended in reversed(context):
        in_time(partial(ended.copy().run, ask))
    assert len(errors) == 1, "the blocks have ended"


def test_a_stream_is_closed_by_any_thread(model):
    lm, prompt = model, model.chat_prompt("Why?", ["one", "two"])
    streams = []

    def close_elsewhere():
        thread = Thread(target=streams[-1].close)
        thread.start()
        thread.join()

    for close in (lambda: streams[-1].close(), close_elsewhere):  # noqa: PLW0108 - not there yet
        streams.append(lm.stream(prompt, max_new_tokens=500, **processing(close)))
        in_time(lambda: list(streams[-1]))
        assert streams[-1].generation is None


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
def test_a_model_generates_in_a_child_that_was_forked_while_another_thread_generates(model):
    prompt = model.chat_prompt("q", ["a", "b"])
    expected = model.generate(prompt, max_new_tokens=3).token_ids
    begun, go = Event(), Event()

    def wait(ids, scores):
        begun.set()
        go.wait(30)
        return scores

    def generate():
        torch.set_num_threads(1)  # the threads of OpenMP are not in the child
        assert model.generate(prompt, max_new_tokens=3).token_ids == expected

    other = Thread(target=model.generate, args=(prompt,), kwargs={"max_new_tokens": 1, "logits_processor": [wait]})
    other.start()
    try:
        assert begun.wait(30)
        assert runs_in_child(generate)
    finally:
        go.set()
        other.join()
    assert model.generate(prompt, max_new_tokens=3).token_ids == expected


@pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")
def test_a_lock_that_the_forking_thread_holds_is_still_its_own_in_the_child():
    lock = ForkSafeLock()

    def work():
        free = Event()
        other = Thread(target=lambda: (lock.__enter__(), free.set()), daemon=True)
        other.start()
        assert not free.wait(0.1)
        lock.__exit__()
        assert free.wait(5)

    with lock:
        assert runs_in_child(work)
