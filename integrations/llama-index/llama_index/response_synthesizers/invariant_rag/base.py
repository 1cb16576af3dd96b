"""InvariantSynthesizer: one segment per node, one LLM call."""

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
from llama_index.llms.invariant_rag.markers import mark_in_set, strip_markers
from llama_index.llms.invariant_rag.structured import asked_for_object

dispatcher = get_dispatcher(__name__)

_PLACEHOLDER = mark("")
"""Stands for the context while the prompt template is formatted."""


class InvariantSynthesizer(BaseSynthesizer):
    """Response synthesizer that passes all nodes to the LLM in one call, as one set of segments.

    The order of the nodes does not change the answer. Nodes are not packed, split or refined; if they do not fit into
    the context window, the LLM's `overflow` applies.

    Args:
        llm: An `InvariantLLM`, the result of `canonical` or `vote`, or `as_structured_llm(...)` of one of them. Any
            other LLM gets the nodes as one text, with an `OrderWarning`. None: `Settings.llm`.
        callback_manager: As for `BaseSynthesizer`.
        text_qa_template: The prompt, with `{context_str}` and `{query_str}`. None: LlamaIndex's default.
        streaming: Stream the answer.
        output_cls: Pydantic class of the answer. None: text.
        empty_response: The answer if there are no nodes.

    Raises:
        UnsupportedCombination: Both streaming and an output class are set: an incomplete object is not valid.
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
        self._object_cls = self._llm.output_cls if isinstance(self._llm, StructuredLLM) else output_cls
        self._check_streaming()
        inner = self._llm.llm if isinstance(self._llm, StructuredLLM) else self._llm
        self._invariant_llm = inner if isinstance(inner, InvariantLLM) else None
        self._parses_markers = isinstance(inner, CanonicalLLM)
        if self._invariant_llm is None and not self._parses_markers:
            warnings.warn(
                f"{type(inner).__name__} gets the nodes as one text, so its answer depends on their order. "
                "Use llm=InvariantLLM(...), or canonical(llm).",
                OrderWarning,
                stacklevel=2,
            )

    def _check_streaming(self) -> None:
        if self._streaming and self._object_cls is not None:
            raise UnsupportedCombination(
                "expected either streaming or an output class, got both",
                hint="Set streaming=False, or remove the output class.",
            )

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
        """Answer a query from nodes; the keywords are those of `get_response`."""
        return super().synthesize(query, nodes, additional_source_nodes, scores=_scores(nodes), **response_kwargs)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Async version of `synthesize`."""
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
            query_str: The query, also of relevance orderings.
            text_chunks: The texts of the segments.
            scores: The retriever's score of each segment, for the `score` ordering.
            **response_kwargs: Further variables of the prompt template.

        Returns:
            The text; a generator of text pieces if streaming; an object if there is an output class.

        Raises:
            InvalidPrompt: The template has no `{context_str}`.
        """
        self._check_streaming()  # chat engines set it after construction
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        response: RESPONSE_TEXT_TYPE
        if self._invariant_llm is None:
            llm = self._llm_with_query(query_str)
            variables = _text_variables(query_str, text_chunks, scores, response_kwargs, self._parses_markers)
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
                options = {"query": query_str, "output_cls": self._object_cls}
                response = self._parse_response(self._invariant_llm.chat(messages, **options))
        dispatcher.event(GetResponseEndEvent())
        return response

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        scores: Sequence[float | None] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """Async version of `get_response`."""
        self._check_streaming()  # chat engines set it after construction
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        response: RESPONSE_TEXT_TYPE
        if self._invariant_llm is None:
            llm = self._llm_with_query(query_str)
            variables = _text_variables(query_str, text_chunks, scores, response_kwargs, self._parses_markers)
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
                options = {"query": query_str, "output_cls": self._object_cls}
                response = self._parse_response(await self._invariant_llm.achat(messages, **options))
        dispatcher.event(GetResponseEndEvent())
        return response

    def _llm_with_query(self, query: str) -> LLM:
        """Return the LLM; a `CanonicalLLM` with the query set, because LlamaIndex's calls do not pass it."""
        llm = self._llm
        if isinstance(llm, CanonicalLLM):
            return llm.about(query)
        if isinstance(llm, StructuredLLM) and isinstance(llm.llm, CanonicalLLM):
            return llm.model_copy(update={"llm": llm.llm.about(query)})
        return llm

    def _messages(
        self, llm: InvariantLLM, query_str: str, segments: Sequence[Segment], variables: dict[str, Any]
    ) -> list[ChatMessage]:
        """Format the prompt, with one block per segment in place of the context."""
        values = {**variables, "query_str": strip_markers(query_str), "context_str": _PLACEHOLDER}
        formatted = llm.formatted(self._text_qa_template, **values)
        messages = [_insert_segments(message, segments) for message in formatted]
        if messages == formatted:
            raise InvalidPrompt(
                "expected a text_qa_template with {context_str}, got one without it",
                hint="Write {context_str} and {query_str} into text_qa_template.",
            )
        return messages if self._object_cls is None else asked_for_object(messages, self._object_cls)

    def _parse_response(self, response: ChatResponse) -> RESPONSE_TEXT_TYPE:
        text = response.message.content or ""
        return text if self._output_cls is None else self._output_cls.model_validate_json(text)


def _scores(nodes: Sequence[NodeWithScore]) -> list[float | None]:
    return [each.score for each in nodes]


def _segments(texts: Sequence[str], scores: Sequence[float | None] | None) -> list[Segment]:
    scores = [None] * len(texts) if scores is None else scores
    return [Segment(strip_markers(text), score=score) for text, score in zip(texts, scores, strict=True)]


def _text_variables(
    query_str: str, texts: Sequence[str], scores: Sequence[float | None] | None, variables: dict[str, Any], marked: bool
) -> dict[str, Any]:
    """Return the variables of the template with the nodes as one text, marked if the LLM parses markers."""
    nodes = (
        [mark_in_set(each, len(texts)) for each in _segments(texts, scores)] if marked else map(strip_markers, texts)
    )
    return {**variables, "query_str": strip_markers(query_str), "context_str": "\n\n".join(nodes)}


def _insert_segments(message: ChatMessage, segments: Sequence[Segment]) -> ChatMessage:
    """Replace every placeholder in a message by the segments."""
    blocks: list[Any] = []
    for block in message.blocks:
        if isinstance(block, TextBlock) and _PLACEHOLDER in block.text:
            first, *following = block.text.split(_PLACEHOLDER)
            blocks.append(TextBlock(text=first))
            for text in following:
                blocks += [*map(SegmentBlock.of, segments), TextBlock(text=text)]
        else:
            blocks.append(block)
    return ChatMessage(role=message.role, blocks=blocks, additional_kwargs=message.additional_kwargs)
