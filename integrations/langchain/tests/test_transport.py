"""However segments travel through LangChain, the model gets those that went in; what users and models write stays.

`response_metadata["order"]` lists what the model was given, in physical order, each segment by its content hash.
"""

import json
import pickle
from itertools import permutations

import pytest
from framework_cases import call_text, ended, written_texts
from invariant_rag import Segment, SegmentSet
from invariant_rag.errors import RetrievalError
from invariant_rag.prompts import mark, parse_marked
from invariant_rag.rag.retrieval import FaissRetriever
from invariant_rag.testing.rounding import rounding
from langchain.agents import create_agent
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer

import langchain_invariant_rag as ours
from langchain_invariant_rag import SEGMENT_PROMPT, ChatInvariant, InvariantLLM, Segments, SegmentsPlaceholder
from langchain_invariant_rag.documents import is_segment_block, to_block, to_document, to_segment

from .shared import DOCUMENTS, HASHES, ORDERS, PLACEHOLDER, QUESTION, TEXTS, WAYS, Heard, Listed, blocks, loaded, rag

SEGMENTS = list(map(to_segment, DOCUMENTS))
INPUT = {"context": DOCUMENTS, "question": QUESTION}
SAVED = (ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate, SegmentsPlaceholder)


@pytest.fixture(scope="module", params=[False, True], ids=["as given", "sorted"])
def chat(lm, request):
    return ChatInvariant(model=lm, max_tokens=6, sort_segments=request.param)


APART = [HumanMessage(blocks()), HumanMessage(QUESTION)]
SERIALIZER = JsonPlusSerializer()
TEXT = "\n" + QUESTION
FORMATS = {"f-string": "{context}\n{question}", "mustache": "{{{context}}}\n{{{question}}}"}
FORMATS["jinja2"] = "{{ context }}\n{{ question }}"
CARRIERS = {
    "blocks": [HumanMessage([*blocks(), {"type": "text", "text": TEXT}])],
    "blocks in a message of their own": APART,
    "text blocks with extras": [
        HumanMessage([{"type": "text", "text": each.text, "extras": {"segment": True}} for each in SEGMENTS]),
        HumanMessage(QUESTION),
    ],
    "marks": "".join(map(mark, SEGMENTS)) + TEXT,
    "marks, joined as text": "\n\n".join(map(mark, SEGMENTS)) + TEXT,
    "marks in a text block": [HumanMessage([{"type": "text", "text": str(Segments(DOCUMENTS))}, TEXT])],
    "slices and sums": f"{sum([Segments(DOCUMENTS)[1:]], DOCUMENTS[:1])}{TEXT}",
    "what a checkpoint restores": SERIALIZER.loads_typed(SERIALIZER.dumps_typed(APART)),
    "what load restores": [loaded(HumanMessage(blocks()), HumanMessage), HumanMessage(QUESTION)],
    "placeholder": PLACEHOLDER.invoke(INPUT),
    "placeholder of segments": PLACEHOLDER.invoke({**INPUT, "context": SEGMENTS}),
    "a template that was saved": loaded(PLACEHOLDER, *SAVED).invoke(INPUT),
    **{
        f"{kind} template": ChatPromptTemplate.from_template(template, template_format=kind).invoke(
            {**INPUT, "context": Segments(DOCUMENTS)}
        )
        for kind, template in FORMATS.items()
    },
}


