"""Tool calling: random models write well-formed calls in every format, in time, and in any order of the segments."""

from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from jsonschema import validate
from tokenizers import AddedToken
from transformers import LogitsProcessor

from invariant_rag import InvariantModel, Prompt, Segment
from invariant_rag.errors import IncompleteObject, InvalidTool
from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import Answer, AnswerRequest
from invariant_rag.generation.streaming import decode_keeping
from invariant_rag.generation.structured import Tool, ToolCall, ToolCalling
from invariant_rag.prompts import ReasoningFormat, template_format
from invariant_rag.prompts.template_probes import OWN_FORMAT
from invariant_rag.testing import tiny_model
from tests.generation.test_structured import random_schema
from tests.prompts.tool_templates import ALL, templated

QUERY = {"query": {"type": "string", "maxLength": 12}, "limit": {"type": "integer", "minimum": 1}}
ASKED = {"type": "object", "properties": QUERY, "required": ["query"]}
FUNCTION = {"name": "search", "description": "Search the harbour's records.", "parameters": ASKED}
SEARCH = {"type": "function", "function": FUNCTION}
NOW = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": None}}
NOWHERE = {"type": "function", "function": {"name": "nowhere", "description": "A longer name."}}
TOOLS = [SEARCH, NOW, NOWHERE]
QUESTION = [{"role": "user", "content": "When does the ferry leave?"}]
KINDS = list(ALL)
WILD = {"do_sample": True, "temperature": 4.0, "top_k": 0}


@cache
def lm_of(kind, seed=0):
    size = {"num_hidden_layers": 2, "vocab_size": 288, "max_position_embeddings": 4096}
    return InvariantModel(tiny_model("llama", seed, eos_token_id=None, **size), templated(kind))


def check(calls, tools):
    assert calls
    schemas = {each["function"]["name"]: Tool.of(each).parameters for each in tools}
    for call in calls:
        validate(call.arguments, schemas[call.name])


def generate(calling, prompt, **options):
    """Return an answer, decoded with `constrain`, and its parts."""
    generation = calling.lm.generate(prompt, **calling.constrain(prompt, **options))
    text = decode_keeping(calling.lm.tokenizer, generation.token_ids, calling.kept_tokens)
    answer = Answer.join(calling.parser(prompt).parse([text]))
    answer.check_complete()
    return generation, answer


class Writing(LogitsProcessor):
    """Makes a model write a text, as far as it may; then it goes on as it likes."""

    def __init__(self, lm, text):
        self.tokens = lm.tokenizer.encode(text, add_special_tokens=False)
        self.prompt = None

    def __call__(self, input_ids, scores):
        self.prompt = input_ids.shape[1] if self.prompt is None else self.prompt
        place = input_ids.shape[1] - self.prompt
        if place < len(self.tokens):
            scores = scores.clone()
            scores[0, self.tokens[place]] = scores.max() + 100
        return scores


