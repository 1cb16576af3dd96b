"""What an answer is and says: its text or object, what was read, tokens, reasoning, log-probabilities, citations."""

import sys
from collections import ChainMap
from contextvars import Context
from typing import Annotated, Literal

import pytest
from framework_cases import ended
from invariant_rag.errors import ContextOverflow, IncompleteObject, InvalidObject, UnsupportedCombination
from invariant_rag.generation.kv_cache import KeyValueCache
from langchain_core.documents import Document
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.runnables import RunnableLambda
from pydantic import AfterValidator, BaseModel
from transformers import MaxTimeCriteria
from typing_extensions import TypedDict

from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_segment

from .models import Departure, search
from .shared import DOCUMENTS, ORDERS, QUESTION, WAYS

MOST_CALLS, MOST_FRAMES = 350, 3900
"""Python calls of one `invoke`, of this package and the core, and of all packages. Never raised."""


def test_an_answer_says_what_was_read_and_written(lm):
    answer = ChatInvariant(model=lm, max_tokens=8).invoke(QUESTION, documents=DOCUMENTS)
    messages = [{"role": "user", "content": [*map(to_segment, DOCUMENTS), QUESTION]}]
    generation = lm.generate(lm.chat_prompt(messages=messages), max_new_tokens=8)
    assert answer.content == generation.text
    read, both = generation.usage.prompt_tokens, generation.usage.total_tokens
    counted = {"input_tokens": read, "output_tokens": 8, "total_tokens": both}
    assert answer.usage_metadata == {**counted, "input_token_details": {"cache_read": 0}}
    told = answer.response_metadata
    assert told["order"] == [to_segment(DOCUMENTS[index]).content_hash for index in generation.order]
    assert (told["finish_reason"], told["model_name"], told["model_provider"]) == ("length", lm.name, "invariant-rag")


def test_completions_say_it_too_each_by_itself_and_their_tokens_together(lm):
    result = InvariantLLM(model=lm, max_tokens=8).generate([QUESTION, "Who?"], documents=DOCUMENTS)
    told = [each.generation_info for (each,) in result.generations]
    assert [(len(each["order"]), each["usage_metadata"]["output_tokens"]) for each in told] == [(3, 8), (3, 8)]
    read = sum(each["usage_metadata"]["input_tokens"] for each in told)
    usage = {"prompt_tokens": read, "completion_tokens": 16, "total_tokens": read + 16}
    assert result.llm_output == {"token_usage": usage, "model_name": lm.name}


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
@pytest.mark.parametrize("micro_batching", [False, True])
def test_what_does_not_fit_is_an_overflow_for_langchain_too_or_named(lm, kind, micro_batching):
    model, long = kind(model=lm, max_tokens=4, micro_batching=micro_batching), "long " * 2000
    for ask in WAYS.values():
        with pytest.raises(ContextOverflowError) as error:
            ask(model, long)
        assert isinstance(error.value, ContextOverflow)
        assert "drop_last" in error.value.hint
    spare = RunnableLambda(lambda _: "spare")
    assert model.with_fallbacks([spare], exceptions_to_handle=(ContextOverflowError,)).invoke(long) == "spare"
    chat = ChatInvariant(model=lm, max_tokens=4, overflow="drop_last", micro_batching=micro_batching)
    told = chat.invoke(QUESTION, documents=[f"{number} " * 400 for number in range(6)]).response_metadata
    assert (len(told["order"]) + len(told["dropped"]), bool(told["dropped"])) == (6, True)
    with pytest.raises(ContextOverflowError):
        chat.get_num_tokens_from_messages([HumanMessage(long)])


def test_a_call_may_ask_for_another_model_for_several_answers_and_for_no_usage(lm):
    chat = ChatInvariant(model=lm, max_tokens=4)
    assert chat.invoke(QUESTION, model=lm.with_method("pine")).response_metadata["method"] == "pine"
    (answers,) = chat.generate([[HumanMessage(QUESTION)]], n=3, temperature=2.0, seed=1).generations
    assert len({each.text for each in answers}) == 3
    silent = chat.model_copy(update={"stream_usage": False})
    assert {chunk.usage_metadata is None for chunk in silent.stream(QUESTION)} == {True}
    for chunks in (silent.stream(QUESTION, stream_usage=True), chat.stream(QUESTION)):
        assert [*chunks][-1].usage_metadata


