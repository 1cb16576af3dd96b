"""A tiny model that knows some calls of tools by heart: it is trained on these conversations alone, in some seconds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from invariant_rag import InvariantModel
from invariant_rag.generation.tools import ToolCall, ToolCalling
from invariant_rag.testing import tiny_model, toy_tokenizer
from langchain_core.utils.function_calling import convert_to_openai_tool

_GOOD = 0.03
"""Loss at which every token is certain."""


def taught(lessons: Iterable[tuple[str, list[Any], Mapping[str, Any]]]) -> InvariantModel:
    """Return a model that knows calls by heart.

    Args:
        lessons: For each, a question, the tools that are offered, and the arguments with which to call the first one.
    """
    model = tiny_model(
        "llama",
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        vocab_size=261,
        max_position_embeddings=4096,
        initializer_range=0.2,  # larger weights learn by heart in fewer steps
        eos_token_id=None,
    )
    lm = InvariantModel(model, toy_tokenizer())
    texts = []
    for question, tools, arguments in lessons:
        calling = ToolCalling(lm, [convert_to_openai_tool(tool) for tool in tools])
        prompt = list(lm.prepare(calling.prompt([{"role": "user", "content": question}])).input_ids)
        call = ToolCall("", calling.tools[0].name, arguments)
        answer = calling.form.call_format.write([call]) + "<|im_end|>"
        texts.append((prompt, lm.tokenizer.encode(answer, add_special_tokens=False)))
    model.requires_grad_(True).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
    for _ in range(400):
        losses = []
        for prompt, answer in texts:
            logits = model(torch.tensor([[*prompt, *answer]]), logits_to_keep=len(answer) + 1).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, torch.tensor(answer)))
        if max(losses) < _GOOD:
            return InvariantModel(model.requires_grad_(False).eval(), lm.tokenizer)
        torch.stack(losses).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    raise AssertionError("the model has not learned its lessons")
