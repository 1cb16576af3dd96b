"""Reasoning apart from the answer, variables of the chat template, and log-probabilities in OpenAI's shape."""

from __future__ import annotations

from typing import Any

import pytest
from invariant_rag.errors import InvalidPrompt

from langchain_invariant_rag import ChatInvariant

from .shared import QUESTION
from .tool_models import Writing, joined, now, said


def test_reasoning_stands_apart_from_the_answer(thinker: ChatInvariant) -> None:
    text = "It is early.\n</think>\n\nAt noon.<|im_end|>"
    for model, options in (
        (thinker.model_copy(update={"template_kwargs": {"enable_thinking": True}}), {}),
        (thinker, {"template_kwargs": {"enable_thinking": True}}),
    ):
        bound: Any = model.bind(eos_token_id=thinker.lm.tokenizer.convert_tokens_to_ids("<|im_end|>"), **options)
        answer = bound.invoke(QUESTION, logits_processor=[Writing(model.lm, text)])
        assert (answer.content, answer.additional_kwargs) == ("At noon.", {"reasoning_content": "It is early."})
        assert answer.content_blocks == [
            {"type": "reasoning", "reasoning": "It is early."},
            {"type": "text", "text": "At noon."},
        ]
        chunks = list(bound.stream(QUESTION, logits_processor=[Writing(model.lm, text)]))
        assert said(joined(chunks)) == said(answer)
        assert sum("reasoning_content" in chunk.additional_kwargs for chunk in chunks) > 3


def test_a_forced_call_skips_the_reasoning_that_the_template_opens(thinker: ChatInvariant) -> None:
    bound = thinker.bind_tools([now], tool_choice="any", template_kwargs={"enable_thinking": True})
    answer = bound.invoke(QUESTION, max_tokens=120)
    assert answer.tool_calls
    assert "reasoning_content" not in answer.additional_kwargs


def test_a_variable_that_the_template_does_not_know_is_an_error(thinker: ChatInvariant) -> None:
    with pytest.raises(InvalidPrompt, match="got enable_thnking, which do not occur in it"):
        thinker.invoke(QUESTION, template_kwargs={"enable_thnking": True})


def test_log_probabilities_come_in_the_shape_of_openai(thinker: ChatInvariant) -> None:
    model = thinker.model_copy(update={"logprobs": True, "max_tokens": 12})
    answer = model.invoke(QUESTION)
    listed = answer.response_metadata["logprobs"]["content"]
    messages = [{"role": "user", "content": QUESTION}]
    generation = thinker.lm.generate(thinker.lm.chat_prompt(messages=messages), max_new_tokens=12)
    assert [each["logprob"] for each in listed] == list(generation.logprobs)
    assert "".join(each["token"] for each in listed) == answer.content
    assert b"".join(bytes(each["bytes"]) for each in listed).decode() == answer.content
    assert all(each["logprob"] <= 0 and each["top_logprobs"] == [] for each in listed)
    assert len(listed) == answer.usage_metadata["output_tokens"] == 12
    assert said(joined(list(thinker.bind(logprobs=True, max_tokens=12).stream(QUESTION)))) == said(answer)
    assert "logprobs" not in thinker.invoke(QUESTION, max_tokens=12).response_metadata
    assert "logprobs" not in model.invoke(QUESTION, logprobs=False).response_metadata
    stop = str(answer.content)[4:6]
    stopped = model.invoke(QUESTION, stop=[stop])
    assert "".join(each["token"] for each in stopped.response_metadata["logprobs"]["content"]) == stopped.content
