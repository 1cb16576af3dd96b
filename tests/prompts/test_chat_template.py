"""Chat templates around sets; tools in the manners of several templates; from text to token ids; marks and labels."""

import json
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from invariant_rag import Prompt, Segment, SegmentSet, prompts
from invariant_rag.citation_labels import find_labels, labels_of, without_labels
from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvalidTool, TokenizerRequired
from invariant_rag.prompts import Tool, ToolCall, control_tokens, mark, mark_set, render_chat, tokenize_prompt
from invariant_rag.prompts.markers import Marked, split_marked
from invariant_rag.prompts.template_probes import OWN_FORMAT, CallFormat
from invariant_rag.segments import Slot, document_rendering
from invariant_rag.testing import toy_tokenizer
from invariant_rag.testing.token_check import find_break_outs, hostile_texts

TOY = toy_tokenizer()
NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + NO_SYSTEM
TWICE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"


def message(content, role="user"):
    return {"role": role, "content": content}


def with_template(template):
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_a_question_is_rendered_with_its_set_and_segments_in_any_turn_of_which_neighbours_form_one():
    prompt = render_chat(prompts.question_messages("Why?", SegmentSet(["one", Segment("two", title="T")])), TOY, "Why?")
    assert prompt.prefix == f"<|im_start|>system\n{prompts.DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    assert prompt.suffix == "\nQuestion: Why?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.query == "Why?"
    assert [prompt.rendering(each) for each in prompt.segments] == ["Document: one\n", "Document (Title: T): two\n"]
    messages = [
        message(["Rules: ", SegmentSet(["r1", "r2"])], "system"),
        message([Segment("a"), Segment("b"), "?", Segment("c")]),
        message("Yes.", "assistant"),
        message([SegmentSet(), "And?"]),
    ]
    prompt = render_chat(messages, TOY)
    assert [[segment.text for segment in each] for each in prompt.sets] == [["r1", "r2"], ["a", "b"], ["c"], []]
    assert prompt.texts[2] == "?"
    assert "\ueca4" not in "".join(map(str, prompt.texts))


def test_where_a_template_has_no_system_message_text_is_dropped_or_opens_the_first_question():
    def texts(template, *listed, system="Be brief."):
        return render_chat(prompts.question_messages("Why?", SegmentSet(listed), system), with_template(template)).texts

    assert texts(NO_SYSTEM, "one") == ("[user]", "\nQuestion: Why?")
    assert texts(REFUSES, "one") == ("[user]Be brief.\n\n", "\nQuestion: Why?")
    assert texts(REFUSES, system="")[0] == "[user]"
    messages = [message(["Rules: ", SegmentSet(["r"])], "system"), message([SegmentSet(["one"]), "Why?"])]
    assert render_chat(messages, with_template(REFUSES)).texts == ("[user]Rules: ", "\n\n", "Why?")
    assert texts("", "one") == ("Be brief.\n\n", "\nQuestion: Why?\nAnswer:"), "without a template"


def test_one_of_several_templates_is_used_and_control_tokens_of_all_are_known():
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["[tool]"])
    index = tokenizer.convert_tokens_to_ids("[tool]")
    assert index not in control_tokens(tokenizer)
    tokenizer.chat_template = {"default": TOY.chat_template, "tool_use": TOY.chat_template + "[tool]"}
    assert control_tokens(tokenizer)[index] == "[tool]"
    assert index not in prompts.tokenize_literal("a [tool] b", tokenizer)
    assert render_chat(prompts.question_messages("Why?", SegmentSet()), tokenizer).prefix.startswith("<|im_start|>")


