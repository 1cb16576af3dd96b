"""Schemas at work in processes that can be stopped: how long one takes to compile or to validate it does not tell."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import lru_cache
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import InvalidSchema
from invariant_rag.generation.json_schema import compile_tag, validate_value
from invariant_rag.server.worker import Workers

if TYPE_CHECKING:
    from invariant_rag.generation.structured import Vocabulary

SECONDS = 20.0
"""A schema may take. One with `maxLength: 200` takes half of that with 150,000 tokens."""
_START_SECONDS = 120.0
_POLL_SECONDS = 0.05
_MOST = 1000

COMPILERS = Workers(1)
"""Compiles schemas, for all models of this process."""
VALIDATORS = Workers(2)
"""Validate answers: patterns may backtrack, and references fan out."""
VALIDATION_SECONDS = 5.0


def validate(value: Any, schema: Mapping[str, Any], abandoned: Event) -> None:
    """Validate what an answer says, in a worker; see `validate_value`.

    Raises:
        CancelledError: It was abandoned.
        InvalidObject: The value does not satisfy the schema.
        InvalidSchema: It is no schema, or takes too long.
    """
    try:
        VALIDATORS.call(VALIDATION_SECONDS, abandoned, validate_value, value, dict(schema))
    except TimeoutError:
        raise InvalidSchema(
            f"expected a schema that validates an answer in {VALIDATION_SECONDS:g} seconds, got one that does not",
            hint="Leave away references in circles, and nested repetitions in patterns.",
        ) from None


class SchemaCompiler:
    """Compiles every schema once, however many requests have it, and keeps it.

    Args:
        most_bytes: Of grammars that are kept.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes, self._lock = most_bytes, Lock()
        self._kept: OrderedDict[tuple[Vocabulary, str], Any] = OrderedDict()  # the latest used last

    def compile(self, abandoned: Event, vocabulary: Vocabulary, tag: str) -> Any:
        """Return the `CompiledGrammar` of a structural tag.

        Raises:
            CancelledError: It was abandoned.
            InvalidSchema: xgrammar does not take it, or it takes too long.
        """
        key = vocabulary, hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()
        found = self._kept.get(key)
        if found is None:
            while not self._lock.acquire(timeout=_POLL_SECONDS):  # one is compiled at a time
                if abandoned.is_set():
                    raise CancelledError
            try:
                found = self._kept.get(key) or self._keep(key, _compiled(abandoned, vocabulary, tag))
            finally:
                self._lock.release()
        with suppress(KeyError):
            self._kept.move_to_end(key)
        if isinstance(found, InvalidSchema):
            raise InvalidSchema(str(found), hint=found.hint)
        return found

    def _keep(self, key: tuple[Vocabulary, str], grammar: Any) -> Any:
        self._kept[key] = grammar
        sizes = [getattr(each, "memory_size_bytes", 0) for each in self._kept.values()]
        while len(sizes) > 1 and (sum(sizes) > self._most_bytes or len(sizes) > _MOST):
            self._kept.popitem(last=False)
            del sizes[0]
        return grammar


def _compiled(abandoned: Event, vocabulary: Vocabulary, tag: str) -> Any:
    """Return a `CompiledGrammar`, or the error that the schema causes, which is kept, too."""
    from xgrammar import CompiledGrammar

    COMPILERS.call(_START_SECONDS, abandoned, prepare, vocabulary.serialized)
    try:
        grammar = COMPILERS.call(SECONDS, abandoned, compile_serialized, vocabulary.serialized, tag)
    except InvalidSchema as error:
        return error
    except TimeoutError:
        return InvalidSchema(
            f"expected a schema that compiles within {SECONDS:g} seconds for this model",
            hint="Ask for less, or say it in the prompt: shorter patterns, lower counts, fewer properties.",
        )
    return CompiledGrammar.deserialize_json(grammar, vocabulary.info)


def prepare(vocabulary: str) -> None:
    """Import the compiler, and make the one of a vocabulary, in a worker, before the time of a schema is taken."""
    _compiler(vocabulary)


def compile_serialized(vocabulary: str, tag: str) -> str:
    """Return the serialized `CompiledGrammar` of a structural tag for a serialized `TokenizerInfo`, in a worker."""
    return str(compile_tag(_compiler(vocabulary), tag).serialize_json())


@lru_cache(maxsize=2)
def _compiler(vocabulary: str) -> Any:
    from xgrammar import GrammarCompiler, TokenizerInfo

    return GrammarCompiler(TokenizerInfo.deserialize_json(vocabulary), cache_enabled=False)
