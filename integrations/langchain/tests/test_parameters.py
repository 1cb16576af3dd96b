"""The parameters of both models: what is chosen where they are left open, what is refused, and keys of caches."""

from __future__ import annotations

import copy
import pickle
import time
import warnings
from itertools import permutations
from typing import Any

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from invariant_rag.interventions import MsPoE
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.orderings import Score
from invariant_rag.testing import toy_tokenizer
from langchain_core._api.beta_decorator import LangChainBetaWarning
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField
from transformers import PreTrainedModel

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments
from langchain_invariant_rag.documents import to_block, to_segment

from .shared import DOCUMENTS, ORDERS, QUESTION

both = pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])


def running(chat: Any) -> tuple[str, str]:
    """Method and ordering that run, as traces say before loading and the model after it."""
    said = chat._identifying_params["method"], chat._identifying_params["ordering"]
    assert said == (chat.lm.method.name, chat.lm.ordering.name)
    return said


# --- choices --------------------------------------------------------------------------------------------------------


@both
def test_what_is_left_open_is_what_the_model_brings_also_in_copies(lm: InvariantModel, kind: Any) -> None:
    pine = lm.with_method("pine", ordering="frequency", max_segment_tokens=7)
    plain = kind(model=lm, method="sequential", max_tokens=4)
    changed = lm.with_method("sequential", ordering="lexical", intervention=MsPoE(first_layer=0))
    for model, expected in (
        (kind(), ("rotor", "lexical")),
        (kind(method="sequential"), ("sequential", "given")),
        (kind(model=pine, method="rotor"), ("rotor", "lexical")),
        (kind(model=pine, ordering="lexical"), ("pine", "lexical")),
        (plain.model_copy(update={"method": "rotor"}), ("rotor", "lexical")),
        (
            kind(model=lm, method="rotor", ordering="frequency").model_copy(update={"method": "pine"}),
            ("pine", "frequency"),
        ),
        (pickle.loads(pickle.dumps(kind(model=lm.with_method("sequential")))), ("sequential", "given")),
        (
            kind(model=lm, method="sequential")
            .configurable_fields(method=ConfigurableField(id="method"))
            ._prepare({"configurable": {"method": "rotor"}})[0],
            ("rotor", "lexical"),
        ),
    ):
        assert running(model) == expected
    copied = kind(model=lm).model_copy(update={"model": pine})
    assert (repr(copied.lm), copied.lm.max_segment_tokens) == (repr(pine), 7)
    assert kind(model=lm).model_copy(update={"model": changed}).lm.intervention == MsPoE(first_layer=0)
    assert kind(model=changed).model_copy(update={"model": lm}).lm.intervention is None
    assert kind(model=changed, method="rotor").lm.intervention is None
    given = ChatInvariant(method="sequential")
    assert (given.method, given.ordering, given.backend) == ("sequential", None, None)
    assert "ordering" not in repr(given)


@pytest.mark.parametrize(
    "given", [{"api_key": "x", "max_retries": 2, "timeout": 3}, {"max_retries": 2}, {"timeout": 300.0}]
)
def test_parameters_of_remote_models_are_ignored_with_a_word_also_at_their_defaults(
    given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    for make in (lambda: ChatInvariant(**given), lambda: ChatInvariant().model_copy(update=given)):
        caplog.clear()
        make()
        assert f"ChatInvariant runs on this machine and has no {', '.join(given)}: ignored" in caplog.text


@both
def test_a_stop_sequence_may_be_a_str_wherever_it_is_given(lm: InvariantModel, kind: Any) -> None:
    def text(answer: Any) -> str:
        return str(getattr(answer, "content", answer))

    model = kind(model=lm, max_tokens=12)
    whole = text(model.invoke(QUESTION))
    for stop, expected in ((whole[4:7], whole[: whole.index(whole[4:7])]), (f"{whole[3]}never", whole)):
        assert kind(model=lm, stop=stop).stop == [stop]
        assert text(kind(model=lm, max_tokens=12, stop=stop).invoke(QUESTION)) == expected
        assert text(model.bind(stop=stop).invoke(QUESTION)) == expected
        assert text(model.model_copy(update={"stop": stop}).invoke(QUESTION)) == expected
        assert model._get_ls_params(stop=stop)["ls_stop"] == [stop]


def test_an_ordering_by_score_reads_the_scores_of_documents(lm: InvariantModel) -> None:
    documents = [{"page_content": f"number {n}", "metadata": {"score": float(n)}} for n in (2, 3, 1)]
    answer = ChatInvariant(model=lm, ordering="score", max_tokens=2).invoke(QUESTION, documents=documents)
    assert answer.response_metadata["order"] == [to_segment(documents[index]).content_hash for index in (2, 0, 1)]


def test_the_profile_is_known_without_weights_and_that_of_a_copy_is_its_own(lm: InvariantModel) -> None:
    for name in (None, "native", EMBEDDED["generator"]):
        assert ChatInvariant(model=name).profile["max_input_tokens"] == InvariantModel.from_pretrained().context_window
    assert "max_input_tokens" not in ChatInvariant(model="some/model").profile
    chat = ChatInvariant(model=lm, max_tokens=5)
    assert (chat.profile["max_input_tokens"], chat.profile["max_output_tokens"]) == (4096, 5)
    assert chat.profile["tool_calling"]
    copied = chat.model_copy(update={"model": "native", "max_tokens": 7})
    assert copied.profile == ChatInvariant(model="native", max_tokens=7).profile != chat.profile
    given = ChatInvariant(model=lm, profile={"max_input_tokens": 3})
    assert given.model_copy(update={"max_tokens": 7}).profile == {"max_input_tokens": 3}


def test_a_model_can_be_saved_unless_it_is_in_memory(lm: InvariantModel) -> None:
    def restored(chat: ChatInvariant) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LangChainBetaWarning)
            return load(dumpd(chat), valid_namespaces=["langchain_invariant_rag"], allowed_objects=[ChatInvariant])

    chat = ChatInvariant(model="some/model", max_tokens=7, temperature=0.5, stop="x")
    assert restored(chat).model_dump() == chat.model_dump()
    with pytest.raises(NotImplementedError):
        restored(ChatInvariant(model=lm))


