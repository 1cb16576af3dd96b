"""From text to token ids: each part alone, special tokens only in texts."""

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

from invariant_rag import Prompt, SegmentSet, prompts
from invariant_rag.errors import InvalidSegment, TokenizerRequired
from invariant_rag.prompts import render_chat, tokenize_in_slots, tokenize_literal, tokenize_prompt, tokenize_text
from invariant_rag.segments import Slot
from invariant_rag.testing import toy_tokenizer

TOY = toy_tokenizer()
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


SURROGATES = [("\ud800a", "\ufffda"), ("a\udc00", "a\ufffd"), ("\udc00\ud800", "\ufffd\ufffd")]
SURROGATES += [("\ud83d\ude00", "\U0001f600"), ("a\0b\ufeff", "a\0b\ufeff")]  # a pair, and no surrogates


@pytest.mark.parametrize(("text", "expected"), SURROGATES)
def test_halves_of_surrogate_pairs_become_the_replacement_character(text, expected):
    assert decoded(tokenize_literal(text, TOY)) == decoded(tokenize_text(text, TOY)) == expected


def test_token_ids_are_used_as_they_are_and_nothing_is_put_in_front():
    tokenizer = starting_with("<bos> $A")
    for each in (tokenizer, None):
        tokens = tokenize_prompt(Prompt([5, 1], [[2, 2], [1]], [0]), each)
        assert tokens.texts == ((5, 1), (0,))
        assert [candidate.token_ids for candidate in tokens.sets[0]] == [(2, 2), (1,)]
    assert tokenize_prompt(Prompt(segments=[[8, 9]], suffix=[11]), tokenizer).texts == ((), (11,))
    assert tokenize_prompt(Prompt("", [""], ""), None).sets[0][0].token_ids == ()
    assert decoded(tokenize_text("ab", tokenizer)) == "ab", "a continuation is never started"
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
    chat = render_chat(prompts.question_messages("Why?", SegmentSet(["one"])), tokenizer)
    assert decoded(tokenize_prompt(chat, tokenizer).texts[0]).count("<bos>") == start.count("<bos>")


@pytest.mark.parametrize(
    "use",
    [
        lambda: tokenize_prompt(Prompt("text"), None),
        lambda: tokenize_prompt(Prompt([1], ["text"], [2]), None),
        lambda: tokenize_text("text", None),
        lambda: render_chat(prompts.question_messages("q", SegmentSet()), None),
        lambda: tokenize_in_slots(IN_SLOTS, [0, 1], None),
    ],
)
def test_text_without_a_tokenizer_is_refused(use):
    with pytest.raises(TokenizerRequired):
        use()


def test_control_tokens_are_looked_up_once_for_a_prompt_of_a_thousand_segments(monkeypatch):
    looks, original = [], PreTrainedTokenizerFast.added_tokens_decoder
    counted = property(lambda self: looks.append(1) or original.fget(self))
    monkeypatch.setattr(PreTrainedTokenizerFast, "added_tokens_decoder", counted)
    few, many = (tokenize_prompt(Prompt("a", ["seg"] * n, "b"), TOY) and len(looks) for n in (1, 1000))
    assert many <= 2 * few, "as many looks for a thousand as for one"


def test_the_segment_of_rank_0_takes_the_last_slot():
    ids = tokenize_in_slots(IN_SLOTS, [0, 1], TOY)
    assert [decoded(each) for each in ids] == ["[2]<eos> <bos>a\n", "[1]<eos> b\n"]
    assert [len(each) for each in ids] == [len(decoded(each)) for each in ids], "no control token"
    ranked = tokenize_prompt(Prompt("", IN_SLOTS, ""), TOY).sets[0]
    assert [decoded(each.token_ids) for each in ranked] == ["<bos>a", "b"], "ranked without the slot"
    for segments, message in (([[1], [2]], "token ids"), (["a"], "one slot per segment, got 2 for 1")):
        with pytest.raises(InvalidSegment, match=message):
            SegmentSet(segments, slots=SLOTS)
