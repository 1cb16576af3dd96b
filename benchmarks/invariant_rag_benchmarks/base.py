"""The parts of a benchmark: its settings, the cases that it asks a model, and the score of an output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, get_type_hints

from invariant_rag.errors import InvalidChoice, UnknownName
from invariant_rag.segments import Prompt
from invariant_rag.shown import shown

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.prompts import Message
    from transformers import PreTrainedTokenizerBase

    from invariant_rag_benchmarks.sources import DataSource

MAX_DIGITS = 18
"""Of a whole number in the settings: what fits into 64 bits."""

Record: TypeAlias = dict[str, Any]
"""The result of one case as plain data: a line of `records.jsonl`."""


@dataclass(frozen=True)
class Case:
    """One prompt of a benchmark. The cases of one question differ only in their variant.

    Attributes:
        question: Id of the question.
        variant: What differs: the gold slot, the order of the options...
        prefix: Text before the segments.
        segments: Texts of the segments, in the order of the variant.
        suffix: Text after the segments.
        gold: Accepted answers, or whatever the benchmark's `score` compares with.
        query: Query for orderings by relevance.
        system: System message of a chat prompt; empty for none.
        chat: Whether the prompt goes through the model's chat template.
        candidates: Continuations of which the likeliest is the output. Empty: the output is generated.
        group: Subset of the benchmark that the question belongs to.
        max_new_tokens: Longest output, in tokens, where it is shorter than that of the run.
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
    max_new_tokens: int | None = None

    @property
    def id(self) -> str:
        """Id of the case within its run."""
        return f"{self.question}/{self.variant}"

    def prompt(self, lm: InvariantModel) -> Prompt:
        """Return the prompt for a model: through its chat template, or as plain text."""
        if not self.chat:
            return Prompt(self.prefix, self.segments, self.suffix, query=self.query or None)
        from invariant_rag.segments import SegmentSet

        messages: list[Message] = [
            {"role": "user", "content": [self.prefix, SegmentSet(self.segments), self.suffix]},
        ]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        rendered = lm.chat_prompt(messages=messages)
        # Without the library's rendering of documents: a benchmark prescribes the text of its segments.
        return Prompt.of(rendered.texts[0], *rendered.sets, rendered.texts[1], query=self.query or None)


@dataclass(frozen=True)
class Scored:
    """A scored output.

    Attributes:
        answer: The answer in a form that is equal for equal answers, whatever the variant.
        scores: Score by metric, each from 0 to 1.
    """

    answer: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Selection:
    """Which questions a loader loads.

    Attributes:
        limit: Largest number of questions; None for all.
        seed: Seed of the sample, and of everything else that a loader draws.
        tokenizer: The model's tokenizer, for benchmarks whose chunks are counted in tokens.
    """

    limit: int | None = None
    seed: int = 0
    tokenizer: PreTrainedTokenizerBase | None = None

    def sample(self, examples: Sequence[Any]) -> list[tuple[int, Any]]:
        """Return the chosen examples with their index in the file. A sample contains every smaller one."""
        import random

        numbered = list(enumerate(examples))
        if self.limit is None or self.limit >= len(numbered):
            return numbered
        order = random.Random(self.seed).sample(range(len(numbered)), len(numbered))
        return [numbered[index] for index in order[: self.limit]]


class Load(Protocol):
    """Loads the cases of a benchmark: `load.py` in the benchmark's folder."""

    def __call__(self, source: DataSource, settings: Any, selection: Selection) -> list[Case]:
        """Read the data, and return the cases of the chosen questions."""


def no_figures(records: Iterable[Record]) -> dict[str, float]:
    """Return no figures, for benchmarks without any besides the common ones."""
    del records
    return {}


@dataclass(frozen=True)
class Benchmark:
    """A benchmark.

    Attributes:
        name: Name on the command line.
        about: The task in one line.
        paper: Source of the benchmark.
        variants: What differs between the variants of a question.
        settings: A frozen dataclass of strings, integers and booleans, with defaults.
        load: Loads the cases.
        score: Scores an output.
        metric: The main score, which summaries are about.
        max_new_tokens: Longest output, in tokens.
        figures: Computes further figures of a run from all of its records, by name.
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
    figures: Callable[[Iterable[Record]], dict[str, float]] = field(default=no_figures)

    def parse_settings(self, given: Mapping[str, Any]) -> Any:
        """Return the settings with these values, which may be strings of a command line.

        Raises:
            UnknownName: The benchmark has no such setting.
            InvalidChoice: A value is not of the setting's type.
        """
        types = get_type_hints(self.settings)
        for name in given:
            if name not in types:
                raise UnknownName(f"setting of {self.name}", name, types)
        return self.settings(**{name: _convert(name, value, types[name]) for name, value in given.items()})

    def default_settings(self) -> dict[str, Any]:
        """Return the names of the settings with their defaults."""
        return {each.name: None if each.default is MISSING else each.default for each in fields(self.settings)}


def _convert(name: str, value: Any, wanted: type) -> Any:
    if isinstance(value, wanted) and isinstance(value, bool) == (wanted is bool):
        return value
    text = value.strip() if isinstance(value, str) else shown(value)
    if wanted is bool and text.lower() in {"true", "yes", "on", "1", "false", "no", "off", "0"}:
        return text.lower() in {"true", "yes", "on", "1"}
    if wanted is int and text.removeprefix("-").isdecimal() and len(text) <= MAX_DIGITS:
        return int(text)
    expected = "yes or no" if wanted is bool else "a whole number"
    raise InvalidChoice(f"{name}: expected {expected}, got {shown(value)}")
