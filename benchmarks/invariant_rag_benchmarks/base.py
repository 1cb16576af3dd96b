"""The parts of a benchmark: its settings, the cases that it runs on a model, and the score of an output."""

from __future__ import annotations

import inspect
import random
import tomllib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar, get_args

from invariant_rag.checks import check_name
from invariant_rag.errors import InvalidChoice
from invariant_rag.segments import Prompt, SegmentSet
from invariant_rag.shown import shown
from pydantic import BaseModel, ConfigDict, PlainValidator, ValidationError

from invariant_rag_benchmarks.errors import InvalidDataset

if TYPE_CHECKING:
    from invariant_rag.generation.model import InvariantModel
    from invariant_rag.prompts import Message
    from transformers import PreTrainedTokenizerBase

    from invariant_rag_benchmarks.data import DataSource

Record: TypeAlias = dict[str, Any]
"""The result of one case as plain data: a line of `records.jsonl`."""


class TaskSettings(BaseModel):
    """Settings of a benchmark: texts, whole numbers and flags, each with a default and a description."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Example(BaseModel):
    """A record of a benchmark's file, as far as the benchmark parses it."""

    model_config = ConfigDict(frozen=True)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected a text")
    return value


Text: TypeAlias = Annotated[str, PlainValidator(_text)]
"""A text of a record as it is: pydantic's own texts have no half of a surrogate pair, which JSON can hold."""

