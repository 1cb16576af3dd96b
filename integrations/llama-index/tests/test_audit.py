"""What an audit finds out about the LLMs of this package."""

from __future__ import annotations

import re
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.evaluation.audit import Audit, audit
from invariant_rag.evaluation.audit.systems import as_system
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback
from llama_index.core.llms.mock import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
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
    return found["as it is"].measures["flip_rate"].value


@pytest.mark.parametrize("wrap", [canonical, vote])
def test_wrapped_llms_are_given_marked_documents(wrap: Any) -> None:
    assert flips(audit(Reader(), QUESTIONS, remedies=[])) == 1.0
    assert flips(audit(wrap(Reader()), QUESTIONS, remedies=[])) == 0.0


def test_our_llm_is_audited_as_the_model_that_it_is(model: InvariantModel) -> None:
    llm = InvariantLLM(model, max_tokens=6)
    found = audit(llm, QUESTIONS, remedies=["plain"])
    assert flips(found) == 0.0
    assert found["plain"].measures["flip_rate"].value > 0.0


def test_our_llm_is_audited_with_its_own_parameters(model: InvariantModel) -> None:
    llm = InvariantLLM(model, max_tokens=3, temperature=0.9, seed=1, stop=["x"], system_prompt="Be brief.")
    system = as_system(llm)
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1}
    assert (system.generation, system.message) == (
        {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]},
        "Be brief.",
    )
    assert system.name != as_system(InvariantLLM(model, max_tokens=3)).name


ECHOED = [
    {
        "question": f"What is number {number}?",
        "segments": [f"Number {number} is right{number}.", f"Nothing {number} 1.", f"Nothing {number} 2."],
        "answers": [f"right{number}"],
    }
    for number in range(2)
]


def test_llamaindex_llms_and_query_engines_are_recognised() -> None:
    # The mock says its prompt again, so whatever is listed first changes its answer.
    echo = audit(MockLLM(), ECHOED)
    assert echo["as it is"].measures["wording_rate"].value == 1.0
    assert echo["as it is"].measures["accuracy"].value == 1.0
    assert flips(echo) == 0.0  # it is right in every order, in other words

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

    engine = RetrieverQueryEngine(Found(), First(llm=MockLLM()))
    result = audit(engine, [{"question": "q", "answer": "q 1"}])
    assert result["as it is"].measures["slot_spread"].value == 1.0
    assert {each.name for each in result.measured} == {
        "as it is",
        "sort",
        "rerank",
        "top-3",
        "long-context-reorder",
        "vote",
    }
    with pytest.raises(UnsupportedCombination, match="to_input"):
        audit(engine, ECHOED, to_input=lambda question, segments: question)
