"""InvariantChatEngine: retrieve for every message, and answer from the nodes as a set."""

from __future__ import annotations

from typing import Any

from llama_index.core.bridge.pydantic import Field
from llama_index.core.chat_engine import ContextChatEngine
from llama_index.core.llms import ChatMessage, MessageRole
from llama_index.core.prompts import ChatPromptTemplate

from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer


class Conversation(ChatPromptTemplate):
    """A system message with the context, and the user's message; others stand between, and are no templates."""

    before: list[ChatMessage] = Field(default_factory=list)
    between: list[ChatMessage] = Field(default_factory=list)

    def format_messages(self, llm: Any = None, **kwargs: Any) -> list[ChatMessage]:
        """Return all messages, with variables in place in those of the template."""
        context, question = super().format_messages(llm, **kwargs)
        return [*self.before, context, *self.between, question]


class InvariantChatEngine(ContextChatEngine):
    """A chat engine over memory whose answers do not depend on the order in which nodes are retrieved.

    A `ContextChatEngine` with an `InvariantSynthesizer`: each message is answered in one call, from all nodes, as a set
    in the system message. Arguments are those of `ContextChatEngine.from_defaults`; a `context_refine_template` has no
    effect. For `metadata["invariant_rag"]` of a response see `InvariantSynthesizer.synthesize`.
    """

    def _get_response_synthesizer(  # type: ignore[override]  # any synthesizer will do
        self, chat_history: list[ChatMessage], streaming: bool = False
    ) -> InvariantSynthesizer:
        given = self._prefix_messages
        system_prompts = int(bool(given) and given[0].role == MessageRole.SYSTEM)
        context = ChatMessage(self._context_template.template, role=self._llm.metadata.system_role)
        template = Conversation(  # type: ignore[call-arg]  # it has a constructor of its own
            message_templates=[context, ChatMessage("{query_str}", role=MessageRole.USER)],
            function_mappings=self._context_template.function_mappings,
        )
        template.before, template.between = given[:system_prompts], [*given[system_prompts:], *chat_history]
        return InvariantSynthesizer(self._llm, self.callback_manager, template, streaming=streaming)
