"""What the tests share: documents, the chain of the tutorials, every way of asking, models of all kinds, and tools."""

import asyncio
import re
import warnings
from functools import reduce
from itertools import permutations
from operator import add
from typing import Annotated, Any, ClassVar

from langchain_core._api.beta_decorator import LangChainBetaWarning
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.language_models import LLM, BaseChatModel
from langchain_core.language_models.chat_models import generate_from_stream
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool, tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel, Field

from langchain_invariant_rag import ChatInvariant, InvariantLLM, SegmentsPlaceholder, canonical, vote
from langchain_invariant_rag.documents import to_block, to_segment

DOCUMENTS = [
    Document("The ferry to Ostra leaves at noon.", metadata={"source": "ferry.txt", "id": "f-17", "page": 12}),
    Document("Ostra has two bakeries.", metadata={"source": "town.txt", "id": "t-4", "page": 3}),
    Document("The lighthouse was built by Teso Carno.", metadata={"source": "coast.txt", "id": "c-9", "page": 7}),
]
TEXTS = [document.page_content for document in DOCUMENTS]
ORDERS = [list(order) for order in permutations(DOCUMENTS)]
QUESTION = "When does the ferry leave?"
PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])
TEMPLATE = ChatPromptTemplate.from_messages(
    [("system", "Answer from the context."), ("human", "Context:\n{context}\n\nQuestion: {question}")]
)


class Listed(BaseRetriever):
    """Returns its documents in the order in which they are listed, or the first `k` of them."""

    documents: list[Any] = DOCUMENTS

    def _get_relevant_documents(self, query, *, run_manager, k=None):
        return list(self.documents)[:k]

    async def _aget_relevant_documents(self, query, *, run_manager, k=None):
        return list(self.documents)[:k]


def searching(retriever, **options):
    """Return a retriever as a tool."""
    return create_retriever_tool(retriever, "search", "Searches the town's records.", **options)


def joined(documents):
    """Return the texts of documents as the tutorials of LangChain join them."""
    return "\n\n".join(document.page_content for document in documents)


def rag(model, retriever, format_docs=joined, prompt=TEMPLATE):
    """Return the chain of the tutorials of LangChain."""
    return {"context": retriever | format_docs, "question": RunnablePassthrough()} | prompt | model


def blocks(documents=DOCUMENTS):
    """Return documents as content blocks, as JSON has them."""
    return [dict(to_block(to_segment(each))) for each in documents]


def loaded(value, *classes):
    """Return what LangChain writes down of a value, loaded again."""
    with warnings.catch_warnings(action="ignore", category=LangChainBetaWarning):
        return load(dumpd(value), valid_namespaces=["langchain_invariant_rag"], allowed_objects=list(classes))


# --- asking and listening ---------------------------------------------------------------------------------------------


async def collected(pieces):
    """Return what an asynchronous stream yields."""
    return [piece async for piece in pieces]


WAYS = {
    "invoke": lambda model, asked, config=None, **how: model.invoke(asked, config, **how),
    "ainvoke": lambda model, asked, config=None, **how: asyncio.run(model.ainvoke(asked, config, **how)),
    "batch": lambda model, asked, config=None, **how: model.batch([asked, asked], config, **how)[1],
    "abatch": lambda model, asked, config=None, **how: asyncio.run(model.abatch([asked, asked], config, **how))[1],
    "stream": lambda model, asked, config=None, **how: reduce(add, model.stream(asked, config, **how)),
    "astream": lambda model, asked, config=None, **how: reduce(
        add, asyncio.run(collected(model.astream(asked, config, **how)))
    ),
}


def text(answer):
    """Return the text of a message, or of what a completion model returns."""
    return str(getattr(answer, "text", answer))


def said(answer):
    """Return what must be the same however a model was asked."""
    if not isinstance(answer, AIMessage):
        return answer
    told = answer.model_dump(include={"additional_kwargs", "usage_metadata", "response_metadata", "content"})
    if not isinstance(answer.content, str):  # pieces of a stream say which block they belong to
        told["content"] = [{name: block[name] for name in block if name != "index"} for block in answer.content]
    calls = [[dict(sorted(call.items())) for call in kind] for kind in (answer.tool_calls, answer.invalid_tool_calls)]
    return {**told, "calls": calls}


class Heard(BaseCallbackHandler):
    """What callbacks are told: how many calls begin and end, the messages of the last one, and the text as it comes."""

    begun, ended, text = 0, 0, ""

    def on_chat_model_start(self, serialized, messages, **told):
        self.begun, self.messages = self.begun + 1, messages[0]

    def on_llm_start(self, serialized, prompts, **told):
        self.begun += 1

    def on_llm_new_token(self, token, *, chunk, **told):
        self.text += chunk.text

    def on_llm_end(self, response, **told):
        self.ended += 1


def forwards(lm, shapes):
    """Append the shape of the input ids of every pass of the model, until the context of this handle is left."""
    hook = lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape))  # noqa: E731
    return lm.model.register_forward_pre_hook(hook, with_kwargs=True)


# --- tools and models -------------------------------------------------------------------------------------------------


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
        return self.favourite if self.favourite in documents[:-1] else [*documents, "nothing"][0]

    def _generate(self, messages, stop=None, run_manager=None, **kwargs):
        text, tools = self._read(messages, {"stop": stop, **kwargs}), kwargs.get("tools") or []
        calls = [tool_call(name=each["function"]["name"], args={"place": text}, id="1") for each in tools[:1]]
        message = AIMessage("" if calls else text, usage_metadata=USAGE, tool_calls=calls)
        answer = ChatGeneration(message=message, generation_info={"finish_reason": "stop"})
        return ChatResult(
            generations=[answer], llm_output={"model_name": "reader-1", "token_usage": {"total_tokens": 12}}
        )

    def _combine_llm_outputs(self, llm_outputs, /):
        return {
            "token_usage": {"total_tokens": sum(each["token_usage"]["total_tokens"] for each in llm_outputs if each)}
        }

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
