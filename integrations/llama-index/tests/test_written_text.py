"""What users and models write arrives byte for byte, through every entry of LlamaIndex, in every order of the nodes."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from answers import caught, report_of
from cases import ORDERS, QUERY, TEXTS, ListRetriever, Recorder, engine_of, message_of, nodes_of
from entries import ONE_BY_ONE, WHOLE, Ask, Case, agent, answer, built, citation, ours, query
from invariant_rag import InvariantModel, SegmentSet
from invariant_rag.prompts import render_chat
from invariant_rag.segments import Slot
from llama_index.core import PromptTemplate, chat_engine
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import create_model
from tiny import EveryBit, local_llm, written
from transformers import LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM, canonical

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows and ReAct agents

F, M, B = TEXTS
CANONICAL = sorted(range(3), key=TEXTS.__getitem__, reverse=True)  # the first text of `lexical` stands last
WRITTEN = tomllib.loads(Path(__file__).with_name("written_text.toml").read_text(encoding="utf-8"))


def written_in(part: str) -> list[str]:
    """Return the texts of a part of the file."""
    found = WRITTEN[part].strip("\n").split("\n")
    for name, text in {"{F}": F, "{M}": M, "{B}": B, "¶": "\n"}.items():
        found = [each.replace(name, text) for each in found]
    return found


QUESTIONS = [*written_in("questions"), f"{F.upper()} {M.upper()}", f"  {F}  \t{M}\r\n{B}  "]
STATED, ANSWERS = written_in("stated_orders"), written_in("answers")
ARGUMENTS: list[dict[str, Any]] = list(map(json.loads, written_in("arguments")))


def said(c: Case) -> ChatMessage:
    return ChatMessage(c.question, role="assistant")


def chat(c: Case, kind: Any, **options: Any) -> Any:
    return next(built(c, kind, **options))


TEMPLATE = PromptTemplate("{context_str}\nQ: {question}")
WORD = create_model("Word", input=(str, ...))


@get_dispatcher(__name__).span
def predicted(c: Case, output_cls: Any = None) -> Any:
    """Retrieve for another question than the one that is asked, as engines that condense a chat do."""
    context = "\n\n".join(each.text for each in ListRetriever(c.nodes).retrieve("ferry"))
    ask = partial(c.llm.structured_predict, output_cls) if output_cls else c.llm.predict
    return ask(TEMPLATE, context_str=context, question=c.question)


SETS: dict[str, Ask] = {
    "compact": query,
    **{mode: partial(query, response_mode=mode) for mode in WHOLE[1:]},
    "InvariantSynthesizer": ours,
    "context chat": partial(chat, kind=chat_engine.ContextChatEngine),
    "condense plus context chat": partial(chat, kind=chat_engine.CondensePlusContextChatEngine),
    "condense question chat": lambda c: chat_engine.CondenseQuestionChatEngine.from_defaults(
        engine_of(c.nodes, llm=c.llm), llm=c.llm, chat_history=[ChatMessage("Hi."), said(c)]
    ).chat(c.question),
    "llm.predict": predicted,
    "llm.structured_predict": partial(predicted, output_cls=WORD),
    "a chat's history": lambda c: chat(
        replace(c, question=QUERY), chat_engine.ContextChatEngine, chat_history=[ChatMessage(c.question), said(c)]
    ),
    "a system prompt": lambda c: engine_of(
        c.nodes, llm=c.llm.model_copy(update={"system_prompt": c.question})
    ).query(QUERY),
    "FunctionAgent": partial(agent, kind=FunctionAgent),
}  # fmt: skip
TEXT: dict[str, Ask] = {
    **{mode: partial(query, response_mode=mode) for mode in ONE_BY_ONE},
    "CitationQueryEngine": citation,
    "ReActAgent": partial(agent, kind=ReActAgent),
}
WITHOUT: dict[str, Ask] = {
    "generation": partial(query, response_mode="generation"),
    "simple chat": lambda c: chat_engine.SimpleChatEngine.from_defaults(llm=c.llm).chat(c.question),
}
WAYS = {**SETS, **TEXT, **WITHOUT}
"""Entries that make a set of the nodes, those that leave them as text, and those without nodes."""
FINISHED = {"simple chat", "a chat's history", "a system prompt", "FunctionAgent", "ReActAgent"}
"""Entries that give messages, of which it is unknown who wrote them: a question may look like documents, and warn."""

JOINED = "\n\n".join(TEXTS[i] for i in CANONICAL)
AS_COMPACT = {
    "simple_summarize": "\n".join(TEXTS[i] for i in CANONICAL),
    "InvariantSynthesizer": "".join(f"Document: {TEXTS[i]}\n" for i in CANONICAL),
}
"""Entries that ask as `compact` does, with other text around the nodes: LlamaIndex would print a Python list."""
ASKED = [
    (way, question)
    for i, way in enumerate(WAYS)
    for j, question in enumerate(QUESTIONS)
    if (way == "compact" or (i + j) % 7 == 0) and not (way == "a chat's history" and "{context_str}" in question)
]
"""One entry with each question, others with a seventh. LlamaIndex takes the history of one engine for templates."""


def test_there_are_sixty_prompts_forty_answers_and_twenty_five_calls() -> None:
    assert (len(QUESTIONS) + len(STATED), len(ANSWERS), len(ARGUMENTS)) == (60, 40, 25)


@pytest.mark.parametrize(("way", "question"), ASKED)
def test_a_prompt_is_what_llamaindex_writes_for_one_order_of_the_nodes(way: str, question: str) -> None:
    ask, kind, verdicts = WAYS[way], None if way in WITHOUT else way in SETS, set()
    for order in ORDERS[1::3]:
        alone, wrapped = Recorder(), Recorder()
        answer(query if way in AS_COMPACT else ask, alone, nodes_of(CANONICAL if kind else order), question)
        llm = canonical(wrapped)
        (_, response), messages = caught(answer, ask, llm, nodes_of(order), question)
        assert [each.replace(AS_COMPACT.get(way, JOINED), JOINED, 1) for each in wrapped.asked] == alone.asked
        assert any(question in each for each in wrapped.asked)
        verdicts.add((report_of(response).get("invariant", kind), bool(messages)))
    assert len(verdicts) == 1
    assert way in FINISHED or verdicts == {(kind, way in TEXT)}


@pytest.mark.parametrize("question", QUESTIONS)
def test_the_local_model_attends_to_the_set_and_to_the_question_as_it_is(model: InvariantModel, question: str) -> None:
    slots = [Slot(after="\n\n"), Slot(after="\n\n"), Slot()]
    content = ["Read:\n", SegmentSet(TEXTS, slots=slots), f"\nQ: {question}"]
    prompt = render_chat([{"role": "user", "content": content}], model.tokenizer, question)
    every_bit = LogitsProcessorList([EveryBit(model.tokenizer)])
    expected = model.generate(prompt, max_new_tokens=2, logits_processor=every_bit).text
    ask = partial(query, text_qa_template=PromptTemplate("Read:\n{context_str}\nQ: {query_str}"))
    order = ORDERS[QUESTIONS.index(question) % len(ORDERS)]
    assert answer(ask, local_llm(model), nodes_of(order), question)[0] == expected


@pytest.mark.parametrize("stated", STATED)
@pytest.mark.parametrize("place", ["template", "chat template", "system prompt"])
def test_an_order_that_is_stated_above_a_set_stays_and_is_warned_of(place: str, stated: str) -> None:
    template = PromptTemplate(f"{stated}\n{{context_str}}\nQ: {{query_str}}")
    for order in ORDERS[STATED.index(stated) % 3 :: 3]:
        llm = Recorder(system_prompt=stated) if place == "system prompt" else Recorder()
        ask = {
            "template": partial(query, text_qa_template=template),
            "chat template": partial(chat, kind=chat_engine.ContextChatEngine, context_template=template),
            "system prompt": query,
        }[place]
        (_, response), (message,) = caught(answer, ask, canonical(llm), nodes_of(order))
        (asked,) = llm.asked
        assert asked.startswith(stated)
        assert JOINED in asked
        assert report_of(response)["invariant"] is False
        assert "says in which order the documents are" in message


# --- the model's words ---

SAYING = (
    "compact", "tree_summarize", "InvariantSynthesizer", "CitationQueryEngine", "context chat", "llm.predict",
    "FunctionAgent",
)  # fmt: skip


def writing(model: InvariantModel, text: str) -> InvariantLLM:
    """Return a local LLM for one call, in which it writes a text."""
    return InvariantLLM(model, max_tokens=160, generation_kwargs=written(model, text))


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(model: InvariantModel, text: str) -> None:
    number = ANSWERS.index(text)
    order = ORDERS[number % len(ORDERS)]
    for way in (SAYING[number % len(SAYING)], SAYING[(number + 3) % len(SAYING)]):
        llm = canonical(Recorder(says=text))
        assert caught(answer, WAYS[way], llm, nodes_of(order))[0][0] == text
    assert predicted(Case(canonical(Recorder(calls={"input": text})), nodes_of(order)), WORD).input == text
    ways: list[Callable[[InvariantLLM], str]] = [
        lambda llm: "".join(each.delta or "" for each in llm.stream_chat([message_of(TEXTS[i] for i in order)])),
        lambda llm: llm.complete("\n".join(f"[{i}] {each}" for i, each in enumerate(TEXTS))).text,
        lambda llm: answer(query, llm, nodes_of(order))[0],
    ]
    assert ways[number % len(ways)](writing(model, text)) == text


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
async def test_arguments_of_a_call_arrive_as_the_model_wrote_them(spoken: InvariantModel, arguments: Any) -> None:
    got: list[dict[str, Any]] = []
    schema = create_model("Run", **{name: (type(value), ...) for name, value in arguments.items()})
    tool = FunctionTool.from_defaults(lambda **given: got.append(given), name="run", description="R.", fn_schema=schema)
    asked = message_of(TEXTS[i] for i in ORDERS[ARGUMENTS.index(arguments) % len(ORDERS)])
    canonical(Recorder(calls=arguments)).predict_and_call([tool], chat_history=[asked])
    await FunctionAgent(tools=[tool], llm=canonical(Recorder(calls=arguments)), streaming=False).run(asked)
    assert got == [arguments] * 2
    llm = writing(spoken, f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': arguments})}\n</tool_call>")
    (found,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], chat_history=[asked]))
    assert found.tool_kwargs == arguments
