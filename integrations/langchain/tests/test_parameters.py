"""The parameters of both models: what is chosen where they are left open, keys of caches, and what is refused."""

import copy
import math
import pickle
import time
from itertools import permutations
from types import SimpleNamespace

import pytest
from framework_cases import tiny_weights
from invariant_rag import InvariantModel, errors
from invariant_rag.errors import OrderWarning
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.interventions import MsPoE
from invariant_rag.models.embedded import EMBEDDED
from invariant_rag.prompts import parse_marked
from invariant_rag.testing import toy_tokenizer
from langchain_core.documents import Document
from langchain_core.language_models.fake import FakeListLLM
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import ConfigurableField
from pydantic import BaseModel, ValidationError

import langchain_invariant_rag as ours
from langchain_invariant_rag import ChatInvariant, InvariantLLM, canonical, vote
from langchain_invariant_rag.documents import to_block, to_segment
from langchain_invariant_rag.parameters import InvariantContextOverflowError

from . import shared
from .shared import DOCUMENTS, MAKE, ORDERS, PLACEHOLDER, QUESTION, WAYS, Listed, Reader, text

both = pytest.mark.parametrize("kind", [ChatInvariant, InvariantLLM])

# --- choices --------------------------------------------------------------------------------------------------------


@both
def test_what_is_left_open_is_what_the_model_brings_also_in_copies(lm, kind):
    pine = lm.with_method("pine", ordering="frequency", max_segment_tokens=7)
    plain, rotor = kind(model=lm, method="sequential"), kind(model=lm, method="rotor", ordering="frequency")
    configurable = plain.configurable_fields(method=ConfigurableField(id="method"))
    for model, *expected in (
        (kind(), "rotor", "lexical"),
        (kind(method="sequential"), "sequential", "given"),
        (kind(model=pine, method="rotor"), "rotor", "lexical"),
        (kind(model=pine, ordering="lexical"), "pine", "lexical"),
        (plain.model_copy(update={"method": "rotor"}), "rotor", "lexical"),
        (rotor.model_copy(update={"method": "pine"}), "pine", "frequency"),
        (pickle.loads(pickle.dumps(kind(model=lm.with_method("sequential")))), "sequential", "given"),
        (configurable._prepare({"configurable": {"method": "rotor"}})[0], "rotor", "lexical"),
    ):
        traced = model._identifying_params  # before loading
        assert [traced["method"], traced["ordering"]] == [model.lm.method.name, model.lm.ordering.name] == expected
    copied = kind(model=lm).model_copy(update={"model": pine})
    assert (repr(copied.lm), copied.lm.max_segment_tokens) == (repr(pine), 7)
    changed = lm.with_method("sequential", ordering="lexical", intervention=MsPoE(first_layer=0))
    assert kind(model=lm).model_copy(update={"model": changed}).lm.intervention == MsPoE(first_layer=0)
    assert kind(model=changed).model_copy(update={"model": lm}).lm.intervention is None
    assert kind(model=changed, method="rotor").lm.intervention is None
    assert plain.ordering is plain.backend is None
    assert "ordering" not in repr(kind(method="sequential"))


@both
def test_an_option_means_the_same_of_an_object_a_copy_a_call_or_bound(lm, kind):
    is_chat = kind is ChatInvariant
    prompt = lm.chat_prompt(messages=[{"role": "user", "content": QUESTION}]) if is_chat else parse_marked(QUESTION)

    def written(**options):
        return lm.generate(prompt, **{"max_new_tokens": 12, **options}).text

    whole, sampling = written(), {"temperature": 2.0, "seed": 5, "top_k": 9, "top_p": 0.9}
    stop = whole[4:7]
    for given, expected in (
        ({"max_tokens": 3}, written(max_new_tokens=3)),
        (sampling, written(do_sample=True, **sampling)),
        ({"repetition_penalty": 3.0}, written(repetition_penalty=3.0)),
        ({"stop": stop}, whole[: whole.index(stop)]),
        ({"stop": [f"{whole[3]}never"]}, whole),
    ):
        fields = given if given.keys() <= kind.model_fields.keys() else {"generation_kwargs": given}
        model, own = kind(model=lm, max_tokens=12), kind(**{"model": lm, "max_tokens": 12, **fields})
        answers = [each.invoke(QUESTION) for each in (own, model.model_copy(update=fields), model.bind(**given))]
        answers += [own.invoke(QUESTION, num_beams=1), *(ask(model, QUESTION, **given) for ask in WAYS.values())]
        assert [*map(text, answers)] == [expected] * 10
    assert kind(stop=stop).stop == kind(stop=stop)._get_ls_params()["ls_stop"] == [stop]
    traced = model._get_ls_params(stop=stop, max_tokens=3, temperature=0.5)
    names = {"provider": "invariant-rag", "model_name": lm.name, "model_type": "chat" if is_chat else "llm"}
    expected = {**names, "max_tokens": 3, "temperature": 0.5, "stop": [stop]}
    assert traced == {f"ls_{name}": value for name, value in expected.items()}
    assert kind(generation_kwargs={"max_new_tokens": 3}).max_tokens == 3
    assert model.get_token_ids(QUESTION) == lm.tokenizer.encode(QUESTION, add_special_tokens=False)


