"""Tool calling: random models write well-formed calls in every format, in time, and in any order of the segments."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from jsonschema import validate
from tokenizers import AddedToken
from transformers import LogitsProcessor

from invariant_rag import Generation, InvariantModel, Prompt, Segment
from invariant_rag.errors import IncompleteObject, InvalidTool, UnsupportedCombination
from invariant_rag.generation.answer_parsing import AnswerParser
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import Answer, AnswerRequest
from invariant_rag.generation.streaming import decode_keeping
from invariant_rag.generation.tools import Tool, ToolCall, ToolCalling
from invariant_rag.prompts import ReasoningFormat, template_format
from invariant_rag.prompts.template_probes import OWN_FORMAT
from invariant_rag.testing import tiny_model
from tests.prompts.tool_templates import ALL, templated

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the harbour's records.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "maxLength": 12}, "limit": {"type": "integer", "minimum": 1}},
            "required": ["query"],
        },
    },
}
NOW = {"type": "function", "function": {"name": "now", "description": "The time.", "parameters": None}}
NOWHERE = {"type": "function", "function": {"name": "nowhere", "description": "A longer name."}}
TOOLS = [SEARCH, NOW, NOWHERE]
QUESTION = [{"role": "user", "content": "When does the ferry leave?"}]
KINDS = list(ALL)


@cache
def lm_of(kind: str, seed: int = 0) -> InvariantModel:
    model = tiny_model(
        "llama", seed, num_hidden_layers=2, vocab_size=288, max_position_embeddings=4096, eos_token_id=None
    )
    return InvariantModel(model, templated(kind))


def check(calls: tuple[ToolCall, ...], tools: list[dict[str, Any]]) -> None:
    assert calls
    schemas = {each["function"]["name"]: Tool.of(each).parameters for each in tools}
    for call in calls:
        validate(call.arguments, schemas[call.name])


def generate(calling: ToolCalling, prompt: Prompt, **options: Any) -> tuple[Generation, Answer]:
    """Return an answer, decoded with `constrain`, and its parts."""
    generation = calling.lm.generate(prompt, **calling.constrain(prompt, **options))
    text = decode_keeping(calling.lm.tokenizer, generation.token_ids, calling.kept_tokens)
    answer = Answer.join(calling.parser(prompt).parse([text]))
    answer.check_complete()
    return generation, answer


class Writing(LogitsProcessor):
    """Makes a model write a text, as far as it may; then it goes on as it likes."""

    def __init__(self, lm: InvariantModel, text: str) -> None:
        self.tokens = lm.tokenizer.encode(text, add_special_tokens=False)
        self.prompt = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prompt = input_ids.shape[1] if self.prompt is None else self.prompt
        place = input_ids.shape[1] - self.prompt
        if place < len(self.tokens):
            scores = scores.clone()
            scores[0, self.tokens[place]] = scores.max() + 100
        return scores


# --- forced calls ---


@pytest.mark.parametrize("seed", [0, 1], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_forced_answer_is_nothing_but_calls_in_the_format_of_the_template(kind: str, seed: int) -> None:
    lm = lm_of(kind, seed)
    calling = ToolCalling(lm, TOOLS, tool_choice="required")
    prompt = calling.prompt(QUESTION)
    generation, answer = generate(
        calling, prompt, max_new_tokens=900, do_sample=seed > 0, temperature=2.0, top_k=0, seed=seed
    )
    check(answer.tool_calls, TOOLS)
    assert (answer.content, answer.reasoning) == ("", "")
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_that_runs_out_of_tokens_says_length_and_has_no_half_call(kind: str) -> None:
    request = AnswerRequest(messages=QUESTION, tools=[SEARCH], tool_choice="search", parallel=False)
    lm = lm_of(kind)
    whole = Answering(lm, replace(request, max_new_tokens=200)).reply().first
    assert (whole.finish_reason, len(whole.tool_calls), whole.cut_call) == ("tool_calls", 1, None)
    length = len(whole.generation.token_ids)
    for limit in (*range(1, 12), *range(length - 8, length + 1)):
        answering = Answering(lm, replace(request, max_new_tokens=limit))
        answer = answering.reply().first
        assert answer.finish_reason == ("length" if limit < length else "tool_calls")
        check_cut(answer, whole)
        *_, streamed = answering.stream()
        assert replace(streamed.first, generation=None) == replace(answer, generation=None)


def check_cut(answer: Answer, whole: Answer) -> None:
    if answer.tool_calls:  # nothing but the closing marker is missing
        assert answer.tool_calls == whole.tool_calls
    elif answer.cut_call:
        assert answer.cut_call.name == "search"
        with pytest.raises(IncompleteObject, match="call 0"):
            answer.check_complete()


@pytest.mark.parametrize(
    ("kind", "choice"), [*((kind, "now") for kind in KINDS), ("hermes", "search"), ("hermes", "nowhere")]
)
def test_a_tool_is_chosen_by_name(kind: str, choice: str) -> None:
    calling = ToolCalling(lm_of(kind), TOOLS, tool_choice=choice, parallel=False)
    _, answer = generate(calling, calling.prompt(QUESTION), max_new_tokens=120)
    assert [call.name for call in answer.tool_calls] == [choice]
    if choice != "search":
        assert answer.tool_calls[0].arguments == {}


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "bare"])
def test_parallel_calls_are_as_many_as_the_model_likes_and_one_where_it_may_not(kind: str) -> None:
    numbers = []
    for seed in range(4):
        calling = ToolCalling(lm_of(kind, seed), [NOW], tool_choice="required")
        prompt = calling.prompt(QUESTION)
        options = {"max_new_tokens": 250, "do_sample": True, "temperature": 4.0, "top_k": 0, "seed": seed}
        _, answer = generate(calling, prompt, **options)
        check(answer.tool_calls, [NOW])
        assert len({call.id for call in answer.tool_calls}) == len(answer.tool_calls)
        numbers.append(len(answer.tool_calls))
        single = ToolCalling(lm_of(kind, seed), [NOW], tool_choice="required", parallel=False)
        assert len(generate(single, prompt, **options)[1].tool_calls) == 1
    assert max(numbers) > 1


SCALARS = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "maxLength": 3},
        {"type": "integer"},
        {"type": "integer", "minimum": -5, "maximum": 5},
        {"type": "number"},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", 'é"\\', 3]},
        {"const": "ж"},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"$ref": "#/$defs/Place"},
    ]
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.builds(lambda items: {"type": "array", "items": items, "maxItems": 2}, inner),
    max_leaves=3,
)
KEYS = st.sampled_from(["a", "key", "größe", "名前", "with space", "$x"])
NEAR = {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]}
PLACE = {
    "type": "object",
    "properties": {"at": {"type": "string", "maxLength": 2}, "near": NEAR},
    "required": ["at"],
}


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    properties = draw(st.dictionaries(KEYS, VALUES, max_size=3))
    required = [name for name in properties if draw(st.booleans())]
    return {"type": "object", "properties": properties, "required": required, "$defs": {"Place": PLACE}}


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    schemas=st.lists(parameters(), min_size=1, max_size=2),
    kind=st.sampled_from(KINDS),
    seed=st.integers(0, 3),
    more=st.integers(0, 30),
)
def test_every_forced_call_parses_and_validates(schemas: list[Any], kind: str, seed: int, more: int) -> None:
    tools = [{"function": {"name": f"tool_{i}", "parameters": schema}} for i, schema in enumerate(schemas)]
    calling = ToolCalling(lm_of(kind, seed), tools, tool_choice="required")
    prompt = calling.prompt(QUESTION)
    options = {"max_new_tokens": 20 + 20 * more, "do_sample": True, "temperature": 2.0, "top_k": 0, "seed": seed}
    with suppress(IncompleteObject):  # there is no room
        generation, answer = generate(calling, prompt, **options)
        if generation.finish_reason == "stop":
            check(answer.tool_calls, tools)


# --- as the model likes ---


@pytest.mark.parametrize("kind", KINDS)
def test_a_call_that_the_model_begins_is_well_formed(kind: str) -> None:
    lm = lm_of(kind)
    calling = ToolCalling(lm, TOOLS, parallel=False)
    prompt = calling.prompt(QUESTION)
    written = calling.form.call_format
    before = "" if written.anchored else "I look. "
    writing = Writing(lm, before + written.trigger)
    generation, answer = generate(calling, prompt, max_new_tokens=150, logits_processor=[writing])
    check(answer.tool_calls, TOOLS)
    assert answer.content == before.rstrip()
    assert generation.finish_reason == "stop"


@pytest.mark.parametrize("kind", KINDS)
def test_no_call_is_parsed_where_there_shall_be_none(kind: str) -> None:
    lm = lm_of(kind)
    trigger = ToolCalling(lm, [SEARCH]).form.call_format.trigger
    calling = ToolCalling(lm, [SEARCH], tool_choice="none")
    prompt = calling.prompt(QUESTION)
    generation, answer = generate(calling, prompt, max_new_tokens=60, logits_processor=[Writing(lm, trigger * 2)])
    assert answer == Answer(generation.text)


def test_text_without_a_call_is_what_the_model_writes_without_tools() -> None:
    lm = lm_of("hermes")
    calling = ToolCalling(lm, TOOLS)
    prompt = calling.prompt(QUESTION)
    generation, answer = generate(calling, prompt, max_new_tokens=40)
    unused = [*range(len(lm.tokenizer), 288)]  # which no grammar knows
    assert generation.token_ids == lm.generate(prompt, max_new_tokens=40, suppress_tokens=unused).token_ids
    assert answer == Answer(generation.text)


def test_no_call_begins_within_reasoning() -> None:
    lm = lm_of("hermes")
    calling = ToolCalling(lm, [NOW], parallel=False)
    thinking = calling.prompt(QUESTION, enable_thinking=True)
    for prompt, opening in ((thinking, ""), (calling.prompt(QUESTION), "<think>")):
        text = f"{opening}I may write <tool_call> here.</think>Now: <tool_call>"
        _, answer = generate(calling, prompt, max_new_tokens=200, logits_processor=[Writing(lm, text)])
        assert answer.reasoning == "I may write <tool_call> here."
        assert answer.content == "Now:"
        assert [call.name for call in answer.tool_calls] == ["now"]


def test_a_forced_call_leaves_the_reasoning_that_the_prompt_opened() -> None:
    calling = ToolCalling(lm_of("hermes"), [NOW], tool_choice="required", parallel=False)
    generation, answer = generate(calling, calling.prompt(QUESTION, enable_thinking=True), max_new_tokens=100)
    assert generation.text.startswith("\n</think>\n<tool_call>")
    assert (answer.reasoning, answer.content) == ("", "")
    assert [call.name for call in answer.tool_calls] == ["now"]


# --- order, streams, ids ---


@pytest.mark.parametrize("kind", ["hermes", "named", "chatml"])
def test_calls_ignore_the_order_of_segments_and_of_a_retriever_tools_result(kind: str) -> None:
    calling = ToolCalling(lm_of(kind), TOOLS, tool_choice="required", parallel=False)
    call = {"id": "call_1", "name": "search", "args": {"query": "ferry"}}
    answers = set()
    for order in permutations(["It leaves at noon.", "In winter it does not sail.", "The mill is old."]):
        segments = [Segment(text) for text in order]
        messages = [
            {"role": "user", "content": [*segments, "When?"]},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": segments},
        ]
        prompt = calling.prompt(messages)
        assert [len(each) for each in prompt.sets] == [3, 3]
        generation, answer = generate(calling, prompt, max_new_tokens=200)
        assert answer.tool_calls
        answers.add((generation.token_ids, generation.logprobs, repr(answer)))
    assert len(answers) == 1


@pytest.mark.parametrize(
    ("kind", "choice"), [*((kind, choice) for kind in KINDS for choice in ("required", "auto")), ("hermes", "none")]
)
def test_a_stream_joins_to_the_answer(kind: str, choice: str) -> None:
    lm = lm_of(kind)
    form = ToolCalling(lm, TOOLS).form.call_format
    begun = [form.trigger if form.anchored else f"Well  {form.trigger}"]
    for written in {"required": [[]], "auto": [begun], "none": [[], begun]}[choice]:
        replies = []
        for _ in range(2):
            options = {"logits_processor": [Writing(lm, each) for each in written]}
            request = AnswerRequest(messages=QUESTION, tools=TOOLS, tool_choice=choice, max_new_tokens=130)
            replies.append(Answering(lm, replace(request, options=options)))
        whole = replies[0].reply().first
        *deltas, streamed = replies[1].stream()
        assert streamed.first == whole
        assert Answer.join(deltas) == Answer(whole.content, whole.reasoning, whole.tool_calls, whole.cut_call)


def test_ids_are_the_same_again_and_others_in_the_next_turn() -> None:
    calling = ToolCalling(lm_of("hermes"), [NOW], tool_choice="required", parallel=False)
    first = generate(calling, calling.prompt(QUESTION), max_new_tokens=80)[1].tool_calls[0]
    assert first == generate(calling, calling.prompt(QUESTION), max_new_tokens=80)[1].tool_calls[0]
    result = {"role": "tool", "tool_call_id": first.id, "content": "noon"}
    turns = [*QUESTION, {"role": "assistant", "tool_calls": [first]}, result]
    second = generate(calling, calling.prompt(turns), max_new_tokens=80)[1].tool_calls[0]
    assert second.name == first.name
    assert second.id != first.id


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
    st.lists(st.integers(0, 300)),
    st.sampled_from(KINDS),
)
@example("", "", CALLS[:1], "<tool_call>\n{}", [], "bare")  # text after a call that has to be the whole answer
@example("", "", CALLS, " ключ < ", [3], "bare")
def test_however_a_text_is_cut_into_pieces_its_parts_are_the_same(
    reasoning: str, text: str, calls: tuple[ToolCall, ...], after: str, cuts: list[int], kind: str
) -> None:
    written = template_format(templated(kind)).call_format
    whole = reasoning + text + (written.write(calls) if calls else "") + after
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    found = []
    for pieces in ([whole], [whole[a:b] for a, b in pairwise(places)], list(whole)):
        parser = AnswerParser(written, ("now", "search"), THINK)
        found.append(Answer.join(parser.parse(pieces)))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_template_writes_is_parsed(kind: str) -> None:
    written = template_format(templated(kind)).call_format
    calls = CALLS[1:] if written.between is None else CALLS
    parser = AnswerParser(written, ("now", "search"))
    text = "" if written.anchored else "Well.\n"
    answer = Answer.join(parser.parse([text + written.write(calls)]))
    assert answer.content == text.rstrip()
    assert [(call.name, call.arguments) for call in answer.tool_calls] == [(c.name, c.arguments) for c in calls]


def test_what_is_no_call_is_text_and_half_a_call_is_an_error() -> None:
    def parse(text: str) -> Answer:
        parser = AnswerParser(OWN_FORMAT, ("now",))
        return Answer.join(parser.parse([text]))

    for text in ("a <tool_call> b", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "<tool_call", "a  "):
        assert parse(text) == Answer(text)
    assert parse('x <tool_call>{"name":"now","arguments":{}}</tool_call> y').content == "x y"
    cut = parse('<tool_call>\n{"name": "now", "arguments": {"a": ')
    assert (cut.tool_calls, cut.cut_call.arguments) == ((), '{"a": ')
    with pytest.raises(IncompleteObject, match="call 0"):
        cut.check_complete()


def test_without_tools_an_answer_is_its_reasoning_and_its_text() -> None:
    lm = lm_of("hermes")
    calling = ToolCalling(lm)
    prompt = calling.prompt(QUESTION, enable_thinking=True)
    assert prompt == lm.chat_prompt(messages=QUESTION, enable_thinking=True)
    writing = Writing(lm, "Hm, <tool_call>.\n</think>\n\nAt noon <tool_call>.")
    generation, answer = generate(calling, prompt, max_new_tokens=60, logits_processor=[writing])
    assert answer.reasoning == "Hm, <tool_call>."
    assert answer.content.startswith("At noon <tool_call>.")
    assert generation.text.endswith(answer.content)


# --- refusals, log-probabilities ---


def test_tools_and_choices_that_are_none_and_keywords_that_break_calls_are_refused() -> None:
    lm = lm_of("hermes")
    assert ToolCalling(lm, TOOLS, tool_choice="any").tool_choice == "required"
    with pytest.raises(InvalidTool, match="choose from 'auto', 'none', 'required', 'any', 'search'"):
        ToolCalling(lm, TOOLS, tool_choice="find")
    with pytest.raises(InvalidTool, match="got none"):
        ToolCalling(lm, tool_choice="required")
    for tools in (
        [NOW, NOW],
        [{"function": {"name": "a b"}}],
        [{}],
        [3],
        [{"name": "a", "parameters": {"type": "array"}}],
    ):
        with pytest.raises(InvalidTool, match="expected"):
            ToolCalling(lm, tools)
    calling = ToolCalling(lm, TOOLS)
    prompt = calling.prompt(QUESTION)
    for keywords in ({"num_beams": 2}, {"stop_strings": ["}"]}):
        with pytest.raises(UnsupportedCombination, match="expected"):
            calling.constrain(prompt, **keywords)


def test_a_routed_model_writes_two_answers_and_keeps_one() -> None:
    lm = lm_of("hermes").with_routing()
    calling = ToolCalling(lm, TOOLS, tool_choice="required")
    prompt = calling.prompt([{"role": "user", "content": [Segment("a"), Segment("b"), "Which?"]}])
    _, answer = generate(calling, prompt, max_new_tokens=120)
    check(answer.tool_calls, TOOLS)
    assert json.dumps([dict(call.arguments) for call in answer.tool_calls])


@pytest.mark.parametrize(("behind", "fits"), [('\n{"na', True), ('{"q', False)])
def test_a_token_that_goes_beyond_the_marker_begins_a_call_or_is_not_chosen(behind: str, fits: bool) -> None:
    tokenizer = templated("hermes")
    beyond = f"<tool_call>{behind}"
    tokenizer.add_tokens([AddedToken(beyond, normalized=False)])
    lm = InvariantModel(lm_of("hermes").model, tokenizer)
    calling = ToolCalling(lm, TOOLS, parallel=False)
    prompt = calling.prompt(QUESTION)
    generation, answer = generate(calling, prompt, max_new_tokens=300, logits_processor=[Writing(lm, beyond)])
    assert (generation.token_ids[0] == tokenizer.convert_tokens_to_ids(beyond)) == fits
    assert len(answer.tool_calls) == fits
