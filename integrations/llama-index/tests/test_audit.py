"""What an audit finds out about the LLMs of this package, and about engines of LlamaIndex."""

from __future__ import annotations

import re
from typing import Any

import pytest
from cases import ListRetriever, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.audit import Audit, Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.segments import Segment
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer

from llama_index.llms.invariant_rag import InvariantLLM, canonical, vote

QUESTIONS = [
    {"question": f"Which is number {number}?", "segments": [f"{name} {number}" for name in ("one", "two", "three")]}
    for number in range(3)
]


def test_our_llm_is_audited_with_its_own_parameters(model: InvariantModel) -> None:
    options = {"temperature": 0.9, "seed": 1, "stop": ["x"], "system_prompt": "Be brief."}
    system = as_system(InvariantLLM(model, max_tokens=3, **options))
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1}
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.message == "Be brief."
    assert system.name != as_system(InvariantLLM(model, max_tokens=3)).name


class First(BaseSynthesizer):
    """Answers with the first node."""

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


def test_engines_of_llamaindex_are_recognized() -> None:
    asked = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))
    engine = RetrieverQueryEngine(ListRetriever(nodes_of()), First(llm=MockLLM()))
    chat = SimpleChatEngine.from_defaults(llm=MockLLM())
    for system in (MockLLM(), Echo(), First(llm=MockLLM()), engine, chat):
        assert "It was Ann." in as_system(system).ask(asked, asked.segments).text
    assert len({as_system(chat).ask(asked, asked.segments).text for _ in range(2)}) == 1, "it forgets earlier questions"
    found = audit(engine, [{"question": "q", "answer": "barley"}], remedies=())
    assert found.asked[0].question.segments[1].text == nodes_of()[1].text
    with pytest.raises(UnsupportedCombination, match="to_input"):
        as_system(engine, to_input=lambda question, segments: question)


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


def test_our_llms_do_not_flip_and_others_do(model: InvariantModel) -> None:
    assert flips(audit(Reader(), QUESTIONS, remedies=[])) == 1.0
    for ours in (canonical(Reader()), vote(Reader()), InvariantLLM(model, max_tokens=6)):
        assert flips(audit(ours, QUESTIONS, remedies=[])) == 0.0
    plain = InvariantLLM(model.with_method("sequential", ordering="given"), max_tokens=6)
    assert flips(audit(plain, QUESTIONS, remedies=[])) > 0.0
