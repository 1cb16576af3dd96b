"""What is known of a run is known in that run alone, from the first one of a process on, and is gone with it."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from invariant_rag.errors import OrderWarning
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough

import langchain_invariant_rag
from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments, canonical, vote
from langchain_invariant_rag.tracking import RUNS

from .models import Reader
from .shared import DOCUMENTS, QUESTION, Listed

FOUND = Listed(documents=DOCUMENTS)
PACKAGE = Path(langchain_invariant_rag.__file__).parent


def text_of(documents):
    return "\n\n".join([*(each.page_content for each in documents), QUESTION])


def rag(model):
    context = FOUND | (lambda found: "\n\n".join(each.page_content for each in found))
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}")
    return {"context": context, "question": RunnablePassthrough()} | prompt | model


@pytest.fixture
def strict(lm):
    return ChatInvariant(model=lm, max_tokens=2, strict=True)


def told(answer):
    return answer.response_metadata["invariant"], answer.response_metadata["sets"]


def test_what_a_run_retrieved_is_nothing_to_another_one_during_and_after_it(strict):
    assert told(rag(strict).invoke(QUESTION)) == (True, [3])
    assert told(strict.invoke(text_of(DOCUMENTS))) == (None, [])  # of another tenant

    def other_tenant(documents):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(strict.invoke, text_of(documents)).result()

    assert told((FOUND | RunnableLambda(other_tenant)).invoke(QUESTION)) == (None, [])
    with pytest.raises(ZeroDivisionError):
        (FOUND | (lambda _: 1 / 0)).invoke(QUESTION)
    assert not RUNS._runs


def test_a_finished_string_stays_as_it_is_and_warns_once_with_the_fix(lm):
    chat = ChatInvariant(model=lm, max_tokens=2)
    with pytest.warns(OrderWarning) as caught:
        answer = (FOUND | RunnableLambda(lambda found: chat.invoke(text_of(found)))).invoke(QUESTION)
    (warning,) = caught
    for fix in ("as_segments(retriever)", "SegmentsPlaceholder", "SEGMENT_PROMPT", "create_invariant_documents_chain"):
        assert fix in str(warning.message)
    assert told(answer) == (False, [])
    plain = chat.model_copy(update={"find_documents": False}).invoke(text_of(DOCUMENTS))
    assert answer.content == plain.content


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")  # or the filter would raise it
@pytest.mark.parametrize("kind", ["chat", "completion", "canonical", "vote"])
def test_strict_raises_what_is_only_warned_of_else(lm, kind):
    def ask(**options):
        models = {
            "chat": lambda: ChatInvariant(model=lm, max_tokens=2, **options),
            "completion": lambda: InvariantLLM(model=lm, max_tokens=2, **options),
            "canonical": lambda: canonical(Reader(), **options),
            "vote": lambda: vote(Reader(), **options),
        }
        return (FOUND | RunnableLambda(lambda found: models[kind]().invoke(text_of(found)))).invoke(QUESTION)

    assert ask(strict=False)
    for error, options in (("as text", {"strict": True}), ("without any", {"require_segments": True})):
        with pytest.raises(OrderWarning, match=error):
            ask(**options)


@pytest.mark.parametrize(
    ("options", "sets"), [({"find_documents": False}, []), ({"method": "sequential", "ordering": "given"}, [3])]
)
def test_who_did_not_ask_for_sets_is_not_warned(strict, options, sets):
    chat = strict.model_copy(update=options)
    answer = rag(chat).invoke(QUESTION)
    assert answer.response_metadata["sets"] == sets
    if not sets:  # nothing is looked at: the text is what a call without any retrieval gets
        assert answer.content == chat.invoke(text_of(DOCUMENTS)).content


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
        strict.invoke(text_of(found))
    FOUND.invoke(QUESTION)
    Listed(documents=[Document("Salt is sold in Brenn."), Document("A storm has closed it.")]).invoke(QUESTION)
    assert told(strict.invoke(text_of(found))) == (None, [])
    retrieved = asyncio.Event()

    async def tenant():
        documents = await FOUND.ainvoke(QUESTION)
        retrieved.set()
        await asyncio.sleep(0.1)
        with pytest.raises(OrderWarning, match="as text"):
            await strict.ainvoke(text_of(documents))

    async def other():
        await retrieved.wait()
        return await strict.ainvoke(text_of(DOCUMENTS))

    async def both():
        return (await asyncio.gather(tenant(), other()))[1]

    assert told(asyncio.run(both())) == (None, [])


def test_no_module_looks_into_frames():
    sources = [each.read_text(encoding="utf-8") for each in PACKAGE.rglob("*.py")]
    assert len(sources) > 10
    assert not any(word in source for source in sources for word in ("_getframe", "f_locals", "f_back"))
