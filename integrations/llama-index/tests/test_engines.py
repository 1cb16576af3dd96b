"""Synthesizer, chat engine, postprocessors and evaluator, and what responses, events and callbacks tell.

What cannot be, of these and of LLMs, is refused with a typed error: what was expected, what came, and what to do.
"""

import asyncio
import pickle
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import pytest
from cases import EIGHT, ORDERS, QUERY, TEXTS, ListRetriever, Reader, Recorder, engine_of, nodes_of, read, same
from entries import MARKED, Case, answer
from framework_cases import ended
from invariant_rag import KeyValueCache, Segment, SegmentSet, errors
from invariant_rag.judge import Judge
from invariant_rag.orderings import Score
from invariant_rag.prompts import mark, parse_marked, render_chat, without_marks
from llama_index.core import ChatPromptTemplate, PromptTemplate, Settings, get_response_synthesizer, schema
from llama_index.core.base.llms import types
from llama_index.core.base.response.schema import AsyncStreamingResponse, Response, StreamingResponse
from llama_index.core.callbacks import CallbackManager, CBEventType, LlamaDebugHandler, TokenCountingHandler
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.evaluation.pairwise import EvaluationSource, PairwiseComparisonEvaluator
from llama_index.core.llms import ChatMessage, MockLLM, TextBlock
from llama_index.core.postprocessor.rankGPT_rerank import RankGPTRerank
from llama_index.core.query_engine import CitationQueryEngine
from llama_index.core.schema import MetadataMode, NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from pydantic import Field, ValidationError, create_model

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import AnswerFailed, InvariantLLM, OrderWarning, canonical, vote
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

with_warning = pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")

WAYS = {"query": Response, "aquery": Response, "stream": StreamingResponse, "astream": AsyncStreamingResponse}
TEMPLATE = PromptTemplate("Context:\n{context_str}\nAnswer: {query_str}")
Word = create_model("Word", word=(str, Field(max_length=8)))


def report(llm, way, nodes=None, **options):
    """Return the metadata of the response of an engine, of a stream once it is read."""
    options = {"streaming": "stream" in way, "way": "aquery" if way.startswith("a") else "query", **options}
    return answer(partial(Case.query, **options), llm, nodes_of() if nodes is None else nodes)[1].metadata


def said_by(lm, *content, **before):
    """What the engine itself says to a user's message, behind messages of other roles."""
    messages = [{"role": role, "content": text} for role, text in before.items()]
    prompt = render_chat([*messages, {"role": "user", "content": list(content)}], lm.tokenizer, QUERY)
    return lm.generate(prompt, max_new_tokens=8).text


@pytest.mark.parametrize("way", WAYS)
def test_what_llama_index_shows_of_a_node_is_one_segment(llm, lm, way):
    def ask(llm, nodes):
        own = InvariantSynthesizer(llm, None, TEMPLATE, streaming="stream" in way, empty_response="Nothing found.")
        text, response = read((own.asynthesize if way.startswith("a") else own.synthesize)(QUERY, nodes))
        assert (type(response), response.source_nodes) == (WAYS[way], nodes)
        return text, response.metadata

    nodes = nodes_of(ORDERS[3], source="atlas", page="", secret="x")
    for each in nodes:
        each.node.excluded_llm_metadata_keys = ["secret"]
    shown = [each.node.get_content(MetadataMode.LLM) for each in nodes]
    assert ("source: atlas" in shown[0], "secret" in shown[0]) == (True, False)
    text, said = ask(llm, nodes)
    assert text == said_by(lm, "Context:\n", SegmentSet(shown), f"\nAnswer: {QUERY}")
    assert (said["node 1"]["source"], said["invariant_rag"]["sets"]) == ("atlas", [3])
    text, said = ask(llm, [])
    assert (text, said["invariant_rag"]["invariant"]) == ("Nothing found.", None)
    with pytest.warns(OrderWarning, match=r"MockLLM.*InvariantLLM"):
        text, _ = ask(MockLLM(), nodes_of())
    assert text == "Context:\n{}\nAnswer: {}".format("\n\n".join(TEXTS), QUERY), "it says what it was told"


