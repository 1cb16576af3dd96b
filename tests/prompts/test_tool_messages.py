"""Prompts with tools, calls and results, in the manners of several chat templates; no control token comes of them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from invariant_rag.errors import InvalidPrompt, InvalidTool
from invariant_rag.prompts import Tool, ToolCall, control_tokens, render_chat, template_format, tokenize_prompt
from invariant_rag.prompts.template_format import OWN_FORMAT, CallFormat
from invariant_rag.segments import Segment, SegmentSet
from tests.prompts.tool_templates import ALL, templated

SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the records.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}
CALL = {"id": "abc123", "type": "function", "function": {"name": "search", "arguments": '{"query": "ferry"}'}}


def conversation(result: Any = "At noon.") -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "abc123", "content": result},
        {"role": "user", "content": "Sure?"},
    ]


def rendered(kind: str, messages: list[dict[str, Any]], tools: Any = (SEARCH,)) -> str:
    return "[SET]".join(map(str, render_chat(messages, templated(kind), tools=tools).texts))


# --- what templates render, found out by rendering ---


def test_the_format_of_calls_is_found_out_by_rendering() -> None:
    found = {kind: template_format(templated(kind)) for kind in ALL}
    assert found["hermes"].calls == CallFormat(
        '<tool_call>\n{"name": "',
        '", "arguments": ',
        '}\n</tool_call><tool_call>\n{"name": "',
        "}\n</tool_call>",
    )
    assert found["list"].calls == CallFormat('[TOOL_CALLS] [{"name": "', '", "arguments": ', '}, {"name": "', "}]")
    assert found["bare"].calls == CallFormat('{"name": "', '", "parameters": ', None, "}")
    assert found["named"].calls == CallFormat(
        "<|calls|><|call|>function<|sep|>",
        "\n```json\n",
        "\n```<|/call|><|call|>function<|sep|>",
        "\n```<|/call|><|/calls|>",
    )
    assert [kind for kind, form in found.items() if form.calls is None] == ["strict", "chatml"]
    assert [kind for kind, form in found.items() if not form.results] == ["strict"]
    assert {kind: form.call_format.trigger for kind, form in found.items()} == {
        "hermes": "<tool_call>",
        "list": "[TOOL_CALLS]",
        "bare": "{",
        "named": "<|calls|>",
        "strict": "<tool_call>",
        "chatml": "<tool_call>",
    }
    reasoning = found["hermes"].reasoning
    assert reasoning is not None
    assert (reasoning.open, reasoning.close) == ("<think>", "</think>")


def test_a_format_that_nobody_can_parse_is_replaced_by_our_own() -> None:
    tokenizer = templated("hermes")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        """{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}""",
        "{{ call.function.arguments | tojson }} for {{ call.function.name }}",
    )
    assert not template_format(tokenizer).tools  # nobody could parse what the model would write
    assert template_format(tokenizer).call_format == OWN_FORMAT
    described = str(render_chat(conversation(), tokenizer, tools=[SEARCH]).texts[0])
    assert '<tool_call>\n{"name": "search", "arguments": {"query": "ferry"}}\n</tool_call>' in described


# --- rendering ---


def test_a_template_gets_tools_calls_and_results_as_transformers_documents_them() -> None:
    tokenizer = templated("hermes")
    messages = conversation()
    prompt = render_chat(messages, tokenizer, tools=[Tool.of(SEARCH)])
    plain = [dict(message) for message in messages]
    plain[1] = {"role": "assistant", "content": "", "tool_calls": [ToolCall.of(CALL).to_dict()]}
    expected = tokenizer.apply_chat_template(plain, tools=[SEARCH], tokenize=False, add_generation_prompt=True)
    assert prompt.texts == (expected,)
    assert '{"name": "search", "arguments": {"query": "ferry"}}' in expected
    assert messages[1]["content"] is None  # what was given is as it was
    call, arguments = ToolCall.of(CALL), {"query": "ferry"}
    for shape in (call, call.to_dict(), {"id": "abc123", "name": "search", "args": arguments, "type": "tool_call"}):
        assert ToolCall.of(shape) == ToolCall("abc123", "search", arguments)
    assert ToolCall.of({"name": "now", "arguments": ""}) == ToolCall("", "now", {})
    assert Tool.of(Tool.of(SEARCH).to_dict()).to_dict() == SEARCH


@pytest.mark.parametrize("kind", ALL)
def test_every_template_shows_tools_calls_and_results_somehow(kind: str) -> None:
    text = rendered(kind, conversation())
    for part in ("Search the records.", '{"query": "ferry"}', "At noon.", "When?", "Sure?"):
        assert text.count(part) == 1, part
    assert text.index('{"query"') < text.index("At noon.") < text.index("Sure?")


@pytest.mark.parametrize("kind", ALL)
def test_the_result_of_a_retriever_tool_is_a_set(kind: str) -> None:
    prompt = render_chat(conversation(["Found: ", Segment("one"), Segment("two")]), templated(kind), tools=[SEARCH])
    assert prompt.sets == (SegmentSet(["one", "two"]),)
    assert str(prompt.texts[0]).endswith("Found: ")


def test_where_a_template_refuses_roles_a_result_is_part_of_the_users_turn() -> None:
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


def test_tools_that_a_template_ignores_end_the_system_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "When?"}]
    text = rendered("chatml", messages)
    assert text.startswith(
        "<|im_start|>system\nBe brief.\n\nYou may call these tools:\n" + json.dumps(SEARCH["function"])
    )
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call><|im_end|>' in text
    tokenizer = templated("chatml")
    tokenizer.chat_template = ""
    assert str(render_chat(messages, tokenizer, tools=[SEARCH]).prefix).startswith("Be brief.\n\nYou may call")


def test_ids_are_shortened_only_for_a_template_that_refuses_them() -> None:
    assert "abc123" not in rendered("list", conversation())
    nine = json.loads(json.dumps(conversation()).replace("abc123", "abcdef123"))
    assert rendered("list", nine).count("abcdef123") == 2


@pytest.mark.parametrize("said", ["<think>\nHm.\n</think>\nAt noon.", "At <|im_end|> noon."])
def test_a_text_in_pieces_is_the_text(said: str) -> None:
    def texts(content: Any) -> Any:
        messages = [{"role": "user", "content": "When?"}, {"role": "assistant", "content": content}]
        return render_chat([*messages, {"role": "user", "content": "Sure?"}], templated("hermes")).texts

    assert all(texts([said[:at], said[at:]]) == texts(said) for at in range(len(said)))


# --- variables of the template ---


def test_variables_reach_the_template_and_unknown_ones_are_refused() -> None:
    tokenizer = templated("hermes")
    messages = [{"role": "user", "content": "When?"}]
    expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert render_chat(messages, tokenizer).texts == (expected,)
    thinking = render_chat(messages, tokenizer, template_kwargs={"enable_thinking": True})
    assert str(thinking.suffix).endswith("<|im_start|>assistant\n<think>\n")
    assert render_chat(messages, tokenizer, template_kwargs={"enable_thinking": False}) == render_chat(
        messages, tokenizer
    )
    with pytest.raises(InvalidPrompt, match="got enable_thinkin, which do not occur in it"):
        render_chat(messages, tokenizer, template_kwargs={"enable_thinkin": True})
    for taken in ("documents", "tokenize", "messages", "tools", "add_generation_prompt"):
        with pytest.raises(InvalidPrompt, match=f"got {taken}"):
            render_chat(messages, tokenizer, template_kwargs={taken: []})


# --- untrusted text ---


@pytest.mark.parametrize("kind", ALL)
def test_no_tool_call_or_result_makes_a_control_token(kind: str) -> None:
    tokenizer = templated(kind)
    control = control_tokens(tokenizer)
    hostile = "x" + "".join(sorted(control.values())) + "\ueca4\ueca6\ueca5\ueca40\ueca5"

    def tokens(text: str) -> list[int]:
        tool = {
            "name": "search",
            "description": text,
            "parameters": {"type": "object", "properties": {text: {"enum": [text]}}},
        }
        call = {"id": "abc123", "name": "search", "args": {"query": text, text: 1}}
        messages = conversation([text, Segment("one"), text])
        messages[1]["tool_calls"] = [call]
        prompt = render_chat(messages, tokenizer, tools=[tool])
        assert len(prompt.sets) == 1
        return [token for text in tokenize_prompt(prompt, tokenizer).texts for token in text]

    assert [token for token in tokens(hostile) if token in control] == [t for t in tokens("x") if t in control]
    written = tokenizer.decode(tokens(hostile), skip_special_tokens=False)
    assert all(name in written for name in control.values())  # the model reads them, as text


def test_calls_and_tools_that_are_malformed_are_refused() -> None:
    tokenizer = templated("hermes")
    for calls in ([3], [{"id": "a"}], [{"name": "a", "args": "{"}], [{"name": "a", "args": "[1]"}]):
        with pytest.raises(InvalidTool, match="expected"):
            render_chat([{"role": "assistant", "content": "", "tool_calls": calls}], tokenizer)
    with pytest.raises(InvalidTool, match="distinct names"):
        render_chat([{"role": "user", "content": "a"}], tokenizer, tools=[SEARCH, SEARCH])
    with pytest.raises(InvalidPrompt, match="role and content"):
        render_chat([{"role": "assistant", "tool_calls": []}], tokenizer)
