r"""What a citation of a document by its running number looks like in an answer.

Some styles are citations in any answer: `[2]`, `Source 2`, `<cite>2</cite>`, `^2^`, `"source": 2`. Others are, only if
the prompt numbers its documents in that way: `(2)`, `#2`, `Item 2`. A bare number is none: it may be a quantity.

Every alternative has a group `n`, the numbers. Patterns are of the module `regex`, which says where a citation may have
begun at the end of a text that goes on.

>>> [citation["n"] for citation in grammar(["(1)", "(2)"]).citations("By boat (2), see source 1; 3 ferries.")]
['2', '1']
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import regex

from invariant_rag.segments import Slot

_WORD = (
    r"(?:document|doc|source|passage|chunk|snippet|excerpt|citation"
    r"|(?<!\b(?:a|this|that) )(?:context|ref(?:erence|s?\.)?|result))"  # as a result 3 ferries left
)
_LABEL = r"(?:\d{1,6}(?:[-\u2013]\d{1,6})?|[A-Za-z](?![A-Za-z0-9]))"
_AND = r"(?:,|;|,? ?\band\b|,? ?\bor\b| ?&)[ \n]?"
_ID = r"(?:ids?|nos?\b\.?|nrs?\b\.?|num(?:ber)?s?|index|indices)"
_KEY = (
    r"(?:(?:answer|best|cited|final|main|primary|relevant|selected|supporting|used)[_ -]?)?"
    r"(?:(?:document|doc|source|passage|chunk|context|reference|ref|snippet|excerpt|citation|cite)s?[_ -]?"
    r"(?:(?:document|doc|passage|chunk|context|reference|ref|snippet|excerpt|citation)s?[_ -]?)?"
    r"(?:ids?|indexe?s?|indices|numbers?|nums?|nos?|nrs?|refs?|cited|used)?"
    r"|result[_ -]?(?:ids?|index|indices|numbers?))"
)
_TAG = (
    r"(?:cite|citation|source|src|document|doc|reference|ref|passage|chunk|context|snippet|excerpt|result)s?"
    r"(?:[_-]?(?:id|number|index|no))?"
)
_TAIL = r"(?:(?<=[\w\"'*])(?:[-\u2013/_,. ]?\w{0,4}|\s*</?))?"  # what may have to be read to tell that a number is over
NAME = regex.compile(_KEY, regex.IGNORECASE)
"""Names of fields whose numbers are citations."""

_N = r"(?P<n>\d+|[A-Za-z])"
_STYLES = regex.compile(
    rf"\({_N}\)|\{{{_N}\}}|<{_N}>|(?<!\w)#{_N}(?!\w)"
    rf"|(?<![^\W\d_])[^\W\d_]{{1,20}}(?:[ _#-]|\.[ ]|[ ]#|[ ]no\.[ ])?{_N}(?!\w)"
)
_SPELT = r"(?<!\b(?:one|two|three|four|five|six|seven|eight|nine|ten) )"  # three (3) ferries


@dataclass(frozen=True)
class Grammar:
    """Finds the citations of texts."""

    _citation: regex.Pattern[str]
    _begun: regex.Pattern[str]

    def citations(self, text: str, start: int = 0) -> Iterator[regex.Match[str]]:
        """Yield the citations of a text, from a place on."""
        return (each for each in self._citation.finditer(text, start) if each["n"] is not None)

    def begun(self, text: str, start: int = 0) -> int:
        """Return where the first citation begins that may go on after the end of a text; its length, if none does."""
        found = self._begun.search(text, start, partial=True)
        return len(text) if found is None else found.start()


def grammar(labels: Iterable[str] = ()) -> Grammar:
    """Return what finds citations where documents have these labels: numbers, and how the prompt writes them."""
    return _grammar(
        tuple(sorted({_prefix_and_suffix(each) for each in labels if len(each) > 1 and not each.isdecimal()}))
    )


def spelling_of(slot: Slot) -> str | None:
    """Return how a slot writes its number, with what stands around it; None if that is a citation anywhere, or nowhere.

    >>> [spelling_of(Slot((text,), number="1")) for text in ("(1) ", "Item 1: ", "[1] ", "Source 1:", "1. ")]
    ['(1)', 'Item 1', None, None, None]
    """
    for side in (slot.before, slot.after) if slot.number is not None else ():
        text = "".join(each if isinstance(each, str) else "\n" for each in side)
        spelling = next((each[0] for each in _STYLES.finditer(text) if each["n"] == slot.number), None)
        if spelling is not None:
            known = any(each.span() == (0, len(spelling)) for each in grammar().citations(spelling))
            return None if known else spelling
    return None


def _prefix_and_suffix(label: str) -> tuple[str, str, str]:
    """Return what stands before and after the number or letter of a label, and which of these it is."""
    found = regex.fullmatch(r"(.*?)(\d+|[A-Za-z])(\W?)", label)
    if found is None:
        return label, "", ""
    kind = r"\d" if found[2].isdecimal() else "A-Z" if found[2].isupper() else "a-z"
    return found[1], found[3], kind


@lru_cache(maxsize=256)
def _grammar(styles: tuple[tuple[str, str, str], ...]) -> Grammar:
    flags = regex.IGNORECASE | regex.VERSION0
    return Grammar(
        regex.compile(_pattern(styles, ends=True), flags),
        regex.compile(rf"(?:{_pattern(styles, ends=False)}){_TAIL}\Z", flags),
    )


def _pattern(styles: Iterable[tuple[str, str, str]], *, ends: bool) -> str:
    """Return the pattern of citations; without their `ends`, of what may become one."""

    def end(guard: str) -> str:
        return guard if ends else ""

    digits = [each for each in styles if each[2] == r"\d"]
    words = "|".join([_WORD, *(regex.escape(before.rstrip()) for before, after, _ in digits if before.endswith(" "))])
    whole = end(r"(?![a-z\d_]|[-\u2013/_]\w|\.(?-i:[a-z\d])|,\d{3})")
    number = rf"\d{{1,6}}(?:[-\u2013]\d{{1,6}})?{whole}"
    several = rf"{number}(?:{_AND}#?{number})*"
    no_quantity = end(r"(?![ ](?-i:(?!and\b|or\b)[a-z]))")
    no_list, closed = end(r"(?!\n\d+[.)])"), end(r"(?=\s*</)")
    goes_on = r"(?=[ \t]+\S)" if ends else r"[ \t]*"
    identified = rf"[ \n_]{_ID}(?:[:=]?[ \n]?#?[ ]?|[ ]?#)"
    marked = rf"(?:{identified}|[ ]?#[ ]?|[ \n])\*{{0,2}}(?<=\W)"
    in_brackets = rf"(?:(?:(?:{words})s?(?:[ :_#]|{_ID}){{0,3}}|#)?\^?{_LABEL})"
    quoted = rf"\\?[\"']{several}\\?[\"']|{number}"
    alternatives = [
        (
            r"(?<![\"']\s?:\s?)[\[【]\^?[ \n]?"
            rf"(?P<n>{in_brackets}(?:[ \n]?(?:[,;]|\band\b|\bor\b|&)[ \n]?{in_brackets})*)"
            r"[ \n]?(?:†source)?[\]】]"
        ),
        rf"\b(?:{words})(?:{marked}(?P<n>{number})|s{marked}(?P<n>{several}))",
        rf"\b(?:{words})s?(?:[:=]{no_list}[ \n]?#?\*{{0,2}}(?P<n>{several}){no_quantity})",
        r"(?<!\b\w{1,2})(?:\^(?P<n>\d{1,6}(?:,[ ]?\d{1,6})*)\^|<sup>(?P<n>\d{1,6}(?:,[ ]?\d{1,6})*)</sup>)",
        (
            rf"<{_TAG}(?:[ _:#-]?|\s[^<>\d]{{0,60}}?\b(?:\w+_)?(?:{_ID}|n|doc|document|source|ref|name)"
            r"=\\?[\"'{]?)"
            rf"(?P<n>{several})"
        ),
        rf"<{_TAG}(?:\s[^<>\d]{{0,60}})?>\s?(?P<n>{several}){closed}",
        rf"\\?[\"']{_KEY}\\?[\"']\s?:\s?(?:(?P<n>{quoted})|\[\s*(?P<n>(?:{quoted})(?:\s*,\s*(?:{quoted}))*))",
    ]
    for before, after, kind in styles:
        if before.endswith(" ") and kind == r"\d":
            continue  # a word
        worded = before[:1].isalnum()
        start = r"(?<!\w)" if worded and before.isascii() else "" if worded else _SPELT
        if kind == r"\d":
            written = rf"{regex.escape(before)}(?P<n>{several}){regex.escape(after)}"
        else:
            more = rf"(?:{_AND}(?-i:[{kind}])(?!\w))*" if kind == "A-Z" else ""  # `document a, a source`
            written = rf"{regex.escape(before)}(?P<n>(?-i:[{kind}]){more}){regex.escape(after)}"
        if not worded:  # `(1) First` at the start of a line is a list of the answer's own
            item = written.replace("(?P<n>", "(?:")
            alternatives.append(rf"(?m:^)[ \t>*-]*{item}{goes_on}")
        alternatives.append(rf"{start}{written}{'' if after else whole}")
    return "|".join(alternatives)
