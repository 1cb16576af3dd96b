"""The parameters of `ChatInvariant` and `InvariantLLM`, and the `InvariantModel` that they choose and ask."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, TypeAlias

import invariant_rag
from invariant_rag.checks import check_stops
from invariant_rag.errors import ModelNotFound, UnsupportedCombination
from invariant_rag.generation.answers import AnswerDelta, AnswerRequest, Reply
from invariant_rag.generation.overflow import Overflow
from invariant_rag.methods import Method, resolve_method
from invariant_rag.orderings import Ordering, resolve_ordering
from invariant_rag.prompts import Finding, tokenize_text
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import SegmentSet
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.base import LangSmithParams
from langchain_core.outputs import LLMResult
from langchain_core.runnables import run_in_executor
from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, SecretStr, model_validator

from langchain_invariant_rag import __version__
from langchain_invariant_rag.answering import PER_CALL, PROVIDER, request_of
from langchain_invariant_rag.errors import UnknownParameter, langchain_errors
from langchain_invariant_rag.recognition import RecognizesDocuments

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.lazy import LazyModel
    from invariant_rag.generation.model import InvariantModel

# Models of a server need no torch, so what imports it is imported where it is used.

_logger = logging.getLogger(__name__)

_LOADING = ("dtype", "device_map", "revision", "model_kwargs")
_OF_REMOTE_MODELS = frozenset({"api_key", "max_retries", "timeout"})
"""Parameters that LangChain gives to any chat model, and that mean nothing to one on this machine."""
_OF_LOCAL_MODELS = ("backend", "max_segment_tokens", "key_value_cache", *_LOADING)
"""Parameters that mean nothing to a model of a server."""
_CHOICES = ("method", "ordering", "backend", "max_segment_tokens", "overflow")


def _check_model(value: Any) -> Any:
    if value is not None and not isinstance(value, str | Path):
        from invariant_rag.generation.model import InvariantModel

        if not isinstance(value, InvariantModel):
            raise ValueError(f"expected a hub id, a folder or an InvariantModel, got {type(value).__name__}")
    return value


def _check_cache(value: Any) -> Any:
    if value is not None:
        from invariant_rag.generation.kv_cache import KeyValueCache

        if not isinstance(value, KeyValueCache):
            raise ValueError(f"expected a KeyValueCache, got {type(value).__name__}")
    return value


if TYPE_CHECKING:
    Model: TypeAlias = InvariantModel | str | Path | None
    Cache: TypeAlias = KeyValueCache | None
else:
    Model = Annotated[Any, AfterValidator(_check_model)]
    Cache = Annotated[Any, AfterValidator(_check_cache)]


class InvariantParameters(RecognizesDocuments):
    """Parameters of `InvariantLLM` and `ChatInvariant`. Weights are loaded when they are first needed.

    A choice that is left open stays None, and is resolved when it is used. So a copy with another model or method has
    the defaults of that one. `resolved_method` and `resolved_ordering` tell what runs.
    """

    model: Model = Field(default=None, frozen=True)
    """A hub id, a folder, or an `InvariantModel` in memory, also one `with_routing`. None: the small model that comes
    with invariant-rag; `native`: the same, fine-tuned with RoToR attention. `model_name` is the same parameter."""
    method: str | Method | None = None
    """How segments see each other. None: that of the model in memory; `rotor` for a model that is loaded by name."""
    ordering: str | Ordering | None = None
    """The order of the segments. None: that of the model in memory, or the method's default (`lexical` for `rotor`)."""
    backend: str | None = None
    """The implementation of attention. None: that of the model in memory; `auto` for a model that is loaded by name."""
    max_segment_tokens: int | None = None
    """The most tokens of one segment. None: that of the model in memory, or no limit."""
    overflow: Overflow | None = None
    """What to do with a prompt that is too long. None: that of the model in memory; `error` for one loaded by name."""

    dtype: str = Field(default="auto", frozen=True)
    """As in transformers; so are the next three."""
    device_map: str | dict[str, Any] | None = Field(default="auto", frozen=True)
    revision: str | None = Field(default=None, frozen=True)
    model_kwargs: dict[str, Any] = Field(default_factory=dict, frozen=True)
    """Further keywords of `from_pretrained`."""
    base_url: str | None = Field(default=None, frozen=True)
    """Address of `invariant-rag serve`, such as `http://localhost:8000/v1`: the model runs there, and torch is not
    needed here. `model` is then its name there, `method` and `ordering` what to ask for. None: it runs here."""
    api_key: SecretStr | None = Field(default=None, frozen=True)
    """Key for that server; the next two are for it, too."""
    timeout: float = Field(default=300.0, gt=0)
    max_retries: int = Field(default=2, ge=0)

    key_value_cache: Cache = Field(default=None, exclude=True, repr=False)
    """Keeps keys and values of segments for calls with the same ones, in any order; models may share one. None: that of
    the model in memory. It changes no answer, so no cache key holds it. (LangChain's own `cache` keeps answers.)"""

    max_tokens: int = Field(default=256, ge=1)
    """The most tokens to generate."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0: greedy, always the same. Above: sampled; with a `seed`, the same for every order of the segments."""
    top_p: float | None = None
    """For sampling, as is `top_k`. None: the model's own default."""
    top_k: int | None = None
    seed: int | None = None
    """Seed for sampling. None: sample from torch's global random state."""
    stop: Annotated[list[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    """The text ends before the first of these; a single one may be given as a str."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of transformers' `generate`."""

    batch_size: int = Field(default=8, ge=1)
    """The most prompts of one call to decode together. Sampled ones and those with a schema are decoded alone."""
    micro_batching: bool = False
    """Whether to decode prompts of concurrent calls together too. It is faster under load. But rounding depends on what
    else is in a batch, and then so may a low-precision model's answer; and a cancelled call runs on. Calls that sample,
    follow a schema or have tools are decoded alone all the same: each has a grammar or a seed of its own."""
    sort_segments: bool = True
    """Whether to sort segments by content before callbacks and caches see them: then the same set in another order is a
    cache hit. The answer is the same either way. Without effect for an ordering that keeps the order given."""

    _lazy: Any = PrivateAttr(default=None)  # a LazyModel
    _batcher: Any = PrivateAttr(default=None)  # a MicroBatcher
    _remote: RemoteModel | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        return cls._with_known_names(values) if isinstance(values, Mapping) else values

    @classmethod
    def _with_known_names(cls, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return parameters by the names of the fields.

        Raises:
            UnknownParameter: There is no such field.
        """
        given = dict(values)
        if "model_name" in given:  # so LangChain's own models call it
            if "model" in given:
                raise UnsupportedCombination("expected model or model_name, got both", hint="They mean the same.")
            given["model"] = given.pop("model_name")
        local = given.get("base_url") is None
        ignored = sorted(_OF_REMOTE_MODELS.intersection(given)) if local else []
        if meant := [name for name in ignored if given[name] is not None]:
            _logger.warning("%s runs on this machine and has no %s: ignored", cls.__name__, ", ".join(meant))
        known = {name: value for name, value in given.items() if name not in ignored}
        if unknown := sorted(set(known) - set(cls.model_fields)):
            raise UnknownParameter(cls.__name__, unknown, [*cls.model_fields, "model_name"])
        return known

    @model_validator(mode="after")
    def _check_choices(self) -> Self:
        self.max_tokens = self.generation_kwargs.pop("max_new_tokens", self.max_tokens)
        if self.base_url is not None:
            self._connect(self.base_url)
            return self
        from invariant_rag.generation.batching import MicroBatcher

        self._lazy = self._lazy_model()
        self._batcher = MicroBatcher()
        self._resolve_choices()
        return self

    def _connect(self, base_url: str) -> None:
        given = [name for name in _OF_LOCAL_MODELS if getattr(self, name) != _default(name)]
        if given or not isinstance(self.model, str | None):
            listed = ", ".join(given) or "a model in memory"
            raise UnsupportedCombination(
                f"expected base_url without {listed}: the server has its own", hint="Leave one of the two away."
            )
        _ = self.resolved_method, self.resolved_ordering
        key = None if self.api_key is None else self.api_key.get_secret_value()
        options: dict[str, Any] = {"timeout": self.timeout, "max_retries": self.max_retries}
        self._remote = RemoteModel(base_url, model=self.model, api_key=key, **options)

    @property
    def remote(self) -> RemoteModel | None:
        """The model of a server; None for one that runs here."""
        return self._remote

    @property
    def _remote_choices(self) -> dict[str, Any]:
        """What to ask a server for: the choices that were not left open."""
        choices = {name: getattr(self, name) for name in ("method", "ordering", "overflow")}
        return {name: value for name, value in choices.items() if value is not None}

    def _resolve_choices(self) -> None:
        """Raise the error of a choice that does not exist, or of two that do not fit. Loads no weights."""
        from invariant_rag.attention import resolve_backend

        if self._in_memory is not None:
            if given := [name for name in _LOADING if getattr(self, name) != _default(name)]:
                raise UnsupportedCombination(
                    f"a model in memory takes no {', '.join(given)}", hint="Load it as you want it, or give its name."
                )
            _ = self.lm
        else:
            _ = self.resolved_method, self.resolved_ordering, resolve_backend(self.backend or "auto")

    @model_validator(mode="after")
    def _set_invariant_rag_version(self) -> Self:
        self._add_version("langchain-invariant-rag", __version__)
        return self

    @property
    def _in_memory(self) -> InvariantModel | None:
        return None if self.model is None or isinstance(self.model, str | Path) else self.model

    def _lazy_model(self) -> LazyModel:
        from invariant_rag.generation.lazy import LazyModel

        revision = {} if self.revision is None else {"revision": self.revision}
        loading = {"dtype": self.dtype, "device_map": self.device_map, **self.model_kwargs, **revision}
        return LazyModel(self.model, {} if self._in_memory is not None else loading)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy. It shares the weights, also those that are loaded later, unless the update asks for others.

        What was left open is resolved anew.

        Raises:
            UnknownName: The update has a method, an ordering or a backend that does not exist.
            UnknownParameter: It has a parameter that does not exist.
        """
        changes = self._with_known_names(update or {})
        copied = super().model_copy(update=changes, deep=deep)
        if self.base_url is not None or copied.base_url is not None:
            return type(self)(**{**{name: getattr(copied, name) for name in copied.model_fields_set}, **changes})
        if not {"model", *_LOADING}.isdisjoint(changes):
            copied._lazy = copied._lazy_model()
        if not {"model", *_LOADING, *_CHOICES}.isdisjoint(changes):
            copied._resolve_choices()
        return copied

    def __str__(self) -> str:
        """Return the fields. That of LangChain returns the cache key, for which weights have to be loaded."""
        return repr(self)

    @property
    def lm(self) -> InvariantModel:
        """The model that generates, with the choices of this object. Loads the weights on first use.

        Raises:
            UnsupportedCombination: It runs on a server.
        """
        if self.base_url is not None:
            raise UnsupportedCombination(
                f"expected a model on this machine, got one at {self.base_url}", hint="Leave base_url away."
            )
        lm: InvariantModel = self._lazy.lm(**{name: getattr(self, name) for name in _CHOICES})
        return lm if self.key_value_cache is None else lm.with_cache(self.key_value_cache)

    async def agenerate(self, *args: Any, **kwargs: Any) -> LLMResult:
        """Generate; see `generate`. The key of LangChain's cache needs the weights: they are loaded in a thread."""
        if self._uses_cache:
            await run_in_executor(None, lambda: self._cache_key)
        result: LLMResult = await super().agenerate(*args, **kwargs)  # type: ignore[misc]
        return result

    @property
    def resolved_method(self) -> Method:
        """The method that runs: the one chosen, else that of the model in memory, else `rotor`. Loads no weights."""
        if self.method is None and (given := self._in_memory) is not None:
            return given.method
        return resolve_method("rotor" if self.method is None else self.method)

    @property
    def resolved_ordering(self) -> Ordering:
        """The ordering that runs: the one chosen, else that of the model in memory, else the method's default."""
        if self.ordering is None and self.method is None and (given := self._in_memory) is not None:
            return given.ordering
        return resolve_ordering(self.ordering, self.resolved_method.default_ordering)

    @property
    def _sorts_segments(self) -> bool:
        """Whether to sort segments by content: asked for, and the order given means nothing to the model."""
        if self._in_memory is not None and not self.lm.invariant:
            return False
        return self.sort_segments and self.resolved_ordering.invariant

    @property
    def _promises_invariance(self) -> bool:
        return self.resolved_ordering.invariant

    def _check(self, sets: Sequence[SegmentSet]) -> Iterable[Finding]:
        routed = getattr(self._in_memory, "plain_order", None) is not None and not self.model.invariant  # type: ignore[union-attr]
        if routed and any(len(each) > 1 for each in sets):
            yield Finding("routing", "the plain model of the router reads them in the order given.")

    @property
    def model_name(self) -> str:
        """Hub id, folder or name of the model, known without loading it."""
        if (given := self._in_memory) is not None:
            return given.name
        return f"{PROVIDER}/embedded" if self.model is None else str(self.model)

    @property
    def context_window(self) -> int | None:
        """Tokens that prompt and answer may have together; None where no configuration on this machine states it."""
        if self.base_url is not None:
            return None  # asking would wait for the network
        try:
            return self._lazy_model().context_window(local_files_only=True)  # asked for before `_lazy` is there
        except ModelNotFound:
            return None

    @property
    def _uses_cache(self) -> bool:
        """Whether LangChain keeps answers: then their key has everything that can change one."""
        return bool(self.cache) or (self.cache is None and get_llm_cache() is not None)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What traces show of this object. Loads no weights."""
        own = ("base_url", "overflow", "batch_size", "micro_batching", *PER_CALL)
        return {
            "model": self.model_name,
            "method": self.resolved_method.name,
            "ordering": self.resolved_ordering.name,
            **{name: getattr(self, name) for name in own},
            "generation_kwargs": repr(sorted(self.generation_kwargs.items())),
            "own_stop": self.stop,  # LangChain writes the stop sequences of the call into "stop"
            "versions": [invariant_rag.__version__, __version__],
        }

    @property
    def _cache_key(self) -> dict[str, Any]:
        """Everything else that can change an answer, for LangChain's cache. Loads the weights, and digests them."""
        if self.base_url is not None:
            return {"method": self.method, "ordering": self.ordering}
        from invariant_rag.generation.digest import describe, model_digest

        return {"model_digest": model_digest(self.lm), "generation_kwargs": describe(self.generation_kwargs)}

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without any that the tokenizer puts around it."""
        return list(tokenize_text(text, self.lm.tokenizer))

    def _ls_params(
        self, kind: Literal["chat", "llm"], stop: str | list[str] | None, kwargs: Mapping[str, Any]
    ) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_name=kwargs.get("model", self.model_name),
            ls_model_type=kind,
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if stops := check_stops(stop) or check_stops(self.stop):
            params["ls_stop"] = stops
        return params

    def _request(
        self, stop: str | list[str] | None, keywords: Mapping[str, Any], *, recognized: bool, **given: Any
    ) -> AnswerRequest:
        """Return the request of one call: its keywords, and else the parameters of this object."""
        return request_of(self.__dict__, stop, keywords, recognized=recognized, **given)

    def _replies(self, requests: Sequence[AnswerRequest], abandoned: Event | None) -> list[Reply]:
        """Answer requests, decoded in batches where that is possible and wanted.

        Raises:
            InvariantContextOverflowError: A prompt is too long.
        """
        with langchain_errors():
            if self.remote is not None:
                return [self.remote.reply(each, choices=self._remote_choices) for each in requests]
            from invariant_rag.generation.answering import Answering, reply_all

            batcher, lm = self._batcher if self.micro_batching else None, self.lm
            answerings = [Answering(lm, each) for each in requests]
            return reply_all(answerings, batcher, batch_size=self.batch_size, abandoned=abandoned)

    def _pieces(self, request: AnswerRequest, abandoned: Event | None) -> Iterator[AnswerDelta | Reply]:
        """Answer a request in pieces. See `_replies`."""
        with langchain_errors():
            if self.remote is not None:
                yield from self.remote.stream_reply(request, choices=self._remote_choices)
                return
            from invariant_rag.generation.answering import Answering

            batcher = self._batcher if self.micro_batching else None
            answering = Answering(self.lm, request)
            yield from answering.stream(batcher, batch_size=self.batch_size, abandoned=abandoned)


def _default(name: str) -> Any:
    return InvariantParameters.model_fields[name].get_default(call_default_factory=True)