def test_the_profile_is_known_without_weights_and_that_of_a_copy_is_its_own(lm):
    for name in (None, "native", EMBEDDED["generator"]):
        assert ChatInvariant(model=name).profile["max_input_tokens"] == InvariantModel.from_pretrained().context_window
    assert "max_input_tokens" not in ChatInvariant(model="some/model").profile
    assert ChatInvariant(base_url="http://127.0.0.1:9/v1").context_window is None
    chat = ChatInvariant(model=lm, max_tokens=5)
    assert (chat.profile["max_input_tokens"], chat.profile["max_output_tokens"]) == (4096, 5)
    assert chat.profile["tool_calling"]
    copied = chat.model_copy(update={"model": "native", "max_tokens": 7})
    assert copied.profile == ChatInvariant(model="native", max_tokens=7).profile != chat.profile
    given = ChatInvariant(model=lm, profile={"max_input_tokens": 3})
    assert given.model_copy(update={"max_tokens": 7}).profile == {"max_input_tokens": 3}


def test_a_model_can_be_saved_unless_it_is_in_memory_and_a_pickle_has_no_weights_that_have_a_name(lm):
    chat = ChatInvariant(model="some/model", max_tokens=7, temperature=0.5, stop="x")
    assert shared.loaded(chat, ChatInvariant).model_dump() == chat.model_dump()
    with pytest.raises(NotImplementedError):
        shared.loaded(ChatInvariant(model=lm), ChatInvariant)
    for model, size in ((None, 5000), (InvariantModel.from_pretrained(), 10**9)):
        chat = ChatInvariant(model=model, max_tokens=4)
        pickled = pickle.dumps(chat)
        here, there = (each.invoke(QUESTION, documents=DOCUMENTS) for each in (chat, pickle.loads(pickled)))
        assert (there.content, len(pickled) < size) == (here.content, True)


def test_weights_are_loaded_once_and_only_to_answer(monkeypatch, llm_cache):
    loads = []

    def load(name, **options):
        time.sleep(0.3)
        loads.append(name)
        return InvariantModel(copy.deepcopy(tiny_weights()), toy_tokenizer())

    monkeypatch.setattr(InvariantModel, "from_pretrained", load)
    for kind in (ChatInvariant, InvariantLLM):  # with a cache of LangChain too, for which weights are digested
        assert "unloaded" in str(kind(model="unloaded"))
    assert not loads
    most = ChatInvariant(model="configured").configurable_fields(max_tokens=ConfigurableField(id="most"))
    first = ChatInvariant(model="first", max_tokens=1)
    models = [InvariantLLM(model="bound").bind(max_tokens=1), InvariantLLM(model="between", max_tokens=1)]
    models += [most.with_config(configurable={"most": 1}), first, first.model_copy(update={"model": "second"})]
    for model in [*models, *models]:
        model.invoke(QUESTION)
    assert loads == ["bound", "between", "configured", "first", "second"]
    ordered = ChatInvariant(model="first", ordering="monot5")
    assert ordered.lm.ordering is ordered.model_copy().lm.ordering


@pytest.mark.parametrize(("branch", "alpha"), [("plain", 2.0), ("invariant", -2.0)])
def test_whoever_routes_to_the_plain_model_in_the_order_given_is_warned_whichever_answers(lm, branch, alpha):
    chat = ChatInvariant(model=lm.with_routing(alpha, plain_order="given"), max_tokens=8)
    with pytest.warns(OrderWarning, match="in the order given"):
        answers = [chat.invoke(QUESTION, documents=order) for order in ORDERS]
    assert {each.response_metadata["routing"]["branch"] for each in answers} == {branch}
    assert (len({each.text for each in answers}) > 1) == (branch == "plain")


