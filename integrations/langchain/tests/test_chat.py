"""ChatInvariant: what it reports, what it is keyed by, and how it behaves among threads and coroutines."""

from __future__ import annotations

import asyncio
import copy
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.errors import ContextOverflow, InvariantRAGError, UnknownName, UnsupportedCombination
from invariant_rag.interventions import MsPoE
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import Score
from invariant_rag.testing import tiny_model, toy_tokenizer
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessageChunk, HumanMessage
from langchain_core.runnables import ConfigurableField, RunnableLambda
from pydantic import ValidationError
from transformers import PreTrainedModel

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments
from langchain_invariant_rag.documents import to_block, to_segment
from langchain_invariant_rag.errors import UnknownParameter

from .shared import DOCUMENTS, HASHES, ORDERS, QUESTION

LONG = 1500


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=8)


@contextmanager
def forwards(lm: InvariantModel) -> Iterator[list[tuple[int, ...]]]:
    """Shapes of the input ids of every pass of the model."""
    shapes: list[tuple[int, ...]] = []
    handle = lm.model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    yield shapes
    handle.remove()


# --- reports --------------------------------------------------------------------------------------------------------


def test_an_answer_says_what_was_read_and_written(chat: ChatInvariant, lm: InvariantModel) -> None:
    answer = chat.invoke(QUESTION, documents=DOCUMENTS)
    generation = lm.generate(
        lm.chat_prompt(messages=[{"role": "user", "content": [*map(to_segment, DOCUMENTS), QUESTION]}]),
        max_new_tokens=8,
    )
    assert answer.content == generation.text
    assert answer.usage_metadata == {
        "input_tokens": generation.usage.prompt_tokens,
        "output_tokens": generation.usage.completion_tokens,
        "total_tokens": generation.usage.total_tokens,
        "input_token_details": {"cache_read": generation.usage.cached_tokens},
    }
    order = [to_segment(DOCUMENTS[index]).content_hash for index in generation.order]
    assert answer.response_metadata["order"] == order
    assert answer.response_metadata["finish_reason"] == "length"
    assert answer.response_metadata["model_name"] == lm.name


def test_the_last_chunk_of_a_stream_says_the_same(chat: ChatInvariant) -> None:
    whole = chat.invoke(QUESTION, documents=DOCUMENTS)
    chunks = list(chat.stream(QUESTION, documents=DOCUMENTS))
    total: Any = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert isinstance(total, AIMessageChunk)
    assert total.content == whole.content
    assert total.usage_metadata == whole.usage_metadata
    assert total.response_metadata == whole.response_metadata
    assert {"order", "finish_reason", "model_name"} <= set(total.response_metadata)


def test_a_stop_sequence_is_not_streamed_either(chat: ChatInvariant) -> None:
    text = str(chat.invoke(QUESTION).content)
    stop = text[3:6]
    stopped = chat.invoke(QUESTION, stop=[stop])
    assert stopped.content == text[: text.index(stop)]
    assert stopped.response_metadata["finish_reason"] == "stop"
    assert "".join(str(chunk.content) for chunk in chat.stream(QUESTION, stop=[stop])) == stopped.content


def test_a_model_that_streams_tells_callbacks_every_token(lm: InvariantModel) -> None:
    tokens: list[str] = []

    class Handler(BaseCallbackHandler):
        def on_llm_new_token(self, token: Any, **kwargs: Any) -> None:
            tokens.append(token)

    chat = ChatInvariant(model=lm, max_tokens=8, streaming=True)
    answer = chat.invoke(QUESTION, config={"callbacks": [Handler()]})
    assert "".join(tokens) == answer.content
    assert len(tokens) > 1


