"""Chat templates in the manners of many models, for tokenizer layouts."""

from __future__ import annotations

_PROMPT = "{% if add_generation_prompt %}"


def turns(start: str, end: str, *, opening: str = "", names: str = "message['role']") -> str:
    """A template of turns; `start` may hold ROLE, which is put in by the template's program."""
    parts = start.split("ROLE")
    begin = f"{{{{ {parts[0]!r} + role + {parts[1]!r} }}}}" if len(parts) > 1 else start
    finish = end.split("ROLE")
    stop = f"{{{{ {finish[0]!r} + role + {finish[1]!r} }}}}" if len(finish) > 1 else end
    return (
        f"{opening}{{% for message in messages %}}{{% set role = {names} %}}{begin}{{{{ message['content'] }}}}{stop}"
        f"{{% endfor %}}{_PROMPT}{{% set role = 'assistant' %}}{begin}{{% endif %}}"
    )


CHATML = turns("<|im_start|>ROLE\n", "<|im_end|>\n")
QWEN3 = """{%- for message in messages %}{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{% set content = message.content or '' %}{% if message.role == 'assistant' %}\
{% set thought = message.reasoning_content if message.reasoning_content is string else '' %}\
{% if not thought and '</think>' in content %}\
{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}\
{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}\
{% if thought and loop.last %}<think>
{{ thought }}
</think>

{% endif %}{{ content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}{% else %}{{ content }}{% endif %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
LLAMA2 = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}<<SYS>>
{{ message.content }}
<</SYS>>

{% elif message.role == 'assistant' %}{{ message.content }}</s><s>{% else %}[INST] {{ message.content | trim }} [/INST]\
{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}<start_of_turn>\
{{ 'model' if message.role == 'assistant' else message.role }}
{{ message.content | trim }}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
MISTRAL = """{{ bos_token }}{% for message in messages %}{% if message.role == 'tool' %}[TOOL_RESULTS]\
{{ message.content }}[/TOOL_RESULTS]{% elif message.tool_calls %}[TOOL_CALLS]\
{{ message.tool_calls[0].function | tojson }}\
{{ eos_token }}{% elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{% else %}[INST]\
{{ message.content }}[/INST]{% endif %}{% endfor %}"""

DEEPSEEK = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}<\uff5cUser\uff5c>\
{{ message.content }}\
{% elif message.role == 'assistant' %}<\uff5cAssistant\uff5c>{{ message.content.split('</think>')[-1] }}{{ eos_token }}\
{% else %}{{ message.content }}{% endif %}{% endfor %}\
{% if add_generation_prompt %}<\uff5cAssistant\uff5c>{% endif %}"""

NEMOTRON = """<SPECIAL_10>System
{% for message in messages %}{% set content = message.content.replace('/think', '').replace('/no_think', '').strip() %}\
{% if message.role == 'system' %}{{ content }}
{% elif message.role == 'assistant' %}<SPECIAL_11>Assistant
{{ content }}
<SPECIAL_12>
{% else %}<SPECIAL_11>User
{{ content }}
{% endif %}{% endfor %}{% if add_generation_prompt %}<SPECIAL_11>Assistant
{% endif %}"""
WITHOUT_THOUGHTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if '</think>' in message.content %}\
{{ message.content.split('<think>')[0] + message.content.split('</think>')[-1] }}{% else %}{{ message.content }}\
{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
XML_TOOLS = """{% if tools %}[system]{% for tool in tools %}<{{ tool.function.name }}>{{ tool.function.description }}\
{% for name, schema in tool.function.parameters.properties.items() %}<{{ name }}>{{ schema.description }}</{{ name }}>\
{% endfor %}</{{ tool.function.name }}>{% endfor %}{% endif %}{% for message in messages %}<{{ message.role }}>
{% if message.name %}[{{ message.name }}]{% endif %}{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call><{{ call.function.name }}>{% for name, value in call.function.arguments.items() %}\
<{{ name }}>{{ value }}</{{ name }}>{% endfor %}</{{ call.function.name }}></tool_call>{% endfor %}</{{ message.role }}>
{% endfor %}{% if add_generation_prompt %}<assistant>
{% endif %}"""