def test_sorting_reads_scores_and_leaves_an_order_that_means_something_and_that_of_uploads(lm):
    scored = [{"page_content": f"number {n}", "metadata": {"score": float(n)}} for n in (2, 3, 1)]
    answer = ChatInvariant(model=lm, ordering="score", max_tokens=2).invoke(QUESTION, documents=scored)
    assert answer.response_metadata["order"] == [to_segment(scored[index]).content_hash for index in (2, 0, 1)]
    plain = ChatInvariant(model=lm, method="sequential", ordering="given", max_tokens=2)
    answer = plain.invoke([HumanMessage([*(to_block(to_segment(text)) for text in "cab"), QUESTION])])
    assert answer.response_metadata["order"] == [to_segment(text).content_hash for text in "cab"]
    uploads = [{"type": "text-plain", "mime_type": "text/plain", "text": text} for text in "cab"]
    chat = ChatInvariant(model=lm, max_tokens=8)
    one, other = (chat.invoke([HumanMessage([*listed, QUESTION])]) for listed in (uploads, uploads[::-1]))
    assert one.content != other.content
    assert {each.response_metadata["invariant"] for each in (one, other)} == {None}


# --- keys of LangChain's cache --------------------------------------------------------------------------------------

READER = Reader()
ALIKE = [Document("same", metadata={"n": 2}), Document("same", metadata={"n": 1}), Document("other")]


@pytest.mark.parametrize("kind", MAKE)
def test_the_cache_answers_the_same_set_in_another_order_also_where_texts_are_equal(lm, llm_cache, kind):
    model = MAKE[kind](lm)
    for count, documents in enumerate((DOCUMENTS, ALIKE), 1):
        for order in permutations(documents):
            model.invoke(QUESTION, documents=order)
        assert len(llm_cache._cache) == count
    assert len(getattr(model.model, "requests", ())) == {"canonical": 2, "vote": 10}.get(kind, 0)
    for generation, *_ in llm_cache._cache.values():
        kept = getattr(generation, "message", generation)
        setattr(kept, "text" if kept is generation else "content", "from the cache")
    for way, order in zip(("invoke", "ainvoke", "batch", "abatch"), ORDERS, strict=False):
        assert text(WAYS[way](model, QUESTION, documents=order)) == "from the cache"
    if kind in ("chat", "completion"):
        unsorted = model.model_copy(update={"sort_segments": False})
        assert text(unsorted.invoke(QUESTION, documents=ORDERS[5])) != "from the cache"


def test_every_parameter_that_changes_the_output_is_in_the_key_and_in_traces(lm):
    changes = [
        {}, {"method": "pine", "ordering": "lexical"}, {"ordering": "frequency"}, {"ordering": "score"},
        {"backend": "reference"}, {"max_segment_tokens": 9}, {"overflow": "drop_last"}, {"max_tokens": 3},
        {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 5}, {"seed": 1}, {"stop": ["a"]}, {"n": 2},
        {"generation_kwargs": {"repetition_penalty": 2.0}}, {"batch_size": 3}, {"micro_batching": True},
        {"template_kwargs": {"enable_thinking": True}}, {"logprobs": True}, {"top_logprobs": 2}, {"citations": True},
        {"model": lm.with_routing(0.2)}, {"model": lm.with_routing(0.3)},
    ]  # fmt: skip
    models = [ChatInvariant(**{"model": lm, **change}) for change in changes]
    assert {"template_kwargs", "n", "logprobs", "top_logprobs", "citations"} < {*models[0]._get_invocation_params()}
    models += [ChatInvariant(), ChatInvariant(model="native"), ChatInvariant(dtype="bfloat16")]
    models += [vote(READER, **options) for options in ({}, {"votes": 2}, {"seed": 1}, {"answer_of": str})]
    models += [vote(READER, ordering="frequency"), canonical(READER)]
    assert len({each._get_llm_string() for each in models}) == len(models)


@both
def test_every_keyword_of_a_call_that_changes_the_output_is_in_the_key(lm, llm_cache, kind):
    model = kind(model=lm, max_tokens=2)
    changes = [
        {}, {"max_tokens": 3}, {"temperature": 0.5}, {"top_p": 0.5}, {"top_k": 3}, {"seed": 3}, {"stop": ["a"]},
        {"repetition_penalty": 2.0}, {"documents": DOCUMENTS[:1]}, {"model": lm.with_method("pine")},
        {"documents": ["ab", "c"]}, {"documents": ["a", "bc"]}, {"documents": ["abc"]},
    ]  # fmt: skip
    if kind is ChatInvariant:
        changes += [{"logprobs": True}]
        changes += [{"tools": [each], "tool_choice": "none"} for each in (shared.search, shared.now)]
    for number, change in enumerate(changes, start=1):
        assert len({text(model.invoke(QUESTION, **change)) for _ in range(2)}) == 1
        assert len(llm_cache._cache) == number


