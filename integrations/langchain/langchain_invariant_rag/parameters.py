"""The parameters of `ChatInvariant` and `InvariantLLM`, and the `InvariantModel` that they choose."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import repeat
from operator import is_
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Self, TypeAlias, cast

import invariant_rag
from invariant_rag.checks import check_stops
from invariant_rag.errors import ContextOverflow, InvalidChoice, ModelNotFound, UnknownParameter, UnsupportedCombination
from invariant_rag.generation.answers import AnswerDelta, AnswerRequest, Reply
from invariant_rag.generation.prepare import Overflow
from invariant_rag.methods import Method, resolve_method
from invariant_rag.orderings import Ordering, resolve_ordering
from invariant_rag.prompts import tokenize_text
from invariant_rag.remote import RemoteModel
from langchain_core.exceptions import ContextOverflowError
from langchain_core.globals import get_llm_cache
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.runnables import run_in_executor
from pydantic import BeforeValidator, Field, PrivateAttr, SecretStr, model_validator

from langchain_invariant_rag import __version__
from langchain_invariant_rag.answering import PER_CALL, PROVIDER
from langchain_invariant_rag.recognition import OrderRules, RecognizesDocuments

if TYPE_CHECKING:
    from invariant_rag.generation.kv_cache import KeyValueCache
    from invariant_rag.generation.lazy_model import LazyModel
    from invariant_rag.generation.model import InvariantModel

    Model: TypeAlias = InvariantModel | str | Path | None
    Cache: TypeAlias = KeyValueCache | None
else:  # models of a server need no torch, so what imports it is imported where it is used
    Model = Cache = Any

_logger = logging.getLogger(__name__)

_LOADING = ("dtype", "device_map", "revision", "model_kwargs")
_CHOICES = ("method", "ordering", "backend", "max_segment_tokens", "overflow")
_SHOWN = ("base_url", "overflow", "batch_size", "micro_batching", *PER_CALL)
_OF_REMOTE_MODELS = ("api_key", "max_retries", "timeout")  # LangChain passes them to any chat model
_OF_LOCAL_MODELS = ("backend", "max_segment_tokens", "key_value_cache", *_LOADING)


class InvariantContextOverflowError(ContextOverflow, ContextOverflowError):
    """A prompt does not fit into the context window. LangChain's middleware and fallbacks know its second base."""


class Resolved(NamedTuple):
    """What runs, where some choices are left open. Known without loading weights."""

    in_memory: InvariantModel | None
    name: str
    method: Method
    ordering: Ordering


