"""A context chat engine that passes the retrieved nodes to the LLM as a set, in one call."""

from llama_index.chat_engine.invariant_rag.base import InvariantChatEngine

__all__ = ["InvariantChatEngine"]
