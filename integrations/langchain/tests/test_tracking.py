"""What is known of a run is known in that run alone, from the first one of a process on, and is gone with it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from invariant_rag.errors import OrderWarning
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda

import langchain_invariant_rag
from langchain_invariant_rag import ChatInvariant, Segments
from langchain_invariant_rag.tracking import RUNS

from .models import MAKE, Reader
from .shared import DOCUMENTS, QUESTION, Listed, joined, rag

FOUND = Listed()


def by_hand(documents):
    return f"{joined(documents)}\n\n{QUESTION}"


@pytest.fixture
def strict(lm):
    return ChatInvariant(model=lm, max_tokens=2, strict=True)


def told(answer):
    return answer.response_metadata["invariant"], answer.response_metadata["sets"]


def in_a_run(ask):
    """Give the prompt that a function of a run has written to a model, in the same run."""
    return (FOUND | RunnableLambda(lambda found: ask(by_hand(found)))).invoke(QUESTION)


def test_what_a_run_retrieved_is_nothing_to_another_one_during_and_after_it(strict):
    assert told(rag(strict, FOUND).invoke(QUESTION)) == (True, [3])
    assert told(strict.invoke(by_hand(DOCUMENTS))) == (None, [])  # of another tenant

    def other_tenant(text):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(strict.invoke, text).result()

    assert told(in_a_run(other_tenant)) == (None, [])
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
    plain = chat.model_copy(update={"find_documents": False}).invoke(by_hand(DOCUMENTS))
    assert answer.content == plain.content


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")  # or the filter would raise it
@pytest.mark.parametrize("kind", MAKE)
def test_strict_raises_what_is_only_warned_of_else(lm, kind):
    assert in_a_run(MAKE[kind](lm, strict=False).invoke)
    for error, options in (("as text", {"strict": True}), ("without any", {"require_segments": True})):
        with pytest.raises(OrderWarning, match=error):
            in_a_run(MAKE[kind](lm, **options).invoke)


@pytest.mark.parametrize(
    ("options", "sets"), [({"find_documents": False}, []), ({"method": "sequential", "ordering": "given"}, [3])]
)
def test_who_did_not_ask_for_sets_is_not_warned(strict, options, sets):
    chat = strict.model_copy(update=options)
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}")
    answer = rag(chat, FOUND, prompt=prompt).invoke(QUESTION)
    assert answer.response_metadata["sets"] == sets
    if not sets:  # nothing is looked at: the text is what a call without any retrieval gets
        assert answer.content == chat.invoke(by_hand(DOCUMENTS)).content


@pytest.mark.parametrize("model", [Reader(), FakeListLLM(responses=["a"])], ids=["chat", "completion"])
def test_a_model_that_knows_no_segments_is_not_given_marks_in_silence(model):
    with pytest.warns(OrderWarning, match="segment markers") as caught:
        model.invoke(f"{Segments(DOCUMENTS)}\n{QUESTION}")
    assert "canonical(model)" in str(caught[0].message)


def test_a_retrieval_on_its_own_is_known_until_the_next_one_and_in_its_task_alone(strict):
    found = FOUND.invoke(QUESTION)
    for each in found:  # a model may read one document
        strict.invoke(f"Is this relevant?\n{each.page_content}")
    with pytest.raises(OrderWarning, match="as text"):
        strict.invoke(by_hand(found))
    FOUND.invoke(QUESTION)
    Listed(documents=[Document("Salt is sold in Brenn."), Document("A storm has closed it.")]).invoke(QUESTION)
    assert told(strict.invoke(by_hand(found))) == (None, [])
    retrieved = asyncio.Event()

    async def tenant():
        documents = await FOUND.ainvoke(QUESTION)
        retrieved.set()
        await asyncio.sleep(0.1)
        with pytest.raises(OrderWarning, match="as text"):
            await strict.ainvoke(by_hand(documents))

    async def other():
        await retrieved.wait()
        return await strict.ainvoke(by_hand(DOCUMENTS))

    async def both():
        return (await asyncio.gather(tenant(), other()))[1]

    assert told(asyncio.run(both())) == (None, [])


def test_no_module_looks_into_frames():
    sources = [each.read_text(encoding="utf-8") for each in Path(langchain_invariant_rag.__file__).parent.rglob("*.py")]
    assert len(sources) > 10
    assert not any(word in source for source in sources for word in ("_getframe", "f_locals", "f_back"))
