"""Models of the tests: those of this package, others behind an API, and tools for them."""

import re
from typing import Annotated, Any, ClassVar

from langchain_core.language_models import LLM, BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote


@tool
def search(query: Annotated[str, Field(max_length=8)], limit: Annotated[int, Field(ge=0, le=9)]) -> str:
    """Search the harbour's records."""
    return f"found {limit} of {query}"


@tool
def now() -> str:
    """Tell the time."""
    return "noon"


class Departure(BaseModel):
    """When something leaves."""

    vessel: str = Field(max_length=8)
    hour: int = Field(ge=0, le=23)


# --- others, whose answers depend on the order of what they are given -------------------------------------------------

USAGE = UsageMetadata(input_tokens=10, output_tokens=2, total_tokens=12)


class Reader(BaseChatModel):
    """A model behind an API: it takes texts only, answers with the first document that it reads, and says how."""

    requests: list[Any] = Field(default_factory=list)
    favourite: str = ""
    """Which document it answers with wherever it stands, unless it stands last."""

    _llm_type: ClassVar[str] = "reader"

    def _read(self, messages, keywords):
        self.requests.append((messages, keywords))
        for message in messages:
            if not isinstance(message.content, str):
                raise TypeError(f"expected text, got {message.content!r}")
        documents = re.findall(r"Document[^:]*: (.*)", "\n".join(message.content for message in messages))
        if self.favourite in documents[:-1]:
            return self.favourite
        return documents[0] if documents else "nothing"

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        text = self._read(messages, {"stop": stop, **kwargs})
        calls = []
        if tools := kwargs.get("tools"):
            calls = [{"name": tools[0]["function"]["name"], "args": {"place": text}, "id": "1", "type": "tool_call"}]
        message = AIMessage("" if calls else text, usage_metadata=USAGE, tool_calls=calls)
        answer = ChatGeneration(message=message, generation_info={"finish_reason": "stop"})
        output = {"model_name": "reader-1", "token_usage": {"total_tokens": 12}}
        return ChatResult(generations=[answer], llm_output=output)

    def _combine_llm_outputs(self, llm_outputs, /):
        known = [each["token_usage"]["total_tokens"] for each in llm_outputs if each]
        return {"token_usage": {"total_tokens": sum(known)}}

    def bind_tools(self, tools, *, tool_choice=None, **kwargs):
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)


class StreamingReader(Reader):
    """The same, word by word; callbacks are told every word however it is asked."""

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        return generate_from_stream(self._stream(messages, stop, run_manager, **kwargs))

    def _stream(self, messages, stop=None, run_manager=None, **kwargs):
        for word in re.findall(r"\s*\S+", self._read(messages, kwargs)):
            chunk = ChatGenerationChunk(message=AIMessageChunk(word))
            if run_manager:
                run_manager.on_llm_new_token(word, chunk=chunk)
            yield chunk
        yield ChatGenerationChunk(message=AIMessageChunk("", usage_metadata=USAGE))


class TextReader(LLM):
    """A completion model that answers with the first document that it reads."""

    _llm_type: ClassVar[str] = "reader"

    def _call(self, prompt, stop=None, run_manager=None, **kwargs):
        return str(re.findall(r"Document: (.*)", prompt)[0])


MAKE = {
    "chat": lambda lm, **options: ChatInvariant(**{"model": lm, "max_tokens": 2, **options}),
    "completion": lambda lm, **options: InvariantLLM(**{"model": lm, "max_tokens": 2, **options}),
    "canonical": lambda lm, model=Reader, **options: canonical(model(), **options),
    "vote": lambda lm, model=Reader, **options: vote(model(), **options),
}
"""The models of this package, of an `InvariantModel` or of another model in its place."""
