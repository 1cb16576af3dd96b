"""Chat templates of several models' manners, for tests of tool calling."""

from __future__ import annotations

from tokenizers import AddedToken

from invariant_rag.testing import toy_tokenizer

HERMES = """{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}# Tools
<tools>{% for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools><|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == 'user' %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{%- elif message.role == 'assistant' %}
<|im_start|>assistant
{%- if message.reasoning_content %}
{{ '<think>\\n' + message.reasoning_content + '\\n</think>\\n' }}{%- endif %}
{%- if message.content %}
{{ message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{%- endfor %}<|im_end|>
{%- elif message.role == 'tool' %}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{%- endif %}{%- endfor %}{%- if add_generation_prompt %}
<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking %}<think>
{% endif %}{%- endif %}"""
"""As Qwen's: markers around JSON objects, reasoning, and a variable."""

LIST = """{% for message in messages %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}\
{% if message.role == 'tool' %}[RESULTS]{"content": {{ message.content | tojson }}, \
"call_id": "{{ message.tool_call_id }}"}[/RESULTS]\
{% elif message.tool_calls %}[TOOL_CALLS] [{% for call in message.tool_calls %}\
{% if call.id | length != 9 %}{{ raise_exception('Tool call IDs have length 9') }}{% endif %}\
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, "id": "{{ call.id }}"}\
{% if not loop.last %}, {% endif %}{% endfor %}]<eos>\
{% elif message.role == 'assistant' %}{{ message.content }}<eos>\
{% else %}[INST]{{ message.content }}[/INST]{% endif %}{% endfor %}"""
"""As Mistral's: one special token before a list, and ids of nine characters."""

BARE = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{% if message.tool_calls %}{% if message.tool_calls | length > 1 %}\
{{ raise_exception('one call at a time') }}{% endif %}{% set call = message.tool_calls[0].function %}\
{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}\
{% else %}{{ message.content }}{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Llama's: the answer is one call, without a marker."""

NAMED = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if loop.first and tools %}{% for tool in tools %}{{ tool | tojson }}
{% endfor %}{% endif %}{{ message.content }}{% if message.tool_calls %}<|calls|>{% for call in message.tool_calls %}\
<|call|>function<|sep|>{{ call.function.name }}
```json
{{ call.function.arguments | tojson }}
```<|/call|>{% if not loop.last %}
{% endif %}{% endfor %}<|/calls|>{% endif %}<|im_end|>{% endfor %}\
{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As DeepSeek's: the name stands before the JSON, between special tokens."""

STRICT = """{% for message in messages %}{% if message.role not in ('user', 'assistant') or \
(message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""As Gemma's: two roles in turn, and nothing about tools."""

ALL = {"hermes": HERMES, "list": LIST, "bare": BARE, "named": NAMED, "strict": STRICT, "chatml": None}

_MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>"),
    "list": (),
    "named": (),
}
_SPECIAL = {
    "list": ("[TOOL_CALLS]", "[RESULTS]"),
    "named": ("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"),
}


def templated(kind):
    """Return the toy tokenizer with the chat template and the tokens of a model's manner."""
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in _MARKERS.get(kind, ())])
    tokenizer.add_tokens([AddedToken(n, special=True) for n in _SPECIAL.get(kind, ())], special_tokens=True)
    if ALL[kind] is not None:
        tokenizer.chat_template = ALL[kind]
    return tokenizer
