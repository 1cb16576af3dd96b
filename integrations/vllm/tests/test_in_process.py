"""vLLM in this process answers as `InvariantModel.generate` does, whatever else is in a batch, and when preempted.

Its prefix cache keeps plain keys, arranged ones, those of different sets and those of tenants apart. Log-probabilities
tell: rounding moves them by 1e-5, and keys of another arrangement by 0.01 and more. What runs on an `InvariantModel`
runs on vLLM by changing the model line: frameworks, objects of a schema, calls.
"""

import random
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from itertools import pairwise, permutations
from threading import Event
from typing import Annotated, Literal

import pytest
from invariant_rag import KeyValueCache, MicroBatcher, Prompt, SegmentSet
from invariant_rag.audit import Question, audit
from invariant_rag.errors import IncompleteObject, InvalidChoice, InvalidOption, UnsupportedCombination
from invariant_rag.generation.answering import Answering
from invariant_rag.generation.answers import AnswerRequest
from invariant_rag.generation.digest import model_digest
from invariant_rag.generation.structured import Tool, constrain, generate_structured
from invariant_rag.methods import APE, METHODS
from langchain_invariant_rag import ChatInvariant, InvariantLLM
from langchain_invariant_rag.documents import to_block
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.llms.invariant_rag import InvariantLLM as LlamaIndexLLM
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer
from pydantic import BaseModel, Field

from tests.conftest import LENGTH, MOVED, Pair, ask, documents, moved, question
from vllm_invariant_rag import RequestRefused, VLLMBackend, sampling

SAMPLED = {"do_sample": True, "temperature": 2.0, "top_k": 0, **LENGTH}


class Flag(BaseModel):
    place: str = Field(max_length=20)
    colour: Literal["red", "green", "blue", "orange"]
    founded: int = Field(ge=1000, le=1999)
    names: list[Annotated[str, Field(max_length=8)]] = Field(max_length=2)


TOOLS = [
    Tool("search", "Search for a text.", {"properties": {"query": {"type": "string", "maxLength": 12}}}),
    Tool("measure", "Measure a way.", {"properties": {"miles": {"type": "integer", "maximum": 99}}}),
]


@pytest.fixture(params=["in process", "over HTTP"])
def either(request, pair, on_server):
    return pair if request.param == "in process" else Pair(pair.here, on_server)


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_gives_the_tokens_of_generate_cold_and_from_prefixes_that_end_inside_a_set(method, pair):
    segments = [documents(count, seed=count) for count in (5, 9)]
    prompts = [ask(pair.here, each, asked) for each in segments for asked in (None, "How long is it?")]
    one, two = (SegmentSet(documents(3, seed)) for seed in (80, 81))
    prompts.append(Prompt.of("Documents: ", one, "\nMore: ", two, "\nWhat colour is the flag?"))
    for _ in range(2):
        cached = [each.usage.cached_tokens for each in pair.using(method).alike(*prompts)]
        # Whole blocks are found again, but for those of PINE, which ranks by the queries of whole segments.
        assert method == "sequential" or all(each % 32 == 0 for each in cached)
    assert all((each > 0) == (method not in {"pine", "pine-reverse"}) for each in cached)


@pytest.mark.parametrize("method", ["rotor", "isolated", "pine-in-place"])
def test_blocks_are_read_again_up_to_inside_the_last_segment_and_never_for_equal_tokens_in_other_sets(method, pair):
    """In RoToR the first segments attend to those behind them, too."""
    for cuts, suffix, cached in (
        ((30, 70, 110, 150, 190, 195), [8, 9], 0),
        ((30, 70, 110, 150, 190, 195), [10, 11], 160),  # five blocks, of 168 tokens
        *(((30, 70, 110, 150), [8, 9], 0), ((30, 70, 110, 150, 190), [8, 9], 0), ((30, 70, 110, 150), [8, 9], 96)),
        *(((30, 94, 150), [8, 9], 0), ((30, 70, 150), [8, 9], 0)),
    ):
        segments = [list(range(start, stop)) for start, stop in pairwise(cuts)]
        (answer,) = pair.using(method, "given").alike(Prompt(prefix=[5, 6, 7], segments=segments, suffix=suffix))
        assert answer.usage.cached_tokens == cached, (cuts, suffix)


