"""invariant-rag for LlamaIndex: an LLM whose answer does not depend on the order of the segments."""

from invariant_rag.errors import OrderWarning, UnknownParameter
from llama_index.llms.invariant_rag.api_models import canonical, vote
from llama_index.llms.invariant_rag.base import InvariantLLM
from llama_index.llms.invariant_rag.responses import AnswerFailed, SegmentBlock
from llama_index.llms.invariant_rag.span_handler import attach_handler

__all__ = ["AnswerFailed", "InvariantLLM", "OrderWarning", "SegmentBlock", "UnknownParameter", "canonical", "vote"]

attach_handler()  # when the package is imported: the first retrieval of a process is noted like any other
