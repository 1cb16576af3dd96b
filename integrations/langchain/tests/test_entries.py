"""Every entry of the matrix is invariant, or warns: exactly as the table of README.md says.

The weights are random, and each letter of an answer is a hash of all logits, so four letters depend on everything that
the model reads. An entry keeps its promise if all orders of its documents give one answer, without a warning, and each
document is read; or, where it is declared to warn, if every order gives an `OrderWarning`. The plain model shows for
each entry that the order matters there. The first model of an entry is asked about all six orders of three documents,
and eight of the 24 of four; another one, in turn, about three.
"""

import hashlib
import warnings
from itertools import permutations
from pathlib import Path
from typing import ClassVar

import pytest
from framework_cases import EveryBit, caught
from invariant_rag.errors import OrderWarning
from invariant_rag.testing.ordinary_prompts import ORDINARY
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import AIMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatResult

from . import chain_entries, run_entries  # noqa: F401 - they add entries
from .entries import ENTRIES, fill, text_of
from .models import MAKE
from .shared import Listed

README = Path(__file__).parent.parent / "README.md"


def sampled(entry):
    """Return the first model of an entry and, by its name, one of the others, which find documents in the same way."""
    first, *others = entry.models
    return [first, others[sum(entry.name.encode()) % len(others)]] if others else [first]


CASES = [pytest.param(entry, kind, id=f"{entry.name} [{kind}]") for entry in ENTRIES for kind in sampled(entry)]
every_entry = pytest.mark.parametrize(("entry", "kind"), CASES)


class Hashing(BaseChatModel):
    """A deterministic model behind an API: it answers with a hash of everything that it was sent."""

    _llm_type: ClassVar[str] = "hashing"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        request = [(message.type, message.content) for message in messages]
        request += [each.page_content for each in kwargs.get("documents") or ()]
        answer = hashlib.sha256(repr(request).encode()).hexdigest()[:16]
        return ChatResult(generations=[ChatGeneration(message=AIMessage(answer))])


def model_of(kind, lm, *, plain=False):
    """Return a model of ours, or the plain one in its place."""
    if kind in ("chat", "completion"):
        given = {"method": "sequential", "ordering": "given"} if plain else {}
        return MAKE[kind](lm, max_tokens=4, generation_kwargs={"logits_processor": [EveryBit(lm)]}, **given)
    return Hashing() if plain else MAKE[kind](lm, Hashing, **({"votes": 3} if kind == "vote" else {}))


def ask(entry, model, documents):
    """Return the answer, and the warnings that somebody who shows all warnings gets to see."""
    answer, warned = caught(entry.answer, model, Listed(documents=list(documents)))
    assert text_of(answer)
    return text_of(answer), warned


def orders(entry, kind):
    listed = list(permutations(entry.documents))
    if kind != entry.models[0]:
        return [listed[0], listed[len(listed) // 2], listed[-1]]
    return listed if len(listed) == 6 else listed[::3]


@every_entry
def test_an_entry_keeps_its_promise_and_every_document_is_read(entry, kind, lm):
    model = model_of(kind, lm)
    answers, warned = zip(*(ask(entry, model, documents) for documents in orders(entry, kind)), strict=True)
    distinct, silent = len(set(answers)), [index for index, each in enumerate(warned) if not each]
    if entry.warns:
        assert not silent, f"{distinct} distinct answers, and no warning in orders {silent}"
        assert distinct > 1, f"invariant, though declared to warn: {warned[0]}"
        return
    assert distinct == 1, f"{distinct} distinct answers; no warning in {len(silent)} of {len(answers)} orders"
    assert not any(warned), f"invariant, though it warns: {max(warned)}"
    if not entry.drops:
        storm = {"page_content": "A storm has closed the harbour."}
        others = [[each.model_copy(update=storm) if each is changed else each for each in entry.documents]
                  for changed in entry.documents]  # fmt: skip
        assert len({answers[0], *(ask(entry, model, each)[0] for each in others)}) == 1 + len(others)


@every_entry
def test_the_plain_model_shows_the_order_where_it_reads_the_documents(entry, kind, lm):
    answers = (ask(entry, model_of(kind, lm, plain=True), documents)[0] for documents in orders(entry, kind))
    first = next(answers)
    assert any(other != first for other in answers) != entry.drops


@pytest.mark.parametrize("kind", MAKE)
def test_ordinary_prompts_give_no_warning(kind, lm):
    model = model_of(kind, lm)
    short = model.model_copy(update={"max_tokens": 1}) if kind in ("chat", "completion") else model
    assert len(ORDINARY) == 200
    with warnings.catch_warnings(action="error", category=OrderWarning):
        for prompt in ORDINARY:
            short.invoke(convert_to_messages(prompt))


def test_there_are_entries_of_both_kinds_and_the_table_of_the_readme_has_them():
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES) >= 71
    assert {entry.warns for entry in ENTRIES} == {True, False}
    current = README.read_text(encoding="utf-8")
    assert "<!-- entries:" in current
    assert fill(current, ENTRIES) == current, "the table of entries in README.md is not current; run `make docs`"


if __name__ == "__main__":  # as `make docs` runs it
    README.write_text(fill(README.read_text(encoding="utf-8"), ENTRIES), encoding="utf-8")
