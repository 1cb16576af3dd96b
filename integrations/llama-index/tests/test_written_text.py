"""What users and models write arrives byte for byte, through every entry of LlamaIndex, in every order of the nodes."""

import json
from dataclasses import replace
from functools import partial

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, Recorder, engine_of, message_of, nodes_of
from entries import ONE_BY_ONE, WHOLE, Case, agent, answer, built, citation, local_llm, ours, query
from framework_cases import EveryBit, call_text, caught, ended, written_texts
from invariant_rag import SegmentSet
from invariant_rag.prompts import render_chat
from invariant_rag.segments import Slot
from llama_index.core import PromptTemplate, chat_engine
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import create_model
from responses import report_of

from llama_index.llms.invariant_rag import InvariantLLM, canonical

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows and ReAct agents

QUESTIONS, STATED, ANSWERS, ARGUMENTS = (
    written_texts(part, *TEXTS) for part in ("questions", "stated_orders", "answers", "arguments")
)
QUESTIONS += [f"{TEXTS[0].upper()} {TEXTS[1].upper()}", f"  {TEXTS[0]}  \t{TEXTS[1]}\r\n{TEXTS[2]}  "]
CANONICAL = sorted(range(3), key=TEXTS.__getitem__, reverse=True)  # the first text of `lexical` stands last
JOINED = "\n\n".join(TEXTS[i] for i in CANONICAL)
WORD = create_model("Word", input=(str, ...))


def chat(c, kind=chat_engine.ContextChatEngine, **options):
    return next(built(c, kind, **options))


@get_dispatcher(__name__).span
def predicted(c, output_cls=None):
    """Retrieve for another question than the one that is asked, as engines that condense a chat do."""
    context = "\n\n".join(each.text for each in ListRetriever(c.nodes).retrieve("ferry"))
    ask = partial(c.llm.structured_predict, output_cls) if output_cls else c.llm.predict
    return ask(PromptTemplate("{context_str}\nQ: {question}"), context_str=context, question=c.question)


def talked(c):
    """Return a history in which a user and a model said this."""
    return [ChatMessage(c.question), ChatMessage(c.question, role="assistant")]


WAYS = {
    **{mode: partial(query, response_mode=mode) for mode in (*WHOLE, *ONE_BY_ONE, "generation")},
    "InvariantSynthesizer": ours,
    "CitationQueryEngine": citation,
    "context chat": chat,
    "condense plus context chat": partial(chat, kind=chat_engine.CondensePlusContextChatEngine),
    "condense question chat": lambda c: chat_engine.CondenseQuestionChatEngine.from_defaults(
        engine_of(c.nodes, llm=c.llm), llm=c.llm, chat_history=[ChatMessage("Hi."), talked(c)[1]]
    ).chat(c.question),
    "simple chat": lambda c: chat_engine.SimpleChatEngine.from_defaults(llm=c.llm).chat(c.question),
    "llm.predict": predicted,
    "llm.structured_predict": partial(predicted, output_cls=WORD),
    "a chat's history": lambda c: chat(replace(c, question=QUERY), chat_history=talked(c)),
    "a system prompt": lambda c: engine_of(
        c.nodes, llm=c.llm.model_copy(update={"system_prompt": c.question})
    ).query(QUERY),
    **{kind.__name__: partial(agent, kind=kind) for kind in (FunctionAgent, ReActAgent)},
}  # fmt: skip
AS_TEXT, WITHOUT = {*ONE_BY_ONE, "CitationQueryEngine", "ReActAgent"}, {"generation", "simple chat"}
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


@pytest.mark.parametrize(("way", "question"), ASKED)
def test_a_prompt_is_what_llamaindex_writes_for_one_order_of_the_nodes(way, question):
    ask, verdicts, is_set = WAYS[way], set(), None if way in WITHOUT else way not in AS_TEXT
    for order in ORDERS[1::3]:
        alone, wrapped = Recorder(), Recorder()
        answer(query if way in AS_COMPACT else ask, alone, nodes_of(CANONICAL if is_set else order), question)
        (_, response), messages = caught(answer, ask, canonical(wrapped), nodes_of(order), question)
        assert [each.replace(AS_COMPACT.get(way, JOINED), JOINED, 1) for each in wrapped.asked] == alone.asked
        assert any(question in each for each in wrapped.asked)
        verdicts.add((report_of(response).get("invariant", is_set), bool(messages)))
    assert len(verdicts) == 1
    assert way in FINISHED or verdicts == {(is_set, way in AS_TEXT)}


@pytest.mark.parametrize(("place", "question"), list(enumerate(QUESTIONS)))
def test_the_local_model_attends_to_the_set_and_to_the_question_as_it_is(lm, place, question):
    found = SegmentSet(TEXTS, slots=[Slot(after="\n\n"), Slot(after="\n\n"), Slot()])
    asked = [{"role": "user", "content": ["Read:\n", found, f"\nQ: {question}"]}]
    prompt = render_chat(asked, lm.tokenizer, question)
    expected = lm.generate(prompt, max_new_tokens=2, logits_processor=[EveryBit(lm)]).text
    ask = partial(query, text_qa_template=PromptTemplate("Read:\n{context_str}\nQ: {query_str}"))
    assert answer(ask, local_llm(lm), nodes_of(ORDERS[place % 6]), question)[0] == expected


@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("place", ["template", "chat template", "system prompt"])
def test_an_order_that_is_stated_above_a_set_stays_and_is_warned_of(place, stated):
    template = PromptTemplate(f"{stated}\n{{context_str}}\nQ: {{query_str}}")
    ask = {
        "template": partial(query, text_qa_template=template),
        "chat template": partial(chat, context_template=template),
        "system prompt": query,
    }[place]
    for order in ORDERS[STATED.index(stated) % 3 :: 3]:
        llm = Recorder(system_prompt=stated) if place == "system prompt" else Recorder()
        (_, response), (message,) = caught(answer, ask, canonical(llm), nodes_of(order))
        (asked,) = llm.asked
        assert (asked.startswith(stated), JOINED in asked) == (True, True)
        assert report_of(response)["invariant"] is False
        assert "says in which order the documents are" in message


# --- the model's words ---

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
    asked, llm = message_of(TEXTS[i] for i in order), writing(lm, text)
    assert "".join(each.delta or "" for each in llm.stream_chat([asked])) == text
    assert llm.complete("\n".join(f"[{i}] {each}" for i, each in enumerate(TEXTS))).text == text
    assert answer(query, llm, nodes_of(order))[0] == text


@pytest.mark.parametrize(("number", "arguments"), list(enumerate(map(json.loads, ARGUMENTS))))
async def test_arguments_of_a_call_arrive_as_the_model_wrote_them(spoken, number, arguments):
    got, asked = [], message_of(TEXTS[i] for i in ORDERS[number % 6])
    schema = create_model("Run", **{name: (type(value), ...) for name, value in arguments.items()})
    tool = FunctionTool.from_defaults(lambda **given: got.append(given), name="run", description="R.", fn_schema=schema)
    canonical(Recorder(calls=arguments)).predict_and_call([tool], chat_history=[asked])
    await FunctionAgent(tools=[tool], llm=canonical(Recorder(calls=arguments)), streaming=False).run(asked)
    assert got == [arguments] * 2
    llm = writing(spoken, call_text("run", arguments))
    (found,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], chat_history=[asked]))
    assert found.tool_kwargs == arguments
