"""Schemas at work in processes that can be stopped: how long one takes to compile or to validate it does not tell."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from functools import lru_cache
from threading import Event, Lock
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import InvalidSchema
from invariant_rag.generation.json_schema import compile_tag, validate_value
from invariant_rag.server.engines.base import wait_for
from invariant_rag.server.worker import Workers

if TYPE_CHECKING:
    from invariant_rag.generation.structured import Vocabulary

SECONDS = 20.0
"""A schema may take. One with `maxLength: 200` takes half of that with 150,000 tokens."""
_START_SECONDS = 120.0
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
        self._most_bytes = most_bytes
        self._lock = Lock()
        self._kept: OrderedDict[tuple[Vocabulary, str], Future[Any]] = OrderedDict()  # the latest used last

    def compile(self, abandoned: Event, vocabulary: Vocabulary, tag: str) -> Any:
        """Return the `CompiledGrammar` of a structural tag.

        Raises:
            CancelledError: It was abandoned.
            InvalidSchema: xgrammar does not take it, or it takes too long.
        """
        key = vocabulary, hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()
        while True:
            with self._lock:
                found = self._kept.get(key)
                is_first = found is None
                if found is None:
                    found = self._kept[key] = Future()
                    found.set_running_or_notify_cancel()  # who leaves takes it from nobody else
                self._kept.move_to_end(key)
            if is_first:
                self._settle(found, key, abandoned, tag)
            try:
                grammar = wait_for(found, abandoned)
            except CancelledError:  # whoever compiled it has left
                if abandoned.is_set():
                    raise
                continue
            if isinstance(grammar, InvalidSchema):
                raise InvalidSchema(str(grammar), hint=grammar.hint)
            return grammar

    def _settle(self, result: Future[Any], key: tuple[Vocabulary, str], abandoned: Event, tag: str) -> None:
        try:
            result.set_result(_compiled(abandoned, key[0], tag))
        except InvalidSchema as error:
            result.set_result(error)
        except BaseException as error:  # noqa: BLE001 - raised by everybody who waits for it
            with self._lock:
                del self._kept[key]
            result.set_exception(error)
        with self._lock:
            done = [(each, kept.result()) for each, kept in self._kept.items() if kept.done()]
            size = sum(getattr(grammar, "memory_size_bytes", 0) for _, grammar in done)
            for each, grammar in done[:-1]:
                if size > self._most_bytes or len(self._kept) > _MOST:
                    del self._kept[each]
                    size -= getattr(grammar, "memory_size_bytes", 0)


def _compiled(abandoned: Event, vocabulary: Vocabulary, tag: str) -> Any:
    from xgrammar import CompiledGrammar

    COMPILERS.call(_START_SECONDS, abandoned, prepare, vocabulary.serialized)
    try:
        grammar = COMPILERS.call(SECONDS, abandoned, compile_serialized, vocabulary.serialized, tag)
    except TimeoutError:
        raise InvalidSchema(
            f"expected a schema that compiles within {SECONDS:g} seconds for this model",
            hint="Ask for less, or say it in the prompt: shorter patterns, lower counts, fewer properties.",
        ) from None
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
