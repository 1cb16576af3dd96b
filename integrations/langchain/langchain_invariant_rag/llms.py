"""InvariantLLM: a LangChain completion model that is invariant to the order of segments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from threading import Event
from typing import Annotated, Any
from uuid import UUID

from invariant_rag.generation.answers import AnswerRequest, Reply
from invariant_rag.prompts import Turn, mark
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableConfig, ensure_config
from pydantic import SkipValidation

from langchain_invariant_rag.answering import PER_CALL, iterate_off_the_loop, off_the_loop, report_of, usage_of
from langchain_invariant_rag.parameters import InvariantParameters
from langchain_invariant_rag.recognition import given_segments
from langchain_invariant_rag.tracking import run_of, runs_of
from langchain_invariant_rag.turns import in_order_of_calls, to_turns

_LANGCHAIN_KEYWORDS = frozenset({"callbacks", "tags", "metadata", "run_name", "run_id"})


class RecognizedText(str):  # noqa: SLOT000 - it has attributes
    """A text whose segments are known. The text itself is a key of caches, and what callbacks see.

    Attributes:
        prompt: The prompt.
        recognized: Whether everything in it was understood.
    """

    prompt: Prompt
    recognized: bool


class RecognizedValue(PromptValue):
    """A prompt that holds a recognised text."""

    text: Annotated[str, SkipValidation]

    def to_string(self) -> str:
        """Return the text."""
        return self.text

    def to_messages(self) -> list[BaseMessage]:
        """Return the text as a message."""
        return [HumanMessage(content=self.text)]


class InvariantLLM(InvariantParameters, BaseLLM):
    """A completion model whose output does not depend on the order of the segments.

    A prompt is a string. Its segments are marked by `SEGMENT_PROMPT`, `as_segments` or `invariant_rag.prompts.mark`.
    Documents in chat messages and in a `documents=` keyword become segments too; those of the keyword come first. A
    line break follows segments that a prompt ends with.

    Example:
        ```python
        llm = InvariantLLM(model="Qwen/Qwen2.5-7B", method="rotor", max_tokens=64)
        chain = {"context": as_segments(retriever), "question": RunnablePassthrough()} | prompt | llm
        ```
    """

    @property
    def _llm_type(self) -> str:
        return "invariant-rag"

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        return self._ls_params("llm", stop, kwargs)

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, **(self._cache_key if self._uses_cache else {})}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        """Convert messages to text with segment markers; LangChain's own conversion drops documents."""
        if isinstance(model_input, RecognizedValue):
            return model_input
        value = super()._convert_input(model_input)
        if isinstance(value, ChatPromptValue):
            messages = map(_marked, in_order_of_calls(value.messages))
            return StringPromptValue(text=get_buffer_string(list(messages)))
        return value

    def _recognized(self, prompt: str, run: UUID | None, documents: Any) -> RecognizedText:
        """Return a prompt with its sets; one that was recognised before, as it is."""
        if isinstance(prompt, RecognizedText):
            return prompt
        found = self._recognize([Turn("user", (*given_segments(documents), prompt))], run, (), [prompt])
        (turn,) = found.turns
        parts = [
            _sorted(part) if isinstance(part, SegmentSet) and self._sorts_segments else part for part in turn.parts
        ]
        text = RecognizedText("".join(_bounded(part) if isinstance(part, SegmentSet) else part for part in parts))
        text.prompt = Prompt.of(*parts, rendering=document_rendering).to_complete()
        text.recognized = not found.findings
        return text

    def generate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Generate for a batch of prompts.

        The keys of LangChain's cache do not include the keywords of a call. So keywords that change the output are set
        on a copy of this model, and documents are written into the prompts, before the cache is looked up.
        """
        model, texts, options = self._bind_keywords(prompts, callbacks, kwargs)
        return super(InvariantLLM, model).generate(texts, stop, callbacks, *args, **options)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, callbacks: Any = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Generate for a batch of prompts; see `generate`."""
        model, texts, options = self._bind_keywords(prompts, callbacks, kwargs)
        result: LLMResult = await super(InvariantLLM, model).agenerate(texts, stop, callbacks, *args, **options)
        return result

    def _bind_keywords(
        self, prompts: list[str], callbacks: Any, keywords: Mapping[str, Any]
    ) -> tuple[InvariantLLM, list[str], dict[str, Any]]:
        """Return the model with the call's parameters, the prompts with its documents, and LangChain's keywords."""
        langchain_options = {name: value for name, value in keywords.items() if name in _LANGCHAIN_KEYWORDS}
        parameters = {name: value for name, value in keywords.items() if name not in _LANGCHAIN_KEYWORDS}
        documents = parameters.pop("documents", None)
        update = {name: parameters.pop(name) for name in (*PER_CALL, "model") if name in parameters}
        if parameters:
            update["generation_kwargs"] = {**self.generation_kwargs, **parameters}
        model = self.model_copy(update=update) if update else self
        runs = runs_of(callbacks, len(prompts))
        texts = [self._recognized(prompt, run, documents) for prompt, run in zip(prompts, runs, strict=True)]
        return model, list(texts), langchain_options

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[str]:  # noqa: A002
        """Stream; see `BaseLLM.stream`."""
        value, settled = self._recognized_input(input, config, kwargs)
        yield from super().stream(value, settled, **kwargs)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[str]:  # noqa: A002
        """Stream; see `BaseLLM.astream`."""
        value, settled = self._recognized_input(input, config, kwargs)
        async for piece in super().astream(value, settled, **kwargs):
            yield piece

    def _recognized_input(
        self, model_input: Any, config: RunnableConfig | None, keywords: dict[str, Any]
    ) -> tuple[RecognizedValue, RunnableConfig]:
        settled = ensure_config(config)
        text = self._convert_input(model_input).to_string()
        recognized = self._recognized(text, run_of(settled.get("callbacks")), keywords.pop("documents", None))
        return RecognizedValue(text=recognized), settled

    def _asked(self, prompt: str, stop: list[str] | None, keywords: Mapping[str, Any]) -> AnswerRequest:
        text = self._recognized(prompt, None, None)
        return self._request(stop, keywords, recognized=text.recognized, prompt=text.prompt)

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        abandoned = kwargs.pop("abandoned", None)
        replies = self._replies([self._asked(each, stop, kwargs) for each in prompts], abandoned)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = {name: sum(getattr(each.usage, name) for each in replies) for name in names}
        return LLMResult(
            generations=[[Generation(text=each.first.content, generation_info=self._info(each))] for each in replies],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )

    async def _agenerate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        return await off_the_loop(lambda abandoned: self._generate(prompts, stop, **{**kwargs, "abandoned": abandoned}))

    def _stream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[GenerationChunk]:
        abandoned: Event | None = kwargs.pop("abandoned", None)
        for piece in self._pieces(self._asked(prompt, stop, kwargs), abandoned):
            info = self._info(piece) if isinstance(piece, Reply) else None
            chunk = GenerationChunk(text="" if isinstance(piece, Reply) else piece.content, generation_info=info)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        prompt: str,
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[GenerationChunk]:
        async for chunk in iterate_off_the_loop(
            lambda abandoned: self._stream(prompt, stop, **{**kwargs, "abandoned": abandoned})
        ):
            if run_manager:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _info(self, reply: Reply) -> dict[str, Any]:
        return {**report_of(reply.first, reply, self.model_name), "usage_metadata": usage_of(reply)}


def _sorted(segments: SegmentSet) -> SegmentSet:
    return SegmentSet(sorted(segments, key=lambda each: each.canonical_key), slots=segments.slots)


def _bounded(segments: SegmentSet) -> str:
    """Return a set as text in which the boundaries of segments show, so that no other prompt has the same text."""
    texts = [mark(each, nonce="") for each in segments]
    if segments.slots is None:
        return "".join(texts)
    pairs = zip(segments.slots, map(Segment, texts), strict=True)
    return "".join(slot.render(each) for slot, each in pairs)


def _marked(message: BaseMessage) -> BaseMessage:
    """Return a message whose documents are marked segments in its text."""
    if isinstance(message, AIMessage):
        return message
    (turn,) = to_turns([message])
    segments = [part for part in turn.parts if isinstance(part, str | Segment)]
    text = "".join(mark(each) if isinstance(each, Segment) else each for each in segments)
    return message.model_copy(update={"content": text})
