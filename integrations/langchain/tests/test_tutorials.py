"""The RAG tutorials of LangChain's documentation, in their own words but for the model line and the data.

What a retriever returned is found in the variable of a template; what a function searched warns, with the fix.
"""

from __future__ import annotations

import random
from typing import Any, TypedDict

import pytest
from invariant_rag import InvariantModel
from langchain.agents import create_agent
from langchain.agents.middleware import ModelRequest, dynamic_prompt
from langchain_classic.chains import create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter
from langgraph.graph import START, StateGraph

from langchain_invariant_rag import ChatInvariant, InvariantEmbeddings, OrderWarning, Segments

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
def model(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=12, sort_segments=False)


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


def test_graph_whose_function_searches_warns_until_a_retriever_does(
    model: ChatInvariant, vector_store: InMemoryVectorStore
) -> None:
    class State(TypedDict):
        question: str
        context: list[Document]
        answer: str

    prompt = ChatPromptTemplate.from_template("Question: {question} \nContext: {context} \nAnswer:")

    def graph(search: Any) -> Any:
        def retrieve(state: State) -> Any:
            return {"context": search(state["question"])}

        def generate(state: State) -> Any:
            docs_content = "\n\n".join(doc.page_content for doc in state["context"])
            messages = prompt.invoke({"question": state["question"], "context": docs_content})
            return {"answer": model.invoke(messages).content}

        builder = StateGraph(State).add_sequence([retrieve, generate])
        return builder.add_edge(START, "retrieve").compile()

    with pytest.warns(OrderWarning, match="as_segments"):
        assert len(answers(lambda: graph(vector_store.similarity_search).invoke({"question": QUESTION})["answer"])) > 1
    retriever = vector_store.as_retriever()
    assert len(answers(lambda: graph(retriever.invoke).invoke({"question": QUESTION})["answer"])) == 1


def test_agent_with_a_tool(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    @tool(response_format="content_and_artifact")
    def retrieve_context(query: str) -> Any:
        """Retrieve information to help answer a query."""
        retrieved_docs = vector_store.similarity_search(query, k=2)
        serialized = "\n\n".join(f"Source: {doc.metadata}\nContent: {doc.page_content}" for doc in retrieved_docs)
        return serialized, retrieved_docs

    call = {"type": "tool_call", "id": "1", "name": "retrieve_context", "args": {"query": QUESTION}}

    def asked(question: str) -> Any:
        history = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), retrieve_context.invoke(call)]
        return model.invoke([*history, *([AIMessage("At seven."), HumanMessage(question)] if question else [])])

    for question in ("", "And on Sundays?"):  # the second turn keeps what the message of the tool has
        assert len({asked(question).content for _ in range(5)}) == 1
        assert asked(question).response_metadata["sets"] == [2]


def test_agent_with_a_dynamic_prompt_warns(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    def agent_with(write: Any) -> Any:
        @dynamic_prompt
        def prompt_with_context(request: ModelRequest[Any]) -> str:
            retrieved_docs = vector_store.similarity_search(request.state["messages"][-1].text)
            return (
                f"You are a helpful assistant. Use the following context in your response:\n\n{write(retrieved_docs)}"
            )

        return create_agent(model, tools=[], middleware=[prompt_with_context])

    def asked(write: Any) -> set[str]:
        agent = agent_with(write)
        return {agent.invoke({"messages": [("human", QUESTION)]})["messages"][-1].content for _ in range(5)}

    with pytest.warns(OrderWarning, match="as_segments"):
        assert len(asked(lambda docs: "\n\n".join(doc.page_content for doc in docs))) > 1
    assert len(asked(Segments)) == 1


def test_documents_that_are_marked_already_are_found_once(model: ChatInvariant, all_splits: list[Document]) -> None:
    answer = model.invoke(f"{Segments(all_splits[:2])}{QUESTION}")
    assert len(answer.response_metadata["order"]) == 2


def test_without_find_documents_none_are_found(model: ChatInvariant, vector_store: InMemoryVectorStore) -> None:
    prompt = ChatPromptTemplate.from_template("{context}\n\n{input}")
    blind = model.model_copy(update={"find_documents": False})
    chain = create_retrieval_chain(vector_store.as_retriever(), create_stuff_documents_chain(blind, prompt))
    assert len(answers(lambda: chain.invoke({"input": QUESTION})["answer"])) > 1
