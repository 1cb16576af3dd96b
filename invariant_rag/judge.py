"""A judge that reads all answers as one set, and is asked once: swapping them changes no bit of the verdict.

Two sources of bias go away by construction: the place of an answer (the set has no order), and the letter by which it
was listed (letters are given out by content). What stays: a model may prefer a letter as such. `by="letters"`, the
default, is asked for a letter, so that preference favours whichever answer comes first in the alphabet: always the same
one, but not for its merit. `by="texts"` is free of letters: it takes the log-probability with which the model goes on
with each answer's own text, divided by the number of its tokens (the sum would favour short answers). That prefers
texts that are easy to predict, so it suits short options and not long responses. Neither is right for everything:
measure both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal, TypeAlias, get_args

from invariant_rag.errors import InvalidPrompt, TokenizerRequired, UnknownName
from invariant_rag.generation.model import InvariantModel
from invariant_rag.prompts import Message, render_chat, tokenize_literal
from invariant_rag.segments import Prompt, Segment, SegmentSet

By: TypeAlias = Literal["letters", "texts"]

DEFAULT_CRITERIA = "helpfulness, relevance, correctness and depth"
SYSTEM = "You compare what you are given. The order in which it is listed means nothing."


@dataclass(frozen=True)
class Verdict:
    """What a judge says of several options. Indices point into them as they were given.

    Attributes:
        probabilities: For each option, how likely it is the best one; they sum to one. Equal options have equal ones.
        ranking: All options, best first. Of options with equal probabilities, the one whose text comes first in the
            alphabet is first; equal options stay in the order given.
        best: The options that share the first place.
        labels: The letter by which the judge knew each option; empty strings where it was not asked for letters.
            Equal options share one.
        explanation: Why, in the judge's words; None unless asked for.
    """

    probabilities: tuple[float, ...]
    ranking: tuple[int, ...]
    best: tuple[int, ...]
    labels: tuple[str, ...]
    explanation: str | None = None

    @property
    def winner(self) -> int | None:
        """The best option; None where several share the first place."""
        return self.best[0] if len(self.best) == 1 else None


class Judge:
    """Compares answers in one pass, with the same verdict for every order in which they are listed.

    The prompt is read once, and all labels (or texts) are scored behind it in one batch. Whatever method and ordering
    the model has, options reach it in the order of their texts, each distinct text once.

    Args:
        lm: The model that judges. It needs a tokenizer.
        criteria: What makes an answer good.
        by: `letters` or `texts`; see the module.

    Raises:
        UnknownName: No such way of asking.
        TokenizerRequired: The model has no tokenizer.
    """

    def __init__(self, lm: InvariantModel, *, criteria: str = DEFAULT_CRITERIA, by: By = "letters") -> None:
        if by not in get_args(By):
            raise UnknownName("way of judging", by, get_args(By))
        if lm.tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: a judge reads text")
        self.lm = lm
        self._tokenizer = lm.tokenizer
        self.criteria = criteria
        self.by = by

    def compare(
        self,
        question: str | None,
        a: str,
        b: str,
        *,
        reference: str | None = None,
        explain: bool = False,
        **kwargs: Any,
    ) -> Verdict:
        """Say which of two answers is better: `winner` is 0 for `a`, 1 for `b`, None for a tie. Equal answers tie.

        Args:
            question: What they answer; None where there is no question.
            a: An answer.
            b: Another one.
            reference: A right answer, for the judge to compare with.
            explain: Whether to ask for an explanation too, which takes a second pass.
            **kwargs: For the explanation, keywords of `InvariantModel.generate`.

        Raises:
            InvalidPrompt: An empty answer cannot be judged by its text.
        """
        return self.rank(question, [a, b], reference=reference, explain=explain, **kwargs)

    def rank(
        self,
        question: str | None,
        answers: Sequence[str],
        *,
        reference: str | None = None,
        explain: bool = False,
        **kwargs: Any,
    ) -> Verdict:
        """Rank answers by the probability of being the best. The arguments are those of `compare`.

        Raises:
            InvalidPrompt: There is no answer, or there are more than 26 different ones to give letters to.
        """
        known = [("Question", question), ("Right answer", reference)]
        facts = "".join(f"{name}: {text}\n\n" for name, text in known if text is not None)
        ask = f"Which response is the best in {self.criteria}?"
        return self._judge(_Case(response_rendering, facts, ask, question), answers, explain, kwargs)

    def choose(self, question: str, options: Sequence[str], *, explain: bool = False, **kwargs: Any) -> Verdict:
        """Choose the option that answers a question.

        Options that speak of the others ("none of the above") still see them, but there is no above.

        Args:
            question: The question.
            options: What to choose from. An option that is listed twice is one option; if it wins, both share the
                first place.
            explain: As for `compare`.
            **kwargs: As for `compare`.

        Raises:
            InvalidPrompt: There is no option, or there are more than 26 different ones to give letters to.
        """
        case = _Case(option_rendering, f"Question: {question}\n\n", "Which option answers the question?", question)
        return self._judge(case, options, explain, kwargs)

    def _judge(self, case: _Case, options: Sequence[str], explain: bool, kwargs: dict[str, Any]) -> Verdict:
        if isinstance(options, str) or not all(isinstance(each, str) for each in options):
            got = type(options).__name__ if isinstance(options, str) else [type(each).__name__ for each in options]
            raise InvalidPrompt(f"expected a list of texts to judge, got {got}", hint="Give a list of str.")
        distinct = sorted(set(options))
        if not distinct or (self.by == "letters" and len(distinct) > len(ascii_uppercase)):
            raise InvalidPrompt(
                f"expected 1 to {len(ascii_uppercase)} different options, got {len(distinct)}",
                hint='Judge(by="texts") takes any number; or compare the best of several groups.',
            )
        letters = list(ascii_uppercase[: len(distinct)]) if self.by == "letters" else [""] * len(distinct)
        asked = [Segment(text, title=letter) for text, letter in zip(distinct, letters, strict=True)]
        weights = dict(zip(distinct, self._weights(case, asked), strict=True))
        total = math.fsum(weights[text] for text in options)
        ranking = sorted(range(len(options)), key=lambda index: (-weights[options[index]], options[index]))
        first = weights[options[ranking[0]]]
        best = [segment for segment in asked if weights[segment.text] == first]
        label = dict(zip(distinct, letters, strict=True))
        return Verdict(
            probabilities=tuple(weights[text] / total for text in options),
            ranking=tuple(ranking),
            best=tuple(index for index, text in enumerate(options) if weights[text] == first),
            labels=tuple(label[text] for text in options),
            explanation=self._explanation(case, asked, best, kwargs) if explain else None,
        )

    def _weights(self, case: _Case, asked: Sequence[Segment]) -> list[float]:
        """How much speaks for each option, the best one having 1."""
        if len(asked) == 1:
            return [1.0]
        if self.by == "letters":
            ask = f"\n{case.ask} Answer with its letter only."
            logprobs = self.lm.score(self._prompt(case, asked, ask), [str(each.title) for each in asked])
        else:
            ids = [tokenize_literal(each.text, self._tokenizer) for each in asked]
            sums = self.lm.score(self._prompt(case, asked, f"\n{case.ask} Repeat it word for word."), ids)
            logprobs = [logprob / len(tokens) for logprob, tokens in zip(sums, ids, strict=True)]
        return [math.exp(logprob - max(logprobs)) for logprob in logprobs]

    def _explanation(
        self, case: _Case, asked: Sequence[Segment], best: Sequence[Segment], kwargs: dict[str, Any]
    ) -> str:
        """Ask why. The winners are a set of segments again, so their texts cannot leave the prompt."""
        said = "\nThe best:\n" if len(best) == 1 else "\nThese are equally good:\n"
        prompt = self._prompt(case, asked, said, SegmentSet(best), "\nExplain why in one or two sentences.")
        return self.lm.generate(prompt, **kwargs).text

    def _prompt(self, case: _Case, asked: Sequence[Segment], *after: str | SegmentSet) -> Prompt:
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [case.facts, SegmentSet(asked), *after]},
        ]
        rendered = render_chat(messages, self._tokenizer)
        parts: list[Any] = [part for pair in zip(rendered.texts, (*rendered.sets, ""), strict=True) for part in pair]
        return Prompt.of(*parts, query=case.question, rendering=case.rendering)


@dataclass(frozen=True)
class _Case:
    """What is asked about: how options are written, what is known, the question to the judge, the user's question."""

    rendering: Callable[[Segment], str]
    facts: str
    ask: str
    question: str | None


def response_rendering(segment: Segment) -> str:
    """The rendering of a response: its letter, if it has one, and its text."""
    return f"Response{_named(segment)}: {segment.text}\n"


def option_rendering(segment: Segment) -> str:
    """The rendering of an option: its letter, if it has one, and its text."""
    return f"Option{_named(segment)}: {segment.text}\n"


def _named(segment: Segment) -> str:
    return f" {segment.title}" if segment.title else ""
