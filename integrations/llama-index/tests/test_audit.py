"""What an audit finds out about the LLMs of this package."""

from __future__ import annotations

import re
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.audit import Audit, Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.segments import Segment
from llama_index.core.chat_engine.types import AgentChatResponse, BaseChatEngine
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from llama_index.llms.invariant_rag import InvariantLLM, canonical, vote

QUESTIONS = [
    {"question": f"Which is number {number}?", "segments": [f"{name} {number}" for name in ("one", "two", "three")]}
    for number in range(3)
]


class Reader(CustomLLM):
    """Answers with the first document that it reads."""

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata()

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        return CompletionResponse(text=re.findall(r"Document: (.*)", prompt)[0])

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def flips(found: Audit) -> float:
    return len(found.flips) / len(found.asked)


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_wrapped_llms_are_given_marked_documents(wrap: Any) -> None:
    assert flips(audit(Reader(), QUESTIONS, remedies=[])) == 1.0
    assert flips(audit(wrap(Reader()), QUESTIONS, remedies=[])) == 0.0


def test_our_llm_is_audited_as_the_model_that_it_is(model: InvariantModel) -> None:
    llm = InvariantLLM(model, max_tokens=6)
    assert flips(audit(llm, QUESTIONS, remedies=["sort"])) == 0.0
    plain = InvariantLLM(model.with_method("sequential", ordering="given"), max_tokens=6)
    assert flips(audit(plain, QUESTIONS, remedies=[])) > 0.0


def test_our_llm_is_audited_with_its_own_parameters(model: InvariantModel) -> None:
    llm = InvariantLLM(model, max_tokens=3, temperature=0.9, seed=1, stop=["x"], system_prompt="Be brief.")
    system = as_system(llm)
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1}
    assert (system.generation, system.message) == (
        {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]},
        "Be brief.",
    )
    assert system.name != as_system(InvariantLLM(model, max_tokens=3)).name


ASKED = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))


def said(system: Any, **options: Any) -> str:
    return as_system(system, **options).ask(ASKED, ASKED.segments).text


def test_engines_of_llamaindex_are_recognised() -> None:  # noqa: C901 - five small classes

    class Found(BaseRetriever):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            found = [f"{query_bundle.query_str} {number}" for number in range(3)]
            return [NodeWithScore(node=TextNode(text=text), score=1.0) for text in found]

    class First(BaseSynthesizer):
        def _get_prompts(self) -> dict[str, Any]:
            return {}

        def _update_prompts(self, prompts: Any) -> None:
            pass

        def get_response(self, query_str: str, text_chunks: Any, **kwargs: Any) -> str:
            return str(text_chunks[0])

        async def aget_response(self, query_str: str, text_chunks: Any, **kwargs: Any) -> str:
            return str(text_chunks[0])

    class Echo(CustomQueryEngine):
        def custom_query(self, query_str: str) -> str:
            return query_str

    class Chat(BaseChatEngine):
        """Says all that it was ever told."""

        def __init__(self) -> None:
            self.told = list[str]()

        def reset(self) -> None:
            self.told.clear()

        def chat(self, message: str, chat_history: Any = None) -> AgentChatResponse:
            self.told.append(message)
            return AgentChatResponse(response=" ".join(self.told))

        async def achat(self, message: str, chat_history: Any = None) -> AgentChatResponse:
            return self.chat(message)

        stream_chat = astream_chat = achat
        chat_history: Any = ()

    synthesizer, chat = First(llm=MockLLM()), Chat()
    for engine in (MockLLM(), Echo(), chat, synthesizer, RetrieverQueryEngine(Found(), synthesizer)):
        assert "It was Ann." in said(engine)
    assert said(chat) == said(chat)  # it forgets what it was asked before
    found = audit(RetrieverQueryEngine(Found(), synthesizer), [{"question": "q", "answer": "q 1"}], remedies=())
    assert found.asked[0].question.segments[1].text == "q 1"
    with pytest.raises(UnsupportedCombination, match="to_input"):
        as_system(RetrieverQueryEngine(Found(), synthesizer), to_input=lambda question, segments: question)
