"""What a benchmark is: cases to ask, and how an output is scored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, get_type_hints

from invariant_rag.errors import InvalidChoice, UnknownName
from invariant_rag.segments import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.evaluation.benchmarks.sources import Source
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.prompts import Message

Record: TypeAlias = dict[str, Any]
"""What is written down about one answered case: plain data, the same wherever it was computed."""


@dataclass(frozen=True)
class Case:
    """One prompt to ask. The cases of one question differ in their variant only.

    Attributes:
        question: Id of the question.
        variant: What was changed: the gold slot, the order of the options...
        prefix: Text before the segments.
        segments: The segments as the model reads them, in the order of the variant.
        suffix: Text after the segments.
        gold: Accepted answers, or whatever the benchmark's `score` compares with.
        query: What relevance orderings compare segments with.
        system: System message of a chat prompt; empty for none.
        chat: Whether the texts go through the model's chat template.
        candidates: Continuations to choose from by likelihood. Empty: the answer is generated.
        group: Subset of the benchmark that the question belongs to.
    """

    question: str
    variant: str
    prefix: str
    segments: tuple[str, ...]
    suffix: str
    gold: tuple[str, ...]
    query: str = ""
    system: str = ""
    chat: bool = True
    candidates: tuple[str, ...] = ()
    group: str = ""

    @property
    def id(self) -> str:
        """Name of the case within its run."""
        return f"{self.question}/{self.variant}"

    def prompt(self, lm: InvariantModel) -> Prompt:
        """Return the prompt for this model: through its chat template, or as plain text."""
        if not self.chat:
            return Prompt(self.prefix, self.segments, self.suffix, query=self.query or None)
        from invariant_rag.segments import SegmentSet

        messages: list[Message] = [
            {"role": "user", "content": [self.prefix, SegmentSet(self.segments), self.suffix]},
        ]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        rendered = lm.chat_prompt(messages=messages)
        # The segments are written as they are: a rendering of its own is part of what a benchmark prescribes.
        return Prompt.of(rendered.texts[0], *rendered.sets, rendered.texts[1], query=self.query or None)


@dataclass(frozen=True)
class Scored:
    """What came out of an output.

    Attributes:
        answer: What was answered, so written that equal answers are equal strings whatever the variant.
        scores: Score by metric, each from 0 to 1.
    """

    answer: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Selection:
    """Which questions a loader makes cases of.

    Attributes:
        limit: The most questions; None for all.
        seed: Seed of that sample, and of everything else that a loader draws.
        tokenizer: The model's tokenizer, for benchmarks whose segments are counted in tokens.
    """

    limit: int | None = None
    seed: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None

    def of(self, records: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return the chosen records with their places in the file. A larger limit contains every smaller one."""
        import random

        numbered = list(enumerate(records))
        if self.limit is None or self.limit >= len(numbered):
            return numbered
        order = random.Random(self.seed).sample(range(len(numbered)), len(numbered))
        return [numbered[index] for index in order[: self.limit]]


class Load(Protocol):
    """Makes the cases of a benchmark: `load.py` in every benchmark's folder."""

    def __call__(self, source: Source, settings: Any, selection: Selection) -> list[Case]:
        """Read the source, and return the cases of the chosen questions."""


def nothing_more(records: Iterable[Record]) -> dict[str, float]:
    """The figures of a benchmark that has none besides the common ones."""
    del records
    return {}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: Name on the command line.
        about: What is asked, in one line.
        paper: Where it comes from.
        variants: What the variants of a question are.
        settings: A frozen dataclass of strings, integers and booleans, with defaults.
        load: Makes the cases.
        score: Scores an output.
        metric: The score that summaries are about.
        max_new_tokens: Longest output, in tokens.
        figures: Further figures from all records of a run, by name.
    """

    name: str
    about: str
    paper: str
    variants: str
    settings: type
    load: Load
    score: Callable[[Case, str], Scored]
    metric: str
    max_new_tokens: int = 100
    figures: Callable[[Iterable[Record]], dict[str, float]] = field(default=nothing_more)

    def configured(self, given: Mapping[str, Any]) -> Any:
        """Return the settings with what was given, as values or as words of a command line.

        Raises:
            UnknownName: The benchmark has no such setting.
            InvalidChoice: A value is not of the setting's type.
        """
        types = get_type_hints(self.settings)
        for name in given:
            if name not in types:
                raise UnknownName(f"setting of {self.name}", name, types)
        return self.settings(**{name: _converted(name, value, types[name]) for name, value in given.items()})

    def described_settings(self) -> dict[str, Any]:
        """Return the settings' names with their defaults."""
        return {each.name: None if each.default is MISSING else each.default for each in fields(self.settings)}


def _converted(name: str, value: Any, wanted: type) -> Any:
    if isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool):
        return value
    text = str(value).strip()
    if wanted is bool and text.lower() in {"true", "yes", "on", "1", "false", "no", "off", "0"}:
        return text.lower() in {"true", "yes", "on", "1"}
    if wanted is int and text.removeprefix("-").isdecimal():
        return int(text)
    raise InvalidChoice(f"{name}: expected {'yes or no' if wanted is bool else 'a whole number'}, got {value!r}")
