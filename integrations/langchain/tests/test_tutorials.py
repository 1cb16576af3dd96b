"""The RAG tutorials of LangChain's documentation, in their own words but for the model line and the data.

They join documents into one text before the prompt. The model line tells the model which documents there are, so that
it finds them again in that text.
"""

from __future__ import annotations

import random
from typing import Any, TypedDict

import pytest
from invariant_rag import InvariantModel
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, ModelRequest, dynamic_prompt
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.graph import START, StateGraph

from langchain_invariant_rag import ChatInvariant, InvariantEmbeddings, Segments

TEXT = "\n\n".join(
    f"Ferry number {number} leaves the pier of {place} at {number} in the morning. It carries salt and letters, and "
    f"comes back in the evening.\n\nOn Sundays it stays in {place}."
    for number, place in enumerate(["Ostra", "Kellstead", "Marn", "Velo"], start=5)
)
QUESTION = "When does the ferry leave Marn?"


class Shuffled(InMemoryVectorStore):
    """A store that returns what it found in another order every time."""

    random_state = random.Random(0)

    def similarity_search(self, query: str, k: int = 4, **kwargs: Any) -> list[Document]:
        found = super().similarity_search(query, k, **kwargs)
        return self.random_state.sample(found, len(found))


@pytest.fixture(scope="module")
def all_splits() -> list[Document]:
    text_splitter = RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=40, add_start_index=True)
    return text_splitter.split_documents([Document(TEXT)])


@pytest.fixture(scope="module")
def vector_store(all_splits: list[Document]) -> InMemoryVectorStore:
    vector_store = Shuffled(InvariantEmbeddings())
    vector_store.add_documents(documents=all_splits)
    return vector_store


@pytest.fixture(scope="module")
def model(lm: InvariantModel, all_splits: list[Document]) -> ChatInvariant:
    return ChatInvariant(model=lm, known_documents=all_splits, max_tokens=12, sort_segments=False)


def answers(ask: Any) -> set[str]:
    return {ask() for _ in range(5)}


def test_retrieval_chain(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    system_prompt = (
        "You are an assistant for question-answering tasks. Use the following pieces of retrieved context to answer "
        "the question. If you don't know the answer, say that you don't know. Keep the answer concise.\n\n{context}"
    )
    prompt = ChatPromptTemplate.from_messages([("system", system_prompt), ("human", "{input}")])
    question_answer_chain = create_stuff_documents_chain(model, prompt)
    rag_chain = create_retrieval_chain(vector_store.as_retriever(), question_answer_chain)
    assert len(answers(lambda: rag_chain.invoke({"input": QUESTION})["answer"])) == 1


def test_expression_language(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    def format_docs(docs: list[Document]) -> str:
        return "\n\n".join(doc.page_content for doc in docs)

    prompt = ChatPromptTemplate.from_template("Question: {question} \nContext: {context} \nAnswer:")
    rag_chain: Any = (
        {"context": vector_store.as_retriever() | format_docs, "question": RunnablePassthrough()}
        | prompt
        | model
        | StrOutputParser()
    )
    assert len(answers(lambda: rag_chain.invoke(QUESTION))) == 1


def test_graph(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    class State(TypedDict):
        question: str
        context: list[Document]
        answer: str

    prompt = ChatPromptTemplate.from_template("Question: {question} \nContext: {context} \nAnswer:")

    def retrieve(state: State) -> Any:
        return {"context": vector_store.similarity_search(state["question"])}

    def generate(state: State) -> Any:
        docs_content = "\n\n".join(doc.page_content for doc in state["context"])
        messages = prompt.invoke({"question": state["question"], "context": docs_content})
        return {"answer": model.invoke(messages).content}

    builder = StateGraph(State).add_sequence([retrieve, generate])
    graph: Any = builder.add_edge(START, "retrieve").compile()
    assert len(answers(lambda: graph.invoke({"question": QUESTION})["answer"])) == 1


def test_agent_with_a_dynamic_prompt(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    @dynamic_prompt
    def prompt_with_context(request: ModelRequest[Any]) -> str:
        last_query = request.state["messages"][-1].text
        retrieved_docs = vector_store.similarity_search(last_query)
        docs_content = "\n\n".join(doc.page_content for doc in retrieved_docs)
        return f"You are a helpful assistant. Use the following context in your response:\n\n{docs_content}"

    agent = create_agent(model, tools=[], middleware=[prompt_with_context])
    message = {"role": "user", "content": QUESTION}
    seen = [agent.invoke({"messages": [message]})["messages"][-1] for _ in range(5)]
    assert len({answer.content for answer in seen}) == 1
    assert all(len(answer.response_metadata["order"]) == 4 for answer in seen)


def test_agent_whose_middleware_puts_context_into_the_question(
    model: ChatInvariant, vector_store: InMemoryVectorStore
) -> None:
    class Retrieving(AgentMiddleware[Any, Any, Any]):
        def before_model(self, state: Any, runtime: Any) -> dict[str, Any]:
            asked = state["messages"][-1]
            found = "\n\n".join(doc.page_content for doc in vector_store.similarity_search(asked.text))
            return {"messages": [asked.model_copy(update={"content": f"{asked.text}\n\nContext:\n{found}"})]}

    agent = create_agent(model, tools=[], middleware=[Retrieving()])
    seen = [agent.invoke({"messages": [("human", QUESTION)]})["messages"][-1] for _ in range(5)]
    assert len({answer.content for answer in seen}) == 1
    assert all(len(answer.response_metadata["order"]) == 4 for answer in seen)


def test_documents_that_are_marked_already_are_found_once(model: ChatInvariant, all_splits: list[Document]) -> None:
    answer = model.invoke(f"{Segments(all_splits[:2])}{QUESTION}")
    assert len(answer.response_metadata["order"]) == 2


def test_without_known_documents_those_of_the_run_are_found(
    model: ChatInvariant, vector_store: InMemoryVectorStore
) -> None:
    prompt = ChatPromptTemplate.from_template("{context}\n\n{input}")
    found, blind = (
        create_retrieval_chain(
            vector_store.as_retriever(),
            create_stuff_documents_chain(model.model_copy(update={"known_documents": [], **update}), prompt),
        )
        for update in ({}, {"find_documents": False})
    )
    assert len(answers(lambda: found.invoke({"input": QUESTION})["answer"])) == 1
    assert len(answers(lambda: blind.invoke({"input": QUESTION})["answer"])) > 1
