"""Slots of prompts are sets or stay as they are; what users and models wrote is never changed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, nodes_of
from invariant_rag import InvariantModel, SegmentSet
from invariant_rag.errors import InvalidPrompt, OrderWarning, UnsupportedCombination
from invariant_rag.prompts import render_chat
from invariant_rag.segments import Slot
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.base.llms.types import ChatMessage, ChatResponse, CompletionResponse, LLMMetadata, ToolCallBlock
from llama_index.core.bridge.pydantic import Field
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import CustomLLM
from llama_index.core.llms.callbacks import llm_chat_callback, llm_completion_callback
from llama_index.core.llms.mock import MockFunctionCallingLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import ImageNode, NodeWithScore, TextNode
from llama_index_instrumentation import root_dispatcher
from tool_models import Writing

from llama_index.llms.invariant_rag import InvariantLLM, canonical
from llama_index.llms.invariant_rag.handler import RunHandler

dispatcher = get_dispatcher(__name__)
TEMPLATE = PromptTemplate("{context_str}\nQ: {query_str}")


class Recorder(CustomLLM):
    """An LLM behind an API: it keeps what it is asked, and says one thing."""

    asked: list[str] = Field(default_factory=list)
    says: str = "Noon."

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(is_chat_model=True)

    @llm_chat_callback()
    def chat(self, messages: Sequence[ChatMessage], **kwargs: Any) -> ChatResponse:
        self.asked.append("\x00".join("".join(getattr(each, "text", "") for each in one.blocks) for one in messages))
        return ChatResponse(message=ChatMessage(self.says, role="assistant"))

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.asked.append(prompt)
        return CompletionResponse(text=self.says)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> Any:
        raise NotImplementedError


def caught(ask: Callable[[], Any]) -> tuple[Any, list[str]]:
    """Return what a call returns, and its warnings about order."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        result = ask()
    return result, [str(each.message) for each in found if issubclass(each.category, OrderWarning)]


# --- the user's words ---

FERRY, MILL, BRIDGE = TEXTS
QUESTIONS = [
    FERRY,
    f"Is this right: {FERRY}",
    f"{MILL} {FERRY} Which is older?",
    f"{FERRY}\n\n{MILL}\n\n{BRIDGE}",
    f"My steps: 1. {BRIDGE} 2. {FERRY} 3. {MILL} What did I do in step 1?",
    f"First '{MILL}', then '{FERRY}': is the order right?",
    f"- {BRIDGE}\n- {MILL}\n- {FERRY}\nRank these by age.",
    f"docs = [Document(page_content={MILL!r}), Document(page_content={FERRY!r})]\nWhat is docs[0]?",
    f"| n | text |\n| 1 | {BRIDGE} |\n| 2 | {FERRY} |\nWhat is in row 2?",
    f"Document 1: {MILL}\nDocument 2: {BRIDGE}\nCompare document 1 with document 2.",
    f"[1] {BRIDGE} [2] {MILL} Cite [1].",
    f'{{"a": "{FERRY}", "b": "{MILL}"}} Which key comes first?',
    f"Q: {MILL}\nA: yes\nQ: {FERRY}\nA:",
    f"Say {FERRY!r} backwards, then {BRIDGE!r}.",
    f"Version 1: {FERRY} Version 2: {MILL} What changed?",
    f"def f():\n    return {BRIDGE!r}, {MILL!r}\nf()[1]?",
    f"<a>{FERRY}</a><b>{BRIDGE}</b> What is in <b>?",
    f"{FERRY.upper()} {MILL.upper()}",
    "Use {context_str} and {query_str} literally.",
    f"a) {MILL} b) {BRIDGE} c) {FERRY}: which is true?",
]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_names_or_quotes_its_own_nodes_reaches_the_model_byte_for_byte(question: str) -> None:
    recorder = Recorder()
    llm = canonical(recorder, strict=True)
    engines = [
        RetrieverQueryEngine.from_args(ListRetriever(nodes_of(order)), llm=llm, text_qa_template=TEMPLATE)
        for order in ORDERS
    ]
    reports = [engine.query(question).metadata["invariant_rag"] for engine in engines]
    assert len(set(recorder.asked)) == 1
    assert recorder.asked[0].endswith(f"\nQ: {question}")
    assert all((each["sets"], each["invariant"]) == ([3], True) for each in reports)


