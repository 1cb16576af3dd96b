"""Small tokenizers in the manners of many models: their algorithms, added tokens and chat templates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

_CORPUS = (
    "The ferry to Ostra leaves the harbour at noon; in winter it does not sail.",
    "system user assistant tool im_start im_end start_of_turn end_of_turn INST SYS think <| |> [ ] </ > model",
    "You are a helpful assistant. Question: Who built the mill of Brenn? Answer: Ada Kolm, in 1872.",
)


@dataclass(frozen=True)
class TokenizerLayout:
    """A tokenizer in the manner of a model family.

    Attributes:
        build: Makes the tokenizer.
        control: Names of its control tokens: what only its template may write.
        ordinary: Names of added tokens that are no control tokens.
        lossless: Whether every text can be decoded from its ids, and from those of a question.
    """

    build: Callable[[], PreTrainedTokenizerBase]
    control: tuple[str, ...]
    ordinary: tuple[str, ...] = ()
    lossless: bool = True


# --- chat templates ---


def _template(name: str) -> str:
    """Return the chat template in the manner of a model family."""
    return (Path(__file__).parent / "layout_templates" / f"{name}.jinja").read_text(encoding="utf-8")


def turns(start: str, end: str, *, opening: str = "", names: str = "message['role']") -> str:
    """A template of turns; `start` may hold ROLE, which is put in by the template's program."""
    parts = start.split("ROLE")
    begin = f"{{{{ {parts[0]!r} + role + {parts[1]!r} }}}}" if len(parts) > 1 else start
    finish = end.split("ROLE")
    stop = f"{{{{ {finish[0]!r} + role + {finish[1]!r} }}}}" if len(finish) > 1 else end
    return (
        f"{opening}{{% for message in messages %}}{{% set role = {names} %}}{begin}{{{{ message['content'] }}}}{stop}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{% set role = 'assistant' %}}{begin}{{% endif %}}"
    )


# --- algorithms ---


def _byte_level(normalizer: normalizers.Normalizer | None = None, *, ignore_merges: bool = False) -> Tokenizer:
    """Byte-level BPE, as of GPT-2, Llama 3 and Qwen."""
    backend = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator(
        _CORPUS, trainers.BpeTrainer(vocab_size=340, initial_alphabet=alphabet, show_progress=False)
    )
    if normalizer is not None:
        backend.normalizer = normalizer
    return backend


def _byte_fallback(control: Sequence[str], *, legacy: bool = True, unigram: bool = False) -> Tokenizer:
    """SentencePiece with bytes, as of Llama 2, Mistral and Gemma: control tokens are pieces of the vocabulary."""
    letters = ["\u2581", *map(chr, range(33, 127))]
    words = ["\u2581s", "\u2581u", "er", "<|", "|>", "</", "in", "th", "\u2581the"]
    names = ["<unk>", *dict.fromkeys(control), *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *words]
    if unigram:
        scores = [(name, 0.0 if name in control else -9.0 if name.startswith("<0x") else -4.0) for name in names]
        backend = Tokenizer(models.Unigram(scores, 0, byte_fallback=True))
    else:
        pairs = [(each[0], each[1]) for each in words if len(each) == 2]
        backend = Tokenizer(
            models.BPE(
                {name: index for index, name in enumerate(names)},
                [*pairs, ("\u2581", "the")] if "the" in names else pairs,
                unk_token="<unk>",  # noqa: S106
                byte_fallback=True,
                fuse_unk=True,
            )
        )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if legacy:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    backend.decoder = decoders.Sequence(steps)
    return backend


def _word_piece(control: Sequence[str]) -> Tokenizer:
    """WordPiece in lower case, as of BERT; control tokens are words of the vocabulary."""
    letters = [*map(chr, range(33, 127))]
    names = ["[UNK]", *dict.fromkeys(control), *letters, *(f"##{each}" for each in letters), "user", "system", "##er"]
    names = list(dict.fromkeys(names))
    backend = Tokenizer(models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]"))  # noqa: S106
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece()
    return backend


# --- putting them together ---