def test_segments_that_do_not_fit_are_named(lm: InvariantModel) -> None:
    documents = [f"{number} " * 400 for number in range(6)]
    with pytest.raises(ContextOverflow):
        ChatInvariant(model=lm, max_tokens=4).invoke(QUESTION, documents=documents)
    answer = ChatInvariant(model=lm, max_tokens=4, overflow="drop_last").invoke(QUESTION, documents=documents)
    assert answer.response_metadata["dropped"]
    assert set(answer.response_metadata["dropped"]).isdisjoint(answer.response_metadata["order"])


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
@pytest.mark.parametrize("micro_batching", [False, True])
def test_a_prompt_that_is_too_long_is_an_overflow_for_langchain_too(
    lm: InvariantModel, kind: Any, micro_batching: bool
) -> None:
    model = kind(model=lm, max_tokens=4, micro_batching=micro_batching)
    for call in (model.invoke, lambda text: asyncio.run(model.ainvoke(text)), lambda text: list(model.stream(text))):
        with pytest.raises(ContextOverflow) as error:
            call("long " * 2000)
        assert isinstance(error.value, ContextOverflowError)
        assert "drop_last" in error.value.hint
    spare = RunnableLambda(lambda _: "spare")
    assert model.with_fallbacks([spare], exceptions_to_handle=(ContextOverflowError,)).invoke("long " * 2000) == "spare"


def test_a_copy_has_a_profile_of_its_own_unless_one_was_given(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm)
    copied = chat.model_copy(update={"model": "native", "max_tokens": 7})
    assert copied.profile == ChatInvariant(model="native", max_tokens=7).profile != chat.profile
    given = ChatInvariant(model=lm, profile={"max_input_tokens": 3})
    assert given.model_copy(update={"max_tokens": 7}).profile == {"max_input_tokens": 3}


def test_the_profile_is_known_without_weights(lm: InvariantModel) -> None:
    assert ChatInvariant().profile is not None
    for name in (None, "native", EMBEDDED["generator"]):
        assert ChatInvariant(model=name).profile["max_input_tokens"] == InvariantModel.from_pretrained().context_window
    assert "max_input_tokens" not in ChatInvariant(model="some/model").profile
    profile = ChatInvariant(model=lm, max_tokens=5).profile
    assert (profile["max_input_tokens"], profile["max_output_tokens"]) == (4096, 5)
    assert profile["tool_calling"]


def test_tokens_of_messages_include_template_and_segments(chat: ChatInvariant) -> None:
    messages = [HumanMessage([{"type": "text-plain", "text": "abc", "mime_type": "text/plain"}, QUESTION])]
    assert chat.get_num_tokens_from_messages(messages) == chat.invoke(messages).usage_metadata["input_tokens"]


def block(document: Any) -> dict[str, Any]:
    return dict(to_block(to_segment(document)))


# --- choices --------------------------------------------------------------------------------------------------------


def running(chat: Any) -> tuple[str, str]:
    """Method and ordering that run, as the model says before and after loading."""
    said = chat.resolved_method.name, chat.resolved_ordering.name
    assert said == (chat.lm.method.name, chat.lm.ordering.name)
    assert said == (chat._identifying_params["method"], chat._identifying_params["ordering"])
    return said


def test_what_is_left_open_is_what_the_model_brings(lm: InvariantModel) -> None:
    assert running(ChatInvariant()) == ("rotor", "lexical")
    assert running(ChatInvariant(method="sequential")) == ("sequential", "given")
    pine = lm.with_method("pine", ordering="frequency")
    assert repr(ChatInvariant(model=pine).lm) == repr(pine)
    assert running(ChatInvariant(model=pine, method="rotor")) == ("rotor", "lexical")
    assert running(ChatInvariant(model=pine, ordering="lexical")) == ("pine", "lexical")


def test_what_is_left_open_stays_open_in_the_fields_and_out_of_the_repr() -> None:
    chat = ChatInvariant(method="sequential")
    assert (chat.method, chat.ordering, chat.backend) == ("sequential", None, None)
    assert "method='sequential'" in repr(chat)
    assert "ordering" not in repr(chat)


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_a_copy_with_another_method_has_the_ordering_of_that_method(lm: InvariantModel, kind: Any) -> None:
    plain = kind(model=lm, method="sequential", max_tokens=4)
    copied = plain.model_copy(update={"method": "rotor"})
    assert running(copied) == ("rotor", "lexical")
    unsorted = copied.model_copy(update={"sort_segments": False})
    answers = [unsorted.invoke(f"{Segments(order)}{QUESTION}") for order in ORDERS]
    assert len({getattr(answer, "content", answer) for answer in answers}) == 1
    assert running(kind(model=lm, method="ape").model_copy(update={"method": "pine"}))[0] == "pine"
    kept = kind(model=lm, method="rotor", ordering="frequency").model_copy(update={"method": "pine"})
    assert running(kept) == ("pine", "frequency")