def test_the_answer_is_the_same_however_segments_travel(chat, lm):
    def expected(*content):
        prompt = lm.chat_prompt(messages=[{"role": "user", "content": list(content)}])
        return lm.generate(prompt, max_new_tokens=6).text, HASHES

    def read(answer):
        return answer.content, sorted(answer.response_metadata["order"])

    answers = {name: read(chat.invoke(sent)) for name, sent in CARRIERS.items()}
    assert answers == dict.fromkeys(CARRIERS, expected(SegmentSet(SEGMENTS), TEXT))
    mappings = ([each(one) for one in DOCUMENTS] for each in (dumpd, Document.model_dump, lambda one: (one, 0.5)))
    for documents in (DOCUMENTS, SEGMENTS, TEXTS, [{"text": each} for each in TEXTS], *mappings):
        for answer in (chat.invoke(QUESTION, documents=documents), chat.bind(documents=documents).invoke(QUESTION)):
            assert read(answer) == expected(SegmentSet(SEGMENTS), QUESTION)
    system = [SystemMessage(QUESTION)]  # no message of the user: the documents are one
    assert read(chat.invoke(system, documents=DOCUMENTS))[1] == HASHES
    assert PLACEHOLDER.invoke({**INPUT, "context": []}).to_messages() == [HumanMessage(QUESTION)]
    for write in (lambda listed: str(Segments(listed)), blocks):  # in a message of the assistant
        said = [chat.invoke([HumanMessage("a"), AIMessage(write(order)), HumanMessage(QUESTION)]) for order in ORDERS]
        assert {(each.text, each.response_metadata["invariant"]) for each in said} == {(said[0].text, True)}
        assert read(said[0])[1] == HASHES


def test_segments_survive_blocks_and_documents_and_those_of_the_caller_are_left_alone(chat):
    segment = Segment("text", title="title", metadata={"page": 3}, score=0.5)
    assert to_segment(to_block(segment)) == to_segment(to_document(segment)) == segment
    assert to_block(segment)["id"] == segment.content_hash
    assert to_segment(Document("text", metadata={"title": ["no", "title"]})).title is None
    assert to_document(to_segment(Document("text", id="3"))).id == "3"
    before = [each.model_copy(deep=True) for each in DOCUMENTS]
    messages = PLACEHOLDER.invoke(INPUT).to_messages()
    copies = [message.model_copy(deep=True) for message in messages]
    chat.invoke(messages)
    assert (before, copies) == (DOCUMENTS, messages)


def test_a_completion_model_gets_every_segment(lm):
    llm = InvariantLLM(model=lm, max_tokens=6)
    text = PromptTemplate.from_template("{context}\n{question}")
    whole = f"{Segments(DOCUMENTS)}\n{QUESTION}"
    source = PromptTemplate.from_template("{page_content} ({source})")
    sources = Segments(Document(f"{each.page_content} ({each.metadata['source']})") for each in DOCUMENTS)
    for chain, expected in (
        (create_stuff_documents_chain(llm, text, document_prompt=SEGMENT_PROMPT), whole),
        (ours.create_invariant_documents_chain(llm, text), whole),
        (ours.create_invariant_documents_chain(llm, text, document_prompt=source), f"{sources}\n{QUESTION}"),
        (PLACEHOLDER | llm, f"Human: {Segments(DOCUMENTS)}\nHuman: {QUESTION}"),
    ):
        assert chain.invoke(INPUT) == lm.generate(parse_marked(expected), max_new_tokens=6).text
    for before in ("", "Summarise:\n"):  # the documents end the text, or are all of it
        assert len({llm.invoke(f"{before}{Segments(order)}") for order in ORDERS}) == 1
    upper = ours.create_invariant_documents_chain(llm, text, output_parser=RunnableLambda(str.upper))
    assert upper.invoke(INPUT) == lm.generate(parse_marked(whole), max_new_tokens=6).text.upper()
    prompt = "Source: {source}\n" + SEGMENT_PROMPT.template
    for longer in (SEGMENT_PROMPT + "\n", SEGMENT_PROMPT + " ({source})\n", SEGMENT_PROMPT + prompt):
        marked = parse_marked(longer.format(page_content="noon", source="a.txt"))
        assert [each.text for each in marked.segments] == ["noon"] * longer.template.count("page_content")


def test_a_message_that_a_callback_changes_is_what_the_model_gets(chat):
    class Redacts(BaseCallbackHandler):
        def on_chat_model_start(self, serialized, messages, **kwargs):
            messages[0][-1].content = "Something else?"

    changed = chat.invoke(QUESTION, {"callbacks": [Redacts()]})
    assert changed.content == chat.invoke("Something else?").content != chat.invoke(QUESTION).content


