"""The example of `ask`: a question, and ten documents that are part of the package."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import typer

EXAMPLE_QUESTION = "What colour is the flag of Gesthaven?"
EXAMPLE_DOCUMENTS = Path(__file__).parent / "example_documents"


@dataclass(frozen=True)
class Asked:
    """What a command asks: the question, its documents, and the name of the retriever."""

    question: str
    paths: list[Path]
    retriever: str


def asked(question: str | None, paths: Iterable[Path], retriever: str | None) -> Asked:
    """Return what the user asks or, without a question and documents, the example, with a retriever without a model.

    Raises:
        BadParameter: One of question and documents is missing, or the question is blank.
    """
    given = list(paths)
    if question is not None and not question.strip():
        raise typer.BadParameter("expected a question, got blank text")
    if question is None and not given:
        return Asked(EXAMPLE_QUESTION, [EXAMPLE_DOCUMENTS], retriever or "bm25")
    if question is None or not given:
        missing = "a question" if question is None else "--docs"
        raise typer.BadParameter(
            f'{missing} is missing: invariant-rag ask "Who approves travel?" --docs FOLDER --model MODEL. '
            "Without both, the example of the package is asked."
        )
    return Asked(question, given, retriever or "faiss")
