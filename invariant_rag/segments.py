"""Data types of the library: `Segment`, `SegmentSet` (a multiset of segments) and `Prompt`.

The listing order of segments has no meaning. It is kept so that results can refer to segments by their index.
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
from types import MappingProxyType
from typing import Any, TypeAlias

from invariant_rag.checks import check_items, check_kind, is_iterable
from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvariantRAGError
from invariant_rag.shown import shown

TokenIds: TypeAlias = tuple[int, ...]
Text: TypeAlias = str | TokenIds
"""Text of a prompt: a string, or token ids that are used as they are."""

_LARGEST_ID = 2**31 - 1  # tokenizers hold ids in 32 bits


def as_token_ids(values: Any, error: type[InvariantRAGError]) -> TokenIds:
    """Return token ids as a tuple; raise `error` for what is no iterable of integers >= 0."""
    if not is_iterable(values) or isinstance(values, str | bytes | Mapping):
        raise error(f"expected token ids (integers >= 0), got {type(values).__name__}")
    ids = []
    for value in values:
        if not isinstance(value, Integral) or isinstance(value, bool) or int(value) < 0:
            raise error(f"expected token ids (integers >= 0), got {shown(value)}")
        if int(value) > _LARGEST_ID:
            raise error(f"expected token ids below the size of a vocabulary, got {shown(value)}")
        ids.append(int(value))
    return tuple(ids)


_SCALARS = frozenset({str, int, float, bool, type(None)})
_written = json.JSONEncoder(default=str).encode


def canonical_json(value: Any) -> str:
    """Serialize a value so that the iteration order of its mappings and sets does not matter."""
    if isinstance(value, Mapping):
        if _SCALARS.issuperset(map(type, value.values())) and {str}.issuperset(map(type, value)):
            return _written(dict(sorted(value.items())))
        pairs = sorted([f"{canonical_json(key)}: {canonical_json(each)}" for key, each in value.items()])
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(canonical_json, value)))}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(canonical_json, value))}]"
    return _written(value)


def _is_score(value: Any) -> bool:
    try:
        return isinstance(value, Real) and not math.isnan(value)
    except OverflowError:  # an int beyond every float
        return False


@dataclass(frozen=True, eq=False)
class Segment:
    """One unit whose tokens keep their order: a retrieved chunk, an answer option, a candidate response.

    Attributes:
        text: The text. Empty when the segment is given as token ids.
        title: Title of the chunk. `Prompt.rendering` decides whether and how it is shown.
        metadata: Other fields of the chunk (source, page...), with str keys. Never part of the model's input.
        score: The retriever's score, used by the `score` ordering. Higher is better.
        token_ids: Token ids to use instead of text; they are not tokenized again.
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
        fits = isinstance(self.metadata, Mapping)
        for key in self.metadata if fits else ():  # a comprehension is a call more
            fits = fits and isinstance(key, str)
        if not fits:
            raise InvalidSegment(f"metadata: expected a mapping with str keys, got {shown(self.metadata)}")
        if self.score is not None and not _is_score(self.score):
            raise InvalidSegment(f"score: expected a number other than nan, got {shown(self.score)}")
        if self.token_ids is not None:
            if self.text or self.title:
                raise InvalidSegment("expected text or token ids, got both")
            object.__setattr__(self, "token_ids", as_token_ids(self.token_ids, InvalidSegment))
        object.__setattr__(self, "metadata", MappingProxyType(dict(self.metadata)))

    @classmethod
    def of(cls, value: Segment | str | Sequence[int]) -> Segment:
        """Build a segment from a Segment (returned unchanged), a string, or a sequence of token ids."""
        if isinstance(value, Segment):
            return value
        if isinstance(value, str):
            return cls(value)
        if is_iterable(value) and not isinstance(value, bytes | Mapping):
            return cls(token_ids=as_token_ids(value, InvalidSegment))
        raise InvalidSegment(f"expected str, Segment or token ids, got {type(value).__name__}")

    @cached_property
    def canonical_key(self) -> tuple[Any, ...]:
        """Sort key that depends on the content alone: text, token ids, title, metadata, score.

        Segments with equal keys are equal.
        """
        try:
            metadata = canonical_json(self.metadata)
        except RecursionError as error:
            raise InvalidSegment("metadata: expected values nested less deeply") from error
        except ValueError as error:  # a circle, or an int with thousands of digits
            raise InvalidSegment(f"metadata: expected values that can be written: {error}") from error
        title = () if self.title is None else (self.title,)
        score = () if self.score is None else (self.score,)
        return (self.text, () if self.token_ids is None else (self.token_ids,), title, metadata, score)

    @cached_property
    def content_hash(self) -> str:
        """SHA-256 of title, text and token ids, in hexadecimal; stable across processes and machines."""
        content = [self.title, self.text, self.token_ids]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segment) and self.canonical_key == other.canonical_key

    def __hash__(self) -> int:
        return hash(self.canonical_key)

    def __reduce__(self) -> tuple[Any, ...]:
        # MappingProxyType cannot be pickled, so the segment is rebuilt through its constructor.
        fields = (self.text, self.title, dict(self.metadata), self.score, self.token_ids)
        return (type(self), fields)