def test_a_configured_method_has_its_own_ordering(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, method="sequential", max_tokens=2).configurable_fields(
        method=ConfigurableField(id="method"), model=ConfigurableField(id="model")
    )
    answers = [
        chat.invoke([HumanMessage([*map(block, order), QUESTION])], config={"configurable": {"method": "rotor"}})
        for order in ORDERS
    ]
    assert len({tuple(answer.response_metadata["order"]) for answer in answers}) == 1
    (configured, _) = chat._prepare({"configurable": {"method": "rotor", "model": lm.with_method("pine")}})
    assert running(configured) == ("rotor", "lexical")


def test_an_alternative_and_a_pickle_leave_open_what_was_left_open(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm.with_method("sequential"))
    assert running(pickle.loads(pickle.dumps(chat)).model_copy(update={"method": "rotor"})) == ("rotor", "lexical")
    either = chat.configurable_alternatives(ConfigurableField(id="which"), other=ChatInvariant(model=lm, method="pine"))
    (other, _) = either._prepare({"configurable": {"which": "other"}})
    assert running(other) == ("pine", lm.with_method("pine").ordering.name)


def test_a_copy_of_another_model_in_memory_runs_as_that_model_does(lm: InvariantModel) -> None:
    pine = lm.with_method("pine", ordering="frequency", max_segment_tokens=7)
    copied = ChatInvariant(model=lm).model_copy(update={"model": pine})
    assert repr(copied.lm) == repr(pine)
    assert copied.lm.max_segment_tokens == 7
    changed = lm.with_method("sequential", ordering="lexical", intervention=MsPoE(first_layer=0))
    assert ChatInvariant(model=lm).model_copy(update={"model": changed}).lm.intervention == MsPoE(first_layer=0)
    assert ChatInvariant(model=changed).model_copy(update={"model": lm}).lm.intervention is None
    assert ChatInvariant(model=changed).model_copy(update={"method": "rotor"}).lm.intervention is None


def test_bad_choices_of_a_copy_are_refused_when_it_is_made(lm: InvariantModel) -> None:
    with pytest.raises(UnknownName, match="unknown method 'rotr'; choose from"):
        ChatInvariant().model_copy(update={"method": "rotr"})
    with pytest.raises(UnsupportedCombination, match="dtype"):
        ChatInvariant(dtype="bfloat16").model_copy(update={"model": lm})
    with pytest.raises(UnknownParameter, match="did you mean 'method'"):
        ChatInvariant().model_copy(update={"metod": "rotor"})


def test_a_loaded_model_keeps_its_intervention(lm: InvariantModel) -> None:
    changed = lm.with_method("sequential", ordering="lexical", intervention=MsPoE(first_layer=0))
    chat, plain = ChatInvariant(model=changed), ChatInvariant(model=lm, method="sequential", ordering="lexical")
    assert chat.lm.intervention == MsPoE(first_layer=0)
    assert chat._identifying_params != plain._identifying_params
    assert ChatInvariant(model=changed, method="rotor").lm.intervention is None


def test_bad_choices_are_refused_when_the_model_is_built(lm: InvariantModel) -> None:
    with pytest.raises(ValidationError, match="unknown method 'rotr'; choose from"):
        ChatInvariant(method="rotr")
    with pytest.raises(ValidationError, match="unknown ordering 'x'; choose from"):
        ChatInvariant(ordering="x")
    with pytest.raises(ValidationError, match="unknown backend 'x'; choose from"):
        ChatInvariant(backend="x")
    with pytest.raises(ValidationError, match="overflow"):
        ChatInvariant(overflow="x")
    with pytest.raises(UnsupportedCombination, match="dtype"):
        ChatInvariant(model=lm, dtype="bfloat16")
    with pytest.raises(ValidationError, match="max_tokens"):
        ChatInvariant(max_tokens=0)