# --- forced calls ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_answer_is_nothing_but_calls_as_many_as_there_may_be(kind):
    numbers = []
    for seed in range(4):
        calling = ToolCalling(lm_of(kind, seed), [NOW, NOWHERE] if seed else TOOLS, tool_choice="any")
        prompt = calling.prompt(QUESTION)
        options = {"max_new_tokens": 900, **(WILD if seed else {}), "seed": seed}
        generation, answer = generate(calling, prompt, **options)
        check(answer.tool_calls, TOOLS)
        assert (answer.content, answer.reasoning, generation.finish_reason) == ("", "", "stop")
        assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
        numbers.append(len(answer.tool_calls))
        name = ("search", "nowhere", "now", "now")[seed]
        named = ToolCalling(calling.lm, TOOLS, tool_choice=name, parallel=False)
        (call,) = generate(named, named.prompt(QUESTION), **options)[1].tool_calls
        assert call.name == name
        assert name == "search" or call.arguments == {}
        check((call,), TOOLS)
    assert (max(numbers) > 1) == (kind != "bare")


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_runs_out_of_tokens_says_length_and_has_no_half_call(kind):
    request = AnswerRequest(messages=QUESTION, tools=[SEARCH], tool_choice="search", parallel=False, stop=tuple('q<{"'))
    lm = lm_of(kind)
    whole = Answering(lm, replace(request, max_new_tokens=200)).reply().first
    assert (whole.finish_reason, len(whole.tool_calls), whole.cut_call) == ("tool_calls", 1, None)
    length = len(whole.generation.token_ids)
    for limit in (1, 9, length - 12, length - 4, length - 1, length):
        answering = Answering(lm, replace(request, max_new_tokens=limit))
        answer = answering.reply().first
        assert answer.finish_reason == ("length" if limit < length else "tool_calls")
        *_, streamed = answering.stream()
        assert replace(streamed.first, generation=None) == replace(answer, generation=None)
        if answer.tool_calls:  # nothing but the closing marker is missing
            assert answer.tool_calls == whole.tool_calls
        elif answer.cut_call:
            assert answer.cut_call.name == ("" if limit < 10 else "search")  # no name: it ends before the arguments
            assert answer.content == ""
            with pytest.raises(IncompleteObject, match="call 0"):
                answer.check_complete()


def test_every_forced_call_parses_and_validates():
    random, ends = Random(0), set()
    for round_ in range(12):
        schemas = [random_schema(random) for _ in range(random.randint(1, 2))]
        tools = [{"function": {"name": f"tool_{i}", "parameters": schema}} for i, schema in enumerate(schemas)]
        calling = ToolCalling(lm_of(KINDS[round_ % len(KINDS)], random.randrange(3)), tools, tool_choice="required")
        with suppress(IncompleteObject):  # there is no room
            options = {"max_new_tokens": random.randint(1, 16) * 20, **WILD, "seed": round_}
            generation, answer = generate(calling, calling.prompt(QUESTION), **options)
            ends.add(generation.finish_reason)
            if generation.finish_reason == "stop":
                check(answer.tool_calls, tools)
    assert "stop" in ends


# --- as the model likes ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_the_model_begins_is_well_formed_and_none_where_there_shall_be_none(kind):
    lm = lm_of(kind)
    calling = ToolCalling(lm, TOOLS, parallel=False)
    written = calling.form.call_format
    before = "" if written.anchored else "I look. "
    writing = Writing(lm, before + written.trigger)
    generation, answer = generate(calling, calling.prompt(QUESTION), max_new_tokens=150, logits_processor=[writing])
    check(answer.tool_calls, TOOLS)
    assert (answer.content, generation.finish_reason) == (before.rstrip(), "stop")
    calling = ToolCalling(lm, [SEARCH], tool_choice="none")
    writing = Writing(lm, written.trigger * 2)
    generation, answer = generate(calling, calling.prompt(QUESTION), max_new_tokens=60, logits_processor=[writing])
    assert answer == Answer(generation.text)


def test_text_without_a_call_is_what_the_model_writes_without_tools_also_behind_a_marker_of_the_prompt():
    lm = lm_of("hermes")
    calling = ToolCalling(lm, TOOLS)
    prompt = calling.prompt(QUESTION)
    generation, answer = generate(calling, prompt, max_new_tokens=40)
    unused = [*range(len(lm.tokenizer), 288)]  # which no grammar knows
    assert generation.token_ids == lm.generate(prompt, max_new_tokens=40, suppress_tokens=unused).token_ids
    assert answer == Answer(generation.text)
    writing = Writing(lm, "\tNo.")  # a tab would be no JSON
    prompt = Prompt("Calls begin with ", [], "<tool_call>")
    assert generate(calling, prompt, max_new_tokens=4, logits_processor=[writing])[0].text == "\tNo."


