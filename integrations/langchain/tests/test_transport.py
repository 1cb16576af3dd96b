"""What models get, and what comes back as it is written: ours, and those of others behind `canonical` and `vote`.

However segments travel through LangChain, the model gets those that went in: `response_metadata["order"]` lists them in
physical order, each by its content hash. What users and models write stays. And audits of all models.
"""

import json
import pickle
import re
from collections import Counter
from itertools import permutations
from typing import Any
from unittest.mock import create_autospec

import pytest
from framework_cases import WHO, call_text, ended, flips, written_texts
from invariant_rag import Segment, SegmentSet
from invariant_rag.audit.systems import as_system
from invariant_rag.errors import AuditFailed, RetrievalError, UnsupportedCombination
from invariant_rag.prompts import has_marks, mark, parse_marked
from invariant_rag.rag.retrieval import FaissRetriever
from invariant_rag.testing.rounding import rounding
from langchain.agents import create_agent
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.load import dumpd
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompt_values import StringPromptValue
from langchain_core.prompts import ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate
from langchain_core.rate_limiters import BaseRateLimiter
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_qdrant import QdrantVectorStore
from langgraph.checkpoint.serde.jsonplus import JsonPlusSerializer
from langgraph.graph import START, MessagesState, StateGraph
from pydantic import create_model

import langchain_invariant_rag as ours
from langchain_invariant_rag import ChatInvariant, InvariantLLM, Segments, canonical, vote
from langchain_invariant_rag.documents import is_segment_block, to_block, to_document, to_segment

from . import shared
from .shared import DOCUMENTS, ORDERS, PLACEHOLDER, QUESTION, TEXTS, WAYS, Heard, Listed, Reader, blocks, rag

SEGMENTS = list(map(to_segment, DOCUMENTS))
HASHES = sorted(each.content_hash for each in SEGMENTS)
INPUT = {"context": DOCUMENTS, "question": QUESTION}
MARKED_INPUT = {**INPUT, "context": Segments(DOCUMENTS)}
SAVED = (ChatPromptTemplate, HumanMessagePromptTemplate, PromptTemplate, ours.SegmentsPlaceholder)


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
    "what load restores": [shared.loaded(HumanMessage(blocks()), HumanMessage), HumanMessage(QUESTION)],
    "placeholder": PLACEHOLDER.invoke(INPUT),
    "placeholder of segments": PLACEHOLDER.invoke({**INPUT, "context": SEGMENTS}),
    "a template that was saved": shared.loaded(PLACEHOLDER, *SAVED).invoke(INPUT),
    **{
        f"{kind} template": ChatPromptTemplate.from_template(template, template_format=kind).invoke(MARKED_INPUT)
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
        (create_stuff_documents_chain(llm, text, document_prompt=ours.SEGMENT_PROMPT), whole),
        (ours.create_invariant_documents_chain(llm, text), whole),
        (ours.create_invariant_documents_chain(llm, text, document_prompt=source), f"{sources}\n{QUESTION}"),
        (PLACEHOLDER | llm, f"Human: {Segments(DOCUMENTS)}\nHuman: {QUESTION}"),
    ):
        assert chain.invoke(INPUT) == lm.generate(parse_marked(expected), max_new_tokens=6).text
    for before in ("", "Summarise:\n"):  # the documents end the text, or are all of it
        assert len({llm.invoke(f"{before}{Segments(order)}") for order in ORDERS}) == 1
    upper = ours.create_invariant_documents_chain(llm, text, output_parser=RunnableLambda(str.upper))
    assert upper.invoke(INPUT) == lm.generate(parse_marked(whole), max_new_tokens=6).text.upper()
    prompt = "Source: {source}\n" + ours.SEGMENT_PROMPT.template
    for longer in (ours.SEGMENT_PROMPT + "\n", ours.SEGMENT_PROMPT + " ({source})\n", ours.SEGMENT_PROMPT + prompt):
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


# --- what models of others get ---

both = pytest.mark.parametrize("wrap", [canonical, vote])
Town = create_model("Town", place=(str, ...))


def prompt(documents=DOCUMENTS):
    return PLACEHOLDER.invoke({"context": documents, "question": QUESTION})


def written(documents):
    """Return documents as models behind an API get them."""
    return "".join(f"Document: {each.page_content}\n" for each in documents)


def text_of(messages):
    return "\n".join(f"{message.type}: {message.content}" for message in messages)