@pytest.mark.parametrize("way", ["query", "aquery", "stream", "object", "structured", "marked"])
def test_scores_and_the_query_reach_the_ordering(lm, way, monkeypatch):
    seen, sort_keys = [], Score.sort_keys

    def spy(self, candidates, query):
        seen.append((query, sorted((each.segment.text, each.segment.score) for each in candidates)))
        return sort_keys(self, candidates, query)

    monkeypatch.setattr(Score, "sort_keys", spy)
    api = Reader(says='{"word": "noon"}')
    local = InvariantLLM(lm.with_method(ordering="score"), max_tokens=60)
    scores = sorted((each.node.get_content(), each.score) for each in nodes_of())
    options = {"streaming": way == "stream", "output_cls": Word if way == "object" else None}
    for llm in (local, canonical(api, ordering="score"), vote(api, ordering="score")):
        asked = llm.as_structured_llm(Word) if way == "structured" else llm
        last = MARKED if way == "marked" else {"response_synthesizer": InvariantSynthesizer(asked, **options)}
        for order in ORDERS[::2]:
            report(asked, way, nodes_of(order), **last)
        assert len(seen) >= 3
        assert all(each == (QUERY, scores) for each in seen)
        with pytest.raises(errors.InvalidSegment, match="score"):
            report(llm, "query", [NodeWithScore(node=each.node) for each in nodes_of()])
        seen.clear()


def test_templates_may_change_and_have_any_variables(llm, lm):
    def answer(llm, template, query=QUERY, /, **variables):
        return str(InvariantSynthesizer(llm, text_qa_template=template).synthesize(query, nodes_of(), **variables))

    synthesizer, nodes = InvariantSynthesizer(llm), SegmentSet(TEXTS)
    assert set(synthesizer.get_prompts()) == {"text_qa_template"}
    twice = PromptTemplate("{context_str}\nAgain:\n{context_str}\n{query_str}")
    synthesizer.update_prompts({"text_qa_template": twice})
    assert str(synthesizer.synthesize(QUERY, nodes_of())) == said_by(lm, nodes, "\nAgain:\n", nodes, f"\n{QUERY}")
    forged = answer(llm, PromptTemplate("{query_str}\n{context_str}\n"), mark("?"))
    assert forged == said_by(lm, "?\n", nodes, "\n")
    chat = ChatPromptTemplate([ChatMessage("In {language}.", role="system"), ChatMessage("{context_str}\n{query_str}")])
    assert answer(llm, chat, language="Dutch") == said_by(lm, nodes, f"\n{QUERY}", system="In Dutch.")
    plain = PromptTemplate("Brief. {context_str} {query_str}")
    for name in ("template", "prompt", "llm", "output_cls", "llm_kwargs", "variables", "messages"):
        template = PromptTemplate(f"{{{name}}} {{context_str}} {{query_str}}")
        for asked in (llm, canonical(MockLLM())):
            assert answer(asked, template, **{name: "Brief."}) == answer(asked, plain)


def test_engines_report_citations_and_a_number_leads_to_the_same_source_in_every_order(lm):
    def synthesizer(text, **options):
        return InvariantSynthesizer(InvariantLLM(lm, max_tokens=80, generation_kwargs=ended(lm, text), **options))

    def ask(order):
        cited = engine_of(nodes_of(order), response_synthesizer=synthesizer(TEXTS[0], citations=True)).query(QUERY)
        own = synthesizer("By boat [3].")
        numbered = CitationQueryEngine(ListRetriever(nodes_of(order)), own._llm, own).query(QUERY)
        return cited.metadata["invariant_rag"]["citations"], str(numbered), numbered.source_nodes[2].text

    whole = {"start": 0, "end": len(TEXTS[0]), "text": TEXTS[0], "source": Segment(TEXTS[0]).content_hash}
    assert same(ask) == ([{**whole, "node_id": "node 0"}], "By boat [3].", f"Source 3:\n{sorted(TEXTS)[2]}\n")