def test_segments_of_any_number_and_length_give_the_tokens_of_generate(pair):
    pair.alike(*[pair.prompt(count, count) for count in range(31)])
    pair.using("isolated").alike(*[pair.prompt(70, count) for count in (0, 1, 3, 8)])
    tokens = random.Random(5)
    for lengths in ((32, 32, 32), (1, 31, 33, 64), (2,) * 60, (0, 5, 100, 0)):  # blocks of 32; and a long text before
        segments = [tokens.choices(range(5, 250), k=length) for length in lengths]
        prompt = Prompt(prefix=tokens.choices(range(5, 250), k=200), segments=segments, suffix=[8, 9])
        pair.using("rotor", "given").alike(prompt)


def test_all_orders_of_four_documents_give_the_same_answer_and_are_read_once(pair):
    answers = [pair.alike(ask(pair.here, order))[0] for order in permutations(documents(4, seed=40))]
    assert [each.usage.cached_tokens > 0 for each in answers] == [False] + [True] * 23


def test_requests_of_all_methods_do_not_meet_in_one_step_and_in_the_cache(pair):
    prompt, cases = pair.prompt(800), []
    for method in METHODS:
        chosen = pair.using(method)
        request = chosen.request(prompt, min_tokens=16, temperature=0.0, ignore_eos=True)
        cases.append((request, chosen.here.generate(prompt, **LENGTH), chosen.most_moved(prompt, **LENGTH)))
    for _ in range(2):
        answers = pair.there._engine.complete([request for request, *_ in cases])
        for (completion,), (_, expected, far) in zip(answers, cases, strict=True):
            assert tuple(completion.token_ids) == expected.token_ids
            assert completion.logprobs == pytest.approx(expected.logprobs, abs=far)


@pytest.mark.parametrize("method", ["rotor", "set-based", "pine"])
def test_preempted_requests_resume_with_their_sets(method, pair, core, monkeypatch):
    """Requests that need several times the blocks that there are."""
    preempt, preempted = core.scheduler._preempt_request, []
    seen = lambda *args, **more: (preempted.append(args), preempt(*args, **more))[1]  # noqa: E731
    monkeypatch.setattr(core.scheduler, "_preempt_request", seen)
    prompts = [pair.prompt(100 + index, 10) for index in range(5)]
    pair.using(method).alike(*prompts, max_new_tokens=160, min_new_tokens=160)
    assert preempted


MIXED = {  # methods, how many documents the sets have, and of how many requests each call is
    "here": (["rotor", "isolated", "sequential", "pine-in-place"], [*range(9)] * 2, [40] * 25),
    "over HTTP": ("rotor isolated set-based sequential ape structured pine".split(), [*range(6), 8, 10, 20], [1] * 200),
}


def test_mixed_requests_of_sixteen_threads_get_the_answers_that_they_get_alone(either, pair):
    """In random orders, and plain prompts among them; those of this process have 64 blocks."""
    methods, counts, calls = MIXED["here" if either is pair else "over HTTP"]
    rng, sets = random.Random(20), [documents(each, 700 + seed) for seed, each in enumerate(counts)]
    asked = [(rng.choice(methods), rng.choices(range(len(sets)), k=count)) for count in calls]

    @cache
    def expected(method, number):
        return pair.using(method).here.generate(ask(pair.here, sets[number]), max_new_tokens=8).token_ids

    def answers(method, numbers):
        prompts = [ask(pair.here, random.sample(sets[number], len(sets[number]))) for number in numbers]
        return [each.token_ids for each in either.using(method).there.generate(prompts, max_new_tokens=8)]

    with ThreadPoolExecutor(16) as clients:
        for (method, numbers), found in zip(asked, clients.map(answers, *zip(*asked, strict=True)), strict=True):
            assert found == [expected(method, number) for number in numbers], (method, numbers)