def _layout(
    template: str,
    special: Sequence[str] = (),
    plain: Sequence[str] = (),
    *,
    algorithm: Callable[[], Tokenizer] = _byte_level,
    ordinary: Sequence[str] = (),
    lossless: bool = True,
    normalized: bool = False,
    stripping: bool = False,
    single_word: bool = False,
    **roles: str,
) -> TokenizerLayout:
    """Return a layout; with `stripping`, tokens take the white space on both sides of them."""
    flags = {"normalized": normalized, "lstrip": stripping, "rstrip": stripping, "single_word": single_word}

    def build() -> PreTrainedTokenizerBase:
        backend = algorithm()
        backend.add_special_tokens([AddedToken(name, special=True, **flags) for name in special])
        backend.add_tokens([AddedToken(name, special=False, **flags) for name in (*plain, *ordinary)])
        options = {"chat_template": template or None, "clean_up_tokenization_spaces": False, **roles}
        return PreTrainedTokenizerFast(tokenizer_object=backend, **options)

    return TokenizerLayout(build, (*special, *plain), tuple(ordinary), lossless)


_LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
_DEEPSEEK = (
    "<\uff5cbegin\u2581of\u2581sentence\uff5c>",
    "<\uff5cUser\uff5c>",
    "<\uff5cAssistant\uff5c>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
)
_CLS = "{% for message in messages %}[CLS] {{ message.content }} [SEP] {% endfor %}"
_CHATML = turns("<|im_start|>ROLE\n", "<|im_end|>\n")
_ROLES = ("system", "user", "assistant", "tool")
_IM = ("<|im_start|>", "<|im_end|>")
_THINK = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_SPM = ("<s>", "</s>")
_SPM_ROLES: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
_GEMMA = ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")
_GEMMA_ROLES: dict[str, Any] = {"bos_token": "<bos>", "eos_token": "<eos>"}


def _gemma(**options: bool) -> TokenizerLayout:
    pieces = partial(_byte_fallback, _GEMMA, legacy=False, **options)
    return _layout(_template("gemma"), _GEMMA[:2], _GEMMA[2:], algorithm=pieces, **_GEMMA_ROLES)


def _joined(left: str, right: str) -> tuple[str, ...]:
    return tuple(left + role + right for role in _ROLES)


