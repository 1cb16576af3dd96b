"""ChatInvariant: its parameters, and what is chosen where they are left open."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidOption, InvalidTool, InvariantRAGError, UnknownName, UnsupportedCombination
from invariant_rag.interventions import MsPoE
from langchain_core.messages import HumanMessage
from langchain_core.runnables import ConfigurableField
from pydantic import ValidationError

from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments
from langchain_invariant_rag.documents import to_block, to_segment
from langchain_invariant_rag.errors import UnknownParameter

from .shared import ORDERS, QUESTION


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=8)


def block(document: Any) -> dict[str, Any]:
    return dict(to_block(to_segment(document)))


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
    assert chat._cache_key != plain._cache_key
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


@pytest.mark.parametrize("value", [1, 2.5, float("nan"), True, object(), [3]])
def test_a_call_with_stops_or_tools_that_are_none_is_refused(lm: InvariantModel, value: Any) -> None:
    for model in (ChatInvariant(model=lm), InvariantLLM(model=lm)):
        with pytest.raises(InvalidOption, match="stop: expected a list of str"):
            model.invoke(QUESTION, stop=value)
    if not isinstance(value, list):
        with pytest.raises(InvalidTool, match="tools: expected a list of tools"):
            ChatInvariant(model=lm).invoke(QUESTION, tools=value)


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
