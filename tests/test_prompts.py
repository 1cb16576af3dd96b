"""From text to token ids: each part alone; chat templates around sets; the in-band codec."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from invariant_rag import Prompt, Segment, SegmentSet
from invariant_rag.errors import InvalidPrompt, InvalidSegment, InvariantRAGError, TokenizerRequired
from invariant_rag.prompts import (
    DEFAULT_SYSTEM,
    control_tokens,
    mark,
    parse_marked,
    question_messages,
    render_chat,
    tokenize_literal,
    tokenize_prompt,
    tokenize_text,
)
from invariant_rag.segments import document_rendering
from invariant_rag.testing import toy_tokenizer

TOY = toy_tokenizer()
CHATML = TOY.chat_template
MARKS = "\ue200\ue201\ue202\ue203\ue204"
any_text = st.text(st.one_of(st.characters(codec=None), st.sampled_from(MARKS + "<|>\n ")), max_size=20)  # type: ignore[arg-type]


def decoded(ids: tuple[int, ...]) -> str:
    return str(TOY.decode(list(ids)))


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


# --- tokenising -----------------------------------------------------------------------------------------------------


@given(st.lists(any_text, max_size=5), any_text, st.randoms())
def test_ids_of_a_segment_never_depend_on_other_segments(others: list[str], text: str, shuffle: random.Random) -> None:
    listed = [*others, text]
    shuffle.shuffle(listed)
    tokens = tokenize_prompt(Prompt("start", listed, "end"), TOY)
    alone = tokenize_prompt(Prompt("other", [text], "more"), TOY).sets[0][0].token_ids
    assert tokens.sets[0][listed.index(text)].token_ids == alone == tokenize_literal(text, TOY)


def test_special_tokens_are_special_in_texts_and_text_in_segments() -> None:
    tokens = tokenize_prompt(Prompt("<bos>a", ["<bos>a"], "<eos>"), TOY)
    assert decoded(tokens.sets[0][0].token_ids) == "<bos>a"
    assert len(tokens.sets[0][0].token_ids) == 6
    assert [len(each) for each in tokens.texts] == [2, 1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("\ud800a", "\ufffda"),
        ("a\udc00", "a\ufffd"),
        ("\udc00\ud800", "\ufffd\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("a\0b", "a\0b"),
        ("\ufeffa", "\ufeffa"),
    ],
)
def test_halves_of_surrogate_pairs_become_the_replacement_character(text: str, expected: str) -> None:
    assert decoded(tokenize_literal(text, TOY)) == expected
    assert decoded(tokenize_text(text, TOY)) == expected


def test_token_ids_are_used_as_they_are_and_nothing_is_put_in_front() -> None:
    tokenizer = starting_with("<bos> $A")
    given_ids = Prompt([5, 1], [[2, 2], [1]], [0])
    for each in (tokenizer, None):
        tokens = tokenize_prompt(given_ids, each)
        assert tokens.texts == ((5, 1), (0,))
        assert [candidate.token_ids for candidate in tokens.sets[0]] == [(2, 2), (1,)]
    assert tokenize_prompt(Prompt(segments=[[8, 9]], suffix=[11]), tokenizer).texts == ((), (11,))


@pytest.mark.parametrize(
    ("single", "start"),
    [
        ("<bos> $A", "<bos>"),
        ("<bos> <|im_start|> $A", "<bos><|im_start|>"),
        ("$A <eos>", ""),
        ("<bos> $A <eos>", "<bos>"),
    ],
)
@pytest.mark.parametrize("text", ["ab", "", "<bos>ab", "<|im_start|>ab"])
def test_a_prompt_starts_as_the_tokenizer_starts_a_text_and_never_twice(single: str, start: str, text: str) -> None:
    tokenizer = starting_with(single)
    tokens = tokenize_prompt(Prompt(text, ["<bos>s"], "q"), tokenizer)
    assert decoded(tokens.texts[0]) == (text if start and text.startswith(start) else start + text)
    assert decoded(tokens.texts[1]) == "q"
    assert len(tokens.sets[0][0].token_ids) == 6


def test_a_tokenizer_that_ends_texts_with_its_bos_does_not_start_them_with_it() -> None:
    tokenizer = starting_with("$A <eos>", bos_token="<eos>")
    assert decoded(tokenize_prompt(Prompt("ab"), tokenizer).texts[0]) == "ab"


def test_a_continuation_is_never_started() -> None:
    assert decoded(tokenize_text("ab", starting_with("<bos> $A"))) == "ab"
    assert tokenize_text([7, 8], None) == (7, 8)


@pytest.mark.parametrize(
    "use",
    [
        lambda: tokenize_prompt(Prompt("text"), None),
        lambda: tokenize_prompt(Prompt([1], ["text"], [2]), None),
        lambda: tokenize_text("text", None),
        lambda: render_chat(question_messages("q", SegmentSet()), None),
    ],
)
def test_text_without_a_tokenizer_is_refused(use: Callable[[], object]) -> None:
    with pytest.raises(TokenizerRequired):
        use()


def test_an_empty_prompt_needs_no_tokenizer() -> None:
    assert tokenize_prompt(Prompt(), None).texts == ((), ())
    assert tokenize_prompt(Prompt("", [""], ""), None).sets[0][0].token_ids == ()


def test_control_tokens_are_looked_up_once_for_a_prompt_of_a_thousand_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []
    original = PreTrainedTokenizerFast.added_tokens_decoder
    counted = property(lambda self: looks.append(1) or original.fget(self))  # type: ignore[attr-defined, func-returns-value]
    monkeypatch.setattr(PreTrainedTokenizerFast, "added_tokens_decoder", counted)
    few, many = (tokenize_prompt(Prompt("a", ["seg"] * n, "b"), TOY) and len(looks) for n in (1, 1000))
    assert many == 2 * few, "as many looks for a thousand as for one"


def test_eight_threads_get_the_ids_of_one(request: pytest.FixtureRequest) -> None:
    prompts = [Prompt(f"<bos>{n}", [f"<bos>chunk {n} {m}" for m in range(8)], "<eos>") for n in range(12)]
    expected = [tokenize_prompt(each, TOY) for each in prompts]
    request.addfinalizer(partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)  # threads take turns as often as they can
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda each: tokenize_prompt(each, TOY), prompts * 8))
    assert results == expected * 8


# --- chat templates -------------------------------------------------------------------------------------------------


def test_a_question_is_rendered_once_with_the_set_in_its_place() -> None:
    prompt = render_chat(question_messages("Why?", SegmentSet(["one", Segment("two", title="T")])), TOY, "Why?")
    assert prompt.prefix == f"<|im_start|>system\n{DEFAULT_SYSTEM}<|im_end|>\n<|im_start|>user\n"
    assert prompt.suffix == "\nQuestion: Why?<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.query == "Why?"
    assert [prompt.rendering(each) for each in prompt.segments] == ["Document: one\n", "Document (Title: T): two\n"]


def test_a_prompt_around_no_segment_is_the_chat_template_and_no_more() -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    prompt = render_chat(messages, TOY)
    assert prompt.sets == ()
    assert prompt.texts == (TOY.apply_chat_template(messages, tokenize=False, add_generation_prompt=True),)


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
    assert "\ue203" not in "".join(map(str, prompt.texts))


@given(any_text, any_text)
def test_no_text_of_a_message_can_pass_for_a_set(question: str, system: str) -> None:
    place = "\ue2030\ue204"
    prompt = render_chat(question_messages(place + question, SegmentSet(["one"]), system + place), TOY)
    assert prompt.sets == (SegmentSet(["one"]),)
    assert len(prompt.texts) == 2
    assert not any(each in str(text) for text in prompt.texts for each in "\ue203\ue204")


def test_a_role_cannot_pass_for_a_set() -> None:
    with pytest.raises(InvalidPrompt, match="set 0 of 1 2 times"):
        render_chat([{"role": "\ue2030\ue204", "content": SegmentSet(["one"])}], TOY)


def test_a_template_may_trim_contents() -> None:
    tokenizer = templated(CHATML.replace("message['content']", "message['content'] | trim"))
    prompt = render_chat([{"role": "user", "content": [" \n", Segment("  a  "), "  "]}], tokenizer)
    assert prompt.texts == ("<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n")
    assert prompt.segments[0].text == "  a  "


def test_a_template_may_write_bos_and_it_is_not_doubled() -> None:
    tokenizer = starting_with("<bos> $A")
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    prompt = render_chat(question_messages("Why?", SegmentSet(["one"])), tokenizer)
    assert tokenize_prompt(prompt, tokenizer).texts[0].count(tokenizer.bos_token_id) == 1


NO_SYSTEM = "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + NO_SYSTEM
TWICE = "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages[-1].content }}"
SYSTEM_LAST = "{% for m in messages[1:] %}{{ m.content }}{% endfor %}|{{ messages[0].content }}"


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


def test_what_a_template_refuses_for_good_is_a_typed_error() -> None:
    for template in ("{{ raise_exception('never') }}", "{{ messages[9].content.x }}"):
        for messages in (question_messages("Why?", SegmentSet()), [{"role": "user", "content": "a"}]):
            with pytest.raises(InvalidPrompt, match="cannot render"):
                render_chat(messages, templated(template))


def test_a_template_that_writes_a_set_twice_is_refused() -> None:
    with pytest.raises(InvalidPrompt, match="set 0 of 1 2 times"):
        render_chat(question_messages("Why?", SegmentSet(["one"])), templated(TWICE))


def test_a_template_may_write_messages_in_another_order() -> None:
    messages = [{"role": "system", "content": SegmentSet(["s"])}, {"role": "user", "content": SegmentSet(["u"])}]
    prompt = render_chat(messages, templated(SYSTEM_LAST))
    assert prompt.texts == ("", "|", "")
    assert prompt.sets == (SegmentSet(["u"]), SegmentSet(["s"]))


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


@pytest.mark.parametrize(
    "messages",
    [
        [],
        ["text"],
        [{"role": "user"}],
        [{"content": "a"}],
        [{"role": 1, "content": "a"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": b"ab"}],
        [{"role": "user", "content": {"type": "text", "text": "a"}}],
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "user", "content": [5]}],
    ],
)
def test_messages_that_are_not_understood_are_refused(messages: list[Any]) -> None:
    with pytest.raises(InvalidPrompt, match="expected"):
        render_chat(messages, TOY)


# --- in-band codec --------------------------------------------------------------------------------------------------


def stripped(text: str) -> str:
    return "".join(each for each in text if each not in MARKS[:3])


@given(st.lists(st.tuples(any_text, st.none() | any_text), max_size=5), any_text, any_text)
def test_marked_segments_are_found_again(chunks: list[tuple[str, str | None]], before: str, after: str) -> None:
    before, after = stripped(before), stripped(after)
    text = before + "".join(mark(Segment(text, title=title)) for text, title in chunks) + after
    prompt = parse_marked(text)
    expected = [Segment(stripped(text), title=None if title is None else stripped(title)) for text, title in chunks]
    assert list(prompt.segments) == expected
    assert prompt.texts == ((before, after) if chunks else (before + after,))
    assert prompt.rendering is document_rendering


@settings(max_examples=200)
@given(st.text(st.sampled_from(MARKS[:3] + "ab \n"), max_size=16))
def test_any_jumble_of_marks_is_read_and_no_mark_is_left(jumble: str) -> None:
    prompt = parse_marked(jumble)
    everything = [*prompt.texts, *(each.text + (each.title or "") for each in prompt.segments)]
    assert not any(each in str(text) for text in everything for each in MARKS[:3])
    letters = [each for each in jumble if each in "ab"]
    assert sorted("".join(map(str, everything)).replace(" ", "").replace("\n", "")) == sorted(letters)


def test_marks_that_do_not_pair_up_are_removed_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        prompt = parse_marked("a\ue200b\ue200c\ue201d\ue201e\ue202f")
    assert prompt.texts == ("ab", "def")
    assert [each.text for each in prompt.segments] == ["c"]
    assert "do not pair up" in caplog.text


def test_paired_marks_warn_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert parse_marked(f"a {mark('b')}\n\n{mark('c')} d").texts == ("a ", " d")
    assert not caplog.text


def test_only_text_between_two_segments_makes_two_sets_of_them() -> None:
    assert len(parse_marked(mark("a") + " \n\t" + mark("b")).sets) == 1
    assert len(parse_marked(mark("a") + " and " + mark("b")).sets) == 2
    assert len(parse_marked(mark("a") + " \ue201 " + mark("b")).sets) == 1, "a lost mark is no text"


def test_token_ids_cannot_be_marked() -> None:
    with pytest.raises(InvalidSegment, match="token ids"):
        mark(Segment.of([1, 2]))


def test_errors_of_prompts_are_errors_of_the_library() -> None:
    assert issubclass(InvalidPrompt, InvariantRAGError)
    assert issubclass(TokenizerRequired, InvariantRAGError)
