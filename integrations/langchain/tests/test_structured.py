"""Structured output: every text follows its schema, whatever the weights, and ends in time."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, Literal

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import IncompleteObject, InvalidObject, InvalidSchema
from pydantic import BaseModel, Field, field_validator
from transformers import MaxTimeCriteria
from typing_extensions import TypedDict

from langchain_invariant_rag import ChatInvariant

from .shared import DOCUMENTS, QUESTION


class Mood(Enum):
    GOOD = "good"
    BAD = "bad"


# Random weights end no text by themselves: what has room to go on, goes on until the tokens are used up.
Word = Annotated[str, Field(max_length=6)]
Digit = Annotated[int, Field(ge=0, le=9)]


class Inner(BaseModel):
    name: Word
    tags: list[Word] = Field(min_length=1, max_length=2)


class Outer(BaseModel):
    """Everything at once."""

    text: Word
    number: Digit
    sure: bool
    mood: Mood
    kind: Literal["a", "b"]
    maybe: Word | None = None
    inner: Inner
    others: list[Inner] = Field([], max_length=1)


class Pair(TypedDict):
    """A pair."""

    one: Literal["pier", "mill", "ferry", "lamp", "barge", "salt", "rope", "tide"]
    two: Literal[1, 2, 3, 4, 5, 6, 7, 8]


@pytest.fixture(scope="module")
def chat(lm: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=400)


class Big(BaseModel):
    a_long_name_of_a_field: Word
    another_long_name_of_a_field: list[Word] = Field(max_length=1)


class Many(BaseModel):
    items: list[Big] = Field([], max_length=1)


class Endless(BaseModel):
    items: list[str]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize(
    ("schema", "max_tokens", "reason"),
    [(Outer, 600, "stop"), (Many, 300, "stop"), (Outer, 40, "length"), (Endless, 60, "length")],
)
def test_a_text_follows_its_schema_and_is_complete_or_says_that_it_ran_out(
    chat: ChatInvariant, schema: type[BaseModel], max_tokens: int, reason: str, temperature: float
) -> None:
    options = {"max_tokens": max_tokens, "temperature": temperature, "seed": 1, "documents": DOCUMENTS}
    result = chat.with_structured_output(schema, include_raw=True, **options).invoke(QUESTION)
    assert result["raw"].response_metadata["finish_reason"] == reason
    assert result["raw"].usage_metadata["output_tokens"] <= max_tokens
    if reason == "stop":
        assert result["parsing_error"] is None
        assert schema.model_validate_json(result["raw"].content) == result["parsed"]
        return
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], IncompleteObject)
    with pytest.raises(IncompleteObject):
        chat.with_structured_output(schema, **options).invoke(QUESTION)


def test_a_schema_that_is_none_is_refused(chat: ChatInvariant) -> None:
    schema = {"title": "Bad", "type": "object", "properties": {"a": {"type": "no such type"}}, "required": ["a"]}
    with pytest.raises(InvalidSchema, match="no such type"):
        chat.with_structured_output(schema).invoke(QUESTION)


class Small(BaseModel):
    number: int

    @field_validator("number")
    @classmethod
    def _never(cls, value: int) -> int:
        raise ValueError("no number will do")


@pytest.mark.parametrize("schema", [Pair, Inner])
def test_what_is_cut_off_is_an_error_and_no_dict_with_missing_keys(chat: ChatInvariant, schema: type) -> None:
    model = chat.with_structured_output(schema, max_tokens=120, stopping_criteria=[MaxTimeCriteria(0.0)])
    for ask in (model.invoke, lambda question: list(model.stream(question))):
        with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
            ask(QUESTION)


def test_what_a_validator_rejects_is_an_error_or_the_parsing_error_of_raw_output(chat: ChatInvariant) -> None:
    with pytest.raises(InvalidObject, match="no number will do"):
        chat.with_structured_output(Small, max_tokens=20).invoke(QUESTION)
    result = chat.with_structured_output(Small, include_raw=True, max_tokens=20).invoke(QUESTION)
    assert result["parsed"] is None
    assert isinstance(result["parsing_error"], InvalidObject)


async def test_documents_of_a_call_are_read_with_and_without_the_raw_message(chat: ChatInvariant) -> None:
    plain = chat.with_structured_output(Pair, max_tokens=120)
    raw = chat.with_structured_output(Pair, max_tokens=120, include_raw=True)
    expected = plain.invoke(QUESTION, documents=DOCUMENTS)
    assert expected != plain.invoke(QUESTION), "the documents make a difference"
    result = raw.invoke(QUESTION, documents=DOCUMENTS)
    assert result["parsed"] == expected
    assert len(result["raw"].response_metadata["order"]) == len(DOCUMENTS)
    assert (await raw.ainvoke(QUESTION, documents=DOCUMENTS))["parsed"] == expected
    assert raw.batch([QUESTION], documents=DOCUMENTS)[0]["parsed"] == expected
    merged: dict[str, Any] = {}
    for piece in raw.stream(QUESTION, documents=DOCUMENTS):
        merged |= {name: value for name, value in piece.items() if name != "raw"}
    assert merged == {"parsed": expected, "parsing_error": None}
