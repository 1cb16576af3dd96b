"""`assert_order_invariant`: a check of a system's own tests that the order of its documents changes no answer."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, log
from typing import Any

from invariant_rag.audit.calls import CallResult, make_calls
from invariant_rag.audit.grading import RIGHT, Grader
from invariant_rag.audit.plan import AuditCall, AuditChoices, has_orders, screen_calls
from invariant_rag.audit.questions import Question, Questions, as_retrieve_function, read_questions
from invariant_rag.audit.run import PROBED, check_extras
from invariant_rag.audit.sequential_test import ANOTHER, FIRST, OTHER
from invariant_rag.audit.systems import ToInput, as_system
from invariant_rag.checks import check_real
from invariant_rag.errors import AuditFailed, InvalidChoice, NoiseWarning
from invariant_rag.shown import counted

SHOWN = 5
"""Questions in the message of a failed assertion."""

FALSE_ALARMS = 0.02
"""How often, at most, a system that is blind to the order fails, however random its answers are."""


def assert_order_invariant(
    system: Any,
    questions: Questions,
    *,
    allowed: float = 0.0,
    retriever: Any = None,
    to_input: ToInput | None = None,
    **choices: Any,
) -> None:
    """Ask each question in today's order and two others, and assert that no order changes the outcome.

    An outcome is right or wrong where gold answers are known; else it is the answer, but for its wording. An order that
    gives another outcome is repeated, and so is today's, until one of the two outcomes is not reproduced: then it was
    chance. If answers are coin flips, a round reproduces both outcomes with probability 1/4, so a few rounds keep false
    alarms below one run in 50. Each round adds spaces to a document, to bypass caches and seeds.

    >>> def first(question, segments):
    ...     return segments[0].text
    >>> questions = [{"question": "Who?", "segments": ["Ann did.", "Bo did."], "answers": ["Ann"]}]
    >>> assert_order_invariant(first, questions)
    Traceback (most recent call last):
        ...
    AssertionError: the order of the documents changes the outcome of 1 of 1 question, again and again
    Who?: today 'Ann did.' (right); with the documents in the order 2 1 'Bo did.' (wrong)

    Args:
        system: Anything that an audit takes: a function `(question, segments) -> answer`, a Runnable, a URL...
        questions: Questions with their segments: a file, or mappings.
        allowed: Share of questions that may flip.
        retriever: Finds the segments of questions that have none.
        to_input: Makes the input of the system from question and segments.
        choices: Choices of an audit: `metric`, `judge`, `k`, `seed`, `workers`, `retries`, `fields`...

    Raises:
        AssertionError: More questions flip, again and again.
        InvalidQuestion: A question cannot be read.
        AuditFailed: The system never answers, or does not read its documents.

    Warns:
        NoiseWarning: Outcomes change by chance.
        FieldWarning: Questions have checks that take a judge, and there is none.
    """
    __tracebackhide__ = True  # pytest shows the call, and not this function
    check_extras()
    if not 0 <= check_real("allowed", allowed) <= 1:
        raise InvalidChoice(f"allowed: expected a share from 0 to 1, got {allowed}")
    chosen = AuditChoices().changed(choices)
    wrapped = as_system(system, to_input, chosen.generation)
    retrieve = wrapped.retrieve if retriever is None else as_retrieve_function(retriever, chosen.k)
    parsed = [each for each in read_questions(questions, retrieve, chosen.fields) if has_orders(each)]
    grader = Grader(parsed, chosen.metric, chosen.judge)

    def outcomes(calls: Sequence[AuditCall], answered: bool, retries: int) -> list[tuple[int, str | None]]:
        """Return class and text of the answer to each call; raise where none is ever `answered`."""
        results: dict[str, CallResult] = {}

        def bound(call: AuditCall) -> Callable[[], Any]:
            return lambda: wrapped.ask(call.question, call.segments)

        jobs = [(str(number), bound(call)) for number, call in enumerate(calls)]
        patience = {"retries": retries, "workers": chosen.workers}
        make_calls(jobs, lambda each: results.__setitem__(each.key, each), answered=answered, **patience)
        texts = [results[key].text for key, _ in jobs]
        return [(grader.classes(call.question, [text])[0], text) for call, text in zip(calls, texts, strict=True)]

    planned = [screen_calls(question, index, 0, chosen.seed) for index, question in enumerate(parsed)]
    calls = [calls[column] for calls in planned for column in (FIRST, OTHER, ANOTHER)]
    unchanged = outcomes(calls, False, chosen.retries)
    pairs = [
        (calls[index], calls[index + step], unchanged[index], unchanged[index + step])
        for index in range(0, len(calls), 3)
        for step in (1, 2)
        if unchanged[index][0] != unchanged[index + step][0]
    ]
    flipping = {today.index for today, *_ in pairs}
    probed = slice(0, 3 * PROBED, 3)
    if not flipping and outcomes([each.blanked() for each in calls[probed]], True, 0) == unchanged[probed]:
        message = "the first answers are the same with other texts in the documents, so nothing was tested"
        raise AuditFailed(message, hint="Does the system read the documents it is given? Ask what no model knows.")
    for number in range(rounds(len(parsed))):
        more = [replace(call, spaces=number + 1) for pair in pairs for call in pair[:2]]
        again = outcomes(more, True, chosen.retries)
        came = zip(pairs, again[::2], again[1::2], strict=True)
        pairs = [pair for pair, one, other in came if (one[0], other[0]) == (pair[2][0], pair[3][0])]
    confirmed = {pair[0].index: pair for pair in pairs}
    if len(confirmed) > allowed * len(parsed):
        count = f"{len(confirmed):,} of {counted(len(parsed), 'question')}"
        first = f"the order of the documents changes the outcome of {count}, again and again"
        lines = [_line(parsed[index], *pair[1:], grader) for index, pair in list(confirmed.items())[:SHOWN]]
        raise AssertionError("\n".join([first, *lines]))
    if flipping - confirmed.keys():
        warnings.warn(
            NoiseWarning(
                f"the outcome of {len(flipping - confirmed.keys()):,} of {counted(len(parsed), 'question')} changes by "
                "chance: asked again in the same order, it is another one"
            ),
            stacklevel=2,
        )


def rounds(questions: int) -> int:
    """Return how often a flip must come back, so that blind systems fail in `FALSE_ALARMS` of the runs at most.

    Two orders of each question differ from today's by chance at most half of the time, and each round repeats both
    outcomes by chance at most a quarter of the time.

    >>> rounds(20), rounds(200)
    (5, 7)
    """
    return ceil(log(max(questions, 1) / FALSE_ALARMS) / log(4))


def _line(
    question: Question, other: AuditCall, today: tuple[int, str | None], changed: tuple[int, str | None], grader: Grader
) -> str:
    def described(outcome: tuple[int, str | None]) -> str:
        verdict = f" ({'right' if outcome[0] == RIGHT else 'wrong'})" if grader.is_scored(question) else ""
        return "no answer" if outcome[1] is None else f"{outcome[1]!r}{verdict}"

    order = " ".join(str(index + 1) for index in other.order)
    return f"{question.text}: today {described(today)}; with the documents in the order {order} {described(changed)}"