# --- a routed model -------------------------------------------------------------------------------------------------


def test_the_plain_branch_sees_the_order_given_only_if_it_is_to(lm: InvariantModel) -> None:
    def answers(plain_order: Any) -> int:
        routed = ChatInvariant(model=lm.with_routing(2.0, plain_order=plain_order), max_tokens=8)
        return len({routed.invoke(f"{Segments(order)}\n{QUESTION}").text for order in ORDERS})

    assert answers("canonical") == 1
    with pytest.warns(OrderWarning, match="in the order given"):
        assert answers("given") > 1


@pytest.mark.parametrize(("branch", "alpha"), [("plain", 2.0), ("invariant", -2.0)])
def test_the_answer_of_a_routed_model_is_that_of_the_branch(lm: InvariantModel, branch: str, alpha: float) -> None:
    routed = lm.with_routing(alpha, plain_order="canonical")
    chat, kept = (ChatInvariant(model=each, max_tokens=8) for each in (routed, getattr(routed, f"{branch}_branch")))
    answer = chat.invoke(QUESTION, documents=DOCUMENTS)
    assert answer.text == kept.invoke(QUESTION, documents=DOCUMENTS).text
    assert answer.response_metadata["routing"]["branch"] == branch
    *pieces, last = chat.stream(QUESTION, documents=DOCUMENTS)
    assert "".join(each.text for each in pieces) == answer.text
    assert last.response_metadata["routing"] == answer.response_metadata["routing"]


# --- keys of caches -------------------------------------------------------------------------------------------------


def test_every_parameter_that_changes_the_output_is_in_the_cache_key(lm: InvariantModel) -> None:
    changes: list[dict[str, Any]] = [
        {}, {"method": "pine", "ordering": "lexical"}, {"ordering": "frequency"}, {"ordering": Score()},
        {"backend": "reference"}, {"max_segment_tokens": 9}, {"overflow": "drop_last"}, {"max_tokens": 3},
        {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 5}, {"seed": 1}, {"stop": ["a"]}, {"n": 2},
        {"generation_kwargs": {"repetition_penalty": 2.0}}, {"batch_size": 3}, {"micro_batching": True},
        {"template_kwargs": {"enable_thinking": True}}, {"logprobs": True}, {"top_logprobs": 2}, {"citations": True},
        {"model": lm.with_routing(0.2)}, {"model": lm.with_routing(0.3)},
    ]  # fmt: skip
    keys = [ChatInvariant(**{"model": lm, **change})._get_llm_string() for change in changes]
    keys += [ChatInvariant(**change)._get_llm_string() for change in ({}, {"model": "native"}, {"dtype": "bfloat16"})]
    assert len(set(keys)) == len(changes) + 3


def variants(lm: InvariantModel) -> list[InvariantModel]:
    """Models of the same name and weights whose answers to a prompt differ."""
    spoken = copy.deepcopy(lm.tokenizer)
    spoken.chat_template = f"Friend! {spoken.chat_template}"
    trimmed = [lm.with_method(max_segment_tokens=size, overflow="trim_segments") for size in (9, 30)]
    changed = copy.deepcopy(lm.model)
    with torch.no_grad():
        changed.lm_head.weight[100:] *= -1.0
    return [lm, *trimmed, InvariantModel(lm.model, spoken), InvariantModel(changed, lm.tokenizer)]