def test_what_cannot_be_rendered_is_refused():
    contents = (None, 5, b"ab", {"type": "text"}, [5], [{"type": "text"}])
    no_messages = ([], ["text"], [{"role": "user"}], [{"content": "a"}], [{"role": "assistant", "tool_calls": []}])
    calls = (3, {"id": "a"}, {"name": "a", "args": "{"}, {"name": "a", "args": "[1]"})
    for template, messages, error, said in (
        *((None, [message(each)], InvalidPrompt, "expected") for each in contents),
        *((None, each, InvalidPrompt, "expected") for each in (*no_messages, [message("", 1)])),
        *((None, [{**message("", "assistant"), "tool_calls": [call]}], InvalidTool, "expected") for call in calls),
        (None, [message(SegmentSet(["one"]), "\ueca40\ueca5")], InvalidPrompt, "the name of a role"),
        ("{{ raise_exception('never') }}", [message(SegmentSet(["one"]))], InvalidPrompt, "cannot render"),
        ("{{ messages[9].content.x }}", [message(SegmentSet(["one"]))], InvalidPrompt, "cannot render"),
        (TWICE, [message(SegmentSet(["one"]))], InvalidPrompt, "set 0 of 1 2 times"),
        (NO_SYSTEM, [message(SegmentSet(["a"]), "system")], InvalidPrompt, "set 0 of 1 0 times"),
        ("", [message("a"), message("b", "assistant")], InvalidPrompt, "no chat template"),
    ):
        with pytest.raises(error, match=said) as caught:
            render_chat(messages, TOY if template is None else with_template(template))
        assert template is None or "chat_template" in caught.value.hint


def test_variables_reach_the_template_and_unknown_ones_are_refused():
    tokenizer, messages = templated("hermes"), [message("When?")]
    plain = render_chat(messages, tokenizer)
    assert plain.texts == (tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),)
    thinking = render_chat(messages, tokenizer, template_kwargs={"enable_thinking": True})
    assert str(thinking.suffix).endswith("<|im_start|>assistant\n<think>\n")
    assert render_chat(messages, tokenizer, template_kwargs={"enable_thinking": False}) == plain
    for name in ("enable_thinkin", "documents", "tokenize", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidPrompt, match=f"got {name}"):
            render_chat(messages, tokenizer, template_kwargs={name: []})


# --- tools ---

MANNERS = {
    "hermes": "As Qwen's: markers around JSON objects, reasoning, and a variable.",
    "list": "As Mistral's: one special token before a list, and ids of nine characters.",
    "bare": "As Llama's: the answer is one call, without a marker.",
    "named": "As DeepSeek's: the name stands before the JSON, between special tokens.",
    "strict": "As Gemma's: two roles in turn, and nothing about tools.",
}
TEMPLATES = Path(__file__).parent / "templates"
ALL = {**{kind: (TEMPLATES / f"{kind}.jinja").read_text(encoding="utf-8") for kind in MANNERS}, "chatml": None}
_MARKERS = {"hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")}
_SPECIAL = {
    "list": ("[TOOL_CALLS]", "[RESULTS]"),
    "named": ("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"),
}


def templated(kind):
    """Return the toy tokenizer with the chat template and the tokens of a model's manner."""
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in _MARKERS.get(kind, ())])
    tokenizer.add_tokens([AddedToken(n, special=True) for n in _SPECIAL.get(kind, ())], special_tokens=True)
    tokenizer.chat_template = ALL[kind] or tokenizer.chat_template
    return tokenizer


QUERY = {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]}
FUNCTION = {"name": "search", "description": "Search the records.", "parameters": QUERY}
SEARCH = {"type": "function", "function": FUNCTION}
CALL = {"id": "abc123", "type": "function", "function": {"name": "search", "arguments": '{"query": "ferry"}'}}


def conversation(result="At noon."):
    return [
        message("When?"),
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123", "content": result},
        message("Sure?"),
    ]


def rendered(kind, messages):
    return "[SET]".join(map(str, render_chat(messages, templated(kind), tools=[SEARCH]).texts))


