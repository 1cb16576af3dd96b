"""What runs on an `InvariantModel` runs on vLLM by changing the model line: frameworks, objects of a schema, calls."""

from concurrent.futures import CancelledError
from threading import Event
from typing import Annotated, Literal

import pytest
from invariant_rag import MicroBatcher
from invariant_rag.audit import Question, audit
from invariant_rag.errors import IncompleteObject, UnsupportedCombination
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.digest import model_digest
from invariant_rag.generation.structured import Tool, constrain, generate_structured
from langchain_core.messages import HumanMessage
from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_block
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.invariant_rag import InvariantLLM as LlamaIndexLLM
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer
from pydantic import BaseModel, Field

from tests.worlds import Pair, documents, moved, question
from vllm_invariant_rag import sampling


class Flag(BaseModel):
    place: str = Field(max_length=20)
    colour: Literal["red", "green", "blue", "orange"]
    founded: int = Field(ge=1000, le=1999)
    names: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)


TOOLS = [
    Tool("search", "Search for a text.", {"properties": {"query": {"type": "string", "maxLength": 12}}}),
    Tool("measure", "Measure a way.", {"properties": {"miles": {"type": "integer", "maximum": 99}}}),
]


def chats(pair, **options):
    return [ChatInvariant(model=model, **options) for model in (pair.here, pair.there)]


def message_of(segments):
    blocks = [dict(to_block(each)) for each in segments]
    return HumanMessage(content=[*blocks, {"type": "text", "text": question(segments)}])


def test_chat_invariant_gives_answers_objects_and_calls_alike_on_vllm(pair):
    segments = documents(5, seed=400)
    (here, there), longer = chats(pair, max_tokens=16), chats(pair, max_tokens=120)
    for order in (segments, segments[::-1]):
        message = message_of(order)
        ours, theirs = there.invoke([message]), here.invoke([message])
        assert ours.content == theirs.content
        assert ours.response_metadata["invariant"] is True
        assert "".join(chunk.content for chunk in there.stream([message])) == ours.content
        objects = [each.with_structured_output(Flag).invoke([message]) for each in longer]
        assert isinstance(objects[0], Flag)
        assert objects[0] == objects[1]
        called = longer[1].bind_tools([each.to_dict() for each in TOOLS], tool_choice="measure").invoke([message])
        assert [each["name"] for each in called.tool_calls] == ["measure"]


def test_calls_that_would_be_batched_here_are_left_to_vllm(pair):
    here, there = ChatInvariant(model=pair.here, max_tokens=12), chats(pair, max_tokens=12, micro_batching=True)[1]
    messages = [[message_of(documents(3, seed))] for seed in (410, 411, 412)]
    assert [each.content for each in there.batch(messages)] == [each.content for each in here.batch(messages)]
    assert "".join(chunk.content for chunk in there.stream(messages[0])) == here.invoke(messages[0]).content
    batcher, prompts = MicroBatcher(), [pair.prompt(seed, 3) for seed in (410, 411, 412)]
    streams = [batcher.stream(pair.there, each, {"max_new_tokens": 12}) for each in prompts]
    assert ["".join(each) for each in streams] == [pair.here.generate(each, max_new_tokens=12).text for each in prompts]
    abandoned = Event()
    abandoned.set()
    with pytest.raises(CancelledError):
        batcher.generate(pair.there, prompts[0], abandoned=abandoned)


def test_invariant_llm_answers_alike_on_vllm_in_batches(pair):
    here = InvariantLLM(model=pair.here, max_tokens=16)
    there = InvariantLLM(model=pair.there, max_tokens=16, stop=["."])
    texts = [f"Documents: {each.text}\n{question([each])}" for each in documents(4, seed=401)]
    assert there.batch(texts) == [text.split(".")[0] for text in here.batch(texts)]


