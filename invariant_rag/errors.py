"""Every exception of the library. Each says what was expected, what came, and what to do."""

from __future__ import annotations

import copyreg
from collections.abc import Iterable
from typing import Any, ClassVar


class InvariantRAGError(Exception):
    """Base of every error that the library raises.

    Args:
        message: What was expected and what came.
        hint: What to do about it; defaults to the class's own `hint`. Shown as a note under the traceback.
    """

    hint: str = ""

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.hint = type(self).hint if hint is None else hint
        if self.hint:
            self.add_note(self.hint)

    def __reduce__(self) -> tuple[Any, ...]:
        # The default would call the constructor with the message, which not every subclass takes.
        return (copyreg.__newobj__, (type(self), *self.args), self.__dict__)  # type: ignore[attr-defined]


class UnknownName(InvariantRAGError, ValueError):
    """A registry has no entry of that name."""

    hint = "Names are matched as they are written."

    _COMMANDS: ClassVar[dict[str, str]] = {
        "method": "invariant-rag methods",
        "ordering": "invariant-rag orderings",
        "benchmark": "invariant-rag bench list",
        "published table": "invariant-rag reproduce",
    }

    def __init__(self, kind: str, name: object, choices: Iterable[str], *, hint: str | None = None) -> None:
        listed = ", ".join(repr(choice) for choice in sorted(choices))
        if kind in self._COMMANDS:
            hint = f"{self.hint} `{self._COMMANDS[kind]}` tells what each is."
        super().__init__(f"unknown {kind} {name!r}; choose from {listed}", hint=hint)


class InvalidChoice(InvariantRAGError, ValueError):
    """A number that a method, an intervention or a measurement cannot work with."""

    hint = "The message says what was expected."


class UnsupportedModel(InvariantRAGError):
    """The model cannot be run order-invariantly, and the message says why."""

    hint = "Run `invariant-rag models` for the families that were probed and what each answered."


class UnsupportedCombination(InvariantRAGError):
    """Two choices that do not go together."""

    hint = "Change one of the two, and leave the other."


class ModelNotFound(InvariantRAGError, OSError):
    """There is no causal LM with a tokenizer under that name."""

    hint = "Give a Hugging Face id (and a network), a folder with a saved model, or no name for the embedded model."


class InvalidSegment(InvariantRAGError, ValueError):
    """A value that cannot be a segment."""

    hint = "A segment is a str, a Segment, or a sequence of token ids."


class InvalidPrompt(InvariantRAGError, ValueError):
    """A prompt that has no meaning, such as one without any token."""

    hint = "A prompt is text (or token ids), a set of segments, and text; messages are mappings of role and content."


class ContextOverflow(InvariantRAGError, ValueError):
    """The prompt does not fit: the message names the tokens it has and the tokens there is room for."""

    hint = (
        'Retrieve fewer or shorter chunks, lower max_new_tokens, or choose overflow="drop_last" '
        '(drops the last segments of the ordering) or overflow="trim_segments" (shortens every long segment alike).'
    )


class TokenizerRequired(InvariantRAGError):
    """Text was given to a model that was wrapped without a tokenizer."""

    hint = "Pass `tokenizer=` to InvariantModel, or build the Prompt from token ids."


class RetrievalError(InvariantRAGError):
    """Documents could not be read, indexed or searched."""

    hint = "Give files or folders of .txt, .md, .jsonl or .pdf, and ask for at least one chunk."


class InvalidQuestion(InvariantRAGError, ValueError):
    """A question of an audit that cannot be read, or cannot be asked."""

    hint = 'A line of a .jsonl file is {"question": "...", "segments": ["...", ...], "answers": ["...", ...]}.'


class AuditFailed(InvariantRAGError):
    """The system under audit failed, or too little was asked to measure anything."""

    hint = "What was answered is kept where the audit has a folder: start it again, and it goes on from there."


class DatasetUnavailable(InvariantRAGError, OSError):
    """The file of a benchmark is neither here nor where it can be had from."""

    hint = "Download it on a machine with a network, and give the file, or the folder that holds it, with --data."


class InvalidDataset(InvariantRAGError, ValueError):
    """A benchmark's file is not in the format that its README describes."""

    hint = "The README in the benchmark's folder shows a record; compare it with the one that the message names."


class RunExists(InvariantRAGError, FileExistsError):
    """A run of these settings lies there already, and runs are never overwritten."""

    hint = "Continue it with --resume, or write elsewhere with --out."


class InvalidRun(InvariantRAGError, ValueError):
    """The records of a run cannot be read back."""

    hint = "Only the last line of records.jsonl may be torn. Repair the line that the message names, or run elsewhere."


class ActorsLost(InvariantRAGError, RuntimeError):
    """Actors died again and again over the same records."""

    hint = "The log of Ray says why; often the model needs more memory. What was answered is kept: use --resume."


class InvalidSchema(InvariantRAGError, ValueError):
    """A schema that decoding cannot follow token by token."""

    hint = "Give a pydantic class, or a JSON schema of an object."


class IncompleteObject(InvariantRAGError, ValueError):
    """An answer that should be JSON ended before it was complete."""

    hint = "Leave away what ends a generation early, such as max_time and stopping criteria."


class InvalidObject(InvariantRAGError, ValueError):
    """A complete JSON answer that its schema or class rejects: a rule that no grammar of xgrammar expresses."""

    hint = "Say it with a pattern, an enum or bounds; xgrammar ignores uniqueItems, multipleOf and custom validators."


class ExtraRequired(InvariantRAGError, ImportError):
    """A package that is not installed with the library, or with an integration.

    Args:
        package: Its name.
        extra: The extra that installs it.
        distribution: Whose extra that is.
    """

    hint = "Optional parts are installed as extras, as the message says."

    def __init__(self, package: str, extra: str, distribution: str = "invariant-rag") -> None:
        super().__init__(f'{package} is not installed; run `pip install "{distribution}[{extra}]"`')
