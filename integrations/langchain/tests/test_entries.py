"""Every entry is invariant, or warns, as the table of README.md says; and what is known of a run is known there alone.

The weights are random, and each letter of an answer is a hash of all logits, so four letters depend on everything that
the model reads. An entry keeps its promise if all orders of its documents give one answer, without a warning, and each
document is read; or, where it is declared to warn, if every order gives an `OrderWarning`. The plain model shows for
each entry that the order matters there. The first model of an entry is asked about all six orders of three documents,
and eight of the 24 of four; another one, in turn, about three.
"""

import asyncio
import hashlib
import re
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from operator import ne
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from framework_cases import EveryBit, caught
from invariant_rag.audit.systems import as_reply
from invariant_rag.errors import OrderWarning
from invariant_rag.testing.ordinary_prompts import ORDINARY
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import convert_to_messages
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore

import langchain_invariant_rag
from langchain_invariant_rag import ChatInvariant, Segments
from langchain_invariant_rag.tracking import RUNS

from .entries import ENTRIES
from .shared import DOCUMENTS, MAKE, QUESTION, TEXTS, Listed, Reader, joined, rag

README = Path(__file__).parent.parent / "README.md"
OBJECTS = ("`with_structured_output`", "`ToolStrategy`", "`ProviderStrategy`", "`response_format=` a class")
MODELS = {"the method, configured": ("chat", "completion"), **dict.fromkeys(OBJECTS, ("chat",))}
"""Those that are asked where the table does not tell: else all that take messages, or with a ° all there are."""
FOUR = (*DOCUMENTS, Document("Salt is sold in Brenn."))
NESTED = tuple(map(Document, ("The ferry leaves at noon.", "The ferry leaves at noon. It is salt.", "It is salt.")))
QUOTES = ('"noon",\nhe said', "It's two bakeries:\n- Alma's\n- Timo's", 'Carno\'s "light" has a \\ on its door.')
RETRIEVED = {
    "one document within another": NESTED,
    "nested": NESTED,
    "two equal texts": [
        Document(text, metadata={"year": n}) for n, text in ((1987, "a b"), (2021, "a b"), (1904, "c"))
    ],
    "JSON that escapes": [*map(Document, QUOTES)],
    "all metadata, then text": [
        Document(text, metadata={"title": text[:9], "at": f"{text[:4]}\n'12'"}) for text in TEXTS
    ],
    "retrieved before": FOUR,
    "default": FOUR,
}
"""What the retriever returns; else three documents."""
DROPS = "on `prompt | model`, which passes it to the prompt"
"""The framework keeps the documents from the model, so answers are equal though nobody read them."""


class ListedStore(InMemoryVectorStore):
    """A vector store that finds everything, in the order in which it was added."""

    def similarity_search(self, query, k=4, **kwargs):
        return self.get_by_ids(list(self.store))


class Case(NamedTuple):
    """Who is asked, and what finds the documents."""

    model: Any
    retriever: Any

    def find(self):
        """Retrieve on its own, before the model is asked."""
        return self.retriever.invoke(QUESTION)

    def store(self, documents=None):
        """Return the documents, or other ones, in a vector store. No retriever runs: nothing is known from before."""
        listed = self.retriever.documents if documents is None else documents
        return ListedStore.from_documents(listed, DeterministicFakeEmbedding(size=8))

    def ask(self, entry):
        answer = entry(self)
        return answer.invoke(QUESTION) if isinstance(answer, Runnable) else answer


