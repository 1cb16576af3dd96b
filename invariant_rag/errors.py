"""Exceptions of the library. A message says what was expected and what was given; the hint says what to do.

Errors of arguments and files keep the built-in class that Python users expect. Errors of a call (its prompt, segments,
context window and answer) are no `ValueError` and no `TypeError`: frameworks catch those, and answer "Empty Response".
"""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, ClassVar

from invariant_rag.shown import clean, shortened, shown


class InvariantRAGError(Exception):
    """Base class of every error that the library raises.

    Args:
        message: What was expected and what was given. Long ones are cut, and control characters replaced.
        hint: What to do; default: the `hint` of the class. Added to the traceback as a note (PEP 678).
    """

    hint: str = ""
    param: str | None = None
    """The field of a request that is wrong, as a server names it; None in a process of its own."""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(clean(shortened(message)))
        self.hint = type(self).hint if hint is None else clean(hint)
        if self.hint:
            self.add_note(self.hint)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default calls the constructor with the message, but some subclasses take other arguments.
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]


class OrderWarning(InvariantRAGError, UserWarning):
    """An answer may depend on the order in which documents are listed. The message says why, the hint what to do.

    It is issued as a warning, and raised as an error by models with `strict=True`.
    """

    hint = "Pass the documents as segments."


class TokenWarning(InvariantRAGError, UserWarning):
    """Names of a tokenizer look like those of roles, and text from outside can make these tokens."""

    hint = "Set tokenizer.chat_template, or flag them as special: see `invariant-rag models --check-tokens MODEL`."


class NoiseWarning(InvariantRAGError, UserWarning):
    """Answers of a system change by themselves, so that nothing can be said of the order."""

    hint = "Remove the randomness of the system (temperature 0, a fixed seed), or audit it with more questions."


class ToyModelWarning(InvariantRAGError, UserWarning):
    """Documents are to be answered by the embedded toy model, whose answers to them mean nothing."""

    hint = "Name a model: Qwen/Qwen2.5-7B-Instruct, say; `--model`, `serve MODEL`, or `model=` in Python."

    def __init__(self) -> None:
        super().__init__(
            "answered by the embedded toy model, which knows only made-up places; its answers to your documents mean "
            f"nothing. {self.hint}"
        )


class FieldWarning(InvariantRAGError, UserWarning):
    """A question of an audit has fields that mean nothing there."""

    hint = "Used are question, segments, answers, gold, rubrics and id, and their names in ragas and promptfoo."


class CacheWarning(InvariantRAGError, UserWarning):
    """A key-value cache is not used, since what the model computes now may differ from what is stored."""

    hint = "Remove the hooks while the cache is in use, or use with_cache(None)."


class UnknownName(InvariantRAGError, ValueError):
    """A name that is not in a registry."""

    hint = "Names are matched as they are written."
    _COMMANDS: ClassVar[dict[str, str]] = {
        "method": "invariant-rag methods",
        "ordering": "invariant-rag orderings",
        "benchmark": "invariant-rag bench list",
        "published table": "invariant-rag reproduce",
    }

    def __init__(self, kind: str, name: object, choices: Iterable[str], *, hint: str | None = None) -> None:
        choices = sorted(choices)
        listed = ", ".join(map(repr, choices))
        near = get_close_matches(name.lower(), choices, 1) if isinstance(name, str) else []
        guess = f"; did you mean {near[0]!r}?" if near else ""
        if kind in self._COMMANDS:
            hint = f"{self.hint} `{self._COMMANDS[kind]}` tells what each is."
        super().__init__(f"unknown {kind} {shown(name)}; choose from {listed}{guess}", hint=hint)


class UnknownParameter(InvariantRAGError):
    """Keywords that a model of an integration does not have; the message names similar ones among those `known`.

    >>> print(UnknownParameter("ChatInvariant", ["model_id"], ["model", "model_name", "seed"]))
    ChatInvariant has no parameter 'model_id'; did you mean 'model' or 'model_name'?
    """

    hint = "Keywords of transformers' `generate` go into `generation_kwargs`, of `from_pretrained` into `model_kwargs`."

    def __init__(self, owner: str, unknown: Iterable[str], known: Iterable[str], *, hint: str | None = None) -> None:
        names = sorted(known)
        sentences = []
        for name in unknown:
            near = " or ".join(map(repr, get_close_matches(name, names, n=2)))
            sentences.append(f"{owner} has no parameter {name!r}" + (f"; did you mean {near}?" if near else ""))
        super().__init__("\n".join(sentences), hint=hint)


class InvalidChoice(InvariantRAGError, ValueError):
    """An argument whose value is not supported."""

    hint = "The message says what was expected."


class InvalidOption(InvariantRAGError):
    """A keyword of `generate` that does not exist, or whose value is of another kind or out of bounds."""

    hint = "The keywords are those of transformers' generate. Leave one away for its default."


class UnsupportedModel(InvariantRAGError):
    """A model that cannot be run order-invariantly; the message says why."""

    hint = "Run `invariant-rag models` for the families that were probed and what each answered."


class UnsupportedCombination(InvariantRAGError):
    """Two options that cannot be combined."""

    hint = "Change one of the two, and leave the other."


