"""Whether grammars of schemas and tools compile in time: tried in a process that can be stopped, before this one does.

How long that takes is not to be seen from a schema, nor can a compiler be stopped in a thread.
"""

from __future__ import annotations

import hashlib
from functools import cached_property, lru_cache
from threading import Event
from typing import TYPE_CHECKING, Any, cast

from invariant_rag.errors import InvalidSchema
from invariant_rag.server.worker import Workers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from invariant_rag.generation.model import InvariantModel

SECONDS = 20.0
"""A schema may take. One with `maxLength: 200` takes half of that with 150,000 tokens."""
_START_SECONDS = 120.0
_REMEMBERED = 1000

COMPILERS = Workers(1)
"""Compiles schemas, for all models of this process."""


class SchemaTrials:
    """Tries schemas for the vocabulary of a model, each once.

    Args:
        lm: The model. It needs a tokenizer.
    """

    def __init__(self, lm: InvariantModel) -> None:
        self._lm = lm
        self._compiles: dict[str, bool] = {}

    def check(self, abandoned: Event, tag: str) -> None:
        """Check that a structural tag compiles in time. Whether it means something is seen when the server compiles it.

        Raises:
            CancelledError: It was abandoned.
            InvalidSchema: It takes too long.
        """
        key = hashlib.sha256(tag.encode("utf-8", "surrogatepass")).hexdigest()
        if key not in self._compiles:
            COMPILERS.call(_START_SECONDS, abandoned, prepare, self._vocabulary)
            try:
                COMPILERS.call(SECONDS, abandoned, compile_tag, self._vocabulary, tag)
            except TimeoutError:
                self._remember(key, compiles=False)
            else:
                self._remember(key, compiles=True)
        if not self._compiles.get(key, True):
            raise InvalidSchema(
                f"expected a schema that compiles within {SECONDS:g} seconds for this model",
                hint="Ask for less, or say it in the prompt: shorter patterns, lower counts, fewer properties.",
            )

    @cached_property
    def _vocabulary(self) -> str:
        from xgrammar import TokenizerInfo

        tokenizer = cast("PreTrainedTokenizerBase", self._lm.tokenizer)
        size = self._lm.model.config.get_text_config(decoder=True).vocab_size
        text: str = TokenizerInfo.from_huggingface(tokenizer, vocab_size=size).serialize_json()
        return text

    def _remember(self, key: str, *, compiles: bool) -> None:
        if len(self._compiles) >= _REMEMBERED:
            self._compiles.clear()
        self._compiles[key] = compiles


def prepare(vocabulary: str) -> None:
    """Import the compiler, and make the one of a vocabulary, in a worker, before the time of a schema is taken."""
    _compiler(vocabulary)


def compile_tag(vocabulary: str, tag: str) -> None:
    """Compile a structural tag, in a worker. Errors do not matter: the server gets them, too, when it compiles it.

    Args:
        vocabulary: A serialized `TokenizerInfo`.
        tag: The structural tag.
    """
    try:
        _compiler(vocabulary).compile_structural_tag(tag)
    except (RuntimeError, ValueError):
        return


@lru_cache(maxsize=2)
def _compiler(vocabulary: str) -> Any:
    from xgrammar import GrammarCompiler, TokenizerInfo

    return GrammarCompiler(TokenizerInfo.deserialize_json(vocabulary), cache_enabled=False)
