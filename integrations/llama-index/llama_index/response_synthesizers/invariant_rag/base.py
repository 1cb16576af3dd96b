"""InvariantSynthesizer: one segment per node, one LLM call."""

from __future__ import annotations

import warnings
from collections.abc import AsyncGenerator, Generator, Iterator, Sequence
from contextlib import aclosing, closing, contextmanager
from contextvars import ContextVar
from typing import Any

from llama_index.core.base.llms.types import (
    BaseContentBlock,
    ChatMessage,
    ChatResponse,
    ChatResponseAsyncGen,
    ChatResponseGen,
    TextBlock,
)
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate, ChatPromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from invariant_rag.errors import InvalidPrompt, UnsupportedCombination
from invariant_rag.generation.structured import parse_object
from invariant_rag.prompts import without_marks
from llama_index.llms.invariant_rag import InvariantLLM, OrderWarning
from llama_index.llms.invariant_rag.canonical import CanonicalLLM
from llama_index.llms.invariant_rag.nodes import has_media
from llama_index.llms.invariant_rag.structured import asked_for_object
from llama_index.llms.invariant_rag.templates import bind_variables
from llama_index.llms.invariant_rag.tracking import SortsMedia, track_spans
from llama_index.response_synthesizers.invariant_rag.inputs import (
    PLACEHOLDER,
    MediaNode,
    check_variables,
    context_blocks,
    insert_blocks,
    joined,
    media_blocks,
    media_of,
)

dispatcher = get_dispatcher(__name__)

_MEDIA: ContextVar[Sequence[MediaNode | None]] = ContextVar("_MEDIA", default=())
"""For each node of `synthesize` what it holds besides text, which `get_response` is not given; empty: all text."""


