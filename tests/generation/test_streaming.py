"""Streams: pieces that join to the text of `generate`, errors that reach the reader, and readers who leave early."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, StoppingCriteriaList

from invariant_rag import InvariantModel
from invariant_rag.errors import InvalidOption, TokenizerRequired, UnsupportedCombination
from invariant_rag.generation.answer_parsing import trim_at_stop_string, until_stop_string
from invariant_rag.generation.answers import AnswerDelta
from invariant_rag.generation.streaming import TextStream
from invariant_rag.testing import toy_tokenizer


def before_stop(pieces, stops):
    return (each.content for each in until_stop_string(map(AnswerDelta, pieces), stops))


BYTES = toy_tokenizer()


def metaspace() -> PreTrainedTokenizerFast:
    """Words begin with a mark for their space, which the decoder strips from the beginning of a text."""
    pieces = ["<unk>", "\n", "▁", "▁a", "▁▁b", "c", "é", "文", "."]
    backend = Tokenizer(models.WordLevel({piece: index for index, piece in enumerate(pieces)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", clean_up_tokenization_spaces=False)


METASPACE = metaspace()


def streamed(tokens: list[int], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    def generate(**options: object) -> None:
        streamer = options["streamer"]
        streamer.put(torch.tensor([[1, 2, 3]]))  # type: ignore[attr-defined]
        for token in tokens:
            streamer.put(torch.tensor([token]))  # type: ignore[attr-defined]
        streamer.end()  # type: ignore[attr-defined]

    return list(TextStream(generate, tokenizer, {}))


@settings(deadline=None)
@example([5] + [0] * 40 + [2, 5])  # a long run of special tokens, then a space
@given(st.lists(st.integers(0, 8), max_size=20) | st.lists(st.integers(0, 8), min_size=60, max_size=80))
def test_pieces_join_to_the_text_where_a_decoder_strips_white_space(tokens: list[int]) -> None:
    assert "".join(streamed(tokens, METASPACE)) == METASPACE.decode(tokens, skip_special_tokens=True)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_pieces_join_to_the_text_where_characters_are_several_tokens(text: str) -> None:
    tokens = BYTES(text, add_special_tokens=False)["input_ids"]
    pieces = streamed(tokens, BYTES)
    assert "".join(pieces) == BYTES.decode(tokens, skip_special_tokens=True)
    assert all("\ufffd" not in piece for piece in pieces) or "\ufffd" in text


@settings(deadline=None)
@given(st.lists(st.integers(0, 260), max_size=20) | st.lists(st.integers(0, 260), min_size=60, max_size=80))
def test_pieces_join_to_the_text_of_any_bytes(tokens: list[int]) -> None:
    assert "".join(streamed(tokens, BYTES)) == BYTES.decode(tokens, skip_special_tokens=True)


def test_pieces_come_one_by_one_and_special_tokens_do_not() -> None:
    assert streamed(BYTES("<bos>ab<eos>c", add_special_tokens=False)["input_ids"], BYTES) == ["a", "b", "c"]


def test_a_stream_ends_with_its_generation(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = InvariantModel(chat_llama, tokenizer)
    prompt = lm.chat_prompt("Why?", ["one", "two"])
    stream = lm.stream(prompt, max_new_tokens=8)
    next(stream)
    assert stream.generation is None
    text = lm.generate(prompt, max_new_tokens=8).text
    rest = "".join(stream)
    assert text.endswith(rest)
    assert stream.generation == lm.generate(prompt, max_new_tokens=8)


def test_a_stream_that_is_dropped_ends_the_generation(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = InvariantModel(chat_llama, tokenizer)
    for _ in lm.stream(lm.chat_prompt("Why?", ["one"]), max_new_tokens=200):
        break
    assert not [each for each in threading.enumerate() if each.name == "invariant-rag-stream"]


def test_an_error_while_generating_reaches_the_reader(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    lm = InvariantModel(chat_llama, tokenizer)
    prompt = lm.chat_prompt("Why?", ["one"])
    with pytest.raises(InvalidOption, match="beam"):
        list(lm.stream(prompt, num_beams=2))
    with pytest.raises(UnsupportedCombination, match="one sequence to stream, got 2"):
        list(lm.stream(prompt, do_sample=True, num_return_sequences=2))


def test_a_reader_who_leaves_ends_the_generation() -> None:
    ended = []

    def generate(streamer: object, stopping_criteria: StoppingCriteriaList) -> None:
        deadline = time.monotonic() + 5
        streamer.put(torch.tensor([[1]]))  # type: ignore[attr-defined]
        streamer.put(torch.tensor([5]))  # type: ignore[attr-defined]
        while not stopping_criteria(torch.tensor([[1]]), torch.zeros(1, 9)).all():
            assert time.monotonic() < deadline
        ended.append(True)

    stream = TextStream(generate, METASPACE, {})
    assert next(stream) == "c"
    stream.close()
    assert ended, "closing waits until the generation is over"
    assert not [each for each in threading.enumerate() if each.name == "invariant-rag-stream"]


def test_a_stream_without_a_tokenizer_is_refused_at_once(chat_llama: PreTrainedModel) -> None:
    with pytest.raises(TokenizerRequired):
        InvariantModel(chat_llama).stream(None)  # type: ignore[arg-type]


@settings(deadline=None)
@example(["a", "a", "ab"], ["aab"])  # a beginning within a beginning
@example(["ab", "c"], ["bd", "abc"])  # two may have begun
@example(["b", "aa", "b"], ["a", "baab"])  # one is over while another, which began before it, is not
@example(["b", "aa"], ["a", "baab"])
@given(st.lists(st.text("ab", max_size=4), max_size=6), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3))
def test_pieces_up_to_a_stop_string_join_to_the_text_before_it(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    before = "".join(before_stop(pieces, stops))
    assert before == trim_at_stop_string(text, stops)
    assert text.startswith(before)
    if found := [stop for stop in stops if stop in text]:
        assert any(text.startswith(before + stop) for stop in found)
        assert not any(stop in before for stop in found)
    else:
        assert before == text


def test_only_what_may_be_a_stop_string_is_held_back() -> None:
    assert list(before_stop(["xa", "b", "y"], ["abc"])) == ["x", "aby"]
    assert next(before_stop(iter(["hello "]), ["stop"])) == "hello "


def test_a_stream_is_read_to_its_end_behind_a_stop_string() -> None:
    pieces = iter(["a", "b", "c"])
    assert list(before_stop(pieces, ["b"])) == ["a"]
    assert list(pieces) == []
