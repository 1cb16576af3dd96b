"""Slots of prompts are sets or stay as they are, with one verdict for every order of the nodes; what a run knows.

What users and models write arrives byte for byte, through every entry of LlamaIndex. Which texts are a set of what was
retrieved is decided, and tested, in the core.
"""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import permutations

import entries
import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, Recorder, engine_of, message_of, node, nodes_of, report_of
from entries import JOINED, Case, answer, listing, local_llm
from framework_cases import LOOKALIKES, EveryBit, call_text, caught, ended, written_texts
from invariant_rag import SegmentSet
from invariant_rag.errors import OrderWarning
from invariant_rag.prompts import render_chat
from invariant_rag.segments import Slot
from llama_index.core import PromptTemplate, chat_engine
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index_instrumentation import root_dispatcher
from pydantic import create_model

from llama_index.llms.invariant_rag import InvariantLLM, canonical
from llama_index.llms.invariant_rag.runs import current_scope
from llama_index.llms.invariant_rag.slots import _KEPT
from llama_index.llms.invariant_rag.span_handler import RunHandler
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor

dispatcher = get_dispatcher(__name__)
TEMPLATE = PromptTemplate("Read:\n{context}\nNow: {q}")
WITH_YEAR = listing("{node.metadata} {node.text}", "\n")
WORD = create_model("Word", input=(str, ...))


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


def test_metadata_is_that_of_its_node_also_where_a_template_gets_texts_without_it():
    recorder, written = Recorder(), []
    for order in ORDERS:
        nodes = [node(TEXTS[i], year=(2021, 1987, 1904)[i]) for i in order]
        asked(canonical(recorder, strict=True), nodes, WITH_YEAR)
        written.append(f"Read:\n{WITH_YEAR(nodes)}\nNow: {QUERY}")
    assert (len({*recorder.asked}), recorder.asked[0] in written) == (1, True), "each year stays with its text"


@pytest.mark.parametrize("name", ["context", "context_str"])
def test_single_words_and_the_question_are_a_set_only_where_the_variable_is_declared_to_hold_nodes(name):
    template = PromptTemplate(f"{{{name}}}\nOptions: {{options}}")
    recorder, own = Recorder(), {name: JOINED, "options": "green, red, blue"}
    for order in permutations(("red", "green", "blue")):
        assert len(caught(asked, canonical(recorder), list(map(node, order)), str, template, **own)[1]) == 1
    assert all(each.endswith("\nOptions: green, red, blue") for each in recorder.asked), "nobody's words are sorted"
    assert len(set(recorder.asked)) == (1 if name == "context_str" else 6)
    for order in ORDERS:
        picked = warned_of(nodes_of(order), lambda nodes: ", ".join(each.text.split()[1] for each in nodes))
        assert picked == [], "words of documents are no documents"
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
    recorder, loop = Recorder(), "`RichPromptTemplate` with a Jinja loop"
    answer(entries.ENTRIES["nodes in other calls"][loop], canonical(recorder), nodes_of([0]))
    assert recorder.asked == [f"<source nr=1>{TEXTS[0]}</source>\nAnswer: {QUERY}"]


QUESTIONS, STATED, ANSWERS, ARGUMENTS = (
    written_texts(part, *TEXTS) for part in ("questions", "stated_orders", "answers", "arguments")
)
QUESTIONS += [f"{TEXTS[0].upper()} {TEXTS[1].upper()}", f"  {TEXTS[0]}  \t{TEXTS[1]}\r\n{TEXTS[2]}  "]
CANONICAL = sorted(range(3), key=TEXTS.__getitem__, reverse=True)  # the first text of `lexical` stands last
SORTED = "\n\n".join(TEXTS[i] for i in CANONICAL)


def chat(c, kind=chat_engine.ContextChatEngine, **options):
    return next(c.chat(kind, **options))


@dispatcher.span
def predicted(c, output_cls=None):
    """Retrieve for another question than the one that is asked, as engines that condense a chat do."""
    context = JOINED(ListRetriever(c.nodes).retrieve("ferry"))
    ask = partial(c.llm.structured_predict, output_cls) if output_cls else c.llm.predict
    return ask(PromptTemplate("{context_str}\nQ: {question}"), context_str=context, question=c.question)