def test_llama_index_answers_alike_on_vllm(pair):
    segments = documents(5, seed=404)
    nodes = [NodeWithScore(node=TextNode(text=each.text)) for each in segments]
    answers = {
        str(InvariantSynthesizer(llm=LlamaIndexLLM(model=model, max_tokens=16)).synthesize(question(segments), order))
        for model in (pair.here, pair.there)
        for order in (nodes, nodes[::-1])
    }
    assert len(answers) == 1
    assert answers != {""}


def test_an_audit_of_vllm_finds_that_the_order_changes_nothing_and_that_it_is_not_the_model_here(pair):
    questions = [Question(question(each), tuple(each)) for each in (documents(3, 402), documents(3, 403))]
    result = audit(pair.there, questions, workers=4, generation={"max_new_tokens": 8})
    assert not result.flips
    assert result.screen.between == 0.0
    assert model_digest(pair.there) != model_digest(pair.here)
    assert model_digest(pair.there) == model_digest(pair.using("rotor").there)


@pytest.fixture(params=["in process", "over HTTP"])
def either(request, pair, on_server):
    return pair if request.param == "in process" else Pair(pair.here, on_server)


@pytest.mark.parametrize("seed", [501, 502])
def test_an_object_is_that_of_the_core_and_one_that_does_not_fit_is_cut_and_says_so(seed, either):
    """But for log-probabilities: on vLLM, they are those among the grammar's tokens."""
    prompt, there = either.prompt(seed, 4), either.there
    ours = there.generate(prompt, **constrain(there, Flag, max_new_tokens=120))
    moved(ours, either.here.generate(prompt, **constrain(either.here, Flag, max_new_tokens=120)))
    assert isinstance(generate_structured(there, prompt, Flag, max_new_tokens=120), Flag)
    stream = there.stream(prompt, **constrain(there, Flag, max_new_tokens=120))
    assert "".join(stream) == ours.text
    assert stream.generation.token_ids == ours.token_ids
    few = len(ours.token_ids) - 1
    moved(there.generate(prompt, **constrain(there, Flag, max_new_tokens=few + 1)), ours)
    cut = there.generate(prompt, **constrain(there, Flag, max_new_tokens=few))
    assert (cut.finish_reason, cut.token_ids) == ("length", ours.token_ids[:few])
    with pytest.raises(IncompleteObject):
        generate_structured(there, prompt, Flag, max_new_tokens=few - 1)


@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", False), ("required", True), ("measure", True), ("auto", True), ("none", True)]
)
def test_an_answer_that_may_or_must_hold_calls_is_that_of_the_core(choice, parallel, either):
    segments, forced = documents(4, 504), choice in {"required", "measure"}
    content = ["How long is the Lume?"] if forced else [*segments, question(segments)]
    options = {"tool_choice": choice, "parallel": parallel, "max_new_tokens": 60 if forced else 24}
    request = AnswerRequest([{"role": "user", "content": content}], tools=TOOLS, **options)
    here, there = (Answering(model, request).reply().first for model in (either.here, either.there))
    moved(there.generation, here.generation)
    assert there.tool_calls == here.tool_calls
    assert there.tool_calls or not forced


def test_other_processors_are_refused_with_the_reason(pair):
    options = constrain(pair.there, Flag, max_new_tokens=120)
    for processors in ([lambda ids, scores: scores], [*options["logits_processor"], lambda ids, scores: scores]):
        with pytest.raises(UnsupportedCombination, match="logits processors"):
            pair.there.generate(pair.prompt(506), **{**options, "logits_processor": processors})


def test_control_tokens_are_banned_whatever_their_ids(lm, monkeypatch):
    options = constrain(lm, Flag, max_new_tokens=120)
    (processor,), most = options.pop("logits_processor"), options.pop("max_new_tokens")
    controls = {token for token in processor.words.controls if token in processor.banned[b""]}
    monkeypatch.setattr(sampling, "_MOST_BIASES", len(controls))
    fields = sampling.sampling_of(lm, most, {**options, "logits_processor": [processor]})[0]
    assert set(fields["logit_bias"]) == controls
