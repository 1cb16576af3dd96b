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
)  # fmt: skip
from langchain_invariant_rag.documents import to_block, to_document, to_segment

from .shared import DOCUMENTS, HASHES, ORDERS, PLACEHOLDER, QUESTION

SEGMENTS = list(map(to_segment, DOCUMENTS))
ANY = (ChatPromptTemplate, HumanMessage, HumanMessagePromptTemplate, PromptTemplate, SegmentsPlaceholder)


@pytest.fixture(scope="module", params=[False, True], ids=["as given", "sorted"])
def chat(lm: InvariantModel, request: Any) -> ChatInvariant:
    return ChatInvariant(model=lm, max_tokens=6, sort_segments=request.param)


def expected(lm: InvariantModel, *content: Any) -> str:
    """What the `InvariantModel` itself answers."""
    return lm.generate(lm.chat_prompt(messages=[{"role": "user", "content": list(content)}]), max_new_tokens=6).text


def blocks(documents: Any = DOCUMENTS) -> list[Any]:
    return [dict(to_block(to_segment(each))) for each in documents]


def loaded(written: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LangChainBetaWarning)
        return load(dumpd(written), valid_namespaces=["langchain_invariant_rag"], allowed_objects=[*ANY])


def restored(messages: list[Any]) -> list[Any]:
    serializer = JsonPlusSerializer()
    return serializer.loads_typed(serializer.dumps_typed(messages))


def from_template(kind: str, text: str) -> Any:
    template = ChatPromptTemplate.from_messages([("human", text)], template_format=kind)  # type: ignore[arg-type]
    return template.invoke({"context": Segments(DOCUMENTS), "question": QUESTION})


TEXT = "\n" + QUESTION
CARRIERS: dict[str, Any] = {
    "blocks": [HumanMessage([*blocks(), {"type": "text", "text": TEXT}])],
    "blocks in a message of their own": [HumanMessage(blocks()), HumanMessage(QUESTION)],
    "text blocks with extras": [
        HumanMessage([{"type": "text", "text": each.text, "extras": {"segment": True}} for each in SEGMENTS]),
        HumanMessage(QUESTION),
    ],
    "marks": [HumanMessage("".join(map(mark, SEGMENTS)) + TEXT)],
    "marks, joined as text": [HumanMessage("\n\n".join(map(mark, SEGMENTS)) + TEXT)],
    "marks in a text block": [HumanMessage([{"type": "text", "text": str(Segments(DOCUMENTS))}, TEXT])],
    "what a checkpoint restores": restored([HumanMessage(blocks()), HumanMessage(QUESTION)]),
    "what load restores": [loaded(HumanMessage(blocks())), HumanMessage(QUESTION)],
    "placeholder": PLACEHOLDER.invoke({"context": DOCUMENTS, "question": QUESTION}),
    "placeholder of segments": PLACEHOLDER.invoke({"context": SEGMENTS, "question": QUESTION}),
    "a template that was saved": loaded(PLACEHOLDER).invoke({"context": DOCUMENTS, "question": QUESTION}),
    "f-string template": from_template("f-string", "{context}\n{question}"),
    "mustache template": from_template("mustache", "{{{context}}}\n{{{question}}}"),
    "jinja2 template": from_template("jinja2", "{{ context }}\n{{ question }}"),
}


def test_the_answer_is_the_same_however_segments_travel(chat: ChatInvariant, lm: InvariantModel) -> None:
    answers = {name: chat.invoke(sent) for name, sent in CARRIERS.items()}
    wanted = expected(lm, SegmentSet(SEGMENTS), TEXT)
    seen = {name: (each.content, sorted(each.response_metadata["order"])) for name, each in answers.items()}
    assert seen == dict.fromkeys(CARRIERS, (wanted, HASHES))
    texts = [each.text for each in SEGMENTS]
    for documents in (DOCUMENTS, SEGMENTS, texts, [{"text": each} for each in texts]):
        for answer in (chat.invoke(QUESTION, documents=documents), chat.bind(documents=documents).invoke(QUESTION)):
            assert answer.content == expected(lm, SegmentSet(SEGMENTS), QUESTION)
            assert sorted(answer.response_metadata["order"]) == HASHES


def test_segments_in_an_assistants_message_are_a_set_too(chat: ChatInvariant) -> None:
    for write in (lambda listed: str(Segments(listed)), blocks):
        said = [chat.invoke([HumanMessage("a"), AIMessage(write(order)), HumanMessage(QUESTION)]) for order in ORDERS]
        assert {(each.text, each.response_metadata["invariant"]) for each in said} == {(said[0].text, True)}
        assert sorted(said[0].response_metadata["order"]) == HASHES


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


def test_a_completion_model_gets_every_segment(lm: InvariantModel) -> None:
    llm = InvariantLLM(model=lm, max_tokens=6, sort_segments=False)
    text = PromptTemplate.from_template("{context}\n{question}")
    stock = create_stuff_documents_chain(llm, text, document_prompt=SEGMENT_PROMPT)
    chains = {"segments": text | llm, "stock": stock, "ours": create_invariant_documents_chain(llm, text)}
    generated = lm.generate(parse_marked(f"{Segments(DOCUMENTS)}\n{QUESTION}"), max_new_tokens=6)
    assert len(generated.order) == 3
    for name, chain in chains.items():
        given = Segments(DOCUMENTS) if name == "segments" else DOCUMENTS
        assert chain.invoke({"context": given, "question": QUESTION}) == generated.text, name
    of_blocks = parse_marked(f"Human: {Segments(DOCUMENTS)}\nHuman: {QUESTION}")
    answer = (PLACEHOLDER | llm).invoke({"context": DOCUMENTS, "question": QUESTION})
    assert answer == lm.generate(of_blocks, max_new_tokens=6).text


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
