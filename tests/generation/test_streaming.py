"""Streams: pieces that join to the text of `generate`, errors that reach the reader, and readers who leave early."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidOption, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answer_parsing import trim_at_stop_string, until_stop_string
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.streaming import TextQueueStreamer, TextStream
from invariant_rag.testing import toy_tokenizer

BYTES = toy_tokenizer()


def metaspace():
    """Words begin with a mark for their space, which the decoder strips from the beginning of a text."""
    pieces = ["<unk>", "\n", "▁", "▁a", "▁▁b", "c", "é", "文", "."]
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False)


METASPACE = metaspace()


def streamed(tokens, tokenizer):
    streamer = TextQueueStreamer(tokenizer)

    def generate():
        for piece in ([[1, 2, 3]], *([token] for token in tokens)):  # first the prompt
            streamer.put(torch.tensor(piece))
        streamer.end()

    return list(TextStream(generate, streamer, threading.Event()))


def lists(most):
    return st.lists(st.integers(0, most), max_size=20) | st.lists(st.integers(0, most), min_size=60, max_size=80)


@settings(deadline=None, max_examples=60)
@example([5] + [0] * 40 + [2, 5], [], "")  # a long run of special tokens, then a space
@given(lists(8), lists(260), st.text(max_size=60))
def test_pieces_join_to_the_text(words, some_bytes, text):
    """Where a decoder strips white space, of any bytes, and where characters are several tokens."""
    assert "".join(streamed(words, METASPACE)) == METASPACE.decode(words, skip_special_tokens=True)
    assert "".join(streamed(some_bytes, BYTES)) == BYTES.decode(some_bytes, skip_special_tokens=True)
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokens, BYTES)
    assert "".join(pieces) == BYTES.decode(tokens, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


def test_pieces_come_one_by_one_and_special_tokens_do_not():
    assert streamed(BYTES("<bos>ab<eos>c", add_special_tokens=False)["input_ids"], BYTES) == ["a", "b", "c"]


def running():
    return [each for each in threading.enumerate() if each.name == "invariant-rag-stream"]


def test_a_stream_ends_with_its_generation_or_when_its_reader_leaves(model):
    prompt = model.chat_prompt("Why?", ["one", "two"])
    stream = model.stream(prompt, max_new_tokens=8)
    first = next(stream)
    assert stream.generation is None
    expected = model.generate(prompt, max_new_tokens=8)
    assert first + "".join(stream) == expected.text
    assert stream.generation == expected
    passes = []
    with model.model.register_forward_pre_hook(lambda *_: passes.append(1)):
        for _ in model.stream(prompt, max_new_tokens=1000):  # a stream that is dropped
            break
        assert not running(), "dropping it waits until the generation is over"
        closed = model.stream(prompt, max_new_tokens=1000)
        next(closed)
        closed.close()
    assert not running()
    assert len(passes) < 1000, "the model rests"
    assert closed.generation is None


def test_errors_reach_the_reader(model, chat_llama):
    prompt = model.chat_prompt("Why?", ["one"])
    with pytest.raises(InvalidOption, match="beam"):
        list(model.stream(prompt, num_beams=2))
    with pytest.raises(UnsupportedCombination, match="one sequence to stream, got 2"):
        list(model.stream(prompt, do_sample=True, num_return_sequences=2))
    with pytest.raises(TokenizerRequired):
        InvariantModel(chat_llama).stream(None)


def before_stop(pieces, stops):
    return (each.content for each in until_stop_string(map(AnswerDelta, pieces), stops))


@settings(deadline=None)
@example(["a", "a", "ab"], ["aab"])  # a beginning within a beginning
@example(["ab", "c"], ["bd", "abc"])  # two may have begun
@example(["b", "aa", "b"], ["a", "baab"])  # one is over while another, which began before it, is not
@example(["b", "aa"], ["a", "baab"])
@given(st.lists(st.text("ab", max_size=4), max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_up_to_a_stop_string_join_to_the_text_before_it(pieces, stops):
    text = "".join(pieces)
    before = "".join(before_stop(pieces, stops))
    assert before == trim_at_stop_string(text, stops)
    assert text.startswith(before)
    if found := [stop for stop in stops if stop in text]:
        assert any(text.startswith(before + stop) for stop in found)
        assert not any(stop in before for stop in found)
    else:
        assert before == text


def test_only_what_may_be_a_stop_string_is_held_back_and_all_pieces_are_consumed():
    assert list(before_stop(["xa", "b", "y"], ["abc"])) == ["x", "aby"]
    assert next(before_stop(iter(["hello "]), ["stop"])) == "hello "
    pieces = iter(["a", "b", "c"])
    assert list(before_stop(pieces, ["b"])) == ["a"]
    assert list(pieces) == []