WAYS = {
    **{mode: partial(Case.query, response_mode=mode) for mode in (*entries.WHOLE, *entries.ONE_BY_ONE, "generation")},
    "InvariantSynthesizer": Case.ours,
    "CitationQueryEngine": Case.citation,
    "context chat": chat,
    "condense plus context chat": partial(chat, kind=chat_engine.CondensePlusContextChatEngine),
    "condense question chat": lambda c: chat_engine.CondenseQuestionChatEngine.from_defaults(
        engine_of(c.nodes), llm=c.llm, chat_history=[ChatMessage("Hi."), ChatMessage(c.question, role="assistant")]
    ).chat(c.question),
    "simple chat": lambda c: chat_engine.SimpleChatEngine.from_defaults(llm=c.llm).chat(c.question),
    "llm.predict": predicted,
    "llm.structured_predict": partial(predicted, output_cls=WORD),
    "a chat's history": lambda c: chat(
        c._replace(question=QUERY), chat_history=[ChatMessage(c.question, role=role) for role in ("user", "assistant")]
    ),
    "a system prompt": lambda c: c._replace(question=QUERY).query(
        llm=c.llm.model_copy(update={"system_prompt": c.question})
    ),
    **{kind.__name__: partial(Case.agent, kind=kind) for kind in (FunctionAgent, ReActAgent)},
}  # fmt: skip
AS_TEXT, WITHOUT = {*entries.ONE_BY_ONE, "CitationQueryEngine", "ReActAgent"}, {"generation", "simple chat"}
"""Entries that leave the nodes as text, and those without nodes; the others make a set of them."""
FINISHED = {"simple chat", "a chat's history", "a system prompt", "FunctionAgent", "ReActAgent"}
"""Entries that give messages, of which it is unknown who wrote them: a question may look like documents, and warn."""
AS_COMPACT = {
    "simple_summarize": "\n".join(TEXTS[i] for i in CANONICAL),
    "InvariantSynthesizer": "".join(f"Document: {TEXTS[i]}\n" for i in CANONICAL),
}
"""Entries that ask as `compact` does, with other text around the nodes: LlamaIndex would print a Python list."""
ASKED = [
    (way, question)
    for i, way in enumerate(WAYS)
    for j, question in enumerate(QUESTIONS)
    if (way == "compact" or (i + j) % 14 == 0) and not (way == "a chat's history" and "{context_str}" in question)
]
"""One entry with each question, others with some. LlamaIndex takes the history of one engine for templates."""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows and ReAct agents
@pytest.mark.parametrize(("way", "question"), ASKED)
def test_a_prompt_is_what_llamaindex_writes_for_one_order_of_the_nodes(way, question):
    ask, verdicts, is_set = WAYS[way], set(), None if way in WITHOUT else way not in AS_TEXT
    for order in ORDERS[1::3]:
        alone, wrapped = Recorder(), Recorder()
        answer(Case.query if way in AS_COMPACT else ask, alone, nodes_of(CANONICAL if is_set else order), question)
        (_, response), messages = caught(answer, ask, canonical(wrapped), nodes_of(order), question)
        assert [each.replace(AS_COMPACT.get(way, SORTED), SORTED, 1) for each in wrapped.asked] == alone.asked
        assert any(question in each for each in wrapped.asked)
        verdicts.add((report_of(response).get("invariant", is_set), bool(messages)))
    assert len(verdicts) == 1
    assert way in FINISHED or verdicts == {(is_set, way in AS_TEXT)}


@pytest.mark.parametrize(("place", "question"), list(enumerate(QUESTIONS)))
def test_the_local_model_attends_to_the_set_and_to_the_question_as_it_is(lm, place, question):
    found = SegmentSet(TEXTS, slots=[Slot(after="\n\n"), Slot(after="\n\n"), Slot()])
    messages = [{"role": "user", "content": ["Read:\n", found, f"\nQ: {question}"]}]
    prompt = render_chat(messages, lm.tokenizer, question)
    expected = lm.generate(prompt, max_new_tokens=2, logits_processor=[EveryBit(lm)]).text
    ask = partial(Case.query, text_qa_template=PromptTemplate("Read:\n{context_str}\nQ: {query_str}"))
    assert answer(ask, local_llm(lm), nodes_of(ORDERS[place % 6]), question)[0] == expected


