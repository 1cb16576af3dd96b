"""Slots of prompts are sets or stay as they are, with one verdict for every order; and what a run knows.

Which texts are a set of what was retrieved is decided, and tested, in the core.
"""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import permutations

import entries
import pytest
from cases import ORDERS, QUERY, TEXTS, HashingLLM, ListRetriever, Recorder, engine_of, node, nodes_of, told_by_tool
from entries import JOINED, answer, in_one_span, listing, local_llm, predicting, query, told
from framework_cases import LOOKALIKES, caught
from invariant_rag.errors import OrderWarning
from llama_index.core import PromptTemplate
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index_instrumentation import root_dispatcher
from responses import report_of

from llama_index.llms.invariant_rag import canonical
from llama_index.llms.invariant_rag.handler import RunHandler
from llama_index.llms.invariant_rag.runs import current_scope
from llama_index.llms.invariant_rag.slots import _KEPT
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

dispatcher = get_dispatcher(__name__)
TEMPLATE = PromptTemplate("Read:\n{context}\nNow: {q}")
WITH_YEAR = listing(lambda _, each: f"{each.metadata} {each.text}", "\n")
NUMBERED = listing(lambda i, each: f"{i}. {each.text}", "\n")


def retrieve():
    return ListRetriever(nodes_of()).retrieve(QUERY)


@dispatcher.span
def asked(llm, nodes, write, template=TEMPLATE, q=QUERY, **more):
    """Retrieve, and fill a template in: one run. What is written stands in `context`, or in the variables of `more`."""
    found = ListRetriever(nodes).retrieve(q)
    given = {name: value(found) if callable(value) else value for name, value in more.items()}
    return str(llm.predict(template, **{"context": write(found), "q": q, **given}))


def warned_of(*args, **options):
    """Return what is warned of where an LLM behind an API is asked."""
    return caught(asked, canonical(Recorder()), *args, **options)[1]


# --- values of variables ---


@pytest.mark.parametrize(("write", "is_set"), [(WITH_YEAR, True), (NUMBERED, False)])
def test_metadata_belongs_to_its_node_and_a_number_does_not(write, is_set):
    prompts, written = [], []
    for order in ORDERS:
        nodes, recorder = [node(TEXTS[i], year=(2021, 1987, 1904)[i]) for i in order], Recorder()
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
def test_single_words_and_the_question_are_a_set_only_where_the_variable_is_declared_to_hold_nodes(name):
    template = PromptTemplate(f"{{{name}}}\nOptions: {{options}}")
    recorder, own = Recorder(), {name: JOINED, "options": "green, red, blue"}
    for order in permutations(("red", "green", "blue")):
        assert len(caught(asked, canonical(recorder), list(map(node, order)), str, template, **own)[1]) == 1
    assert all(each.endswith("\nOptions: green, red, blue") for each in recorder.asked), "nobody's words are sorted"
    assert len(set(recorder.asked)) == (1 if name == "context_str" else 6)
    picked = listing(lambda _, node: node.text.split()[1], ", ")
    assert all(warned_of(nodes_of(order), picked) == [] for order in ORDERS), "words of documents are no documents"
    template, q = PromptTemplate(f"{{{name}}}\nNow: {{q}}"), "\n\n".join(TEXTS)
    warned = {bool(warned_of(nodes_of(order), str, template, q, **{name: JOINED})) for order in ORDERS}
    assert warned == {name == "context"}, "a question that is nothing but the nodes does not change the verdict"


@pytest.mark.parametrize(
    ("template", "count"),
    [("{context}\nBest: {top}", 3), ("{context}\nBest: FIRST", 3), ("{context}", 1), ("{context}", 2)],
)
@pytest.mark.parametrize("q", ["ferry", "a", "river?", QUERY])
def test_documents_picked_by_place_or_shown_beside_their_set_are_warned_of(template, count, q):
    for order in ORDERS:
        first = TEXTS[order[0]]
        filled = PromptTemplate(template.replace("FIRST", first))
        assert len(warned_of(nodes_of(order), lambda nodes: JOINED(nodes[:count]), filled, q, top=first)) == 1


def test_a_loop_of_a_template_over_one_document_writes_it_whole():
    recorder = Recorder()
    ask = partial(in_one_span, ask=partial(predicting, template=entries.JINJA, write=entries.contents))
    answer(ask, canonical(recorder), nodes_of([0]))
    assert recorder.asked == [f"<source nr=1>{TEXTS[0]}</source>\nAnswer: {QUERY}"]


# --- the verdict ---

