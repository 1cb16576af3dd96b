"""ChatInvariant: what its answers are keyed by, and when weights are loaded."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.orderings import Score
from invariant_rag.testing import tiny_model, toy_tokenizer
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField
from transformers import PreTrainedModel

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_block, to_segment

from .shared import DOCUMENTS, QUESTION


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=8)


def test_every_parameter_that_changes_the_output_is_in_the_cache_key(lm: InvariantModel) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"method": "pine", "ordering": "lexical"},
        {"ordering": "frequency"},
        {"ordering": Score()},
        {"backend": "reference"},
        {"max_segment_tokens": 9},
        {"overflow": "drop_last"},
        {"max_tokens": 3},
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"top_k": 5},
        {"seed": 1},
        {"stop": ["a"]},
        {"generation_kwargs": {"repetition_penalty": 2.0}},
        {"batch_size": 3},
        {"micro_batching": True},
        {"template_kwargs": {"enable_thinking": True}},
        {"logprobs": True},
        {"citations": True},
    ]
    keys = [ChatInvariant(model=lm, **change)._get_llm_string() for change in changes]
    loading: list[dict[str, Any]] = [{}, {"model": "native"}, {"dtype": "bfloat16"}]
    keys += [ChatInvariant(**change)._get_llm_string() for change in loading]
    assert len(set(keys)) == len(changes) + len(loading)


def test_printing_a_model_loads_nothing(loads: list[str]) -> None:
    for kind in (ChatInvariant, InvariantLLM):
        assert "unloaded" in str(kind(model="unloaded"))
    assert not loads


def variants(lm: InvariantModel) -> list[InvariantModel]:
    """Models of the same name and weights whose answers to a prompt differ."""
    spoken = copy.deepcopy(lm.tokenizer)
    spoken.chat_template = f"Friend! {spoken.chat_template}"
    trimmed = [lm.with_method(max_segment_tokens=size, overflow="trim_segments") for size in (9, 30)]
    changed = copy.deepcopy(lm.model)
    with torch.no_grad():
        changed.lm_head.weight[100:] *= -1.0
    return [lm, *trimmed, InvariantModel(lm.model, spoken), InvariantModel(changed, lm.tokenizer)]


def test_models_with_other_options_never_exchange_answers_through_the_cache(lm: InvariantModel, llm_cache: Any) -> None:
    chats = [ChatInvariant(model=each, max_tokens=6) for each in variants(lm)]
    fresh = [chat.bind(documents=DOCUMENTS).invoke(QUESTION).content for chat in chats]
    assert len(set(fresh)) == len(llm_cache._cache) == len(chats)
    assert [chat.bind(documents=DOCUMENTS).invoke(QUESTION).content for chat in chats] == fresh
    assert len(llm_cache._cache) == len(chats)


def test_models_with_other_options_never_exchange_answers_in_a_batch(lm: InvariantModel) -> None:
    first = ChatInvariant(model=lm, max_tokens=6, micro_batching=True)
    chats = [first.model_copy(update={"model": each}) for each in variants(lm)] * 4
    alone = [chat.invoke(QUESTION, documents=DOCUMENTS).content for chat in chats]
    assert all(chat._batcher is first._batcher for chat in chats)
    with ThreadPoolExecutor(len(chats)) as pool:
        with first._batcher._generate_lock:
            calls = [pool.submit(chat.invoke, QUESTION, documents=DOCUMENTS) for chat in chats]
            while len(first._batcher._waiting) < len(chats):
                time.sleep(0.01)
        assert [call.result().content for call in calls] == alone


def test_the_key_follows_a_chat_template_and_weights_that_are_changed_in_place(lm: InvariantModel) -> None:
    own = copy.deepcopy(lm)
    chat = ChatInvariant(model=own)
    keys = [chat._get_llm_string()]
    own.tokenizer.chat_template += "\n"
    keys.append(chat._get_llm_string())
    with torch.no_grad():
        own.model.lm_head.weight[200, 5] += 1.0
    keys.append(chat._get_llm_string())
    assert len(set(keys)) == 3


def test_two_models_of_one_name_are_told_apart_by_their_weights() -> None:
    def key(seed: int) -> str:
        weights = tiny_model("llama", seed=seed, num_hidden_layers=1, vocab_size=261)
        return ChatInvariant(model=InvariantModel(weights, toy_tokenizer()))._get_llm_string()

    assert key(0) == key(0)
    assert key(0) != key(1)


def test_the_cache_answers_the_same_set_in_another_order(chat: ChatInvariant, llm_cache: Any) -> None:
    for size, model in ((1, chat), (3, chat.model_copy(update={"sort_segments": False}))):
        for documents in (DOCUMENTS, DOCUMENTS[::-1]):
            blocks = [to_block(to_segment(each)) for each in documents]
            model.invoke([HumanMessage([*blocks, QUESTION])])
        assert len(llm_cache._cache) == size


def test_sorting_leaves_an_order_that_means_something(lm: InvariantModel) -> None:
    plain = ChatInvariant(model=lm, method="sequential", ordering="given", max_tokens=2)
    answer = plain.invoke([HumanMessage([*(to_block(to_segment(text)) for text in "cab"), QUESTION])])
    assert answer.response_metadata["order"] == [to_segment(text).content_hash for text in "cab"]


def test_documents_that_were_uploaded_keep_their_order(lm: InvariantModel) -> None:
    blocks = [{"type": "text-plain", "mime_type": "text/plain", "text": text} for text in "cab"]
    answers = [
        ChatInvariant(model=lm, max_tokens=8).invoke([HumanMessage([*listed, QUESTION])])
        for listed in (blocks, blocks[::-1])
    ]
    assert answers[0].content != answers[1].content
    assert {each.response_metadata["invariant"] for each in answers} == {None}


def test_fields_can_be_configured_without_loading_anew(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=3).configurable_fields(max_tokens=ConfigurableField(id="most"))
    answer = chat.invoke(QUESTION, config={"configurable": {"most": 6}})
    assert answer.usage_metadata["output_tokens"] == 6


@pytest.fixture
def loads(weights: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded."""
    names: list[str] = []

    def load(name: str, **options: Any) -> InvariantModel:
        names.append(name)
        return InvariantModel(weights, toy_tokenizer())

    monkeypatch.setattr(InvariantModel, "from_pretrained", load)
    return names


