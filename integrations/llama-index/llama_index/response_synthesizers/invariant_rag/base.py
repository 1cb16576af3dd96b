"""InvariantSynthesizer: one segment per node, one call of the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, ChatResponse, TextBlock
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from invariant_rag.errors import InvalidPrompt, UnsupportedCombination
from invariant_rag.prompts import mark
from invariant_rag.segments import Segment
from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning, SegmentBlock
from llama_index.llms.invariant_rag.api_models import CanonicalLLM
from llama_index.llms.invariant_rag.marks import mark_in_set, unmarked
from llama_index.llms.invariant_rag.structured import asked_for_object

dispatcher = get_dispatcher(__name__)

_PLACE = mark("")
"""Where the context goes in a formatted prompt."""


class InvariantSynthesizer(BaseSynthesizer):
    """Reads every node as a segment of one set, in a single call: their order does not change the answer.

    Nothing is packed, cut or refined. What happens to more nodes than fit is the LLM's `overflow`.

    Args:
        llm: An `InvariantLLM`, what `canonical` and `vote` make of another LLM, or either one's
            `as_structured_llm(...)`. Another LLM gets the nodes as text, and an `OrderWarning` says so. None:
            `Settings.llm`.
        callback_manager: As for every synthesizer.
        text_qa_template: The prompt, with `{context_str}` and `{query_str}`. None: LlamaIndex's own.
        streaming: Answer piece by piece.
        output_cls: Answer with an object of this class.
        empty_response: The answer where no node was retrieved.

    Raises:
        UnsupportedCombination: Streaming and an output class: half an object is none.
    """

    def __init__(
        self,
        llm: LLM | None = None,
        callback_manager: CallbackManager | None = None,
        text_qa_template: BasePromptTemplate | None = None,
        streaming: bool = False,
        output_cls: type[BaseModel] | None = None,
        empty_response: str | None = None,
    ) -> None:
        super().__init__(
            llm=llm,
            callback_manager=callback_manager,
            streaming=streaming,
            output_cls=output_cls,
            empty_response=empty_response,
        )
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._written_cls = self._llm.output_cls if isinstance(self._llm, StructuredLLM) else output_cls
        self._check_streaming()
        inner = self._llm.llm if isinstance(self._llm, StructuredLLM) else self._llm
        self._invariant_llm = inner if isinstance(inner, InvariantLLM) else None
        self._marks = isinstance(inner, CanonicalLLM)
        if self._invariant_llm is None and not self._marks:
            warnings.warn(
                f"{type(inner).__name__} reads the nodes as one text, so its answer depends on their order. "
                "Use llm=InvariantLLM(...), or canonical(llm).",
                OrderWarning,
                stacklevel=2,
            )

    def _check_streaming(self) -> None:
        if self._streaming and self._written_cls is not None:
            raise UnsupportedCombination("expected either streaming or an output class, got both")

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)

    def synthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes; see `get_response` for the keywords."""
        return super().synthesize(query, nodes, additional_source_nodes, scores=_scores(nodes), **response_kwargs)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Answer a query from nodes, without blocking the event loop."""
        return await super().asynthesize(
            query, nodes, additional_source_nodes, scores=_scores(nodes), **response_kwargs
        )

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        scores: Sequence[float | None] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer a query from texts, each of which is one segment.

        Args:
            query_str: The query; relevance orderings compare the segments with it.
            text_chunks: The segments.
            scores: The retriever's score of each, for the ordering of that name.
            **response_kwargs: More variables of the prompt template.

        Returns:
            Text; a generator of pieces when streaming; an object when there is an output class.

        Raises:
            InvalidPrompt: The template has no place for the context.
        """
        self._check_streaming()  # chat engines switch it on
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        response: RESPONSE_TEXT_TYPE
        if self._invariant_llm is None:
            llm = self._about(query_str)
            variables = _as_text(query_str, text_chunks, scores, response_kwargs, self._marks)
            if self._output_cls is not None:
                response = llm.structured_predict(self._output_cls, self._text_qa_template, **variables)
            else:
                answer = llm.stream if self._streaming else llm.predict
                response = answer(self._text_qa_template, **variables)
        else:
            messages = self._messages(self._invariant_llm, query_str, _segments(text_chunks, scores), response_kwargs)
            if self._streaming:
                pieces = self._invariant_llm.stream_chat(messages, query=query_str)
                response = (piece.delta or "" for piece in pieces)
            else:
                options = {"query": query_str, "output_cls": self._written_cls}
                response = self._read(self._invariant_llm.chat(messages, **options))
        dispatcher.event(GetResponseEndEvent())
        return response

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        scores: Sequence[float | None] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Answer as `get_response` does, without blocking the event loop."""
        self._check_streaming()  # chat engines switch it on
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        response: RESPONSE_TEXT_TYPE
        if self._invariant_llm is None:
            llm = self._about(query_str)
            variables = _as_text(query_str, text_chunks, scores, response_kwargs, self._marks)
            if self._output_cls is not None:
                response = await llm.astructured_predict(self._output_cls, self._text_qa_template, **variables)
            else:
                answer = llm.astream if self._streaming else llm.apredict
                response = await answer(self._text_qa_template, **variables)
        else:
            messages = self._messages(self._invariant_llm, query_str, _segments(text_chunks, scores), response_kwargs)
            if self._streaming:
                pieces = await self._invariant_llm.astream_chat(messages, query=query_str)
                response = (piece.delta or "" async for piece in pieces)
            else:
                options = {"query": query_str, "output_cls": self._written_cls}
                response = self._read(await self._invariant_llm.achat(messages, **options))
        dispatcher.event(GetResponseEndEvent())
        return response

    def _about(self, query: str) -> LLM:
        """Return the LLM; if it reads marks, told the query, for which LlamaIndex's calls have no place."""
        llm = self._llm
        if isinstance(llm, CanonicalLLM):
            return llm.about(query)
        if isinstance(llm, StructuredLLM) and isinstance(llm.llm, CanonicalLLM):
            return llm.model_copy(update={"llm": llm.llm.about(query)})
        return llm

    def _messages(
        self, llm: InvariantLLM, query_str: str, segments: Sequence[Segment], variables: dict[str, Any]
    ) -> list[ChatMessage]:
        """Format the prompt, with a block for every segment where the context goes."""
        given = {**variables, "query_str": unmarked(query_str), "context_str": _PLACE}
        formatted = llm.formatted(self._text_qa_template, **given)
        messages = [_filled(message, segments) for message in formatted]
        if messages == formatted:
            raise InvalidPrompt(
                "expected a template with {context_str}: there is no place for the nodes",
                hint="Write {context_str} and {query_str} into text_qa_template.",
            )
        return messages if self._written_cls is None else asked_for_object(messages, self._written_cls)

    def _read(self, response: ChatResponse) -> RESPONSE_TEXT_TYPE:
        text = response.message.content or ""
        return text if self._output_cls is None else self._output_cls.model_validate_json(text)