@with_warning  # of what a model repeats
def test_a_conversation_is_remembered_and_a_history_is_no_template(llm):
    history = [ChatMessage("Say {context_str} and {query_str}.", role="user"), ChatMessage("{}", role="assistant")]

    def talk(order, llm=llm):
        options = {"llm": llm, "system_prompt": "Be {brief}.", "chat_history": history, **(MARKED if order[0] else {})}
        engine = InvariantChatEngine.from_defaults(ListRetriever(nodes_of(order)), **options)
        replies = [engine.chat(message) for message in (QUERY, "And then?")]
        said = [each.content for each in engine.chat_history[2:]]
        assert said == [QUERY, str(replies[0]), "And then?", str(replies[1])]
        return [(str(each), each.metadata["invariant_rag"]) for each in replies]

    assert [(report["sets"], report["invariant"]) for _, report in same(talk)] == [([3], True)] * 2
    (asked, _), _ = talk(ORDERS[0], canonical(MockLLM()))  # it says what it is asked
    assert all(asked.count(text) == 1 for text in (*TEXTS, QUERY, "Say {context_str} and {query_str}.", "Be {brief}."))


KINDS = {
    "text": TextNode(text="a"),
    "metadata": TextNode(text="a", metadata={"page": 3, "secret": 1}, excluded_llm_metadata_keys=["secret"]),
    "template": TextNode(text="a", metadata={"page": 3}, text_template="<{metadata_str}|{content}>"),
    "index": schema.IndexNode(text="a", index_id="x"),
    "image": schema.ImageNode(text="a", image_url="http://localhost/a.png"),
    "media": schema.Node(text_resource=schema.MediaResource(text="a"), metadata={"page": 3}),
    "empty": TextNode(text=""),
}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_a_model_gets_of_a_node_is_one_segment_and_all_else_stays(kind):
    node, marker = KINDS[kind], SegmentMarkerPostprocessor.from_dict(SegmentMarkerPostprocessor().to_dict())
    before = node.model_dump_json()
    [marked] = marker.postprocess_nodes([NodeWithScore(node=node, score=0.5)])
    shown = without_marks(node.get_content(MetadataMode.LLM))
    written = marked.node.get_content(MetadataMode.LLM)
    assert parse_marked(written).segments == SegmentSet([Segment(shown, score=0.5)])
    assert marked.node.get_content_blocks(MetadataMode.LLM) == [TextBlock(text=written)]
    assert (marked.node_id, marked.score, marked.metadata) == (node.node_id, 0.5, node.metadata)
    for mode in (MetadataMode.NONE, MetadataMode.ALL, MetadataMode.EMBED):
        assert marked.node.get_content(mode) == node.get_content(mode)
    assert node.model_dump_json() == before
    assert marker.postprocess_nodes([marked]) == [marked] == await marker.apostprocess_nodes([marked])
    if type(node) is TextNode:
        assert TextNode.from_dict(marked.node.to_dict()) == node, "it is stored as a text node"


@pytest.mark.parametrize("key", [None, "file"])
def test_chunks_of_a_source_are_joined_in_every_order_and_overlaps_are_not_repeated(key):
    def chunk(start, text, score):
        source = {schema.NodeRelationship.SOURCE: schema.RelatedNodeInfo(node_id="town")} if key is None else {}
        made = TextNode(text=text, start_char_idx=start, relationships=source, metadata={key: "a.txt"} if key else {})
        return NodeWithScore(node=made, score=score)

    chunks = [chunk(0, "The mill grinds.", 0.2), chunk(4, "mill grinds. A bridge", 0.7), chunk(40, "The bell.", 0.1)]
    alone = NodeWithScore(node=TextNode(text="alone"), score=None)
    for order in permutations([*chunks, alone]):
        joined, other = sorted(SourceJoiner(join_by=key).postprocess_nodes(list(order)), key=lambda each: each.text)
        assert (joined.text, other) == ("The mill grinds. A bridge\nThe bell.", alone), "what is missing is a line end"
        assert (joined.score, joined.node.start_char_idx, joined.node.end_char_idx) == (0.7, 0, 49)
    assert len(SourceJoiner().postprocess_nodes(chunks)) == (1 if key is None else 3)


