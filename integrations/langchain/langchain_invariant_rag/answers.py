"""One request to a chat model: its prompt, how its answer is decoded, and the answer as a message of LangChain."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from invariant_rag.generation.answer_pieces import parse_answer
from invariant_rag.generation.answers import Answer, AnswerDelta
from invariant_rag.generation.logprobs import token_logprobs
from invariant_rag.generation.model import InvariantModel
from invariant_rag.generation.outputs import Generation
from invariant_rag.generation.streaming import decode_keeping, stream_until_stop_string
from invariant_rag.generation.structured import check_complete
from invariant_rag.generation.tools import ToolCalling
from invariant_rag.prompts import Tool
from invariant_rag.prompts.labels import Labels, translate_stream
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage
from langchain_core.messages.tool import tool_call, tool_call_chunk

from langchain_invariant_rag.calls import Call, report_of, usage_of
from langchain_invariant_rag.chat_options import ChatOptions
from langchain_invariant_rag.citations import citations_of
from langchain_invariant_rag.messages import chat_messages, last_user_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ChatRequest:
    """A conversation for a model, and what its answer is to be.

    With tools and a schema, an answer is either calls or an object. The object is decoded as the call of one more tool,
    so that the model knows its schema, and is the text of the message.

    Args:
        lm: The model.
        messages: The conversation, recognised.
        call: How to decode.
        options: What else the call asks for.
        model_name: Name of the model, for the report.
        recognized: Whether every document is known to be a segment.

    Raises:
        InvalidPrompt: As for `render_chat`.
        InvalidTool: As for `ToolCalling`.
    """

    def __init__(
        self,
        lm: InvariantModel,
        messages: Sequence[BaseMessage],
        call: Call,
        options: ChatOptions,
        *,
        model_name: str = "",
        recognized: bool = True,
    ) -> None:
        self._lm = lm
        self._asked = call
        self._logprobs = options.logprobs
        self._cites = options.citations and call.schema is None
        self._report = partial(report_of, model_name=model_name, recognized=recognized)
        self._object_tool: str | None = None
        tools, choice = [Tool.of(tool) for tool in options.tools], options.tool_choice
        parallel = options.parallel_tool_calls
        if call.schema is not None and tools and choice != "none":
            if choice == "auto":
                tools.append(_object_tool(call.schema))
                self._object_tool, choice, parallel = tools[-1].name, "required", False
            call = replace(call, schema=None)
        self._calling = ToolCalling(lm, tools, tool_choice=choice, parallel=parallel)
        self._tokenizer = cast("PreTrainedTokenizerBase", lm.tokenizer)  # there is one: ToolCalling has looked
        converted = chat_messages(messages)
        self._question = last_user_text(converted)
        self.prompt = self._calling.prompt(converted, self._question, **options.template_kwargs)
        self._schema = call.schema
        if tools and self._schema is None:  # stop sequences end the text, and do not cut calls
            call = replace(call, stop=(), constrain=partial(self._calling.constrain, self.prompt))
        self.call = call

    def message(self, generation: Generation) -> AIMessage:
        """Return the answer.

        Raises:
            IncompleteObject: It should follow a schema, or holds a call, and was cut off.
        """
        kept = self._calling.kept_tokens if self._schema is None else frozenset()
        text = decode_keeping(self._tokenizer, generation.token_ids, kept) if kept else generation.text
        answer = Answer.join(self._deltas([text], generation.labels))
        return AIMessage(
            content=self._content(answer.content, generation),
            tool_calls=[tool_call(name=each.name, args=dict(each.arguments), id=each.id) for each in answer.tool_calls],
            additional_kwargs={"reasoning_content": answer.reasoning} if answer.reasoning else {},
            usage_metadata=usage_of(generation),
            response_metadata=self._metadata(generation, called=bool(answer.tool_calls)),
        )

    def stream(self) -> Iterator[AIMessageChunk]:
        """Generate, and yield the answer in pieces. Joined, they are what `message` returns.

        Raises:
            IncompleteObject: As for `message`.
        """
        kept = self._calling.kept_tokens if self._schema is None else frozenset()
        pieces = self._lm.stream(self.prompt, keep_tokens=kept, **self.call.options(self._lm))
        labels = self._lm.prepare(self.prompt).labels if any(each.slots for each in self.prompt.sets) else {}
        called, content = False, ""
        for delta in self._deltas(pieces, labels):
            called, content = called or delta.call is not None, content + delta.content
            yield self._chunk(delta)
        if pieces.generation is not None:
            whole = self._content(content, pieces.generation)
            yield AIMessageChunk(
                content=[{**block, "text": "", "index": 0} for block in whole] if self._cites else "",
                usage_metadata=usage_of(pieces.generation),
                response_metadata=self._metadata(pieces.generation, called=called),
                chunk_position="last",
            )

    def _content(self, text: str, generation: Generation) -> Any:
        """Return the content of the whole answer: its text, or a block with citations."""
        if not self._cites:
            return text
        annotations = citations_of(text, self._question, self.prompt, generation)
        return [{"type": "text", "text": text, "annotations": annotations}] if text else []

    def _chunk(self, delta: AnswerDelta) -> AIMessageChunk:
        content: Any = delta.content
        if self._cites:
            content = [{"type": "text", "text": delta.content, "index": 0}] if delta.content else []
        if delta.call:
            call = delta.call
            piece = tool_call_chunk(name=call.name, args=call.arguments, id=call.id, index=call.index)
            return AIMessageChunk(content=content, tool_call_chunks=[piece])
        extra = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        return AIMessageChunk(content=content, additional_kwargs=extra)

    def _deltas(self, texts: Iterable[str], labels: Labels) -> Iterator[AnswerDelta]:
        """Yield the pieces of an answer, up to the first stop sequence, with citations translated."""
        if self._schema is not None:
            yield from map(AnswerDelta, translate_stream(_checked(texts), labels))
            return
        if self.call.stop:  # those that `generate` got as well: they end reasoning, too
            texts = stream_until_stop_string(texts, self.call.stop)
        stops = () if self.call.stop else self._asked.stop
        yield from self._object_as_content(parse_answer(self._calling.parser(self.prompt), texts, stops))

    def _object_as_content(self, deltas: Iterable[AnswerDelta]) -> Iterator[AnswerDelta]:
        objects = set()
        for delta in deltas:
            call = delta.call
            if call and call.name and call.name == self._object_tool:
                objects.add(call.index)
            elif call and call.index in objects:
                yield AnswerDelta(call.arguments)
            else:
                yield delta

    def _metadata(self, generation: Generation, *, called: bool) -> dict[str, Any]:
        report = self._report(generation, self.prompt, self._asked)
        if called:
            report["finish_reason"] = "tool_calls"
        if self._logprobs:
            report["logprobs"] = {"content": self._token_logprobs(generation)}
        return report

    def _token_logprobs(self, generation: Generation) -> list[dict[str, Any]]:
        """Return the tokens in the shape that OpenAI documents; none that begins after a stop sequence."""
        end = len("".join(stream_until_stop_string([generation.text], self.call.stop)))
        return [
            {
                "token": each.token,
                "logprob": each.logprob,
                "bytes": list(each.token.encode()),
                "top_logprobs": [],
            }
            for each in token_logprobs(generation, self._tokenizer)
            if each.start < end or not each.token
        ]


def _checked(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts that are one object when joined.

    Raises:
        IncompleteObject: They are not.
    """
    whole = []
    for text in texts:
        whole.append(text)
        yield text
    check_complete("".join(whole))


def _object_tool(schema: str) -> Tool:
    """Return a tool whose arguments are the object that a schema describes."""
    described = json.loads(schema)
    name = re.sub(r"[^\w./:-]+", "_", described.get("title") or "answer")
    purpose = "Give the final answer to the user."
    return Tool(name, " ".join(filter(None, (purpose, described.get("description")))), described)