@dispatcher.span
def rephrased(llm: Any, nodes: Any, question: str) -> None:
    """Retrieve for another question than the one that is asked, as engines that condense a chat do."""
    found = ListRetriever(nodes).retrieve("ferry")
    llm.predict(TEMPLATE, context_str="\n\n".join(each.text for each in found), query_str=question)


@pytest.mark.parametrize("question", QUESTIONS)
def test_so_does_a_question_that_the_retriever_was_not_asked(question: str) -> None:
    recorder = Recorder()
    for order in ORDERS:
        rephrased(canonical(recorder, strict=True), nodes_of(order), question)
    (prompt,) = set(recorder.asked)
    assert prompt.endswith(f"\nQ: {question}")


def test_the_local_model_reads_the_set_and_the_question_as_it_is(model: InvariantModel) -> None:
    question = QUESTIONS[4]
    slots = [Slot(after=("\n\n",)), Slot(after=("\n\n",)), Slot()]
    content = [SegmentSet(TEXTS, slots=slots), f"\nQ: {question}"]
    prompt = render_chat([{"role": "user", "content": content}], model.tokenizer, question)
    expected = model.generate(prompt, max_new_tokens=8).text
    llm = InvariantLLM(model, max_tokens=8)
    for order in ORDERS:
        engine = RetrieverQueryEngine.from_args(ListRetriever(nodes_of(order)), llm=llm, text_qa_template=TEMPLATE)
        assert str(engine.query(question)) == expected


# --- the model's words ---

SAID = [
    "price = row[1]; qty = row[2]",
    "np.array([1, 2])",
    "matrix[1][2] + \\sqrt[3]{x}",
    "See [1], [2](http://a.b/[3]) and [^2].",
    '{"documents": 2, "source": [1]}',
    "Source 2 says: 'Document 1: ...'",
]


def writing(model: InvariantModel, said: str) -> InvariantLLM:
    """Return a local LLM for one call, in which it writes a text."""
    options = {"logits_processor": [Writing(model, said, only=True)], "eos_token_id": model.tokenizer.eos_token_id}
    return InvariantLLM(model, max_tokens=80, generation_kwargs=options)


@pytest.mark.parametrize("said", SAID)
def test_what_a_model_writes_arrives_as_it_is_written(model: InvariantModel, said: str) -> None:
    numbered = "\n".join(f"[{i}] {text}" for i, text in enumerate(TEXTS, 1))
    for build in (lambda: canonical(Recorder(says=said)), lambda: writing(model, said)):
        for order in ORDERS[::2]:
            engine = RetrieverQueryEngine.from_args(ListRetriever(nodes_of(order)), llm=build())
            assert str(engine.query(QUERY)) == said
        asked_alone = build()
        assert caught(lambda llm=asked_alone: llm.complete(numbered).text)[0] == said


def test_arguments_of_calls_arrive_as_they_are_written() -> None:
    arguments = {"code": "rows[1] + rows[2]", "documents": 2, "list": [1, 2]}
    block = ToolCallBlock(tool_call_id="1", tool_name="run", tool_kwargs=arguments)
    llm = canonical(MockFunctionCallingLLM(response_generator=lambda *_, **__: ChatMessage(blocks=[block])))
    numbered = "\n".join(f"[{i}] {text}" for i, text in enumerate(TEXTS, 1))
    found = caught(lambda: llm.chat([ChatMessage(numbered)]))[0]
    assert found.message.blocks == [block]


# --- values of variables ---


def with_years(order: Any) -> list[NodeWithScore]:
    nodes = nodes_of(order)
    for each in nodes:
        each.node.metadata = {"year": (2021, 1987, 1904)[int(each.node.node_id[-1])]}
    return nodes


def listed(write: Callable[[int, Any], str], between: str = "\n\n") -> Callable[[Any], str]:
    return lambda nodes: between.join(write(i, each) for i, each in enumerate(nodes, start=1))


