"""What runs on an `InvariantModel` runs on vLLM by changing the model line."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import CancelledError
from threading import Event
from typing import Any

import pytest
from invariant_rag import InvariantModel, KeyValueCache, MicroBatcher, Prompt
from invariant_rag.audit import Question, audit
from invariant_rag.errors import InvalidChoice, UnsupportedCombination
from invariant_rag.generation.digest import model_digest
from langchain_invariant_rag import ChatInvariant, InvariantLLM
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.invariant_rag import InvariantLLM as LlamaIndexLLM
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

from tests.documents import chat_message, documents, question
from tests.pairs import Pair
from vllm_invariant_rag import VLLMBackend


def test_chat_invariant_answers_alike_on_vllm(pair: Pair) -> None:
    segments = documents(5, seed=400)
    here, there = (ChatInvariant(model=model, max_tokens=16) for model in (pair.here, pair.there))
    for order in (segments, segments[::-1]):
        message = chat_message(order, question(segments))
        ours, theirs = there.invoke([message]), here.invoke([message])
        assert ours.content == theirs.content
        assert ours.response_metadata["invariant"] is True
        assert "".join(str(chunk.content) for chunk in there.stream([message])) == ours.content


def test_calls_that_would_be_batched_here_are_left_to_vllm(pair: Pair) -> None:
    here = ChatInvariant(model=pair.here, max_tokens=12)
    there = ChatInvariant(model=pair.there, max_tokens=12, micro_batching=True)
    messages = [[chat_message(each, question(each))] for each in (documents(3, seed) for seed in (410, 411, 412))]
    assert [each.content for each in there.batch(messages)] == [each.content for each in here.batch(messages)]
    assert "".join(str(each.content) for each in there.stream(messages[0])) == here.invoke(messages[0]).content
    batcher, prompts = MicroBatcher(), [pair.prompt(seed, 3) for seed in (410, 411, 412)]
    streams = [batcher.stream(pair.there, each, {"max_new_tokens": 12}) for each in prompts]
    assert ["".join(each) for each in streams] == [pair.here.generate(each, max_new_tokens=12).text for each in prompts]
    abandoned = Event()
    abandoned.set()
    with pytest.raises(CancelledError):
        batcher.generate(pair.there, prompts[0], abandoned=abandoned)


def test_invariant_llm_answers_alike_on_vllm_in_batches(pair: Pair) -> None:
    here = InvariantLLM(model=pair.here, max_tokens=16)
    there = InvariantLLM(model=pair.there, max_tokens=16, stop=["."])
    texts = [f"Documents: {each.text}\n{question([each])}" for each in documents(4, seed=401)]
    assert there.batch(texts) == [text.split(".")[0] for text in here.batch(texts)]


def test_llama_index_answers_alike_on_vllm(pair: Pair) -> None:
    segments = documents(5, seed=404)
    nodes = [NodeWithScore(node=TextNode(text=each.text)) for each in segments]
    answers = {
        str(InvariantSynthesizer(llm=LlamaIndexLLM(model=model, max_tokens=16)).synthesize(question(segments), order))
        for model in (pair.here, pair.there)
        for order in (nodes, nodes[::-1])
    }
    assert len(answers) == 1
    assert answers != {""}


def test_an_audit_of_vllm_finds_that_the_order_changes_nothing(on_vllm: VLLMBackend) -> None:
    questions = [Question(question(each), tuple(each)) for each in (documents(3, 402), documents(3, 403))]
    result = audit(on_vllm, questions, workers=4, generation={"max_new_tokens": 8})
    assert not result.flips
    assert result.screen.between == 0.0


def test_answers_of_vllm_have_an_identity_of_their_own(lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    assert model_digest(on_vllm) != model_digest(lm)
    assert model_digest(on_vllm) == model_digest(on_vllm.with_method("rotor", ordering="lexical"))


REFUSED: dict[str, tuple[type[Exception], Callable[[InvariantModel, VLLMBackend, Any], object]]] = {
    "either url": (InvalidChoice, lambda lm, on, llm: VLLMBackend(lm)),
    "or llm": (InvalidChoice, lambda lm, on, llm: VLLMBackend(lm, url="http://127.0.0.1:1", llm=llm)),
    "RoutedModel": (InvalidChoice, lambda lm, on, llm: VLLMBackend(lm.with_routing(), llm=llm)),
    "routing": (UnsupportedCombination, lambda lm, on, llm: on.with_routing()),
    "no intervention": (
        UnsupportedCombination,
        lambda lm, on, llm: on.with_method("sequential", intervention="ms-poe"),
    ),
    "a forward pass": (UnsupportedCombination, lambda lm, on, llm: on.logits(Prompt(suffix=[5]))),
    "in this process": (UnsupportedCombination, lambda lm, on, llm: on.arranged([]).__enter__()),
    "no cache of our own": (
        UnsupportedCombination,
        lambda lm, on, llm: VLLMBackend(lm, llm=llm, cache=KeyValueCache(1)),
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_choices_that_make_no_sense_are_refused(words: str, llm: Any, lm: InvariantModel, on_vllm: VLLMBackend) -> None:
    error, choose = REFUSED[words]
    with pytest.raises(error, match=words):
        choose(lm, on_vllm, llm)
