"""InvariantLLM: an invariant-rag model as an LLM of LlamaIndex."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from llama_index.core.base.llms import types
from llama_index.core.base.llms.generic_utils import messages_to_prompt as generic_messages_to_prompt
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, TextBlock
from llama_index.core.bridge.pydantic import BaseModel, Field, PrivateAttr, model_serializer
from llama_index.core.instrumentation.events.llm import LLMStructuredPredictEndEvent, LLMStructuredPredictStartEvent
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.function_calling import FunctionCallingLLM
from llama_index.core.llms.llm import ToolSelection, default_completion_to_prompt
from llama_index.core.output_parsers import PydanticOutputParser
from llama_index.core.program.utils import FlexibleModel, create_flexible_model
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.tools import BaseTool
from llama_index.core.types import Model
from llama_index_instrumentation import get_dispatcher
from pydantic_core import from_json

from invariant_rag.checks import check_stops, check_tools
from invariant_rag.errors import InvalidTool, UnknownParameter, UnsupportedCombination, UnsupportedModel
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.json_schema import parse_object
from invariant_rag.generation.prepare import Overflow
from invariant_rag.methods import resolve_method
from invariant_rag.orderings import Ordering, resolve_ordering
from invariant_rag.prompts import Turn
from invariant_rag.prompts.tools import choice_of
from invariant_rag.remote import RemoteModel
from invariant_rag.segments import Prompt, document_rendering
from llama_index.llms.invariant_rag import responses
from llama_index.llms.invariant_rag.responses import ModelCall, as_chat, as_completion
from llama_index.llms.invariant_rag.slots import Part, RecognizedTurns, SegmentReader

if TYPE_CHECKING:
    from invariant_rag import InvariantModel, KeyValueCache

dispatcher = get_dispatcher(__name__)

_CHOICES = ("method", "ordering", "backend", "max_segment_tokens", "overflow")
_LOADING = (*_CHOICES, "dtype", "device_map", "model_kwargs")
_OF_LOCAL_MODELS = ("backend", "max_segment_tokens", "dtype", "device_map", "model_kwargs")
_DECODING = ("temperature", "top_p", "top_k", "seed")
_PER_CALL = (*_DECODING, "logprobs", "top_logprobs", "citations", "max_tokens", "stop", "json_mode")


class InvariantLLM(SegmentReader, FunctionCallingLLM):
    """A causal LM for which segments are a set: their order does not change the answer, bit for bit.

    Segments are what `InvariantSynthesizer` passes, citable blocks, what `SegmentMarkerPostprocessor` marks, and a
    template's variable, a tool's message or a content block that is nothing but what was retrieved at once in the same
    run. Other text reaches the model unchanged. Where the order of nodes may change the answer, an `OrderWarning` says
    what to do.

    Weights are loaded at the first call. Each method takes the sampling parameters below for one call, `query` (what
    relevance orderings compare segments with), and every keyword of transformers' `generate`.

    Args:
        model: A hub id, a folder, or an `InvariantModel`. None: the embedded model, which needs no network.
        key_value_cache: Caches keys and values of segments for later calls; LLMs may share it. None: that of the
            model in memory. It is no part of `to_dict` and pickles.
        api_key: Key for the server at `base_url`. It is in pickles, and not in `to_dict`.
        **kwargs: The fields of this class, but for a model in memory not those of loading, and no `messages_to_prompt`.
    """

    model: str | None = Field(None, frozen=True, description="Hub id or folder; None for the embedded model.")
    method: str = Field("rotor", frozen=True, description="How segments attend to each other: `invariant-rag methods`.")
    ordering: str | None = Field(None, frozen=True, description="The order of segments; None: the method's own.")
    backend: str = Field("auto", frozen=True, description="The implementation of attention: auto, sdpa or reference.")
    dtype: str = Field("auto", frozen=True, description="Type of the weights, as in transformers.")
    device_map: str | dict[str, Any] | None = Field("auto", frozen=True, description="As in transformers.")
    max_segment_tokens: int | None = Field(None, frozen=True, description="The most tokens of one segment.")
    overflow: Overflow = Field("error", frozen=True, description="Too long: error, drop_last or trim_segments.")
    model_kwargs: dict[str, Any] = Field({}, frozen=True, description="More keywords of from_pretrained.")

    max_tokens: int = Field(256, gt=0, description="The most tokens to generate.")
    temperature: float = Field(0.0, ge=0.0, description="0 decodes greedily; above, tokens are sampled.")
    top_p: float | None = Field(None, description="Sample from the most likely tokens of this total mass.")
    top_k: int | None = Field(None, description="Sample from this many of the most likely tokens.")
    stop: list[str] = Field([], description="Strings that end the answer; they are not part of it.")
    seed: int | None = Field(None, description="Seed for sampling.")
    generation_kwargs: dict[str, Any] = Field({}, description="More keywords of `generate`.")
    template_kwargs: dict[str, Any] = Field({}, description="Variables of the chat template, as enable_thinking.")
    json_mode: bool = Field(False, description="Whether every answer is a JSON object.")
    logprobs: bool = Field(False, description="Whether responses hold the log-probabilities of their tokens.")
    top_logprobs: int | None = Field(None, ge=0, le=20, description="How many of the likeliest tokens to report, too.")
    citations: bool = Field(False, description="Whether to cite the nodes that contain a sentence word for word.")

    context_window: int | None = Field(None, gt=0, description="Tokens for LlamaIndex; None: those of the model.")
    is_function_calling_model: bool = Field(True, description="Whether tools are offered in the chat template.")

    base_url: str | None = Field(None, frozen=True, description="Address of `invariant-rag serve`: no torch here.")
    timeout: float = Field(300.0, gt=0, description="Seconds for an answer of that server.")
    max_retries: int = Field(2, ge=0, description="How often to retry if that server is busy.")

    _lazy: Any = PrivateAttr(default=None)  # a LazyModel
    _remote: RemoteModel | None = PrivateAttr(default=None)

    def __init__(
        self,
        model: str | Path | InvariantModel | None = None,
        key_value_cache: KeyValueCache | None = None,
        api_key: str | None = None,
        **kwargs: Any,
    ) -> None:
        _check_parameters(kwargs, type(self).model_fields)
        loaded = None if isinstance(model, str | Path | None) else model
        name = str(model) if isinstance(model, str | Path) else None
        if loaded is not None and not hasattr(loaded, "with_method"):
            raise UnsupportedModel(
                f"expected a hub id, a folder or an InvariantModel, got {type(loaded).__name__}",
                hint="Wrap a model of transformers: InvariantModel(model, tokenizer).",
            )
        if kwargs.get("messages_to_prompt") not in (None, generic_messages_to_prompt):
            raise UnsupportedCombination(
                "expected no messages_to_prompt: the chat template of the tokenizer writes conversations",
                hint="Set tokenizer.chat_template, or pass the text to complete().",
            )
        is_remote = kwargs.get("base_url") is not None
        refused = [each for each in (_OF_LOCAL_MODELS if is_remote else _LOADING) if each in kwargs]
        if is_remote:
            others = {"key_value_cache": key_value_cache, "a model in memory": loaded}
            refused += [name for name, value in others.items() if value is not None]
        if refused and (is_remote or loaded is not None):
            raise UnsupportedCombination(
                f"expected {'base_url' if is_remote else 'a model in memory'} without {', '.join(refused)}",
                hint="The server at base_url has its own. For a model in memory: model.with_method(...).",
            )
        if loaded is not None:
            kwargs |= {each: getattr(loaded, each).name for each in ("method", "ordering", "backend")}
            kwargs |= {"dtype": str(loaded.model.dtype).removeprefix("torch."), "device_map": None}
        super().__init__(**{"model": loaded.name if loaded else name, **kwargs})
        if is_remote:
            retrying: dict[str, Any] = {"timeout": self.timeout, "max_retries": self.max_retries}
            self._remote = RemoteModel(str(self.base_url), model=name, api_key=api_key, **retrying)
        else:  # models of a server need no torch, so what imports it is imported here
            from invariant_rag.attention import resolve_backend
            from invariant_rag.generation.lazy_model import LazyModel

            self.max_tokens = self.generation_kwargs.pop("max_new_tokens", self.max_tokens)
            loading = {"dtype": self.dtype, "device_map": self.device_map, **self.model_kwargs}
            self._lazy = LazyModel(loaded or name, None if loaded else loading, cache=key_value_cache)
            if loaded is None:
                resolve_backend(self.backend)
        _ = self._ordering  # checks the names

    @property
    def metadata(self) -> LLMMetadata:
        """Context window and name of the model; needs its configuration, and no weights."""
        window = self.context_window or (self._remote or self._lazy).context_window()
        return LLMMetadata(
            context_window=window or 2**31 - 1,
            num_output=self.max_tokens,
            is_chat_model=True,
            is_function_calling_model=self.is_function_calling_model,
            model_name=self.model or "embedded",
        )

    def to_payload(self) -> dict[str, Any]:
        """Return what events report of this model; none waits for a disk or a hub."""
        fields = {name: getattr(self, name) for name in ("model", "method", "max_tokens", "temperature")}
        return {"class_name": self.class_name(), **fields, "ordering": self._ordering.name}

    @property
    def lm(self) -> InvariantModel:
        """The model that generates, with the choices of this object. Loads the weights on first use."""
        if self.base_url is not None:
            raise UnsupportedCombination(
                f"expected a model on this machine, got one at {self.base_url}", hint="Leave base_url away."
            )
        choices = {} if self._loaded else {name: getattr(self, name) for name in _CHOICES}
        lm: InvariantModel = self._lazy.lm(**choices)
        return lm

    @property
    def _loaded(self) -> InvariantModel | None:
        """The model that was passed in memory."""
        return self._lazy.lm() if self._lazy is not None and self._lazy.in_memory else None

    @property
    def _ordering(self) -> Ordering:
        if self._loaded is not None:
            return self._loaded.ordering
        return resolve_ordering(self.ordering, resolve_method(self.method).default_ordering)

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text, without chat template."""
        return self._text_call(prompt, formatted, kwargs).reply(as_completion)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation, with segments in any turn."""
        return self._chat_call(messages, kwargs).reply(as_chat)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> types.CompletionResponseGen:
        """Stream the completion of a text."""
        return self._text_call(prompt, formatted, kwargs).stream(as_completion)

    @llm_chat_callback()
    def stream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseGen:
        """Stream the answer to a conversation."""
        return self._chat_call(messages, kwargs).stream(as_chat)

    @llm_completion_callback()
    async def acomplete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        """Complete a text in a thread; cancelling the task ends the generation."""
        return await self._text_call(prompt, formatted, kwargs).areply(as_completion)

    @llm_chat_callback()
    async def achat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        """Answer a conversation in a thread; cancelling the task ends the generation."""
        return await self._chat_call(messages, kwargs).areply(as_chat)

    @llm_completion_callback()
    async def astream_complete(
        self, prompt: str, formatted: bool = False, **kwargs: Any
    ) -> types.CompletionResponseAsyncGen:
        """Stream the completion of a text; closing the stream ends the generation."""
        return self._text_call(prompt, formatted, kwargs).astream(as_completion)

    @llm_chat_callback()
    async def astream_chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> types.ChatResponseAsyncGen:
        """Stream the answer to a conversation; closing the stream ends the generation."""
        return self._chat_call(messages, kwargs).astream(as_chat)

    def _recognized(self, turns: Sequence[Turn]) -> RecognizedTurns:
        loaded = self._loaded
        routed = loaded is not None and hasattr(loaded, "plain_order") and not loaded.invariant
        return self._recognize(turns, promises=self._ordering.invariant, routed=routed, text_only=True)

    def _text_call(self, prompt: str, formatted: bool, kwargs: dict[str, Any]) -> ModelCall:
        to_prompt = self.completion_to_prompt or default_completion_to_prompt
        conversation = self._recognized([Turn("user", (Part(prompt if formatted else to_prompt(prompt), "finished"),))])
        query = kwargs.pop("query", conversation.query)
        rendered = Prompt.of(*conversation.turns[0].parts, query=query, rendering=document_rendering).to_complete()
        return self._call(conversation, kwargs, prompt=rendered)

    def _chat_call(self, messages: Sequence[ChatMessage], kwargs: dict[str, Any]) -> ModelCall:
        conversation = self._recognized(responses.to_turns(messages))
        options = dict(kwargs)
        tools = [
            tool.metadata.to_openai_tool(skip_length_check=True) if isinstance(tool, BaseTool) else tool
            for tool in check_tools(options.pop("tools", None))
        ]
        if tools and options.get("output_cls") is not None:
            raise UnsupportedCombination(
                "expected either tools or an output class, got both",
                hint="Call the tools first, then request the object.",
            )
        fields: dict[str, Any] = {
            "messages": responses.chat_messages(conversation.turns, messages),
            "question": options.pop("query", conversation.query),
            "tools": tools,
            "tool_choice": choice_of(options.pop("tool_choice", None)),
            "parallel": bool(options.pop("allow_parallel_tool_calls", True)),
            "template_kwargs": {**self.template_kwargs, **(options.pop("template_kwargs", None) or {})},
        }
        return self._call(conversation, options, **fields)

    def _call(self, conversation: RecognizedTurns, kwargs: Mapping[str, Any], **fields: Any) -> ModelCall:
        options = {**{name: getattr(self, name) for name in _PER_CALL}, **self.generation_kwargs, **kwargs}
        top = options.pop("top_logprobs") or 0
        json_mode, output_cls = options.pop("json_mode"), options.pop("output_cls", None)
        request = AnswerRequest(
            **fields,
            **{name: options.pop(name) for name in _DECODING},
            logprobs=bool(options.pop("logprobs") or top),
            top_logprobs=top,
            citations=bool(options.pop("citations")),
            schema={"type": "object"} if output_cls is None and json_mode else output_cls,
            stop=tuple(check_stops(options.pop("stop"))),
            max_new_tokens=options.pop("max_tokens"),
            options=options,
            recognized=conversation.recognized,
        )
        if self._remote is not None:
            choices = {name: getattr(self, name) for name in ("method", "ordering", "overflow")}
            chosen = {name: value for name, value in choices.items() if name in self.model_fields_set}
            return ModelCall(request, conversation.sinks, self._remote, chosen)
        return ModelCall(request, conversation.sinks, lambda: self.lm)

    def _prepare_chat_with_tools(
        self,
        tools: Sequence[BaseTool],
        user_msg: str | ChatMessage | None = None,
        chat_history: list[ChatMessage] | None = None,
        verbose: bool = False,
        allow_parallel_tool_calls: bool = False,
        tool_required: bool = False,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Return the keywords of `chat`. A `tool_choice` among them has precedence over `tool_required`."""
        messages = list(chat_history or ())
        if user_msg is not None:
            messages.append(ChatMessage(user_msg, role="user") if isinstance(user_msg, str) else user_msg)
        fields = {"messages": messages, "tools": list(tools), "allow_parallel_tool_calls": allow_parallel_tool_calls}
        choice = kwargs.pop("tool_choice", None)
        default = "required" if tool_required else "auto"
        return {**kwargs, **fields, "tool_choice": default if choice is None else choice}

    def get_tool_calls_from_response(
        self, response: ChatResponse, error_on_no_tool_call: bool = True, **kwargs: Any
    ) -> list[ToolSelection]:
        """Return the calls in a response. While it is being streamed, the last one has the arguments written so far."""
        blocks = [block for block in response.message.blocks if isinstance(block, types.ToolCallBlock)]
        if not blocks and error_on_no_tool_call:
            hint = "Set tool_required=True or tool_choice: then every answer is a call. Or error_on_no_tool_call=False."
            raise InvalidTool(f"expected a call of a tool, got the text {response.message.content!r}", hint=hint)
        return [
            ToolSelection(tool_id=each.tool_call_id or "", tool_name=each.tool_name, tool_kwargs=_arguments(each))
            for each in blocks
        ]

    @dispatcher.span
    def structured_predict(self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any) -> Model:
        """Answer with an object: decoding writes JSON of its schema. One that ended early is an `IncompleteObject`."""
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=values))
        messages = self._messages_with_schema(output_cls, prompt, values)
        return _object(self.chat(messages, output_cls=output_cls, **(llm_kwargs or {})), output_cls)

    @dispatcher.span
    async def astructured_predict(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> Model:
        """Answer with an object as `structured_predict` does; the event loop goes on."""
        dispatcher.event(LLMStructuredPredictStartEvent(output_cls=output_cls, template=prompt, template_args=values))
        messages = self._messages_with_schema(output_cls, prompt, values)
        return _object(await self.achat(messages, output_cls=output_cls, **(llm_kwargs or {})), output_cls)

    def _structured_stream_call(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> Generator[Model | FlexibleModel, None, None]:
        """Yield the object as it grows, for `stream_structured_predict`: with what is there so far, and then whole."""
        messages = self._messages_with_schema(output_cls, prompt, values)
        partial_cls, before = create_flexible_model(output_cls), None
        for response in self.stream_chat(messages, output_cls=output_cls, **(llm_kwargs or {})):
            text = response.message.content or ""
            if response.raw is not None:
                yield parse_object(text, output_cls)
                continue
            parsed = from_json(text, allow_partial="trailing-strings") if text.strip() else None
            if isinstance(parsed, dict) and parsed != before:
                before = parsed
                yield partial_cls.model_validate(parsed)

    async def _structured_astream_call(
        self, output_cls: type[Model], prompt: Any, llm_kwargs: Any = None, **values: Any
    ) -> AsyncGenerator[Model | FlexibleModel, None]:
        return responses.iterate_in_thread(self._structured_stream_call(output_cls, prompt, llm_kwargs, **values))

    def _messages_with_schema(
        self, output_cls: type[BaseModel], prompt: BasePromptTemplate, values: Mapping[str, Any]
    ) -> list[ChatMessage]:
        """Return the messages of a template, with the schema of the requested object after the last one."""
        *before, last = self._get_messages(prompt, **values)
        schema = PydanticOutputParser(output_cls).get_format_string(escape_json=False)
        return [*before, ChatMessage(role=last.role, blocks=[*last.blocks, TextBlock(text=schema)])]

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy that shares the weights; refuse unknown fields and loading options."""
        if changed := [name for name in ("model", "key_value_cache", *_LOADING) if name in (update or {})]:
            raise UnsupportedCombination(
                f"a copy shares the loaded model and takes no {', '.join(changed)}",
                hint="Use InvariantLLM(llm.lm.with_method(...)): same weights, another method.",
            )
        _check_parameters(update or {}, type(self).model_fields)
        return super().model_copy(update=update, deep=deep)

    @model_serializer(mode="wrap")
    def custom_model_dump(self, handler: Any, info: Any) -> dict[str, Any]:
        """Return the fields, with the digest of a model in memory, for keys of caches such as an `IngestionCache`."""
        fields: dict[str, Any] = {**handler(self), "class_name": self.class_name()}
        if self._loaded is not None:
            from invariant_rag.generation.digest import model_digest

            fields["model_digest"] = model_digest(self._loaded)
        return fields

    def to_dict(self, **kwargs: Any) -> dict[str, Any]:
        """Return the fields, from which `from_dict` builds an equal LLM; no field describes a model in memory."""
        self._check_name()
        return super().to_dict(**kwargs)

    def __getstate__(self) -> dict[str, Any]:
        self._check_name()
        return super().__getstate__()

    def _check_name(self) -> None:
        if self._loaded is not None:
            raise UnsupportedCombination(
                f"expected a model that can be loaded again by its name, got {self.model!r} as an object in memory",
                hint="Save it with save_pretrained, and pass the folder to InvariantLLM.",
            )


def _check_parameters(names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(names).difference(known)):
        hint = f"`max_new_tokens` is `max_tokens` here. {UnknownParameter.hint}"
        raise UnknownParameter("InvariantLLM", unknown, known, hint=hint)


def _arguments(call: types.ToolCallBlock) -> dict[str, Any]:
    """Return the arguments of a call from what is written of them so far."""
    written = call.tool_kwargs
    if isinstance(written, Mapping):
        return dict(written)
    parsed = from_json(written, allow_partial="trailing-strings") if written.strip() else {}
    return parsed if isinstance(parsed, dict) else {}


def _object(response: ChatResponse, output_cls: type[Model]) -> Model:
    parsed: Model = parse_object(response.message.content or "", output_cls)
    dispatcher.event(LLMStructuredPredictEndEvent(output=parsed))
    return parsed
