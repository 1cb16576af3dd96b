"""What an audit finds out about the LLMs of this package, and about engines of LlamaIndex."""

from __future__ import annotations

import pytest
from cases import HashingLLM, ListRetriever, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.audit import Question, audit
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.segments import Segment
from llama_index.core import get_response_synthesizer
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import CustomQueryEngine, RetrieverQueryEngine

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


class Echo(CustomQueryEngine):
    def custom_query(self, query_str: str) -> str:
        return query_str


def test_engines_of_llamaindex_are_recognized() -> None:
    asked = Question("Who?", (Segment("It was Ann.", "Page"), Segment("Nobody.")), ("Ann",))
    synthesizer = get_response_synthesizer(MockLLM())
    engine = RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer)
    chat = SimpleChatEngine.from_defaults(llm=MockLLM())
    for system in (MockLLM(), Echo(), synthesizer, engine, chat):
        assert "It was Ann." in as_system(system).ask(asked, asked.segments).text
    assert len({as_system(chat).ask(asked, asked.segments).text for _ in range(2)}) == 1, "it forgets earlier questions"
    found = audit(engine, [{"question": "q", "answer": "barley"}], remedies=())
    assert found.asked[0].question.segments[1].text == nodes_of()[1].text
    with pytest.raises(UnsupportedCombination, match="to_input"):
        as_system(engine, to_input=lambda question, segments: question)


def test_our_llms_do_not_flip_and_others_do(model: InvariantModel) -> None:
    plain = InvariantLLM(model.with_method("sequential", ordering="given"), max_tokens=6)
    others = [(HashingLLM(), 3), (canonical(HashingLLM()), 0), (vote(HashingLLM()), 0)]
    for llm, flipped in [*others, (InvariantLLM(model, max_tokens=6), 0), (plain, None)]:
        flips = len(audit(llm, QUESTIONS, remedies=[]).flips)
        assert flips > 0 if flipped is None else flips == flipped