def test_a_stream_is_the_text_of_generate_and_a_closed_one_ends_its_request(pair):
    prompt = pair.prompt(90)
    (expected,), stream = pair.alike(prompt), pair.there.stream(prompt, **LENGTH)
    pieces = list(stream)
    assert len(pieces) > 3
    assert "".join(pieces) == stream.generation.text
    assert moved(stream.generation, expected) < MOVED
    closed = pair.there.stream(prompt, max_new_tokens=600, min_new_tokens=600)
    next(closed)
    closed.close()
    pair.alike(prompt)
    ((cut,),) = pair.there._engine.complete([pair.request(prompt, 600, ignore_eos=True)], stopped=lambda: True)
    assert cut.token_ids == []
    assert not pair.there._engine._engine.has_unfinished_requests()


@pytest.mark.parametrize("options", [{}, {"stop_strings": ["."]}, {"stop_strings": "and"}, {"repetition_penalty": 1.3}])
def test_answers_end_where_those_of_generate_end(options, pair):
    pair.alike(pair.prompt(92, 4), max_new_tokens=24, min_new_tokens=None, **options)


def test_samples_have_seeds_of_their_own_and_repeat_in_every_order(pair):
    segments, on_vllm = documents(4, seed=61), pair.there
    orders = [ask(pair.here, order) for order in (segments, segments[::-1], segments)]
    alone = [on_vllm.generate(orders[0], seed=seed, **SAMPLED).token_ids for seed in (1, 2)]
    assert alone[0] != alone[1]
    together = on_vllm.generate(orders, seed=[1, 2, 1], **SAMPLED)
    assert [each.token_ids for each in together] == [alone[0], alone[1], alone[0]]
    with pytest.raises(InvalidOption, match="one for each of 3 prompts, got 2"):
        on_vllm.generate(orders, seed=[1, 2], **SAMPLED)
    answers = on_vllm.generate(orders[0], num_return_sequences=3, **SAMPLED)
    assert len({answer.token_ids for answer in answers}) == len(answers) == 3
    assert all(len(answer.token_ids) == len(answer.logprobs) == 16 for answer in answers)


def test_scores_are_those_of_score(pair):
    prompt, candidates = pair.prompt(94), ["red and white", "red and black", "blue", "33 miles long"]
    expected = pair.here.score(prompt, candidates)
    assert pair.there.score(prompt, candidates) == pytest.approx(expected, abs=MOVED)
    assert pair.there.score(prompt, []) == []


def with_another(lm):
    options = constrain(lm, Flag)
    return {**options, "logits_processor": [*options["logits_processor"], print]}


ONE = Prompt(suffix=[5])
REFUSED = [
    (InvalidChoice, "either url", lambda lm, on, llm: VLLMBackend(lm)),
    (InvalidChoice, "or llm", lambda lm, on, llm: VLLMBackend(lm, url="http://127.0.0.1:1", llm=llm)),
    (InvalidChoice, "RoutedModel", lambda lm, on, llm: VLLMBackend(lm.with_routing(), llm=llm)),
    (InvalidChoice, "tenant", lambda lm, on, llm: on.with_tenant("\ud800")),
    (UnsupportedCombination, "routing", lambda lm, on, llm: on.with_routing()),
    (UnsupportedCombination, "no inter", lambda lm, on, llm: on.with_method("sequential", intervention="ms-poe")),
    (UnsupportedCombination, "a forward pass", lambda lm, on, llm: on.logits(ONE)),
    (UnsupportedCombination, "in this process", lambda lm, on, llm: on.arranged([]).__enter__()),
    (UnsupportedCombination, "no cache of our", lambda lm, on, llm: VLLMBackend(lm, llm=llm, cache=KeyValueCache(1))),
    (UnsupportedCombination, "own parameters", lambda lm, on, llm: on.with_method(APE(temperature=0.5))),
    (UnsupportedCombination, "num_beams", lambda lm, on, llm: on.generate(ONE, num_beams=2)),
    (UnsupportedCombination, "no_repeat_ngram_size", lambda lm, on, llm: on.generate(ONE, no_repeat_ngram_size=2)),
    (UnsupportedCombination, "do_sample=True for 2", lambda lm, on, llm: on.generate(ONE, num_return_sequences=2)),
    (UnsupportedCombination, "guidance_scale", lambda lm, on, llm: on.generate(ONE, guidance_scale=2.0)),
    (UnsupportedCombination, "logits processors", lambda lm, on, llm: on.generate(ONE, logits_processor=[print])),
    (UnsupportedCombination, "got builtin_function", lambda lm, on, llm: on.generate(ONE, **with_another(on))),
]


