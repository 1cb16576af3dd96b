"""What an audit finds out about the LLMs of this package."""

from __future__ import annotations

import re
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.evaluation.audit import Audit, audit
from invariant_rag.evaluation.audit.systems import as_system
from llama_index.core.llms import CompletionResponse, CustomLLM, LLMMetadata
from llama_index.core.llms.callbacks import llm_completion_callback

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
