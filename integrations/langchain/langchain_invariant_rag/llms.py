"""InvariantLLM: text in, text out, and the same text for every order of the segments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from invariant_rag.generation.model import Generation as LMGeneration
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
from langchain_invariant_rag.known import mark_known
from langchain_invariant_rag.messages import message_parts
from langchain_invariant_rag.parameters import PER_CALL, InvariantParameters
from langchain_invariant_rag.sorting import marked, sorted_text


class InvariantLLM(InvariantParameters, BaseLLM):
    """A completion model whose text does not depend on the order in which segments are listed.

    A prompt is a string. Marks say where its segments begin and end: those that `SEGMENT_PROMPT`, `as_segments` and
    `invariant_rag.prompts.mark` write. Documents in chat messages and in a `documents=` keyword (they come first) are
    written with marks too.

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
        """Turn messages into text with marks, which LangChain's own conversion would leave out."""
        value = super()._convert_input(model_input)
        if isinstance(value, ChatPromptValue):
            text = get_buffer_string([_as_text(message) for message in value.messages])
        else:
            text = value.to_string()
        text = mark_known(text, self.known_documents)
        return StringPromptValue(text=sorted_text(text) if self._sorts_segments else text)

    def generate(self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any) -> LLMResult:
        """Generate for several prompts at once.

        LangChain's cache does not look at the keywords of a call. So those that change the output become parameters
        of a copy of this object, and documents become text, before it is asked.
        """
        model, texts, rest = self._with(prompts, kwargs)
        return super(InvariantLLM, model).generate(texts, stop, *args, **rest)

    async def agenerate(
        self, prompts: list[str], stop: list[str] | None = None, *args: Any, **kwargs: Any
    ) -> LLMResult:
        """Generate for several prompts at once; see `generate`."""
        model, texts, rest = self._with(prompts, kwargs)
        result: LLMResult = await super(InvariantLLM, model).agenerate(texts, stop, *args, **rest)
        return result

    def _with(self, prompts: list[str], keywords: Mapping[str, Any]) -> tuple[InvariantLLM, list[str], dict[str, Any]]:
        rest = {name: value for name, value in keywords.items() if name in _OF_LANGCHAIN}
        ours = {name: value for name, value in keywords.items() if name not in _OF_LANGCHAIN}
        documents = _marked_documents(ours)
        changed = {name: ours.pop(name) for name in PER_CALL if name in ours}
        if ours:
            changed["generation_kwargs"] = {**self.generation_kwargs, **ours}
        model = self.model_copy(update=changed) if changed else self
        texts = [documents + prompt for prompt in prompts]
        return model, [sorted_text(text) for text in texts] if self._sorts_segments else texts, rest

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        documents = _marked_documents(kwargs)
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
                [Generation(text=call.text(generation), generation_info=self._info(prompt, generation, call))]
                for prompt, generation in zip(parsed, generations, strict=True)
            ],
            llm_output={"token_usage": usage, "model_name": self.display_name},
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
        parsed = parse_marked(_marked_documents(kwargs) + prompt)
        call = self._call(stop, kwargs)
        for piece in call.stream(self.lm, parsed):
            if isinstance(piece, str):
                chunk = GenerationChunk(text=piece)
            else:
                chunk = GenerationChunk(text="", generation_info=self._info(parsed, piece, call))
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

    def _info(self, prompt: Prompt, generation: LMGeneration, call: Call) -> dict[str, Any]:
        report = report_of(generation, prompt, call.text(generation), self.display_name)
        return {**report, "usage_metadata": usage_of(generation)}


def _as_text(message: BaseMessage) -> BaseMessage:
    return message.model_copy(update={"content": marked(message_parts(message))})


_OF_LANGCHAIN = frozenset({"callbacks", "tags", "metadata", "run_name", "run_id"})


def _marked_documents(keywords: dict[str, Any]) -> str:
    """Take `documents` out of the keywords of a call, and return them as marked text."""
    documents = keywords.pop("documents", None)
    return "" if documents is None else marked(to_segments(documents))
