"""Chat models of others, whose answers depend on the order of what they are given."""

from __future__ import annotations

import re
from threading import Lock
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field

MARKS = re.compile("[\ueca0-\ueca3]")
USAGE = UsageMetadata(input_tokens=10, output_tokens=2, total_tokens=12)


class Reader(BaseChatModel):
    """A model behind an API: it takes texts only, and answers with the first document that it reads."""

    requests: list[Any] = Field(default_factory=list)
    lock: Any = Field(default_factory=Lock)
    favourite: str = ""
    """Which document it answers with wherever it stands, unless it stands last."""

    @property
    def _llm_type(self) -> str:
        return "reader"

    def _read(self, messages: list[Any], keywords: Any) -> str:
        with self.lock:
            self.requests.append((messages, keywords))
        for message in messages:
            if not isinstance(message.content, str):
                raise TypeError(f"expected text, got {message.content!r}")
        documents = re.findall(r"Document[^:]*: (.*)", "\n".join(message.content for message in messages))
        if self.favourite in documents[:-1]:
            return self.favourite
        return documents[0] if documents else "nothing"

    def _generate(self, messages: list[Any], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        text = self._read(messages, {"stop": stop, **kwargs})
        calls = []
        if tools := kwargs.get("tools"):
            calls = [{"name": tools[0]["function"]["name"], "args": {"place": text}, "id": "1", "type": "tool_call"}]
        message = AIMessage("" if calls else text, usage_metadata=USAGE, tool_calls=calls)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def bind_tools(self, tools: Any, *, tool_choice: Any = None, **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)


class StreamingReader(Reader):
    """The same, word by word."""

    def _stream(self, messages: list[Any], stop: Any = None, run_manager: Any = None, **kwargs: Any) -> Any:
        for word in self._read(messages, kwargs).split(" "):
            yield ChatGenerationChunk(message=AIMessageChunk(f"{word} "))
        yield ChatGenerationChunk(message=AIMessageChunk("", usage_metadata=USAGE))