class ImmutableModel(InvariantRAGError, AttributeError):
    """An attribute of an `InvariantModel` was assigned or deleted."""

    hint = (
        "Make another one: lm.with_method(...), lm.with_cache(cache), lm.with_routing(alpha=..., plain_order=...) or "
        "InvariantModel(model, tokenizer)."
    )

    def __init__(self, attribute: str) -> None:
        super().__init__(f"expected {attribute!r} to be neither assigned nor deleted: a wrapper never changes")


class ImmutableObject(InvariantRAGError, AttributeError):
    """An attribute of an ordering or a method was assigned or deleted, after it was built."""

    hint = "Build another one with other arguments."

    def __init__(self, kind: str, attribute: str) -> None:
        super().__init__(f"expected {attribute!r} of {kind} to be neither assigned nor deleted: it never changes")


class ModelNotFound(InvariantRAGError, OSError):
    """No causal LM was found under a name or in a folder."""

    hint = "Give a Hugging Face id (and a network), a folder with a saved model, or no name for the embedded model."


class OutOfMemory(InvariantRAGError, RuntimeError):
    """The memory of a device does not suffice."""

    hint = (
        "Try --dtype bfloat16, a smaller model, fewer or shorter chunks (--k 5), or the CPU: --device-map cpu; in "
        'Python, dtype="bfloat16" and device_map="cpu".'
    )


class InvalidSegment(InvariantRAGError):
    """A value that cannot be converted to a segment."""

    hint = "A segment is a str, a Segment, or a sequence of token ids."


class InvalidPrompt(InvariantRAGError):
    """A prompt or a message that cannot be built or tokenized, such as a prompt without any token."""

    hint = "A prompt is text (or token ids), a set of segments, and text; messages are mappings of role and content."


class InvalidTool(InvariantRAGError):
    """A tool, a call of one, or a choice among tools that cannot be used."""

    hint = "A tool is a Tool, or {'type': 'function', 'function': {'name', 'description', 'parameters'}}."


class ContextOverflow(InvariantRAGError):
    """A prompt that does not fit into the context window; the message gives its tokens and the limit."""

    hint = (
        'Retrieve fewer or shorter chunks (--k 5), lower max_new_tokens, or choose overflow="drop_last" (--overflow '
        'drop_last: drops the last segments of the ordering) or "trim_segments" (shortens every long segment alike).'
    )


class TokenizerRequired(InvariantRAGError):
    """Text for a model that was wrapped without a tokenizer."""

    hint = "Pass `tokenizer=` to InvariantModel, or build the Prompt from token ids."


class RetrievalError(InvariantRAGError):
    """Documents that could not be read, chunked, indexed or searched."""

    hint = "Give files or folders of .txt, .md, .jsonl or .pdf, and ask for at least one chunk."


class DocumentSkipped(InvariantRAGError, UserWarning):
    """A document that could not be read, so that the index is without it. Issued as a warning that names the file."""

    hint = "Repair, convert or remove it; with strict=True (--strict), a document that cannot be read is an error."


class InvalidQuestion(InvariantRAGError, ValueError):
    """An audit question that cannot be parsed or cannot be asked."""

    hint = 'A line of a .jsonl file is {"question": "...", "segments": ["...", ...], "answers": ["...", ...]}.'


class AuditFailed(InvariantRAGError):
    """The system under audit raised an error, or there are too few answers for a measurement."""

    hint = "What was answered is kept where the audit has a folder: continue it with resume (--resume FOLDER)."


class UnusableFile(InvariantRAGError, OSError):
    """A file or folder of output that cannot be created, read, written or locked."""

    hint = "Look at its permissions and at the space on its disk, or choose another folder with --out."


class DamagedEntry(InvariantRAGError, ValueError):
    """A file of a key-value cache is no entry, or not the one that its name says."""

    hint = "Remove the file; its keys and values are computed again."


class FileInUse(UnusableFile):
    """A file that another process is writing."""

    hint = "Wait until the other process has ended and start again, or write elsewhere with --out."


class RemoteError(InvariantRAGError):
    """A server that cannot be reached, or that refuses a request for a reason that no other error names."""

    hint = "Look at base_url and api_key, and at the server: GET /ready says whether it takes requests."


class InvalidSchema(InvariantRAGError):
    """A schema that decoding cannot follow token by token."""

    hint = "Give a pydantic class, or a JSON schema of an object."


class IncompleteObject(InvariantRAGError):
    """An answer that should be JSON ended before it was complete."""

    hint = "Give it more tokens (max_new_tokens), and leave away what ends a generation early, such as max_time."


class InvalidObject(InvariantRAGError):
    """A complete JSON answer that its schema or class rejects: a rule that no grammar of xgrammar expresses."""

    hint = "Say it with a pattern, an enum or bounds: what only a validator knows is checked afterwards."


class ExtraRequired(InvariantRAGError, ImportError):
    """A package that an optional feature needs is not installed; an extra of a distribution installs it.

    >>> print(ExtraRequired("langchain", "agents", distribution="langchain-invariant-rag"))
    langchain is not installed; run `pip install "langchain-invariant-rag[agents]"`
    """

    hint = "Install the extra that the message names."

    def __init__(
        self, package: str, extra: str, *, distribution: str = "invariant-rag", hint: str | None = None
    ) -> None:
        super().__init__(f'{package} is not installed; run `pip install "{distribution}[{extra}]"`', hint=hint)