LAYOUTS: dict[str, TokenizerLayout] = {
    "chatml": _layout(_CHATML, _IM, ordinary=("<table>", "Ostra")),
    "chatml, not flagged": _layout(_CHATML, (), _IM, ordinary=("<table>",)),
    "chatml, NFKC, normalized": _layout(
        _CHATML, (), _IM, algorithm=lambda: _byte_level(normalizers.NFKC()), normalized=True, lossless=False
    ),
    "chatml, lower case, normalized": _layout(
        _CHATML, (), _IM, algorithm=lambda: _byte_level(normalizers.Lowercase()), normalized=True, lossless=False
    ),
    "chatml, stripping": _layout(_CHATML, (), _IM, stripping=True),
    "chatml, names put together": _layout(
        _CHATML.replace("<|im_end|>", "{{ '<|' + 'im_end|>' }}"), (), _IM, ordinary=("|", "<", "{{")
    ),
    "qwen3": _layout(_template("qwen3"), _IM, _THINK, algorithm=lambda: _byte_level(normalizers.NFC())),
    "llama2": _layout(
        _template("llama2"),
        _SPM,
        ("[INST]", "[/INST]", "<<SYS>>", "<</SYS>>"),
        algorithm=lambda: _byte_fallback(_SPM),
        **_SPM_ROLES,
    ),
    "llama3": _layout(
        turns("<|start_header_id|>ROLE<|end_header_id|>\n\n", "<|eot_id|>", opening="{{ bos_token }}"),
        _LLAMA3,
        algorithm=lambda: _byte_level(ignore_merges=True),
        bos_token="<|begin_of_text|>",  # noqa: S106
        eos_token="<|eot_id|>",  # noqa: S106
    ),
    "gemma": _gemma(),
    "gemma, unigram": _gemma(unigram=True),
    "unigram, names begin with a space": _layout(
        turns(" <ROLE>", ""),
        _joined("\u2581<", ">"),
        algorithm=lambda: _byte_fallback(_joined("\u2581<", ">"), legacy=False, unigram=True),
    ),
    "no template, start_of_turn": _layout("", (), ("<start_of_turn>", "<end_of_turn>", "[INST]")),
    "mistral": _layout(
        _template("mistral"),
        (*_SPM, "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ("[INST]", "[/INST]"),
        algorithm=lambda: _byte_fallback((*_SPM, "[INST]", "[/INST]"), legacy=False),
        **_SPM_ROLES,
    ),
    "phi": _layout(turns("<|ROLE|>\n", "<|end|>\n"), (), (*_joined("<|", "|>"), "<|end|>"), stripping=True),
    "zephyr": _layout(
        turns("<|ROLE|>\n", "</s>\n"),
        _SPM,
        _joined("<|", "|>"),
        algorithm=lambda: _byte_fallback(_SPM),
        eos_token="</s>",  # noqa: S106
    ),
    "deepseek": _layout(
        _template("deepseek"),
        (_DEEPSEEK[0], _DEEPSEEK[3]),
        (*_DEEPSEEK[1:3], "</think>"),
        bos_token=_DEEPSEEK[0],
        eos_token=_DEEPSEEK[3],
    ),
    "glm": _layout(
        "[gMASK]<sop>" + turns("<|ROLE|>\n", ""),
        ("[gMASK]", "<sop>"),
        (*_joined("<|", "|>"), "<|observation|>"),
    ),
    "joined bars": _layout(
        turns("[|ROLE|]", "[|endofturn|]\n"), (), (*_joined("[|", "|]"), "[|endofturn|]", "[|observer|]")
    ),
    "joined angles": _layout(
        turns("<ROLE>", "</ROLE>"), (), (*_joined("<", ">"), *_joined("</", ">")), ordinary=("<table>",)
    ),
    "same sign on both sides": _layout(turns("@@ROLE@@", ""), (), _joined("@@", "@@")),
    "joined, overlapping": _layout(
        turns("<<ROLE>>", "<<end>>"), (), (*_joined("<<", ">>"), *_joined("<", ">"), "<<end>>")
    ),
    "words with a colon": _layout(
        "{% for message in messages %}{{ message.role | upper }}: {{ message.content }}\n{% endfor %}ASSISTANT:",
        (),
        ("USER:", "ASSISTANT:", "SYSTEM:"),
    ),
    "headings": _layout(
        turns("### ROLE:\n", "\n\n", names="message.role | capitalize").replace("'assistant'", "'Assistant'"),
        (),
        ("### User:", "### Assistant:", "### System:"),
    ),
    "bert": _layout(
        _CLS,
        ("[CLS]", "[SEP]"),
        algorithm=lambda: _word_piece(("[CLS]", "[SEP]")),
        lossless=False,
        unk_token="[UNK]",  # noqa: S106
    ),
    "bert, normalized": _layout(
        _CLS,
        ("[CLS]", "[SEP]"),
        algorithm=lambda: _word_piece(("[cls]", "[sep]")),
        lossless=False,
        normalized=True,
        unk_token="[UNK]",  # noqa: S106
    ),
    "whole words only": _layout(turns("<ROLE> ", " <END>\n"), (), (*_joined("<", ">"), "<END>"), single_word=True),
    "words leave the text": _layout(
        _template("nemotron"), ("<SPECIAL_10>", "<SPECIAL_11>", "<SPECIAL_12>"), lossless=False
    ),
    "thoughts leave the text": _layout(_template("without_thoughts"), _IM, lossless=False),
    "same sign on both sides, trimmed": _layout(
        turns("@@ROLE@@", "").replace("message['content']", "message['content'] | trim"), (), _joined("@@", "@@")
    ),
    "xml": _layout(
        _template("xml_tools"),
        (),
        (*_joined("<", ">"), *_joined("</", ">"), "[system]", "<tool_call>", "</tool_call>"),
    ),
    "written in capitals": _layout(
        turns("<|IM_START|>ROLE\n", "<|IM_END|>\n"),
        (),
        _IM,
        algorithm=lambda: _byte_level(normalizers.Lowercase()),
        normalized=True,
        lossless=False,
    ),
    "content beside a normalized name": _layout(
        turns("<|ROLE|>", "<|end|>"),
        (),
        (*_joined("<|", "|>"), "<|end|>"),
        algorithm=lambda: _byte_level(normalizers.NFC()),
        normalized=True,
        lossless=False,
    ),
    "one character": _layout(turns("\u2402ROLE\u2403", "\u2404"), ("\u2402", "\u2403", "\u2404"), ordinary=("[", "a")),
}
"""Layouts by name."""


@cache
def layout_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a layout. It is shared: leave it as it is."""
    return LAYOUTS[name].build()