@pytest.mark.parametrize("per_call", [False, True])
def test_models_of_one_name_never_exchange_answers_through_the_cache(
    lm: InvariantModel, llm_cache: Any, per_call: bool
) -> None:
    def asked(model: InvariantModel) -> Any:
        if per_call:
            return ChatInvariant(model=lm, max_tokens=6).invoke(QUESTION, documents=DOCUMENTS, model=model).content
        return ChatInvariant(model=model, max_tokens=6).bind(documents=DOCUMENTS).invoke(QUESTION).content

    models = variants(lm)
    fresh = list(map(asked, models))
    assert len(set(fresh)) == len(llm_cache._cache) == len(models)
    assert list(map(asked, models)) == fresh
    assert len(llm_cache._cache) == len(models)


def test_the_key_follows_templates_and_weights_that_are_changed_in_place(lm: InvariantModel) -> None:
    own = copy.deepcopy(lm)
    chat = ChatInvariant(model=own)
    keys = [chat._get_llm_string()]
    own.tokenizer.chat_template += "\n"
    keys.append(chat._get_llm_string())
    with torch.no_grad():
        own.model.lm_head.weight[200, 5] += 1.0
    keys.append(chat._get_llm_string())
    assert len(set(keys)) == 3


def test_a_set_is_one_entry_of_the_cache_in_every_order_also_where_texts_are_equal(
    lm: InvariantModel, llm_cache: Any
) -> None:
    alike = [Document("same", metadata={"n": n}) for n in (2, 1)]
    for order in permutations([*alike, Document("other")]):
        ChatInvariant(model=lm, max_tokens=1).invoke(QUESTION, documents=list(order))
    assert len(llm_cache._cache) == 1


def test_sorting_leaves_an_order_that_means_something_and_that_of_uploads(lm: InvariantModel) -> None:
    plain = ChatInvariant(model=lm, method="sequential", ordering="given", max_tokens=2)
    answer = plain.invoke([HumanMessage([*(to_block(to_segment(text)) for text in "cab"), QUESTION])])
    assert answer.response_metadata["order"] == [to_segment(text).content_hash for text in "cab"]
    uploads = [{"type": "text-plain", "mime_type": "text/plain", "text": text} for text in "cab"]
    chat = ChatInvariant(model=lm, max_tokens=8)
    one, other = (chat.invoke([HumanMessage([*listed, QUESTION])]) for listed in (uploads, uploads[::-1]))
    assert one.content != other.content
    assert {each.response_metadata["invariant"] for each in (one, other)} == {None}


# --- loading --------------------------------------------------------------------------------------------------------


@pytest.fixture
def loads(weights: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the models that were loaded, which takes some time."""
    names: list[str] = []

    def load(name: str, **options: Any) -> InvariantModel:
        time.sleep(0.3)
        names.append(name)
        return InvariantModel(copy.deepcopy(weights), toy_tokenizer())

    monkeypatch.setattr(InvariantModel, "from_pretrained", load)
    return names


def test_weights_are_loaded_once_and_only_to_answer(loads: list[str]) -> None:
    for kind in (ChatInvariant, InvariantLLM):
        assert "unloaded" in str(kind(model="unloaded"))
    assert not loads
    one, other = InvariantLLM(model="bound"), InvariantLLM(model="between", max_tokens=1)
    chat = ChatInvariant(model="configured").configurable_fields(max_tokens=ConfigurableField(id="most"))
    first = ChatInvariant(model="first", max_tokens=1)
    copied = first.model_copy(update={"model": "second"})
    for _ in range(2):
        one.bind(max_tokens=1).invoke(QUESTION)
        other.invoke(QUESTION)
        chat.invoke(QUESTION, config={"configurable": {"most": 1}})
        first.invoke(QUESTION)
        copied.invoke(QUESTION)
    assert loads == ["bound", "between", "configured", "first", "second"]
    ordered = ChatInvariant(model="first", ordering="monot5")
    assert ordered.lm.ordering is ordered.model_copy().lm.ordering


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_an_object_is_printed_without_its_weights_with_a_cache_too(kind: Any, llm_cache: Any) -> None:
    assert "unloaded" in str(kind(model="unloaded"))


def test_a_pickle_answers_alike_and_has_no_weights_that_have_a_name() -> None:
    for model, size in ((None, 5000), (InvariantModel.from_pretrained(), 10**9)):
        chat = ChatInvariant(model=model, max_tokens=4)
        answer = chat.invoke(QUESTION, documents=DOCUMENTS)
        pickled = pickle.dumps(chat)
        assert pickle.loads(pickled).invoke(QUESTION, documents=DOCUMENTS).content == answer.content
        assert len(pickled) < size