SETS = {
    "joined": listed(lambda _, node: node.text),
    "one per line": listed(lambda _, node: node.text, "\n"),
    "bullets": listed(lambda _, node: f"- {node.text}", "\n"),
    "rule": listed(lambda _, node: node.text, "\n---\n"),
    "tags": listed(lambda _, node: f"<doc>{node.text}</doc>", "\n"),
    "quotes": listed(lambda _, node: f"'{node.text}'", ", "),
    "year before": listed(lambda _, node: f"{node.metadata['year']}: {node.text}", "\n"),
    "year behind": listed(lambda _, node: f"{node.text} ({node.metadata['year']})", "\n"),
    "metadata": listed(lambda _, node: f"{node.metadata} {node.text}", "\n"),
}
TEXT = {
    "[1]": listed(lambda i, node: f"[{i}] {node.text}", "\n"),
    "1.": listed(lambda i, node: f"{i}. {node.text}", "\n"),
    "(a)": listed(lambda i, node: f"({' abc'[i]}) {node.text}", "\n"),
    "Source 2:": listed(lambda i, node: f"Source {i}:\n{node.text}"),
    "Day 1": listed(lambda i, node: f"Day {i}: {node.text}"),
    "the first two": lambda nodes: "\n\n".join(each.text for each in nodes[:2]),
    "a sentence between": lambda nodes: " But then: ".join([nodes[0].text, f"{nodes[1].text} {nodes[2].text}"]),
    "two of one": lambda nodes: "\n".join([*(each.text for each in nodes), nodes[0].text]),
    "shortened": listed(lambda _, node: node.text[:30]),
}


@dispatcher.span
def asked(llm: Any, nodes: Any, write: Callable[[Any], str]) -> str:
    """Retrieve, and fill a template in: one run."""
    found = ListRetriever(nodes).retrieve(QUERY)
    return str(llm.predict(PromptTemplate("Read:\n{context}\nNow: {q}"), context=write(found), q=QUERY))


@pytest.mark.parametrize("write", SETS.values(), ids=SETS)
def test_a_variable_that_is_nothing_but_one_retrieval_is_a_set(write: Callable[[Any], str]) -> None:
    recorder = Recorder()
    for order in ORDERS:
        assert caught(lambda order=order: asked(canonical(recorder), with_years(order), write)) == ("Noon.", [])
    (prompt,) = set(recorder.asked)
    written = {f"Read:\n{write(with_years(order))}\nNow: {QUERY}" for order in ORDERS}
    assert prompt in written, "what the template writes for one order: each year stays with its text"


@pytest.mark.parametrize("write", TEXT.values(), ids=TEXT)
def test_a_variable_that_is_anything_else_stays_text_with_a_warning_in_every_order(
    write: Callable[[Any], str],
) -> None:
    for order in ORDERS:
        recorder = Recorder()
        _, messages = caught(lambda order=order, llm=recorder: asked(canonical(llm), with_years(order), write))
        assert recorder.asked == [f"Read:\n{write(with_years(order))}\nNow: {QUERY}"]
        assert len(messages) == 1
        assert "SegmentMarkerPostprocessor" in messages[0]
        with pytest.raises(OrderWarning):
            asked(canonical(recorder, strict=True), with_years(order), write)


@dispatcher.span
def told(llm: Any, nodes: Any, write: Callable[[Any], str]) -> Any:
    found = ListRetriever(nodes).retrieve(QUERY)
    message = ChatMessage(write(found), role="tool", additional_kwargs={"tool_call_id": "1"})
    return llm.chat([ChatMessage(QUERY), ChatMessage("", role="assistant"), message]).raw["invariant"]


@pytest.mark.parametrize("write", [*SETS.values(), *TEXT.values()], ids=[*SETS, *TEXT])
def test_the_verdict_is_the_same_for_every_order(llm: InvariantLLM, write: Callable[[Any], str]) -> None:
    verdicts = {caught(lambda order=order: told(llm, with_years(order), write))[0] for order in ORDERS}
    assert verdicts == {write in SETS.values()}


def test_white_space_around_nodes_that_a_synthesizer_strips_is_no_matter() -> None:
    nodes = [NodeWithScore(node=TextNode(text=f"\n{text} ")) for text in TEXTS]
    recorder = Recorder()
    for order in permutations(nodes):
        RetrieverQueryEngine.from_args(ListRetriever(list(order)), llm=canonical(recorder, strict=True)).query(QUERY)
    assert len(set(recorder.asked)) == 1