@dataclass(frozen=True)
class Slot:
    """Text around one segment of a set, such as `[1] ` before it.

    Slots stay where they are when the segments of their set are reordered, so running numbers count in any order.
    """

    before: str = ""
    after: str = ""
    number: str | None = None  # the running number or letter in these texts

    def render(self, segment: Segment) -> str:
        """Return the text of a segment in this slot."""
        return self.before + segment.text + self.after


class SegmentSet(Sequence[Segment]):
    """A multiset of segments: equality and hash ignore order, duplicates are kept.

    >>> SegmentSet(["b", "a"]) == SegmentSet(["a", "b"])
    True
    >>> SegmentSet(["a", "a"]) == SegmentSet(["a"])
    False

    Args:
        segments: The segments: strings, `Segment`s or lists of token ids.
        slots: Text around each segment, in the order of the prompt. None: `Prompt.rendering` renders the segments.
    """

    def __init__(
        self, segments: Iterable[Segment | str | Sequence[int]] = (), *, slots: Iterable[Slot] | None = None
    ) -> None:
        if isinstance(segments, str | bytes | Segment | Mapping) or not is_iterable(segments):
            raise InvalidSegment(f"expected a collection of segments, got {type(segments).__name__}")
        self._segments = tuple([each if isinstance(each, Segment) else Segment.of(each) for each in segments])
        self.slots: tuple[Slot, ...] | None = None
        if slots is not None:
            self.slots = tuple(check_items("slots", slots, Slot, error=InvalidSegment))
            if len(self.slots) != len(self):
                raise InvalidSegment(f"expected one slot per segment, got {len(self.slots)} for {len(self)}")
            if any(each.token_ids is not None for each in self):
                raise InvalidSegment("expected segments with text, which slots put in a place; got one with token ids")

    def permuted(self, order: Sequence[int]) -> SegmentSet:
        """Return the same set with its segments listed in the order of these indices."""
        listed = check_items("order", order, Integral, error=InvalidSegment)
        if sorted(listed) != list(range(len(self))):
            raise InvalidSegment(f"expected a permutation of 0..{len(self) - 1}, got {shown(listed)}")
        return SegmentSet((self._segments[index] for index in listed), slots=self.slots)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return SegmentSet(self._segments[index], slots=None if self.slots is None else self.slots[index])
        return self._segments[index]

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, SegmentSet)
            and Counter(self._segments) == Counter(other._segments)
            and self.slots == other.slots
        )

    def __hash__(self) -> int:
        return hash((frozenset(Counter(self._segments).items()), self.slots))

    def __repr__(self) -> str:
        return f"SegmentSet({list(self._segments)!r})"


def is_invariant(sizes: Iterable[int], *, sorts: bool = True, recognized: bool = True) -> bool | None:
    """Return whether the order in which documents were listed cannot change what a model gets; None: no documents.

    Several sets of one segment each may be one set that was not understood: they keep the order given. `sizes` are
    those of the sets; `sorts` says whether their segments are put in an order by content, and `recognized` whether
    every document is known to be in a set.
    """
    listed = list(filter(None, sizes))
    if not listed and recognized:
        return None
    return recognized and sorts and listed.count(1) < 2


