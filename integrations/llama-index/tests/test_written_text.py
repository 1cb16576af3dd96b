"""What users and models write arrives byte for byte, through every entry of LlamaIndex, in every order of the nodes."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from asks import Ask, Case, agent, answer, built, citation, ours, query
from cases import ORDERS, QUERY, TEXTS, ListRetriever, Recorder, caught, engine_of, nodes_of, verdict_of
from entries import ONE_BY_ONE, WHOLE
from invariant_rag import InvariantModel, SegmentSet
from invariant_rag.prompts import render_chat
from invariant_rag.segments import Slot
from llama_index.core import PromptTemplate
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.chat_engine import (
    CondensePlusContextChatEngine,
    CondenseQuestionChatEngine,
    ContextChatEngine,
    SimpleChatEngine,
)
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from pydantic import create_model
from tiny import EveryBit, local_llm, written
from transformers import LogitsProcessorList

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows and ReAct agents

F, M, B = TEXTS
CANONICAL = sorted(range(3), key=TEXTS.__getitem__, reverse=True)  # the first text of `lexical` stands last

QUESTIONS = [
    F,
    f"Is this right: {F}",
    f"{M} {F} Which is older?",
    f"{F}\n\n{M}\n\n{B}",
    f"{B}\n\n{M}\n\n{F}\n",
    f"My steps: 1. {B} 2. {F} 3. {M} What did I do in step 1?",
    f"First '{M}', then '{F}': is the order right?",
    f"- {B}\n- {M}\n- {F}\nRank these by age.",
    f"* {M}\n* {B}\n* {F}\nWhich is the last one?",
    f"docs = [Document(page_content={M!r}), Document(page_content={F!r})]\nWhat is docs[0]?",
    f"nodes = [TextNode(text={B!r}), TextNode(text={M!r}), TextNode(text={F!r})]\nnodes[1].text?",
    f"| n | text |\n| 1 | {B} |\n| 2 | {F} |\nWhat is in row 2?",
    f"n,text\n1,{M}\n2,{B}\n3,{F}\nSum of n where the text names a river?",
    f"Document 1: {M}\nDocument 2: {B}\nCompare document 1 with document 2.",
    f"Source 1:\n{B}\n\nSource 2:\n{F}\n\nWhat does source 1 say?",
    f"[1] {B} [2] {M} Cite [1].",
    f"(a) {M} (b) {B} (c) {F}: which is true?",
    f"a) {M} b) {B} c) {F}: which is true?",
    f"I. {F} II. {B} III. {M} What is II?",
    f'{{"a": "{F}", "b": "{M}"}} Which key comes first?',
    f'["{M}", "{F}", "{B}"][0]?',
    f"Q: {M}\nA: yes\nQ: {F}\nA:",
    f"Say {F!r} backwards, then {B!r}.",
    f"Version 1: {F} Version 2: {M} What changed?",
    f"def f():\n    return {B!r}, {M!r}\nf()[1]?",
    f"```python\nx = {M!r}\ny = {F!r}\n```\nWhat is y?",
    f"<a>{F}</a><b>{B}</b> What is in <b>?",
    f"<doc id=1>{M}</doc>\n<doc id=2>{F}</doc> What is in document 2?",
    f"{F.upper()} {M.upper()}",
    "Use {context_str} and {query_str} literally.",
    "What do {{braces}}, {0} and {} mean?",
    f"Day 1: {F} Day 2: {M} Day 3: {B} What was on day 2?",
    f"9:00 {B}\n10:00 {F}\n11:00 {M}\nWhen is the second?",
    f"2021: {M} 2019: {F} 1987: {B} Which came first?",
    f"Monday {B}\nTuesday {M}\nWednesday {F}\nAnd on Tuesday?",
    f"Page 1 {M}\n---\nPage 2 {F}\n---\nPage 3 {B}",
    f"{M}\n---\n{B}\n---\n{F}",
    f"Before: {F}\nAfter: {B}\nDiff?",
    f"- {M}\n+ {F}\nExplain this patch.",
    f"{B} (first) {M} (second) {F} (third). Which is second?",
    f"Grade A: {F} Grade B: {M} Grade C: {B}",
    f"If {F} then {M} else {B}?",
    f"Once upon a time: {M} Then: {F} The end: {B} Tell it again.",
    f"Translate line by line:\n{F}\n{B}\n{M}",
    f"Put these in order: {B} / {M} / {F}",
    f"  {F}  \t{M}\r\n{B}  ",
    f"\u201e{M}\u201c \u2013 \u00ab{F}\u00bb \u2026 \U0001f6a2 {B}",
    f"The last document says {B!r}; the first says {F!r}. Whom do I trust?",
]
"""Questions that name, quote or number their own nodes."""

STATED = [
    "Newest first:", "These are ranked from cheapest to dearest:", "In chronological order:", "Sorted by date:",
    "The last document is the authority.", "The first passage is the most reliable.", "Most relevant first.",
    "Ordered by price:", "Listed in alphabetical order:", "Later documents overrule; the latest document last.",
    "In order of importance:", "The top result is the best:",
]  # fmt: skip
"""Text above a set that says in which order its documents are."""


def chat(c: Case, kind: Any, **options: Any) -> Any:
    return next(built(c, kind, **options))


def condensed(c: Case) -> Any:
    history = [ChatMessage("Hello."), ChatMessage(c.question, role="assistant")]
    options = {"llm": c.llm, "chat_history": history}
    return CondenseQuestionChatEngine.from_defaults(engine_of(c.nodes, llm=c.llm), **options).chat(c.question)


def in_history(c: Case) -> Any:
    history = [ChatMessage(c.question), ChatMessage(c.question, role="assistant")]
    return ContextChatEngine.from_defaults(ListRetriever(c.nodes), llm=c.llm, chat_history=history).chat(QUERY)


def in_system_prompt(c: Case) -> Any:
    return engine_of(c.nodes, llm=c.llm.model_copy(update={"system_prompt": c.question})).query(QUERY)


TEMPLATE = PromptTemplate("{context_str}\nQ: {question}")
WORD = create_model("Word", input=(str, ...))


@get_dispatcher(__name__).span
def predicted(c: Case, output_cls: Any = None) -> Any:
    """Retrieve for another question than the one that is asked, as engines that condense a chat do."""
    context = "\n\n".join(each.text for each in ListRetriever(c.nodes).retrieve("ferry"))
    ask = partial(c.llm.structured_predict, output_cls) if output_cls else c.llm.predict
    return ask(TEMPLATE, context_str=context, question=c.question)


SET, TEXT, NONE = True, False, None
WAYS: dict[str, tuple[Ask, bool | None]] = {
    "compact": (query, SET),
    **{mode: (partial(query, response_mode=mode), mode in WHOLE) for mode in (*WHOLE[1:], *ONE_BY_ONE)},
    "generation": (partial(query, response_mode="generation"), NONE),
    "InvariantSynthesizer": (ours, SET),
    "CitationQueryEngine": (citation, TEXT),
    "context chat": (partial(chat, kind=ContextChatEngine), SET),
    "condense plus context chat": (partial(chat, kind=CondensePlusContextChatEngine), SET),
    "condense question chat": (condensed, SET),
    "llm.predict": (predicted, SET),
    "llm.structured_predict": (partial(predicted, output_cls=WORD), SET),
    "simple chat": (lambda c: SimpleChatEngine.from_defaults(llm=c.llm).chat(c.question), NONE),
    "a chat's history": (in_history, SET),
    "a system prompt": (in_system_prompt, SET),
    "FunctionAgent": (partial(agent, kind=FunctionAgent), SET),
    "ReActAgent": (partial(agent, kind=ReActAgent), TEXT),
}
"""Entries, and what they make of the nodes."""
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
    ask, kind = WAYS[way]
    said = set()
    for order in ORDERS[1::3]:
        alone, wrapped = Recorder(), Recorder()
        answer(query if way in AS_COMPACT else ask, alone, nodes_of(CANONICAL if kind is SET else order), question)
        llm = canonical(wrapped)
        (_, response), messages = caught(lambda order=order, llm=llm: answer(ask, llm, nodes_of(order), question))
        assert [each.replace(AS_COMPACT.get(way, JOINED), JOINED, 1) for each in wrapped.asked] == alone.asked
        assert any(question in each for each in wrapped.asked)
        said.add((verdict_of(response, kind), bool(messages)))
    assert len(said) == 1
    assert way in FINISHED or said == {(kind, kind is TEXT)}


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
            "chat template": partial(chat, kind=ContextChatEngine, context_template=template),
            "system prompt": query,
        }[place]
        (_, response), (message,) = caught(
            lambda ask=ask, llm=llm, order=order: answer(ask, canonical(llm), nodes_of(order))
        )
        (asked,) = llm.asked
        assert asked.startswith(stated)
        assert JOINED in asked
        assert verdict_of(response) is False
        assert "says in which order the documents are" in message


# --- the model's words ---

ANSWERS = r"""price = row[1]; qty = row[2]
np.array([1, 2])
matrix[1][2] + \sqrt[3]{x}
See [1], [2](http://a.b/[3]) and [^2].
[^1]: A footnote, see [^3].
{"documents": 2, "source": [1]}
Source 2 says: 'Document 1: ...'
[3]
[1, 3]
[Doc 2] and [Document 1]
Source 2
Sources: 1, 2, 3
(2)
#2
He wrote "see [2]" in [1].
<cite>2</cite> <source id=1/>
^2^ and 10^3^
rows[1:2][0]
a[1], a[2] = a[2], a[1]
x = [[1, 2], [3, 1]]
def f(a: list[int]) -> dict[str, list[float]]: return d[a[1]]
for i in range(1, 3): print(docs[i])
Document 1 is older than document 2.
1. First 2. Second 3. Third
- [x] done - [ ] open - [1] one
\u3010 1 \u3011 and \cite{2}
f(x)[2] * g[1](y)
The page [1] of [3]
[1][2][3]
passage 3; passage 1; chunk 2
SELECT t[1] FROM s WHERE id IN (1, 2, 3);
As a result 2 ferries left; 3 came.
ref. 2, p. 3, eq. (1)
$[1]$, \[ x_1 \], \(y_{2}\)
[1] and [2] disagree: [1] is right.
<|doc 1|> {{context_str}} {query_str} %s {0}
Thought: [1]. Action Input: {"i": [2]}
[a] [b][1] [link]: <http://x/2>
awk '{print $1, $2}' f[1].txt | sed -n 2p
   leading, trailing [2]   and\ttabs""".splitlines()

ARGUMENTS: list[dict[str, Any]] = [
    {"code": code}
    for code in (
        "rows[1] + rows[2]", "a[1], a[2] = a[2], a[1]", "np.array([1, 2])[0]", "print('[2]')", "x = [3, 1, 2]",
        "df.iloc[1:2]", "m[1][2]", "[i for i in [1, 2, 3]]", "docs[0].text",
    )
] + [{"q": text} for text in ("see [1]", "Source 2", "document 3", "(1) or (2)", "#2", "[Doc 1]", F, f"{M} {B}")] + [
    {"documents": 2}, {"source": 1}, {"citation": "2"}, {"ids": [1, 2]}, {"refs": ["1", "3"]}, {"n": 3, "source": 2},
    {"context": "[2]"}, {"order": [3, 1, 2]},
]  # fmt: skip

SAYING = (
    "compact", "tree_summarize", "InvariantSynthesizer", "CitationQueryEngine", "context chat", "llm.predict",
    "FunctionAgent",
)  # fmt: skip


def asked_about(order: Any) -> ChatMessage:
    return ChatMessage(blocks=[*(SegmentBlock.of(TEXTS[i]) for i in order), *ChatMessage(QUERY).blocks])


def writing(model: InvariantModel, text: str) -> InvariantLLM:
    """Return a local LLM for one call, in which it writes a text."""
    return InvariantLLM(model, max_tokens=160, generation_kwargs=written(model, text))


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(model: InvariantModel, text: str) -> None:
    number = ANSWERS.index(text)
    order = ORDERS[number % len(ORDERS)]
    for way in (SAYING[number % len(SAYING)], SAYING[(number + 3) % len(SAYING)]):
        llm = canonical(Recorder(says=text))
        assert caught(lambda way=way, llm=llm: answer(WAYS[way][0], llm, nodes_of(order))[0])[0] == text
    assert predicted(Case(canonical(Recorder(calls={"input": text})), nodes_of(order)), WORD).input == text
    ways: list[Callable[[InvariantLLM], str]] = [
        lambda llm: "".join(each.delta or "" for each in llm.stream_chat([asked_about(order)])),
        lambda llm: llm.complete("\n".join(f"[{i}] {each}" for i, each in enumerate(TEXTS))).text,
        lambda llm: answer(query, llm, nodes_of(order))[0],
    ]
    assert ways[number % len(ways)](writing(model, text)) == text


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
def test_the_arguments_of_a_call_arrive_as_the_model_wrote_them(
    spoken: InvariantModel, arguments: dict[str, Any]
) -> None:
    got: list[dict[str, Any]] = []
    schema = create_model("Run", **{name: (type(value), ...) for name, value in arguments.items()})
    tool = FunctionTool.from_defaults(lambda **given: got.append(given), name="run", fn_schema=schema)
    asked = asked_about(ORDERS[ARGUMENTS.index(arguments) % len(ORDERS)])
    canonical(Recorder(calls=arguments)).predict_and_call([tool], chat_history=[asked])
    assert got == [arguments]
    llm = writing(spoken, f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': arguments})}\n</tool_call>")
    (found,) = llm.get_tool_calls_from_response(llm.chat_with_tools([tool], chat_history=[asked]))
    assert found.tool_kwargs == arguments


async def test_an_agent_gets_what_the_model_wrote() -> None:
    got: list[str] = []

    def run(code: str) -> None:
        """Run it."""
        got.append(code)

    for order, code in zip(ORDERS, ("rows[1] + rows[2]", "see [3]", F, f"{M} {B}", "docs[0]", "[2]"), strict=True):
        llm = canonical(Recorder(calls={"code": code}))
        await FunctionAgent(tools=[run], llm=llm, streaming=False).run(asked_about(order))
        assert got.pop() == code
