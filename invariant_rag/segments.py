"""Segments, multisets of segments, and prompts: the data that everything else reads.

A prompt is text, a set of segments, text; or several such sets with text between them. The order in which segments
are listed carries no meaning; it is kept only so that answers can point back at "the third chunk you gave me".
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Integral, Real
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypeAlias

from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvariantRAGError

TokenIds: TypeAlias = tuple[int, ...]
Text: TypeAlias = str | TokenIds
"""Text of a prompt: a string, or token ids that are used as they are."""


def as_token_ids(values: Any, error: type[InvariantRAGError]) -> TokenIds:
    """Return `values` as a tuple of non-negative ints, or say what is not a token id."""
    if not isinstance(values, Iterable) or isinstance(values, str | bytes | Mapping):
        raise error(f"expected token ids (integers >= 0), got {type(values).__name__}")
    ids = []
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 0:
            raise error(f"expected token ids (integers >= 0), got {value!r}")
        ids.append(int(value))
    return tuple(ids)


def _canonical(value: Any) -> str:
    """Write a value as text: equal values alike, however their mappings and sets are listed."""
    if isinstance(value, Mapping):
        pairs = sorted(f"{_canonical(key)}: {_canonical(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_canonical, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_canonical, value))}]"
    return json.dumps(value, default=str)


def _option(value: Any) -> tuple[Any, ...]:
    """Make an optional value comparable: None comes before every other."""
    return () if value is None else (value,)


@dataclass(frozen=True, eq=False)
class Segment:
    """One unit whose tokens keep their order: a retrieved chunk, an answer option, a candidate response.

    Attributes:
        text: The text. Empty when the segment is given as token ids.
        title: Shown before the text, where the prompt's rendering shows titles.
        metadata: Anything else that belongs to the chunk (source, page...). String keys. Never enters the model.
        score: The retriever's score, read by the `score` ordering. Higher is better.
        token_ids: Token ids to use as they are, instead of text.

    Raises:
        InvalidSegment: A field has the wrong type, or both text and token ids were given.
    """

    text: str = ""
    title: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict, repr=False)
    score: float | None = None
    token_ids: TokenIds | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.text, str):
            raise InvalidSegment(f"text: expected str, got {type(self.text).__name__}")
        if self.title is not None and not isinstance(self.title, str):
            raise InvalidSegment(f"title: expected str or None, got {type(self.title).__name__}")
        if not isinstance(self.metadata, Mapping) or any(not isinstance(key, str) for key in self.metadata):
            raise InvalidSegment("metadata: expected a mapping with str keys")
        if self.score is not None and (not isinstance(self.score, Real) or math.isnan(self.score)):
            raise InvalidSegment(f"score: expected a number that can be compared, got {self.score!r}")
        if self.token_ids is not None:
            if self.text or self.title:
                raise InvalidSegment("expected text or token ids, got both")
            object.__setattr__(self, "token_ids", as_token_ids(self.token_ids, InvalidSegment))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @classmethod
    def of(cls, value: Segment | str | Sequence[int]) -> Segment:
        """Return `value` as a segment: a Segment, a string, or a sequence of token ids."""
        if isinstance(value, Segment):
            return value
        if isinstance(value, str):
            return cls(value)
        if isinstance(value, Iterable) and not isinstance(value, bytes | Mapping):
            return cls(token_ids=as_token_ids(value, InvalidSegment))
        raise InvalidSegment(f"expected str, Segment or token ids, got {type(value).__name__}")

    @cached_property
    def canonical_key(self) -> tuple[Any, ...]:
        """Total order over contents: text, token ids, title, metadata, score. Equal keys are interchangeable."""
        return (
            self.text,
            _option(self.token_ids),
            _option(self.title),
            _canonical(self.metadata),
            _option(self.score),
        )

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of title and text (or token ids), in hexadecimal: the same chunk has the same hash anywhere."""
        content = [self.title, self.text, self.token_ids]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self.canonical_key == other.canonical_key

    def __hash__(self) -> int:
        return hash(self.canonical_key)

    def __reduce__(self) -> tuple[Any, ...]:
        # A mapping proxy cannot be pickled; rebuilding through the constructor can.
        return (type(self), (self.text, self.title, dict(self.metadata), self.score, self.token_ids))


class SegmentSet(Sequence[Segment]):
    """A multiset of segments: equality and hash ignore order, duplicates are kept.

    >>> SegmentSet(["b", "a"]) == SegmentSet(["a", "b"])
    True
    >>> SegmentSet(["a", "a"]) == SegmentSet(["a"])
    False
    """

    def __init__(self, segments: Iterable[Segment | str | Sequence[int]] = ()) -> None:
        if isinstance(segments, str | bytes | Segment | Mapping) or not isinstance(segments, Iterable):
            raise InvalidSegment(f"expected a collection of segments, got {type(segments).__name__}")
        self._segments = tuple(Segment.of(segment) for segment in segments)

    def canonical(self) -> SegmentSet:
        """Return the same set, listed in the order of its contents."""
        ordered: list[Segment] = sorted(self._segments, key=attrgetter("canonical_key"))
        return SegmentSet(ordered)

    def permuted(self, order: Sequence[int]) -> SegmentSet:
        """Return the same set, listed as `order` says (indices into this listing)."""
        if sorted(order) != list(range(len(self))):
            raise InvalidSegment(f"expected a permutation of 0..{len(self) - 1}, got {list(order)}")
        return SegmentSet(self._segments[index] for index in order)

    def __getitem__(self, index: Any) -> Any:
        return SegmentSet(self._segments[index]) if isinstance(index, slice) else self._segments[index]

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SegmentSet) and Counter(self._segments) == Counter(other._segments)

    def __hash__(self) -> int:
        return hash(frozenset(Counter(self._segments).items()))

    def __repr__(self) -> str:
        return f"SegmentSet({list(self._segments)!r})"