def replace_surrogates(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded as UTF-8 and which tokenizers reject, by U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def plain_rendering(segment: Segment) -> str:
    """Render a segment as its text, below a line with its title if it has one."""
    return segment.text if segment.title is None else f"{segment.title}\n{segment.text}"


def document_rendering(segment: Segment) -> str:
    """Render a retrieved chunk in a chat prompt. It is not numbered: a number would reveal the input order."""
    title = "" if segment.title is None else f" (Title: {segment.title})"
    return f"Document{title}: {segment.text}\n"


@dataclass(frozen=True, init=False)
class Prompt:
    """A prompt: text, a set of segments, text; or several sets with text between them (`Prompt.of`).

    Args:
        prefix: Text (or token ids) before the set. Like the suffix it is written by you, and names of special tokens in
            it are special tokens. Text from outside goes into segments, or into `InvariantModel.chat_prompt`, where it
            is literal.
        segments: The set: strings, `Segment`s or lists of token ids.
        suffix: Text (or token ids) after the set, such as the question. The model continues it.
        query: Query that relevance orderings (MonoT5...) score segments against. Default: the last text of the prompt.
        rendering: Function that renders a segment as text. Define it at module level, so that prompts can be pickled.

    Attributes:
        texts: The `len(sets) + 1` texts around the sets.
        sets: The sets, from the first to the last in the prompt.
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
        segment_set = segments if isinstance(segments, SegmentSet) else SegmentSet(segments)
        self._fill((_as_text(prefix), _as_text(suffix)), (segment_set,), query, rendering)

    def _fill(
        self, texts: Sequence[Text], sets: Iterable[SegmentSet], query: str | None, rendering: Callable[[Segment], str]
    ) -> Prompt:
        if query is not None and not isinstance(query, str):
            raise InvalidPrompt(f"query: expected a str, got {shown(query)}")
        if not callable(rendering):
            raise InvalidPrompt(f"rendering: expected a function, got {shown(rendering)}")
        vars(self).update(texts=tuple(texts), sets=tuple(sets), query=query, rendering=rendering)
        return self

    @classmethod
    def of(
        cls,
        *parts: str | Sequence[int] | SegmentSet,
        query: str | None = None,
        rendering: Callable[[Segment], str] = plain_rendering,
    ) -> Prompt:
        """Build a prompt from texts and any number of `SegmentSet`s, in the order of the prompt.

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
                text = part if isinstance(part, str) else as_token_ids(part, InvalidPrompt)
                texts[-1] = _concatenate(texts[-1], text) if texts[-1] and text else texts[-1] or text
        return cls.__new__(cls)._fill(texts, sets, query, rendering)

    @property
    def segments(self) -> SegmentSet:
        """All segments of all sets, in input order. `Generation.order` holds indices into this."""
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
        """Return a copy of the prompt with as many other sets."""
        listed = check_items("sets", sets, SegmentSet, error=InvalidPrompt)
        if len(listed) != len(self.sets):
            raise InvalidPrompt(f"expected {len(self.sets)} sets, got {len(listed)}")
        return type(self).__new__(type(self))._fill(self.texts, listed, self.query, self.rendering)

    def to_complete(self) -> Prompt:
        """Return the prompt, with a line break after segments that it ends with: a model continues text, not a set."""
        if not self.segments or self.suffix:
            return self
        return type(self).__new__(type(self))._fill((*self.texts[:-1], "\n"), self.sets, self.query, self.rendering)

    def shuffled(self, random_state: random.Random) -> Prompt:
        """Return a copy of the prompt with the segments of every set in a random order."""
        check_kind("random_state", random_state, random.Random)
        return self.with_sets(each.permuted(random_state.sample(range(len(each)), len(each))) for each in self.sets)


def _as_text(value: str | Sequence[int]) -> Text:
    return value if isinstance(value, str) else as_token_ids(value, InvalidPrompt)


def _concatenate(left: Text, right: Text) -> Text:
    if isinstance(left, str) and isinstance(right, str):
        return left + right
    if isinstance(left, tuple) and isinstance(right, tuple):
        return left + right
    raise InvalidPrompt("expected only strings or only token ids between two sets, got both")
