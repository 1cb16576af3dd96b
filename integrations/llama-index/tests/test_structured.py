from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Literal

import pytest
from cases import ORDERS, QUERY, ListRetriever, nodes_of
from invariant_rag import InvariantModel
from invariant_rag.errors import IncompleteObject
from llama_index.core.base.response.schema import PydanticResponse
from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from pydantic import BaseModel, Field
from transformers import MaxTimeCriteria

from llama_index.llms.invariant_rag import InvariantLLM
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer


class Departure(BaseModel):
    """When something leaves."""

    vessel: Literal["ferry", "barge", "copper bridge"]
    hour: int = Field(ge=0, le=23)
    daily: bool
    codes: list[Literal["a", "b", "c", "d"]] = Field(min_length=8, max_length=8)


class Essay(BaseModel):
    text: str


@pytest.fixture
def llm(model: InvariantModel) -> InvariantLLM:
    return InvariantLLM(model, max_tokens=200)


async def test_a_random_model_writes_a_valid_object(llm: InvariantLLM) -> None:
    template = PromptTemplate("When does the {thing} leave?")
    first = llm.structured_predict(Departure, template, thing="ferry")
    assert isinstance(first, Departure)
    assert await llm.astructured_predict(Departure, template, thing="ferry") == first
    assert llm.structured_predict(Departure, template, {"temperature": 1.0, "seed": 1}, thing="ferry") != first


def test_templates_stay_as_they_were(llm: InvariantLLM) -> None:
    template = PromptTemplate("When?")
    llm.structured_predict(Departure, template)
    assert template.output_parser is None


def test_a_structured_llm_works(llm: InvariantLLM) -> None:
    assert isinstance(llm.as_structured_llm(Departure).complete("When?").raw, Departure)


def test_an_object_that_does_not_fit_is_refused(llm: InvariantLLM) -> None:
    with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
        llm.structured_predict(Essay, PromptTemplate("Write."), {"max_tokens": 5})


def test_an_object_that_is_cut_off_is_an_error(llm: InvariantLLM) -> None:
    options = {"stopping_criteria": [MaxTimeCriteria(0.0)]}
    with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
        llm.structured_predict(Essay, PromptTemplate("Write."), options)
    with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
        list(llm.stream_structured_predict(Essay, PromptTemplate("Write."), options))


def test_stop_strings_do_not_cut_an_object(llm: InvariantLLM) -> None:
    expected = llm.structured_predict(Departure, PromptTemplate("When?"))
    assert llm.structured_predict(Departure, PromptTemplate("When?"), {"stop": ["hour", ","]}) == expected
    assert list(llm.stream_structured_predict(Departure, PromptTemplate("When?"), {"stop": [","]}))[-1] == expected


async def test_the_synthesizer_answers_with_an_object(llm: InvariantLLM) -> None:
    synthesizer = InvariantSynthesizer(llm, output_cls=Departure)
    responses = [synthesizer.synthesize(QUERY, nodes_of()), await synthesizer.asynthesize(QUERY, nodes_of())]
    engine = RetrieverQueryEngine(ListRetriever(nodes_of()), synthesizer)
    responses.append(engine.query(QUERY))
    assert all(type(each) is PydanticResponse and isinstance(each.response, Departure) for each in responses)
    assert responses[0].response == responses[1].response == responses[2].response


def test_an_object_does_not_depend_on_the_order_of_nodes(llm: InvariantLLM, plain_model: InvariantModel) -> None:
    def answers(judge: InvariantLLM) -> Iterator[str]:
        synthesizer = InvariantSynthesizer(judge, output_cls=Departure)
        return (str(synthesizer.synthesize(QUERY, nodes_of(order))) for order in ORDERS)

    assert len(set(answers(llm))) == 1
    plain = answers(InvariantLLM(plain_model, max_tokens=200))
    first = next(plain)
    assert any(other != first for other in plain)


def test_a_structured_llm_serves_the_synthesizer(llm: InvariantLLM) -> None:
    by_llm = InvariantSynthesizer(llm.as_structured_llm(Departure)).synthesize(QUERY, nodes_of())
    by_class = InvariantSynthesizer(llm, output_cls=Departure).synthesize(QUERY, nodes_of())
    assert type(by_llm) is PydanticResponse
    assert by_llm.response == by_class.response


@pytest.mark.parametrize("mode", [ResponseMode.COMPACT, ResponseMode.TREE_SUMMARIZE])
def test_stock_modes_answer_with_an_object_in_every_order(llm: InvariantLLM, mode: ResponseMode) -> None:
    answers = set()
    for order in ORDERS:
        engine = RetrieverQueryEngine.from_args(
            ListRetriever(nodes_of(order)),
            llm=llm,
            response_mode=mode,
            output_cls=Departure,
            node_postprocessors=[SegmentMarkerPostprocessor()],
        )
        answers.add(str(engine.query(QUERY).response))
    assert len(answers) == 1


@pytest.mark.parametrize("way", ["", "a"])
async def test_an_object_streams_as_it_grows(llm: InvariantLLM, way: str) -> None:
    template = PromptTemplate("When does the {thing} leave?")
    whole = llm.structured_predict(Departure, template, thing="ferry")
    stream = getattr(llm, f"{way}stream_structured_predict")(Departure, template, thing="ferry")
    grown = [each async for each in await stream] if way else list(stream)
    assert grown[-1] == whole
    assert len(grown) > 2
    for before, after in pairwise([each.model_dump(exclude_unset=True) for each in grown]):
        assert set(before) <= set(after)


def test_a_stream_of_an_object_that_does_not_fit_is_refused(llm: InvariantLLM) -> None:
    with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
        list(llm.stream_structured_predict(Essay, PromptTemplate("Write."), {"max_tokens": 5}))


@pytest.mark.filterwarnings("ignore:The `json` method is deprecated")  # LlamaIndex calls it
def test_a_structured_llm_streams(llm: InvariantLLM) -> None:
    structured = llm.as_structured_llm(Departure)
    *_, last = structured.stream_chat([ChatMessage("When?")])
    assert last.raw == structured.chat([ChatMessage("When?")]).raw


def test_a_routed_model_writes_objects(model: InvariantModel) -> None:
    template = PromptTemplate("When does the {thing} leave?")
    routed = model.with_routing(2.0)
    found = InvariantLLM(routed, max_tokens=200).structured_predict(Departure, template, thing="ferry")
    kept = InvariantLLM(routed.plain_branch, max_tokens=200).structured_predict(Departure, template, thing="ferry")
    assert found == kept