def test_the_middleware_puts_documents_before_the_last_question_if_there_is_one(chat):
    agent = create_agent(chat, tools=[], middleware=[ours.InvariantRAGMiddleware(Listed())])
    asked = [HumanMessage("Hello."), AIMessage("Yes?"), HumanMessage(QUESTION)]
    answer = agent.invoke({"messages": asked})["messages"][-1]
    assert answer.content == chat.invoke([*asked[:2], HumanMessage([*blocks(), TEXT])]).content
    alone = agent.invoke({"messages": asked[1:2]})["messages"][-1]
    assert alone.content == chat.invoke(asked[1:2]).content


# --- retrievers and embeddings ----------------------------------------------------------------------------------------

EMBEDDINGS = ours.InvariantEmbeddings()


def test_answers_do_not_depend_on_the_order_of_the_corpus(lm):
    chat, answers = ChatInvariant(model=lm, max_tokens=8, sort_segments=False), set()
    for order in ORDERS[::2]:
        memory = InMemoryVectorStore.from_documents(order, EMBEDDINGS)
        qdrant = QdrantVectorStore.from_documents(order, EMBEDDINGS, location=":memory:", collection_name="ferry")
        retrievers = [each.as_retriever(search_kwargs={"k": 3}) for each in (memory, qdrant)]
        for retriever in (*retrievers, ours.InvariantRetriever.from_documents(order, k=3)):
            answer = rag(chat, ours.as_segments(retriever), list, PLACEHOLDER).invoke(QUESTION)
            assert len(answer.response_metadata["order"]) == 3, retriever
            answers.add(answer.content)
    assert len(answers) == 1


def test_a_vector_does_not_depend_on_its_neighbours_also_of_a_pickle():
    together = EMBEDDINGS.embed_documents(TEXTS)
    for each in (EMBEDDINGS, pickle.loads(pickle.dumps(EMBEDDINGS))):
        assert each.embed_documents(TEXTS[::-1])[::-1] == together
        assert [each.embed_documents([text])[0] for text in TEXTS] == together
    batched = ours.InvariantEmbeddings(batch_size=8).embed_documents(TEXTS)
    bound = rounding(EMBEDDINGS.embed_documents, TEXTS)
    assert batched == [pytest.approx(vector, abs=bound) for vector in together]
    assert EMBEDDINGS.embed_query("a\ud83d") == EMBEDDINGS.embed_query("a\ufffd")  # half of a surrogate pair


def test_our_retriever_returns_what_the_core_finds_with_any_embedder():
    segments = [Segment("The ferry leaves at noon.", title="Ferry", metadata={"page": 2}), Segment("Two bakeries.")]
    core = FaissRetriever(segments)
    found = ours.InvariantRetriever(retriever=core, k=2).invoke(QUESTION)
    (first, second) = core.retrieve(QUESTION, 2)
    assert [document.page_content for document in found] == [first.text, second.text]
    assert found[0].metadata == {"page": 2, "title": "Ferry", "score": first.score}
    assert len(ours.InvariantRetriever(retriever=core).invoke(QUESTION, k=1)) == 1
    given = ours.InvariantRetriever.from_documents(TEXTS, embedder=EMBEDDINGS._embedder)
    assert given.invoke(QUESTION) == ours.InvariantRetriever.from_documents(TEXTS).invoke(QUESTION)
    with pytest.raises(RetrievalError, match="expected an embedder"):
        ours.InvariantRetriever.from_documents(TEXTS, embedder=3)


def chunk(text, start_index=0, source="s", **fields):
    return Document(text, metadata={"source": source, "start_index": start_index, **fields})