@with_warning  # of `refine` and rerankers
@pytest.mark.parametrize("way", WAYS)
def test_calls_are_one_report_that_is_invariant_only_if_all_are(llm, lm, way):
    def told(llm, **options):
        said = report(llm, way, **options)["invariant_rag"]
        return said["sets"], said["invariant"], said.get("usage", {}).get("completion_tokens")

    assert told(llm, response_mode="refine") == ([], False, 24)
    # What wrote the answer read all nodes; but what chose them may change it.
    assert told(llm, node_postprocessors=[RankGPTRerank(llm=llm, top_n=3)]) == ([3], False, 8)
    if "stream" in way:
        return
    for options in ({"nodes": []}, {"response_mode": "no_text"}):
        assert told(llm, **options) == ([], None, None)
    assert set(report(Recorder(), way)) == {"node 0", "node 1", "node 2"}
    assert told(InvariantLLM(lm, max_tokens=100).as_structured_llm(Word))[:2] == ([3], True)


async def test_concurrent_queries_do_not_report_for_one_another(llm):
    orders = [(0,), (0, 1), (0, 1, 2)]
    found = await asyncio.gather(*(engine_of(nodes_of(order), llm=llm).aquery(QUERY) for order in orders))
    found.append(get_response_synthesizer(llm=llm).synthesize(QUERY, nodes_of((0,))))
    assert [each.metadata["invariant_rag"]["sets"] for each in found] == [[1], [2], [3], [1]]
    assert llm.complete(QUERY).raw["invariant"] is None


@pytest.mark.parametrize("way", WAYS)
def test_a_query_tells_its_steps_in_order(llm, told, way):
    report(llm, way, response_synthesizer=InvariantSynthesizer(llm, streaming="stream" in way))
    begun = ["QueryStart", "RetrievalStart", "RetrievalEnd", "SynthesizeStart", "GetResponseStart", "LLMPredictStart"]
    ended = ["GetResponseEnd", "SynthesizeEnd", "QueryEnd"]
    whole = ["LLMChatStart", "LLMChatEnd", "LLMPredictEnd", *ended]
    streamed = ["LLMChatStart", *ended, "LLMChatInProgress", "LLMChatEnd"]
    assert told.names == [*begun, *(streamed if "stream" in way else whole)]
    [start] = [event for event in told.events if event.class_name() == "LLMChatStartEvent"]
    assert "\n\n".join(TEXTS) in start.messages[-1].content, "events show segments as text"


def test_callbacks_see_one_call_per_query_its_tokens_and_its_failure(llm):
    debug, counter = LlamaDebugHandler(print_trace_on_end=False), TokenCountingHandler()
    manager = CallbackManager([debug, counter])
    synthesizer = InvariantSynthesizer(llm.model_copy(), callback_manager=manager)
    engine = engine_of(nodes_of(), response_synthesizer=synthesizer, callback_manager=manager)
    usage = engine.query(QUERY).metadata["invariant_rag"]["usage"]
    counted = {"prompt": counter.prompt_llm_token_count, "completion": counter.completion_llm_token_count}
    assert counted == {name: usage[f"{name}_tokens"] for name in counted}
    kinds = (CBEventType.LLM, CBEventType.QUERY, CBEventType.SYNTHESIZE)
    assert [len(debug.get_event_pairs(kind)) for kind in kinds] == [1, 1, 1]
    with pytest.raises(errors.ContextOverflow):
        llm.model_copy(update={"callback_manager": manager}).complete("x" * 5000)
    assert isinstance(debug.get_event_pairs(CBEventType.LLM)[-1][1].payload["exception"], errors.ContextOverflow)


