"""Chat templates around sets; tools, calls and results in the manners of several templates; from text to token ids."""

import json

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from invariant_rag import Prompt, Segment, SegmentSet, prompts
from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvalidTool, TokenizerRequired
from invariant_rag.prompts import Tool, ToolCall, control_tokens, question_messages, render_chat, tokenize_prompt
from invariant_rag.prompts.template_probes import OWN_FORMAT, CallFormat
from invariant_rag.segments import Slot
from invariant_rag.testing import toy_tokenizer
from invariant_rag.testing.token_check import find_break_outs, hostile_texts
from tests.prompts.tool_templates import ALL, templated

TOY = toy_tokenizer()
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + NO_SYSTEM
TWICE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"


def user(content):
    return {"role": "user", "content": content}


def system(content):
    return {"role": "system", "content": content}


def with_template(template):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def asked(template, *listed, system="Be brief."):
    return render_chat(question_messages("Why?", SegmentSet(listed), system), with_template(template))


def test_a_question_is_rendered_with_its_set_and_segments_in_any_turn_of_which_neighbours_form_one():
    prompt = render_chat(question_messages("Why?", SegmentSet(["one", Segment("two", title="T")])), TOY, "Why?")
    assert prompt.prefix == f"<|im_start|>system\n{prompts.DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    assert prompt.suffix == "\nQuestion: Why?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.query == "Why?"
    assert [prompt.rendering(each) for each in prompt.segments] == ["Document: one\n", "Document (Title: T): two\n"]
    messages = [
        system(["Rules: ", SegmentSet(["r1", "r2"])]),
        user([Segment("a"), Segment("b"), "?", Segment("c")]),
        {"role": "assistant", "content": "Yes."},
        user([SegmentSet(), "And?"]),
    ]
    prompt = render_chat(messages, TOY)
    assert [[segment.text for segment in each] for each in prompt.sets] == [["r1", "r2"], ["a", "b"], ["c"], []]
    assert prompt.texts[2] == "?"
    assert "\ueca4" not in "".join(map(str, prompt.texts))


def test_where_a_template_has_no_system_message_text_is_dropped_or_opens_the_first_question():
    assert asked(NO_SYSTEM, "one").texts == ("[user]", "\nQuestion: Why?")
    assert asked(REFUSES, "one").texts == ("[user]Be brief.\n\n", "\nQuestion: Why?")
    assert asked(REFUSES, system="").texts[0] == "[user]"
    messages = [system(["Rules: ", SegmentSet(["r"])]), user([SegmentSet(["one"]), "Why?"])]
    assert render_chat(messages, with_template(REFUSES)).texts == ("[user]Rules: ", "\n\n", "Why?")
    assert asked("", "one").texts == ("Be brief.\n\n", "\nQuestion: Why?\nAnswer:"), "without a template"


def test_one_of_several_templates_is_used_and_control_tokens_of_all_are_known():
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["[tool]"])
    index = tokenizer.convert_tokens_to_ids("[tool]")
    assert index not in control_tokens(tokenizer)
    tokenizer.chat_template = {"default": TOY.chat_template, "tool_use": TOY.chat_template + "[tool]"}
    assert control_tokens(tokenizer)[index] == "[tool]"
    assert index not in prompts.tokenize_literal("a [tool] b", tokenizer)
    assert str(render_chat(question_messages("Why?", SegmentSet()), tokenizer).prefix).startswith("<|im_start|>")


def calls(*listed):
    return [{"role": "assistant", "content": "", "tool_calls": list(listed)}]


def test_what_cannot_be_rendered_is_refused():
    for template, messages, error, message in (
        *((None, [user(each)], InvalidPrompt, "expected") for each in (None, 5, b"ab", {"type": "text"}, [5])),
        *((None, each, InvalidPrompt, "expected") for each in ([], ["text"], [{"role": "user"}], [{"content": "a"}])),
        (None, [user([{"type": "text"}])], InvalidPrompt, "expected"),
        (None, [{"role": 1, "content": ""}], InvalidPrompt, "expected"),
        (None, [{"role": "assistant", "tool_calls": []}], InvalidPrompt, "expected"),
        (None, [{"role": "\ueca40\ueca5", "content": SegmentSet(["one"])}], InvalidPrompt, "the name of a role"),
        *((None, calls(each), InvalidTool, "expected") for each in (3, {"id": "a"}, {"name": "a", "args": "{"})),
        (None, calls({"name": "a", "args": "[1]"}), InvalidTool, "expected"),
        ("{{ raise_exception('never') }}", [user(SegmentSet(["one"]))], InvalidPrompt, "cannot render"),
        ("{{ messages[9].content.x }}", [user(SegmentSet(["one"]))], InvalidPrompt, "cannot render"),
        (TWICE, [user(SegmentSet(["one"]))], InvalidPrompt, "set 0 of 1 2 times"),
        (NO_SYSTEM, [system(SegmentSet(["a"]))], InvalidPrompt, "set 0 of 1 0 times"),
        ("", [user("a"), {"role": "assistant", "content": "b"}], InvalidPrompt, "no chat template"),
    ):
        with pytest.raises(error, match=message) as caught:
            render_chat(messages, TOY if template is None else with_template(template))
        assert template is None or "chat_template" in caught.value.hint


