"""Is an answer right? Gold answers are matched as whole tokens, after numbers, dates and spellings were made alike."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from datetime import date

_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Scripts without spaces between words."""
_YES = {"yes", "yeah", "yep", "yup", "true", "correct", "affirmative", "indeed", "certainly", "absolutely"}
_NO = {"no", "nope", "nah", "false", "incorrect", "negative", "never"}
_NEGATIONS = {"not", "never", "neither", "without", "cannot", "nor"}
_NEGATED_VERBS = {f"{verb}nt" for verb in "is was are were wo do does did has have had ca could would should".split()}
_VERBS = set("is was are were do does did has have had can could will would should may might".split())
_POLARITY_OF = re.compile(
    r"(?:answer|verdict|conclusion|it|that|this|so|therefore|hence)\W+(?:is|would be)?\W*(\w+)\W*$"
)
_OTHER_PLACE = "(?:New|(?:North|South|East|West)(?:ern)?)"
"""Words that make another name of a name: West Virginia is not Virginia."""
_REFUSALS = re.compile(
    r"\b(?:(?:i|we)(?:\s+(?:do|did))?(?:n't|\s+not)\s+(?:know|have (?:enough|any|that|the))"
    r"|(?:i|we)\s+have\s+no\s+(?:idea|information|answer)|(?:no\s*one|nobody)\s+knows|(?:would|i'd)\s+rather\s+not"
    r"|(?:can(?:not|\s+not|'t)|could(?:n't|\s+not)|unable\s+to|impossible\s+to)\s+(?:be\s+)?"
    r"(?:answer|determin|find|say|said|tell|told|known|provid|confirm|help|assist|identif)\w*"
    r"|(?:not|n't|no)\s+(?:enough\s+)?(?:information|mentioned|stated|specified|provided|found in|given in"
    r"|contain\w* (?:the|any|enough|this))|no\s+(?:answer|mention)|not\s+(?:yet\s+)?(?:known|clear|available|mention)"
    r"|no\s+(?:document|passage|source)s?\s+\w+|(?:documents?|passages?|context|sources?|text)\s+do(?:es)?(?:n't|\s+not)\s+(?:say|mention|state|tell|specif|contain)\w*"
    r"|unanswerable|unclear|unknown|n/a|insufficient\s+(?:information|context)|(?:i'm|i\s+am)?\s*not\s+sure)\b"
)
_UNANSWERABLE = set("unanswerable|unknown|no answer|n/a|not answerable|none|i don't know|not mentioned".split("|"))


def is_right(answer: str, golds: Iterable[str]) -> bool:
    """Return whether an answer gives one of the gold answers.

    A gold answer must be found as whole tokens, and not behind a negation. Numbers count by value ("three", "3.0"),
    dates by day ("December 14, 1972", "1972-12-14"), and capitals that are a gold answer ("US") as capitals. A gold
    answer of yes or no is compared with what the answer says; a refusal is right only where the gold answer is one.

    >>> is_right("It was built in 1912.", ["12"]), is_right("Twelve of them.", ["12"])
    (False, True)
    """
    return any(_gives(answer, gold) for gold in golds)


def contains_gold(text: str, golds: Iterable[str]) -> bool:
    """Return whether a document contains a gold answer as whole tokens. That of yes or no is in no document."""
    return any(
        _find(text, gold) for gold in golds if not {gold.strip().lower()} & (_YES | _NO) and not is_refusal(gold)
    )


def is_refusal(answer: str) -> bool:
    """Return whether an answer says that there is none.

    >>> is_refusal("I do not know."), is_refusal("No."), is_refusal("The documents do not mention it.")
    (True, False, True)
    """
    text = plain(answer).lower()
    return text.strip(" .!") in _UNANSWERABLE or bool(_REFUSALS.search(text))


def _gives(answer: str, gold: str) -> bool:
    wanted = gold.strip().strip(".!").lower()
    if wanted in _UNANSWERABLE or is_refusal(gold):
        return is_refusal(answer)
    if wanted in _YES | _NO:
        return _polarity(answer) is (wanted in _YES)
    if is_refusal(answer):
        _, but, rest = answer.partition(" but ")
        return bool(but) and not is_refusal(rest) and _find(rest, gold)
    return _find(answer, gold)


def _find(answer: str, gold: str) -> bool:
    """Return whether a gold answer is in an answer as whole tokens that nothing denies."""
    stripped, text = gold.strip(), plain(answer)
    if re.fullmatch(r"[A-Z]", stripped):
        return _names_letter(text, stripped)
    wanted = normal_tokens(stripped)
    if not wanted:  # nothing but signs or articles
        return answer.strip().strip(".").lower() == stripped.lower() or stripped.lower() in answer.lower().split()
    if re.fullmatch(r"(?:[A-Z]\.?){2,5}", stripped):
        capitals = stripped.replace(".", "")
        text = re.sub(r"\b(?:[A-Z]\.){2,}", lambda found: found[0].replace(".", ""), text)
        return bool(re.search(rf"(?<!\w){capitals}(?!\w)", text)) or text.strip(" .").lower() == capitals.lower()
    if _UNSPACED.search(stripped):
        return plain(stripped) in text
    said = normal_tokens(
        re.sub(rf"\b{_OTHER_PLACE} {re.escape(stripped)}\b", "", answer) if stripped[0].isupper() else answer
    )
    if stripped == stripped.lower():  # no name: one dog, two dogs
        wanted, said = (tuple(map(_singular, each)) for each in (wanted, said))
    for start in range(len(said) - len(wanted) + 1):
        end = start + len(wanted)
        is_place = wanted[-1].isdigit() and said[end : end + 1] == ("nth",)  # the 12th is not 12
        if said[start:end] == wanted and not is_place and not _denied(said[:start], said[end:]):
            return True
    return len(said) > 1 and sorted(said) == sorted(wanted)  # "Curie, Marie"