@pytest.mark.parametrize("options", [{}, {"by": "texts"}, {"criteria": {"brevity": "few words"}}], ids=str)
async def test_the_result_is_the_verdict_of_the_judge(llm, options):
    Settings.llm = llm
    evaluator, one, other = InvariantPairwiseEvaluator(**options), "It leaves at noon.", "It leaves at six."
    assert (isinstance(evaluator, PairwiseComparisonEvaluator), evaluator.get_prompts()) == (True, {})
    asked = {"query": QUERY, "reference": "noon"}
    results = [evaluator.evaluate(response=one, second_response=other, **asked)]
    results.append(await evaluator.aevaluate(response=other, second_response=one, **asked))
    for result, answers in zip(results, ((one, other), (other, one)), strict=True):
        verdict = Judge(llm.lm, **options).compare(QUERY, *answers, reference="noon")
        assert result.feedback == result.response == verdict.describe(["response", "second_response"])
        assert (result.passing, result.score) == {0: (True, 1.0), 1: (False, 0.0)}[verdict.winner]
        assert result.pairwise_source == EvaluationSource.ORIGINAL
    assert results[0].passing is not results[1].passing
    tie = evaluator.evaluate(query=QUERY, response=one, second_response=one)
    assert (tie.score, tie.passing, tie.invalid_result) == (0.5, None, False)


ASKED = [ChatMessage(QUERY)]
TOOLS = [FunctionTool.from_defaults(lambda: "noon", name="now", description="Tell the time.")]
CALL = ChatMessage(role="user", blocks=[types.ToolCallBlock(tool_call_id="a", tool_name="now", tool_kwargs={})])
BARE = PromptTemplate("{query_str}")
PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
IMAGE, PICTURE = types.ImageBlock(image=PIXEL, image_mimetype="image/gif"), schema.MediaResource(data=PIXEL)
MEDIA = [
    IMAGE,
    types.AudioBlock(audio=b"RIFF"),
    types.DocumentBlock(data=b"x", document_mimetype="application/pdf"),
    types.CitableBlock(title="", source="", content=[IMAGE]),
    schema.ImageNode(text="A map.", image_url="https://example.org/map.png", id_="the map"),
    schema.Node(text_resource=schema.MediaResource(text="A map."), image_resource=PICTURE, id_="the map"),
    schema.Node(audio_resource=schema.MediaResource(data=b"RIFF"), id_="the map"),
]
SYNTHESIZERS = [InvariantSynthesizer, lambda llm: InvariantSynthesizer(canonical(MockLLM())), get_response_synthesizer]
evaluator = partial(InvariantPairwiseEvaluator, InvariantLLM("no/such-model"))  # its weights are not looked for


@pytest.fixture
def given(spoken, base_url):
    """A model that knows tools, as an LLM in memory; and an LLM of a server."""
    llm, remote = InvariantLLM(spoken, max_tokens=8), InvariantLLM(base_url=base_url)
    return SimpleNamespace(model=spoken, llm=llm, remote=remote, url=base_url, own=InvariantSynthesizer(llm))


