"""InvariantLLM: a LangChain completion model that is invariant to the order of segments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from invariant_rag.generation.outputs import Generation as LMGeneration
from invariant_rag.prompts import parse_marked
from invariant_rag.segments import Prompt
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import BaseMessage, get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue

from langchain_invariant_rag.calls import Call, iterate_off_the_loop, off_the_loop, report_of, usage_of
from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.marking import mark_documents
from langchain_invariant_rag.messages import parse_message
from langchain_invariant_rag.parameters import PER_CALL, InvariantParameters
from langchain_invariant_rag.sorting import marked, sorted_text


class InvariantLLM(InvariantParameters, BaseLLM):
    """A completion model whose output does not depend on the order of the segments.

    A prompt is a string. Its segments are marked by `SEGMENT_PROMPT`, `as_segments` or `invariant_rag.prompts.mark`.
    Documents in chat messages and in a `documents=` keyword become marked segments too; those of the keyword come
    first.

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

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        """Convert messages to text with segment markers; LangChain's own conversion drops documents."""
        value = super()._convert_input(model_input)
        if isinstance(value, ChatPromptValue):
            text = get_buffer_string([_to_marked_message(message) for message in value.messages])
        else:
            text = value.to_string()
        text = mark_documents(text, self.known_documents)
        return StringPromptValue(text=sorted_text(text) if self._sorts_segments else text)

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """Generate for a batch of prompts.

        The keys of LangChain's cache do not include the keywords of a call. So keywords that change the output are set
        on a copy of this model, and documents are written into the prompts, before the cache is looked up.
        """
        model, texts, options = self._bind_keywords(prompts, kwargs)
        return super(InvariantLLM, model).generate(texts, stop, *args, **options)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Generate for a batch of prompts; see `generate`."""
        model, texts, options = self._bind_keywords(prompts, kwargs)
        result: LLMResult = await super(InvariantLLM, model).agenerate(texts, stop, *args, **options)
        return result

    def _bind_keywords(
        self, prompts: list[str], keywords: Mapping[str, Any]
    ) -> tuple[InvariantLLM, list[str], dict[str, Any]]:
        """Return the model with the call's parameters, the prompts with its documents, and LangChain's keywords."""
        langchain_options = {name: value for name, value in keywords.items() if name in _LANGCHAIN_KEYWORDS}
        parameters = {name: value for name, value in keywords.items() if name not in _LANGCHAIN_KEYWORDS}
        documents = _pop_documents(parameters)
        update = {name: parameters.pop(name) for name in PER_CALL if name in parameters}
        if parameters:
            update["generation_kwargs"] = {**self.generation_kwargs, **parameters}
        model = self.model_copy(update=update) if update else self
        texts = [documents + prompt for prompt in prompts]
        return model, [sorted_text(text) for text in texts] if self._sorts_segments else texts, langchain_options

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        documents = _pop_documents(kwargs)
        call = self._call(stop, kwargs)
        parsed = [parse_marked(documents + prompt) for prompt in prompts]
        generations = self._generate_all(parsed, call)
        usages = [usage_of(generation) for generation in generations]
        usage = {
            "prompt_tokens": sum(each["input_tokens"] for each in usages),
            "completion_tokens": sum(each["output_tokens"] for each in usages),
            "total_tokens": sum(each["total_tokens"] for each in usages),
        }
        return LLMResult(
            generations=[
                [
                    Generation(
                        text=call.text(generation), generation_info=self._generation_info(prompt, generation, call)
                    )
                ]
                for prompt, generation in zip(parsed, generations, strict=True)
            ],
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
        parsed = parse_marked(_pop_documents(kwargs) + prompt)
        call = self._call(stop, kwargs)
        for piece in call.stream(self.lm, parsed):
            if isinstance(piece, str):
                chunk = GenerationChunk(text=piece)
            else:
                chunk = GenerationChunk(text="", generation_info=self._generation_info(parsed, piece, call))
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

    def _generation_info(self, prompt: Prompt, generation: LMGeneration, call: Call) -> dict[str, Any]:
        report = report_of(generation, prompt, call.text(generation), self.model_name)
        return {**report, "usage_metadata": usage_of(generation)}


def _to_marked_message(message: BaseMessage) -> BaseMessage:
    return message.model_copy(update={"content": marked(parse_message(message))})


_LANGCHAIN_KEYWORDS = frozenset({"callbacks", "tags", "metadata", "run_name", "run_id"})


def _pop_documents(keywords: dict[str, Any]) -> str:
    """Remove `documents` from the keywords of a call and return them as marked text."""
    documents = keywords.pop("documents", None)
    return "" if documents is None else marked(to_segments(documents))
