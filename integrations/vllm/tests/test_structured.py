"""Objects of a schema and calls of tools on vLLM: those of the core, token by token."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

import pytest
from invariant_rag import Generation, InvariantModel, Prompt
from invariant_rag.errors import IncompleteObject, UnsupportedCombination
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.structured import constrain, generate_structured
from invariant_rag.generation.tools import Tool
from langchain_invariant_rag import ChatInvariant
from pydantic import BaseModel, Field

from tests import test_in_process
from tests.documents import documents, question
from tests.test_frameworks import chat_message
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


def assert_same(ours: Generation, theirs: Generation) -> None:
    """Log-probabilities are those of the grammar's tokens alone on vLLM, and those of all tokens here."""
    test_in_process.assert_same(ours, theirs, tolerance=float("inf"))


def prompt_of(lm: InvariantModel, seed: int) -> Prompt:
    segments = documents(4, seed)
    return lm.chat_prompt(question(segments), segments)


@pytest.fixture(params=["in process", "over HTTP"])
def backend(request: pytest.FixtureRequest, on_vllm: VLLMBackend, on_server: VLLMBackend) -> VLLMBackend:
    return on_vllm if request.param == "in process" else on_server


@pytest.mark.parametrize("seed", [501, 502])
def test_an_object_is_that_of_the_core(seed: int, backend: VLLMBackend, lm: InvariantModel) -> None:
    prompt = prompt_of(lm, seed)
    ours = backend.generate(prompt, **constrain(backend, Flag, max_new_tokens=120))
    assert_same(ours, lm.generate(prompt, **constrain(lm, Flag, max_new_tokens=120)))
    assert isinstance(generate_structured(backend, prompt, Flag, max_new_tokens=120), Flag)


def test_a_stream_of_an_object_is_its_text(backend: VLLMBackend, lm: InvariantModel) -> None:
    stream = backend.stream(prompt_of(lm, 503), **constrain(backend, Flag, max_new_tokens=120))
    text = "".join(stream)
    assert stream.generation is not None
    assert text == stream.generation.text
    Flag.model_validate_json(text)


def test_an_object_that_does_not_fit_is_cut_and_says_so(on_vllm: VLLMBackend, lm: InvariantModel) -> None:
    whole = on_vllm.generate(prompt_of(lm, 501), **constrain(on_vllm, Flag, max_new_tokens=120))
    exact = constrain(on_vllm, Flag, max_new_tokens=len(whole.token_ids))
    assert_same(on_vllm.generate(prompt_of(lm, 501), **exact), whole)
    few = len(whole.token_ids) - 1
    cut = on_vllm.generate(prompt_of(lm, 501), **constrain(on_vllm, Flag, max_new_tokens=few))
    assert (cut.finish_reason, cut.token_ids) == ("length", whole.token_ids[:few])
    with pytest.raises(IncompleteObject):
        generate_structured(on_vllm, prompt_of(lm, 501), Flag, max_new_tokens=few - 1)


@pytest.mark.parametrize(("choice", "parallel"), [("required", False), ("required", True), ("measure", True)])
def test_forced_calls_are_those_of_the_core(
    choice: str, parallel: bool, backend: VLLMBackend, lm: InvariantModel
) -> None:
    messages = [{"role": "user", "content": "How long is the Lume?"}]
    answers = []
    for model in (lm, backend):
        request = AnswerRequest(messages, tools=TOOLS, tool_choice=choice, parallel=parallel, max_new_tokens=60)
        answers.append(Answering(model, request).reply().first)
    here, there = answers
    assert_same(there.generation, here.generation)
    assert there.tool_calls == here.tool_calls != ()


def test_an_answer_that_may_hold_calls_is_that_of_the_core(on_vllm: VLLMBackend, lm: InvariantModel) -> None:
    segments = documents(4, 504)
    for choice in ("auto", "none"):
        answers = []
        for model in (lm, on_vllm):
            messages = [{"role": "user", "content": [*segments, question(segments)]}]
            request = AnswerRequest(messages, tools=TOOLS, tool_choice=choice, max_new_tokens=24)
            answers.append(Answering(model, request).reply().first.generation)
        assert_same(answers[1], answers[0])


def test_langchain_takes_objects_and_calls_from_vllm(on_vllm: VLLMBackend, lm: InvariantModel) -> None:
    segments = documents(3, 505)
    here, there = (ChatInvariant(model=model, max_tokens=120) for model in (lm, on_vllm))
    for order in (segments, segments[::-1]):
        message = chat_message(order, "What colour is it?")
        objects = [each.with_structured_output(Flag).invoke([message]) for each in (here, there)]
        assert isinstance(objects[0], Flag)
        assert objects[0] == objects[1]
        called: Any = there.bind_tools([each.to_dict() for each in TOOLS], tool_choice="measure").invoke([message])
        assert [each["name"] for each in called.tool_calls] == ["measure"]


def test_other_processors_are_refused_with_the_reason(on_vllm: VLLMBackend, lm: InvariantModel) -> None:
    options = constrain(on_vllm, Flag, max_new_tokens=120)
    for processors in ([lambda ids, scores: scores], [*options["logits_processor"], lambda ids, scores: scores]):
        with pytest.raises(UnsupportedCombination, match="logits processors"):
            on_vllm.generate(prompt_of(lm, 506), **{**options, "logits_processor": processors})


def test_a_schema_is_kept_under_sampling(on_vllm: VLLMBackend, lm: InvariantModel) -> None:
    options = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 200}
    for seed in range(4):
        written = on_vllm.generate(prompt_of(lm, 507), seed=seed, **constrain(on_vllm, Flag, **options))
        assert written.finish_reason == "length" or Flag.model_validate(json.loads(written.text))


def test_control_tokens_are_banned_whatever_their_ids(lm: InvariantModel, monkeypatch: pytest.MonkeyPatch) -> None:
    options = constrain(lm, Flag, max_new_tokens=120)
    (processor,), most = options.pop("logits_processor"), options.pop("max_new_tokens")
    controls = {str(token) for token in processor.words.controls if token in processor.banned[b""]}
    monkeypatch.setattr(sampling, "_MOST_BIASES", len(controls))
    fields = sampling.sampling_of(lm, most, {**options, "logits_processor": [processor]}).fields
    assert set(fields["logit_bias"]) == controls