def test_segments_are_retrieved_in_every_way_equal_ones_once_and_chunks_of_a_source_joined_alike_in_every_order():
    found = [ask(ours.as_segments(Listed()), QUESTION, k=2) for ask in WAYS.values()]
    assert found == [DOCUMENTS[:2]] * len(WAYS)
    assert set(map(type, found)) == {Segments}
    nested = [Document("a", metadata={"k": each}) for each in ({"x": 1, "y": 2}, {"y": 2, "x": 1})]
    for documents, join_by, expected in (
        ([*DOCUMENTS, DOCUMENTS[0]], None, {*TEXTS}),
        ([chunk("two", 40), chunk("one"), Document("alone")], "source", {"one\ntwo", "alone"}),
        ([chunk("a", title="T"), chunk("a", title="U"), chunk("b", 5)], "source", {"a\nb"}),
        (nested, None, {"a"}),
    ):
        listed = permutations(documents)
        found = [ours.as_segments(Listed(documents=each), join_by=join_by).invoke("") for each in listed]
        assert len({tuple(sorted(map(repr, each))) for each in found}) == 1
        assert (len(found[0]), {each.page_content for each in found[0]}) == (len(expected), expected)
    told = "expected chunks with a number as 'start_index' and a text as 'source'"
    for wrong in ({"start_index": None}, {"start_index": "0"}, {"source": ["s"]}):
        with pytest.raises(RetrievalError, match=told):
            ours.as_segments(Listed(documents=[chunk("a", **wrong), chunk("b")]), join_by="source").invoke("")


# --- what users write -------------------------------------------------------------------------------------------------

QUESTIONS, ANSWERS, ARGUMENTS = (written_texts(part, *TEXTS) for part in ("questions", "answers", "arguments"))
TEMPLATE = ChatPromptTemplate.from_messages([("system", "Be brief.\n{context}"), ("human", "{question}")])
ASKED = [
    lambda chat, text, config: rag(chat, Listed(documents=DOCUMENTS[::-1]), prompt=TEMPLATE).invoke(text, config),
    lambda chat, text, config: (PLACEHOLDER | chat).invoke({"context": DOCUMENTS, "question": text}, config),
    *(lambda chat, text, config, ask=ask: ask(chat, text, config, documents=DOCUMENTS) for ask in WAYS.values()),
]


def history(text):
    calls = [{"name": "find", "args": {"query": text}, "id": number, "type": "tool_call"} for number in ("1", "2")]
    said = [SystemMessage(f"{text} So."), HumanMessage(f"Q: {text}"), AIMessage(text)]
    results = [ToolMessage(f"{text} So.", tool_call_id="1"), ToolMessage(text, tool_call_id="2")]
    return [*said, HumanMessage("And?"), AIMessage("", tool_calls=calls), *results]


@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
@pytest.mark.parametrize(("number", "text"), list(enumerate(QUESTIONS)))
def test_a_text_that_holds_its_documents_reaches_the_model_as_it_is(spoken, number, text):
    short, heard = ChatInvariant(model=spoken, max_tokens=1), Heard()
    for way in {0, number % len(ASKED)}:
        ASKED[way](short, text, {"callbacks": [heard]})
        found = [block for message in heard.messages for block in message.content_blocks]
        texts = [block["text"] for block in found if not is_segment_block(block)]
        assert [each for each in texts if each.strip() and not each.startswith("Be brief.\n")] == [text]
    short.invoke(history(text), {"callbacks": [heard]}, documents=DOCUMENTS)
    for index, (given, found) in enumerate(zip(history(text), heard.messages, strict=True)):
        assert found.content == given.content or index == 3  # documents precede the last user's text
        assert getattr(found, "tool_calls", None) == getattr(given, "tool_calls", None)


# --- what models write ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(spoken, text):
    chat, writing = ChatInvariant(model=spoken, max_tokens=160), ended(spoken, text)
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        for citations in (False, True):
            assert chat.invoke("Which?", documents=documents, citations=citations, **writing).text == text
    assert "".join(piece.text for piece in chat.stream("Which?", documents=DOCUMENTS, **writing)) == text


@pytest.mark.parametrize("written", ARGUMENTS)
def test_arguments_arrive_as_the_model_wrote_them(spoken, written):
    kinds = {str: {"type": "string"}, int: {"type": "integer"}, list: {"type": "array", "items": {}}}
    arguments = json.loads(written)
    fields = {name: kinds[type(value)] for name, value in arguments.items()}
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": schema}}
    options = {"tool_choice": "run", "max_tokens": 160, **ended(spoken, call_text("run", arguments))}
    bound = ChatInvariant(model=spoken).bind_tools([tool], **options)
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        assert bound.invoke("Which?", documents=documents).tool_calls[0]["args"] == arguments