def encodable(text: str) -> str:
    r"""Return `text` with every lone surrogate, which no tokenizer can read, replaced by U+FFFD.

    >>> encodable("a\ud800b") == "a\ufffdb"
    True
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def plain_rendering(segment: Segment) -> str:
    """The text as it is; a title, if there is one, on a line of its own before it."""
    return segment.text if segment.title is None else f"{segment.title}\n{segment.text}"


def document_rendering(segment: Segment) -> str:
    """The rendering of retrieved chunks in a chat prompt. It has no number: a number would reveal an order."""
    title = "" if segment.title is None else f" (Title: {segment.title})"
    return f"Document{title}: {segment.text}\n"


@dataclass(frozen=True, init=False)
class Prompt:
    """Text, a set of segments, text; or several sets with text between them.

    Args:
        prefix: Text (or token ids) before the set.
        segments: The set: strings, `Segment`s or lists of token ids.
        suffix: Text (or token ids) after the set. It holds the question; everything generated follows it.
        query: What relevance orderings (MonoT5...) compare segments with. Defaults to the last text of the prompt.
        rendering: How a segment becomes text. A module-level function, so that prompts can be pickled.

    Attributes:
        texts: The `len(sets) + 1` texts around the sets.
        sets: The sets, in reading order.

    Raises:
        InvalidPrompt: A text is neither a string nor token ids, or both are mixed in one text.
    """

    texts: tuple[Text, ...]
    sets: tuple[SegmentSet, ...]
    query: str | None
    rendering: Callable[[Segment], str]

    def __init__(
        self,
        prefix: str | Sequence[int] = "",
        segments: Iterable[Segment | str | Sequence[int]] = (),
        suffix: str | Sequence[int] = "",
        *,
        query: str | None = None,
        rendering: Callable[[Segment], str] = plain_rendering,
    ) -> None:
        chosen = segments if isinstance(segments, SegmentSet) else SegmentSet(segments)
        self._fill((_text(prefix), _text(suffix)), (chosen,), query, rendering)

    def _fill(
        self,
        texts: tuple[Text, ...],
        sets: tuple[SegmentSet, ...],
        query: str | None,
        rendering: Callable[[Segment], str],
    ) -> None:
        for name, value in (("texts", texts), ("sets", sets), ("query", query), ("rendering", rendering)):
            object.__setattr__(self, name, value)

    @classmethod
    def of(
        cls,
        *parts: str | Sequence[int] | SegmentSet,
        query: str | None = None,
        rendering: Callable[[Segment], str] = plain_rendering,
    ) -> Prompt:
        """Build a prompt from texts and any number of `SegmentSet`s, in reading order.

        >>> Prompt.of("Rubrics:", SegmentSet(["a"]), "Answers:", SegmentSet(["b", "c"]), "Which is best?").texts
        ('Rubrics:', 'Answers:', 'Which is best?')
        """
        texts: list[Text] = [""]
        sets: list[SegmentSet] = []
        for part in parts:
            if isinstance(part, SegmentSet):
                sets.append(part)
                texts.append("")
            else:
                texts[-1] = _joined(texts[-1], _text(part))
        prompt = cls.__new__(cls)
        prompt._fill(tuple(texts), tuple(sets), query, rendering)
        return prompt

    @property
    def segments(self) -> SegmentSet:
        """Every segment of every set, in the order given. Indices in a result's `order` point into this."""
        return self.sets[0] if len(self.sets) == 1 else SegmentSet(segment for each in self.sets for segment in each)

    @property
    def prefix(self) -> Text:
        """The text before the first set."""
        return self.texts[0]

    @property
    def suffix(self) -> Text:
        """The text after the last set."""
        return self.texts[-1]

    def with_sets(self, sets: Iterable[SegmentSet]) -> Prompt:
        """Return the same prompt around other sets."""
        prompt = type(self).__new__(type(self))
        prompt._fill(self.texts, tuple(sets), self.query, self.rendering)
        if len(prompt.sets) != len(self.sets):
            raise InvalidPrompt(f"expected {len(self.sets)} sets, got {len(prompt.sets)}")
        return prompt

    def shuffled(self, random_state: random.Random) -> Prompt:
        """Return the same prompt with every set listed in a random order."""
        return self.with_sets(each.permuted(random_state.sample(range(len(each)), len(each))) for each in self.sets)


def _text(value: str | Sequence[int]) -> Text:
    return value if isinstance(value, str) else as_token_ids(value, InvalidPrompt)


def _joined(left: Text, right: Text) -> Text:
    if not left or not right:
        return left or right
    if isinstance(left, str) and isinstance(right, str):
        return left + right
    if isinstance(left, tuple) and isinstance(right, tuple):
        return left + right
    raise InvalidPrompt("expected text or token ids between two sets, got both")