def test_parameters_of_remote_models_are_ignored_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    ChatInvariant(api_key="x", timeout=3, max_retries=2)
    assert "ChatInvariant runs on this machine and has no api_key, max_retries, timeout" in caplog.text


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_a_model_may_be_given_as_model_name(kind: Any) -> None:
    named = kind(model_name="native")
    assert named.model == named.model_name == "native"
    assert named.model_copy(update={"model_name": "some/other"}).model == "some/other"
    with pytest.raises(UnsupportedCombination, match="got both"):
        kind(model_name="native", model="native")


@pytest.mark.parametrize(("unknown", "meant"), [("model_id", "model"), ("max_new_tokens", "max_tokens"),
                                                ("metod", "method"), ("torch_dtype", "dtype")])  # fmt: skip
def test_an_unknown_parameter_is_an_error_that_names_the_right_one(unknown: str, meant: str) -> None:
    for kind in (ChatInvariant, InvariantLLM):
        with pytest.raises(UnknownParameter, match=f"no parameter '{unknown}'; did you mean .*'{meant}'"):
            kind(**{unknown: "x"})
    assert issubclass(UnknownParameter, InvariantRAGError)


def test_a_stop_sequence_may_be_a_str(lm: InvariantModel) -> None:
    for kind in (ChatInvariant, InvariantLLM):
        model = kind(model=lm, max_tokens=12)
        text = model.invoke(QUESTION)
        text = getattr(text, "content", text)
        for stop, expected in ((text[4:7], text[: text.index(text[4:7])]), (f"{text[3]}never", text)):
            check_stop(kind, model, lm, stop, expected)


def check_stop(kind: Any, model: Any, lm: InvariantModel, stop: str, expected: str) -> None:
    assert kind(model=lm, stop=stop).stop == [stop]
    given = [
        kind(model=lm, max_tokens=12, stop=stop).invoke(QUESTION),
        model.bind(stop=stop).invoke(QUESTION),
        model.invoke(QUESTION, stop=stop),
        model.model_copy(update={"stop": stop}).invoke(QUESTION),
    ]
    assert [getattr(each, "content", each) for each in given] == [expected] * 4
    assert model._get_ls_params(stop=stop)["ls_stop"] == [stop]


def test_the_limit_may_be_called_as_transformers_calls_it(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, generation_kwargs={"max_new_tokens": 2})

    def written(**keywords: Any) -> int:
        return chat.invoke(QUESTION, **keywords).usage_metadata["output_tokens"]

    assert (written(), written(max_new_tokens=3), written(max_tokens=4)) == (2, 3, 4)


def test_an_ordering_by_score_reads_the_scores_of_documents(lm: InvariantModel) -> None:
    documents = [{"page_content": f"number {n}", "metadata": {"score": float(n)}} for n in (2, 3, 1)]
    answer = ChatInvariant(model=lm, ordering="score", max_tokens=2).invoke(QUESTION, documents=documents)
    best_last = [to_segment(documents[index]).content_hash for index in (2, 0, 1)]
    assert answer.response_metadata["order"] == best_last


# --- identity -------------------------------------------------------------------------------------------------------


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
            blocks = [
                {"type": "text-plain", "mime_type": "text/plain", "text": each.page_content} for each in documents
            ]
            model.invoke([HumanMessage([*blocks, QUESTION])])
        assert len(llm_cache._cache) == size


def test_sorting_leaves_an_order_that_means_something(lm: InvariantModel) -> None:
    plain = ChatInvariant(model=lm, method="sequential", ordering="given", max_tokens=2)
    blocks = [{"type": "text-plain", "mime_type": "text/plain", "text": text} for text in "cab"]
    answer = plain.invoke([HumanMessage([*blocks, QUESTION])])
    assert answer.response_metadata["order"] == [to_segment(text).content_hash for text in "cab"]


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


# --- threads and coroutines -----------------------------------------------------------------------------------------

