"""Chat templates of several models' manners, for tests of tool calling."""

from pathlib import Path

from tokenizers import AddedToken

from invariant_rag.testing import toy_tokenizer

MANNERS = {
    "hermes": "As Qwen's: markers around JSON objects, reasoning, and a variable.",
    "list": "As Mistral's: one special token before a list, and ids of nine characters.",
    "bare": "As Llama's: the answer is one call, without a marker.",
    "named": "As DeepSeek's: the name stands before the JSON, between special tokens.",
    "strict": "As Gemma's: two roles in turn, and nothing about tools.",
}
TEMPLATES = Path(__file__).parent / "templates"
ALL = {**{kind: (TEMPLATES / f"{kind}.jinja").read_text(encoding="utf-8") for kind in MANNERS}, "chatml": None}
_MARKERS = {"hermes": ("<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_response>", "</tool_response>")}
_SPECIAL = {
    "list": ("[TOOL_CALLS]", "[RESULTS]"),
    "named": ("<|calls|>", "<|call|>", "<|sep|>", "<|/call|>", "<|/calls|>"),
}


def templated(kind):
    """Return the toy tokenizer with the chat template and the tokens of a model's manner."""
    tokenizer = toy_tokenizer()
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in _MARKERS.get(kind, ())])
    tokenizer.add_tokens([AddedToken(n, special=True) for n in _SPECIAL.get(kind, ())], special_tokens=True)
    tokenizer.chat_template = ALL[kind] or tokenizer.chat_template
    return tokenizer