def test_reasoning_holds_no_call_and_a_forced_call_leaves_it():
    lm = lm_of("hermes")
    calling = ToolCalling(lm, [NOW], parallel=False)
    thinking = calling.prompt(QUESTION, enable_thinking=True)
    for prompt, opening in ((thinking, ""), (calling.prompt(QUESTION), "<think>")):
        writing = Writing(lm, f"{opening}I may write <tool_call> here.</think>Now: <tool_call>")
        _, answer = generate(calling, prompt, max_new_tokens=200, logits_processor=[writing])
        assert (answer.reasoning, answer.content) == ("I may write <tool_call> here.", "Now:")
        assert [call.name for call in answer.tool_calls] == ["now"]
    forced = ToolCalling(lm, [NOW], tool_choice="required", parallel=False)
    generation, answer = generate(forced, thinking, max_new_tokens=100)
    assert generation.text.startswith("\n</think>\n<tool_call>")
    assert (answer.reasoning, answer.content, len(answer.tool_calls)) == ("", "", 1)
    without = ToolCalling(lm)
    prompt = without.prompt(QUESTION, enable_thinking=True)
    assert prompt == lm.chat_prompt(messages=QUESTION, enable_thinking=True)
    writing = Writing(lm, "Hm, <tool_call>.\n</think>\n\nAt noon <tool_call>.")
    generation, answer = generate(without, prompt, max_new_tokens=60, logits_processor=[writing])
    assert answer.reasoning == "Hm, <tool_call>."
    assert answer.content.startswith("At noon <tool_call>.")
    assert generation.text.endswith(answer.content)


@pytest.mark.parametrize(("behind", "fits"), [('\n{"na', True), ('{"q', False)])
def test_a_token_that_goes_beyond_the_marker_begins_a_call_or_is_not_chosen(behind, fits):
    tokenizer, beyond = templated("hermes"), f"<tool_call>{behind}"
    tokenizer.add_tokens([AddedToken(beyond, normalized=False)])
    lm = InvariantModel(lm_of("hermes").model, tokenizer)
    calling = ToolCalling(lm, TOOLS, parallel=False)
    writing = Writing(lm, beyond)
    generation, answer = generate(calling, calling.prompt(QUESTION), max_new_tokens=200, logits_processor=[writing])
    assert (generation.token_ids[0] == tokenizer.convert_tokens_to_ids(beyond)) == fits
    assert len(answer.tool_calls) == fits


# --- order, ids, refusals ---