PROMPTS = [f"{QUESTION} {number * 'and '}" for number in range(6)]


@pytest.mark.parametrize("micro_batching", [False, True])
def test_threads_get_their_own_answers(lm: InvariantModel, micro_batching: bool) -> None:
    chat = ChatInvariant(model=lm, max_tokens=8, micro_batching=micro_batching)
    alone = [chat.invoke(prompt, documents=DOCUMENTS).content for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: chat.invoke(prompt, documents=DOCUMENTS).content, PROMPTS))
    assert together == alone
    assert [answer.content for answer in chat.bind(documents=DOCUMENTS).batch(PROMPTS)] == alone


def waiting(chat: ChatInvariant, prompts: list[str], pool: ThreadPoolExecutor) -> list[Any]:
    """Start a call for each prompt while the batcher is busy, and return once all of them wait."""
    with chat._batcher._generate_lock:
        calls = [pool.submit(chat.invoke, prompt) for prompt in prompts]
        while len(chat._batcher._waiting) < len(prompts):
            time.sleep(0.01)
    return calls


def test_prompts_that_wait_are_decoded_together(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=8, micro_batching=True)
    alone = [chat.invoke(prompt).content for prompt in PROMPTS]
    with ThreadPoolExecutor(6) as pool, forwards(lm) as shapes:
        calls = waiting(chat, PROMPTS, pool)
        assert [call.result().content for call in calls] == alone
    assert (6, 1) in shapes
    assert not [shape for shape in shapes if 1 < shape[0] < 6]


def test_a_prompt_that_fails_fails_alone(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=8, micro_batching=True)
    with ThreadPoolExecutor(3) as pool:
        first, bad, last = waiting(chat, ["a", "b" * 5000, "c"], pool)
        with pytest.raises(ContextOverflow):
            bad.result()
        assert first.result().content == chat.invoke("a").content
        assert last.result().content == chat.invoke("c").content


async def test_coroutines_that_wait_are_decoded_together(lm: InvariantModel) -> None:
    chat = ChatInvariant(model=lm, max_tokens=8, micro_batching=True)
    alone = [chat.invoke(prompt).content for prompt in PROMPTS[:3]]
    with forwards(lm) as shapes:
        with chat._batcher._generate_lock:
            calls = [asyncio.ensure_future(chat.ainvoke(prompt)) for prompt in PROMPTS[:3]]
            while len(chat._batcher._waiting) < 3:
                await asyncio.sleep(0.01)
        assert [answer.content for answer in await asyncio.gather(*calls)] == alone
    assert (3, 1) in shapes


async def test_the_loop_goes_on_while_a_model_generates(chat: ChatInvariant) -> None:
    async def ticks(work: Any) -> int:
        task, count = asyncio.ensure_future(work), 0
        while not task.done():
            await asyncio.sleep(0.001)
            count += 1
        await task
        return count

    async def stream() -> None:
        async for _ in chat.astream(QUESTION, max_tokens=100):
            pass

    assert await ticks(chat.ainvoke(QUESTION, max_tokens=100)) > 10
    assert await ticks(stream()) > 10


async def test_a_cancelled_call_stops_generating(chat: ChatInvariant, lm: InvariantModel) -> None:
    with forwards(lm) as shapes:
        task = asyncio.ensure_future(chat.ainvoke(QUESTION, max_tokens=LONG))
        while len(shapes) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await chat.ainvoke(QUESTION, max_tokens=1)  # waits until the model is free
        assert len(shapes) < LONG / 2


async def test_a_stream_that_nobody_reads_stops_generating(chat: ChatInvariant, lm: InvariantModel) -> None:
    with forwards(lm) as shapes:
        stream = chat.astream(QUESTION, max_tokens=LONG)
        await anext(stream)
        await stream.aclose()
        await chat.ainvoke(QUESTION, max_tokens=1)
        assert len(shapes) < LONG / 2


def test_everything_in_one_set_is_in_the_report(chat: ChatInvariant) -> None:
    assert sorted(chat.invoke(QUESTION, documents=DOCUMENTS).response_metadata["order"]) == HASHES
