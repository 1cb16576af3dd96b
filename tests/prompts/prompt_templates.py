"""Templates that write documents into a prompt, and what is made of it in every order of the documents."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import Any

from hypothesis import strategies as st

from invariant_rag import Segment, SegmentSet
from invariant_rag.api_models import set_text
from invariant_rag.prompts import Finding, KnownDocument, Recognition, Retrieval, Turn, mark_set, recognize

Written = tuple[tuple[str, tuple[Any, ...]], ...]
"""Role and parts of every turn, with every set as text, sorted by content."""


def plain(place: int) -> str:
    return ""


def number(place: int) -> str:
    return str(place + 1)


def number_from_0(place: int) -> str:
    return str(place)


def letter(place: int) -> str:
    return chr(ord("a") + place)


def capital(place: int) -> str:
    return chr(ord("A") + place)


@dataclass(frozen=True)
class Template:
    """Text around documents. `{n}` is the running number, `{title}` and other names are metadata of the document."""

    prefix: str = "Read:\n"
    before: str = ""
    after: str = ""
    between: str = "\n\n"
    suffix: str = "\n\nWhich?"
    count: Callable[[int], str] = number
    strips: bool = False
    dump: Callable[[str], str] | None = None

    def piece(self, text: str, segment: Segment, place: int) -> str:
        names = {"title": segment.title or "", **segment.metadata}
        pieces = []
        for around in (self.before, self.after):
            each = around.replace("{n}", self.count(place))
            for name, value in names.items():
                each = each.replace(f"{{{name}}}", str(value))
            pieces.append(each)
        text = text.strip() if self.strips else text
        return pieces[0] + (text if self.dump is None else self.dump(text)) + pieces[1]

    def write(self, segments: Sequence[Segment]) -> str:
        """Return the prompt with the texts of the documents."""
        inner = self.between.join(self.piece(each.text, each, place) for place, each in enumerate(segments))
        return self.prefix + inner + self.suffix

    def write_marked(self, segments: Sequence[Segment]) -> str:
        """Return the prompt with the documents between marks."""
        marked = [each + "\ueca3" for each in mark_set(segments).split("\ueca3")[:-1]]
        pieces = (
            self.piece(mark, segment, place) for place, (mark, segment) in enumerate(zip(marked, segments, strict=True))
        )
        return self.prefix + self.between.join(pieces) + self.suffix

    def parts(self, segments: Sequence[Segment]) -> Iterator[str | Segment]:
        """Yield the prompt as texts and segments."""
        yield self.prefix
        for place, segment in enumerate(segments):
            if place:
                yield self.between
            empty = Segment(title=segment.title, metadata=segment.metadata)
            before, after = replace(self, dump=None).piece("\0", empty, place).split("\0")
            yield before
            yield segment
            yield after
        yield self.suffix


def sorted_by_content(segments: SegmentSet) -> SegmentSet:
    return segments.permuted(sorted(range(len(segments)), key=lambda index: segments[index].canonical_key))


def written(turns: Iterable[Turn], *, canonical: bool = True) -> Written:
    """Return turns as text, with every set in the order of contents."""

    def as_text(part: Any) -> Any:
        return set_text(sorted_by_content(part) if canonical else part) if isinstance(part, SegmentSet) else part

    return tuple(
        (turn.role, ("".join(map(as_text, turn.parts)),))
        if all(isinstance(part, str | SegmentSet) for part in turn.parts)
        else (turn.role, tuple(map(as_text, turn.parts)))
        for turn in turns
    )


@dataclass
class Outcomes:
    """What came out of every order: texts of silent ones, and how often there was a finding."""

    silent: dict[Written, list[Any]] = field(default_factory=dict)
    found: list[tuple[Finding, ...]] = field(default_factory=list)

    def add(self, result: Recognition, order: Any) -> None:
        if result.findings:
            self.found.append(result.findings)
        else:
            self.silent.setdefault(written(result.turns), []).append(order)


def every_order(
    segments: Sequence[Segment], recognized: Callable[[Sequence[Segment]], Recognition], most: int = 24
) -> Outcomes:
    """Recognise a prompt in every order of its documents."""
    outcomes = Outcomes()
    for order, _ in zip(permutations(segments), range(most), strict=False):
        outcomes.add(recognized(order), [each.text for each in order])
    return outcomes


def retrieval(segments: Iterable[Segment]) -> Retrieval:
    return Retrieval(tuple(map(KnownDocument.of, segments)))


def as_known(template: Template, *more: Turn) -> Callable[[Sequence[Segment]], Recognition]:
    return lambda listed: recognize([*more, Turn("user", (template.write(listed),))], [retrieval(listed)])


def as_marked(template: Template) -> Callable[[Sequence[Segment]], Recognition]:
    return lambda listed: recognize([Turn("user", (template.write_marked(listed),))])


def as_parts(template: Template) -> Callable[[Sequence[Segment]], Recognition]:
    return lambda listed: recognize([Turn("user", tuple(template.parts(listed)))])


WAYS: dict[str, Callable[[Template], Callable[[Sequence[Segment]], Recognition]]] = {
    "known": as_known,
    "marked": as_marked,
    "parts": as_parts,
}

# --- random templates and documents ---------------------------------------------------------------------------------

COUNTS = [plain, number, number_from_0, letter, capital]
BEFORE = [
    "",
    "[{n}] ",
    "({n}) ",
    "{n}. ",
    "{n}) ",
    "Source {n}:\n",
    "Document {n}: ",
    "Document [{n}](Title: {title}) ",
    "- ",
    "* ",
    "> ",
    '<doc id="{n}">',
    '<document index="{n}">\n<source>{source}</source>\n',
    "Title: {title}\n",
    "Source: {source}\nContent: ",
    "page {page}: ",
    "(p. {page}) ",
    "[{n}] {title} ({source}, page {page})\n",
    "{source} | ",
    "id={id} ",
    "<doc id={id}>",
]
AFTER = ["", "\n", "</doc>", "\n</document>", " ({source})", "\nSource: {source}\n", " [{n}]", ".", " (page {page})"]
BETWEEN = ["", " ", "\n", "\n\n", "\n---\n", ", ", "; ", "\n\n\n", " and ", "\n-----\n\n", " | "]
PREFIXES = ["", "Read:\n", "Answer in 2 sentences. Context:\n\n", "1. Read.\n2. Answer.\n\n", "[0] ", "a) ", "Page 1\n"]
SUFFIXES = [
    "",
    "\n\nWhich?",
    "Which of 2 and 3?",
    "\n",
    "\n3. Answer.",
    "</context>\nIs it yes or no, 42 or [1]?",
    ". So?",
]
DUMPS: list[Callable[[str], str] | None] = [None, None, None, repr, json.dumps, str.strip, lambda text: f'"{text}"']

templates = st.builds(
    Template,
    st.sampled_from(PREFIXES),
    st.sampled_from(BEFORE),
    st.sampled_from(AFTER),
    st.sampled_from(BETWEEN),
    st.sampled_from(SUFFIXES),
    st.sampled_from(COUNTS),
    st.booleans(),
    st.sampled_from(DUMPS),
)
TEXTS = [
    "The ferry to Ostra leaves the harbour at noon.",
    "The ferry to Ostra leaves the harbour at noon. In winter it does not sail.",
    "In winter it does not sail.",
    "winter it",
    "yes",
    "no",
    "42",
    "1",
    "2",
    "a",
    "[1] one",
    "1. one",
    "Document 2: two",
    "- item",
    "",
    " ",
    "line one\nline two",
    "line one\n\nline two\n",
    "  indented",
    "trailing \n",
    'It\'s "quoted" here',
    "it's",
    'say "no"',
    "C:\\path\\",
    "<doc>x</doc>",
    "Source: a.txt\nContent: x",
    "渡船在中午离开。",
    "مرحبا بالعالم",
    "e\u0301te\u0301 \U0001f600",
    "{title}",
    "Which?",
    "Read:",
    "\ueca0 icon",
    "\\ueca0",
]
texts = st.sampled_from(TEXTS) | st.text(st.sampled_from("ab1 .\n[]\"'\\<é漢"), max_size=8)


def have_words(texts: Sequence[str]) -> bool:
    """Whether at least two documents, or the only one, have words, by which they can be known."""
    return sum(any(map(str.isalnum, text)) for text in texts) >= min(2, len(texts))


@st.composite
def documents(draw: st.DrawFn, smallest: int = 2, largest: int = 4) -> list[Segment]:
    """Documents with metadata: sources, pages, titles that may look like running numbers."""
    listed = draw(st.lists(texts, min_size=smallest, max_size=largest).filter(have_words))
    pages = (
        draw(st.permutations(range(len(listed)))) if draw(st.booleans()) else [draw(st.integers(0, 4)) for _ in listed]
    )
    start = draw(st.sampled_from([0, 1, 3]))
    titles = draw(
        st.sampled_from([("Doc 1", "Doc 2", "Doc 3", "Doc 4"), ("A", "B", "C", "D"), ("Ostra", "Senn", "Ostra", "x y")])
    )
    sources = draw(
        st.sampled_from(
            [("a.txt", "b.txt", "c.txt", "d.txt"), ("1.txt", "2.txt", "3.txt", "4.txt"), ("a/1", "a/2", "a", "a")]
        )
    )
    return [
        Segment(
            text,
            title=titles[i],
            metadata={"source": sources[i], "page": start + pages[i], "id": str(start + pages[i])},
        )
        for i, text in enumerate(listed)
    ]