class InvariantSynthesizer(SortsMedia, BaseSynthesizer):
    """Response synthesizer that passes all nodes to the LLM in one call, as one set of segments.

    The order of the nodes does not change the answer. Nodes are not packed, split or refined; if they do not fit into
    the context window, the LLM's `overflow` applies. The labels of a `CitationQueryEngine` (`Source 1:`) stay in their
    places, and `[1]` in the answer leads to the source node of that number.

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
        track_spans()  # to know of a `CitationQueryEngine` around, and to report
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
        """Answer a query from nodes; the keywords are further variables of the prompt template.

        The response's `metadata` holds, besides the metadata of each node, what the LLM reports, as
        `metadata["invariant_rag"]`: the ledger (`sets`, `order`, `dropped`, `trimmed`, `cached_tokens`, `method`,
        `invariant`; see `invariant_rag.generation.ledger`), and `usage` and `finish_reason` of an `InvariantLLM`. Of a
        streaming response it is there once the stream is consumed.

        Raises:
            InvalidPrompt: A keyword has the name of something that the synthesizer sets; or a node holds an image or
                another medium, which an `InvariantLLM` cannot read.
        """
        with self._reading(nodes, response_kwargs):
            return super().synthesize(query, nodes, additional_source_nodes, scores=_scores(nodes), **response_kwargs)

    async def asynthesize(
        self,
        query: QueryType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        """Async version of `synthesize`."""
        with self._reading(nodes, response_kwargs):
            return await super().asynthesize(
                query, nodes, additional_source_nodes, scores=_scores(nodes), **response_kwargs
            )

    @contextmanager
    def _reading(self, nodes: Sequence[NodeWithScore], variables: dict[str, Any]) -> Iterator[None]:
        check_variables(variables)
        media = [each.node.node_id for each in nodes if has_media(each.node)]
        if media and (self._invariant_llm is not None or not self._llm.metadata.is_chat_model):
            raise InvalidPrompt(
                f"expected nodes of text, got an image, audio or video in {', '.join(media)}",
                hint="This LLM reads text only. Give a TextNode with a description instead, or an LLM that reads "
                "images: canonical(llm).",
            )
        token = _MEDIA.set([media_of(each.node) for each in nodes] if media else ())
        try:
            yield
        finally:
            _MEDIA.reset(token)

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
        check_variables(response_kwargs)
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        response: RESPONSE_TEXT_TYPE
        if self._invariant_llm is None:
            llm = self._llm_with_query(query_str)
            template, variables = self._template(query_str, text_chunks, scores, response_kwargs, _MEDIA.get())
            if self._output_cls is not None:
                response = llm.structured_predict(self._output_cls, template, **variables)
            else:
                answer = llm.stream if self._streaming else llm.predict
                response = answer(template, **variables)
        else:
            messages = self._messages(
                self._invariant_llm, query_str, context_blocks(text_chunks, scores), response_kwargs
            )
            if self._streaming:
                pieces = self._invariant_llm.stream_chat(messages, query=query_str)
                response = _texts(pieces)
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
        check_variables(response_kwargs)
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(text_chunks)))
        response: RESPONSE_TEXT_TYPE
        if self._invariant_llm is None:
            llm = self._llm_with_query(query_str)
            template, variables = self._template(query_str, text_chunks, scores, response_kwargs, _MEDIA.get())
            if self._output_cls is not None:
                response = await llm.astructured_predict(self._output_cls, template, **variables)
            else:
                answer = llm.astream if self._streaming else llm.apredict
                response = await answer(template, **variables)
        else:
            messages = self._messages(
                self._invariant_llm, query_str, context_blocks(text_chunks, scores), response_kwargs
            )
            if self._streaming:
                pieces = await self._invariant_llm.astream_chat(messages, query=query_str)
                response = _atexts(pieces)
            else:
                options = {"query": query_str, "output_cls": self._object_cls}
                found = await self._invariant_llm.achat(messages, **options)
                response = self._parse_response(found)
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

    def _template(
        self,
        query_str: str,
        texts: Sequence[str],
        scores: Sequence[float | None] | None,
        variables: dict[str, Any],
        media: Sequence[MediaNode | None],
    ) -> tuple[BasePromptTemplate, dict[str, Any]]:
        """Return what to call an LLM with that is no `InvariantLLM`: a template and its variables."""
        values = {**variables, "query_str": without_marks(query_str)}
        if not media:
            context = joined(texts, scores, marked=self._parses_markers)
            return bind_variables(self._text_qa_template, {**values, "context_str": context})
        template, others = bind_variables(self._text_qa_template, {**values, "context_str": PLACEHOLDER})
        kept = [place for place, each in enumerate(media) if each is None]
        context = joined(
            [texts[place] for place in kept],
            None if scores is None else [scores[place] for place in kept],
            marked=self._parses_markers,
        )
        blocks = [TextBlock(text=f"{context}\n\n"), *media_blocks([each for each in media if each is not None])]
        messages = [insert_blocks(message, blocks) for message in template.format_messages(llm=self._llm, **others)]
        return ChatPromptTemplate(message_templates=messages), {}

    def _messages(
        self, llm: InvariantLLM, query_str: str, context: Sequence[BaseContentBlock], variables: dict[str, Any]
    ) -> list[ChatMessage]:
        """Format the prompt, with blocks in place of the context."""
        values = {**variables, "query_str": without_marks(query_str), "context_str": PLACEHOLDER}
        formatted = llm.formatted(self._text_qa_template, values)
        messages = [insert_blocks(message, context) for message in formatted]
        if messages == formatted:
            raise InvalidPrompt(
                "expected a text_qa_template with {context_str}, got one without it",
                hint="Write {context_str} and {query_str} into text_qa_template.",
            )
        return messages if self._object_cls is None else asked_for_object(messages, self._object_cls)

    def _parse_response(self, response: ChatResponse) -> RESPONSE_TEXT_TYPE:
        text = response.message.content or ""
        return text if self._output_cls is None else parse_object(text, self._output_cls)


def _scores(nodes: Sequence[NodeWithScore]) -> list[float | None]:
    return [each.score for each in nodes]


def _texts(pieces: ChatResponseGen) -> Generator[str, None, None]:
    with closing(pieces):
        for piece in pieces:
            yield piece.delta or ""


async def _atexts(pieces: ChatResponseAsyncGen) -> AsyncGenerator[str, None]:
    async with aclosing(pieces):
        async for piece in pieces:
            yield piece.delta or ""
