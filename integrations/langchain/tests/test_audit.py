"""What an audit finds out about models of this package, and about chains that retrieve by themselves."""

from __future__ import annotations

import re
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.audit import Audit, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import AuditFailed
from langchain_classic.chains import create_retrieval_chain
from langchain_core.language_models import BaseChatModel
from langchain_core.language_models.llms import LLM
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.runnables import RunnableLambda

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote

from .shared import DOCUMENTS, Listed

QUESTIONS = [
    {"question": f"Which is number {number}?", "segments": [f"{name} {number}" for name in ("one", "two", "three")]}
    for number in range(3)
]


def first_document(text: str) -> str:
    return re.findall(r"Document: (.*)", text)[0]


class Reader(BaseChatModel):
    """Answers with the first document that it reads."""

    @property
    def _llm_type(self) -> str:
        return "reader"

    def _generate(self, messages: list[Any], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage(first_document(messages[-1].content))
        return ChatResult(generations=[ChatGeneration(message=message)])


class TextReader(LLM):
    """The same as a completion model."""

    @property
    def _llm_type(self) -> str:
        return "reader"

    def _call(self, prompt: str, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> str:
        return first_document(prompt)


def flips(found: Audit) -> float:
    return len(found.flips) / len(found.asked)


@pytest.mark.parametrize("wrap", [canonical, vote])
@pytest.mark.parametrize("reader", [Reader(), TextReader()])
def test_wrapped_models_are_given_marked_documents(reader: Any, wrap: Any) -> None:
    assert flips(audit(reader, QUESTIONS, remedies=[])) == 1.0
    assert flips(audit(wrap(reader), QUESTIONS, remedies=[])) == 0.0


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_our_models_keep_every_answer(kind: Any, lm: InvariantModel) -> None:
    assert flips(audit(kind(model=lm, max_tokens=4), QUESTIONS, remedies=[])) == 0.0


def test_our_models_are_audited_with_their_own_parameters(lm: InvariantModel) -> None:
    model = ChatInvariant(model=lm, max_tokens=3, temperature=0.9, seed=1, stop=["x"], generation_kwargs={"top_k": 5})
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1, "top_k": 5}
    system = as_system(model)
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.name != as_system(model.model_copy(update={"temperature": 0.8})).name
    assert as_system(model, generation={"max_new_tokens": 2}).generation["max_new_tokens"] == 2
    tokens = [
        audit(ChatInvariant(model=lm, max_tokens=most), QUESTIONS, remedies=[]).as_dict()["tokens"] for most in (3, 5)
    ]
    assert tokens[1] - tokens[0] == 2 * 5 * len(QUESTIONS)


def test_a_chain_that_retrieves_by_itself_is_audited_through_its_combine_chain() -> None:
    combine = RunnableLambda(lambda given: f"{given['input']} {given['context'][0].page_content}")
    with pytest.raises(AuditFailed, match="does not read the documents it is given"):
        audit(create_retrieval_chain(Listed(documents=DOCUMENTS), combine), QUESTIONS)
    assert flips(audit(combine, QUESTIONS, remedies=[])) == 1.0
