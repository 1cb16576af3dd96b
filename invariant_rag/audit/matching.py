"""Is an answer right? Gold answers are matched as whole tokens, after numbers, dates and spellings were made alike."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from datetime import date
from functools import cache
from typing import Any

_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")  # no spaces between words
_YES = set("yes yeah yep yup true correct affirmative indeed certainly absolutely".split())
_NO = set("no nope nah false incorrect negative never".split())
_WEAK = {"correct", "indeed", "never", "certainly"}  # they decide only where an answer begins or ends with them
_VERBS = set("is was are were do does did has have had ca can could wo will would should may might".split())
_NEGATED_VERBS = {f"{verb}nt" for verb in _VERBS}
_NEGATIONS = {"not", "never", "neither", "without", "cannot", "nor"} | _NEGATED_VERBS
_CONCLUSION = re.compile(
    r"(?:answer|verdict|conclusion|it|that|this|so|therefore|hence)\W+(?:is|would be)?\W*(\w+)\W*$"
)
_OTHER_PLACE = "(?:New|(?:North|South|East|West)(?:ern)?)"  # West Virginia is not Virginia
_REFUSALS = re.compile(
    r"\b(?:(?:i|we)(?:\s+(?:do|did))?(?:n't|\s+not)\s+(?:know|have (?:enough|any|that|the))"
    r"|(?:i|we)\s+have\s+no\s+(?:idea|information|answer)|(?:no\s*one|nobody)\s+knows|(?:would|i'd)\s+rather\s+not"
    r"|(?:can(?:not|\s+not|'t)|could(?:n't|\s+not)|unable\s+to|impossible\s+to)\s+(?:be\s+)?"
    r"(?:answer|determin|find|say|said|tell|told|known|provid|confirm|help|assist|identif)\w*"
    r"|(?:not|n't|no)\s+(?:enough\s+)?(?:information|mentioned|stated|specified|provided|found in|given in"
    r"|contain\w* (?:the|any|enough|this))|no\s+(?:answer|mention)|not\s+(?:yet\s+)?(?:known|clear|available|mention)"
    r"|no\s+(?:document|passage|source)s?\s+\w+|(?:documents?|passages?|context|sources?|text)\s+do(?:es)?(?:n't|\s+not)"
    r"\s+(?:say|mention|state|tell|specif|contain)\w*|unanswerable|unclear|unknown|n/a"
    r"|insufficient\s+(?:information|context)|(?:i'm|i\s+am)?\s*not\s+sure)\b"
)
_UNANSWERABLE = set("unanswerable|unknown|no answer|n/a|not answerable|none|i don't know|not mentioned".split("|"))


def is_right(answer: str, golds: Iterable[str]) -> bool:
    """Return whether an answer gives one of the gold answers.

    A gold answer must be found as whole tokens, and not behind a negation. Numbers count by value ("three", "3.0"),
    dates by day ("December 14, 1972", "1972-12-14"), and capitals that are a gold answer ("US") as capitals. A gold
    answer of yes or no is compared with what the answer says; a refusal is right only where the gold answer is one.
    """
    return any(_gives(answer, gold) for gold in golds)


def contains_gold(text: str, golds: Iterable[str]) -> bool:
    """Return whether a document contains a gold answer as whole tokens. That of yes or no is in no document."""
    return any(_find(text, gold) for gold in golds if gold.strip().lower() not in _YES | _NO and not is_refusal(gold))


def is_refusal(answer: str) -> bool:
    """Return whether an answer says that there is none."""
    text = _plain(answer).lower()
    return text.strip(" .!") in _UNANSWERABLE or bool(_REFUSALS.search(text))


def _gives(answer: str, gold: str) -> bool:
    wanted = gold.strip().strip(".!").lower()
    if wanted in _UNANSWERABLE or is_refusal(gold):
        return is_refusal(answer)
    if wanted in _YES | _NO:
        return _polarity(answer) is (wanted in _YES)
    if is_refusal(answer):
        _, but, answer = answer.partition(" but ")
        return bool(but) and not is_refusal(answer) and _find(answer, gold)
    return _find(answer, gold)


def _find(answer: str, gold: str) -> bool:
    """Return whether a gold answer is in an answer as whole tokens that nothing denies."""
    stripped, text = gold.strip(), _plain(answer)
    if re.fullmatch(r"[A-Z]", stripped):
        return _names_letter(text, stripped)
    wanted = normal_tokens(stripped)
    if not wanted:  # nothing but signs or articles
        return answer.strip().strip(".").lower() == stripped.lower() or stripped.lower() in answer.lower().split()
    if re.fullmatch(r"(?:[A-Z]\.?){2,5}", stripped):
        capitals = stripped.replace(".", "")
        text = re.sub(r"\b(?:[A-Z]\.){2,}", _undotted, text)
        return bool(re.search(rf"(?<!\w){capitals}(?!\w)", text)) or text.strip(" .").lower() == capitals.lower()
    if _UNSPACED.search(stripped):
        return _plain(stripped) in text
    if stripped[0].isupper():
        answer = re.sub(rf"\b{_OTHER_PLACE} {re.escape(stripped)}\b", "", answer)
    said = normal_tokens(answer)
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
    last = before[-3:]
    if {*last[-1:]} & (_NEGATIONS | {"except", "excluding"}) or last[-2:] == ("anything", "but"):
        return True
    if {*last[-1:]} & {"in", "by", "on", "at", "from", "of"} and {*last[:-1]} & _NEGATIONS:
        return True
    denied = {*after[:1]} & _NEGATED_VERBS or ({*after[:1]} & _VERBS and after[1:2] in {("not",), ("never",)})
    return bool(denied) and not {*after[1:3]} & {"only", "just"}


def _names_letter(answer: str, letter: str) -> bool:
    """Return whether an answer names an option by its letter: "B", "(b)", "B. Paris", "The answer is B"."""
    begins = rf"\s*[\[(\"'*]*{letter}(?:[\])\"'*.:,]|\s*$)|(?i:\s*[\[(]{letter}[\])])"
    option = rf"{letter}\b(?!\s+[a-z])|(?i:[\[(]{letter}[\])])"
    named = rf"(?i:answer|option|choice|response)(?i:\s+is)?\W{{0,4}}?(?:{option})"
    return bool(re.match(begins, answer) or re.search(named, answer))


def _polarity(answer: str) -> bool | None:
    """Return True for an answer that says yes, False for no, None for neither or both."""
    text = _plain(answer).lower()
    if is_refusal(answer) and not re.match(r"\W*(?:yes|no)\b\s*[,.:;!-]", text):
        return None
    if re.match(r"\W*(?:yes (?:and|or) no|no (?:and|or) yes)\b", text):
        return None
    text = re.sub(r"\bnot (?:yes|true|correct)\b", "false", text)
    text = re.sub(r"\bnot (?:no|false|incorrect)\b", "true", text)
    words = re.findall(r"[a-z']+", text)
    for decides in (*words[:1], *_CONCLUSION.findall(text)):
        if decides in _YES | _NO:
            return decides in _YES
    said = {word in _YES for word in words if word in (_YES | _NO) - _WEAK}
    if said:
        return said.pop() if len(said) == 1 else None
    return False if any(word in _NEGATIONS or word.endswith("n't") for word in words) else None


_MONTHS = "january february march april may june july august september october november december".split()
_MONTH = rf"(?P<month>{'|'.join(f'{name[:3]}(?:{name[3:]})?' for name in _MONTHS)}|sept)"
_SHORT = {"may", "march", "mar", "dec", "jan", "sep", "sept"}  # they mean something else where they stand alone
_DAY = r"(?P<{}>\d{{1,2}})(?:st|nd|rd|th)?"
_NAMED_DATE = re.compile(
    rf"(?<!\S)(?:(?:the )?{_DAY.format('day')} (?:of )?)?{_MONTH}(?: \.)?(?: {_DAY.format('late')}(?!\S))?"
    r"(?:(?: ,)?(?: in| of)? (?P<year>\d{4}))?(?!\S)"
)  # a date in tokens that are separated by spaces
_MONEY = {"$": "dollar", "€": "euro", "£": "pound", "¥": "yen"}
_SAME = {
    "percent": "%", "dollars": "dollar", "usd": "dollar", "euros": "euro", "eur": "euro", "pounds": "pound",
    "kilometers": "km", "kilometres": "km", "kilometer": "km", "kilometre": "km", "kilograms": "kg", "kilogram": "kg",
    "meters": "m", "metres": "m", "meter": "m", "metre": "m", "st": "saint", "colour": "color", "grey": "gray",
    "feet": "foot", "ft": "foot", "mt": "mount", "miles": "mile", "mi": "mile", "dozen": "12", "doctor": "dr",
    "mister": "mr", "half": "0.5", "celsius": "c", "fahrenheit": "f", "hours": "hour", "h": "hour", "inches": "inch",
}  # fmt: skip
_ROMANS = "I II III IV V VI VII VIII IX X XI XII XIII XIV XV XVI".split()
_TOKEN = re.compile(r"\d+s\b|(?<![\w.])-?\d+(?:\.\d+)?(?:(?:st|nd|rd|th)\b)?|\w+[+#]*|[^\w\s]")
_LONGEST = 300  # digits of a number; a longer one is a word


def _undotted(found: re.Match[str]) -> str:
    return re.sub(r"[. ]", "", found[0])


def _day(year: str, month: int, day: int) -> str:
    try:
        return f" {date(int(year), month, day):d%d m%m} {year} "
    except ValueError:
        return ""


def _clock(found: re.Match[str]) -> str:
    hour, minutes, half = found.groups()
    return f"{int(hour) % 12 + (12 if half == 'p' else 0)}h{minutes or '00'}"


_SPELLINGS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (  # made alike, in lower case
    (r"\b(?:[a-z]\.){2,}", _undotted),  # U.S.
    (r"\b[a-z]\.?(?: [a-z]\.)+(?= )", _undotted),  # J. R. R.
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
    (
        r"(?<![\w-])(\d{4})([-/.])(\d{1,2})\2(\d{1,2})(?:t[\d:.]+z?)?(?![\w-])",
        lambda f: _day(f[1], int(f[3]), int(f[4])) or f[0],
    ),
    (  # where day and month cannot be told apart, both readings
        r"(?<![\w-])(\d{1,2})[/.](\d{1,2})[/.](\d{4})(?![\w-])",
        lambda f: "".join(sorted({_day(f[3], int(f[2]), int(f[1])), _day(f[3], int(f[1]), int(f[2]))})) or f[0],
    ),
    (r"\b(\d{1,2})(?:[:.](\d\d))?\s*(a|p)\.?m\b\.?", _clock),
    (r"\b(\d{1,2}):(\d\d)\b", lambda f: f"{int(f[1])}h{f[2]}"),
    (r"(?<![\w./])(\d{1,3})/([1-9]\d{0,2})(?![\w/])", lambda f: f"{int(f[1]) / int(f[2]):.12g}"),
    (r"(?<=\d)[,\s](?=\d{3}(?!\d))", ""),  # 1,500,000 and 1 500 000
    (r"(?<=\d)\s*(k|bn)\b", lambda f: {"k": " thousand", "bn": " billion"}[f[1]]),
    (
        r"([$€£¥])\s*(-?\d[\d.]*(?:\s*(?:hundred|thousand|million|billion|trillion)\b)?)",
        lambda f: f"{f[2]} {_MONEY[f[1]]} ",
    ),
    (r"(?<=[a-z])'(?=[a-z])|_", lambda f: " " if f[0] == "_" else ""),
    (r"(?<=[a-z])-(?=[a-z])", " "),
)


def normal_tokens(text: str) -> tuple[str, ...]:
    """Return the tokens of a text with everything made alike that is written in several ways."""
    romans = rf"(?<=[a-z] )(?!I\b|V\b|X\b)(?:{'|'.join(_ROMANS)})\b"
    text = re.sub(romans, lambda f: str(1 + _ROMANS.index(f[0])), _plain(text))
    text = re.sub(r"(?<=\d)M\b", " million", text)
    text = re.sub(r"\b(?:May|March)\b(?!,?\s+\d)", lambda f: {"May": "m05", "March": "m03"}[f[0]], text).casefold()
    for pattern, same in _SPELLINGS:
        text = re.sub(pattern, same, text)
    words = (each if len(each) < _LONGEST else f"n{each}" for each in _TOKEN.findall(text))
    text = _NAMED_DATE.sub(_dated, " ".join(_numbers().process_words(list(words))))
    text = re.sub(r"(?<!\S)(\d+)(?:st|nd|rd|th)(?!\S)", r"\1 nth", text)
    text = re.sub(r"(?<!\S)(-?\d+\.\d*?)0+(?!\S)", r"\1", text)
    found = (_SAME.get(each, each) for each in text.split())
    return tuple(each for each in found if each not in {"a", "an", "the"} and (each == "%" or re.match(r"-?\w", each)))


@cache
def _numbers() -> Any:
    """Return what turns numbers in words into digits: that of Whisper, but for units and single digits in a row."""
    from transformers.models.whisper.english_normalizer import EnglishNumberNormalizer

    numbers = EnglishNumberNormalizer()
    numbers.words -= {"o", "oh", "double", "triple", "point", "plus", "positive", *numbers.following_prefixers}
    numbers.words -= {*numbers.suffixers, *numbers.ones_plural}
    return numbers


def _dated(found: re.Match[str]) -> str:
    """Return a date as tokens, such as `d14 m12 1972`, so that a month or a year is found in a date."""
    name, day, year = found["month"], found["day"] or found["late"], found["year"]
    if not day and not year and name in _SHORT:
        return found[0]
    month = next(number for number, each in enumerate(_MONTHS, start=1) if each.startswith(name[:3]))
    return (f"d{int(day):02d} " if day else "") + f"m{month:02d} {year or ''}"


def _plain(text: str) -> str:
    """Return a text with compatible signs, without accents, with straight quotes and plain hyphens."""
    text = re.sub(r"[\u0300-\u036f]", "", unicodedata.normalize("NFKD", text))
    text = unicodedata.normalize("NFC", text).replace("\u2044", "/").replace("\u2019", "'").replace("\u2018", "'")
    return re.sub(r"[\u2010-\u2015\u2212]", "-", text)