@both
def test_models_of_one_name_never_exchange_answers_but_those_with_a_cache_of_keys_and_values(lm, llm_cache, kind):
    own = copy.deepcopy(lm)
    own.model.lm_head.weight.data[100:] *= -1.0
    model, asked, entries = kind(model=lm, max_tokens=6), set(), 2 if kind is ChatInvariant else 1
    for count, each in enumerate((lm, own), 1):
        models = [kind(model=each, max_tokens=6), kind(model=each, max_tokens=6, key_value_cache=KeyValueCache())]
        answers = [*(one.invoke(QUESTION) for one in models), model.invoke(QUESTION, model=each)]
        (answer,) = set(map(text, answers))
        asked.add(answer)
        assert (len(asked), len(llm_cache._cache)) == (count, entries * count)  # for a chat, one of the call's model


# --- what is refused, and what is ignored ---------------------------------------------------------------------------

OF_A_CALL = {
    "documents": [3, "text", iter(["a"]), [3], {"page_content": "a"}, [None], [b"x"], DOCUMENTS[0]],
    "max_tokens": [-1, 0, "3", 1.5, True],
    "stop": [1, [3], math.nan, object()],
    "model": [3, "no/such-model", b"x"],
    **{name: ["x"] for name in ("top_k", "seed", "num_beams", "no_such_option")},  # the core's
    **{name: ["x", -1] for name in ("temperature", "top_p")},  # also of greedy decoding
    "top_logprobs": [-1, "x", 1.5],
    "template_kwargs": [3, "x", [1], {"no_such_variable": 1}],
    "tools": [1, "x", [3], {"a": 1}],
    "tool_choice": [3, {"type": "x"}, "find", ["a"]],
    "json_schema": [3, "x", "{", "[]"],
}


@both
@pytest.mark.parametrize("name", OF_A_CALL)
def test_keywords_of_a_call_are_refused(lm, kind, name):
    model = kind(model=lm, max_tokens=2)
    for value in OF_A_CALL[name]:
        for ask in (model.invoke, lambda *asked, **how: list(model.stream(*asked, **how))):
            with pytest.raises((errors.InvariantRAGError, ValidationError)):  # pydantic's: of a changed field
                ask(QUESTION, **{name: value})