def _singular(word: str) -> str:
    """Return a noun without the ending of its plural; other words change alike on both sides."""
    if len(word) < 4 or not word.isalpha() or re.search(r"(?:[suio]s|news)$", word):
        return word
    return re.sub(r"(?<=ch|sh|ss)es$|(?<=x)es$|s$", "", re.sub(r"(?<=[^aeiou])ies$", "y", word))


def _denied(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return whether words next to an answer deny it: not Paris, not built by Ann, Paris is not the capital."""
    last = (*before[-3:],)
    if {*last[-1:]} & (_NEGATIONS | _NEGATED_VERBS | {"except", "excluding"}) or last[-2:] == ("anything", "but"):
        return True
    if (
        last[-1:]
        and last[-1] in {"in", "by", "on", "at", "from", "of"}
        and {*last[:-1]} & (_NEGATIONS | _NEGATED_VERBS)
    ):
        return True
    denied = {*after[:1]} & _NEGATED_VERBS or ({*after[:1]} & _VERBS and after[1:2] in {("not",), ("never",)})
    return bool(denied) and not {*after[1:3]} & {"only", "just"}


def _names_letter(answer: str, letter: str) -> bool:
    """Return whether an answer names an option by its letter: "B", "(b)", "B. Paris", "The answer is B"."""
    return bool(
        re.match(rf"\s*[\[(\"'*]*{letter}(?:[\])\"'*.:,]|\s*$)|(?i:\s*[\[(]{letter}[\])])", answer)
        or re.search(
            rf"(?i:answer|option|choice|response)(?i:\s+is)?\W{{0,4}}?(?:{letter}\b(?!\s+[a-z])|(?i:[\[(]{letter}[\])]))",
            answer,
        )
    )


def _polarity(answer: str) -> bool | None:
    """Return True for an answer that says yes, False for no, None for neither or both."""
    refuses = is_refusal(answer) and not re.match(r"\W*(?:yes|no)\b\s*[,.:;!-]", answer.lower())
    if refuses or re.match(r"\W*(?:yes (?:and|or) no|no (?:and|or) yes)\b", answer.lower()):
        return None
    text = re.sub(r"\bnot (?:yes|true|correct)\b", "false", plain(answer).lower())
    text = re.sub(r"\bnot (?:no|false|incorrect)\b", "true", text)
    words = re.findall(r"[a-z']+", text)
    if words and words[0] in _YES | _NO:
        return words[0] in _YES
    ended = _POLARITY_OF.search(text)
    if ended and ended[1] in _YES | _NO:
        return ended[1] in _YES
    said = {word in _YES for word in words if word in (_YES | _NO) - {"correct", "indeed", "never", "certainly"}}
    if len(said) == 1:
        return said.pop()
    if said or not words:
        return None
    return False if any(word in _NEGATIONS or word.endswith("n't") for word in words) else None


_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
_SMALL = {name: value for value, name in enumerate(_UNITS)} | {name: 10 * n for n, name in enumerate(_TENS, start=2)}
_ORDINALS = {name: value for value, name in enumerate("zeroth first second third fourth fifth sixth seventh".split())}
_ORDINALS |= {"eighth": 8, "ninth": 9, "twelfth": 12, "twentieth": 20, "thirtieth": 30}
_ORDINALS |= {f"{name}th": value for name, value in _SMALL.items() if 10 <= value < 20 and value != 12}
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
        rf"{_MONTH}\s+{_DAY}(?:\s*,\s*|\s+in\s+|\s+){_YEAR}",
        rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH},?(?:\s+in)?\s+{_YEAR}",
        rf"(?P<one>\d{{1,2}})[/.](?P<two>\d{{1,2}})[/.]{_YEAR}",
        rf"{_MONTH}(?:,|\s+of)?\s+{_YEAR}",
        rf"{_MONTH}\s+{_DAY}",
        rf"(?:the\s+)?{_DAY}\s+(?:of\s+)?{_MONTH}",
    )
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
    "doctor": "dr", "mister": "mr", "half": "0.5", "celsius": "c", "fahrenheit": "f", "hours": "hour", "h": "hour",
    "inches": "inch",
}  # fmt: skip
_ARTICLES = {"a", "an", "the"}
_EXACT = 15
"""Digits of a number that a float holds; a longer one is compared digit by digit."""
_ROMAN = {"II": 2, "III": 3, "IV": 4, "VI": 6, "VII": 7, "VIII": 8, "IX": 9, "XI": 11, "XII": 12, "XIV": 14, "XVI": 16}
_ROMANS = re.compile(rf"(?<=[a-z] )(?:{'|'.join(_ROMAN)})\b")
_SPELLINGS = (
    (r"(\w)'s\b", r"\1"),
    (r"\b(\d+) ?' ?(\d{1,2})(?: ?\"|\u201d|'')?(?!\w)", r"\1 foot \2 inch"),  # 6'2"
    (r"\b(\d+) ?(?:ft|feet)\.? (\d{1,2}) ?in\b", r"\1 foot \2 inch"),
    (r"\bper cent\b", "%"),
    ("&", " and "),
    (r"\bnoon\b", "12:00"),
    (r"\bmidnight\b", "0:00"),
    (r"\bmph\b", "miles per hour"),
    (r"\bkm/h\b|\bkph\b", "km per hour"),
    (r"\bdegrees?\s+(?=celsius|fahrenheit|[cf]\b)", ""),
    (r"isation", "ization"),
    (r"\b([a-z])-(?=[a-z]{3})", r"\1"),  # e-mail
)
"""Spellings that are made alike, in lower case."""


def normal_tokens(text: str) -> tuple[str, ...]:
    """Return the tokens of a text with everything made alike that is written in several ways.

    >>> normal_tokens("On the 3rd of May 1999, twenty-one people paid $1,500.")
    ('on', 'd03', 'm05', '1999', '21', 'people', 'paid', '1500', 'dollar')
    """
    text = _ROMANS.sub(lambda found: str(_ROMAN[found[0]]), plain(text))
    text = re.sub(r"(?<=\d)M\b", " million", text)
    text = re.sub(r"\b(?:May|March)\b(?!,?\s+\d)", lambda found: f"m{_MONTHS[found[0].lower()]:02d}", text).casefold()
    text = re.sub(r"\b(?:[a-z]\.){2,}", lambda found: found[0].replace(".", ""), text)  # U.S.
    text = re.sub(r"\b[a-z]\.?(?: [a-z]\.)+(?= )", lambda found: re.sub(r"[. ]", "", found[0]), text)  # J. R. R.
    for pattern, same in _SPELLINGS:
        text = re.sub(pattern, same, text)
    text = _NAMED_DAY.sub(lambda found: str(_ORDINALS[found[1] or found[2]]), text)
    text = _dated(text)
    text = _CLOCK.sub(lambda f: f"{int(f[1]) % 12 + (12 if f[3] == 'p' else 0)}h{f[2] or '00'}", text)
    text = re.sub(r"\b(\d{1,2}):(\d\d)\b", lambda f: f"{int(f[1])}h{f[2]}", text)
    text = re.sub(r"(?<![\w./])(\d{1,3})/([1-9]\d{0,2})(?![\w/])", lambda f: f"{int(f[1]) / int(f[2]):.12g}", text)
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
    text = unicodedata.normalize("NFC", text).replace("\u2044", "/").replace("\u2019", "'").replace("\u2018", "'")
    return re.sub(r"[\u2010-\u2015\u2212]", "-", text)


def _dated(text: str) -> str:
    """Return a text whose dates are tokens, such as `d14 m12 1972`, so that a month or a year is found in a date.

    Where day and month cannot be told apart, both readings are there.
    """

    def known(year: str, month: int, day: int) -> str:
        try:
            return f"{date(int(year), month, day):d%d m%m} {year} "
        except ValueError:
            return ""

    def tokens(found: re.Match[str]) -> str:
        parts = found.groupdict()
        if "one" in parts:
            one, two = int(parts["one"]), int(parts["two"])
            return "".join(sorted({known(parts["year"], two, one), known(parts["year"], one, two)})) or found[0]
        month = _MONTHS.get(parts["month"]) or int(parts["month"])
        if "year" in parts and "day" in parts:
            return f" {known(parts['year'], month, int(parts['day'])) or found[0]}"
        return (f"d{int(parts['day']):02d} " if "day" in parts else "") + f"m{month:02d} {parts.get('year', '')}"

    for pattern in _DATES:
        text = pattern.sub(tokens, text)
    return _BARE_MONTH.sub(lambda found: f"m{_MONTHS[found['month']]:02d}", text)


def _counted(words: Sequence[str]) -> list[str]:
    """Return tokens with numbers as values: those in digits, and those in words, such as twenty one or 1.5 million."""
    number = _Number()
    for word in words:
        number.take(word)
    number.finish()
    return number.found


class _Number:
    """Reads a number word by word; `found` are the tokens so far."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._total = 0.0  # two million, of two million | three hundred
        self._last: float | None = None

    def take(self, word: str) -> None:
        if re.fullmatch(r"-?\d+(?:\.\d+)?", word) and len(word) <= _EXACT:
            self.finish()
            self._last = float(word)
        elif word in _SMALL:
            self._add(_SMALL[word])
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
