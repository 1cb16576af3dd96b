"""InvariantLLM: an invariant-rag model as an LLM of LlamaIndex."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

from llama_index.core.base.llms.types import (
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    CompletionResponse,
    CompletionResponseAsyncGen,
    CompletionResponseGen,
    LLMMetadata,
)
from llama_index.core.bridge.pydantic import Field, PrivateAttr
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.llm import default_completion_to_prompt

from invariant_rag.checks import check_stops
from invariant_rag.errors import UnsupportedCombination
from invariant_rag.generation.overflow import Overflow
from invariant_rag.methods import resolve_method
from invariant_rag.orderings import resolve_ordering
from invariant_rag.prompts import Recognition, Turn
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import Prompt, document_rendering
from llama_index.llms.invariant_rag.chat_responses import as_async_chat_stream, as_chat, as_chat_stream
from llama_index.llms.invariant_rag.choices import check_call_keywords, check_model, check_names, check_parameters
from llama_index.llms.invariant_rag.function_calling import ChatOptions
from llama_index.llms.invariant_rag.messages import chat_messages, to_turns
from llama_index.llms.invariant_rag.objects import ObjectWriter
from llama_index.llms.invariant_rag.recognition import FIND_DOCUMENTS, REQUIRE_SEGMENTS, STRICT, Recognizer
from llama_index.llms.invariant_rag.remote import RemoteRequest, request_fields
from llama_index.llms.invariant_rag.responses import as_async_stream, as_completion, as_stream
from llama_index.llms.invariant_rag.tracking import track_spans

if TYPE_CHECKING:
    from invariant_rag import InvariantModel, KeyValueCache
    from llama_index.llms.invariant_rag.local import LocalRequest

# Models of a server need no torch, so what imports it is imported where it is used.

_NO_LIMIT = 2**31 - 1
_CHOICES = ("method", "ordering", "backend", "max_segment_tokens", "overflow")
_LOADING = (*_CHOICES, "dtype", "device_map", "model_kwargs")
_OF_LOCAL_MODELS = ("backend", "max_segment_tokens", "dtype", "device_map", "model_kwargs")
_DECODING = ("max_tokens", "temperature", "top_p", "top_k", "stop", "seed")
_REPORTING = ("logprobs", "citations")
_PER_CALL = (*_DECODING, *_REPORTING, "query", "output_cls")


class InvariantLLM(ObjectWriter):
    """A causal LM for which segments are a set: their order does not change the answer, bit for bit.

    Segments are nodes that were retrieved in the same trace, wherever their text appears in a prompt; citable blocks
    of a chat message (`InvariantSynthesizer` writes them); and what is marked inside a string
    (`SegmentMarkerPostprocessor` does that). Text without segments is answered as by the plain model. Where the order
    of nodes may change the answer all the same, an `OrderWarning` says why, and what to do.

    A chat takes tools: every call that it answers with is well-formed, whatever the weights. Reasoning before an answer
    is a `ThinkingBlock`.

    Weights are loaded at the first call. Every method takes the sampling parameters below as keywords for one call,
    `query` (what relevance orderings compare segments with), and every keyword of transformers' `generate`.

    Args:
        model: A hub id, a folder, or an `InvariantModel`. None: the embedded model, which needs no network.
        api_key: Key for the server at `base_url`; no part of `to_dict` and pickles.
        key_value_cache: Keeps keys and values of segments for calls with the same ones, in any order; LLMs may share
            one. None: that of the model in memory. It changes no answer, and is no part of `to_dict` and pickles.
        **kwargs: The fields of this class.

    Raises:
        UnknownName: No such method, ordering or backend.
        UnknownParameter: There is no such field. Calls raise it for keywords that they do not know.
        UnsupportedCombination: There are loading options for a model in memory.
        UnsupportedModel: The model is neither a name nor an `InvariantModel`.
    """

    model: str | None = Field(frozen=True, default=None, description="Hub id or folder; None for the embedded model.")
    method: str = Field(
        frozen=True, default="rotor", description="How segments see each other: see `invariant-rag methods`."
    )
    ordering: str | None = Field(
        frozen=True, default=None, description="The order of the segments; None: the method's own."
    )
    backend: str = Field(
        frozen=True, default="auto", description="The implementation of attention: auto, sdpa or reference."
    )
    dtype: str = Field(
        frozen=True, default="auto", description="Floating-point type of the weights, as in transformers."
    )
    device_map: str | dict[str, Any] | None = Field(frozen=True, default="auto", description="As in transformers.")
    max_segment_tokens: int | None = Field(frozen=True, default=None, description="The most tokens of one segment.")
    overflow: Overflow = Field(
        frozen=True, default="error", description="Prompt too long: error, drop_last or trim_segments."
    )
    model_kwargs: dict[str, Any] = Field(
        frozen=True, default_factory=dict, description="More keywords of from_pretrained."
    )
    max_tokens: int = Field(default=256, description="The most tokens to generate.", gt=0)
    temperature: float = Field(default=0.0, description="0 decodes greedily; above, tokens are sampled.", ge=0.0)
    top_p: float | None = Field(default=None, description="Sample from the most likely tokens of this total mass.")
    top_k: int | None = Field(default=None, description="Sample from this many of the most likely tokens.")
    stop: list[str] = Field(default_factory=list, description="Strings that end the answer; they are not part of it.")
    seed: int | None = Field(default=None, description="Seed for sampling.")
    generation_kwargs: dict[str, Any] = Field(default_factory=dict, description="More keywords of `generate`.")

    find_documents: bool = Field(default=True, description=FIND_DOCUMENTS)
    strict: bool = Field(default=False, description=STRICT)
    require_segments: bool = Field(default=False, description=REQUIRE_SEGMENTS)

    template_kwargs: dict[str, Any] = Field(
        default_factory=dict, description="Variables of the chat template, such as enable_thinking."
    )
    logprobs: bool = Field(default=False, description="Whether responses hold the log-probabilities of their tokens.")
    citations: bool = Field(
        default=False,
        description=(
            "Whether to report the sentences of an answer that a node contains word for word, and the nodes that it "
            "names by number, such as [2]: as CitationBlocks of the message, and in the report."
        ),
    )

    batch_size: int = Field(default=8, description="With micro_batching: the most calls to decode together.", ge=1)
    micro_batching: bool = Field(
        default=False,
        description=(
            "Whether to decode concurrent calls (achat, acomplete, aquery; or threads) together. It is faster under "
            "load. But rounding depends on what else is in a batch, and then so may a low-precision model's answer; "
            "and a cancelled call runs on. Streams, sampled answers and objects are decoded alone."
        ),
    )

    base_url: str | None = Field(
        frozen=True,
        default=None,
        description="Address of `invariant-rag serve`: the model runs there, and torch is not needed here.",
    )
    timeout: float = Field(default=300.0, gt=0, description="Seconds for an answer of that server.")
    max_retries: int = Field(default=2, ge=0, description="How often to ask that server again if it is busy.")

    parses_marks: ClassVar[bool] = True
    _lazy: Any = PrivateAttr(default=None)  # a LazyModel
    _batcher: Any = PrivateAttr(default=None)  # a MicroBatcher
    _remote: RemoteModel | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | Path | InvariantModel | None = None,
        key_value_cache: KeyValueCache | None = None,
        api_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        check_model(model)
        check_parameters(kwargs, (*type(self).model_fields, "key_value_cache"))
        loaded = None if model is None or isinstance(model, str | Path) else model
        if kwargs.get("base_url") is not None:
            self._connect(loaded, None if model is None else str(model), key_value_cache, api_key, kwargs)
            return
        if loaded is not None:
            given = [name for name in _LOADING if name in kwargs]
            if given:
                raise UnsupportedCombination(
                    f"a model in memory takes no {', '.join(given)}", hint="Use model.with_method(...) first."
                )
            kwargs |= {
                "method": loaded.method.name,
                "ordering": loaded.ordering.name,
                "backend": loaded.backend.name,
                "dtype": str(loaded.model.dtype).removeprefix("torch."),
                "device_map": None,
            }
        name = str(model) if isinstance(model, str | Path) else None
        super().__init__(**{"model": loaded.name if loaded else name, **kwargs})
        self.max_tokens = self.generation_kwargs.pop("max_new_tokens", self.max_tokens)
        from invariant_rag.generation.batching import MicroBatcher
        from invariant_rag.generation.lazy import LazyModel

        self._batcher = MicroBatcher()
        if loaded is None:
            check_names(self.method, self.ordering, self.backend)
            options = {"dtype": self.dtype, "device_map": self.device_map, **self.model_kwargs}
            self._lazy = LazyModel(name, options, cache=key_value_cache)
        else:
            self._lazy = LazyModel(loaded, cache=key_value_cache)
        track_spans()

    def _connect(
        self, loaded: object, name: str | None, cache: object, api_key: str | None, kwargs: dict[str, Any]
    ) -> None:
        given = [each for each in _OF_LOCAL_MODELS if each in kwargs] + ["key_value_cache"] * (cache is not None)
        if given or loaded is not None:
            listed = ", ".join(given) or "a model in memory"
            raise UnsupportedCombination(
                f"expected base_url without {listed}: the server has its own", hint="Leave one of the two away."
            )
        super().__init__(**{"model": name, **kwargs})
        resolve_ordering(self.ordering, resolve_method(self.method).default_ordering)
        options: dict[str, Any] = {"timeout": self.timeout, "max_retries": self.max_retries}
        self._remote = RemoteModel(str(self.base_url), model=name, api_key=api_key, **options)
        track_spans()

    @classmethod
    def class_name(cls) -> str:
        """Return the stable id of this class."""
        return "InvariantLLM"

    @property
    def metadata(self) -> LLMMetadata:
        """Context window and name of the model; needs its configuration, and no weights."""
        window = self._lazy.context_window() if self._remote is None else self._remote.context_window()
        return LLMMetadata(
            context_window=window or _NO_LIMIT,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=True,
            model_name=self.model or "embedded",
        )

    def to_payload(self) -> dict[str, Any]:
        """Return what events report of this model. It needs no configuration: no event waits for a disk or a hub."""
        said = {name: getattr(self, name) for name in ("model", "method", "max_tokens", "temperature")}
        ordering = resolve_ordering(self.ordering, resolve_method(self.method).default_ordering)
        return {"class_name": self.class_name(), **said, "ordering": ordering.name}

    @property
    def lm(self) -> InvariantModel:
        """The model that generates, with the choices of this object. Loads the weights on first use.

        Raises:
            UnsupportedCombination: It runs on a server.
        """
        return self._load()

    def _load(self) -> InvariantModel:
        if self.base_url is not None:
            raise UnsupportedCombination(
                f"expected a model on this machine, got one at {self.base_url}", hint="Leave base_url away."
            )
        choices = {} if self._lazy.in_memory else {name: getattr(self, name) for name in _CHOICES}
        lm: InvariantModel = self._lazy.lm(**choices)
        return lm

    # --- the eight methods ---

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, without chat template. A line break follows nodes that it ends with."""
        return as_completion(self._text_request(prompt, formatted, kwargs).answer())

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, with segments in any turn."""
        return as_chat(self._chat_request(messages, kwargs).answer())

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Stream the completion of a text."""
        return as_stream(self._text_request(prompt, formatted, kwargs).stream())

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseGen:
        """Stream the answer to a conversation."""
        return as_chat_stream(self._chat_request(messages, kwargs).stream())

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text in a thread; cancelling the task ends the generation."""
        return as_completion(await self._text_request(prompt, formatted, kwargs).answer_in_thread())

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation in a thread; cancelling the task ends the generation."""
        return as_chat(await self._chat_request(messages, kwargs).answer_in_thread())

    @llm_completion_callback()
    async def astream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseAsyncGen:
        """Stream the completion of a text; closing the stream ends the generation."""
        return as_async_stream(self._text_request(prompt, formatted, kwargs).stream())

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponseAsyncGen:
        """Stream the answer to a conversation; closing the stream ends the generation."""
        return as_async_chat_stream(self._chat_request(messages, kwargs).stream())

    # --- requests ---

    def _recognize(self, turns: Sequence[Turn]) -> Recognition:
        loaded = self._lazy.lm() if self._in_memory else None
        if loaded is None:
            promises = resolve_ordering(self.ordering, resolve_method(self.method).default_ordering).invariant
        else:
            promises = loaded.ordering.invariant
        recognizer = Recognizer(
            self.find_documents,
            self.strict,
            self.require_segments,
            promises=promises,
            routed=loaded is not None and hasattr(loaded, "plain_order") and not loaded.invariant,
        )
        return recognizer.recognize(turns)

    @property
    def _in_memory(self) -> bool:
        return self._lazy is not None and self._lazy.in_memory

    def _text_request(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> LocalRequest | RemoteRequest:
        to_prompt = self.completion_to_prompt or default_completion_to_prompt
        found = self._recognize([Turn("user", (prompt if formatted else to_prompt(prompt),))])
        (turn,) = found.turns

        def build(_: InvariantModel, query: str | None) -> Prompt:
            return Prompt.of(*turn.parts, query=query, rendering=document_rendering).to_complete()

        return self._request(build, turn.parts, found, kwargs)

    def _chat_request(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> LocalRequest | RemoteRequest:
        found = self._recognize(to_turns(messages))
        read = chat_messages(found.turns, messages)
        chat, others = ChatOptions.take(kwargs, self.template_kwargs)

        def build(model: InvariantModel, query: str | None) -> Prompt:
            return chat.calling(model).prompt(read, query, **chat.template_kwargs)

        return self._request(build, read, found, others, chat)

    def _request(
        self,
        build: Callable[[InvariantModel, str | None], Prompt],
        content: Sequence[Any],
        found: Recognition,
        kwargs: dict[str, Any],
        chat: ChatOptions | None = None,
    ) -> LocalRequest | RemoteRequest:
        given = {
            **{name: getattr(self, name) for name in (*_DECODING, *_REPORTING)},
            **self.generation_kwargs,
            **kwargs,
        }
        if self._remote is None:
            check_call_keywords(given, _PER_CALL)
        query, stop, output_cls = (
            given.pop("query", None),
            check_stops(given.pop("stop")),
            given.pop("output_cls", None),
        )
        stops = [] if output_cls is not None else stop
        recognized = not found.findings
        reporting = {name: bool(given.pop(name)) for name in _REPORTING}
        if self._remote is not None:
            choices = {name: getattr(self, name) for name in ("method", "ordering", "overflow")}
            asked = {name: value for name, value in choices.items() if name in self.model_fields_set}
            given = {name: value for name, value in given.items() if value is not None}
            logprobs = reporting["logprobs"]
            fields = request_fields(given, asked, stops=stops, logprobs=logprobs, chat=chat, output_cls=output_cls)
            cites = reporting["citations"] and output_cls is None
            return RemoteRequest(self._remote, content, fields, chat is not None, recognized, cites)
        from llama_index.llms.invariant_rag.answering import MicroBatches, Reporting, Request, generation_options
        from llama_index.llms.invariant_rag.local import LocalRequest

        request = Request(
            lambda model: build(model, query),
            generation_options(**given),
            stops,
            output_cls,
            recognized,
            chat if output_cls is None else None,
            Reporting(**reporting),
        )
        batches = MicroBatches(self._batcher, self.batch_size) if self.micro_batching else None
        return LocalRequest(self._load, request, batches)

    # --- copies ---

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy that shares the weights.

        Raises:
            UnsupportedCombination: The update holds a loading option.
        """
        changed = [name for name in ("model", "key_value_cache", *_LOADING) if name in (update or {})]
        if changed:
            raise UnsupportedCombination(
                f"a copy shares the loaded model and takes no {', '.join(changed)}",
                hint="Use InvariantLLM(llm.lm.with_method(...)): same weights, another method.",
            )
        return super().model_copy(update=update, deep=deep)

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields, from which `from_dict` builds an equal LLM.

        Raises:
            UnsupportedCombination: The model was given in memory, so that no field describes it.
        """
        self._check_described()
        return super().to_dict(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self._check_described()
        return super().__getstate__()

    def _check_described(self) -> None:
        if self._in_memory:
            raise UnsupportedCombination(
                f"expected a model that can be loaded again by its name, got {self.model!r} as an object in memory",
                hint="Save it with save_pretrained, and give InvariantLLM the folder.",
            )
