"""Slots of prompts are sets or stay as they are, with one verdict for every order; and what a run knows."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from answers import caught, report_of
from cases import ORDERS, QUERY, TEXTS, HashingLLM, ListRetriever, Recorder, engine_of, nodes_of
from entries import JINJA, JOINED, Case, citation, contents, in_one_span, listing, predicting, told
from invariant_rag import InvariantModel
from invariant_rag.errors import OrderWarning
from llama_index.core import PromptTemplate
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index_instrumentation import root_dispatcher
from tiny import local_llm

from llama_index.llms.invariant_rag import InvariantLLM, canonical
from llama_index.llms.invariant_rag.handler import RunHandler
from llama_index.llms.invariant_rag.runs import current_scope
from llama_index.llms.invariant_rag.slots import _KEPT
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

dispatcher = get_dispatcher(__name__)
FERRY, MILL, BRIDGE = TEXTS
TEMPLATE = PromptTemplate("Read:\n{context}\nNow: {q}")


def node(text: str, **fields: Any) -> NodeWithScore:
    return NodeWithScore(node=TextNode(text=text, metadata=fields), score=0.5)


@dispatcher.span
def asked(llm: Any, nodes: Any, write: Any, template: Any = TEMPLATE, q: str = QUERY, **more: Any) -> str:
    """Retrieve, and fill a template in: one run. What is written stands in `context`, or in the variables of `more`."""
    found = ListRetriever(nodes).retrieve(q)
    given = {name: value(found) if callable(value) else value for name, value in more.items()}
    return str(llm.predict(template, **{"context": write(found), "q": q, **given}))


def warned_of(*args: Any, **options: Any) -> list[str]:
    """Return what is warned of where an LLM behind an API is asked."""
    return caught(asked, canonical(Recorder()), *args, **options)[1]


# --- values of variables: their formats are entries, and recognition is the core's ---

BESIDE: dict[str, tuple[Callable[[int, Any], str], bool]] = {
    "a year before": (lambda _, each: f"{each.metadata['year']}: {each.text}", True),
    "a year behind": (lambda _, each: f"{each.text} ({each.metadata['year']})", True),
    "all metadata": (lambda _, each: f"{each.metadata} {each.text}", True),
    "a number": (lambda i, each: f"{i}. {each.text}", False),
}
"""What stands beside each node, and whether it is a set."""


@pytest.mark.parametrize("name", BESIDE)
def test_metadata_belongs_to_its_node_and_a_number_does_not(name: str) -> None:
    (line, is_set), prompts, written = BESIDE[name], list[str](), list[str]()
    for order in ORDERS:
        nodes = [node(TEXTS[i], year=(2021, 1987, 1904)[i], file_name=f"{'bca'[i]}.txt") for i in order]
        recorder, write = Recorder(), listing(line, "\n")
        said, messages = caught(asked, canonical(recorder), nodes, write)
        assert (said, len(messages)) == ("Noon.", 0 if is_set else 1)
        prompts += recorder.asked
        written.append(f"Read:\n{write(nodes)}\nNow: {QUERY}")
        if not is_set:
            with pytest.raises(OrderWarning, match="SegmentMarkerPostprocessor"):  # also where warnings are none
                caught(asked, canonical(Recorder(), strict=True), nodes, write)
    assert prompts == ([prompts[0]] * 6 if is_set else written)
    assert prompts[0] in written, "what the template writes for one order: each year stays with its text"


@pytest.mark.parametrize("name", ["context", "context_str"])
def test_single_words_and_the_question_are_a_set_only_where_the_variable_is_declared_to_hold_nodes(name: str) -> None:
    words, template = ("red", "green", "blue"), PromptTemplate(f"{{{name}}}\nOptions: {{options}}")
    recorder, own = Recorder(), {name: JOINED, "options": "green, red, blue"}
    for order in permutations(words):
        nodes = list(map(node, order))
        assert len(caught(asked, canonical(recorder), nodes, str, template, **own)[1]) == 1
    assert all(each.endswith("\nOptions: green, red, blue") for each in recorder.asked), "nobody's words are sorted"
    assert len(set(recorder.asked)) == (1 if name == "context_str" else 6)
    picked = listing(lambda _, node: node.text.split()[1], ", ")
    assert all(warned_of(nodes_of(order), picked) == [] for order in ORDERS), "words of documents are no documents"
    template, q = PromptTemplate(f"{{{name}}}\nNow: {{q}}"), "\n\n".join(TEXTS)
    warned = {bool(warned_of(nodes_of(order), str, template, q, **{name: JOINED})) for order in ORDERS}
    assert warned == {name == "context"}, "a question that is nothing but the nodes does not change the verdict"


PICKED = [("{context}\nBest: {top}", JOINED, QUERY), ("{context}\nBest: FIRST", JOINED, QUERY)]
for question in ("ferry", "a", "river?", QUERY):
    PICKED += [("{context}", lambda nodes, n=n: "\n\n".join(each.text for each in nodes[:n]), question) for n in (1, 2)]


@pytest.mark.parametrize(("template", "write", "q"), PICKED)
def test_documents_picked_by_place_or_shown_beside_their_set_are_warned_of(template: str, write: Any, q: str) -> None:
    for order in ORDERS:
        first = TEXTS[order[0]]
        filled = PromptTemplate(template.replace("FIRST", first))
        assert len(warned_of(nodes_of(order), write, filled, q, top=first)) == 1


def test_a_loop_of_a_template_over_one_document_writes_it_whole() -> None:
    recorder = Recorder()
    in_one_span(Case(canonical(recorder), nodes_of([0])), lambda c: predicting(c, JINJA, write=contents))
    assert recorder.asked == [f"<source nr=1>{FERRY}</source>\nAnswer: {QUERY}"]


# --- the verdict ---

WAYS: dict[str, Callable[[Case], Any]] = {
    "a tool's message": lambda c: in_one_span(c, lambda c: told(c, JOINED)),
    "with metadata": lambda c: in_one_span(c, lambda c: told(c, listing(BESIDE["all metadata"][0]))),
    "compact": lambda c: engine_of(c.nodes, llm=c.llm).query(QUERY),
    "tree_summarize": lambda c: engine_of(c.nodes, llm=c.llm, response_mode="tree_summarize").query(QUERY),
    "InvariantSynthesizer": lambda c: engine_of(c.nodes, response_synthesizer=InvariantSynthesizer(c.llm)).query(QUERY),
    "CitationQueryEngine": citation,
}
NODES: dict[str, list[NodeWithScore]] = {
    "equal": [node(FERRY), node(FERRY), node(MILL)],
    "equal, other fields": [node(FERRY, year=1987), node(FERRY, year=2021), node(MILL, year=1904)],
    "one in another": [node(FERRY), node(f"{FERRY} {MILL}"), node(BRIDGE)],
    "empty": [node(""), node(FERRY), node(MILL)],
    "white space": [node(" "), node(f"{FERRY}\n"), node(f"\n{MILL}")],
    "braces": [node("aa"), node("bbb"), node("c,d")],
    "chunk_index": [node(text, chunk_index=i) for i, text in enumerate(TEXTS)],
    "pages": [node(text, page=i) for i, text in enumerate(TEXTS, start=4)],
    "a file": [node(text, file_name="a.txt") for text in TEXTS],
    "numbered texts": [node(f"{i}. {text}") for i, text in enumerate(TEXTS, start=1)],
    "labelled texts": [node(f"Source {i}:\n{text}") for i, text in enumerate(TEXTS, start=1)],
    "digits": [node("1"), node("2"), node("3")],
    "the question": [node(QUERY), node(FERRY), node(MILL)],
    "one": [node(FERRY, year=1)],
}


@pytest.mark.parametrize("name", NODES)
def test_the_verdict_is_one_for_all_orders_whatever_the_nodes_are(model: InvariantModel, name: str) -> None:
    way = list(WAYS)[list(NODES).index(name) % len(WAYS)]  # each way with the bits of a model for some
    for llm, ask in [*((canonical(HashingLLM()), each) for each in WAYS.values()), (local_llm(model), WAYS[way])]:
        said = [caught(ask, Case(llm, list(order))) for order in permutations(NODES[name])]
        ((verdict, _),) = {(report_of(response)["invariant"], bool(messages)) for response, messages in said}
        answers = {str(getattr(response, "message", response)) for response, _ in said}
        assert len(answers) == 1 or verdict is False


@pytest.mark.parametrize("way", ["compact", "tree_summarize", "InvariantSynthesizer"])
def test_synthesizers_strip_texts_and_their_sets_are_known_all_the_same(way: str) -> None:
    nodes = [node(f"\n{text} ") for text in TEXTS]
    assert report_of(WAYS[way](Case(canonical(HashingLLM(), strict=True), nodes)))["invariant"] is True


# --- runs ---


@dispatcher.span
def begun() -> tuple[list[Any], Any]:
    """Retrieve, and return what the run knows, and a span in it that outlives it."""
    ListRetriever(nodes_of()).retrieve(QUERY)
    scope = current_scope()
    assert len(scope.retrievals) == 1
    return scope.retrievals, replace(scope, ended=False)


def quoting(**options: Any) -> list[str]:
    """Return what another tenant is told, who quotes the same texts."""
    return caught(canonical(Recorder(), **options).complete, "Compare: " + " ".join(TEXTS))[1]


def test_what_a_run_retrieved_is_gone_with_it_and_unknown_to_other_threads_and_tasks() -> None:
    retrievals, outliving = begun()
    assert retrievals == outliving.known() == []
    tenant = threading.Thread(target=lambda: ListRetriever(nodes_of()).retrieve(QUERY))
    tenant.start()
    tenant.join()
    engine_of(nodes_of(), llm=canonical(Recorder(), strict=True)).query(QUERY)
    assert quoting(strict=True) == []
    with pytest.raises(OrderWarning, match="without any"):
        quoting(require_segments=True)
    (handler,) = (each for each in root_dispatcher.span_handlers if isinstance(each, RunHandler))
    assert handler._scopes == {}, "a run is gone when it has ended"

    async def tasks() -> list[str]:
        await asyncio.create_task(ListRetriever(nodes_of()).aretrieve(QUERY))
        await asyncio.create_task(asyncio.to_thread(ListRetriever(nodes_of()).retrieve, QUERY))
        return await asyncio.create_task(asyncio.to_thread(quoting))

    assert asyncio.run(tasks()) == []
    ListRetriever(nodes_of()).retrieve(QUERY)
    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(quoting).result() == []


def test_what_is_retrieved_on_its_own_is_no_set_and_warns_once_until_another_retrieval_or_answer() -> None:
    def retrieve() -> None:
        ListRetriever(nodes_of()).retrieve(QUERY)

    retrieve()
    with pytest.raises(OrderWarning, match="SegmentMarkerPostprocessor"):
        quoting(strict=True)
    assert quoting() == [], "it has been said"
    retrieve()
    engine_of(nodes_of(), llm=Recorder()).query(QUERY)
    assert quoting() == [], "they have been retrieved again, and answered from"
    retrieve()
    assert caught(canonical(Recorder()).complete, f"Is this relevant? {FERRY}")[1] == []
    assert len(quoting()) == 1
    for llm, warned in ((Recorder(), True), (canonical(Recorder()), False)):  # the first knows no marks
        options = {"llm": llm, "node_postprocessors": [SegmentMarkerPostprocessor()]}
        messages = caught(engine_of(nodes_of(), **options).query, QUERY)[1]
        assert ["canonical(llm)" in each for each in messages] == [True] * warned


def test_a_tools_message_keeps_its_set_and_gives_it_to_no_other_message(llm: InvariantLLM) -> None:
    message = ChatMessage("\n\n".join(TEXTS), role="tool", additional_kwargs={"tool_call_id": "1"})

    @dispatcher.span
    def ask_in_a_run() -> Any:
        ListRetriever(nodes_of()).retrieve(QUERY)
        return llm.chat([ChatMessage(QUERY), message]).raw["invariant"]

    def ask_later(tool: ChatMessage) -> Any:
        return llm.chat([ChatMessage(QUERY), tool, ChatMessage("And?")]).raw["invariant"]

    assert (ask_in_a_run(), ask_later(message), ask_later(message.model_copy(deep=True))) == (True, True, None)
    kept = len(_KEPT)
    message.blocks[0].text += " More."
    assert ask_later(message) is None
    del message.blocks[0]
    assert len(_KEPT) == kept - 1