def test_calls_and_their_ids_ignore_the_order_of_segments_and_the_next_turn_has_other_ids():
    calling, answers = ToolCalling(lm_of("hermes"), TOOLS, tool_choice="search", parallel=False), set()
    for order in permutations(["It leaves at noon.", "In winter it does not sail.", "The mill is old."]):
        segments = [Segment(text) for text in order]
        call = {"id": "call_1", "name": "search", "args": {"query": "ferry"}}
        messages = [
            {"role": "user", "content": [*segments, "When?"]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": segments},
        ]
        prompt = calling.prompt(messages)
        assert [len(each) for each in prompt.sets] == [3, 3]
        generation, answer = generate(calling, prompt, max_new_tokens=120)
        answers.add((generation.token_ids, generation.logprobs, repr(answer)))
    assert len(answers) == 1
    (call,) = answer.tool_calls
    turns = [*messages, {"role": "assistant", "tool_calls": [call]}]
    turns += [{"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    (following,) = generate(calling, calling.prompt(turns), max_new_tokens=120)[1].tool_calls
    assert (following.name, following.id != call.id) == (call.name, True)


def test_tools_and_choices_that_are_none_are_refused():
    for tools, choice, said in (
        (TOOLS, "find", "choose from 'auto', 'none', 'required', 'any', 'search'"),
        ([], "required", "got none"),
        ([{"function": {"name": "a b"}}], "auto", "of up to 128 letters"),
        *(([each], "auto", "expected a Tool") for each in ({}, 3)),
        ([{"name": "a", "parameters": {"type": "array"}}], "auto", "schema of an object"),
    ):
        with pytest.raises(InvalidTool, match=said):
            ToolCalling(lm_of("hermes"), tools, tool_choice=choice)


# --- parsing ---

THINK = ReasoningFormat("<think>", "</think>", "\n</think>\n\n")
CALLS = (
    ToolCall("", "now", {}),
    ToolCall("", "search", {"query": 'a "quoted} \\" текст <tool_call>', "deep": [{"x": 1}]}),
)
TEXTS = st.sampled_from(
    ["", "Well.", "Well. ", " ключ < <tool_ca", "<tool_call>{}", '<tool_call>\n{"name": "other"', "\n"]
)


@given(
    st.sampled_from(["", "<think>", " <think>\nHm <tool_call>\n</think>\n\n", "</think>"]),
    TEXTS,
    st.sampled_from([(), CALLS[:1], CALLS]),
    TEXTS,
    st.none() | st.integers(-120, -1),
    st.lists(st.integers(0, 300)),
    st.sampled_from(KINDS),
)
@example("", "", CALLS[:1], "<tool_call>\n{}", None, [], "bare")  # text after a call that has to be the whole answer
@example("", "", CALLS, " ключ < ", None, [3], "bare")
@example("", "<tool_call>" + " " * 400, (), "", None, [], "hermes")
def test_however_a_text_is_cut_into_pieces_its_parts_are_the_same(reasoning, text, calls, after, end, cuts, kind):
    written = template_format(templated(kind)).call_format
    whole = (reasoning + text + (written.write(calls) if calls else "") + after)[:end]
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    parser = AnswerParser(written, ("now", "search"), THINK)
    found = [
        Answer.join(parser.parse(each)) for each in ([whole], [whole[a:b] for a, b in pairwise(places)], list(whole))
    ]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_template_writes_is_parsed(kind):
    written = template_format(templated(kind)).call_format
    calls, text = CALLS[1:] if written.between is None else CALLS, "" if written.anchored else "Well.\n"
    answer = Answer.join(AnswerParser(written, ("now", "search")).parse([text + written.write(calls)]))
    assert answer.content == text.rstrip()
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [(c.name, c.arguments) for c in calls]


OTHER = '<tool_call>{"name": "other", "arguments": {}}</tool_call>'


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((text, Answer(text)) for text in ("a <tool_call> b", OTHER, "<tool_call", "a  ")),
        (f"<think>\n{OTHER} </think>\n\n x ", Answer("x ", OTHER)),
        (f"x <think>{OTHER}", Answer(f"x <think>{OTHER}")),
    ],
)
def test_what_is_no_call_is_text(text, expected):
    assert Answer.join(AnswerParser(OWN_FORMAT, ("now",), THINK).parse([text])) == expected


def test_text_around_a_call_is_joined_and_half_a_call_is_an_error():
    parser = AnswerParser(OWN_FORMAT, ("now",))
    assert Answer.join(parser.parse(['x <tool_call>{"name":"now","arguments":{}}</tool_call> y'])).content == "x y"
    whole, half = (
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "now", "arguments": {"a": ',
    )
    for text, index, said in ((half, 0, '{"a": '), (half[:14], 0, half[:14]), (f"{whole}\n{half[:24]}", 1, half[:24])):
        cut = Answer.join(parser.parse([text]))
        assert (len(cut.tool_calls), cut.content, cut.cut_call.index) == (index, "", index)
        assert cut.cut_call.arguments.lstrip() == said
        with pytest.raises(IncompleteObject, match=f"call {index}"):
            cut.check_complete()
    for kind in ("list", "named"):  # whose calls share one end
        written = template_format(templated(kind)).call_format
        text = written.write(CALLS)
        cut = Answer.join(AnswerParser(written, ("now", "search")).parse([text[: text.index("search") + 3]]))
        assert (len(cut.tool_calls), cut.content, cut.cut_call.index) == (1, "", 1)
