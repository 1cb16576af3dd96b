"""Claims about processes that are forked while another thread generates."""

from __future__ import annotations

import os
import signal
import time
import warnings
from threading import Event, Thread
from typing import Any

import pytest
import torch

from invariant_rag import InvariantModel
from invariant_rag.locks import ForkSafeLock

pytestmark = pytest.mark.skipif(not hasattr(os, "register_at_fork"), reason="this system has no fork")


def runs_in_child(work: Any, seconds: float = 20.0) -> bool:
    """Whether a forked process does some work, in time and without an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 says what these tests are about
        child = os.fork()
    if not child:
        try:
            work()
        except BaseException:  # noqa: BLE001 - the parent goes on; this process must end here
            os._exit(1)
        os._exit(0)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_model_generates_in_a_child_that_was_forked_while_another_thread_generates(model: InvariantModel) -> None:
    prompt = model.chat_prompt("q", ["a", "b"])
    expected = model.generate(prompt, max_new_tokens=3).token_ids
    begun, go = Event(), Event()

    def wait(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        begun.set()
        go.wait(30)
        return scores

    def generate() -> None:
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


def test_a_lock_that_the_forking_thread_holds_is_still_its_own_in_the_child() -> None:
    lock = ForkSafeLock()

    def work() -> None:
        free = Event()
        other = Thread(target=lambda: (lock.__enter__(), free.set()), daemon=True)
        other.start()
        assert not free.wait(0.1)
        lock.__exit__()
        assert free.wait(5)

    with lock:
        assert runs_in_child(work)