ROWS = [
    # a model, its copies and pickles
    (errors.UnknownName, "unknown ordering 'foo'; choose from", lambda g: InvariantLLM(ordering="foo")),
    (errors.UnknownName, "unknown backend 'foo'; choose from", lambda g: InvariantLLM(backend="foo")),
    (ValidationError, r"overflow\n.*'drop_last'", lambda g: InvariantLLM(overflow="foo")),
    (errors.UnknownParameter, "'metod'; did you mean 'method'", lambda g: InvariantLLM(metod="pine")),
    (errors.UnknownParameter, "`max_new_tokens` is `max_tokens`", lambda g: InvariantLLM(temprature=0.9)),
    (errors.UnsupportedCombination, "chat template", lambda g: InvariantLLM(messages_to_prompt=lambda messages: "x")),
    (errors.UnsupportedModel, r"got LlamaForCausalLM\n.*InvariantModel\(model", lambda g: InvariantLLM(g.model.model)),
    (errors.UnsupportedCombination, "method, backend", lambda g: InvariantLLM(g.model, method="pine", backend="sdpa")),
    (errors.UnknownParameter, "did you mean 'max_tokens'", lambda g: g.llm.model_copy(update={"max_token": 3})),
    (errors.UnsupportedCombination, "key_value_cache, method, overflow", lambda g: g.llm.model_copy(
        update={"method": "pine", "overflow": "drop_last", "key_value_cache": KeyValueCache()})),
    (ValueError, "frozen", lambda g: setattr(g.llm, "method", "pine")),
    (errors.UnsupportedCombination, "in memory", lambda g: g.llm.to_dict()),
    (errors.UnsupportedCombination, "in memory", lambda g: pickle.dumps(g.llm)),
    (errors.UnsupportedCombination, "got llm", lambda g: pickle.dumps(canonical(g.llm))),
    (errors.UnsupportedCombination, "got answer_of", lambda g: pickle.dumps(vote(MockLLM(), answer_of=lambda said: 1))),
    # a wrapper: its options are the core's
    (errors.UnsupportedCombination, "given", lambda g: canonical(MockLLM(), ordering="given")),
    (errors.InvalidChoice, "votes", lambda g: vote(MockLLM(), votes=0)),
    (errors.UnsupportedModel, "LLM of LlamaIndex, got str", lambda g: canonical("gpt-4")),
    (errors.UnsupportedCombination, "calls tools, got MockLLM", lambda g: (
        canonical(MockLLM()).chat_with_tools(TOOLS, QUERY))),
    # a server
    (errors.UnsupportedCombination, "base_url", lambda g: g.remote.lm),
    (errors.UnsupportedCombination, "without dtype, key_value_cache, a model in memory", lambda g: InvariantLLM(
        g.model, KeyValueCache(), base_url=g.url, dtype="float32")),
    (errors.RemoteError, "small", lambda g: InvariantLLM("large", base_url=g.url).complete(QUERY)),
    # an evaluator
    (errors.UnsupportedCombination, "eval_template, parser_function: .*\n.*criteria=", lambda g: evaluator(
        eval_template="x", parser_function=lambda text: text)),
    (errors.UnsupportedCombination, "eval_template", lambda g: evaluator().update_prompts({"eval_template": BARE})),
    (errors.UnsupportedCombination, "MockLLM", lambda g: InvariantPairwiseEvaluator(MockLLM())),
    (errors.UnknownName, "'letters', 'texts'", lambda g: evaluator(by="numbers")),
    # tools and objects
    (errors.InvalidPrompt, "assistant's messages, got one in a message of 'user'", lambda g: g.llm.chat([CALL])),
    (errors.InvalidTool, "tools: expected a list of tools", lambda g: g.llm.chat(ASKED, tools=2.5)),
    (errors.InvalidTool, "unknown tool_choice 'seek'", lambda g: g.llm.chat(ASKED, tools=TOOLS, tool_choice="seek")),
    (errors.InvalidOption, "template_kwargs", lambda g: g.llm.complete(QUERY, template_kwargs={"deeply": True})),
    (errors.InvalidTool, r"expected a call of a tool.*\n.*tool_required=True", lambda g: (
        g.llm.get_tool_calls_from_response(g.llm.chat_with_tools(TOOLS, QUERY, tool_choice="none")))),
    (errors.UnsupportedCombination, "either tools or", lambda g: g.llm.chat(ASKED, tools=TOOLS, output_cls=Word)),
    (errors.IncompleteObject, "complete JSON", lambda g: g.llm.structured_predict(Word, BARE, query_str="?")),
    (errors.IncompleteObject, "complete JSON", lambda g: g.llm.stream_structured_predict(Word, BARE, query_str="?")),
    # nodes
    (errors.InvalidPrompt, "context_str", lambda g: InvariantSynthesizer(g.llm, None, BARE).synthesize(
        QUERY, nodes_of())),
    (errors.UnsupportedCombination, "streaming", lambda g: InvariantSynthesizer(
        g.llm, streaming=True, output_cls=Word)),
    (errors.InvalidPrompt, "keyword context_str, query_str", lambda g: g.own.synthesize(
        QUERY, nodes_of(), query_str="x", context_str="x")),
    (errors.InvalidPrompt, "keyword string_to_format, text_chunks", lambda g: g.own.asynthesize(
        QUERY, nodes_of(), text_chunks="x", string_to_format="x")),
    (errors.RetrievalError, "start_char_idx", lambda g: SourceJoiner(join_by="file").postprocess_nodes(
        nodes_of(file="a.txt"))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said", "ask"), ROWS)
def test_what_cannot_be_is_refused(given, error, said, ask):
    with pytest.raises(error, match=said):
        read(ask(given))


MODES = {"query": {}, "aquery": {"way": "aquery"}, "streaming": {"streaming": True}, "object": {"output_cls": Word}}
ASKING = {
    **{name: lambda c, name=name: getattr(c.llm, name)(QUERY if "complete" in name else ASKED) for name in EIGHT},
    **{
        f"{mode}, {way}": partial(Case.query, response_mode=mode, **options)
        for mode in ("compact", "tree_summarize", "refine")
        for way, options in MODES.items()
    },
    **{
        f"{kind.__name__}.{way}": partial(Case.chat, kind=kind, way=way)
        for kind in (ContextChatEngine, CondensePlusContextChatEngine)
        for way in ("chat", "achat")
    },
}
"""Whoever asks gets the error of a call; LlamaIndex answers "Empty Response" where it catches a ValueError."""


@with_warning  # of `refine`
@pytest.mark.parametrize("way", ASKING)
def test_an_error_of_a_call_reaches_whoever_asked(lm, way):
    def fail(ids, scores):
        return "concatenate str" + 1

    for options, error, said in (
        # LlamaIndex thinks that it fits
        ({"max_tokens": 4095, "context_window": 100_000}, errors.ContextOverflow, "4096"),
        ({"generation_kwargs": {"max_token": 3}}, errors.InvalidOption, "got 'max_token', which is none"),
        ({"generation_kwargs": {"stop": 2.5}}, errors.InvalidOption, "stop: expected a list"),
        ({"generation_kwargs": {"logits_processor": [fail]}}, AnswerFailed, "TypeError: .*concatenate str"),
    ):
        if error is AnswerFailed and "object" in way:  # its grammar comes first
            continue
        with pytest.raises(error, match=said) as caught:
            answer(ASKING[way], InvariantLLM(lm, **{"max_tokens": 8, **options}), nodes_of())
        assert isinstance(caught.value.__cause__, TypeError if error is AnswerFailed else object)


def test_no_error_of_a_call_is_one_that_llama_index_catches():
    named = "InvalidSegment InvalidPrompt ContextOverflow InvalidSchema IncompleteObject InvalidObject UnknownParameter"
    for kind in (AnswerFailed, *(getattr(errors, name) for name in named.split())):
        assert issubclass(kind, errors.InvariantRAGError)
        assert not issubclass(kind, ValueError | TypeError)


@pytest.mark.parametrize("media", MEDIA)
def test_what_is_no_text_is_refused_by_name(llm, media):
    if hasattr(media, "node_id"):
        said, asked = "image, audio or video in the map", (QUERY, [*nodes_of(), NodeWithScore(node=media, score=0.1)])
        made = [make(llm) for make in SYNTHESIZERS]
        ways = [ask for each in made for ask in (each.synthesize, each.asynthesize)]
    else:
        said, asked = "expected text.*(image|audio|document)", ([ChatMessage(blocks=[TextBlock(text="What?"), media])],)
        ways = [getattr(llm, name) for name in EIGHT[4:]]
    for ask in ways:
        with pytest.raises(errors.InvalidPrompt, match=said):
            read(ask(*asked))
