"""A judge that reads all candidates as one set, and is asked once: no second call with the answers swapped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from string import ascii_uppercase

from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import Message, render_chat
from invariant_rag.segments import Prompt, Segment, SegmentSet

from langchain_invariant_rag.chat_models import ChatInvariant

DEFAULT_CRITERIA = "helpfulness, relevance, correctness and depth"


@dataclass(frozen=True)
class Judgement:
    """What a judge says of several predictions.

    Attributes:
        best: Index of the best prediction; None where several share the first place.
        ranking: Indices of the predictions, best first. Equal ones stay in the order given.
        scores: For each prediction, the probability that it is named as the best. Equal predictions share one.
    """

    best: int | None
    ranking: tuple[int, ...]
    scores: tuple[float, ...]


class InvariantListwiseEvaluator:
    """Says which of several predictions is best, with the same verdict for every order in which they are listed.

    Every prediction is one segment, named by a letter. Letters are given out by content, so they do not tell the
    order. One pass of the model gives the probability of each letter; nothing is generated or parsed.

    Args:
        model: The judge; the embedded model where None.
        criteria: What makes a prediction good.
    """

    def __init__(self, model: ChatInvariant | None = None, *, criteria: str = DEFAULT_CRITERIA) -> None:
        self.model = ChatInvariant() if model is None else model
        self.criteria = criteria

    def evaluate(
        self,
        predictions: Sequence[str],
        *,
        input: str | None = None,  # noqa: A002 - LangChain's name for it
        reference: str | None = None,
    ) -> Judgement:
        """Compare predictions.

        Args:
            predictions: What to compare; at least one, and at most 26 different ones.
            input: The question that they answer.
            reference: A right answer.

        Raises:
            InvalidPrompt: Too few predictions, or too many.
        """
        distinct = sorted(set(predictions))
        if not 1 <= len(distinct) <= len(ascii_uppercase):
            raise InvalidPrompt(
                f"expected 1 to {len(ascii_uppercase)} different predictions, got {len(distinct)}",
                hint="Compare the best of several groups.",
            )
        letters = dict(zip(distinct, ascii_uppercase, strict=False))
        candidates = SegmentSet(Segment(text, title=letters[text]) for text in dict.fromkeys(predictions))
        lm = self.model.lm
        logprobs = lm.score(self._prompt(candidates, input, reference), list(letters.values()))
        total = math.fsum(map(math.exp, logprobs))
        share = {text: math.exp(logprob) / total for text, logprob in zip(letters, logprobs, strict=True)}
        scores = tuple(share[text] for text in predictions)
        ranking = tuple(sorted(range(len(scores)), key=lambda index: -scores[index]))
        alone = len(scores) == 1 or scores[ranking[0]] > scores[ranking[1]]
        return Judgement(ranking[0] if alone else None, ranking, scores)

    def _prompt(self, candidates: SegmentSet, question: str | None, reference: str | None) -> Prompt:
        known = [("Question", question), ("Right answer", reference)]
        facts = "".join(f"{name}: {text}\n\n" for name, text in known if text is not None)
        ask = f"Which response is the best in {self.criteria}? Answer with its letter only."
        messages: list[Message] = [
            {"role": "system", "content": "You compare responses. Their order means nothing."},
            {"role": "user", "content": [facts, candidates, f"\n{ask}"]},
        ]
        rendered = render_chat(messages, self.model.lm.tokenizer)
        before, after = rendered.texts
        return Prompt.of(before, candidates, after, query=question, rendering=response_rendering)


def response_rendering(segment: Segment) -> str:
    """The rendering of a candidate: its letter, and its text."""
    return f"Response {segment.title}: {segment.text}\n"
