"""InvariantLLM: a LangChain completion model that is invariant to the order of segments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any
from uuid import UUID

from invariant_rag.generation.answers import AnswerRequest, Reply
from invariant_rag.prompts import Turn, mark
from invariant_rag.segments import Prompt, Segment, SegmentSet, document_rendering
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.llms import BaseLLM
from langchain_core.messages import BaseMessage, get_buffer_string
from langchain_core.outputs import Generation, GenerationChunk, LLMResult
from langchain_core.prompt_values import ChatPromptValue, PromptValue, StringPromptValue
from langchain_core.runnables import RunnableConfig

from langchain_invariant_rag.answering import PER_CALL, request_of, response_metadata_of, usage_of
from langchain_invariant_rag.documents import given_segments, in_order_of_calls, to_turn
from langchain_invariant_rag.parameters import InvariantParameters
from langchain_invariant_rag.tracking import run_of

_LANGCHAIN_KEYWORDS = frozenset({"callbacks", "tags", "metadata", "run_name", "run_id"})


class RecognizedText(str):  # noqa: SLOT000 - it has attributes
    """A text whose segments are known. The text itself is a key of caches, and what callbacks get."""

    prompt: Prompt
    recognized: bool  # whether everything in it was understood


class InvariantLLM(InvariantParameters, BaseLLM):
    """A completion model whose output does not depend on the order of the segments.

    A prompt is a string. Its segments are marked by `SEGMENT_PROMPT`, `as_segments` or `invariant_rag.prompts.mark`, or
    passed as `documents=`, in front of the text.
    """

    @property
    def _llm_type(self) -> str:
        return "invariant-rag"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {**super()._identifying_params, **(self._cache_key if self._uses_cache else {})}

    def _convert_input(self, model_input: LanguageModelInput) -> PromptValue:
        """Convert messages to text with segment markers; LangChain's own conversion drops documents."""
        value = super()._convert_input(model_input)
        if not isinstance(value, ChatPromptValue):
            return value
        return StringPromptValue(text=get_buffer_string(list(map(_marked, in_order_of_calls(value.messages)))))

    def _recognized(self, prompt: str, run: UUID | None, documents: Any) -> RecognizedText:
        """Return a prompt with its sets; one that was recognised before, as it is."""
        if isinstance(prompt, RecognizedText):
            return prompt
        rules = self._order_rules
        recognition = self._recognize([Turn("user", (*given_segments(documents), prompt))], run, rules)
        parts = list(recognition.turns[0].parts)
        for index, part in enumerate(parts):
            if isinstance(part, SegmentSet) and rules.sorts:
                parts[index] = SegmentSet(sorted(part, key=attrgetter("canonical_key")), slots=part.slots)
        text = RecognizedText("".join(_bounded(part) if isinstance(part, SegmentSet) else part for part in parts))
        text.prompt = Prompt.of(*parts, rendering=document_rendering).to_complete()
        text.recognized = not recognition.findings
        return text

    def _prepare(self, prompts: Sequence[str], runs: Sequence[UUID | None], keywords: dict[str, Any]) -> Any:
        """Set keywords on a copy of this model: the keys of LangChain's cache do not include those of a call."""
        options = {name: keywords.pop(name) for name in _LANGCHAIN_KEYWORDS.intersection(keywords)}
        documents = keywords.pop("documents", None)
        update = {name: keywords.pop(name) for name in (*PER_CALL, "model") if name in keywords}
        if keywords:
            update["generation_kwargs"] = {**self.generation_kwargs, **keywords}
        model = self.model_copy(update=update) if update else self
        return model, [model._recognized(*each, documents) for each in zip(prompts, runs, strict=True)], options

    def _recognized_input(self, value: Any, config: RunnableConfig, keywords: dict[str, Any]) -> PromptValue:
        run, documents = run_of(config.get("callbacks")), keywords.pop("documents", None)
        recognized = self._recognized(self._convert_input(value).to_string(), run, documents)
        return StringPromptValue.model_construct(text=recognized)  # validation would make it a plain text

    def _request_of(self, prompt: str, stop: list[str] | None, keywords: Mapping[str, Any]) -> AnswerRequest:
        text = self._recognized(prompt, None, None)
        return request_of(self.__dict__, stop, keywords, prompt=text.prompt, recognized=text.recognized)

    def _generate(self, prompts: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> LLMResult:
        abandoned = kwargs.pop("abandoned", None)
        replies = self._replies([self._request_of(each, stop, kwargs) for each in prompts], abandoned)
        names = ("prompt_tokens", "completion_tokens", "total_tokens")
        usage = {name: sum(getattr(each.usage, name) for each in replies) for name in names}
        return LLMResult(
            generations=[[Generation(text=each.first.content, generation_info=self._info(each))] for each in replies],
            llm_output={"token_usage": usage, "model_name": self.model_name},
        )

    def _stream(
        self, prompt: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        abandoned = kwargs.pop("abandoned", None)
        for delta in self._deltas(self._request_of(prompt, stop, kwargs), abandoned):
            if isinstance(delta, Reply):
                chunk = GenerationChunk(text="", generation_info=self._info(delta))
            else:
                chunk = GenerationChunk(text=delta.content)
            if run_manager:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _info(self, reply: Reply) -> dict[str, Any]:
        return {**response_metadata_of(reply.first, reply, self.model_name), "usage_metadata": usage_of(reply)}


def _bounded(segments: SegmentSet) -> str:
    """Return a set as text in which the boundaries of segments show, so that no other prompt has the same text."""
    texts = [mark(each, nonce="") for each in segments]
    if segments.slots is not None:
        texts = [slot.render(Segment(each)) for slot, each in zip(segments.slots, texts, strict=True)]
    return "".join(texts)


def _marked(message: BaseMessage) -> BaseMessage:
    """Return a message whose documents are marked segments in its text."""
    parts = [part for part in to_turn(message).parts if isinstance(part, str | Segment)]
    text = "".join(mark(each) if isinstance(each, Segment) else each for each in parts)
    return message.model_copy(update={"content": text})
