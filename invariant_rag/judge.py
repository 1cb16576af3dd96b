"""Compare, rank or choose answers in one scoring pass, with a verdict that ignores the order in which they are listed.

All answers are segments of one set, and the model scores each as the best: neither the position of an answer nor the
assignment of labels (which follow the sorted texts) matters. Two sources of bias remain, the same for every order:

- `by="letters"`, the default, scores the label of each answer: a model may prefer a letter as such.
- `by="texts"` scores the text of each answer after the prompt, divided by its number of tokens. It prefers texts that
  are easy to predict, so it suits short options rather than long responses. Measure both on verdicts that you know.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import Any, Literal, TypeAlias, get_args

from invariant_rag.checks import check_flag, check_items, check_kind, check_name, check_text
from invariant_rag.errors import (
    ContextOverflow,
    InvalidChoice,
    InvalidPrompt,
    TokenizerRequired,
    UnsupportedCombination,
)
from invariant_rag.generation.model import InvariantModel
from invariant_rag.prompts import Message, render_chat, tokenize_literal
from invariant_rag.segments import Prompt, Segment, SegmentSet
from invariant_rag.shown import shown

By: TypeAlias = Literal["letters", "texts"]
Criteria: TypeAlias = str | Mapping[str, str]

DEFAULT_CRITERIA = "helpfulness, relevance, correctness and depth"
SYSTEM = "You compare what you are given. The order in which it is listed means nothing."


@dataclass(frozen=True)
class Verdict:
    """The result of a judgement. Indices point into the options in the order given."""

    probabilities: tuple[float, ...]  # of each option, that it is the best; they sum to one
    ranking: tuple[int, ...]  # indices, best first; ties are sorted by text, equal options as given
    best: tuple[int, ...]  # indices of those that share the first place
    labels: tuple[str, ...]  # letter of each option in the judge's prompt; "" with `by="texts"`
    explanation: str | None = None  # the judge's reasons, which name options by their labels

    @property
    def winner(self) -> int | None:
        """Index of the best option; None if several share the first place."""
        return self.best[0] if len(self.best) == 1 else None

    def describe(self, names: Sequence[str]) -> str:
        """Write the probabilities in full precision and, if there is one, the explanation; names are of the options."""
        names = check_items("names", names, str)
        if len(names) != len(self.probabilities):
            raise InvalidChoice(f"names: expected one for each of {len(self.probabilities)} options, got {len(names)}")
        numbers = ", ".join(f"{name} {each!r}" for name, each in zip(names, self.probabilities, strict=True))
        summary = f"Probability of being the best: {numbers}."
        if self.explanation is None:
            return summary
        labelled = ", ".join(f"{name} as {label}" for name, label in zip(names, self.labels, strict=True) if label)
        return f"{summary} With {labelled}: {self.explanation}" if labelled else f"{summary} {self.explanation}"


class Judge:
    """A judge of answers: one scoring pass of a causal LM, and the same verdict, bit for bit, for every listing order.

    Options are sorted by text and deduplicated, and all labels (or texts) are scored in one batch after one prefill.
    A prompt that is too long is refused, never trimmed.

    Args:
        lm: The model that judges. It needs a tokenizer.
        criteria: What makes an answer good, for `compare` and `rank`: a text such as `"brevity"`, or a mapping of names
            to descriptions, such as `{"brevity": "Is it short?"}`, in any order.
        by: What is scored: `letters` or `texts`; see the module.
    """

    def __init__(self, lm: InvariantModel, *, criteria: Criteria = DEFAULT_CRITERIA, by: By = "letters") -> None:
        check_judge_options(criteria, by)
        check_kind("lm", lm, InvariantModel)
        if lm.tokenizer is None:
            raise TokenizerRequired("expected a model with a tokenizer: the prompt of a judge is text")
        self.lm = lm.with_method(overflow="error")
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
        """Compare two answers: `winner` is 0 for `a`, 1 for `b`, None for a tie. Equal answers tie.

        `reference` is a right answer, for the judge to compare with. With `explain`, a second pass generates an
        explanation, for which `kwargs` are keywords of `InvariantModel.generate`.
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
        """Rank up to 26 different answers (any number, by texts) by their probability to be best; see `compare`."""
        if question is not None:
            check_text("question", question, error=InvalidPrompt)
        if reference is not None:
            check_text("reference", reference, error=InvalidPrompt)
        names, descriptions = self.criteria, None
        if isinstance(self.criteria, Mapping):
            described = sorted(self.criteria.items())
            names = ", ".join(name for name, _ in described)
            descriptions = "\n".join(f"- {name}: {text}" if text else f"- {name}" for name, text in described)
        context = {"Question: ": question, "Right answer: ": reference, "Criteria:\n": descriptions}
        task = _JudgeTask(
            context="".join(f"{heading}{text}\n\n" for heading, text in context.items() if text is not None),
            instruction=f"Which response is the best in {names}?",
            rendering=response_rendering,
            query=question,
        )
        return self._judge(task, answers, explain, kwargs)

    def choose(self, question: str, options: Sequence[str], *, explain: bool = False, **kwargs: Any) -> Verdict:
        """Choose the option that answers a question; see `rank`. The criteria are not used.

        Options have no order: one that refers to a position, such as "none of the above", refers to nothing.
        """
        check_text("question", question, error=InvalidPrompt)
        task = _JudgeTask(f"Question: {question}\n\n", "Which option answers the question?", option_rendering, question)
        return self._judge(task, options, explain, kwargs)

    def _judge(self, task: _JudgeTask, options: Sequence[str], explain: bool, generation: dict[str, Any]) -> Verdict:
        check_flag("explain", explain, error=InvalidPrompt)
        if generation and not explain:
            raise UnsupportedCombination(
                f"expected no keyword without an explanation, got {', '.join(generation)}",
                hint="Set explain=True to pass keywords on to InvariantModel.generate.",
            )
        distinct = self._distinct(options)
        labels = list(ascii_uppercase[: len(distinct)]) if self.by == "letters" else [""] * len(distinct)
        segments = [Segment(text, title=label) for text, label in zip(distinct, labels, strict=True)]
        try:
            likelihoods = dict(zip(distinct, self._likelihoods(task, segments), strict=True))
            best = [segment for segment in segments if likelihoods[segment.text] == 1]
            explanation = self._explanation(task, segments, best, generation) if explain else None
        except ContextOverflow as error:
            hint = "A judge drops and trims nothing: give fewer or shorter answers, or a model with a longer context."
            raise ContextOverflow(str(error), hint=hint) from error
        total = math.fsum(likelihoods[text] for text in options)
        label_of = dict(zip(distinct, labels, strict=True))
        return Verdict(
            probabilities=tuple(likelihoods[text] / total for text in options),
            ranking=tuple(sorted(range(len(options)), key=lambda each: (-likelihoods[options[each]], options[each]))),
            best=tuple(index for index, text in enumerate(options) if likelihoods[text] == 1),
            labels=tuple(label_of[text] for text in options),
            explanation=explanation,
        )

    def _distinct(self, options: Sequence[str]) -> list[str]:
        """Return the different options, sorted, so that neither prompt nor labels depend on the order given."""
        listed = isinstance(options, Sequence) and not isinstance(options, str)
        if not listed or not all(isinstance(each, str) for each in options):
            got = [type(each).__name__ for each in options] if listed else type(options).__name__
            raise InvalidPrompt(f"expected a list of texts to judge, got {got}", hint="Give a list of str.")
        distinct = sorted(set(options))
        if not distinct or (self.by == "letters" and len(distinct) > len(ascii_uppercase)):
            raise InvalidPrompt(
                f"expected 1 to {len(ascii_uppercase)} different options, got {len(distinct)}",
                hint='Judge(by="texts") takes any number; or compare the best of several groups.',
            )
        return distinct

    def _likelihoods(self, task: _JudgeTask, segments: Sequence[Segment]) -> list[float]:
        """Return how likely each option is the best, relative to the most likely one, which has 1."""
        if len(segments) == 1:
            return [1.0]
        if self.by == "letters":
            prompt = self._prompt(task, segments, f"\n{task.instruction} Answer with its letter only.")
            logprobs = self.lm.score(prompt, [str(segment.title) for segment in segments])
        else:
            prompt = self._prompt(task, segments, f"\n{task.instruction} Repeat it word for word.")
            ids = [tokenize_literal(segment.text, self._tokenizer) for segment in segments]
            sums = self.lm.score(prompt, ids)
            logprobs = [logprob / len(tokens) for logprob, tokens in zip(sums, ids, strict=True)]
        return [math.exp(logprob - max(logprobs)) for logprob in logprobs]

    def _explanation(
        self, task: _JudgeTask, segments: Sequence[Segment], best: Sequence[Segment], generation: dict[str, Any]
    ) -> str:
        """Generate why these are the best: a second set of segments, so their text stays literal."""
        result = "\nThe best:\n" if len(best) == 1 else "\nThese are equally good:\n"
        prompt = self._prompt(task, segments, result, SegmentSet(best), "\nExplain why in one or two sentences.")
        return self.lm.generate(prompt, **generation).text

    def _prompt(self, task: _JudgeTask, segments: Sequence[Segment], *after: str | SegmentSet) -> Prompt:
        messages: list[Message] = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": [task.context, SegmentSet(segments), *after]},
        ]
        rendered = render_chat(messages, self._tokenizer)
        parts: list[Any] = [part for pair in zip(rendered.texts, (*rendered.sets, ""), strict=True) for part in pair]
        return Prompt.of(*parts, query=task.query, rendering=task.rendering)


@dataclass(frozen=True)
class _JudgeTask:
    context: str  # before the options: question, reference answer, criteria
    instruction: str  # the question to the judge, after the options
    rendering: Callable[[Segment], str]
    query: str | None  # what relevance orderings compare the options with


def check_judge_options(criteria: Criteria, by: By) -> None:
    """Raise the errors of a `Judge` for these options, before a model is loaded."""
    check_name("way of judging", by, get_args(By))
    texts = [*criteria.keys(), *criteria.values()] if isinstance(criteria, Mapping) else [criteria]
    if not all(isinstance(text, str) for text in texts) or not criteria:
        raise InvalidPrompt(
            f"expected criteria as a text or a mapping of names to descriptions, got {shown(criteria)}",
            hint='For example "brevity", or {"brevity": "Is it short?", "depth": ""}.',
        )


def response_rendering(segment: Segment) -> str:
    """Render a response with its label, which is its title."""
    return f"Response {segment.title}: {segment.text}\n" if segment.title else f"Response: {segment.text}\n"


def option_rendering(segment: Segment) -> str:
    """Render an option with its label, which is its title."""
    return f"Option {segment.title}: {segment.text}\n" if segment.title else f"Option: {segment.text}\n"
