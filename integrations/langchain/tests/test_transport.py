"""Every producer, through everything that LangChain does with a prompt: the model gets the segments that went in.

`response_metadata["order"]` lists what the model was given, in physical order, each segment by its content hash.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from invariant_rag import InvariantModel, Segment, SegmentSet
from invariant_rag.prompts import mark, parse_marked
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core._api.beta_decorator import LangChainBetaWarning
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd, load
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

from langchain_invariant_rag import (
    SEGMENT_PROMPT,
    ChatInvariant,
    InvariantLLM,
    Segments,
    SegmentsPlaceholder,
    create_invariant_documents_chain,
)
from langchain_invariant_rag.documents import to_block, to_document, to_segment

from .shared import DOCUMENTS, HASHES, ORDERS, QUESTION

SEGMENTS = [to_segment(document) for document in DOCUMENTS]
SAVED = (ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate, SegmentsPlaceholder)
PLACEHOLDER = ChatPromptTemplate.from_messages([SegmentsPlaceholder("context"), ("human", "{question}")])


def seen(message: Any) -> list[str]:
    return sorted(message.response_metadata["order"])


@pytest.fixture(scope="module", params=[False, True], ids=["as given", "sorted"])
def chat(lm: InvariantModel, request: Any) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=6, sort_segments=request.param)


@pytest.fixture(scope="module")
def expected(lm: InvariantModel) -> str:
    """What the `InvariantModel` itself answers to the three documents in front of the question, in one message."""
    messages = [{"role": "user", "content": [SegmentSet(SEGMENTS), "\n" + QUESTION]}]
    return lm.generate(lm.chat_prompt(messages=messages), max_new_tokens=6).text


def blocks() -> list[Any]:
    return [dict(to_block(segment)) for segment in SEGMENTS]


CARRIERS: dict[str, Any] = {
    "blocks": lambda: [HumanMessage([*blocks(), {"type": "text", "text": "\n" + QUESTION}])],
    "blocks in a message of their own": lambda: [HumanMessage(blocks()), HumanMessage(QUESTION)],
    "text blocks with extras": lambda: [
        HumanMessage([{"type": "text", "text": each.text, "extras": {"segment": True}} for each in SEGMENTS]),
        HumanMessage(QUESTION),
    ],
    "marks": lambda: [HumanMessage("".join(map(mark, SEGMENTS)) + "\n" + QUESTION)],
    "marks, joined as text": lambda: [HumanMessage("\n\n".join(map(mark, SEGMENTS)) + "\n" + QUESTION)],
    "marks in a text block": lambda: [
        HumanMessage([{"type": "text", "text": str(Segments(DOCUMENTS))}, "\n" + QUESTION])
    ],
    "what a checkpoint restores": lambda: restored([HumanMessage(blocks()), HumanMessage(QUESTION)]),
    "what load restores": lambda: [loaded(HumanMessage(blocks())), HumanMessage(QUESTION)],
    "placeholder": lambda: PLACEHOLDER.invoke({"context": DOCUMENTS, "question": QUESTION}),
    "placeholder of segments": lambda: PLACEHOLDER.invoke({"context": SEGMENTS, "question": QUESTION}),
    **{
        f"{kind} template": lambda kind=kind, text=text: ChatPromptTemplate.from_messages(
            [("human", text)], template_format=kind
        ).invoke({"context": Segments(DOCUMENTS), "question": QUESTION})
        for kind, text in {
            "f-string": "{context}\n{question}",
            "mustache": "{{{context}}}\n{{{question}}}",
            "jinja2": "{{ context }}\n{{ question }}",
        }.items()
    },
}


def loaded(message: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        return load(dumpd(message), allowed_objects="all")


def restored(messages: list[Any]) -> list[Any]:
    serializer = JsonPlusSerializer()
    return serializer.loads_typed(serializer.dumps_typed(messages))


@pytest.mark.parametrize("name", CARRIERS)
def test_the_answer_is_the_same_however_segments_travel(name: str, chat: ChatInvariant, expected: str) -> None:
    answer = chat.invoke(CARRIERS[name]())
    assert seen(answer) == HASHES
    assert answer.content == expected


def test_segments_in_an_assistants_message_are_a_set_too(chat: ChatInvariant) -> None:
    for write in (lambda listed: str(Segments(listed)), lambda listed: [dict(to_block(to_segment(e))) for e in listed]):
        said = [chat.invoke([HumanMessage("a"), AIMessage(write(order)), HumanMessage(QUESTION)]) for order in ORDERS]
        assert {(each.text, each.response_metadata["invariant"]) for each in said} == {(said[0].text, True)}
        assert seen(said[0]) == HASHES


def test_segments_survive_blocks_and_documents_and_those_of_the_caller_are_left_alone(chat: ChatInvariant) -> None:
    segment = Segment("text", title="title", metadata={"page": 3}, score=0.5)
    assert to_segment(to_block(segment)) == to_segment(to_document(segment)) == segment
    assert to_block(segment)["id"] == segment.content_hash
    assert to_segment(Document("text", metadata={"title": ["no", "title"]})).title is None
    before = [each.model_copy(deep=True) for each in DOCUMENTS]
    messages = PLACEHOLDER.invoke({"context": DOCUMENTS, "question": QUESTION}).to_messages()
    copies = [message.model_copy(deep=True) for message in messages]
    chat.invoke(messages)
    assert (before, copies) == (DOCUMENTS, messages)


def test_a_documents_keyword_is_read_too(chat: ChatInvariant, lm: InvariantModel) -> None:
    reference = lm.chat_prompt(messages=[{"role": "user", "content": [SegmentSet(SEGMENTS), QUESTION]}])
    expected = lm.generate(reference, max_new_tokens=6).text
    texts = [each.text for each in SEGMENTS]
    for documents in (DOCUMENTS, SEGMENTS, texts, [{"text": each} for each in texts]):
        answer = chat.invoke(QUESTION, documents=documents)
        assert seen(answer) == HASHES
        assert answer.content == expected
    assert chat.bind(documents=DOCUMENTS).invoke(QUESTION).content == expected


# --- chains ---------------------------------------------------------------------------------------------------------


def test_a_template_with_a_placeholder_can_be_saved() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        template = load(dumpd(PLACEHOLDER), valid_namespaces=["langchain_invariant_rag"], allowed_objects=[*SAVED])
    inputs = {"context": DOCUMENTS, "question": QUESTION}
    assert template.invoke(inputs) == PLACEHOLDER.invoke(inputs)


# --- into a completion model ----------------------------------------------------------------------------------------


def test_a_completion_model_gets_every_segment(lm: InvariantModel) -> None:
    llm = InvariantLLM(model=lm, max_tokens=6, sort_segments=False)
    text = PromptTemplate.from_template("{context}\n{question}")
    chains = {
        "segments": (text | llm, {"context": Segments(DOCUMENTS), "question": QUESTION}),
        "stock chain": (
            create_stuff_documents_chain(llm, text, document_prompt=SEGMENT_PROMPT),
            {"context": DOCUMENTS, "question": QUESTION},
        ),
        "our chain": (create_invariant_documents_chain(llm, text), {"context": DOCUMENTS, "question": QUESTION}),
    }
    expected = lm.generate(parse_marked(f"{Segments(DOCUMENTS)}\n{QUESTION}"), max_new_tokens=6)
    assert len(expected.order) == 3
    for name, (chain, inputs) in chains.items():
        assert chain.invoke(inputs) == expected.text, name
    blocks_of = parse_marked(f"Human: {Segments(DOCUMENTS)}\nHuman: {QUESTION}")
    answer = (PLACEHOLDER | llm).invoke({"context": DOCUMENTS, "question": QUESTION})
    assert answer == lm.generate(blocks_of, max_new_tokens=6).text


def test_a_segment_prompt_with_more_text_still_marks_the_document() -> None:
    prompt = "Source: {source}\n" + SEGMENT_PROMPT.template
    for longer in (SEGMENT_PROMPT + "\n", SEGMENT_PROMPT + " ({source})\n", SEGMENT_PROMPT + prompt):
        text = longer.format(page_content="noon", source="a.txt")
        assert [each.text for each in parse_marked(text).segments] == ["noon"] * longer.template.count("page_content")


class _Redacts(BaseCallbackHandler):
    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        messages[0][-1].content = "Something else?"


def test_a_message_that_a_callback_changes_is_what_the_model_gets(chat: ChatInvariant) -> None:
    changed = chat.invoke(QUESTION, {"callbacks": [_Redacts()]})
    assert changed.content == chat.invoke("Something else?").content != chat.invoke(QUESTION).content