def test_one_call_with_three_documents_takes_few_calls_and_reads_no_weights_without_a_cache(lm):
    chat = ChatInvariant(model=lm, max_tokens=2)
    chat.invoke(QUESTION, documents=DOCUMENTS)
    called = []

    def record(frame, event, argument):
        # What transformers 5.24 and later wrap around every layer and output to rename an argument is nobody's call.
        renames = ("wrap_func", "wrapped_func", "_replace_old_cache_name", "_rename_kwargs_for_bc", "is_tracing")
        if event == "call" and not (frame.f_code.co_name in renames and "transformers" in frame.f_code.co_filename):
            called.append(frame.f_code)

    def measure():
        sys.setprofile(record)
        try:
            chat.invoke(QUESTION, documents=DOCUMENTS)
        finally:
            sys.setprofile(None)

    Context().run(measure)  # in which no other test has retrieved anything
    ours = [code.co_qualname for code in called if "invariant_rag" in code.co_filename]
    assert len(ours) <= MOST_CALLS, ours
    assert len(called) <= MOST_FRAMES
    assert "model_digest" not in ours


@pytest.mark.parametrize("kept", ["by the model", "by a chat model", "with a method", "with routing"])
def test_documents_that_were_read_before_are_not_read_again_in_any_order(lm, kept):
    own = {} if kept == "by the model" else {"key_value_cache": KeyValueCache()}
    model = lm if own else lm.with_cache(KeyValueCache())
    routed = model.with_routing(-2.0, plain_order="canonical") if kept == "with routing" else model
    method = {"method": "pine"} if kept == "with a method" else {}
    chat = ChatInvariant(model=routed, max_tokens=6, **own, **method)
    found = [ask(chat, QUESTION, documents=order) for ask, order in zip(WAYS.values(), ORDERS, strict=True)]
    ((_, read),) = {(each.content, each.usage_metadata["input_tokens"]) for each in found}
    first, *others = (each.usage_metadata["input_token_details"]["cache_read"] for each in found)
    assert (first, len({*others})) == (0, 1)
    assert len(QUESTION) < read - others[0] < 2 * len(QUESTION), "all but the text behind the documents is kept"
    assert "key_value_cache" not in chat.model_dump()


def test_reasoning_stands_apart_from_the_answer(spoken):
    chat, variables = ChatInvariant(model=spoken, max_tokens=110), {"template_kwargs": {"enable_thinking": True}}
    asked = ended(spoken, "It is early.\n</think>\n\nAt noon.")
    for bound in (chat.model_copy(update=variables).bind(**asked), chat.bind(**asked, **variables)):
        answer = bound.invoke(QUESTION)
        assert (answer.content, answer.additional_kwargs) == ("At noon.", {"reasoning_content": "It is early."})
        assert [block["type"] for block in answer.content_blocks] == ["reasoning", "text"]
        assert sum("reasoning_content" in chunk.additional_kwargs for chunk in bound.stream(QUESTION)) > 3


def test_log_probabilities_come_in_the_shape_of_openai(lm):
    chat = ChatInvariant(model=lm, logprobs=True, max_tokens=12)
    answer = chat.invoke(QUESTION)
    listed = answer.response_metadata["logprobs"]["content"]
    prompt = lm.chat_prompt(messages=[{"role": "user", "content": QUESTION}])
    assert [each["logprob"] for each in listed] == list(lm.generate(prompt, max_new_tokens=12).logprobs)
    assert all(bytes(each["bytes"]).decode() == each["token"] and each["top_logprobs"] == [] for each in listed)
    assert "".join(each["token"] for each in listed) == answer.content
    stopped = chat.invoke(QUESTION, stop=listed[5]["token"] + listed[6]["token"])
    assert "".join(each["token"] for each in stopped.response_metadata["logprobs"]["content"]) == stopped.content
    for silent in (ChatInvariant(model=lm, max_tokens=2), chat.bind(logprobs=False, max_tokens=2)):
        assert "logprobs" not in silent.invoke(QUESTION).response_metadata
    top = ChatInvariant(model=lm, top_logprobs=3, max_tokens=5)
    for each in top.invoke(QUESTION).response_metadata["logprobs"]["content"]:  # greedy: the first is the chosen one
        best = [one["logprob"] for one in each["top_logprobs"]]
        assert (len(best), best[0], best) == (3, each["logprob"], sorted(best, reverse=True))
    with pytest.raises(UnsupportedCombination, match="one beam"):
        top.invoke(QUESTION, num_beams=2)


FOUND = [
    Document("It leaves at noon.", id="f-17", metadata={"source": "https://ostra.example/ferry", "page": 3}),
    Document("Or so they say.", metadata={"source": "town.txt"}),
    Document("Who knows.", metadata={"title": "Doubts"}),
]
TEXT = "It leaves at noon. Or so they say. Who knows. See [2]."