@both
def test_requests_are_plain_text_and_ignore_the_order(wrap):
    requests, call = [], AIMessage("", tool_calls=[{"name": "search", "args": {}, "id": "1"}])
    for order in ORDERS:  # a set in every way: marks in texts, the result of a tool, and blocks
        reader, marks = Reader(), str(Segments(order))
        result = ToolMessage(written(order), tool_call_id="1", artifact=order)
        asked = [SystemMessage(marks), HumanMessage([{"type": "text", "text": marks}, QUESTION]), call, result]
        wrap(reader).invoke([*asked, *prompt(order).messages])
        sent = sorted(text_of(messages) for messages, _ in reader.requests)
        assert {text.count(written([each])) for text in sent for each in order} == {4}
        requests.append(sent)
    assert all(each == requests[0] for each in requests)
    assert not any(has_marks(text) for text in requests[0])
    assert len(set(requests[0])) == (5 if wrap is vote else 1)
    assert len({Reader().invoke(written(order)).text for order in ORDERS}) == 3, "the plain model shows the order"


def test_messages_without_segments_are_sent_as_they_are_and_counted_with_them():
    image = {"type": "image", "url": "https://example.org/map.png"}
    cached = {"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}
    uploads = HumanMessage([image, cached, {"type": "text", "text": "!"}])
    messages = [SystemMessage("Be brief."), AIMessage("Yes?"), uploads]
    model = canonical(Reader(custom_get_token_ids=lambda text: list(text.encode())))
    [(request, _)] = model._ballots(messages, {})
    assert request == messages
    [([*_, last], _)] = model._ballots([*messages, HumanMessage([cached, "a", *shared.blocks(), image])], {})
    first, text, third = last.content
    assert (first, text["text"][:11], third, last.additional_kwargs) == (cached, "aDocument: ", image, {})
    asked = [HumanMessage([*shared.blocks(), QUESTION])]
    assert model.get_num_tokens_from_messages(asked) == len(f"Human: {written(DOCUMENTS)}{QUESTION}")


def test_a_vote_takes_what_most_orders_say():
    loved = min(shared.TEXTS)  # canonical order lists it last
    reader = Reader(favourite=loved)
    model, asked = vote(reader, votes=6), prompt()
    assert canonical(reader).invoke(asked).text != loved
    reader.requests.clear()
    answer = model.invoke(asked)
    counts = Counter(Reader(favourite=loved)._read(sent, {}) for sent, _ in reader.requests)
    assert counts == {loved: 4, **dict.fromkeys(set(counts) - {loved}, 1)}
    assert answer.text == loved
    told = vote(Reader(), votes=6, answer_of=lambda message: "Ostra" in message.text).invoke(asked)
    assert answer.response_metadata["vote"] == told.response_metadata["vote"] == {"calls": 6, "agreed": 4}
    for raw in (False, True):  # no two raw answers are equal, but what they say is
        found = model.with_structured_output(Town, include_raw=raw).invoke(asked)
        assert (found["parsed"] if raw else found) == Town(place=loved)


@pytest.mark.parametrize("votes", [0, 3])
async def test_every_call_is_counted_reported_and_waits_for_the_limiter_and_callbacks_see_one(votes):
    limiter, heard = create_autospec(BaseRateLimiter, instance=True), Heard()
    reader, calls = Reader(rate_limiter=limiter, callbacks=[heard]), max(votes, 1)
    model = vote(reader, votes=votes) if votes else canonical(reader)
    for asked, ask in enumerate((model.ainvoke, lambda asked: shared.collected(model.astream(asked))), 1):
        await ask(prompt())
        assert (limiter.aacquire.await_count, heard.ended) == (asked * calls, asked)
    answer = model.invoke(prompt())
    assert (limiter.acquire.call_count, heard.ended) == (calls, 3)
    told = answer.response_metadata
    assert answer.usage_metadata == {name: count * calls for name, count in shared.USAGE.items()}
    assert told["token_usage"] == {"total_tokens": 12 * calls}
    assert (told["model_name"], told["finish_reason"], "vote" in told) == ("reader-1", "stop", bool(votes))
    assert (told["sets"], told["invariant"], told["method"]) == ([3], True, "vote" if votes else "canonical")


async def test_canonical_streams_and_a_vote_is_one_piece():
    model = canonical(shared.StreamingReader())
    pieces = [piece.text for piece in model.stream(prompt()) if piece.text]
    assert len(pieces) == len("".join(pieces).split()) > 3
    assert pieces == [piece.text for piece in await shared.collected(model.astream(prompt())) if piece.text]
    assert len([piece for piece in vote(shared.StreamingReader()).stream(prompt()) if piece.text]) == 1


@both
def test_tools_structured_output_and_what_is_bound_pass_through(wrap):
    expected = Town(place=wrap(Reader()).invoke(prompt()).text)
    structured, raw = (wrap(Reader()).with_structured_output(Town, include_raw=raw) for raw in (False, True))
    for order in ORDERS:
        call = wrap(Reader()).bind_tools([Town]).invoke(prompt(order)).tool_calls[0]
        assert (call["name"], call["args"]) == ("Town", expected.model_dump())
        assert raw.invoke(prompt(order))["parsed"] == expected
    for way, ask in list(WAYS.items())[: None if wrap is vote else 4]:  # a parser of LangChain streams parts
        assert ask(structured, prompt()) == expected, way
    for make in (lambda reader: wrap(reader.bind(user="me")), lambda reader: wrap(reader).bind(user="me")):
        reader = Reader()
        make(reader).invoke(prompt(), stop=["."])
        assert [keywords for _, keywords in reader.requests] == [{"stop": ["."], "user": "me"}] * len(reader.requests)


def test_it_is_a_fallback_that_gets_segments_as_text(lm):
    model = ChatInvariant(model=lm, max_tokens=10_000).with_fallbacks([canonical(Reader())])  # there is no room for it
    assert len({model.invoke(prompt(order)).text for order in ORDERS}) == 1


@both
def test_a_runnable_that_takes_text_gets_text_and_another_one_messages(wrap):
    given = []

    def first(value):
        given.append(value if isinstance(value, str) else text_of(value))
        return str(re.findall(r"Document: (.*)", given[-1])[0])

    model = wrap(RunnableLambda(first))
    found = set()
    for way, order in zip(WAYS.values(), ORDERS, strict=True):
        asked = f"{Segments(order)}{QUESTION}"
        for value in (asked, StringPromptValue(text=asked), prompt(order)):
            found.add(way(model, value))
    assert len(found) == 1
    assert not any(has_marks(text) for text in given)
    assert {text.startswith("human: ") for text in given} == {True, False}


# --- audits -----------------------------------------------------------------------------------------------------------


def said(system, **options):
    return as_system(system, **options).ask(WHO, WHO.segments).text


def of_mapping(given: dict[str, Any]) -> AIMessage:
    return AIMessage(f"{given['question']} {given['context'][0].page_content}")


def of_text(text: str) -> str:
    return text


def reply(state: MessagesState) -> dict[str, Any]:
    return {"messages": [AIMessage(f"Seen: {state['messages'][-1].content}")]}


TO_TEXT = RunnableLambda(lambda value: value.to_string())
CHAINS = [
    *map(RunnableLambda, (of_text, of_mapping, lambda given: {"answer": of_mapping(given)}, lambda text: text.strip())),
    *(ChatPromptTemplate.from_template(each) | TO_TEXT for each in ("{context} Question: {question}", "{text}")),
    StateGraph(MessagesState).add_node("reply", reply).add_edge(START, "reply").compile(),
]


@pytest.mark.parametrize("reader", [Reader(), shared.TextReader()])
def test_wrapped_models_are_given_marked_documents(reader):
    assert (flips(reader), flips(canonical(reader)), flips(vote(reader))) == (1.0, 0.0, 0.0)


@pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])
def test_our_models_keep_every_answer_with_their_own_parameters(kind, lm):
    assert flips(kind(model=lm, max_tokens=4)) == 0.0
    model = kind(model=lm, max_tokens=3, temperature=0.9, seed=1, stop=["x"], generation_kwargs={"top_k": 5})
    system = as_system(model)
    sampling = {"do_sample": True, "temperature": 0.9, "seed": 1, "top_k": 5}
    assert system.generation == {"max_new_tokens": 3, **sampling, "stop_strings": ["x"]}
    assert system.name != as_system(model.model_copy(update={"temperature": 0.8})).name
    assert as_system(model, generation={"max_new_tokens": 2}).generation["max_new_tokens"] == 2


@pytest.mark.parametrize("chain", CHAINS)
def test_chains_get_what_their_input_schema_says_and_agents_a_message(chain):
    assert "Who?" in said(chain)
    assert "It was Ann." in said(chain)


def test_a_chain_that_never_sees_the_documents_or_asks_for_more_is_refused():
    with pytest.raises(AuditFailed, match="does not read the documents it is given") as refused:
        flips(RunnableLambda(lambda given: {"answer": given["question"]}))
    assert "behind the retriever" in refused.value.hint
    assert flips(RunnableLambda(lambda given: f"{given['input']} {given['context'][0].page_content}")) == 1.0
    with pytest.raises(UnsupportedCombination, match="nothing is known of tone"):
        as_system(ChatPromptTemplate.from_template("{context} {question} {tone}") | RunnableLambda(str))
    assert said(RunnableLambda(of_text), to_input=lambda question, segments: question) == "Who?"
