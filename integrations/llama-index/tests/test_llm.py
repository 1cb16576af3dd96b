"""InvariantLLM: its eight methods, what arrives and what they report, and how it is built and copied."""

import asyncio
import copy
import pickle
import time

import pytest
from cases import EIGHT, ORDERS, QUERY, TEXTS, asked
from framework_cases import caught, tiny_weights
from invariant_rag import InvariantModel, KeyValueCache, Prompt, Segment, SegmentSet, errors
from invariant_rag.methods import resolve_method
from invariant_rag.prompts import mark
from invariant_rag.segments import document_rendering
from llama_index.core.base.llms import types
from llama_index.core.extractors import SummaryExtractor
from llama_index.core.ingestion.pipeline import get_transformation_hash
from llama_index.core.llms import ChatMessage, TextBlock
from responses import consumed, pieces_of, read, same, text_of

from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock


def answer(llm, name, order=(0, 1, 2), **kwargs):
    """Return the text of the answer, what was read, and the counts that callbacks are told."""
    text, response = read(getattr(llm, name)(asked(name, order), **kwargs))
    return text, response.raw, response.additional_kwargs


def expected(lm, name, **kwargs):
    """What the engine itself answers."""
    prompt = Prompt("Read:\n", SegmentSet(TEXTS), f"\n{QUERY}\n", rendering=document_rendering)
    if name.endswith("chat"):
        user = {"role": "user", "content": [SegmentSet(TEXTS), QUERY]}
        prompt = lm.chat_prompt(messages=[{"role": "system", "content": "Be brief."}, user])
    return lm.generate(prompt, **{"max_new_tokens": 8, **kwargs}).text


@pytest.fixture(scope="module")
def folder(tmp_path_factory, lm):
    """The tiny model, saved."""
    place = tmp_path_factory.mktemp("tiny")
    lm.model.save_pretrained(place)
    lm.tokenizer.save_pretrained(place)
    return place


# --- the eight methods ---


@pytest.mark.parametrize("name", EIGHT)
def test_each_method_says_what_the_engine_says_and_tells_that_it_starts_and_ends(llm, plain_llm, lm, told, name):
    text, raw, counts = answer(llm, name)
    kind, (start, *_, end) = "Chat" if name.endswith("chat") else "Completion", told.events
    progress = [f"LLM{kind}InProgress"] if "stream" in name else []
    assert told.names == [f"LLM{kind}Start", *progress, f"LLM{kind}End"]
    assert (end.response.raw, end.span_id, start.span_id is None) == (raw, start.span_id, False)
    assert text_of(end.response) == text
    assert (start.model_dict["method"], start.model_dict["ordering"]) == ("rotor", "lexical")
    assert start.model_dump(mode="json")
    assert same(lambda order: answer(llm, name, order)) == (text, raw, counts)
    assert text == expected(lm, name)
    assert counts == raw["usage"]
    assert counts["total_tokens"] == counts["prompt_tokens"] + counts["completion_tokens"]
    assert (counts["completion_tokens"], counts["cached_tokens"], raw["finish_reason"]) == (8, 0, "length")
    assert (raw["sets"], raw["invariant"], raw["dropped"], raw["trimmed"]) == ([3], True, [], [])
    assert {*raw["order"]} == {Segment(text).content_hash for text in TEXTS}
    assert len({answer(plain_llm, name, order)[0] for order in ORDERS[::5]}) > 1
    if "stream" in name:
        pieces = asyncio.run(pieces_of(getattr(llm, name)(asked(name))))
        assert [each.raw is None for each in pieces] == [True] * (len(pieces) - 1) + [False]
        written = ["".join(each.delta for each in pieces[: i + 1]) for i in range(len(pieces))]
        assert list(map(text_of, pieces)) == written


@pytest.mark.parametrize("name", EIGHT)
def test_each_method_takes_keywords_for_one_call(llm, lm, name):
    options = {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "seed": 3}
    renamed = InvariantLLM(lm, generation_kwargs={"max_new_tokens": 3})
    assert renamed.metadata.num_output == 3
    whole, sampled = expected(lm, name), expected(lm, name, do_sample=True, **options)
    assert answer(llm, name, **options)[0] == answer(InvariantLLM(lm, max_tokens=8, **options), name)[0] == sampled
    assert sampled != whole
    assert answer(llm, name, repetition_penalty=3.0)[0] == expected(lm, name, repetition_penalty=3.0)
    stopping = InvariantLLM(lm, max_tokens=8, generation_kwargs={"stop": [whole[3:5]]})
    assert answer(stopping, name, stop=[])[0] == whole
    assert answer(llm, name, stop=["never", whole[3:5]])[0] == whole[: whole.index(whole[3:5])]
    short = expected(lm, name, max_new_tokens=3)
    assert answer(llm, name, max_new_tokens=3)[0] == answer(renamed, name)[0] == short


