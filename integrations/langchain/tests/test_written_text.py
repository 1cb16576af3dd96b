"""What users and models write arrives byte for byte: questions, histories, answers, and arguments of tools."""

import json
from itertools import permutations

import pytest
from framework_cases import LOOKALIKES, call_text, ended, written_texts
from langchain_core.documents import Document
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate

from langchain_invariant_rag import ChatInvariant
from langchain_invariant_rag.documents import is_segment_block

from .shared import DOCUMENTS, PLACEHOLDER, QUESTION, TEXTS, WAYS, Heard, Listed, rag

QUESTIONS, ANSWERS, ARGUMENTS = (written_texts(part, *TEXTS) for part in ("questions", "answers", "arguments"))
TEMPLATE = ChatPromptTemplate.from_messages([("system", "Be brief.\n{context}"), ("human", "{question}")])


@pytest.fixture(scope="module")
def chat(spoken):
    return ChatInvariant(model=spoken, max_tokens=160)


# --- what users write -----------------------------------------------------------------------------------------------


def history(text):
    calls = [{"name": "find", "args": {"query": text}, "id": number, "type": "tool_call"} for number in ("1", "2")]
    said = [SystemMessage(f"{text} So."), HumanMessage(f"Q: {text}"), AIMessage(text)]
    results = [ToolMessage(f"{text} So.", tool_call_id="1"), ToolMessage(text, tool_call_id="2")]
    return [*said, HumanMessage("And?"), AIMessage("", tool_calls=calls), *results]


ASKED = [
    lambda chat, text, config: rag(chat, Listed(documents=DOCUMENTS[::-1]), prompt=TEMPLATE).invoke(text, config),
    lambda chat, text, config: (PLACEHOLDER | chat).invoke({"context": DOCUMENTS, "question": text}, config),
    *(lambda chat, text, config, ask=ask: ask(chat, text, config, documents=DOCUMENTS) for ask in WAYS.values()),
]


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize(("number", "text"), list(enumerate(QUESTIONS)))
def test_a_text_that_holds_its_documents_reaches_the_model_as_it_is(chat, number, text):
    short, heard = chat.model_copy(update={"max_tokens": 1}), Heard()
    for way in {0, number % len(ASKED)}:
        ASKED[way](short, text, {"callbacks": [heard]})
        found = [block for message in heard.messages for block in message.content_blocks]
        texts = [block["text"] for block in found if not is_segment_block(block)]
        assert [each for each in texts if each.strip() and not each.startswith("Be brief.\n")] == [text]
    short.invoke(history(text), {"callbacks": [heard]}, documents=DOCUMENTS)
    for index, (given, found) in enumerate(zip(history(text), heard.messages, strict=True)):
        assert found.content == given.content or index == 3  # documents precede the last user's text
        assert getattr(found, "tool_calls", None) == getattr(given, "tool_calls", None)


# --- one verdict ----------------------------------------------------------------------------------------------------

TEMPLATES = {
    "joined": lambda n, each: each.page_content,
    "bullets": lambda n, each: f"- {each.page_content}",
    "numbered": lambda n, each: f"[{n}] {each.page_content}",
    "metadata": lambda n, each: f"{each.metadata}: {each.page_content}",
    "labelled by a field": lambda n, each: f"Source {each.metadata.get('chunk_index', 'x')}: {each.page_content}",
}


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
@pytest.mark.parametrize("name", LOOKALIKES)
def test_the_verdict_on_a_set_is_that_of_all_its_orders(lm, name, template):
    def written(found):
        return "\n\n".join(template(n, each) for n, each in enumerate(found, 1))

    documents = [Document(text, metadata=fields) for text, fields in LOOKALIKES[name]]
    chat, listed = ChatInvariant(model=lm, max_tokens=4), permutations(documents)
    said = [rag(chat, Listed(documents=order), written, TEMPLATE).invoke(QUESTION) for order in listed]
    (verdict,) = {each.response_metadata["invariant"] for each in said}
    assert verdict in (True, False) or name == "one"
    assert not verdict or len({each.content for each in said}) == 1


# --- what models write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(chat, text):
    writing = ended(chat.lm, text)
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        for citations in (False, True):
            assert chat.invoke("Which?", documents=documents, citations=citations, **writing).text == text
    assert "".join(piece.text for piece in chat.stream("Which?", documents=DOCUMENTS, **writing)) == text


KINDS = {str: {"type": "string"}, int: {"type": "integer"}, list: {"type": "array", "items": {}}}


@pytest.mark.parametrize("written", ARGUMENTS)
def test_arguments_arrive_as_the_model_wrote_them(chat, written):
    arguments = json.loads(written)
    fields = {name: KINDS[type(value)] for name, value in arguments.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": schema}}
    bound = chat.bind_tools([tool], tool_choice="run", **ended(chat.lm, call_text("run", arguments)))
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        assert bound.invoke("Which?", documents=documents).tool_calls[0]["args"] == arguments
