"""What users and models write arrives byte for byte: questions, histories, answers, and arguments of tools."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
from invariant_rag import InvariantModel, SegmentSet
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import Answer, AnswerRequest
from invariant_rag.segments import Slot
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_invariant_rag import ChatInvariant, SegmentsPlaceholder
from langchain_invariant_rag.documents import is_segment_block, to_segment

from .shared import DOCUMENTS, Listed
from .tool_models import ended

PROMPT_TEXTS = """My steps: 1. {0} 2. {1} 3. {2} What was step 1? ~ {0}||{1}||{2} ~ '{0}' or '{1}' or '{2}'? ~ {2}||{0}
Day 1: {0} Day 2: {1} Day 3: {2} ~ docs = [Document(page_content='{0}'), Document(page_content='{1}')] ~ {0}
[1] {0} [2] {1} [3] {2} Which is [1]? ~ 9:00 {0}|10:00 {1}|11:00 {2} ~ {2} {1} {0} ~ {0}|{1}|{2}
Compare {0} with {2} ~ - {0}|- {1}|- {2} ~ * {2}|* {0}|* {1} ~ First: {0} Then: {1} At last: {2}
Once {0} And then {1} In the end {2} ~ Is it true that {0} if {1}? ~ {0} is newer than {1}, and {1} than {2}.
Version 1: {0} Version 2: {1} ~ {0} {0} {1} ~ Page i: {0} Page ii: {1} Page iii: {2} ~ 2021: {0}|2022: {1}|2023: {2}
Monday: {0}; Tuesday: {1} ~ A) {0} B) {1} C) {2} ~ Rank these from best to worst: {0} / {1} / {2}
Newest first:|{2}|{1}|{0} ~ Translate line 2 only:|{0}|{1}|{2} ~ rows = ["{0}", "{1}", "{2}"]; print(rows[1])
<doc>{0}</doc><doc>{1}</doc><doc>{2}</doc> ~ <1>{0}</1><2>{1}</2> ~ Document 1: {0}|Document 2: {1}
Source: a.txt|{0}||Source: b.txt|{1} ~ | n | text ||---|---||| 1 | {0} ||| 2 | {1} |
{{"1": "{0}", "2": "{1}", "3": "{2}"}} ~ ["{0}", "{1}", "{2}"] ~ {0},{1},{2} ~ {0};{1}
User: {0}|Assistant: {1}|User: {2} ~ Alice: {0}|Bob: {1}|Alice: {2} ~ Q: {0}|A: {1} ~ > {0}|>> {1}|>>> {2}
#1 {0}|#2 {1}|#3 {2} ~ i. {0} ii. {1} iii. {2} ~ a. {0}|b. {1}|c. {2} ~ {0}||---||{1}||---||{2}
{0} --> {1} --> {2} ~ Before: {0} After: {1} ~ Old: {0} New: {1} ~ Left: {0} Right: {1}
if "{0}" in text: return "{1}" ~ def f():|    return "{0}" + "{1}" ~ Chapter 1|{0}||Chapter 2|{1}
00:01 {0}|00:02 {1} ~ Grade A: {0} Grade B: {1} ~ Step one is {0} Step two is {1} ~ v1 {0}|v2 {1}|v3 {2}
{1}? {0}! {2}... ~ The last of these is right: {0} {1} {2} ~ "{0}" (see [1]), "{1}" (see [2]) ~ 1) {2}|2) {1}|3) {0}"""
"""Texts of users that hold the documents they ask about, in an order that means something; `|` is a line break."""

ANSWER_TEXTS = r"""price = row[1]; qty = row[2] ~ np.array([1, 2]) ~ matrix[1][2] ~ \sqrt[3]{x}
[1](https://example.org/1) ~ [2] ~ [^1]: A footnote. ~ He wrote "see [2]". ~ [1, 3] ~ [Doc 2] ~ Source 2 ~ (2) ~ #2
{"source": 2} ~ {"documents": 2} ~ ^2^ ~ <cite>2</cite> ~ rows[1:2] ~ a[0], a[1] = a[1], a[0] ~ arr[[1, 2]]
x = [[1, 2], [3, 1]] ~ list[int] ~ [a] ~ f(x)[2] ~ Document 1 is older than document 2. ~ 1. First ~ 2. Second
[x] done, [ ] open ~ - [1] one ~ 【1】 ~ "doc_ids": ["1", 2] ~ The page [1] of [3] ~ [1][2][3] ~ passage 3; passage 1
<source id=2> ~ As a result 2 ferries left. ~ three (3) ferries ~ ref. 2 ~ $[1]$
[1] and [2] disagree: [1] is right."""

ARGUMENT_TEXTS = r"""{"code": "rows[1]+rows[2]"} ~ {"code": "a[1], a[2] = a[2], a[1]"} ~ {"code": "np.array([1, 2])[0]"}
{"code": "print('[2]')"} ~ {"code": "x = [3, 1, 2]"} ~ {"code": "df.iloc[1:2]"} ~ {"code": "m[1][2]"}
{"query": "(1)"} ~ {"code": "s.split('[1]')"} ~ {"code": "[i for i in [1, 2, 3]]"}
{"code": "re.sub(r'[1-3]', '', t)"} ~ {"query": "#2"} ~ {"query": "see [1]"} ~ {"query": "Source 2"}
{"query": "document 3"} ~ {"query": "[Doc 1]"} ~ {"query": "[1, 2]"} ~ {"documents": 2} ~ {"source": 1}
{"citation": "2"} ~ {"ids": [1, 2]} ~ {"doc": "1"} ~ {"page": 3, "source": 2} ~ {"refs": ["1", "3"]}
{"context": "[2]"}"""


def listed(texts: str) -> list[str]:
    return [each for line in texts.splitlines() for each in line.split(" ~ ")]


PROMPTS = [each.replace("|", "\n").format(*(one.page_content for one in DOCUMENTS)) for each in listed(PROMPT_TEXTS)]
ANSWERS = listed(ANSWER_TEXTS)
ARGUMENTS: list[dict[str, Any]] = list(map(json.loads, listed(ARGUMENT_TEXTS)))


class Seen(BaseCallbackHandler):
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.messages = messages[0]


def _texts(messages: list[Any]) -> list[str]:
    """Return the texts of messages, without segments."""
    blocks = [[each.content] if isinstance(each.content, str) else each.content for each in messages]
    found = [
        each if isinstance(each, str) else each["text"]
        for content in blocks
        for each in content
        if not is_segment_block(each)
    ]
    return [each for each in found if each.strip()]


@pytest.fixture(scope="module")
def chat(spoken: InvariantModel) -> ChatInvariant:
    return ChatInvariant(model=spoken, max_tokens=160)


Way = Callable[[ChatInvariant, str, Any], Any]


def chain(chat: ChatInvariant, text: str, config: Any) -> Any:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief.\n{context}"), ("human", "{question}")])
    context = Listed(documents=DOCUMENTS[::-1]) | (lambda found: "\n\n".join(each.page_content for each in found))
    return ({"context": context, "question": RunnablePassthrough()} | prompt | chat).invoke(text, config)


def history(text: str) -> list[Any]:
    calls = [{"name": "find", "args": {"query": text}, "id": number, "type": "tool_call"} for number in ("1", "2")]
    said = [SystemMessage(f"{text} So."), HumanMessage(f"Q: {text}"), AIMessage(text)]
    results = [ToolMessage(f"{text} So.", tool_call_id="1"), ToolMessage(text, tool_call_id="2")]
    return [*said, HumanMessage("And?"), AIMessage("", tool_calls=calls), *results]


WAYS: dict[str, Way] = {
    "chain": chain,
    "documents": lambda chat, text, config: chat.invoke(text, config, documents=DOCUMENTS),
    "batch": lambda chat, text, config: chat.batch([text], config, documents=DOCUMENTS),
    "stream": lambda chat, text, config: list(chat.stream(text, config, documents=DOCUMENTS)),
    "placeholder": lambda chat, text, config: (
        ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")]) | chat
    ).invoke({"context": DOCUMENTS, "question": text}, config),
    "history": lambda chat, text, config: chat.invoke(history(text), config, documents=DOCUMENTS),
}


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize(("number", "text"), list(enumerate(PROMPTS)))
def test_a_text_that_holds_its_documents_reaches_the_model_as_it_is(
    chat: ChatInvariant, number: int, text: str
) -> None:
    short = chat.model_copy(update={"max_tokens": 1})
    for way in (list(WAYS)[number % len(WAYS)], "history"):
        seen = Seen()
        WAYS[way](short, text, {"callbacks": [seen]})
        if way == "history":
            asked = [(each.content, getattr(each, "tool_calls", None)) for each in history(text)]
            found = [(each.content, getattr(each, "tool_calls", None)) for each in seen.messages[:7]]
            assert [*found[:3], *found[4:]] == [*asked[:3], *asked[4:]]  # documents precede the last user's text
        else:
            assert [each for each in _texts(seen.messages) if each != "Be brief.\n"] == [text]


TRIPLES: dict[str, list[Document]] = {
    "sentences": DOCUMENTS,
    "marks": [Document(each) for each in ("aa", "bbb", "c,d")],
    "white space": [Document(each) for each in ("one\n", " two", "three")],
    "alike": [Document(each) for each in ("one", "one", "two")],
    "nested": [Document(each) for each in ("a b", "c", "a b\n\nc")],
    "digits": [Document(each) for each in ("1", "2", "3")],
    "counted": [Document(f"Part {n}.", metadata={"chunk_index": n, "source": "a.txt"}) for n in (1, 2, 3)],
    "years": [Document(f"It grew by {n}.", metadata={"year": 2020 + n, "title": f"Report {n}"}) for n in (3, 1, 2)],
}
TEMPLATES: dict[str, Callable[[int, Document], str]] = {
    "joined": lambda n, each: each.page_content,
    "bullets": lambda n, each: f"- {each.page_content}",
    "numbered": lambda n, each: f"[{n}] {each.page_content}",
    "metadata": lambda n, each: f"{each.metadata}: {each.page_content}",
    "labelled by a field": lambda n, each: f"Source {each.metadata.get('chunk_index', 'x')}: {each.page_content}",
}


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", TRIPLES)
def test_the_verdict_on_a_set_is_that_of_all_its_orders(lm: InvariantModel, name: str, template: str) -> None:
    chat = ChatInvariant(model=lm, max_tokens=4)
    prompt = ChatPromptTemplate.from_template("Answer from this:\n{context}\n\n{question}")

    def written(found: list[Document]) -> str:
        return "\n\n".join(TEMPLATES[template](n, each) for n, each in enumerate(found, 1))

    said = [
        (
            {"context": Listed(documents=list(order)) | written, "question": RunnablePassthrough()} | prompt | chat
        ).invoke("So?")
        for order in permutations(TRIPLES[name])
    ]
    (verdict,) = {each.response_metadata["invariant"] for each in said}
    assert verdict in (True, False)
    assert not verdict or len({each.content for each in said}) == 1


def test_there_are_sixty_prompts_forty_sets_forty_answers_and_twenty_five_calls() -> None:
    assert (len(PROMPTS), len(TRIPLES) * len(TEMPLATES)) == (60, 40)
    assert (len(ANSWERS), len(ARGUMENTS)) == (40, 25)


LABELLED = [Slot(f"[{number}] ", "\n", str(number)) for number in (1, 2, 3)]


def replied(chat: ChatInvariant, documents: list[Document], **asked: Any) -> Answer:
    """Return what the core answers about documents with numbers."""
    content = [SegmentSet(map(to_segment, documents), slots=LABELLED), "Which?"]
    messages = [{"role": "user", "content": content}]
    return Answering(chat.lm, AnswerRequest(messages=messages, max_new_tokens=160, **asked)).reply().first


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(chat: ChatInvariant, text: str) -> None:
    cited = set()
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        for options in ({}, {"citations": True}):
            assert chat.invoke("Which?", documents=documents, **ended(chat.lm, text), **options).text == text
        labelled = replied(chat, documents, citations=True, options=ended(chat.lm, text))
        assert labelled.content == text
        cited.add(frozenset((each.start, each.end, each.segment.text) for each in labelled.citations or ()))
    assert len(cited) == 1
    pieces = chat.stream("Which?", documents=DOCUMENTS, **ended(chat.lm, text))
    assert "".join(piece.text for piece in pieces) == text


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
def test_arguments_arrive_as_the_model_wrote_them(chat: ChatInvariant, arguments: dict[str, Any]) -> None:
    kinds = {str: {"type": "string"}, int: {"type": "integer"}, list: {"type": "array", "items": {}}}
    fields = {name: kinds[type(value)] for name, value in arguments.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": schema}}
    written = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps(arguments)}}}\n</tool_call>'
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        bound = chat.bind_tools([tool], tool_choice="run", **ended(chat.lm, written))
        assert bound.invoke("Which?", documents=documents).tool_calls[0]["args"] == arguments
        asked = {"tools": [tool], "tool_choice": "run", "options": ended(chat.lm, written)}
        assert replied(chat, documents, **asked).tool_calls[0].arguments == arguments