WITHOUT_CONTEXT = ChatPromptTemplate.from_template("{x}")
IMAGE, NO_SEGMENT = {"type": "image", "url": "a.png"}, {"type": "text-plain", "extras": {"segment": True}, "text": 3}
REFUSALS = [
    (errors.InvalidOption, "n: ", lambda g: g.chat.invoke(QUESTION, n=0)),
    (errors.InvalidPrompt, "at least one message", lambda g: g.chat.invoke([])),
    (errors.InvalidPrompt, "at least one message", lambda g: g.chat.invoke([AIMessage("")])),
    (errors.InvalidPrompt, "type 'image'", lambda g: g.chat.invoke([HumanMessage([IMAGE])])),
    (errors.InvalidSegment, "a mapping of", lambda g: g.chat.invoke([HumanMessage([NO_SEGMENT])])),
    (errors.InvalidTool, "list of tools", lambda g: g.chat.bind_tools(3)),
    (errors.InvalidTool, "Unsupported function", lambda g: g.chat.bind_tools([3])),
    (errors.InvalidTool, "tool_choice: ", lambda g: g.chat.bind_tools([], tool_choice={"type": "x"})),
    (errors.InvalidSchema, "Unsupported function", lambda g: g.chat.with_structured_output(3)),
    (errors.UnknownName, "method of structured", lambda g: g.chat.with_structured_output(BaseModel, method="x")),
    (errors.InvalidChoice, "votes", lambda _: vote(Reader(), votes=0)),
    (errors.InvalidChoice, "seed", lambda _: vote(Reader(), seed="x")),
    (ValidationError, "answer_of", lambda _: vote(Reader(), answer_of=3)),
    (errors.UnknownName, "ordering", lambda _: vote(FakeListLLM(responses=["a"]), ordering="x")),
    (errors.UnsupportedCombination, "got 'given'", lambda _: canonical(Reader(), ordering="given")),
    (errors.UnsupportedModel, "got str", lambda _: canonical("gpt-4")),
    (ValidationError, "retriever", lambda _: ours.as_segments(3)),
    (ValidationError, "join_by", lambda _: ours.as_segments(Listed(documents=[]), join_by=3)),
    (ValidationError, "retriever", lambda _: ours.InvariantRetriever(retriever=3)),
    (errors.InvalidSegment, "list of documents", lambda _: ours.InvariantRetriever.from_documents("abc")),
    (errors.RetrievalError, "an embedder", lambda _: ours.InvariantRetriever.from_documents(["a"], embedder=3)),
    (errors.InvalidChoice, "retriever", lambda _: ours.InvariantRAGMiddleware(3)),
    (errors.InvalidPrompt, "prompt", lambda g: ours.create_invariant_documents_chain(g.chat, 3)),
    (errors.InvalidPrompt, "'context'", lambda g: ours.create_invariant_documents_chain(g.chat, WITHOUT_CONTEXT)),
    (ValidationError, "variable_name", lambda _: ours.SegmentsPlaceholder(3)),
    (errors.InvalidSegment, "got NoneType", lambda _: PLACEHOLDER.invoke({"context": None, "question": "b"})),
    (errors.InvalidSegment, "got int", lambda _: str(ours.Segments([3]))),
    (errors.InvalidChoice, "batch_size", lambda _: ours.InvariantEmbeddings(batch_size=0)),
    (InvariantContextOverflowError, "4096", lambda g: g.remote.invoke("word " * 5000)),
    (errors.UnsupportedCombination, "num_beams", lambda g: g.remote.invoke(QUESTION, num_beams=2)),
    (errors.UnsupportedCombination, "base_url", lambda g: g.remote.lm),
    (errors.RemoteError, "small", lambda g: g.remote.invoke(QUESTION, model="large")),
    (errors.InvalidTool, "search", lambda g: g.remote.invoke(QUESTION, tool_choice="search", tools=[shared.now])),
    (errors.UnsupportedCombination, "model", lambda g: ChatInvariant(base_url=g.url, model=g.chat.model)),
    (errors.UnsupportedCombination, "dtype", lambda g: ChatInvariant(base_url=g.url, dtype="float32")),
    (errors.UnsupportedCombination, "key_value_cache", lambda g: ChatInvariant(
        base_url=g.url, key_value_cache=KeyValueCache())),
    (ValidationError, "method", lambda g: ChatInvariant(base_url=g.url, method="no")),
]  # fmt: skip


@pytest.mark.parametrize(("error", "told", "call"), REFUSALS)
def test_arguments_of_every_other_door_and_what_a_server_cannot_do_are_refused(lm, base_url, error, told, call):
    chat, remote = ChatInvariant(model=lm, max_tokens=2), ChatInvariant(base_url=base_url, max_tokens=16)
    with pytest.raises(error, match=told):
        call(SimpleNamespace(chat=chat, remote=remote, url=base_url))


@both
def test_parameters_are_refused_when_a_model_is_built_or_copied(lm, kind):
    for options, error, message in (
        ({"method": "rotr"}, errors.UnknownName, "unknown method 'rotr'; choose from"),
        ({"ordering": "x"}, errors.UnknownName, "unknown ordering 'x'; choose from"),
        ({"backend": "x"}, errors.UnknownName, "unknown backend 'x'; choose from"),
        ({"model": 3}, ValueError, "expected a hub id, a folder or an InvariantModel, got int"),
        ({"model": lm, "dtype": "bfloat16"}, errors.UnsupportedCombination, "dtype"),
        ({"model_name": "native", "model": "native"}, errors.UnsupportedCombination, "got both"),
        ({"max_new_tokens": 3}, errors.UnknownParameter, "did you mean .*'max_tokens'"),
    ):
        with pytest.raises(ValidationError if error in (errors.UnknownName, ValueError) else error, match=message):
            kind(**options)
        with pytest.raises(error, match=message):
            kind().model_copy(update=options)
    for options in ({"overflow": "x"}, {"max_tokens": 0}, {"temperature": "x"}, {"top_p": "x"}, {"batch_size": 0}):
        with pytest.raises(ValidationError):
            kind(**options)


@pytest.mark.parametrize("given", [{"api_key": "x", "max_retries": 2, "timeout": 3}, {"timeout": 300.0}])
def test_parameters_of_remote_models_are_ignored_with_a_word_also_at_their_defaults(given, caplog):
    for make in (ChatInvariant, lambda **given: ChatInvariant().model_copy(update=given)):
        caplog.clear()
        make(**given)
        assert f"ChatInvariant runs on this machine and has no {', '.join(given)}: ignored" in caplog.text