def test_a_message_that_was_changed_after_it_was_recognized_is_read_as_it_is(lm: InvariantModel) -> None:
    class Seen(BaseCallbackHandler):
        def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
            seen.extend(messages[0])

    chat, seen = ChatInvariant(model=lm, max_tokens=4), []
    chat.invoke(QUESTION, {"callbacks": [Seen()]}, documents=DOCUMENTS)
    changed = seen[-1].model_copy(update={"content": "Something else."})
    assert chat.invoke([changed]).content == chat.invoke("Something else.").content


def test_calls_with_keywords_of_their_own_load_once(loads: list[str]) -> None:
    one, other = InvariantLLM(model="bound"), InvariantLLM(model="between", max_tokens=1)
    for _ in range(3):
        one.bind(max_tokens=1).invoke(QUESTION)
        other.invoke(QUESTION)
    assert loads == ["bound", "between"]


def test_configured_fields_load_once(loads: list[str]) -> None:
    chat = ChatInvariant(model="configured").configurable_fields(max_tokens=ConfigurableField(id="most"))
    for _ in range(3):
        chat.invoke(QUESTION, config={"configurable": {"most": 1}})
    assert loads == ["configured"]


def test_a_copy_of_another_model_leaves_the_weights_of_the_first(loads: list[str]) -> None:
    chat = ChatInvariant(model="first", max_tokens=1)
    copied = chat.model_copy(update={"model": "second"})
    for _ in range(2):
        chat.invoke(QUESTION)
        copied.invoke(QUESTION)
    assert loads == ["first", "second"]


async def test_the_loop_goes_on_while_weights_are_loaded(loads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    load = InvariantModel.from_pretrained

    def slowly(name: str, **options: Any) -> InvariantModel:
        time.sleep(0.3)
        return load(name, **options)

    monkeypatch.setattr(InvariantModel, "from_pretrained", slowly)

    async def read(model: Any) -> None:
        async for _ in model.astream(QUESTION):
            pass

    works = [
        ChatInvariant(model="loop chat", max_tokens=1).ainvoke(QUESTION),
        InvariantLLM(model="loop llm", max_tokens=1).ainvoke(QUESTION),
        read(ChatInvariant(model="loop stream", max_tokens=1)),
    ]
    for work in works:
        task, count = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.01)
            count += 1
        await task
        assert count > 10
    assert loads == ["loop chat", "loop llm", "loop stream"]


def test_an_ordering_that_loads_a_model_is_built_once(loads: list[str]) -> None:
    chat = ChatInvariant(model="ordered", ordering="monot5")
    assert chat.lm.ordering is chat.model_copy().lm.ordering


def test_a_pickle_answers_alike_and_has_no_weights_that_have_a_name() -> None:
    for model, size in ((None, 5000), (InvariantModel.from_pretrained(), 10**9)):
        chat = ChatInvariant(model=model, max_tokens=4)
        answer = chat.invoke(QUESTION, documents=DOCUMENTS)
        pickled = pickle.dumps(chat)
        assert pickle.loads(pickled).invoke(QUESTION, documents=DOCUMENTS).content == answer.content
        assert len(pickled) < size
