"""InvariantSynthesizer: one segment per node, one LLM call."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.bridge.pydantic import BaseModel
from llama_index.core.callbacks.base import CallbackManager
from llama_index.core.instrumentation.events.synthesis import GetResponseEndEvent, GetResponseStartEvent
from llama_index.core.llms import LLM
from llama_index.core.llms.structured_llm import StructuredLLM
from llama_index.core.prompts import BasePromptTemplate
from llama_index.core.prompts.default_prompt_selectors import DEFAULT_TEXT_QA_PROMPT_SEL
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.response_synthesizers import BaseSynthesizer
from llama_index.core.schema import NodeWithScore, QueryType
from llama_index.core.types import RESPONSE_TEXT_TYPE
from llama_index_instrumentation import get_dispatcher

from invariant_rag.errors import InvalidPrompt, OrderWarning, UnsupportedCombination
from invariant_rag.prompts import without_marks
from invariant_rag.segments import Segment, SegmentSet
from llama_index.llms.invariant_rag.runs import current_scope, knows_segments, refuse_media, relabelled, segment_of
from llama_index.llms.invariant_rag.slots import Part, SlotText

dispatcher = get_dispatcher(__name__)

_OWN_VARIABLES = frozenset({"context_str", "query_str", "text_chunks", "string_to_format"})


class InvariantSynthesizer(BaseSynthesizer):
    """Response synthesizer that passes all nodes to the LLM in one call, as one set of segments.

    If they do not fit, the LLM's `overflow` applies. In a `CitationQueryEngine` they are numbered by content: `[1]` is
    the first of the response's source nodes, in every order.

    Args:
        llm: An `InvariantLLM`, the result of `canonical` or `vote`, or `as_structured_llm(...)` of one of them. Any
            other LLM gets one text, with an `OrderWarning`. None: `Settings.llm`.
        callback_manager: As for `BaseSynthesizer`.
        text_qa_template: The prompt, with `{context_str}` and `{query_str}`. None: LlamaIndex's default.
        streaming: Stream the answer.
        output_cls: Pydantic class of the answer. None: text.
        empty_response: The answer if there are no nodes.
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
        options: dict[str, Any] = {"streaming": streaming, "output_cls": output_cls, "empty_response": empty_response}
        super().__init__(llm, callback_manager, **options)
        self._text_qa_template = text_qa_template or DEFAULT_TEXT_QA_PROMPT_SEL
        self._check_streaming()
        if not knows_segments(self._llm):
            warnings.warn(
                f"{type(self._llm).__name__} gets the nodes as one text, so its answer depends on their order. "
                "Use llm=InvariantLLM(...), or canonical(llm).",
                OrderWarning,
                stacklevel=2,
            )

    def _check_streaming(self) -> None:
        if self._streaming and (self._output_cls is not None or isinstance(self._llm, StructuredLLM)):
            raise UnsupportedCombination(
                "expected either streaming or an output class, got both",
                hint="Set streaming=False, or remove the output class.",
            )

    def _get_prompts(self) -> PromptDictType:
        return {"text_qa_template": self._text_qa_template}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        self._text_qa_template = prompts.get("text_qa_template", self._text_qa_template)

    def synthesize(self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any) -> RESPONSE_TYPE:
        """Answer a query from nodes; the keywords are further variables of the prompt template.

        `metadata["invariant_rag"]` of the response is what the LLM reports: the ledger (`generation.outputs.ledger`),
        and `usage` and `finish_reason` of an `InvariantLLM`; of a stream, once it is consumed.

        Raises:
            InvalidPrompt: A keyword has a name that is taken, the template no `{context_str}`, or a node other media.
        """
        return super().synthesize(query, _numbered(nodes, kwargs), *args, **kwargs)

    async def asynthesize(
        self, query: QueryType, nodes: list[NodeWithScore], *args: Any, **kwargs: Any
    ) -> RESPONSE_TYPE:
        """Async version of `synthesize`."""
        return await super().asynthesize(query, _numbered(nodes, kwargs), *args, **kwargs)

    def get_response(self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any) -> RESPONSE_TEXT_TYPE:
        """Answer a query from texts, each one segment: a text, a generator of deltas if streaming, or an object."""
        response: RESPONSE_TEXT_TYPE = self._ask("", self._filled(query_str, text_chunks, response_kwargs))
        dispatcher.event(GetResponseEndEvent())
        return response

    async def aget_response(
        self, query_str: str, text_chunks: Sequence[str], **response_kwargs: Any
    ) -> RESPONSE_TEXT_TYPE:
        """Async version of `get_response`."""
        response: RESPONSE_TEXT_TYPE = await self._ask("a", self._filled(query_str, text_chunks, response_kwargs))
        dispatcher.event(GetResponseEndEvent())
        return response

    def _ask(self, prefix: str, template: BasePromptTemplate) -> Any:
        if self._output_cls is not None:
            return getattr(self._llm, f"{prefix}structured_predict")(self._output_cls, template)
        return getattr(self._llm, f"{prefix}stream" if self._streaming else f"{prefix}predict")(template)

    def _filled(self, query_str: str, texts: Sequence[str], variables: Mapping[str, Any]) -> BasePromptTemplate:
        """Return the prompt, with all its values."""
        self._check_streaming()  # chat engines set it after construction
        dispatcher.event(GetResponseStartEvent(query_str=query_str, text_chunks=list(texts)))
        names = self._text_qa_template.template_var_mappings or {}
        if names.get("context_str", "context_str") not in self._text_qa_template.template_vars:
            raise InvalidPrompt(
                "expected a text_qa_template with {context_str}, got one without it",
                hint="Write {context_str} and {query_str} into text_qa_template.",
            )
        plain, given = [without_marks(text) for text in texts], current_scope().given
        segments = list(map(Segment, plain))
        if given and len(given.nodes) == len(plain):
            refuse_media(given.nodes)
            segments = list(map(segment_of, given.nodes, plain))
        text = "\n\n".join(plain)
        own = {"context_str": SlotText.of(text, Part(text, "value", SegmentSet(segments)))}
        return self._text_qa_template.partial_format(**variables, **own, query_str=without_marks(query_str))


def _numbered(nodes: list[NodeWithScore], variables: Mapping[str, Any]) -> list[NodeWithScore]:
    """Return nodes in the order in which the prompt numbers them; refuse variables that the synthesizer sets."""
    if taken := sorted(_OWN_VARIABLES & set(variables)):
        raise InvalidPrompt(
            f"expected no keyword {', '.join(taken)}: the synthesizer sets it",
            hint="Give the variable of the template another name.",
        )
    return relabelled(nodes) if current_scope().innermost(CitationQueryEngine) else nodes
