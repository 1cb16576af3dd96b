"""What cannot be is refused with a typed error, which says what was expected, what came, and what to do."""

import pickle
from functools import partial
from types import SimpleNamespace

import pytest
from cases import EIGHT, QUERY, TEXTS, consumed, node, nodes_of, read
from entries import Case, answer
from invariant_rag import KeyValueCache, errors
from llama_index.core import PromptTemplate, get_response_synthesizer
from llama_index.core.base.llms import types
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.llms import ChatMessage, MockLLM, TextBlock
from llama_index.core.schema import ImageNode, MediaResource, Node, NodeWithScore
from llama_index.core.tools import FunctionTool
from pydantic import ValidationError, create_model

from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import AnswerFailed, InvariantLLM, canonical, vote
from llama_index.postprocessor.invariant_rag import SourceJoiner
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

Place = create_model("Place", name=(str, ...))
ASKED = [ChatMessage(QUERY)]
TOOLS = [FunctionTool.from_defaults(lambda: "noon", name="now", description="Tell the time.")]
CALL = ChatMessage(role="user", blocks=[types.ToolCallBlock(tool_call_id="a", tool_name="now", tool_kwargs={})])
BARE = PromptTemplate("{query_str}")
PIXEL = b"GIF89a\x01\x00\x01\x00\x00\x00\x00;"
IMAGE = types.ImageBlock(image=PIXEL, image_mimetype="image/gif")
MEDIA = [
    IMAGE,
    types.AudioBlock(audio=b"RIFF"),
    types.DocumentBlock(data=b"x", document_mimetype="application/pdf"),
    types.CitableBlock(title="", source="", content=[IMAGE]),
    ImageNode(text="A map.", image_url="https://example.org/map.png", id_="the map"),
    Node(text_resource=MediaResource(text="A map."), image_resource=MediaResource(data=PIXEL), id_="the map"),
    Node(audio_resource=MediaResource(data=b"RIFF"), id_="the map"),
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
    (errors.UnsupportedCombination, "either tools or", lambda g: g.llm.chat(ASKED, tools=TOOLS, output_cls=Place)),
    (errors.IncompleteObject, "complete JSON", lambda g: g.llm.structured_predict(Place, BARE, query_str="?")),
    (errors.IncompleteObject, "complete JSON", lambda g: g.llm.stream_structured_predict(Place, BARE, query_str="?")),
    # nodes
    (errors.InvalidPrompt, "context_str", lambda g: InvariantSynthesizer(g.llm, None, BARE).synthesize(
        QUERY, nodes_of())),
    (errors.UnsupportedCombination, "streaming", lambda g: InvariantSynthesizer(
        g.llm, streaming=True, output_cls=Place)),
    (errors.InvalidPrompt, "keyword context_str, query_str", lambda g: g.own.synthesize(
        QUERY, nodes_of(), query_str="x", context_str="x")),
    (errors.InvalidPrompt, "keyword string_to_format, text_chunks", lambda g: g.own.asynthesize(
        QUERY, nodes_of(), text_chunks="x", string_to_format="x")),
    (errors.RetrievalError, "start_char_idx", lambda g: SourceJoiner(join_by="file").postprocess_nodes(
        [node(text, file="a.txt") for text in TEXTS])),
]  # fmt: skip


@pytest.mark.parametrize(("error", "said", "ask"), ROWS)
def test_what_cannot_be_is_refused(given, error, said, ask):
    with pytest.raises(error, match=said):
        read(ask(given))


# --- errors of a call: LlamaIndex answers "Empty Response" where it catches a ValueError ---

MODES = {"query": {}, "aquery": {"way": "aquery"}, "streaming": {"streaming": True}, "object": {"output_cls": Place}}
WAYS = {
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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore::invariant_rag.errors.OrderWarning")
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
            answer(WAYS[way], InvariantLLM(lm, **{"max_tokens": 8, **options}), nodes_of())
        assert isinstance(caught.value.__cause__, TypeError if error is AnswerFailed else object)


def test_no_error_of_a_call_is_one_that_llama_index_catches():
    named = "InvalidSegment InvalidPrompt ContextOverflow InvalidSchema IncompleteObject InvalidObject UnknownParameter"
    for kind in (AnswerFailed, *(getattr(errors, name) for name in named.split())):
        assert issubclass(kind, errors.InvariantRAGError)
        assert not issubclass(kind, ValueError | TypeError)


@pytest.mark.parametrize("media", MEDIA)
async def test_what_is_no_text_is_refused_by_name(llm, media):
    if hasattr(media, "node_id"):
        said, asked = "image, audio or video in the map", (QUERY, [*nodes_of(), NodeWithScore(node=media, score=0.1)])
        made = [make(llm) for make in SYNTHESIZERS]
        ways = [ask for each in made for ask in (each.synthesize, each.asynthesize)]
    else:
        said, asked = "expected text.*(image|audio|document)", ([ChatMessage(blocks=[TextBlock(text="What?"), media])],)
        ways = [getattr(llm, name) for name in EIGHT[4:]]
    for ask in ways:
        with pytest.raises(errors.InvalidPrompt, match=said):
            await consumed(ask(*asked))
