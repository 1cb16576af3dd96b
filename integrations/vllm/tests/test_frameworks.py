"""What runs on an `InvariantModel` runs on vLLM by changing the model line."""

from __future__ import annotations

from concurrent.futures import CancelledError
from threading import Event
from typing import Any

import pytest
from invariant_rag import InvariantModel, KeyValueCache, MicroBatcher, Segment
from invariant_rag.audit import Question, audit
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.digest import model_digest
from langchain_core.messages import HumanMessage
from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_block
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.invariant_rag import InvariantLLM as LlamaIndexLLM
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

from tests.documents import documents, question
from vllm_invariant_rag import VLLMBackend


def chat_message(segments: list[Segment], asked: str) -> HumanMessage:
    blocks: list[Any] = [dict(to_block(each)) for each in segments]
    return HumanMessage(content=[*blocks, {"type": "text", "text": asked}])


def test_chat_invariant_answers_alike_on_vllm(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    segments = documents(5, seed=400)
    here, there = ChatInvariant(model=lm, max_tokens=16), ChatInvariant(model=on_vllm, max_tokens=16)
    for order in (segments, segments[::-1]):
        message = chat_message(order, question(segments))
        ours, theirs = there.invoke([message]), here.invoke([message])
        assert ours.content == theirs.content
        assert ours.response_metadata["invariant"] is True
        assert "".join(str(chunk.content) for chunk in there.stream([message])) == ours.content


def test_calls_that_would_be_batched_here_are_left_to_vllm(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    here = ChatInvariant(model=lm, max_tokens=12)
    there = ChatInvariant(model=on_vllm, max_tokens=12, micro_batching=True)
    chunks = [documents(3, seed) for seed in (410, 411, 412)]
    messages = [[chat_message(each, question(each))] for each in chunks]
    assert [each.content for each in there.batch(messages)] == [each.content for each in here.batch(messages)]
    assert "".join(str(each.content) for each in there.stream(messages[0])) == here.invoke(messages[0]).content
    batcher, prompts = MicroBatcher(), [lm.chat_prompt(question(each), each) for each in chunks]
    streams = [batcher.stream(on_vllm, each, {"max_new_tokens": 12}) for each in prompts]
    assert ["".join(each) for each in streams] == [lm.generate(each, max_new_tokens=12).text for each in prompts]
    abandoned = Event()
    abandoned.set()
    with pytest.raises(CancelledError):
        batcher.generate(on_vllm, prompts[0], abandoned=abandoned)


def test_invariant_llm_answers_alike_on_vllm_in_batches(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    here, there = InvariantLLM(model=lm, max_tokens=16), InvariantLLM(model=on_vllm, max_tokens=16, stop=["."])
    texts = [f"Documents: {each.text}\n{question([each])}" for each in documents(4, seed=401)]
    assert there.batch(texts) == [text.split(".")[0] for text in here.batch(texts)]


def test_llama_index_answers_alike_on_vllm(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    segments = documents(5, seed=404)
    nodes = [NodeWithScore(node=TextNode(text=each.text)) for each in segments]
    answers = [
        InvariantSynthesizer(llm=LlamaIndexLLM(model=model, max_tokens=16)).synthesize(question(segments), order)
        for model in (lm, on_vllm)
        for order in (nodes, nodes[::-1])
    ]
    assert len({str(answer) for answer in answers}) == 1
    assert str(answers[0])


def test_an_audit_of_vllm_finds_that_the_order_changes_nothing(on_vllm: VLLMBackend) -> None:
    questions = [Question(question(each), tuple(each)) for each in (documents(3, 402), documents(3, 403))]
    result = audit(on_vllm, questions, workers=4, generation={"max_new_tokens": 8})
    assert not result.flips
    assert result.screen.between == 0.0


def test_answers_of_vllm_have_an_identity_of_their_own(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    assert model_digest(on_vllm) != model_digest(lm)
    assert model_digest(on_vllm) == model_digest(on_vllm.with_method("rotor", ordering="lexical"))


def test_choices_that_make_no_sense_are_refused(llm: Any, lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    with pytest.raises(InvalidChoice, match="either url"):
        VLLMBackend(lm)
    with pytest.raises(InvalidChoice, match="either url"):
        VLLMBackend(lm, url="http://127.0.0.1:1", llm=llm)
    with pytest.raises(InvalidChoice, match="RoutedModel"):
        VLLMBackend(lm.with_routing(), llm=llm)
    with pytest.raises(UnsupportedCombination, match="routing"):
        on_vllm.with_routing()
    with pytest.raises(UnsupportedCombination):
        on_vllm.with_method("sequential", intervention="ms-poe")
    with pytest.raises(UnsupportedCombination, match="in this process"):
        on_vllm.logits(lm.chat_prompt("What is told?", documents(2, 405)))
    with pytest.raises(UnsupportedCombination, match="in this process"), on_vllm.arranged([]):
        pass
    with pytest.raises(UnsupportedCombination, match="no cache of our own"):
        VLLMBackend(lm, llm=llm, cache=KeyValueCache(1 << 20))