async def test_the_event_loop_goes_on_and_concurrent_calls_do_not_mix(llm, lm):
    names, ticks = [name for name in EIGHT if name.startswith("a")] * 2, []

    async def tick():
        while True:
            await asyncio.sleep(0.001)
            ticks.append(None)

    ticking = asyncio.create_task(tick())
    found = await asyncio.gather(*(consumed(getattr(llm, name)(asked(name))) for name in names))
    ticking.cancel()
    assert [text for text, _ in found] == [expected(lm, name) for name in names]
    assert len(ticks) > len(names)


async def test_leaving_a_stream_and_cancelling_a_call_end_the_generation(llm, lm):
    pieces = await llm.astream_complete(QUERY, max_tokens=3000)
    await anext(pieces)
    await pieces.aclose()
    task = asyncio.create_task(llm.acomplete(QUERY, max_tokens=3000))
    await asyncio.sleep(0.3)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    start = time.perf_counter()
    await asyncio.to_thread(lm.generate, Prompt(suffix="x"), max_new_tokens=1)  # waits for the model
    assert time.perf_counter() - start < 4


# --- what arrives ---

FERRY = Segment("It leaves at noon.", title="Ferry")
CARRIERS = {
    "a block": SegmentBlock.of(FERRY),
    "a block with a score": SegmentBlock.of(Segment(FERRY.text, title="Ferry", score=0.5)),
    "a citable block": types.CitableBlock(title="Ferry", source="x", content=[TextBlock(text=FERRY.text)]),
    "a document": types.DocumentBlock(data=FERRY.text.encode(), title="Ferry", document_mimetype="text/plain"),
    "a mark": mark(FERRY),
    "a mark in a set": mark(FERRY, 1),
}


def content(llm, *messages):
    """Return what the model is asked: roles, with texts, and segments one by one."""
    parts = [(one["role"], one["content"]) for one in llm._chat_call(messages, {}).request.messages]
    return [
        (role, [each for part in listed for each in ([part] if isinstance(part, str) else part) if each])
        for role, listed in parts
    ]


@pytest.mark.parametrize("name", CARRIERS)
def test_a_segment_arrives_by_every_carrier(llm, name):
    carrier, score = CARRIERS[name], 0.5 if "score" in name else None
    if isinstance(carrier, str):
        message = ChatMessage(f"Read: {carrier}{QUERY}")
    else:
        message = ChatMessage(blocks=[TextBlock(text="Read: "), carrier, TextBlock(text=QUERY)])
    assert content(llm, message) == [("user", ["Read: ", Segment(FERRY.text, title="Ferry", score=score), QUERY])]
    restored = ChatMessage.model_validate_json(message.model_dump_json())
    assert SegmentBlock not in map(type, restored.blocks), "it is a citable block to everyone else"
    assert content(llm, restored) == [("user", ["Read: ", FERRY, QUERY])]


def test_texts_and_roles_are_joined_as_llama_index_joins_them(llm):
    silent = [types.CachePoint(cache_control=types.CacheControl(type="x")), types.ThinkingBlock(content="hm")]
    message = ChatMessage(blocks=[*silent, TextBlock(text="a"), TextBlock(text="b")])
    assert content(llm, message) == [("user", [message.content])]
    messages = [ChatMessage("x", role=role) for role in ("developer", "system", "user", "user", "model")]
    found = [(role, "".join(parts)) for role, parts in content(llm, *messages)]
    assert found == [("system", "x\n\nx"), ("user", "x\n\nx"), ("assistant", "x")]


MARKED = [mark(text, 3) for text in TEXTS]


def test_marks_that_arrive_whole_are_a_set_and_others_warn(llm):
    for text, sets, warns in (
        ("Read: " + "\n\n".join(MARKED), [3], False),
        (str(MARKED), [], True),  # escaped, they are no marks
        (str(MARKED[::-1]), [], True),
        ("".join(MARKED)[5:], [2], True),
        (MARKED[0], [1], True),
        ("Icons: \ue200cite\ue202turn0 \ue201 \ueca0.", [], False),  # characters of others
    ):
        response, messages = caught(llm.complete, text + QUERY)
        assert (response.raw["sets"], bool(messages)) == (sets, warns)


# --- what is reported ---


