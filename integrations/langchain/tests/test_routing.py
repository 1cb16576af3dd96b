"""A routed model where a model is expected: both branches are asked, and the report says which one answered."""

from __future__ import annotations

from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from pydantic import BaseModel, Field

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import Segments

from .shared import DOCUMENTS, ORDERS, QUESTION

ALPHAS = {"plain": 2.0, "invariant": -2.0}


class Town(BaseModel):
    """A town."""

    name: str = Field(max_length=6)


@pytest.mark.parametrize("branch", ALPHAS)
def test_the_answer_is_that_of_the_branch(lm: InvariantModel, branch: str) -> None:
    routed = lm.with_routing(ALPHAS[branch], plain_order="canonical")
    kept = ChatInvariant(model=getattr(routed, f"{branch}_branch"), max_tokens=8)
    chat = ChatInvariant(model=routed, max_tokens=8)
    answer = chat.invoke(QUESTION, documents=DOCUMENTS)
    assert answer.text == kept.invoke(QUESTION, documents=DOCUMENTS).text
    assert answer.response_metadata["routing"]["branch"] == branch
    pieces: Any = None
    for piece in chat.stream(QUESTION, documents=DOCUMENTS):
        pieces = piece if pieces is None else pieces + piece
    assert pieces.text == answer.text
    assert pieces.response_metadata["routing"] == answer.response_metadata["routing"]
    assert [each.text for each in chat.batch([QUESTION, QUESTION], documents=DOCUMENTS)] == [answer.text] * 2


@pytest.mark.parametrize("branch", ALPHAS)
def test_a_routed_model_writes_structured_output(lm: InvariantModel, branch: str) -> None:
    routed = lm.with_routing(ALPHAS[branch], plain_order="canonical")
    kept = ChatInvariant(model=getattr(routed, f"{branch}_branch"), max_tokens=120)
    found, expected = (
        chat.with_structured_output(Town).invoke(QUESTION, documents=DOCUMENTS)
        for chat in (ChatInvariant(model=routed, max_tokens=120), kept)
    )
    assert found == expected


@pytest.mark.parametrize("model", [ChatInvariant, InvariantLLM])
def test_the_plain_branch_sees_the_order_given_only_if_it_is_to(lm: InvariantModel, model: Any) -> None:
    def answers(**options: Any) -> int:
        routed = model(model=lm.with_routing(2.0, **options), max_tokens=8)
        return len({str(getattr(answer, "content", answer)) for order in ORDERS
                    if (answer := routed.invoke(f"{Segments(order)}\n{QUESTION}"))})  # fmt: skip

    assert answers(plain_order="canonical") == 1
    with pytest.warns(OrderWarning, match="in the order given"):
        assert answers(plain_order="given") > 1


def test_routing_is_in_the_cache_key(lm: InvariantModel) -> None:
    models = [lm, lm.with_routing(0.2), lm.with_routing(0.3), lm.with_routing(plain_order="canonical")]
    assert len({str(ChatInvariant(model=each)._identifying_params) for each in models}) == len(models)
