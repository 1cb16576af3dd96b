"""A tiny model whose chat template knows tools, and what makes it write a given text."""

from __future__ import annotations

from typing import Any

import torch
from invariant_rag import InvariantModel
from invariant_rag.testing import toy_tokenizer
from transformers import LogitsProcessor, PreTrainedModel

TEMPLATE = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}{%- if message.tool_call_id %} ({{ message.tool_call_id }}){% endif %}<|im_end|>
{% endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{%- endif %}{# </think> #}"""
"""As many models have it: tools, calls, results in a role of their own, reasoning, and a variable."""


def with_tools(weights: PreTrainedModel) -> InvariantModel:
    """Return a model with this template."""
    tokenizer = toy_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return InvariantModel(weights, tokenizer)


class Writing(LogitsProcessor):
    """Makes a model write a text, as far as it may, and nothing more where `only`; it serves one call."""

    def __init__(self, lm: InvariantModel, text: str, *, only: bool = False) -> None:
        end = [lm.tokenizer.convert_tokens_to_ids("<eos>")] if only else []
        self.tokens = [*lm.tokenizer.encode(text, add_special_tokens=False), *end]
        self.start: int | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.start = input_ids.shape[1] if self.start is None else self.start
        place = input_ids.shape[1] - self.start
        if place < len(self.tokens):
            scores = scores.clone()
            scores[0, self.tokens[place]] = scores.max() + 100
        return scores


def written(lm: InvariantModel, text: str) -> dict[str, Any]:
    """Return keywords with which one call writes a text and nothing more."""
    return {"logits_processor": [Writing(lm, text, only=True)], "eos_token_id": lm.tokenizer.eos_token_id}