class InvariantParameters(RecognizesDocuments):
    """Parameters of `InvariantLLM` and `ChatInvariant`. Weights are loaded when they are first needed."""

    __str__ = BaseChatModel.__repr__  # that of LangChain shows the cache key, for which weights have to be loaded
    model: Model = Field(default=None, frozen=True)
    """A hub id, a folder, or an `InvariantModel` in memory. None: the small model that comes with invariant-rag."""
    method: str | Method | None = None
    """How segments attend to each other. None: that of the model in memory; `rotor` for one that is loaded by name."""
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
    """Address of `invariant-rag serve`: the model runs there, without torch here; `model` is its name there."""
    api_key: SecretStr | None = Field(default=None, frozen=True)
    """Key for that server; the next two are for it, too."""
    timeout: float = Field(default=300.0, gt=0)
    max_retries: int = Field(default=2, ge=0)

    key_value_cache: Cache = Field(default=None, exclude=True, repr=False)
    """Keeps keys and values of segments for calls with the same ones. None: that of the model in memory."""

    max_tokens: int = Field(default=256, ge=1)
    """The most tokens to generate."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0: greedy, always the same. Above: sampled; with a `seed`, the same for every order of the segments."""
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    """Seed for sampling. None: torch's global random state."""
    stop: Annotated[list[str] | None, BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = None
    """The text ends before the first of these; a single one may be a str."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of transformers' `generate`."""

    batch_size: int = Field(default=8, ge=1)
    """The most prompts of one call to decode together. Sampled ones and those with a schema are decoded alone."""
    micro_batching: bool = False
    """Whether to decode concurrent calls together too: faster under load, but rounding depends on what else is in a
    batch, and a cancelled call runs on."""
    sort_segments: bool = True
    """Whether callbacks and caches get segments sorted by content, so that another order of a set is a cache hit."""

    _lazy: Any = PrivateAttr(default=None)  # a LazyModel
    _batcher: Any = PrivateAttr(default=None)  # a MicroBatcher
    _remote: RemoteModel | None = PrivateAttr(default=None)
    _known: tuple[tuple[Any, ...], Resolved] | None = PrivateAttr(default=None)

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, values: Any) -> Any:
        """Name parameters as the fields are named, and refuse those that do not exist."""
        if not isinstance(values, Mapping):
            return values
        given = dict(values)
        if "model_name" in given:  # so LangChain's own models call it
            if "model" in given:
                raise UnsupportedCombination("expected model or model_name, got both", hint="They mean the same.")
            given["model"] = given.pop("model_name")
        local = given.get("base_url") is None
        if meant := [name for name in _OF_REMOTE_MODELS if local and given.pop(name, None) is not None]:
            _logger.warning("%s runs on this machine and has no %s: ignored", cls.__name__, ", ".join(meant))
        if not isinstance(model := given.get("model"), str | Path | None) and not hasattr(model, "with_method"):
            raise InvalidChoice(f"expected a hub id, a folder or an InvariantModel, got {type(model).__name__}")
        if unknown := sorted(set(given) - set(cls.model_fields)):
            raise UnknownParameter(cls.__name__, unknown, [*cls.model_fields, "model_name"])
        return given

    @model_validator(mode="after")
    def _set_up(self) -> Self:
        self._add_version("langchain-invariant-rag", __version__)
        self.max_tokens = self.generation_kwargs.pop("max_new_tokens", self.max_tokens)
        if self.base_url is None:
            from invariant_rag.generation.batching import MicroBatcher

            self._batcher, self._lazy = MicroBatcher(), self._lazy_model()
            return self._checked()
        key = None if self.api_key is None else self.api_key.get_secret_value()
        options: dict[str, Any] = {"timeout": self.timeout, "max_retries": self.max_retries, "api_key": key}
        self._remote = RemoteModel(self.base_url, model=cast("str | None", self._checked().model), **options)
        return self

    def _checked(self) -> Self:
        """Raise the error of a choice that does not exist, or of two that do not fit. Loads no weights."""
        in_memory = self._resolve().in_memory is not None
        whose, foreign = ("a model in memory", _LOADING) if in_memory else ("", ())
        if self.base_url is not None:
            own = () if isinstance(self.model, str | None) else ("model",)
            whose, foreign = "a model of a server", (*own, *_OF_LOCAL_MODELS)
        defaults = {name: type(self).model_fields[name].get_default(call_default_factory=True) for name in foreign}
        if given := [name for name in foreign if getattr(self, name) != defaults[name]]:
            raise UnsupportedCombination(f"{whose} takes no {', '.join(given)}", hint="Leave one of the two away.")
        if self.base_url is None:
            from invariant_rag.attention import resolve_backend

            _ = self.lm if in_memory else resolve_backend(self.backend or "auto")
        return self

    def _resolve(self) -> Resolved:
        chosen = (self.model, self.method, self.ordering)
        if self._known is None or not all(map(is_, chosen, self._known[0])):
            given: Any = None if self.model is None or isinstance(self.model, str | Path) else self.model
            if given is not None and self.method is None:
                method, ordering = given.method, self.ordering or given.ordering
            else:
                method, ordering = resolve_method(self.method or "rotor"), self.ordering
            name = f"{PROVIDER}/embedded" if self.model is None else str(self.model if given is None else given.name)
            self._known = chosen, Resolved(given, name, method, resolve_ordering(ordering, method.default_ordering))
        return self._known[1]

    def _lazy_model(self) -> LazyModel:
        from invariant_rag.generation.lazy_model import LazyModel

        revision = {} if self.revision is None else {"revision": self.revision}
        loading = {"dtype": self.dtype, "device_map": self.device_map, **self.model_kwargs, **revision}
        in_memory = self._resolve().in_memory is not None
        return LazyModel(self.model, {} if in_memory else loading, cache=self.key_value_cache)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with the same weights, unless the update names others. Open choices are resolved anew."""
        changes = self._check_names(update or {})  # type: ignore[operator]  # a validator is callable all the same
        copied = super().model_copy(update=changes, deep=deep)
        if self.base_url is not None or copied.base_url is not None:
            return type(self)(**{**{name: getattr(copied, name) for name in copied.model_fields_set}, **changes})
        if not {"model", "key_value_cache", *_LOADING}.isdisjoint(changes):
            copied._lazy = copied._lazy_model()
        return copied if {"model", *_LOADING, *_CHOICES}.isdisjoint(changes) else copied._checked()

    @property
    def lm(self) -> InvariantModel:
        """The model that generates, with the choices of this object. Loads the weights on first use."""
        if self._lazy is None:
            raise UnsupportedCombination(
                f"expected a model on this machine, got one at {self.base_url}", hint="Leave base_url away."
            )
        lm: InvariantModel = self._lazy.lm(**dict(zip(_CHOICES, map(self.__dict__.get, _CHOICES), strict=True)))
        return lm

    @property
    def model_name(self) -> str:
        """Hub id, folder or name of the model, known without loading it."""
        return self._resolve().name

    @property
    def context_window(self) -> int | None:
        """Tokens that prompt and answer may have together; None where no configuration on this machine states it."""
        if self.base_url is not None:
            return None  # the request would wait for the network
        try:
            return self._lazy_model().context_window(local_files_only=True)  # called before `_lazy` is set
        except ModelNotFound:
            return None

    @property
    def _order_rules(self) -> OrderRules:
        runs = self._resolve()
        by_content, reason = runs.ordering.invariant, ""
        if getattr(runs.in_memory, "plain_order", None) == "given":
            reason = "the plain model of the router gets them in the order given."
        return OrderRules(by_content, self.sort_segments and by_content and not reason, reason)

    @property
    def _uses_cache(self) -> bool:
        """Whether LangChain keeps answers: then their key has everything that can change one."""
        return bool(self.cache) or (self.cache is None and get_llm_cache() is not None)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """What traces show of this object. Loads no weights."""
        runs = self._resolve()
        return {
            "model": runs.name,
            "method": runs.method.name,
            "ordering": runs.ordering.name,
            **dict(zip(_SHOWN, map(self.__dict__.get, _SHOWN), strict=True)),
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

    async def agenerate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate; see `generate`. The key of LangChain's cache needs the weights: they are loaded in a thread."""
        if self._uses_cache:
            await run_in_executor(None, lambda: self._cache_key)
        return await super().agenerate(*args, **kwargs)

    async def _agenerate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        """Generate in a thread. A cancelled wait ends the generation."""
        abandoned, ours = Event(), cast("Any", self)
        try:
            return await run_in_executor(None, lambda: ours._generate(prompts, stop, **kwargs, abandoned=abandoned))
        finally:
            abandoned.set()

    async def _astream(self, prompt: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        """Stream from a thread. A consumer that stops, or is cancelled, ends the generation."""
        abandoned, ours = Event(), cast("Any", self)
        chunks = ours._stream(prompt, stop, **kwargs, abandoned=abandoned)
        try:
            while (chunk := await run_in_executor(None, next, chunks, None)) is not None:
                if run_manager:
                    await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
                yield chunk
        finally:
            abandoned.set()

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without any that the tokenizer puts around it."""
        return list(tokenize_text(text, self.lm.tokenizer))

    def _get_ls_params(self, stop: Any = None, **kwargs: Any) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_name=kwargs.get("model", self._resolve().name),
            ls_model_type="chat" if isinstance(self, BaseChatModel) else "llm",
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if stop or self.stop:
            params["ls_stop"] = check_stops(stop or self.stop)
        return params

    def _replies(self, requests: Sequence[AnswerRequest], abandoned: Event | None) -> list[Reply]:
        """Answer requests, decoded in batches where that is possible and enabled."""
        try:
            if self._remote is not None:
                return [self._remote.reply(each, choices=self._remote_choices) for each in requests]
            from invariant_rag.generation.answering import Answering, reply_all

            batcher = self._batcher if self.micro_batching else None
            answerings = list(map(Answering, repeat(self.lm), requests))
            return reply_all(answerings, batcher, batch_size=self.batch_size, abandoned=abandoned)
        except ContextOverflow as error:
            raise InvariantContextOverflowError(str(error), hint=error.hint) from error

    def _deltas(self, request: AnswerRequest, abandoned: Event | None) -> Iterator[AnswerDelta | Reply]:
        """Answer a request as deltas."""
        try:
            if self._remote is not None:
                yield from self._remote.stream_reply(request, choices=self._remote_choices)
                return
            from invariant_rag.generation.answering import Answering

            batcher = self._batcher if self.micro_batching else None
            yield from Answering(self.lm, request).stream(batcher, batch_size=self.batch_size, abandoned=abandoned)
        except ContextOverflow as error:
            raise InvariantContextOverflowError(str(error), hint=error.hint) from error

    @property
    def _remote_choices(self) -> dict[str, Any]:
        """The fields of a request to a server: the choices that were not left open."""
        choices = {name: getattr(self, name) for name in ("method", "ordering", "overflow")}
        return {name: value for name, value in choices.items() if value is not None}
