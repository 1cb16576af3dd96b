"""What many tests compare: results within what rounding may cost, orders of a prompt, and what other threads get."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import permutations
from threading import get_ident

import torch
from torch import nn

from invariant_rag.testing.rounding import rounding


def assert_computes(expected, compute, *args, bounded=None, **kwargs):
    """Assert that a call gives what is expected, within what rounding may cost there; return what it gives.

    Args:
        expected: A tensor, numbers, or a generation, of which log-probabilities count.
        compute: What is called with `args` and `kwargs`.
        bounded: What is called for the bound instead, where rounding decides about more than numbers.
    """
    found = compute(*args, **kwargs)
    bound = rounding(bounded or compute, *args, **kwargs)
    one, other = (getattr(each, "logprobs", each) for each in (found, expected))
    if not isinstance(one, torch.Tensor):
        one, other = (torch.as_tensor(each, dtype=torch.float64) for each in (one, other))
    torch.testing.assert_close(one, other, atol=bound, rtol=0)
    return found


def gap(one, other):
    """Return the largest difference."""
    return float((one - other).abs().max())


def orders_of(prompt, step=1):
    """Return a prompt of one set in every `step`-th order of its segments, the first as it is."""
    listed = list(permutations(range(len(prompt.segments))))[::step]
    return [prompt.with_sets([prompt.segments.permuted(order)]) for order in listed]


def frequencies(values):
    """Return a rotary module of a model: inverse frequencies in a buffer."""
    module = nn.Module()
    module.register_buffer("inv_freq", torch.as_tensor(values))
    return module


def in_a_thread(call):
    """Return what a call returns in another thread, without gradients."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(torch.no_grad()(call)).result()


@contextmanager
def another_thread_at(modules, call, after=()):
    """Before these modules run in this thread, and after others, let another thread call; yield what that returns."""
    results = []
    own = get_ident()

    def intrude(*_):
        if get_ident() == own:
            results.append(in_a_thread(call))

    with ExitStack() as hooks:
        for each in modules:
            hooks.callback(each.register_forward_pre_hook(intrude).remove)
        for each in after:
            hooks.callback(each.register_forward_hook(intrude).remove)
        yield results