class Row(NamedTuple):
    """What the table says of an entry."""

    way: str
    variant: str
    warns: bool  # every order gives an `OrderWarning`, because answers differ; else they are equal, without a warning
    models: tuple[str, ...]

    @property
    def documents(self):
        return RETRIEVED.get(self.variant, DOCUMENTS)

    def orders(self, kind):
        listed = list(permutations(self.documents))
        if kind != self.models[0]:
            return [listed[0], listed[len(listed) // 2], listed[-1]]
        return listed if len(listed) == 6 else listed[::3]

    def ask(self, model, documents):
        """Return the texts of the answers, and the warnings that somebody who shows all warnings gets to see."""
        case = Case(model, Listed(documents=list(documents)))
        answer, warned = caught(case.ask, ENTRIES[self.way][self.variant])
        texts = tuple(as_reply(each).text for each in (answer if isinstance(answer, list) else [answer]))
        assert all(texts)
        return texts, warned


def rows():
    """Return the rows of the table, an entry each."""
    (table,) = re.findall(r"<!-- entries: .*? -->\n\n.*?\n.*?\n(.*?)\n\n<!--", README.read_text("utf-8"), re.DOTALL)
    for line in table.split("\n"):
        way, variants, invariant, _ = (cell.replace("\\|", "|") for cell in line.strip("| ").split(" | "))
        for variant in variants.split("; "):
            name, everywhere = variant.removesuffix("°"), variant.endswith("°")
            models = tuple(MAKE) if everywhere else MODELS.get(name, ("chat", "canonical", "vote"))
            yield Row(way, name, {"yes": False, "no: warns": True}[invariant], models)


def cases():
    """Yield each entry with its first model and, by its name, one of the others, which find documents alike."""
    for row in TABLE:
        first, *others = row.models
        name = f"{row.way}: {row.variant}"
        for kind in [first, others[sum(name.encode()) % len(others)]] if others else [first]:
            yield pytest.param(row, kind, id=f"{name} [{kind}]")


TABLE = list(rows())


class Hashing(Reader):
    """It answers with a hash of everything that it was sent."""

    def _read(self, messages, keywords):
        request = [(message.type, message.content) for message in messages]
        request += [each.page_content for each in keywords.get("documents") or ()]
        return hashlib.sha256(repr(request).encode()).hexdigest()[:16]


def model_of(kind, lm, *, plain=False):
    """Return a model of ours, or the plain one in its place."""
    if kind in ("chat", "completion"):
        given = {"method": "sequential", "ordering": "given"} if plain else {}
        return MAKE[kind](lm, max_tokens=4, generation_kwargs={"logits_processor": [EveryBit(lm)]}, **given)
    return Hashing() if plain else MAKE[kind](lm, Hashing, **({"votes": 3} if kind == "vote" else {}))


def test_every_entry_has_a_row_of_its_own_and_there_are_both_kinds():
    listed = sorted(row[:2] for row in TABLE)
    assert {*MODELS, *RETRIEVED, DROPS} < {variant for _, variant in listed}
    assert listed == sorted((way, variant) for way, variants in ENTRIES.items() for variant in variants)
    assert len(set(listed)) == len(listed) >= 88
    assert {row.warns for row in TABLE} == {True, False}


@pytest.mark.parametrize(("row", "kind"), list(cases()))
def test_an_entry_keeps_its_promise_and_every_document_is_read_whose_order_the_plain_model_shows(row, kind, lm):
    model = model_of(kind, lm)
    answers, warned = zip(*(row.ask(model, documents) for documents in row.orders(kind)), strict=True)
    distinct, silent = len(set(answers)), [index for index, each in enumerate(warned) if not each]
    if row.warns:
        assert not silent, f"{distinct} distinct answers, and no warning in orders {silent}"
        assert distinct > 1, f"invariant, though declared to warn: {warned[0]}"
    else:
        assert distinct == 1, f"{distinct} distinct answers; no warning in {len(silent)} of {len(answers)} orders"
        assert not any(warned), f"invariant, though it warns: {max(warned)}"
        storm = {"page_content": "A storm has closed the harbour."}
        others = [[each.model_copy(update=storm) if each is changed else each for each in row.documents]
                  for changed in row.documents]  # fmt: skip
        texts = zip(answers[0], *(row.ask(model, each)[0] for each in others), strict=True)
        assert {len(set(each)) for each in texts} == {1 if row.variant == DROPS else 1 + len(others)}
    plain = (row.ask(model_of(kind, lm, plain=True), documents)[0] for documents in row.orders(kind))
    first = next(plain)
    assert any(all(map(ne, first, other)) for other in plain) != (row.variant == DROPS)


@pytest.mark.parametrize("kind", MAKE)
def test_ordinary_prompts_give_no_warning(kind, lm):
    model = MAKE[kind](lm)
    with warnings.catch_warnings(action="error", category=OrderWarning):
        for prompt in ORDINARY:
            model.invoke(convert_to_messages(prompt))


# --- what is known of a run -------------------------------------------------------------------------------------------

FOUND = Listed()
BY_HAND = f"{joined(DOCUMENTS)}\n\n{QUESTION}"


@pytest.fixture
def strict(lm):
    return ChatInvariant(model=lm, max_tokens=2, strict=True)


def told(answer):
    return answer.response_metadata["invariant"], answer.response_metadata["sets"]


def in_a_run(ask):
    """Give the prompt that a function of a run has written to a model, in the same run."""
    return (FOUND | RunnableLambda(lambda _: ask(BY_HAND))).invoke(QUESTION)


def test_what_a_run_retrieved_is_nothing_to_another_one_during_and_after_it(strict):
    assert told(rag(strict, FOUND).invoke(QUESTION)) == (True, [3])
    assert told(strict.invoke(BY_HAND)) == (None, [])  # of another tenant
    with ThreadPoolExecutor(1) as pool:
        assert told(in_a_run(lambda text: pool.submit(strict.invoke, text).result())) == (None, [])
    with pytest.raises(ZeroDivisionError):
        in_a_run(lambda _: 1 / 0)
    assert not RUNS._runs


def test_a_finished_string_stays_as_it_is_and_warns_once_with_the_fix(lm):
    chat = ChatInvariant(model=lm, max_tokens=2)
    with pytest.warns(OrderWarning) as caught:
        answer = in_a_run(chat.invoke)
    (warning,) = caught
    for fix in ("as_segments(retriever)", "SegmentsPlaceholder", "SEGMENT_PROMPT", "create_invariant_documents_chain"):
        assert fix in str(warning.message)
    assert told(answer) == (False, [])
    assert answer.content == chat.model_copy(update={"find_documents": False}).invoke(BY_HAND).content


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")  # or the filter would raise it
@pytest.mark.parametrize("kind", MAKE)
def test_strict_raises_what_is_only_warned_of_else(lm, kind):
    assert in_a_run(MAKE[kind](lm, strict=False).invoke)
    for error, options in (("as text", {"strict": True}), ("without any", {"require_segments": True})):
        with pytest.raises(OrderWarning, match=error):
            in_a_run(MAKE[kind](lm, **options).invoke)


def test_who_did_not_ask_for_sets_is_not_warned(strict):
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}")
    for options, sets in (({"method": "sequential", "ordering": "given"}, [3]), ({"find_documents": False}, [])):
        chat = strict.model_copy(update=options)
        answer = rag(chat, FOUND, prompt=prompt).invoke(QUESTION)
        assert answer.response_metadata["sets"] == sets
        assert in_a_run(chat.invoke).response_metadata["sets"] == []  # text is no reason to raise, either
    assert (
        answer.content == chat.invoke(BY_HAND).content
    )  # nothing is looked at: what a call without any retrieval gets


@pytest.mark.parametrize("model", [Reader(), FakeListLLM(responses=["a"])], ids=["chat", "completion"])
def test_a_model_that_knows_no_segments_is_not_given_marks_in_silence(model):
    with pytest.warns(OrderWarning, match="segment markers") as caught:
        model.invoke(f"{Segments(DOCUMENTS)}\n{QUESTION}")
    assert "canonical(model)" in str(caught[0].message)


async def test_a_retrieval_on_its_own_is_known_in_its_task_alone(strict):
    for each in FOUND.invoke(QUESTION):  # a model may read one document
        strict.invoke(f"Is this relevant?\n{each.page_content}")
    with pytest.raises(OrderWarning, match="as text"):
        strict.invoke(BY_HAND)
    retrieved = asyncio.Event()

    async def tenant():
        await FOUND.ainvoke(QUESTION)
        retrieved.set()
        await asyncio.sleep(0.1)
        with pytest.raises(OrderWarning, match="as text"):
            await strict.ainvoke(BY_HAND)

    async def other():
        await retrieved.wait()
        return await strict.ainvoke(BY_HAND)

    _, answer = await asyncio.gather(tenant(), other())
    assert told(answer) == (None, [])


def test_no_module_looks_into_frames():
    sources = [each.read_text(encoding="utf-8") for each in Path(langchain_invariant_rag.__file__).parent.rglob("*.py")]
    assert len(sources) > 10
    assert not any(word in source for source in sources for word in ("_getframe", "f_locals", "f_back"))
