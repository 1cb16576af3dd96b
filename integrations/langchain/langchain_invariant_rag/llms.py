"""InvariantLLM: a LangChain completion model that is invariant to the order of segments."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from uuid import UUID

from invariant_rag.prompts import Turn
from invariant_rag.remote import RemoteModel
from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.base import LangSmithParams
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableConfig, ensure_config

from langchain_invariant_rag.calls import Call, iterate_off_the_loop, off_the_loop, report_of, usage_of
from langchain_invariant_rag.document_reprs import split_reprs
from langchain_invariant_rag.documents import to_segments
from langchain_invariant_rag.errors import langchain_errors
from langchain_invariant_rag.parameters import PER_CALL, InvariantParameters
from langchain_invariant_rag.recognized_text import RecognizedText, RecognizedValue, marked_message
from langchain_invariant_rag.remote import complete, decoding_fields, remote_report, stream_complete
from langchain_invariant_rag.remote import usage_of as remote_usage
from langchain_invariant_rag.tracking import current_run, run_of, runs_of
from langchain_invariant_rag.turns import in_order_of_calls

if TYPE_CHECKING:
    from invariant_rag.generation.outputs import Generation as LMGeneration


class InvariantLLM(InvariantParameters, BaseLLM):
    """A completion model whose output does not depend on the order of the segments.

    A prompt is a string. Its segments are marked by `SEGMENT_PROMPT`, `as_segments` or `invariant_rag.prompts.mark`.
    Documents in chat messages and in a `documents=` keyword become marked segments too; those of the keyword come
    first. A line break follows segments that a prompt ends with.

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
        if isinstance(model_input, RecognizedValue):
            return model_input
        value = super()._convert_input(model_input)
        if isinstance(value, ChatPromptValue):
            messages = map(marked_message, in_order_of_calls(value.messages))
            return StringPromptValue(text=get_buffer_string(list(messages)))
        return value

    def _recognized(self, prompt: str, run: UUID | None, documents: Any) -> RecognizedText:
        """Return a prompt with its sets; one that was recognised before, as it is."""
        if isinstance(prompt, RecognizedText):
            return prompt
        parts = [*([] if documents is None else to_segments(documents)), *split_reprs(prompt)]
        found = self._recognize([Turn("user", tuple(parts))], run, keyword_used=documents is not None)
        return RecognizedText.of(found, sort=self._sorts_segments)

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
        documents = self._listed(parameters).get("documents")
        parameters.pop("documents", None)
        update = {name: parameters.pop(name) for name in PER_CALL if name in parameters}
        if parameters:
            update["generation_kwargs"] = {**self.generation_kwargs, **parameters}
        model = self.model_copy(update=update) if update else self
        runs = runs_of(callbacks, len(prompts))
        texts = [self._recognized(prompt, run, documents) for prompt, run in zip(prompts, runs, strict=True)]
        return model, list(texts), langchain_options

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[str]:  # noqa: A002
        """Stream; see `BaseLLM.stream`."""
        value, settled, options = self._recognized_input(input, config, kwargs)
        yield from super().stream(value, settled, **options)

    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[str]:  # noqa: A002
        """Stream; see `BaseLLM.astream`."""
        value, settled, options = self._recognized_input(input, config, kwargs)
        async for piece in super().astream(value, settled, **options):
            yield piece

    def _recognized_input(
        self, model_input: Any, config: RunnableConfig | None, keywords: dict[str, Any]
    ) -> tuple[RecognizedValue, RunnableConfig, dict[str, Any]]:
        settled, options = ensure_config(config), self._listed(keywords)
        text = self._convert_input(model_input).to_string()
        recognized = self._recognized(text, run_of(settled.get("callbacks")), options.pop("documents", None))
        return RecognizedValue(text=recognized), settled, options

    def _generate(
        self,
        prompts: list[str],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> LLMResult:
        documents = kwargs.pop("documents", None)
        call = self._call(stop, kwargs)
        recognized = [self._recognized(each, current_run(run_manager), documents) for each in prompts]
        if self.remote is not None:
            return self._remote_result(self.remote, recognized, call)
        parsed = [each.prompt for each in recognized]
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
                for prompt, generation in zip(recognized, generations, strict=True)
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
        recognized = self._recognized(prompt, current_run(run_manager), kwargs.pop("documents", None))
        call = self._call(stop, kwargs)
        chunks = self._chunks(recognized, call)
        if self.remote is not None:
            chunks = self._remote_chunks(self.remote, recognized, call)
        for chunk in chunks:
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _chunks(self, text: RecognizedText, call: Call) -> Iterator[GenerationChunk]:
        for piece in call.stream(self.lm, text.prompt):
            if isinstance(piece, str):
                yield GenerationChunk(text=piece)
            else:
                yield GenerationChunk(text="", generation_info=self._generation_info(text, piece, call))

    def _remote_result(self, remote: RemoteModel, texts: list[RecognizedText], call: Call) -> LLMResult:
        """Ask a server, one prompt after another."""
        with langchain_errors():
            fields = decoding_fields(call, self._remote_choices)
            replies = [complete(remote, each.prompt, fields) for each in texts]
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = {name: sum(reply["usage"][name] for reply in replies) for name in names}
        return LLMResult(
            generations=[
                [Generation(text=reply["choices"][0]["text"], generation_info=_remote_info(text, reply))]
                for text, reply in zip(texts, replies, strict=True)
            ],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )

    def _remote_chunks(self, remote: RemoteModel, text: RecognizedText, call: Call) -> Iterator[GenerationChunk]:
        with langchain_errors():
            for reply in stream_complete(remote, text.prompt, decoding_fields(call, self._remote_choices)):
                info = _remote_info(text, reply) if "usage" in reply else None
                yield GenerationChunk(text=reply["choices"][0]["text"], generation_info=info)

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

    def _generation_info(self, text: RecognizedText, generation: LMGeneration, call: Call) -> dict[str, Any]:
        report = report_of(generation, text.prompt, call, self.model_name, recognized=text.recognized)
        return {**report, "usage_metadata": usage_of(generation)}


def _remote_info(text: RecognizedText, reply: Mapping[str, Any]) -> dict[str, Any]:
    report = remote_report(reply, reply["choices"][0], recognized=text.recognized)
    return {**report, "usage_metadata": remote_usage(reply["usage"])}


_LANGCHAIN_KEYWORDS = frozenset({"callbacks", "tags", "metadata", "run_name", "run_id"})