@pytest.mark.parametrize(("alpha", "branch"), [(2.0, "plain"), (-2.0, "invariant")])
def test_a_routed_model_is_a_model(lm, alpha, branch):
    routed = InvariantLLM(lm.with_routing(alpha, plain_order="canonical"), max_tokens=8)
    kept = InvariantLLM(getattr(routed.lm, f"{branch}_branch"), max_tokens=8)
    for name in ("chat", "stream_chat"):
        text, raw, _ = answer(routed, name)
        assert (text, raw["routing"]["branch"]) == (answer(kept, "chat")[0], branch)
    response, (message,) = caught(InvariantLLM(lm.with_routing(alpha), max_tokens=2).chat, asked("chat"))
    assert ("router" in message, response.raw["invariant"]) == (True, False)


def test_what_did_not_fit_and_what_was_cached_is_reported_in_every_order(lm, llm):
    texts = [text * (40 + 10 * i) for i, text in enumerate(TEXTS)]  # together more than the context window
    for overflow, changed in (("drop_last", "dropped"), ("trim_segments", "trimmed")):
        small = InvariantLLM(lm.with_method(overflow=overflow), max_tokens=1)
        raw = same(lambda order, small=small: small.chat(asked("chat", order, texts)).raw, ORDERS[::2])
        assert {Segment(text).content_hash for text in texts} == {*raw["order"], *raw["dropped"]}
        assert raw[changed]
    cached = InvariantLLM(lm, key_value_cache=KeyValueCache(), max_tokens=8)
    answers = [answer(each, "chat", order) for each, order in zip((llm, *[cached] * 3), ORDERS, strict=False)]
    cold, *_, again, last = [counts["cached_tokens"] for *_, counts in answers]
    assert (cold, again == last > sum(map(len, TEXTS))) == (0, True)
    assert len({text for text, *_ in answers}) == 1


# --- how it is built ---


def test_a_folder_is_loaded_as_it_says(folder):
    lm = InvariantLLM(folder, method="pine", ordering="frequency", overflow="drop_last", max_segment_tokens=9).lm
    chosen = (lm.method.name, lm.ordering.name, lm.overflow, lm.max_segment_tokens)
    assert chosen == ("pine", "frequency", "drop_last", 9)
    for method in ("rotor", "sequential"):
        llm = InvariantLLM(folder, method=method)
        own = resolve_method(method).default_ordering
        assert (llm.ordering, llm.lm.ordering.name, llm.to_payload()["ordering"]) == (None, own, own)
    default = InvariantModel.from_pretrained().generate(Prompt(suffix="Hello"), max_new_tokens=4).text
    assert InvariantLLM(max_tokens=4).complete("Hello").text == default


def test_metadata_needs_no_weights_and_can_be_set(folder, tmp_path, lm):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    llm = InvariantLLM(tmp_path, max_tokens=7)
    said = llm.metadata
    assert (said.context_window, said.num_output, said.is_chat_model, said.model_name) == (4096, 7, True, str(tmp_path))
    assert said.is_function_calling_model
    with pytest.raises(errors.ModelNotFound, match=str(tmp_path)):
        llm.complete("Hello")
    said = InvariantLLM(lm, context_window=512, is_function_calling_model=False).metadata
    assert (said.context_window, said.is_function_calling_model) == (512, False)
    chosen = InvariantLLM(lm.with_method("pine", ordering="frequency"))
    assert (chosen.method, chosen.ordering, chosen.metadata.context_window) == ("pine", "frequency", 4096)


def test_dictionaries_pickles_and_copies_answer_alike(folder):
    cache = KeyValueCache()
    options = {"method": "pine", "ordering": "frequency", "max_tokens": 5, "stop": ["zz"], "temperature": 0.5}
    llm = InvariantLLM(folder, cache, seed=1, **options)
    others = [InvariantLLM.from_dict(llm.to_dict()), pickle.loads(pickle.dumps(llm))]
    for other in (*others, copy.deepcopy(llm), llm.model_copy()):
        assert other.to_dict() == llm.to_dict()
        assert other.complete(asked("complete")).text == llm.complete(asked("complete")).text
    assert all(each.lm.cache is None for each in others)
    assert llm.lm.cache is copy.deepcopy(llm).lm.cache is llm.model_copy().lm.cache is cache
    assert copy.deepcopy(llm).lm is llm.lm
    assert len(pickle.dumps(llm)) < 5000  # no weights
    assert llm.model_copy(update={"max_tokens": 3}).complete("Hello").raw["usage"]["completion_tokens"] == 3


def test_keys_of_caches_tell_models_in_memory_apart(lm):
    def key(lm):
        return get_transformation_hash([], SummaryExtractor(llm=InvariantLLM(lm, max_tokens=8)))

    other = copy.deepcopy(tiny_weights())
    other.lm_head.weight.data += 1
    others = [InvariantModel(other, lm.tokenizer), lm.with_method(max_segment_tokens=5)]
    assert key(lm) == key(InvariantModel(tiny_weights(), lm.tokenizer)) not in {*map(key, others)}
    assert len({*map(key, others)}) == 2
