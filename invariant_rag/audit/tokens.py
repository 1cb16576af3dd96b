"""Texts as tokens that are alike however they are written: numbers by value, dates by day, without accents."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from datetime import date
from functools import partial

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_ORDINALS = {
    "first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10, "eleventh": 11, "twelfth": 12, "thirteenth": 13, "fourteenth": 14, "fifteenth": 15, "sixteenth": 16,
    "seventeenth": 17, "eighteenth": 18, "nineteenth": 19, "twentieth": 20, "thirtieth": 30,
}  # fmt: skip
_SMALL = {name: value for value, name in enumerate(_UNITS)} | {name: 10 * n for n, name in enumerate(_TENS, start=2)}
_LARGE = {"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_MONTHS = {
    name[:length]: number
    for number, name in enumerate(
        "january february march april may june july august september october november december".split(), start=1
    )
    for length in {3, len(name), 4 if name == "september" else 3}
}
_MONTH = rf"(?P<month>{'|'.join(sorted(_MONTHS, key=len, reverse=True))})\.?"
_NAMED_DAY = re.compile(
    rf"\b({'|'.join(_ORDINALS)})(?=\s+(?:of\s+)?{_MONTH.replace('?P<month>', '?:')}\b)|"
    rf"(?<=[a-z] )({'|'.join(_ORDINALS)})(?=,?\s+\d{{4}}\b)"
)
"""A day in words: the fourth of July."""
_DAY, _YEAR = r"(?P<day>\d{1,2})(?:st|nd|rd|th)?", r"(?P<year>\d{4})"
_DATES = tuple(
    re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])")
    for pattern in (
        rf"{_YEAR}-(?P<month>\d{{1,2}})-(?P<day>\d{{1,2}})(?:t[\d:.]+z?)?",
        rf"{_YEAR}[/.](?P<month>\d{{1,2}})[/.](?P<day>\d{{1,2}})",
        rf"{_MONTH}\s+{_DAY}(?:\s*,\s*|\s+){_YEAR}",
        rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH},?\s+{_YEAR}",
        rf"(?P<one>\d{{1,2}})[/.](?P<two>\d{{1,2}})[/.]{_YEAR}",
    )
)
_PARTS = (
    (re.compile(rf"(?<![\w-]){_MONTH}(?:,|\s+of)?\s+{_YEAR}(?![\w-])"), "m{month:02d} {year}"),
    (re.compile(rf"(?<![\w-]){_MONTH}\s+{_DAY}(?![\w-])"), "d{day:02d} m{month:02d}"),
    (re.compile(rf"(?<![\w-])(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}(?![\w-])"), "d{day:02d} m{month:02d}"),
)
_BARE_MONTH = re.compile(rf"\b(?!(?:may|march|mar|dec|jan|sept?)\b){_MONTH}(?=\W|$)")
_CLOCK = re.compile(r"\b(\d{1,2})(?:[:.](\d\d))?\s*(a|p)\.?m\b\.?")
_MONEY = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
_SIGNS = re.compile(r"([$€£¥])\s*(-?\d[\d.,]*)((?:\s*(?:hundred|thousand|million|billion|trillion|bn|k|m)\b)?)")
_NUMBER = r"(?<![\w.])-?\d+(?:\.\d+)?"
_TOKEN = re.compile(rf"\d+s\b|{_NUMBER}(?=[a-z%]|\b)|\w+[+#]*|%")
_SAME = {
    "percent": "%", "dollars": "dollar", "usd": "dollar", "euros": "euro", "eur": "euro", "pounds": "pound",
    "kilometers": "km", "kilometres": "km", "kilometer": "km", "kilometre": "km", "kilograms": "kg", "kilogram": "kg",
    "meters": "m", "metres": "m", "meter": "m", "metre": "m", "bn": "billion", "st": "saint", "colour": "color",
    "grey": "gray", "feet": "foot", "ft": "foot", "mt": "mount", "miles": "mile", "mi": "mile", "dozen": "12",
}  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_EXACT = 15
"""Digits of a number that a float holds; a longer one is compared digit by digit."""
_ROMAN = {"II": 2, "III": 3, "IV": 4, "VI": 6, "VII": 7, "VIII": 8, "IX": 9, "XI": 11, "XII": 12, "XIV": 14, "XVI": 16}
_ROMANS = re.compile(rf"(?<=[a-z] )(?:{'|'.join(_ROMAN)})\b")


def normal_tokens(text: str) -> tuple[str, ...]:
    """Return the tokens of a text with everything made alike that is written in several ways.

    >>> normal_tokens("On the 3rd of May 1999, twenty-one people paid $1,500.")
    ('on', 'd03', 'm05', '1999', '21', 'people', 'paid', '1500', 'dollar')
    """
    text = _ROMANS.sub(lambda found: str(_ROMAN[found[0]]), plain(text))
    text = re.sub(r"\b(?:May|March)\b(?!\s+\d)", lambda found: f"m{_MONTHS[found[0].lower()]:02d}", text).lower()
    text = re.sub(r"\b(?:[a-z]\.){2,}", lambda found: found[0].replace(".", ""), text)  # U.S.
    text = re.sub(r"\b[a-z]\.?(?: [a-z]\.)+(?= )", lambda found: re.sub(r"[. ]", "", found[0]), text)  # J. R. R.
    text = re.sub(r"(\w)'s\b", r"\1", text).replace("per cent", "%")
    text = _NAMED_DAY.sub(lambda found: str(_ORDINALS[found[1] or found[2]]), text)
    text = _dated(text)
    text = _CLOCK.sub(lambda f: f"{int(f[1]) % 12 + (12 if f[3] == 'p' else 0)}h{f[2] or '00'}", text)
    text = re.sub(r"\b(\d{1,2}):(\d\d)\b", lambda f: f"{int(f[1])}h{f[2]}", text)
    text = _SIGNS.sub(lambda found: f"{found[2]}{found[3]} {_MONEY[found[1]]}", text)
    text = re.sub(r"\bminus (?=\d)", "-", text)
    text = re.sub(r"(?<=\d)[,\s](?=\d{3}(?!\d))", "", text)  # 1,500,000 and 1 500 000
    text = re.sub(r"\b(\d+)(?:st|nd|rd|th)\b", r"\1 nth", text)
    text = re.sub(r"(?<=\d)\s*(k|m|bn)\b", lambda f: {"k": " thousand", "m": " m", "bn": " billion"}[f[1]], text)
    text = re.sub(r"(?<=[a-z])[-'](?=[a-z])", lambda found: " " if found[0] == "-" else "", text)
    words = [_SAME.get(each, each) for each in _TOKEN.findall(text.replace("_", " "))]
    return tuple(each for each in _counted(words) if each not in _ARTICLES)


def plain(text: str) -> str:
    """Return a text with compatible signs, without accents, with straight quotes and plain hyphens."""
    text = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text))
    text = unicodedata.normalize("NFC", text)
    return re.sub(r"[\u2010-\u2015\u2212]", "-", text).replace("\u2019", "'").replace("\u2018", "'")


def _dated(text: str) -> str:
    """Return a text whose dates are tokens, such as `d14 m12 1972`, so that a month or a year is found in a date.

    Where day and month cannot be told apart, both readings are there.
    """

    def known(year: int, month: int, day: int) -> str:
        try:
            return f"{date(year, month, day):d%d m%m} {year} "
        except ValueError:
            return ""

    def tokens(found: re.Match[str]) -> str:
        parts = found.groupdict()
        year = int(parts["year"])
        if "one" in parts:
            one, two = int(parts["one"]), int(parts["two"])
            return "".join(sorted({known(year, two, one), known(year, one, two)})) or found[0]
        month = _MONTHS.get(parts["month"]) or int(parts["month"])
        return f" {known(year, month, int(parts['day'])) or found[0]}"

    for pattern in _DATES:
        text = pattern.sub(tokens, text)
    for pattern, written in _PARTS:
        text = pattern.sub(partial(_part, written), text)
    return _BARE_MONTH.sub(lambda found: f"m{_MONTHS[found['month']]:02d}", text)


def _part(written: str, found: re.Match[str]) -> str:
    """Return a month with its day or its year as tokens."""
    numbers = {name: int(each) for name, each in found.groupdict().items() if name != "month"}
    return written.format(month=_MONTHS[found["month"]], **numbers)


def _counted(words: Sequence[str]) -> list[str]:
    """Return tokens with numbers as values: those in digits, and those in words, such as twenty one or 1.5 million."""
    number = _Number()
    for word in words:
        number.take(word)
    number.finish()
    return number.found


class _Number:
    """Reads a number word by word.

    Attributes:
        found: The tokens so far.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._total = 0.0  # two million, of two million | three hundred
        self._last: float | None = None

    def take(self, word: str) -> None:
        """Take the next word."""
        value = _SMALL.get(word)
        if re.fullmatch(r"-?\d+(?:\.\d+)?", word):
            self.finish()
            if len(word) > _EXACT:
                self.found.append(word)
            else:
                self._last = float(word)
        elif value is not None:
            self._add(value)
        elif word == "hundred" and self._last is not None:
            self._last *= 100
        elif word in _LARGE and self._last is not None:
            self._total, self._last = self._total + self._last * _LARGE[word], 0.0
        elif word in _ORDINALS:
            self._add(_ORDINALS[word])
            self.finish()
            self.found.append("nth")
        elif word != "and" or self._last is None or not (self._total or self._last >= 100):
            self.finish()
            self.found.append(word)

    def finish(self) -> None:
        """End the number, if one has begun."""
        if self._last is not None:
            value = self._total + self._last
            self.found.append(str(int(value)) if value == int(value) else repr(value))
            if self.found[-2:-1] == ["minus"]:
                self.found[-2:] = [f"-{self.found[-1]}"]
        self._total, self._last = 0.0, None

    def _add(self, value: int) -> None:
        last = -1.0 if self._last is None else self._last
        if 10 < last <= 20 and value >= 10:  # nineteen ninety
            self._last = last * 100 + value
        elif (last % 100 == 0 and (last >= 100 or self._total > 0)) or (
            last % 100 >= 20 and last % 10 == 0 and value < 10  # twenty | one
        ):
            self._last = last + value
        else:
            self.finish()
            self._last = float(value)