WAYS = {
    "a tool's message": partial(in_one_span, ask=partial(told, write=JOINED)),
    "with metadata": partial(in_one_span, ask=partial(told, write=WITH_YEAR)),
    "compact": query,
    "tree_summarize": partial(query, response_mode="tree_summarize"),
    "InvariantSynthesizer": entries.ours,
    "CitationQueryEngine": entries.citation,
}


@pytest.mark.parametrize("name", LOOKALIKES)
def test_the_verdict_is_one_for_all_orders_whatever_the_nodes_are(lm, name):
    way = list(WAYS.values())[list(LOOKALIKES).index(name) % len(WAYS)]  # each way with the bits of a model for some
    for llm, ask in [*((canonical(HashingLLM()), each) for each in WAYS.values()), (local_llm(lm), way)]:
        listed = permutations([node(text, **fields) for text, fields in LOOKALIKES[name]])
        said = [caught(answer, ask, llm, list(order)) for order in listed]
        ((verdict, _),) = {(report_of(response)["invariant"], bool(messages)) for (_, response), messages in said}
        assert len({text for (text, _), _ in said}) == 1 or verdict is False


@pytest.mark.parametrize("way", ["compact", "tree_summarize", "InvariantSynthesizer"])
def test_synthesizers_strip_texts_and_their_sets_are_known_all_the_same(way):
    nodes = [node(f"\n{text} ") for text in TEXTS]
    assert report_of(answer(WAYS[way], canonical(HashingLLM(), strict=True), nodes)[1])["invariant"] is True


# --- runs ---


@dispatcher.span
def begun():
    """Retrieve, and return what the run knows, and a span in it that outlives it."""
    retrieve()
    scope = current_scope()
    assert len(scope.retrievals) == 1
    return scope.retrievals, replace(scope, ended=False)


def quoting(**options):
    """Return what another tenant is told, who quotes the same texts."""
    return caught(canonical(Recorder(), **options).complete, "Compare: " + " ".join(TEXTS))[1]


def test_what_a_run_retrieved_is_gone_with_it_and_unknown_to_other_threads_and_tasks():
    retrievals, outliving = begun()
    assert retrievals == outliving.known() == []
    tenant = threading.Thread(target=retrieve)
    tenant.start()
    tenant.join()
    engine_of(nodes_of(), llm=canonical(Recorder(), strict=True)).query(QUERY)
    assert quoting(strict=True) == []
    with pytest.raises(OrderWarning, match="without any"):
        quoting(require_segments=True)
    (handler,) = (each for each in root_dispatcher.span_handlers if isinstance(each, RunHandler))
    assert handler._scopes == {}, "a run is gone when it has ended"

    async def tasks():
        await asyncio.create_task(ListRetriever(nodes_of()).aretrieve(QUERY))
        await asyncio.create_task(asyncio.to_thread(retrieve))
        return await asyncio.create_task(asyncio.to_thread(quoting))

    assert asyncio.run(tasks()) == []
    retrieve()
    with ThreadPoolExecutor(1) as worker:
        assert worker.submit(quoting).result() == []


def test_what_is_retrieved_on_its_own_is_no_set_and_warns_once_until_another_retrieval_or_answer():
    retrieve()
    with pytest.raises(OrderWarning, match="SegmentMarkerPostprocessor"):
        quoting(strict=True)
    assert quoting() == [], "it has been said"
    retrieve()
    engine_of(nodes_of(), llm=Recorder()).query(QUERY)
    assert quoting() == [], "they have been retrieved again, and answered from"
    retrieve()
    assert caught(canonical(Recorder()).complete, f"Is this relevant? {TEXTS[0]}")[1] == []
    assert len(quoting()) == 1
    for llm, warned in ((Recorder(), True), (canonical(Recorder()), False)):  # the first knows no marks
        options = {"llm": llm, "node_postprocessors": [SegmentMarkerPostprocessor()]}
        messages = caught(engine_of(nodes_of(), **options).query, QUERY)[1]
        assert ["canonical(llm)" in each for each in messages] == [True] * warned


def test_a_tools_message_keeps_its_set_and_gives_it_to_no_other_message(llm):
    message = told_by_tool("\n\n".join(TEXTS))

    @dispatcher.span
    def ask_in_a_run():
        retrieve()
        return llm.chat([ChatMessage(QUERY), message]).raw["invariant"]

    def ask_later(tool):
        return llm.chat([ChatMessage(QUERY), tool, ChatMessage("And?")]).raw["invariant"]

    assert (ask_in_a_run(), ask_later(message), ask_later(message.model_copy(deep=True))) == (True, True, None)
    kept = len(_KEPT)
    message.blocks[0].text += " More."
    assert ask_later(message) is None
    del message.blocks[0]
    assert len(_KEPT) == kept - 1
