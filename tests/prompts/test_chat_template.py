"""Chat templates around sets."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from invariant_rag import Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt
from invariant_rag.prompts import (
    DEFAULT_SYSTEM,
    control_tokens,
    question_messages,
    render_chat,
    tokenize_literal,
    tokenize_prompt,
)
from invariant_rag.prompts.literal_text import CUT, PRIVATE
from invariant_rag.testing import toy_tokenizer

TOY = toy_tokenizer()
any_text = st.text(
    st.one_of(st.characters(codec=None), st.sampled_from("\ueca0\ueca1\ueca2\ueca3\ueca4\ueca5<|>\n ")), max_size=20
)  # type: ignore[arg-type]
CHATML = TOY.chat_template


def templated(template: str) -> PreTrainedTokenizerFast:
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def starting_with(single: str, **names: str) -> PreTrainedTokenizerFast:
    """A toy tokenizer whose post-processor puts special tokens around every text."""
    tokenizer = toy_tokenizer()
    for name, value in names.items():
        setattr(tokenizer, name, value)
    special = [(each.content, index) for index, each in tokenizer.added_tokens_decoder.items()]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return tokenizer


def test_a_question_is_rendered_once_with_the_set_in_its_place() -> None:
    prompt = render_chat(question_messages("Why?", SegmentSet(["one", Segment("two", title="T")])), TOY, "Why?")
    assert prompt.prefix == f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    assert prompt.suffix == "\nQuestion: Why?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.query == "Why?"
    assert [prompt.rendering(each) for each in prompt.segments] == ["Document: one\n", "Document (Title: T): two\n"]


def test_segments_may_stand_in_any_turn_and_neighbours_form_one_set() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": ["Rules: ", SegmentSet(["r1", "r2"])]},
        {"role": "user", "content": [Segment("a"), Segment("b"), "?", Segment("c")]},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [SegmentSet(), "And?"]},
    ]
    prompt = render_chat(messages, TOY)
    assert [[segment.text for segment in each] for each in prompt.sets] == [["r1", "r2"], ["a", "b"], ["c"], []]
    assert prompt.texts[2] == "?"
    assert "\ueca4" not in "".join(map(str, prompt.texts))


@given(any_text, any_text)
def test_no_text_of_a_message_can_pass_for_a_set(question: str, system: str) -> None:
    place = "\ueca40\ueca5"
    prompt = render_chat(question_messages(place + question, SegmentSet(["one"]), system + place), TOY)
    assert prompt.sets == (SegmentSet(["one"]),)
    with pytest.raises(InvalidPrompt, match="the name of a role"):
        render_chat([{"role": place, "content": SegmentSet(["one"])}], TOY)
    assert len(prompt.texts) == 2
    assert not any(each in str(text).replace(CUT, "") for text in prompt.texts for each in PRIVATE)


def test_a_template_may_write_bos_and_it_is_not_doubled() -> None:
    tokenizer = starting_with("<bos> $A")
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    prompt = render_chat(question_messages("Why?", SegmentSet(["one"])), tokenizer)
    assert tokenize_prompt(prompt, tokenizer).texts[0].count(tokenizer.bos_token_id) == 1


NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + NO_SYSTEM
TWICE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"


def test_a_template_may_drop_a_system_message_of_text_but_not_one_of_segments() -> None:
    prompt = render_chat(question_messages("Why?", SegmentSet(["one"]), "Be brief."), templated(NO_SYSTEM))
    assert prompt.texts == ("[user]", "\nQuestion: Why?")
    messages = [{"role": "system", "content": SegmentSet(["one"])}, {"role": "user", "content": "Why?"}]
    with pytest.raises(InvalidPrompt, match="set 0 of 1 0 times") as caught:
        render_chat(messages, templated(NO_SYSTEM))
    assert "chat_template" in caught.value.hint


def test_where_a_template_refuses_a_system_message_it_opens_the_first_question() -> None:
    prompt = render_chat(question_messages("Why?", SegmentSet(["one"]), "Be brief."), templated(REFUSES))
    assert prompt.texts == ("[user]Be brief.\n\n", "\nQuestion: Why?")
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": ["Rules: ", SegmentSet(["r"])]},
        {"role": "user", "content": [SegmentSet(["one"]), "Why?"]},
    ]
    assert render_chat(messages, templated(REFUSES)).texts == ("[user]Rules: ", "\n\n", "Why?")
    assert render_chat(question_messages("Why?", SegmentSet(), ""), templated(REFUSES)).texts[0] == "[user]"


def test_one_of_several_templates_is_used_and_control_tokens_of_all_are_known() -> None:
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens(["[tool]"])
    index = tokenizer.convert_tokens_to_ids("[tool]")
    assert index not in control_tokens(tokenizer)
    tokenizer.chat_template = {"default": CHATML, "tool_use": CHATML + "[tool]"}
    assert control_tokens(tokenizer)[index] == "[tool]"
    assert index not in tokenize_literal("a [tool] b", tokenizer)
    assert render_chat(question_messages("Why?", SegmentSet()), tokenizer).texts[0].startswith("<|im_start|>")  # type: ignore[union-attr]


def test_without_a_template_one_question_is_rendered_plainly() -> None:
    tokenizer = templated("")
    prompt = render_chat(question_messages("Why?", SegmentSet(["one"]), "Be brief."), tokenizer)
    assert prompt.texts == ("Be brief.\n\n", "\nQuestion: Why?\nAnswer:")
    with pytest.raises(InvalidPrompt, match="no chat template") as caught:
        render_chat([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}], tokenizer)
    assert caught.value.hint


@pytest.mark.parametrize("content", [None, 5, b"ab", {"type": "text"}, [{"type": "text", "text": "a"}], [5]])
def test_contents_that_are_not_understood_are_refused(content: Any) -> None:
    with pytest.raises(InvalidPrompt, match="expected"):
        render_chat([{"role": "user", "content": content}], TOY)


@pytest.mark.parametrize(
    "messages", [[], ["text"], [{"role": "user"}], [{"content": "a"}], [{"role": 1, "content": ""}]]
)
def test_messages_that_are_not_understood_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidPrompt, match="expected"):
        render_chat(messages, TOY)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('never') }}", "cannot render"),
        ("{{ messages[9].content.x }}", "cannot render"),
        (TWICE, "set 0 of 1 2 times"),
    ],
)
def test_what_a_template_cannot_render_is_a_typed_error(template: str, message: str) -> None:
    with pytest.raises(InvalidPrompt, match=message):
        render_chat(question_messages("Why?", SegmentSet(["one"])), templated(template))
