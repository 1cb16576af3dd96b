"""Claims about asking in many orders."""

from contextlib import nullcontext
from typing import ClassVar

import pytest

from invariant_rag import Prompt
from invariant_rag.audit.order_check import check_order
from invariant_rag.errors import InvalidPrompt
from invariant_rag.orderings import Given

PROMPT = Prompt("Documents: ", ["salt and copper ", "the river Senn ", "a mill in Brenn ", "noon "], "Where? ")


class Pretended(Given):
    """Says that it is invariant, and keeps the order given."""

    name: ClassVar[str] = "pretended"
    invariant: ClassVar[bool] = True


def test_an_invariant_model_gives_one_output_and_the_plain_model_several(model):
    steps = []
    told = nullcontext(lambda: steps.append(None))
    check = check_order(model, PROMPT, 6, progress=lambda label, total: told, max_new_tokens=8)
    assert (check.promised, check.identical, check.broken) == (True, True, False)
    assert [count for _, count in check.answers] == [7]
    assert check.plain_distinct >= len(check.plain_answers) > 1
    assert sum(count for _, count in check.plain_answers) == 7
    assert len(steps) == 14
    with pytest.raises(InvalidPrompt, match="at least 1, got 0"):
        check_order(model, PROMPT, 0)


def test_a_model_that_promises_nothing_breaks_nothing_and_a_broken_promise_is_seen(model):
    # One token: the order changes its probability long before it changes the token.
    plain = model.with_method("sequential", ordering="given")
    first, again, other = (check_order(plain, PROMPT, 4, seed=seed, max_new_tokens=1) for seed in (1, 1, 2))
    assert (first.promised, first.identical, first.broken) == (False, False, False)
    assert first.answers == first.plain_answers
    assert first.distinct > len(first.answers)
    assert first == again != other
    two = check_order(plain, Prompt("Documents: ", ["x ", "yy "], "Where? "), 4, max_new_tokens=1)
    assert (two.distinct, two.answers) == (2, (("B", 5),))  # the same token, with another probability
    broken = check_order(model.with_method("rotor", ordering=Pretended()), PROMPT, 4, max_new_tokens=1)
    assert (broken.promised, broken.broken, broken.identical) == (True, True, False)
