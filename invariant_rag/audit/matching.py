"""Is an answer right? Gold answers are matched as whole tokens, after numbers, dates and spellings were made alike."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from invariant_rag.audit.tokens import normal_tokens, plain

_UNSPACED = re.compile(r"[\u0e00-\u0eff\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")
"""Scripts without spaces between words."""
_YES = {"yes", "yeah", "yep", "yup", "true", "correct", "affirmative", "indeed", "certainly", "absolutely"}
_NO = {"no", "nope", "nah", "false", "incorrect", "negative", "never"}
_NEGATIONS = {"not", "never", "neither", "without", "cannot", "nor"}
_POLARITY_OF = re.compile(
    r"(?:answer|verdict|conclusion|it|that|this|so|therefore|hence)\W+(?:is|would be)?\W*(\w+)\W*$"
)
_REFUSALS = re.compile(
    r"\b(?:(?:i|we)(?:\s+(?:do|did))?(?:n't|\s+not)\s+(?:know|have (?:enough|any|that|the))"
    r"|(?:can(?:not|\s+not|'t)|could(?:n't|\s+not)|unable\s+to|impossible\s+to)\s+(?:be\s+)?"
    r"(?:answer|determin|find|say|said|tell|told|known|provid|confirm|help|assist|identif)\w*"
    r"|(?:not|n't|no)\s+(?:enough\s+)?(?:information|mentioned|stated|specified|provided|found in|given in"
    r"|contain\w* (?:the|any|enough|this))|no\s+(?:answer|mention)|not\s+(?:known|clear|available|mention)"
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
    stripped = gold.strip()
    if re.fullmatch(r"[A-Z]", stripped):
        return _names_letter(answer, stripped)
    wanted = normal_tokens(stripped)
    if not wanted:  # nothing but signs or articles
        return answer.strip().strip(".").lower() == stripped.lower() or stripped.lower() in answer.lower().split()
    if re.fullmatch(r"(?:[A-Z]\.?){2,5}", stripped):
        capitals = stripped.replace(".", "")
        text = re.sub(r"\b(?:[A-Z]\.){2,}", lambda found: found[0].replace(".", ""), answer)
        return bool(re.search(rf"(?<!\w){capitals}(?!\w)", text)) or answer.strip(" .").lower() == capitals.lower()
    if _UNSPACED.search(stripped):
        return plain(stripped) in plain(answer)
    said = normal_tokens(answer)
    if stripped == stripped.lower():  # no name: one dog, two dogs
        wanted, said = (tuple(map(_singular, each)) for each in (wanted, said))
    for start in range(len(said) - len(wanted) + 1):
        end = start + len(wanted)
        if said[start:end] == wanted and not _denied(said[:start], said[end:]):
            return True
    return len(said) > 1 and sorted(said) == sorted(wanted)  # "Curie, Marie"


def _singular(word: str) -> str:
    """Return a noun without the ending of its plural; other words change alike on both sides."""
    if len(word) < 4 or not word.isalpha() or re.search(r"(?:[suio]s|news)$", word):
        return word
    return re.sub(r"(?<=ch|sh|ss)es$|(?<=x)es$|s$", "", re.sub(r"(?<=[^aeiou])ies$", "y", word))


def _denied(before: Sequence[str], after: Sequence[str]) -> bool:
    """Return whether words next to an answer deny it: not Paris, not in Paris, Paris is not the capital."""
    last = before[-2:]
    if {*last[-1:]} & (_NEGATIONS | _SHORT | {"except", "excluding"}):
        return True
    if len(last) == 2 and last[0] in _NEGATIONS and last[1] in {"in", "by", "on", "at", "from", "of"}:
        return True
    denied = after[:1] in {("isnt",), ("wasnt",)} or after[:2] in {("is", "not"), ("was", "not")}
    return denied and not {*after[1:3]} & {"only", "just"}


_SHORT = {"isnt", "wasnt", "arent", "werent", "wont", "doesnt", "didnt"}


def _names_letter(answer: str, letter: str) -> bool:
    """Return whether an answer names an option by its letter: "B", "(B)", "B. Paris", "The answer is B"."""
    return bool(
        re.match(rf"\s*[\[(\"'*]*{letter}(?:[\])\"'*.:,]|\s*$)", answer)
        or re.search(rf"(?i:answer|option|choice|response)(?i:\s+is)?\W{{0,4}}{letter}\b(?!\s+[a-z])", answer)
    )


def _polarity(answer: str) -> bool | None:
    """Return True for an answer that says yes, False for no, None for neither."""
    if is_refusal(answer) and not re.match(r"\W*(?:yes|no)\b\s*[,.:;!-]", answer.lower()):
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
