"""Every entry of the matrix is invariant, or warns: exactly as the table of README.md says.

The weights are random, and each letter of an answer is a hash of all logits, so four letters depend on everything that
the model reads. An entry keeps its promise if all orders of its documents give one answer, without a warning, and each
document is read; or, where it is declared to warn, if every order gives an `OrderWarning`. The plain model shows for
each entry that the order matters there. Three documents are asked about in all six orders, four in eight of 24.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from invariant_rag.testing.ordinary_prompts import ORDINARY
from langchain_core.callbacks import CallbackManagerForLLMRun
from langchain_core.documents import Document
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatResult
from transformers import LogitsProcessor

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote

from .entries import ENTRIES, Entry, Listed, fill

README = Path(__file__).parent.parent / "README.md"
CASES = [pytest.param(entry, kind, id=f"{entry.name} [{kind}]") for entry in ENTRIES for kind in entry.models]


class Hashing(BaseChatModel):
    """A deterministic model behind an API: it answers with a hash of everything that it was sent."""

    @property
    def _llm_type(self) -> str:
        return "hashing"

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        request = repr([(message.type, message.content) for message in messages])
        documents = repr([each.page_content for each in kwargs.get("documents") or ()])
        answer = hashlib.sha256((request + documents).encode()).hexdigest()[:16]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])


class EveryBit(LogitsProcessor):
    """Chooses each letter by a hash of the scores, so that an answer shows every bit in which two prompts differ."""

    def __init__(self, lm: InvariantModel) -> None:
        self._letters = lm.tokenizer.encode("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        chosen = torch.full_like(scores, float("-inf"))
        for row, given in zip(chosen, scores, strict=True):
            digest = hashlib.sha256(given.float().numpy().tobytes()).digest()
            row[self._letters[digest[0] % len(self._letters)]] = 0.0
        return chosen


def four_letters(kind: type[Any], lm: InvariantModel, **options: Any) -> Any:
    """Return a model of ours that writes four letters."""
    return kind(model=lm, max_tokens=4, generation_kwargs={"logits_processor": [EveryBit(lm)]}, **options)


MODELS: dict[str, Callable[[InvariantModel], Any]] = {
    "chat": lambda lm: four_letters(ChatInvariant, lm),
    "completion": lambda lm: four_letters(InvariantLLM, lm),
    "canonical": lambda lm: canonical(Hashing()),
    "vote": lambda lm: vote(Hashing(), votes=3),
}
PLAIN: dict[str, Callable[[InvariantModel], Any]] = {
    "chat": lambda lm: four_letters(ChatInvariant, lm, method="sequential", ordering="given"),
    "completion": lambda lm: four_letters(InvariantLLM, lm, method="sequential", ordering="given"),
    "canonical": lambda lm: Hashing(),
    "vote": lambda lm: Hashing(),
}


def ask(entry: Entry, model: Any, documents: Sequence[Document]) -> tuple[str, list[OrderWarning]]:
    """Return the answer, and the warnings that somebody who shows all warnings gets to see."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = entry.answer(model, Listed(documents=list(documents)))
    assert isinstance(answer, str)
    assert answer
    return answer, [each.message for each in caught if isinstance(each.message, OrderWarning)]


def orders(entry: Entry, kind: str) -> list[tuple[Document, ...]]:
    """Return all orders of three documents; of four, those that begin anywhere and go on in either direction.

    All models of an entry find its documents in the same way: those after the first one get three orders.
    """
    documents = tuple(entry.documents)
    if kind != entry.models[0]:
        return [documents, documents[1:] + documents[:1], documents[::-1]]
    if len(documents) == 3:
        return list(permutations(documents))
    turned = [documents[start:] + documents[:start] for start in range(len(documents))]
    return [*turned, *(each[::-1] for each in turned)]


def with_others(entry: Entry) -> list[list[Document]]:
    """Return the documents with another text in place of the first one, of the second one, and so on."""
    other = "A storm has closed the harbour."
    return [
        [each.model_copy(update={"page_content": other}) if each is changed else each for each in entry.documents]
        for changed in entry.documents
    ]


def test_there_are_entries_of_both_kinds_and_their_names_differ() -> None:
    assert len(ENTRIES) >= 70
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert {entry.warns for entry in ENTRIES} == {True, False}
    assert all(len(entry.documents) in {3, 4} for entry in ENTRIES)


@pytest.mark.parametrize(("entry", "kind"), CASES)
def test_an_entry_keeps_its_promise(entry: Entry, kind: str, lm: InvariantModel) -> None:
    model = MODELS[kind](lm)
    answers, warned = zip(*(ask(entry, model, documents) for documents in orders(entry, kind)), strict=True)
    distinct, silent = len(set(answers)), [index for index, each in enumerate(warned) if not each]
    if entry.warns:
        assert not silent, f"{distinct} distinct answers, and no warning in orders {silent}"
        assert entry.drops or distinct > 1, f"invariant, though declared to warn: {warned[0]}"
    else:
        assert distinct == 1, f"{distinct} distinct answers; no warning in {len(silent)} of {len(answers)} orders"
        assert not any(warned), f"invariant, though it warns: {max(warned)}"


@pytest.mark.parametrize(
    ("entry", "kind"), [case for case in CASES if not (case.values[0].warns or case.values[0].drops)]
)
def test_every_document_of_an_invariant_entry_is_read(entry: Entry, kind: str, lm: InvariantModel) -> None:
    model = MODELS[kind](lm)
    answers = [ask(entry, model, documents)[0] for documents in [entry.documents, *with_others(entry)]]
    assert len(set(answers)) == len(answers)


@pytest.mark.parametrize(("entry", "kind"), CASES)
def test_the_plain_model_shows_the_order_where_it_reads_the_documents(
    entry: Entry, kind: str, lm: InvariantModel
) -> None:
    model = PLAIN[kind](lm)
    answers = (ask(entry, model, documents)[0] for documents in orders(entry, kind))
    first = next(answers)
    assert any(other != first for other in answers) != entry.drops


@pytest.mark.parametrize("kind", MODELS)
def test_ordinary_prompts_give_no_warning(kind: str, lm: InvariantModel) -> None:
    model = MODELS[kind](lm)
    short = model.model_copy(update={"max_tokens": 1}) if "max_tokens" in type(model).model_fields else model
    assert len(ORDINARY) == 200
    for prompt in ORDINARY:
        with warnings.catch_warnings():
            warnings.simplefilter("error", OrderWarning)
            short.invoke(convert_to_messages(prompt))


def test_the_table_of_the_readme_is_current() -> None:
    current = README.read_text(encoding="utf-8")
    assert "<!-- entries:" in current
    assert fill(current) == current, "the table of entries in README.md is not current; run `make docs`"