def test_variables_reach_the_template_and_unknown_ones_are_refused():
    tokenizer, messages = templated("hermes"), [user("When?")]
    plain = render_chat(messages, tokenizer)
    assert plain.texts == (tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),)
    thinking = render_chat(messages, tokenizer, template_kwargs={"enable_thinking": True})
    assert str(thinking.suffix).endswith("<|im_start|>assistant\n<think>\n")
    assert render_chat(messages, tokenizer, template_kwargs={"enable_thinking": False}) == plain
    for name in ("enable_thinkin", "documents", "tokenize", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidPrompt, match=f"got {name}"):
            render_chat(messages, tokenizer, template_kwargs={name: []})


# --- tools ---

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the records.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CALL = {"id": "abc123", "type": "function", "function": {"name": "search", "arguments": '{"query": "ferry"}'}}


def conversation(result="At noon."):
    return [
        user("When?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123", "content": result},
        user("Sure?"),
    ]


def rendered(kind, messages):
    return "[SET]".join(map(str, render_chat(messages, templated(kind), tools=[SEARCH]).texts))


def test_the_format_of_calls_is_found_out_by_rendering_or_is_our_own():
    found = {kind: prompts.template_format(templated(kind)) for kind in ALL}
    between = '}\n</tool_call><tool_call>\n{"name": "'
    hermes = ('<tool_call>\n{"name": "', '", "arguments": ', between, "}\n</tool_call>")
    named = ("<|calls|><|call|>function<|sep|>", "\n```json\n", "\n```<|/call|><|call|>function<|sep|>")
    assert {kind: form.calls for kind, form in found.items()} == {
        "hermes": CallFormat(*hermes),
        "list": CallFormat('[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]"),
        "bare": CallFormat('{"name": "', '", "parameters": ', None, "}"),
        "named": CallFormat(*named, "\n```<|/call|><|/calls|>"),
        "strict": None,
        "chatml": None,
    }
    assert [kind for kind, form in found.items() if not form.results] == ["strict"]
    triggers = {"list": "[TOOL_CALLS]", "bare": "{", "named": "<|calls|>"}
    assert {kind: form.call_format.trigger for kind, form in found.items()} == {
        **dict.fromkeys(ALL, "<tool_call>"), **triggers,
    }  # fmt: skip
    reasoning = found["hermes"].reasoning
    assert reasoning is not None
    assert (reasoning.open, reasoning.close) == ("<think>", "</think>")
    tokenizer = templated("hermes")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}""",
        "{{ call.function.arguments | tojson }} for {{ call.function.name }}",
    )
    form = prompts.template_format(tokenizer)
    assert (form.tools, form.call_format) == (False, OWN_FORMAT), "nobody could parse what the model would write"
    described = str(render_chat(conversation(), tokenizer, tools=[SEARCH]).texts[0])
    assert '<tool_call>\n{"name": "search", "arguments": {"query": "ferry"}}\n</tool_call>' in described


def test_a_template_gets_tools_calls_and_results_as_transformers_documents_them():
    tokenizer, messages = templated("hermes"), conversation()
    prompt = render_chat(messages, tokenizer, tools=[Tool.of(SEARCH)])
    call, arguments = ToolCall.of(CALL), {"query": "ferry"}
    plain = [dict(message) for message in messages]
    plain[1] = {"role": "assistant", "content": "", "tool_calls": [call.to_dict()]}
    expected = tokenizer.apply_chat_template(plain, tools=[SEARCH], tokenize=False, add_generation_prompt=True)
    assert prompt.texts == (expected,)
    assert '{"name": "search", "arguments": {"query": "ferry"}}' in expected
    assert messages[1]["content"] is None  # what was given is as it was
    for shape in (call, call.to_dict(), {"id": "abc123", "name": "search", "args": arguments, "type": "tool_call"}):
        assert ToolCall.of(shape) == ToolCall("abc123", "search", arguments)
    assert ToolCall.of({"name": "now", "arguments": ""}) == ToolCall("", "now", {})
    assert Tool.of(Tool.of(SEARCH).to_dict()).to_dict() == SEARCH
    assert Tool.of({"name": "now", "parameters": None}) == Tool("now", "", {"type": "object", "properties": {}})


@pytest.mark.parametrize("kind", ALL)
def test_every_template_shows_tools_calls_and_results_somehow_and_keeps_retrieved_segments(kind):
    text = rendered(kind, conversation())
    parts = ("Search the records.", '{"query": "ferry"}', "At noon.", "When?", "Sure?")
    assert [text.count(part) for part in parts] == [1] * 5
    assert text.index('{"query"') < text.index("At noon.") < text.index("Sure?")
    prompt = render_chat(conversation(["Found: ", Segment("one"), Segment("two")]), templated(kind), tools=[SEARCH])
    assert prompt.sets == (SegmentSet(["one", "two"]),)
    assert str(prompt.texts[0]).endswith("Found: ")
    assert not find_break_outs(templated(kind), hostile_texts(templated(kind), 20, seed=1))


def test_what_a_template_does_not_render_of_tools_is_written_as_text():
    assert rendered("strict", conversation()).startswith("<|im_start|>user\nYou may call these tools:\n")
    assert (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "search", "arguments": {"query": "ferry"}}\n</tool_call><|im_end|>'
        "<|im_start|>user\nResult of search:\nAt noon.\n\nSure?<|im_end|><|im_start|>assistant\n"
    ) in rendered("strict", conversation())
    twice = conversation()
    twice[1]["tool_calls"] = [CALL, {**CALL, "id": "d"}]
    twice.insert(3, {"role": "tool", "tool_call_id": "d", "content": "Daily."})
    assert "Result of search:\nAt noon.\n\nResult of search:\nDaily.\n\nSure?" in rendered("strict", twice)
    messages = [system("Be brief."), user("When?")]
    text = rendered("chatml", messages)
    described = "Be brief.\n\nYou may call these tools:\n" + json.dumps(SEARCH["function"])
    assert text.startswith(f"<|im_start|>system\n{described}"), "tools end the system message"
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call><|im_end|>' in text
    assert str(render_chat(messages, with_template(""), tools=[SEARCH]).prefix).startswith(described)
    assert "abc123" not in rendered("list", conversation()), "an id that the template refuses is shortened"
    nine = json.loads(json.dumps(conversation()).replace("abc123", "abcdef123"))
    assert rendered("list", nine).count("abcdef123") == 2
    with pytest.raises(InvalidTool, match="distinct names"):
        render_chat([user("a")], TOY, tools=[SEARCH, SEARCH])


def test_a_text_in_pieces_is_the_text():
    said, tokenizer = "<think>\nHm.\n</think>\nAt <|im_end|> noon.", templated("hermes")

    def texts(content):
        messages = [user("When?"), {"role": "assistant", "content": content}, user("Sure?")]
        return render_chat(messages, tokenizer).texts

    def control(content):
        return [
            each for each in prompts.tokenize_text(texts(content)[0], tokenizer) if each in control_tokens(tokenizer)
        ]

    assert all(texts([said[:at], said[at:]]) == texts(said) for at in range(len(said)))
    assert control(said) == control(said.replace("<|im_end|>", "")), "behind the reasoning, names are text"


# --- from text to token ids: each part alone, special tokens only in texts ---

SLOTS = (Slot("[1]<eos> ", "\n", "1"), Slot("[2]<eos> ", "\n", "2"))
IN_SLOTS = SegmentSet(["<bos>a", "b"], slots=SLOTS)


def decoded(ids):
    return str(TOY.decode(list(ids)))


def starting_with(single, **names):
    """A toy tokenizer whose post-processor puts special tokens around every text."""
    tokenizer = toy_tokenizer()
    for name, value in names.items():
        setattr(tokenizer, name, value)
    special = [(each.content, index) for index, each in tokenizer.added_tokens_decoder.items()]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


def test_halves_of_surrogate_pairs_become_the_replacement_character_and_no_text_is_taken_without_a_tokenizer():
    for text, expected in (
        *(("\ud800a", "\ufffda"), ("a\udc00", "a\ufffd"), ("\udc00\ud800", "\ufffd\ufffd")),
        *(("\ud83d\ude00", "\U0001f600"), ("a\0b\ufeff", "a\0b\ufeff")),  # a pair, and no surrogates
    ):
        assert decoded(prompts.tokenize_literal(text, TOY)) == decoded(prompts.tokenize_text(text, TOY)) == expected
    for use in (
        lambda: tokenize_prompt(Prompt("text"), None),
        lambda: tokenize_prompt(Prompt([1], ["text"], [2]), None),
        lambda: prompts.tokenize_text("text", None),
        lambda: render_chat(question_messages("q", SegmentSet()), None),
        lambda: prompts.tokenize_in_slots(IN_SLOTS, [0, 1], None),
    ):
        with pytest.raises(TokenizerRequired):
            use()


def test_token_ids_are_used_as_they_are_and_nothing_is_put_in_front():
    tokenizer = starting_with("<bos> $A")
    for each in (tokenizer, None):
        tokens = tokenize_prompt(Prompt([5, 1], [[2, 2], [1]], [0]), each)
        assert tokens.texts == ((5, 1), (0,))
        assert [candidate.token_ids for candidate in tokens.sets[0]] == [(2, 2), (1,)]
    assert tokenize_prompt(Prompt(segments=[[8, 9]], suffix=[11]), tokenizer).texts == ((), (11,))
    assert tokenize_prompt(Prompt("", [""], ""), None).sets[0][0].token_ids == ()
    assert decoded(prompts.tokenize_text("ab", tokenizer)) == "ab", "a continuation is never started"
    assert [len(each) for each in tokenize_prompt(Prompt("<bos>a", ["a"], "<eos>"), TOY).texts] == [2, 1]


STARTS = {"<bos> $A": "<bos>", "<bos> <|im_start|> $A": "<bos><|im_start|>", "$A <eos>": "", "<bos> $A <eos>": "<bos>"}


@pytest.mark.parametrize(("single", "start"), STARTS.items())
def test_a_prompt_starts_as_the_tokenizer_starts_a_text_and_never_twice(single, start):
    tokenizer = starting_with(single, bos_token="<eos>") if single == "$A <eos>" else starting_with(single)
    for text in ("ab", "", "<bos>ab", "<|im_start|>ab"):
        tokens = tokenize_prompt(Prompt(text, ["<bos>s"], "q"), tokenizer)
        assert decoded(tokens.texts[0]) == (text if start and text.startswith(start) else start + text)
        assert decoded(tokens.texts[1]) == "q"
        assert len(tokens.sets[0][0].token_ids) == 6, "text, where it would be special in a text"
    tokenizer.chat_template = "{{ '" + start + "' }}" + str(TOY.chat_template)
    chat = render_chat(question_messages("Why?", SegmentSet(["one"])), tokenizer)
    assert decoded(tokenize_prompt(chat, tokenizer).texts[0]).count("<bos>") == start.count("<bos>")


def test_control_tokens_are_looked_up_once_for_a_prompt_of_a_thousand_segments(monkeypatch):
    looks, original = [], PreTrainedTokenizerFast.added_tokens_decoder
    counted = property(lambda self: looks.append(1) or original.fget(self))
    monkeypatch.setattr(PreTrainedTokenizerFast, "added_tokens_decoder", counted)
    few, many = (tokenize_prompt(Prompt("a", ["seg"] * n, "b"), TOY) and len(looks) for n in (1, 1000))
    assert many <= 2 * few, "as many looks for a thousand as for one"


def test_the_segment_of_rank_0_takes_the_last_slot():
    ids = prompts.tokenize_in_slots(IN_SLOTS, [0, 1], TOY)
    assert [decoded(each) for each in ids] == ["[2]<eos> <bos>a\n", "[1]<eos> b\n"]
    assert [len(each) for each in ids] == [len(decoded(each)) for each in ids], "no control token"
    ranked = tokenize_prompt(Prompt("", IN_SLOTS, ""), TOY).sets[0]
    assert [decoded(each.token_ids) for each in ranked] == ["<bos>a", "b"], "ranked without the slot"
    for segments, message in (([[1], [2]], "token ids"), (["a"], "one slot per segment, got 2 for 1")):
        with pytest.raises(InvalidSegment, match=message):
            SegmentSet(segments, slots=SLOTS)