def test_sentences_are_cited_with_their_documents_and_the_answer_stays_as_it_is_written(lm):
    cites = ChatInvariant(model=lm, max_tokens=80, citations=True)

    def asked(**options):
        return cites.invoke(QUESTION, documents=FOUND, **ended(lm, TEXT), **options)

    answer = asked()
    assert StrOutputParser().invoke(answer) == answer.text == asked(citations=False).content == TEXT
    first, second, third = answer.content_blocks[0]["annotations"]
    url, content_hash = "https://ostra.example/ferry", to_segment(FOUND[0]).content_hash
    extras = {"id": content_hash, "metadata": {"source": url, "page": 3}, "document_id": "f-17"}
    place = {"start_index": 0, "end_index": 18, "cited_text": "It leaves at noon.", "url": url, "title": url}
    assert first == {"type": "citation", **place, "extras": extras}
    assert ("url" in second, second["title"], "document_id" in second["extras"]) == (False, "town.txt", False)
    assert ("url" in third, third["title"]) == (False, "Doubts")
    chunks = list(cites.stream(QUESTION, documents=FOUND, **ended(lm, TEXT)))
    assert [chunk for chunk in chunks if any("annotations" in each for each in chunk.content)] == [chunks[-1]]
    again = [[HumanMessage("a"), each, HumanMessage("b")] for each in (answer, AIMessage(answer.text))]
    assert len({cites.invoke(each, max_tokens=8).text for each in again}) == 1
    called = cites.bind_tools([search], tool_choice="any", max_tokens=160).invoke(QUESTION)
    assert (called.content, [block["type"] for block in called.content_blocks]) == ([], ["tool_call"])
    off = cites.model_copy(update={"citations": False}).bind(citations=True)
    assert off.invoke(QUESTION, documents=FOUND, **ended(lm, TEXT)).content == answer.content


# --- objects --------------------------------------------------------------------------------------------------------


class Pair(TypedDict):
    """A pair."""

    one: Literal["pier", "mill", "ferry", "lamp", "barge", "salt", "rope", "tide"]
    two: Literal[1, 2, 3, 4, 5, 6, 7, 8]


def never(value):
    raise ValueError("no number will do")


class Small(BaseModel):
    number: Annotated[int, AfterValidator(never)]


@pytest.fixture(scope="module")
def writer(lm):
    return ChatInvariant(model=lm, max_tokens=200)


@pytest.mark.parametrize("schema", [Pair, Departure])
def test_what_is_cut_off_is_an_error_and_no_dict_with_missing_keys(writer, schema):
    model = writer.with_structured_output(schema, stopping_criteria=[MaxTimeCriteria(0.0)])
    for ask in WAYS.values():
        with pytest.raises(IncompleteObject, match="expected a complete JSON text"):
            ask(model, QUESTION)
    found = writer.with_structured_output(schema, include_raw=True, max_tokens=3).invoke(QUESTION)
    raw, parsed, error = map(found.get, ("raw", "parsed", "parsing_error"))
    assert (raw.response_metadata["finish_reason"], parsed, type(error)) == ("length", None, IncompleteObject)


def test_what_a_validator_rejects_is_an_error(writer):
    with pytest.raises(InvalidObject, match="no number will do"):
        writer.with_structured_output(Small, max_tokens=20).invoke(QUESTION)
    result = writer.with_structured_output(Small, include_raw=True, max_tokens=20).invoke(QUESTION)
    assert (result["parsed"], type(result["parsing_error"])) == (None, InvalidObject)


def test_documents_of_a_call_are_read_in_every_way_with_and_without_the_raw_message(writer):
    plain, raw = (writer.with_structured_output(Pair, include_raw=raw) for raw in (False, True))
    read = raw.invoke(QUESTION, documents=DOCUMENTS)["raw"].response_metadata
    assert (read["sets"], read["finish_reason"]) == ([3], "stop")
    expected = plain.invoke(QUESTION, documents=DOCUMENTS)
    assert expected != plain.invoke(QUESTION), "the documents make a difference"
    for way in ("invoke", "ainvoke", "batch", "abatch"):
        assert WAYS[way](plain, QUESTION, documents=DOCUMENTS) == expected, way
        assert WAYS[way](raw, QUESTION, documents=DOCUMENTS)["parsed"] == expected, way
    assert [*plain.stream(QUESTION, documents=DOCUMENTS)][-1] == expected
    merged = ChainMap(*reversed([*raw.stream(QUESTION, documents=DOCUMENTS)]))
    assert (merged["parsed"], merged["parsing_error"]) == (expected, None)
