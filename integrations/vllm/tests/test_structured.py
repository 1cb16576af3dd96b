"""Objects of a schema and calls of tools on vLLM: those of the core, token by token."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import IncompleteObject, UnsupportedCombination
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.structured import Tool, constrain, generate_structured
from langchain_invariant_rag import ChatInvariant
from pydantic import BaseModel, Field

from tests.documents import chat_message, documents, question
from tests.pairs import Pair, moved  # log-probabilities are those among the grammar's tokens on vLLM
from vllm_invariant_rag import VLLMBackend, sampling


class Flag(BaseModel):
    place: str = Field(max_length=20)
    colour: Literal["red", "green", "blue", "orange"]
    founded: int = Field(ge=1000, le=1999)
    names: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)


TOOLS = [
    Tool("search", "Search for a text.", {"properties": {"query": {"type": "string", "maxLength": 12}}}),
    Tool("measure", "Measure a way.", {"properties": {"miles": {"type": "integer", "maximum": 99}}}),
]


@pytest.fixture(params=["in process", "over HTTP"])
def either(request: pytest.FixtureRequest, pair: Pair, on_server: VLLMBackend) -> Pair:
    return pair if request.param == "in process" else Pair(pair.here, on_server)


def replies(pair: Pair, *content: Any, **options: Any) -> list[Any]:
    request = AnswerRequest([{"role": "user", "content": list(content)}], tools=TOOLS, **options)
    return [Answering(model, request).reply().first for model in (pair.here, pair.there)]


@pytest.mark.parametrize("seed", [501, 502])
def test_an_object_is_that_of_the_core_and_a_stream_is_its_text(seed: int, either: Pair) -> None:
    prompt, there = either.prompt(seed, 4), either.there
    ours = there.generate(prompt, **constrain(there, Flag, max_new_tokens=120))
    moved(ours, either.here.generate(prompt, **constrain(either.here, Flag, max_new_tokens=120)))
    assert isinstance(generate_structured(there, prompt, Flag, max_new_tokens=120), Flag)
    stream = there.stream(prompt, **constrain(there, Flag, max_new_tokens=120))
    assert "".join(stream) == ours.text
    assert stream.generation is not None
    assert stream.generation.token_ids == ours.token_ids


def test_an_object_that_does_not_fit_is_cut_and_says_so(pair: Pair) -> None:
    prompt, on_vllm = pair.prompt(501, 4), pair.there
    whole = on_vllm.generate(prompt, **constrain(on_vllm, Flag, max_new_tokens=120))
    few = len(whole.token_ids) - 1
    moved(on_vllm.generate(prompt, **constrain(on_vllm, Flag, max_new_tokens=few + 1)), whole)
    cut = on_vllm.generate(prompt, **constrain(on_vllm, Flag, max_new_tokens=few))
    assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:few])
    with pytest.raises(IncompleteObject):
        generate_structured(on_vllm, prompt, Flag, max_new_tokens=few - 1)


@pytest.mark.parametrize(("choice", "parallel"), [("required", False), ("required", True), ("measure", True)])
def test_forced_calls_are_those_of_the_core(choice: str, parallel: bool, either: Pair) -> None:
    options = {"tool_choice": choice, "parallel": parallel, "max_new_tokens": 60}
    here, there = replies(either, "How long is the Lume?", **options)
    moved(there.generation, here.generation)
    assert there.tool_calls == here.tool_calls != ()


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_answer_that_may_hold_calls_is_that_of_the_core(choice: str, pair: Pair) -> None:
    segments = documents(4, 504)
    here, there = replies(pair, *segments, question(segments), tool_choice=choice, max_new_tokens=24)
    moved(there.generation, here.generation)


def test_langchain_takes_objects_and_calls_from_vllm(pair: Pair) -> None:
    segments = documents(3, 505)
    here, there = (ChatInvariant(model=model, max_tokens=120) for model in (pair.here, pair.there))
    for order in (segments, segments[::-1]):
        message = chat_message(order, "What colour is it?")
        objects = [each.with_structured_output(Flag).invoke([message]) for each in (here, there)]
        assert isinstance(objects[0], Flag)
        assert objects[0] == objects[1]
        called: Any = there.bind_tools([each.to_dict() for each in TOOLS], tool_choice="measure").invoke([message])
        assert [each["name"] for each in called.tool_calls] == ["measure"]


def test_other_processors_are_refused_with_the_reason(pair: Pair) -> None:
    options = constrain(pair.there, Flag, max_new_tokens=120)
    for processors in ([lambda ids, scores: scores], [*options["logits_processor"], lambda ids, scores: scores]):
        with pytest.raises(UnsupportedCombination, match="logits processors"):
            pair.there.generate(pair.prompt(506), **{**options, "logits_processor": processors})


def test_control_tokens_are_banned_whatever_their_ids(lm: InvariantModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = constrain(lm, Flag, max_new_tokens=120)
    (processor,), most = options.pop("logits_processor"), options.pop("max_new_tokens")
    controls = {token for token in processor.words.controls if token in processor.banned[b""]}
    monkeypatch.setattr(sampling, "_MOST_BIASES", len(controls))
    fields = sampling.sampling_of(lm, most, {**options, "logits_processor": [processor]})[0]
    assert set(fields["logit_bias"]) == controls
