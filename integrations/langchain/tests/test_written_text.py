"""What users and models write arrives byte for byte: questions, histories, answers, and arguments of tools."""

import json
import tomllib
from itertools import permutations
from pathlib import Path

import pytest
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_invariant_rag import ChatInvariant
from langchain_invariant_rag.documents import is_segment_block

from .models import call_text, ended
from .shared import DOCUMENTS, PLACEHOLDER, WAYS, Listed

WRITTEN = tomllib.loads(Path(__file__).with_name("written_text.toml").read_text(encoding="utf-8"))
PROMPTS, ANSWERS, ARGUMENT_TEXTS = (
    WRITTEN[each].strip("\n").split("\n") for each in ("prompts", "answers", "arguments")
)
PROMPTS = [each.replace("|", "\n").format(*(one.page_content for one in DOCUMENTS)) for each in PROMPTS]
ARGUMENTS = list(map(json.loads, ARGUMENT_TEXTS))


@pytest.fixture(scope="module")
def chat(spoken):
    return ChatInvariant(model=spoken, max_tokens=160)


# --- what users write -----------------------------------------------------------------------------------------------


class Seen(BaseCallbackHandler):
    def on_chat_model_start(self, serialized, messages, **kwargs):
        self.messages = messages[0]


def rag(chat, documents, write):
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief.\n{context}"), ("human", "{question}")])
    return {"context": Listed(documents=documents) | write, "question": RunnablePassthrough()} | prompt | chat


def joined(documents):
    return "\n\n".join(each.page_content for each in documents)


def history(text):
    calls = [{"name": "find", "args": {"query": text}, "id": number, "type": "tool_call"} for number in ("1", "2")]
    said = [SystemMessage(f"{text} So."), HumanMessage(f"Q: {text}"), AIMessage(text)]
    results = [ToolMessage(f"{text} So.", tool_call_id="1"), ToolMessage(text, tool_call_id="2")]
    return [*said, HumanMessage("And?"), AIMessage("", tool_calls=calls), *results]


ASKED = [
    lambda chat, text, config: rag(chat, DOCUMENTS[::-1], joined).invoke(text, config),
    lambda chat, text, config: (PLACEHOLDER | chat).invoke({"context": DOCUMENTS, "question": text}, config),
    *(lambda chat, text, config, ask=ask: ask(chat, text, config, documents=DOCUMENTS) for ask in WAYS.values()),
]


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize(("number", "text"), list(enumerate(PROMPTS)))
def test_a_text_that_holds_its_documents_reaches_the_model_as_it_is(chat, number, text):
    short, seen = chat.model_copy(update={"max_tokens": 1}), Seen()
    ASKED[number % len(ASKED)](short, text, {"callbacks": [seen]})
    blocks = [each for message in seen.messages for each in message.content if not isinstance(message.content, str)]
    texts = [message.content for message in seen.messages if isinstance(message.content, str)]
    texts += [each["text"] for each in blocks if not is_segment_block(each)]
    assert [each for each in texts if each.strip() and each != "Be brief.\n"] == [text]
    short.invoke(history(text), {"callbacks": [seen]}, documents=DOCUMENTS)
    for index, (given, found) in enumerate(zip(history(text), seen.messages, strict=True)):
        assert found.content == given.content or index == 3  # documents precede the last user's text
        assert getattr(found, "tool_calls", None) == getattr(given, "tool_calls", None)


# --- one verdict ----------------------------------------------------------------------------------------------------

TRIPLES = {
    "sentences": DOCUMENTS,
    "marks": [Document(each) for each in ("aa", "bbb", "c,d")],
    "white space": [Document(each) for each in ("one\n", " two", "three")],
    "alike": [Document(each) for each in ("one", "one", "two")],
    "nested": [Document(each) for each in ("a b", "c", "a b\n\nc")],
    "digits": [Document(each) for each in ("1", "2", "3")],
    "counted": [Document(f"Part {n}.", metadata={"chunk_index": n, "source": "a.txt"}) for n in (1, 2, 3)],
    "years": [Document(f"It grew by {n}.", metadata={"year": 2020 + n, "title": f"Report {n}"}) for n in (3, 1, 2)],
}
TEMPLATES = {
    "joined": lambda n, each: each.page_content,
    "bullets": lambda n, each: f"- {each.page_content}",
    "numbered": lambda n, each: f"[{n}] {each.page_content}",
    "metadata": lambda n, each: f"{each.metadata}: {each.page_content}",
    "labelled by a field": lambda n, each: f"Source {each.metadata.get('chunk_index', 'x')}: {each.page_content}",
}


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("documents", TRIPLES.values(), ids=TRIPLES)
def test_the_verdict_on_a_set_is_that_of_all_its_orders(lm, documents, template):
    def written(found):
        return "\n\n".join(template(n, each) for n, each in enumerate(found, 1))

    chat = ChatInvariant(model=lm, max_tokens=4)
    said = [rag(chat, list(order), written).invoke("So?") for order in permutations(documents)]
    (verdict,) = {each.response_metadata["invariant"] for each in said}
    assert verdict in (True, False)
    assert not verdict or len({each.content for each in said}) == 1


# --- what models write ----------------------------------------------------------------------------------------------


def test_there_are_sixty_prompts_forty_sets_forty_answers_and_twenty_five_calls():
    assert (len(PROMPTS), len(TRIPLES) * len(TEMPLATES)) == (60, 40)
    assert (len(ANSWERS), len(ARGUMENTS)) == (40, 25)


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(chat, text):
    writing = ended(chat.lm, text)
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        for citations in (False, True):
            assert chat.invoke("Which?", documents=documents, citations=citations, **writing).text == text
    assert "".join(piece.text for piece in chat.stream("Which?", documents=DOCUMENTS, **writing)) == text


KINDS = {str: {"type": "string"}, int: {"type": "integer"}, list: {"type": "array", "items": {}}}


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
def test_arguments_arrive_as_the_model_wrote_them(chat, arguments):
    fields = {name: KINDS[type(value)] for name, value in arguments.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": schema}}
    bound = chat.bind_tools([tool], tool_choice="run", **ended(chat.lm, call_text("run", arguments)))
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        assert bound.invoke("Which?", documents=documents).tool_calls[0]["args"] == arguments
