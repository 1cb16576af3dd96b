"""What is known of a run is known in that run alone, from the first one of a process on, and is gone with it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from langchain_core.documents import Document
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

import langchain_invariant_rag
from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote
from langchain_invariant_rag.tracking import RUNS

from .plain_models import Reader
from .shared import DOCUMENTS, QUESTION, Listed

PROMPT = ChatPromptTemplate.from_template("{context}\n\n{question}")
PACKAGE = Path(langchain_invariant_rag.__file__).parent


def joined(documents: Any) -> str:
    return "\n\n".join(each.page_content for each in documents)


def rag(model: Any, retriever: BaseRetriever) -> Any:
    return {"context": retriever | joined, "question": RunnablePassthrough()} | PROMPT | model


def test_nothing_is_left_of_a_run(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=2, strict=True)
    assert rag(chat, Listed(documents=DOCUMENTS)).invoke(QUESTION).response_metadata["sets"] == [3]
    answer = chat.invoke(text_of(DOCUMENTS))  # of another tenant
    assert (answer.response_metadata["invariant"], answer.response_metadata["sets"]) == (None, [])
    with pytest.raises(ZeroDivisionError):
        (Listed(documents=DOCUMENTS) | (lambda _: 1 / 0)).invoke(QUESTION)
    assert not RUNS._runs


def test_what_a_run_retrieved_is_nothing_to_another_that_goes_on_at_the_same_time(lm: InvariantModel) -> None:
    strict = ChatInvariant(model=lm, max_tokens=2, strict=True)

    def other_tenant(documents: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(strict.invoke, text_of(documents)).result()

    answer = (Listed(documents=DOCUMENTS) | RunnableLambda(other_tenant)).invoke(QUESTION)
    assert (answer.response_metadata["invariant"], answer.response_metadata["sets"]) == (None, [])


def test_a_finished_string_stays_as_it_is_and_warns_once_with_the_fix(lm: InvariantModel) -> None:
    chat, seen = ChatInvariant(model=lm, max_tokens=2), []

    def ask(documents: Any) -> Any:
        seen.append(f"{joined(documents)}\n\n{QUESTION}")
        return chat.invoke(seen[-1])

    with pytest.warns(OrderWarning) as caught:
        answer = (Listed(documents=DOCUMENTS) | RunnableLambda(ask)).invoke(QUESTION)
    (warning,) = caught
    for fix in ("as_segments(retriever)", "SegmentsPlaceholder", "SEGMENT_PROMPT", "create_invariant_documents_chain"):
        assert fix in str(warning.message)
    assert answer.response_metadata["invariant"] is False
    assert answer.content == chat.model_copy(update={"find_documents": False}).invoke(seen[0]).content


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")  # or the filter would raise it
@pytest.mark.parametrize("kind", ["chat", "completion", "canonical", "vote"])
def test_strict_raises_what_is_only_warned_of_else(lm: InvariantModel, kind: str) -> None:
    def model(**options: bool) -> Any:
        if kind in ("canonical", "vote"):
            return (canonical if kind == "canonical" else vote)(Reader(), **options)
        return (ChatInvariant if kind == "chat" else InvariantLLM)(model=lm, max_tokens=2, **options)

    def ask(**options: bool) -> Any:
        asked = RunnableLambda(lambda documents: model(**options).invoke(text_of(documents)))
        return (Listed(documents=DOCUMENTS) | asked).invoke(QUESTION)

    assert ask(strict=False)
    for error, options in (("as text", {"strict": True}), ("without any", {"require_segments": True})):
        with pytest.raises(OrderWarning, match=error):
            ask(**options)


@pytest.mark.parametrize(
    ("options", "sets"),
    [({"find_documents": False}, []), ({"method": "sequential", "ordering": "given"}, [3])],
)
def test_who_did_not_ask_for_sets_is_not_warned(lm: InvariantModel, options: dict[str, Any], sets: list[int]) -> None:
    chat = ChatInvariant(model=lm, max_tokens=4, strict=True, **options)
    answer = rag(chat, Listed(documents=DOCUMENTS)).invoke(QUESTION)
    assert answer.response_metadata["sets"] == sets
    if not sets:  # nothing is looked at: the text is what a call without any retrieval gets
        assert answer.content == chat.invoke(text_of(DOCUMENTS)).content


def text_of(documents: Any) -> str:
    return f"{joined(documents)}\n\n{QUESTION}"


def test_asynchronous_retrievers_are_heard_in_their_task_alone(lm: InvariantModel) -> None:
    strict = ChatInvariant(model=lm, max_tokens=2, strict=True)
    text, retrieved = text_of(DOCUMENTS), asyncio.Event()

    async def tenant() -> None:
        documents = await Listed(documents=DOCUMENTS).ainvoke(QUESTION)
        retrieved.set()
        await asyncio.sleep(0.1)
        with pytest.raises(OrderWarning, match="as text"):
            await strict.ainvoke(text_of(documents))

    async def other() -> Any:
        await retrieved.wait()
        return await strict.ainvoke(text)

    async def both() -> Any:
        return (await asyncio.gather(tenant(), other()))[1]

    assert asyncio.run(both()).response_metadata["invariant"] is None


def test_the_next_retrieval_replaces_the_last_and_a_model_may_read_one_document(lm: InvariantModel) -> None:
    strict = ChatInvariant(model=lm, max_tokens=2, strict=True)
    documents = Listed(documents=DOCUMENTS).invoke(QUESTION)
    for each in documents:
        strict.invoke(f"Is this relevant?\n{each.page_content}")
    with pytest.raises(OrderWarning, match="as text"):
        strict.invoke(text_of(documents))
    text = text_of(Listed(documents=DOCUMENTS).invoke(QUESTION))
    Listed(documents=[Document("Salt is sold in Brenn."), Document("A storm has closed it.")]).invoke(QUESTION)
    assert strict.invoke(text).response_metadata["invariant"] is None


FIRST = """
    from langchain_invariant_rag import ChatInvariant
    from langchain_core.documents import Document
    from langchain_core.prompts import ChatPromptTemplate
    from langchain_core.retrievers import BaseRetriever
    from langchain_core.runnables import RunnablePassthrough

    class Listed(BaseRetriever):
        def _get_relevant_documents(self, query, *, run_manager):
            return [Document("Ostra has a red flag."), Document("Ostra lies on the Senn.")]

    def ask(inputs):  # the model is made after the retriever has run
        return ChatInvariant(max_tokens=2).invoke(inputs)

    prompt = ChatPromptTemplate.from_template("{context} {question}")
    context = Listed() | (lambda found: " ".join(each.page_content for each in found))
    chain = {"context": context, "question": RunnablePassthrough()} | prompt | ask
    print([chain.invoke("Which flag?").response_metadata["sets"] for _ in range(2)])
"""


def test_the_first_call_of_a_process_is_as_good_as_the_second() -> None:
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(FIRST)], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[[2], [2]]"


def test_no_module_looks_into_frames() -> None:
    sources = [each.read_text(encoding="utf-8") for each in PACKAGE.rglob("*.py")]
    assert len(sources) > 10
    assert not any(word in source for source in sources for word in ("_getframe", "f_locals", "f_back"))