def _scores(nodes: Sequence[NodeWithScore]) -> list[float | None]:
    return [each.score for each in nodes]


def _segments(texts: Sequence[str], scores: Sequence[float | None] | None) -> list[Segment]:
    chosen = [None] * len(texts) if scores is None else scores
    return [Segment(unmarked(text), score=score) for text, score in zip(texts, chosen, strict=True)]


def _as_text(
    query_str: str, texts: Sequence[str], scores: Sequence[float | None] | None, variables: dict[str, Any], marks: bool
) -> dict[str, Any]:
    """Return the variables of the template, the nodes in one text: with marks, if the LLM reads them."""
    nodes = [mark_in_set(each, len(texts)) for each in _segments(texts, scores)] if marks else map(unmarked, texts)
    return {**variables, "query_str": unmarked(query_str), "context_str": "\n\n".join(nodes)}


def _filled(message: ChatMessage, segments: Sequence[Segment]) -> ChatMessage:
    """Put the segments wherever there is a place for the context."""
    blocks: list[Any] = []
    for block in message.blocks:
        if isinstance(block, TextBlock) and _PLACE in block.text:
            before, *behind = block.text.split(_PLACE)
            blocks.append(TextBlock(text=before))
            for text in behind:
                blocks += [*map(SegmentBlock.of, segments), TextBlock(text=text)]
        else:
            blocks.append(block)
    return ChatMessage(role=message.role, blocks=blocks, additional_kwargs=message.additional_kwargs)
