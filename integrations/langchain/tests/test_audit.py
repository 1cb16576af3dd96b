"""What an audit finds out about models of this package, and about LangChain's runnables and agents."""

from typing import Any

import pytest
from framework_cases import WHO, flips
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import AuditFailed, UnsupportedCombination
from langchain_core.messages import AIMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langgraph.graph import START, MessagesState, StateGraph

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote

from .models import Reader, TextReader


def said(system, **options):
    return as_system(system, **options).ask(WHO, WHO.segments).text


@pytest.mark.parametrize("reader", [Reader(), TextReader()])
def test_wrapped_models_are_given_marked_documents(reader):
    assert (flips(reader), flips(canonical(reader)), flips(vote(reader))) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_our_models_keep_every_answer_with_their_own_parameters(kind, lm):
    assert flips(kind(model=lm, max_tokens=4)) == 0.0
    model = kind(model=lm, max_tokens=3, temperature=0.9, seed=1, stop=["x"], generation_kwargs={"top_k": 5})
    system = as_system(model)
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1, "top_k": 5}
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.name != as_system(model.model_copy(update={"temperature": 0.8})).name
    assert as_system(model, generation={"max_new_tokens": 2}).generation["max_new_tokens"] == 2


def of_mapping(given: dict[str, Any]) -> AIMessage:
    return AIMessage(f"{given['question']} {given['context'][0].page_content}")


def of_text(text: str) -> str:
    return text


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"Seen: {state['messages'][-1].content}")]}


TO_TEXT = RunnableLambda(lambda value: value.to_string())
CHAINS = [
    *map(RunnableLambda, (of_text, of_mapping, lambda given: {"answer": of_mapping(given)}, lambda text: text.strip())),
    *(ChatPromptTemplate.from_template(each) | TO_TEXT for each in ("{context} Question: {question}", "{text}")),
    StateGraph(MessagesState).add_node("reply", reply).add_edge(START, "reply").compile(),
]


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_get_what_their_input_schema_says_and_agents_a_message(chain):
    assert "Who?" in said(chain)
    assert "It was Ann." in said(chain)


def test_a_chain_that_never_sees_the_documents_or_asks_for_more_is_refused():
    with pytest.raises(AuditFailed, match="does not read the documents it is given") as refused:
        flips(RunnableLambda(lambda given: {"answer": given["question"]}))
    assert "behind the retriever" in refused.value.hint
    assert flips(RunnableLambda(lambda given: f"{given['input']} {given['context'][0].page_content}")) == 1.0
    with pytest.raises(UnsupportedCombination, match="nothing is known of tone"):
        as_system(ChatPromptTemplate.from_template("{context} {question} {tone}") | RunnableLambda(str))
    assert said(RunnableLambda(of_text), to_input=lambda question, segments: question) == "Who?"