def test_choices_that_make_no_sense_and_what_vllm_cannot_do_are_refused(llm, pair):
    for error, words, choose in REFUSED:
        with pytest.raises(error, match=words):
            choose(pair.here, pair.there, llm)


def send(llm, *requests, **more):
    """Send token ids as any client of vLLM does, with `kv_transfer_params` or without."""
    from vllm import SamplingParams

    fields = {"max_tokens": 16, "min_tokens": 16, "ignore_eos": True, "logprobs": 0, "temperature": 0, **more}
    readings = [each.kv_transfer_params and {"kv_transfer_params": each.kv_transfer_params} for each in requests]
    params = [SamplingParams(extra_args=each, **fields) for each in readings]
    return llm.generate([{"prompt_token_ids": list(each.token_ids)} for each in requests], params, use_tqdm=False)


def logprobs_of(output):
    (one,) = output.outputs
    assert one.finish_reason == "length"
    return [entry[token].logprob for entry, token in zip(one.logprobs, one.token_ids, strict=True)]


@pytest.mark.parametrize("arranged_first", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_plain_and_arranged_requests_of_the_same_tokens_do_not_meet(arranged_first, together, llm, pair):
    prompt = pair.prompt(200 + 2 * arranged_first + together, 8)
    arranged, plain = (
        pair.using(method).here.generate(prompt, **LENGTH).logprobs for method in ("rotor", "sequential")
    )
    assert arranged != pytest.approx(plain, abs=10 * MOVED), "the two methods have to be told apart"
    request = pair.request(prompt)
    cases = [(request, arranged), (replace(request, kv_transfer_params=None), plain)]
    asked = (cases if arranged_first else cases[::-1]) * 2
    requests = [each for each, _ in asked]
    outputs = send(llm, *requests) if together else [send(llm, each)[0] for each in requests]
    for output, (_, expected) in zip(outputs, asked, strict=True):
        assert logprobs_of(output) == pytest.approx(expected, abs=MOVED)


@pytest.mark.parametrize("method", ["rotor", "sequential"])
def test_tenants_answer_alike_and_learn_nothing_of_each_other(method, pair):
    cached, chosen = [], pair.using(method)
    for tenant in ("ada", "ivo", "ada", "ivo"):
        (answer,) = Pair(chosen.here, chosen.there.with_tenant(tenant)).alike(pair.prompt(240, 9))
        cached.append(answer.usage.cached_tokens > 0)
    assert cached == [False, False, True, True]


def test_a_salt_is_not_told_and_differs_for_every_engine(core, pair, monkeypatch):
    """Whoever knows a set and its tenant cannot leave plain keys where arranged ones are expected."""
    connector, requests = core.scheduler.connector, []
    arrived = connector.on_new_request
    monkeypatch.setattr(connector, "on_new_request", lambda each: (arrived(each), requests.append(each)))
    for secret in (connector._secret, "of another engine"):
        monkeypatch.setattr(connector, "_secret", secret)
        pair.there.generate(pair.prompt(245), max_new_tokens=1)
    assert [len(salt) for salt in {each.cache_salt for each in requests}] == [64, 64]


GOOD = {"method": "rotor", "texts": [4, 9], "sets": [[20, 20]]}
FORGED = [
    *("rotor", {}, {**GOOD, "more": 1}, {**GOOD, "method": "rotar"}, {**GOOD, "method": ["rotor"]}),
    *({**GOOD, "texts": each} for each in ([4], [4, 0], [4, "9"], [4, -9])),
    *({**GOOD, "sets": each} for each in ([[20, True]], [20, 20], [[20, 10**12]], [[0] * 10**6])),
]


@pytest.mark.parametrize("reading", FORGED, ids=lambda reading: str(reading)[:80])
def test_a_forged_reading_fails_its_request_and_harms_nobody(reading, llm, pair):
    prompts = [pair.prompt(seed, 8) for seed in (250, 251)]
    expected = [pytest.approx(pair.here.generate(each, **LENGTH).logprobs, abs=MOVED) for each in prompts]
    good, other = map(pair.request, prompts)
    forged = replace(good, kv_transfer_params={"invariant_rag": reading})
    for _ in range(2):  # the second time, blocks of the first could be found
        first, failed, second = send(llm, good, forged, other)
        assert (failed.outputs[0].finish_reason, list(failed.outputs[0].token_ids)) == ("error", [])
        assert [logprobs_of(first), logprobs_of(second)] == expected
    with pytest.raises(RequestRefused):
        pair.there._engine.complete([good, forged])


def test_log_probabilities_of_the_prompt_are_those_of_the_arranged_one(llm, pair):
    request, logits = pair.request(pair.prompt(260, 8)), pair.here.logits(pair.prompt(260, 8))[:-1].log_softmax(-1)
    (output,) = send(llm, request, max_tokens=1, min_tokens=1, prompt_logprobs=0)
    suffix = request.token_ids[-len(logits) :]
    found = [entry[token].logprob for entry, token in zip(output.prompt_logprobs[-len(suffix) :], suffix, strict=True)]
    expected = [float(row[token]) for row, token in zip(logits, suffix, strict=True)]
    assert found == pytest.approx(expected, abs=MOVED)


def answers_of_frameworks(model, segments):
    """Yield answers, streams, batches, an object and calls of LangChain, a batch of completions, and LlamaIndex's."""

    def message(text):
        blocks = [dict(to_block(each)) for each in segments]
        return [{"role": "user", "content": [*blocks, {"type": "text", "text": text}]}]

    asked = question(segments)
    for micro_batching in (False, True):
        short = ChatInvariant(model=model, max_tokens=16, micro_batching=micro_batching)
        reply = short.invoke(message(asked))
        yield reply.content, reply.response_metadata["invariant"]
        yield "".join(chunk.content for chunk in short.stream(message(asked)))
        yield [each.content for each in short.batch([message(text) for text in (asked, "How long is it?", "What?")])]
    longer = ChatInvariant(model=model, max_tokens=120)
    yield longer.with_structured_output(Flag).invoke(message(asked))
    tools = longer.bind_tools([each.to_dict() for each in TOOLS], tool_choice="measure")
    yield [(each["name"], each["args"]) for each in tools.invoke(message(asked)).tool_calls]
    texts = sorted(f"Documents: {each.text}\n{question([each])}" for each in segments)
    yield InvariantLLM(model=model, max_tokens=16, stop=["and"]).batch(texts)
    nodes = [NodeWithScore(node=TextNode(text=each.text)) for each in segments]
    yield str(InvariantSynthesizer(llm=LlamaIndexLLM(model=model, max_tokens=16)).synthesize(asked, nodes))


def test_frameworks_give_answers_objects_and_calls_alike_on_vllm_in_every_order(pair):
    segments = documents(5, seed=400)
    (_, invariant), *_, flag, calls, _, _ = expected = [*answers_of_frameworks(pair.here, segments)]
    assert (invariant, type(flag), [name for name, _ in calls], all(expected)) == (True, Flag, ["measure"], True)
    for order in (segments, segments[::-1]):
        assert [*answers_of_frameworks(pair.there, order)] == expected


def test_calls_that_would_be_batched_here_are_left_to_vllm(pair):
    batcher, prompts = MicroBatcher(), [pair.prompt(seed, 3) for seed in (410, 411, 412)]
    streams = [batcher.stream(pair.there, each, {"max_new_tokens": 12}) for each in prompts]
    assert ["".join(each) for each in streams] == [pair.here.generate(each, max_new_tokens=12).text for each in prompts]
    abandoned = Event()
    abandoned.set()
    with pytest.raises(CancelledError):
        batcher.generate(pair.there, prompts[0], abandoned=abandoned)


def test_an_audit_of_vllm_finds_that_the_order_changes_nothing_and_that_it_is_not_the_model_here(pair):
    questions = [Question(question(each), tuple(each)) for each in (documents(3, 402), documents(3, 403))]
    result = audit(pair.there, questions, workers=4, generation={"max_new_tokens": 8})
    assert not result.flips
    assert result.screen.between == 0.0
    assert model_digest(pair.there) != model_digest(pair.here)
    assert model_digest(pair.there) == model_digest(pair.using("rotor").there)


@pytest.mark.parametrize("seed", [501, 502])
def test_an_object_is_that_of_the_core_and_one_that_does_not_fit_is_cut_and_says_so(seed, either):
    """But for log-probabilities: on vLLM, they are those among the grammar's tokens."""
    prompt, there = either.prompt(seed, 4), either.there
    ours = there.generate(prompt, **constrain(there, Flag, max_new_tokens=120))
    moved(ours, either.here.generate(prompt, **constrain(either.here, Flag, max_new_tokens=120)))
    assert isinstance(generate_structured(there, prompt, Flag, max_new_tokens=120), Flag)
    stream = there.stream(prompt, **constrain(there, Flag, max_new_tokens=120))
    assert "".join(stream) == ours.text
    assert stream.generation.token_ids == ours.token_ids
    few = len(ours.token_ids) - 1
    moved(there.generate(prompt, **constrain(there, Flag, max_new_tokens=few + 1)), ours)
    cut = there.generate(prompt, **constrain(there, Flag, max_new_tokens=few))
    assert (cut.finish_reason, cut.token_ids) == ("length", ours.token_ids[:few])
    with pytest.raises(IncompleteObject):
        generate_structured(there, prompt, Flag, max_new_tokens=few - 1)


@pytest.mark.parametrize(
    ("choice", "parallel"), [("required", False), ("required", True), ("measure", True), ("auto", True), ("none", True)]
)
def test_an_answer_that_may_or_must_hold_calls_is_that_of_the_core(choice, parallel, either):
    segments, forced = documents(4, 504), choice in {"required", "measure"}
    content = ["How long is the Lume?"] if forced else [*segments, question(segments)]
    options = {"tool_choice": choice, "parallel": parallel, "max_new_tokens": 60 if forced else 24}
    request = AnswerRequest([{"role": "user", "content": content}], tools=TOOLS, **options)
    here, there = (Answering(model, request).reply().first for model in (either.here, either.there))
    moved(there.generation, here.generation)
    assert there.tool_calls == here.tool_calls
    assert there.tool_calls or not forced


def test_control_tokens_are_banned_whatever_their_ids(lm, monkeypatch):
    options = constrain(lm, Flag, max_new_tokens=120)
    (processor,), most = options.pop("logits_processor"), options.pop("max_new_tokens")
    controls = {token for token in processor.words.controls if token in processor.banned[b""]}
    monkeypatch.setattr(sampling, "_MOST_BIASES", len(controls))
    fields = sampling.sampling_of(lm, most, {**options, "logits_processor": [processor]})[0]
    assert set(fields["logit_bias"]) == controls