def test_without_documents_there_is_no_verdict(llm: InvariantLLM) -> None:
    assert llm.complete(QUERY).raw["invariant"] is None
    assert get_response_synthesizer(llm).synthesize(QUERY, nodes_of((0,))).metadata["invariant_rag"]["sets"] == [1]


# --- runs ---


def test_another_tenants_retrieval_is_unknown(model: InvariantModel) -> None:
    strict = InvariantLLM(model, strict=True, max_tokens=2)
    quoting = "Compare: " + " ".join(TEXTS)
    tenant = threading.Thread(target=lambda: ListRetriever(nodes_of()).retrieve(QUERY))
    tenant.start()
    tenant.join()
    RetrieverQueryEngine.from_args(ListRetriever(nodes_of()), llm=strict).query(QUERY)
    assert strict.complete(quoting).raw["invariant"] is None
    (handler,) = (each for each in root_dispatcher.span_handlers if isinstance(each, RunHandler))
    assert handler._scopes == {}, "a run is gone when it has ended"


def test_what_is_retrieved_outside_of_any_run_is_not_told_to_whom_the_thread_or_task_serves_next() -> None:
    def other_tenant() -> list[str]:
        return caught(lambda: canonical(Recorder()).complete("Compare: " + " ".join(TEXTS)))[1]

    async def tasks() -> list[str]:
        ListRetriever(nodes_of()).retrieve(QUERY)
        await asyncio.create_task(asyncio.to_thread(ListRetriever(nodes_of()).retrieve, QUERY))
        return await asyncio.create_task(asyncio.to_thread(other_tenant))

    with ThreadPoolExecutor(1) as worker:
        worker.submit(ListRetriever(nodes_of()).retrieve, QUERY).result()
        assert worker.submit(other_tenant).result() == []
    assert asyncio.run(tasks()) == []


def test_the_first_call_of_a_process_is_as_good_as_the_second() -> None:
    code = (
        "from cases import *; from entry import engine_of, HashingLLM\n"
        "from llama_index.llms.invariant_rag import canonical\n"
        "nodes = nodes_of()\nllm = canonical(HashingLLM(), strict=True)\n"
        "print([engine_of(nodes, llm=llm).query(QUERY).metadata['invariant_rag']['sets'] for _ in range(2)])"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, check=False, cwd=Path(__file__).parent, capture_output=True)
    assert done.stdout.decode().strip() == "[[3], [3]]", done.stderr.decode()


# --- what users of LlamaIndex expect ---


def test_context_window_and_function_calling_can_be_set(model: InvariantModel) -> None:
    metadata = InvariantLLM(model, context_window=512, is_function_calling_model=False).metadata
    assert (metadata.context_window, metadata.is_function_calling_model) == (512, False)


def test_a_function_that_writes_conversations_is_refused(model: InvariantModel) -> None:
    with pytest.raises(UnsupportedCombination, match="chat template"):
        InvariantLLM(model, messages_to_prompt=lambda messages: "x")


def test_nodes_with_images_are_refused_by_every_synthesizer(llm: InvariantLLM) -> None:
    nodes = [*nodes_of(), NodeWithScore(node=ImageNode(text="A map.", image_url="http://a.b/c.png"), score=0.1)]
    with pytest.raises(InvalidPrompt, match="image"):
        get_response_synthesizer(llm).synthesize(QUERY, nodes)


def test_metadata_is_there_even_if_no_llm_is_asked(llm: InvariantLLM) -> None:
    from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

    report = InvariantSynthesizer(llm).synthesize(QUERY, []).metadata["invariant_rag"]
    assert (report["sets"], report["invariant"]) == ([], None)


def test_equal_texts_and_nested_texts_have_one_verdict(llm: InvariantLLM) -> None:
    for texts in ((FERRY, FERRY, MILL), (FERRY, f"{FERRY} {MILL}", MILL), ("", FERRY, MILL)):
        nodes = [NodeWithScore(node=TextNode(text=text)) for text in texts]
        verdicts = {
            caught(lambda listed=listed: told(llm, list(listed), SETS["joined"]))[0] for listed in permutations(nodes)
        }
        assert len(verdicts) == 1
