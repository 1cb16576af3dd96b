"""Systems of known behaviour, and questions for them."""

import random

from invariant_rag.orderings import Given


class Pretended(Given):
    """Says that it is invariant, and keeps the order given."""

    name = "pretended"
    invariant = True


def records(count=24, size=4):
    """Questions of which one segment, not always the same, holds the answer; no two segments are equal."""
    found = []
    for number in range(count):
        segments = [f"Nothing {number} {place}." for place in range(size)]
        segments[number % size] = f"Number {number} is right{number}."
        fields = {"question": f"What is number {number}?", "segments": segments, "answers": [f"right{number}"]}
        found.append({"id": f"q{number}", **fields})
    return found


def first(question, segments):
    return segments[0].text


def last(question, segments):
    return segments[-1].text


def interrupted(question, segments):
    raise KeyboardInterrupt


def symmetric(question, segments):
    """Answer from the right segment, wherever it is."""
    return next(segment.text for segment in segments if "right" in segment.text)


def noisy(system, share, *, cached=False, seed=0):
    """Return a system that answers "wrong" by chance; behind a cache, equal calls get equal answers."""
    source, cache = random.Random(seed), {}

    def answer(question, segments):
        key = (question, tuple(each.text for each in segments)) if cached else len(cache)
        return cache.setdefault(key, "wrong" if source.random() < share else system(question, segments))

    return answer


def where_first(fail, system):
    """Return a system that fails where the right segment comes first."""
    return lambda question, segments: fail() if "right" in segments[0].text else system(question, segments)


def listening(system, calls):
    """Return a system whose calls are kept, with their documents."""

    def answer(question, segments):
        calls.append((question, *(each.text for each in segments)))
        return system(question, segments)

    return answer