@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("place", ["template", "chat template", "system prompt"])
def test_an_order_that_is_stated_above_a_set_stays_and_is_warned_of(place, stated):
    template = PromptTemplate(f"{stated}\n{{context_str}}\nQ: {{query_str}}")
    for order in ORDERS[STATED.index(stated) % 3 :: 3]:
        ask, llm = {
            "template": (partial(Case.query, text_qa_template=template), Recorder()),
            "chat template": (partial(chat, context_template=template), Recorder()),
            "system prompt": (Case.query, Recorder(system_prompt=stated)),
        }[place]
        (_, response), (message,) = caught(answer, ask, canonical(llm), nodes_of(order))
        (prompt,) = llm.asked
        assert (prompt.startswith(stated), SORTED in prompt) == (True, True)
        assert report_of(response)["invariant"] is False
        assert "says in which order the documents are" in message


TOLD = [partial(Case.in_one_span, ask=partial(Case.told, write=write)) for write in (JOINED, WITH_YEAR)]
SYNTHESIZED = [WAYS[way] for way in ("compact", "tree_summarize", "InvariantSynthesizer")]


@pytest.mark.parametrize("name", LOOKALIKES)
def test_the_verdict_is_one_for_all_orders_whatever_the_nodes_are(lm, name):
    ways = [*TOLD, *SYNTHESIZED, Case.citation]
    way = ways[list(LOOKALIKES).index(name) % len(ways)]  # each way with the bits of a model for some
    for llm, ask in [*((canonical(Recorder(says=str)), each) for each in ways), (local_llm(lm), way)]:
        listed = permutations([node(text, **fields) for text, fields in LOOKALIKES[name]])
        said = [caught(answer, ask, llm, list(order)) for order in listed]
        ((verdict, _),) = {(report_of(response)["invariant"], bool(messages)) for (_, response), messages in said}
        assert len({text for (text, _), _ in said}) == 1 or verdict is False


@pytest.mark.parametrize("ask", SYNTHESIZED)
def test_synthesizers_strip_texts_and_their_sets_are_known_all_the_same(ask):
    for ends in (" ", " ", " "), ("", "\n", " "):  # alike and not
        nodes = [node(f"\n{text}{end}") for text, end in zip(TEXTS, ends, strict=True)]
        assert report_of(answer(ask, canonical(Recorder(), strict=True), nodes)[1])["invariant"] is True


SAYING = ("compact", "tree_summarize", "InvariantSynthesizer", "CitationQueryEngine", "context chat", "llm.predict")


def writing(lm, text):
    """Return a local LLM that writes a text."""
    return InvariantLLM(lm, max_tokens=160, generation_kwargs=ended(lm, text))


@pytest.mark.parametrize(("number", "text"), list(enumerate(ANSWERS)))
def test_an_answer_arrives_as_the_model_wrote_it(lm, number, text):
    order = ORDERS[number % 6]
    for way in (SAYING[number % 6], "FunctionAgent"):
        assert caught(answer, WAYS[way], canonical(Recorder(says=text)), nodes_of(order))[0][0] == text
    assert predicted(Case(canonical(Recorder(calls={"input": text})), nodes_of(order)), WORD).input == text
    message, llm = message_of(TEXTS[i] for i in order), writing(lm, text)
    assert "".join(each.delta or "" for each in llm.stream_chat([message])) == text
    assert llm.complete("\n".join(f"[{i}] {each}" for i, each in enumerate(TEXTS))).text == text
    assert answer(Case.query, llm, nodes_of(order))[0] == text


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows and ReAct agents
@pytest.mark.parametrize(("number", "arguments"), list(enumerate(map(json.loads, ARGUMENTS))))
async def test_arguments_of_a_call_arrive_as_the_model_wrote_them(spoken, number, arguments):
    got, message = [], message_of(TEXTS[i] for i in ORDERS[number % 6])
    schema = create_model("Run", **{name: (type(value), ...) for name, value in arguments.items()})
    tool = FunctionTool.from_defaults(lambda **given: got.append(given), name="run", description="R.", fn_schema=schema)
    canonical(Recorder(calls=arguments)).predict_and_call([tool], chat_history=[message])
    await FunctionAgent(tools=[tool], llm=canonical(Recorder(calls=arguments)), streaming=False).run(message)
    assert got == [arguments] * 2
    llm = writing(spoken, call_text("run", arguments))
    (found,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], chat_history=[message]))
    assert found.tool_kwargs == arguments


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
    with ThreadPoolExecutor(1) as tenant:
        tenant.submit(retrieve).result()
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
    message = ChatMessage("\n\n".join(TEXTS), role="tool", additional_kwargs={"tool_call_id": "1"})

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