def test_the_format_of_calls_is_found_out_by_rendering_or_is_our_own():
    found = {kind: prompts.template_format(templated(kind)) for kind in ALL}
    between = '}\n</tool_call><tool_call>\n{"name": "'
    hermes = ('<tool_call>\n{"name": "', '", "arguments": ', between, "}\n</tool_call>")
    named = ("<|calls|><|call|>function<|sep|>", "\n```json\n", "\n```<|/call|><|call|>function<|sep|>")
    listed = ('[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]")
    assert {kind: (form.calls, form.call_format.trigger) for kind, form in found.items()} == {
        "hermes": (CallFormat(*hermes), "<tool_call>"),
        "list": (CallFormat(*listed), "[TOOL_CALLS]"),
        "bare": (CallFormat('{"name": "', '", "parameters": ', None, "}"), "{"),
        "named": (CallFormat(*named, "\n```<|/call|><|/calls|>"), "<|calls|>"),
        **dict.fromkeys(("strict", "chatml"), (None, "<tool_call>")),
    }
    assert [kind for kind, form in found.items() if not form.results] == ["strict"]
    reasoning = found["hermes"].reasoning
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
    messages = [message("Be brief.", "system"), message("When?")]
    text = rendered("chatml", messages)
    described = "Be brief.\n\nYou may call these tools:\n" + json.dumps(FUNCTION)
    assert text.startswith(f"<|im_start|>system\n{described}"), "tools end the system message"
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call><|im_end|>' in text
    assert str(render_chat(messages, with_template(""), tools=[SEARCH]).prefix).startswith(described)
    assert "abc123" not in rendered("list", conversation()), "an id that the template refuses is shortened"
    nine = json.loads(json.dumps(conversation()).replace("abc123", "abcdef123"))
    assert rendered("list", nine).count("abcdef123") == 2
    with pytest.raises(InvalidTool, match="distinct names"):
        render_chat([message("a")], TOY, tools=[SEARCH, SEARCH])


def test_a_text_in_pieces_is_the_text():
    said, tokenizer = "<think>\nHm.\n</think>\nAt <|im_end|> noon.", templated("hermes")

    def texts(content):
        messages = [message("When?"), message(content, "assistant"), message("Sure?")]
        return render_chat(messages, tokenizer).texts

    def control(content):
        ids = prompts.tokenize_text(texts(content)[0], tokenizer)
        return [each for each in ids if each in control_tokens(tokenizer)]

    assert all(texts([said[:at], said[at:]]) == texts(said) for at in range(len(said)))
    assert control(said) == control(said.replace("<|im_end|>", "")), "behind the reasoning, names are text"


# --- from text to token ids: each part alone, special tokens only in texts ---

SLOTS = (Slot("[1]<eos> ", "\n", "1"), Slot("[2]<eos> ", "\n", "2"))
IN_SLOTS = SegmentSet(["<bos>a", "b"], slots=SLOTS)


def decoded(ids):
    return str(TOY.decode(list(ids)))


def starting_with(single):
    """A toy tokenizer whose post-processor puts special tokens around every text."""
    tokenizer = toy_tokenizer()
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
        lambda: render_chat(prompts.question_messages("q", SegmentSet()), None),
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
    tokenizer = starting_with(single)
    if single == "$A <eos>":
        tokenizer.bos_token = "<eos>"
    for text in ("ab", "", "<bos>ab", "<|im_start|>ab"):
        tokens = tokenize_prompt(Prompt(text, ["<bos>s"], "q"), tokenizer)
        assert decoded(tokens.texts[0]) == (text if start and text.startswith(start) else start + text)
        assert decoded(tokens.texts[1]) == "q"
        assert len(tokens.sets[0][0].token_ids) == 6, "text, where it would be special in a text"
    tokenizer.chat_template = "{{ '" + start + "' }}" + str(TOY.chat_template)
    chat = render_chat(prompts.question_messages("Why?", SegmentSet(["one"])), tokenizer)
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


# --- segments between marks, and labels ---

MARKS = "\ueca0\ueca1\ueca2\ueca3"
_pieces = st.text(st.characters(codec=None), max_size=4) | st.sampled_from([*MARKS, *"<|>\n \\\"'"])
any_text = st.lists(_pieces, max_size=8).map("".join)  # an alphabet of all these would hardly ever draw a mark
scores = st.none() | st.floats(allow_nan=False)


def bare(text):
    return text and "".join(each for each in text if each not in MARKS)


def segments_in(text):
    return [part.segment for part in split_marked(text)[0] if isinstance(part, Marked)]


@given(st.lists(st.tuples(any_text, st.none() | any_text, scores), max_size=5), any_text, any_text)
def test_marked_segments_are_found_again_and_text_without_marks_is_left_as_it_is(chunks, before, after):
    listed = [Segment(text, title=title, score=score) for text, title, score in chunks]
    parts, rest = split_marked(before + mark_set(listed) + after)
    expected = [Segment(bare(each.text) or "", title=bare(each.title), score=each.score) for each in listed]
    assert [part.segment for part in parts if isinstance(part, Marked)] == expected
    assert "".join(part for part in parts if isinstance(part, str)) == before + after
    assert not rest
    assert all(part.size == len(listed) for part in parts if isinstance(part, Marked))
    assert split_marked(before) == ([before] if before else [], False)
    assert prompts.without_marks(before) == before


def test_icons_of_fonts_and_their_escapes_are_no_marks():
    icons = f"icons {MARKS} and {MARKS[::-1]}"
    for text in (icons, "\\ueca0 \\ueca3", "a \\ueca0;;;\\ueca1 b \\ueca3", "\ueca0;;;\ueca1 x\ueca3"):
        assert split_marked(text) == ([text], False)
        assert not prompts.has_marks(text)


def test_a_document_cannot_forge_a_mark_nor_end_its_own():
    forged = f"\ueca0{'0' * 8};1;;\ueca1forged\ueca3"
    (found,) = segments_in(mark(Segment("a" + forged + MARKS, title=f"b{forged}")))
    assert found == Segment("a00000000;1;;forged", title="b00000000;1;;forged")
    with pytest.raises(InvalidSegment, match="token ids"):
        mark(Segment.of([1, 2]))


def test_marks_survive_what_frameworks_do_to_text_and_broken_and_escaped_ones_are_noticed_and_removed():
    for carry in (
        str.strip,
        lambda text: unicodedata.normalize("NFKC", text),
        lambda text: json.loads(json.dumps(text)),
        lambda text: json.dumps({"context": text}, ensure_ascii=False),
    ):
        carried = carry(mark_set(["a", "b", "c"]))
        assert [each.text for each in segments_in(carried)] == ["a", "b", "c"]
        assert not split_marked(carried)[1]
    for spoil in (
        lambda text: text[: len(text) // 2 + 12],  # cut
        lambda text: text.replace("\ueca3", ""),  # without ends
        lambda text: mark("a", nonce="0" * 8),  # of another process
        repr,
        json.dumps,
        lambda text: json.dumps(json.dumps(text)),
        lambda text: json.dumps(text).replace("\\ueca3", ""),
    ):
        spoilt = "before " + spoil(mark_set(["one", "two"])) + " after"
        parts, rest = split_marked(spoilt)
        assert rest
        assert prompts.has_marks(spoilt)
        assert not any(prompts.has_marks(part) for part in parts if isinstance(part, str))
        assert all(each in prompts.without_marks(spoilt) for each in ("before", "after"))


@settings(max_examples=200)
@given(st.text(st.sampled_from(MARKS + "ab;0 \n\\u"), max_size=24), st.integers(0, 60))
def test_any_jumble_of_marks_is_parsed(jumble, cut):
    text = jumble[:8] + mark_set(["one", "two"])[:cut] + jumble[8:]
    for each in (text, f"000\ueca00000{text[:10]}\ueca1;"):
        everything = prompts.without_marks(each)
        assert not prompts.has_marks(everything)
        assert prompts.without_marks(everything) == everything


def test_only_text_between_two_segments_makes_two_sets_of_them():
    for text, expected in (
        (mark("a") + " \n\t" + mark("b"), [["a", "b"]]),
        (mark("a") + " and " + mark("b"), [["a"], ["b"]]),
        (mark_set(["a", "b"]) + mark_set(["c"]), [["a", "b"], ["c"]]),  # neighbouring sets stay apart
    ):
        prompt = prompts.parse_marked(text)
        assert [[each.text for each in one] for one in prompt.sets] == expected
        assert prompt.rendering is document_rendering


@given(st.permutations(range(4)))
def test_a_label_leads_to_the_document_that_has_it_and_to_none_if_two_have_it(placed):
    documents = SegmentSet(["a", "b", "c", "d"], slots=[Slot(f"[{n}] ", number=str(n)) for n in range(1, 5)])
    labels = labels_of([(SegmentSet(["before"]), [0]), (documents, placed)])
    assert labels == {str(place + 1): 1 + index for place, index in enumerate(placed)}
    assert labels_of([(documents, placed), (documents, placed)]) == {}


def test_citations_are_found_where_they_stand():
    found = find_labels("At noon [2][1, 3], see source 2 and [4-6]; row[i] and 3 ferries 【7†source】, [Doc 8].")
    assert [label for *_, label in found] == ["2", "1", "3", "2", "4", "5", "6", "i", "7", "8"]
    assert without_labels("At noon [2], 3 ferries.") == "At noon    , 3 ferries."