S = TypeVar("S", bound=TaskSettings)
E = TypeVar("E", bound=Example)
T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """One prompt of a benchmark. The cases of one question differ only in their variant."""

    question: str  # its id
    variant: str = ""  # what differs: the gold slot, the order of the options...
    prefix: str = ""
    segments: tuple[str, ...] = ()  # in the order of the variant
    suffix: str = ""
    gold: tuple[str, ...] = ()  # accepted answers, or whatever the benchmark's `score` compares with
    query: str = ""  # for orderings by relevance
    system: str = ""  # message of a chat prompt, if any
    chat: bool = True  # whether the prompt goes through the model's chat template
    candidates: tuple[str, ...] = ()  # of which the likeliest is the output; empty: the output is generated
    group: str = ""  # subset of the benchmark that the question belongs to
    max_new_tokens: int | None = None  # where it is less than that of the run

    @property
    def id(self) -> str:
        """Id of the case within its run."""
        return f"{self.question}/{self.variant}"

    def in_orders(self, orders: Mapping[str, Iterable[str]]) -> Iterator[Case]:
        """Yield the cases of the question: its segments in each order, by variant."""
        return (replace(self, variant=variant, segments=tuple(each)) for variant, each in orders.items())

    def prompt(self, lm: InvariantModel) -> Prompt:
        """Return the prompt for a model: through its chat template, or as plain text."""
        if not self.chat:
            return Prompt(self.prefix, self.segments, self.suffix, query=self.query or None)
        messages: list[Message] = [{"role": "user", "content": [self.prefix, SegmentSet(self.segments), self.suffix]}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        rendered = lm.chat_prompt(messages=messages)
        # Without the library's rendering of documents: a benchmark prescribes the text of its segments.
        return Prompt.of(rendered.texts[0], *rendered.sets, rendered.texts[1], query=self.query or None)


@dataclass(frozen=True)
class Scored:
    """A scored output; its scores are from 0 to 1."""

    answer: str  # the same for equal answers, whatever the variant
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Selection:
    """Which questions are loaded."""

    limit: int | None = None  # their largest number
    seed: int = 0  # of the sample, and of all else that is drawn
    load_tokenizer: Callable[[], PreTrainedTokenizerBase | None] = lambda: None  # for chunks counted in tokens

    def sample(self, examples: Sequence[T]) -> list[tuple[int, T]]:
        """Return the chosen examples with their index. A sample contains every smaller one."""
        numbered = list(enumerate(examples))
        if self.limit is None or self.limit >= len(numbered):
            return numbered
        return random.Random(self.seed).sample(numbered, len(numbered))[: self.limit]

    def parse(self, kind: type[E], records: Sequence[Any], of: str = "") -> Iterator[tuple[int, E]]:
        """Yield the chosen records with their index, as `parse_example` reads them."""
        for index, record in self.sample(records):
            yield index, parse_example(kind, record, f"example {index}{of}")


class Benchmark(ABC, Generic[S]):
    """A benchmark: a class in `tasks/`, whose docstring is the task in one line, with a page NAME.md beside it."""

    name: ClassVar[str]  # on the command line
    paper: ClassVar[str]
    variants: ClassVar[str]  # what differs between the variants of a question
    settings: type[S]  # the parameter of the class
    metric: ClassVar[str] = "accuracy"  # the main score, which summaries are about
    max_new_tokens: ClassVar[int] = 100  # longest output

    def __init_subclass__(cls) -> None:
        (cls.settings,) = get_args(vars(cls)["__orig_bases__"][0])

    @property
    def about(self) -> str:
        """The task in one line."""
        return inspect.cleandoc(type(self).__doc__ or "").partition("\n")[0]

    @abstractmethod
    def read(self, source: DataSource, settings: S, selection: Selection) -> Iterator[Case]:
        """Yield the cases of the chosen questions."""

    @abstractmethod
    def score(self, case: Case, output: str) -> Scored:
        """Score an output."""

    def figures(self, _records: Iterable[Record]) -> dict[str, float]:
        """Return figures besides the common ones, by name, from all records of a run."""
        return {}

    def load(self, source: DataSource, settings: S, selection: Selection) -> list[Case]:
        """Return the cases of the chosen questions.

        Raises:
            InvalidDataset: A record is not in the benchmark's format, or its gold answer can be compared with nothing.
            DatasetUnavailable: The data are not here and cannot be downloaded.
        """
        try:
            cases = list(self.read(source, settings, selection))
            for case in cases:
                try:
                    self.score(case, case.candidates[0] if case.candidates else "Answer: 1")
                except (LookupError, ValueError) as error:
                    raise InvalidDataset(
                        f"question {shown(case.question)}: {shown(case.gold)} is none that {self.name} compares with: "
                        f"{error}"
                    ) from error
        except InvalidDataset as error:
            files = ", ".join(source.digests)
            raise InvalidDataset(str(error) if files in str(error) else f"{files}: {error}", hint=error.hint) from error
        return cases

    def parse_settings(self, values: Mapping[str, Any]) -> S:
        """Return the settings with these values, which may be strings; refuse unknown names and wrong values."""
        known = self.settings.model_fields
        for name, value in values.items():
            check_name(f"setting of {self.name}", name, known)
            if isinstance(value, bool) and known[name].annotation is not bool:
                raise InvalidChoice(f"{name}: expected no flag, got {value}")
        try:
            return self.settings(**values)
        except ValidationError as error:
            raise InvalidChoice(_first(error)) from None


def declared(name: str) -> dict[str, Any]:
    """Return what NAME.toml beside this module declares."""
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def parse_example(kind: type[E], record: Any, where: str) -> E:
    """Return a record with the fields of `kind`; an `InvalidDataset` names its position, such as `example 3`."""
    try:
        return kind.model_validate(record)
    except ValidationError as error:
        raise InvalidDataset(f"{where}: {_first(error)}") from None


def _first(error: ValidationError) -> str:
    """Return the first of the errors that pydantic found, in the words of this library."""
    first = error.errors(include_url=False)[0]
    path = ".".join(map(str, first["loc"]))
    if first["type"] == "missing":
        *above, name = path.split(".")
        return f"{'.'.join(above)}{': ' if above else ''}expected a field {name!r}, got {shown(sorted(first['input']))}"
    message = first["msg"].partition(", unable")[0].removeprefix("Value error, ").replace("Input should be", "expected")
    return f"{path}: {message}, got {shown(first['input'])}" if path else f"{message}, got {shown(first['input'])}"


def parse_numbers(setting: str, described: str, count: int, default: Sequence[int] = ()) -> list[int]:
    """Parse a setting: `all`, numbers below `count` with commas between, or nothing for the default.

    >>> parse_numbers("slots", "0, 4", 5)
    [0, 4]
    """
    if described == "all" or (default and not described):
        return list(range(count) if described else default)
    words = [word.strip() for word in described.split(",")]
    if not all(word.isdecimal() and len(word) < 10 and int(word) < count for word in words):
        raise InvalidChoice(f"{setting}: expected all, or numbers from 0 to {count - 1}, got {described!r}")
    return [int(word) for word in words]
