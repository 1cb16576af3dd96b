"""The example of `ask`: a question, and ten documents that are part of the package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from invariant_rag.errors import InvalidChoice

EXAMPLE_QUESTION = "What colour is the flag of Gesthaven?"
EXAMPLE_DOCUMENTS = Path(__file__).parent / "example_documents"


@dataclass(frozen=True)
class Asked:
    """What a command asks: the question, its documents, and the name of the retriever."""

    question: str
    paths: list[Path]
    retriever: str


def asked(question: str | None, paths: Iterable[Path], retriever: str) -> Asked:
    """Return what the user asks or, without a question and documents, the example.

    Raises:
        InvalidChoice: One of question and documents is missing, or the question is blank.
    """
    given = list(paths)
    if question is None and not given:
        return Asked(EXAMPLE_QUESTION, [EXAMPLE_DOCUMENTS], retriever)
    is_blank = not (question or "").strip()
    if is_blank or not given:
        asked_for = "blank text" if question else "none"
        missing = f"a question, got {asked_for}" if is_blank else "documents, got none: --docs is missing"
        raise InvalidChoice(
            f"expected {missing}",
            hint='Such as: invariant-rag ask "Who approves travel?" --docs FOLDER --model MODEL. '
            "Without question and documents, an example is asked.",
        )
    return Asked(str(question), given, retriever)
