"""The parameters that both models share, and what they make of them: an engine and its options for each call."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Self

import invariant_rag
from invariant_rag.attention import resolve_backend
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.generation.model import Generation, InvariantModel
from invariant_rag.generation.overflow import Overflow
from invariant_rag.interventions import Intervention
from invariant_rag.methods import Method, resolve_method
from invariant_rag.orderings import Ordering, resolve_ordering
from invariant_rag.prompts import tokenize_text
from invariant_rag.segments import Prompt
from langchain_core.language_models.base import BaseLanguageModel, LangSmithParams
from pydantic import Field, PrivateAttr, model_validator

from langchain_invariant_rag import __version__
from langchain_invariant_rag.calls import SAMPLING, Call, call_of
from langchain_invariant_rag.identity import described, fingerprint
from langchain_invariant_rag.weights import HeldWeights, shared_model, stated_context_window

_logger = logging.getLogger(__name__)

PROVIDER = "invariant-rag"
_LOADING = ("dtype", "device_map", "revision", "model_kwargs")
PER_CALL = ("max_tokens", *SAMPLING)
"""Parameters that a single call may set for itself."""


class InvariantParameters(BaseLanguageModel[Any]):
    """Parameters of `InvariantLLM` and `ChatInvariant`. Weights are loaded when they are first needed."""

    model: InvariantModel | str | Path | None = None
    """A hub id, a folder, or a loaded `InvariantModel`, also one `with_routing`. None: the small model that comes with
    invariant-rag; `native`: the same, fine-tuned with RoToR attention."""
    method: str | Method | None = None
    """How segments see each other. None: that of the loaded model; `rotor` for one that is named."""
    ordering: str | Ordering | None = None
    """Which segment goes where. None: that of the loaded model, or the method's default (`lexical` for `rotor`)."""
    backend: str | None = None
    """What computes the attention. None: that of the loaded model; `auto` for one that is named."""
    max_segment_tokens: int | None = None
    """Tokens that one segment may have. None: no limit, or that of the loaded model."""
    overflow: Overflow | None = None
    """What happens to a prompt that is too long. None: that of the loaded model; `error` for one that is named."""

    dtype: str = "auto"
    """As in transformers; so are the next three."""
    device_map: str | dict[str, Any] | None = "auto"
    revision: str | None = None
    model_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of `from_pretrained`."""
    key_value_cache: KeyValueCache | None = Field(default=None, exclude=True, repr=False)
    """Keeps keys and values of segments for calls with the same ones, in any order; models may share one. None: what
    the loaded model has. It changes no answer, so no cache key holds it. (LangChain's own `cache` keeps answers.)"""

    max_tokens: int = Field(default=256, ge=1)
    """The most tokens to generate."""
    temperature: float = Field(default=0.0, ge=0.0)
    """0: greedy, always the same. Above: sampled; with a `seed`, the same for every order of the segments."""
    top_p: float | None = None
    """Used when sampling, as is `top_k`. None: the model's own default."""
    top_k: int | None = None
    seed: int | None = None
    """Seed for sampling. None: sample from torch's global random state."""
    stop: list[str] | None = None
    """The text ends before the first of these."""
    generation_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Further keywords of transformers' `generate`."""

    batch_size: int = Field(default=8, ge=1)
    """The most prompts to decode together, of those that come in one call. Sampled ones are decoded one by one."""
    micro_batching: bool = False
    """Whether prompts of calls that run at the same time are decoded together too. It is faster under load. But
    rounding depends on what else is in a batch, and then so may a low-precision model's answer; and a cancelled call
    runs on."""
    known_documents: list[Any] = Field(default_factory=list, repr=False)
    """Documents that are segments wherever their whole text appears in a prompt: for chains that join documents into
    one text, which has no boundaries."""
    sort_segments: bool = True
    """Whether segments are sorted by content before callbacks and caches see them: then the same set in another order
    is a cache hit. The answer is the same either way. Without effect for an ordering that keeps the order given."""

    _weights: HeldWeights = PrivateAttr(default_factory=HeldWeights)
    _batcher: MicroBatcher = PrivateAttr(default_factory=MicroBatcher)

    @model_validator(mode="before")
    @classmethod
    def _warn_of_unknown(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and (ignored := sorted(set(values) - set(cls.model_fields))):
            _logger.warning("%s has no %s: ignored", cls.__name__, ", ".join(ignored))
        return values

    @model_validator(mode="after")
    def _settle_choices(self) -> Self:
        """Write what was left open into the fields, so that they say what will run."""
        if isinstance(self.model, InvariantModel):
            if given := [name for name in _LOADING if getattr(self, name) != _default(name)]:
                raise UnsupportedCombination(
                    f"a loaded model takes no {', '.join(given)}", hint="Load it as you want it, or give its name."
                )
            if self.method is None:
                self.method = self.model.method
                self.ordering = self.model.ordering if self.ordering is None else self.ordering
        method = resolve_method("rotor" if self.method is None else self.method)
        self.method = method.name if self.method is None else self.method
        ordering = resolve_ordering(self.ordering, method.default_ordering)
        self.ordering = ordering.name if self.ordering is None else self.ordering
        resolve_backend(self.backend or "auto")
        self.max_tokens = self.generation_kwargs.pop("max_new_tokens", self.max_tokens)
        return self

    @model_validator(mode="after")
    def _set_invariant_rag_version(self) -> Self:
        self._add_version("langchain-invariant-rag", __version__)
        return self

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy. It shares the weights, those loaded later too, unless the update asks for others."""
        copied = super().model_copy(update=update, deep=deep)
        if not {"model", *_LOADING}.isdisjoint(update or {}):
            copied._weights = HeldWeights()
        return copied

    def __getstate__(self) -> dict[Any, Any]:
        """Leave out weights that have a name: they are loaded where they are needed."""
        state = super().__getstate__()
        return {**state, "__pydantic_private__": {**state["__pydantic_private__"], "_weights": HeldWeights()}}

    @property
    def engine(self) -> InvariantModel:
        """The model that generates, with method and ordering as chosen. Loads the weights on first use."""
        base = self.model
        if not isinstance(base, InvariantModel):
            loading = {"dtype": self.dtype, "device_map": self.device_map, **self.model_kwargs}
            if self.revision is not None:
                loading["revision"] = self.revision
            base = self._weights.model = shared_model(base, **loading)
        engine = base.with_method(
            self.method,
            ordering=self.ordering,
            backend=self.backend,
            max_segment_tokens=self.max_segment_tokens,
            overflow=self.overflow,
            intervention=self._intervention,
        )
        return engine if self.key_value_cache is None else engine.with_cache(self.key_value_cache)

    @property
    def _intervention(self) -> Intervention | None:
        """What a loaded model brings along; another method than the model's own does without."""
        loaded = self.model if isinstance(self.model, InvariantModel) else None
        return loaded.intervention if loaded is not None and self.method is loaded.method else None

    @property
    def _sorts_segments(self) -> bool:
        """Whether to list segments by content: wanted, and the order given means nothing to the model."""
        reads_order = isinstance(self.model, InvariantModel) and not self.engine.invariant
        return self.sort_segments and resolve_ordering(self.ordering or "").invariant and not reads_order

    @property
    def display_name(self) -> str:
        """Hub id, folder or name of the model, known without loading it."""
        if isinstance(self.model, InvariantModel):
            return self.model.name
        return f"{PROVIDER}/embedded" if self.model is None else str(self.model)

    @property
    def context_window(self) -> int | None:
        """Tokens that prompt and answer may have together, where that is known without loading weights."""
        if isinstance(self.model, InvariantModel):
            return self.model.context_window
        return stated_context_window(self.model)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """Everything that can change an output: LangChain's caches and traces are keyed by this."""
        names = ("max_segment_tokens", "overflow", "dtype", "device_map", "revision", "model_kwargs")
        more = ("generation_kwargs", "batch_size", "micro_batching", *PER_CALL)
        model = fingerprint(self.model) if isinstance(self.model, InvariantModel) else self.display_name
        return {
            "model": model,
            "method": described(self.method or ""),
            "ordering": described(self.ordering or ""),
            "backend": self.backend,
            "intervention": repr(self._intervention),
            **{name: getattr(self, name) for name in (*names, *more)},
            "own_stop": self.stop,  # LangChain writes what the call says into "stop"
            "versions": [invariant_rag.__version__, __version__],
        }

    def get_token_ids(self, text: str) -> list[int]:
        """Return the token ids of a text, without any that the tokenizer puts around it."""
        return list(tokenize_text(text, self.engine.tokenizer))

    def _ls_params(
        self, kind: Literal["chat", "llm"], stop: list[str] | None, kwargs: Mapping[str, Any]
    ) -> LangSmithParams:
        params = LangSmithParams(
            ls_provider=PROVIDER,
            ls_model_name=kwargs.get("model", self.display_name),
            ls_model_type=kind,
            ls_temperature=kwargs.get("temperature", self.temperature),
            ls_max_tokens=kwargs.get("max_tokens", self.max_tokens),
        )
        if stop or self.stop:
            params["ls_stop"] = stop or self.stop
        return params

    def _call(self, stop: list[str] | None, keywords: Mapping[str, Any]) -> Call:
        """Return what one call asks for: the keywords of the call, over the parameters of the object."""
        return call_of(self.__dict__, stop, keywords)

    def _generate_all(self, prompts: Sequence[Prompt], call: Call) -> list[Generation]:
        """Return one generation per prompt, decoded together where that is possible and wanted."""
        engine = self.engine
        if self.micro_batching and len(prompts) == 1 and not call.alone:
            options = replace(call, abandoned=None).options(engine)  # others may be in the batch
            identity = str(self._identifying_params)
            return [self._batcher.generate(engine, prompts[0], options, identity=identity, batch_size=self.batch_size)]
        size = 1 if call.alone else self.batch_size
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]
        return [each for batch in batches for each in engine.generate(batch, **call.options(engine))]


def _default(name: str) -> Any:
    return InvariantParameters.model_fields[name].get_default(call_default_factory=True)
