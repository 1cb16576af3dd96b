"""No argument of a public function, of whatever kind, ends in a raw traceback: typed errors, or an answer."""

import copy
import random
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

import invariant_rag as ir
from invariant_rag.audit import Question, check_order
from invariant_rag.audit.calls import no_progress
from invariant_rag.ensembles import blank_segments
from invariant_rag.errors import InvalidTool, InvariantRAGError
from invariant_rag.generation.lazy_model import LazyModel
from invariant_rag.generation.structured import ToolCalling, constrain, generate_structured
from invariant_rag.interventions import HiddenScaling, MsPoE, resolve_intervention
from invariant_rag.interventions.search import search_dimension
from invariant_rag.methods import APE, Sequential, resolve_method
from invariant_rag.orderings import CrossEncoder, Embedding, MonoT5, resolve_ordering
from invariant_rag.prompts import Tool, ToolCall
from invariant_rag.rag import BM25Retriever, Document, FaissRetriever, chunk_documents, cite, load_documents
from invariant_rag.remote import chat_messages
from invariant_rag.routing import RoutingRecord, candidate_confidence, route, text_confidence, tune_alpha


class Faulty:
    """Has no truth value, as arrays have none."""

    def __bool__(self):
        raise RuntimeError


def parts_of(segment):
    return hash(segment), repr(segment), segment.content_hash, segment == ir.Segment("a")


args = dict  # what a callable takes


def then(call, use):
    """Take what a callable takes, and use what it returns."""
    return lambda **given: use(call(**given))


NESTED = []
for _ in range(100_000):
    NESTED = [NESTED]
ODD = (
    *(None, 3, -1, 0, True, 1.5, float("nan"), float("inf"), 10**400, 2**70, 1j, Fraction(1, 3), Decimal("nan")),
    *("x", "", "\ud800", "a\0b", b"x", Path("nowhere/x"), Ellipsis, ValueError("x")),
    *([], [3], [None], [""], [[]], {}, {"a": 1}, {3: 1}, {"a"}, range(3), NESTED),
    *(np.array(["a", "b"]), np.array(3), np.int64(2), torch.tensor(1), torch.ones(2), torch.ones(2, 2), Faulty()),
)
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["x"]}}, "required": ["a"]}
TOOL = Tool("f", "d")
NOT_IN_A_CONFIG = ("custom_generate", "generation_config", "logits_processor", "synced_gpus", "trust_remote_code")


@pytest.fixture(scope="module")
def table(model, tmp_path_factory):
    """Callables, and arguments that they take; of a copied model: options leave hooks of transformers on it."""
    model = ir.InvariantModel(copy.deepcopy(model.model), model.tokenizer)
    folder = tmp_path_factory.mktemp("odd")
    (folder / "a.md").write_text("# A\n\nOne.\n")
    segments = [ir.Segment("a"), ir.Segment("b")]
    prompt = model.chat_prompt("q", segments)
    routed, judge, calling = model.with_routing(), ir.Judge(model), ToolCalling(model, [TOOL])
    bm25, scored = BM25Retriever(segments), args(prompt=prompt, candidates=["a"])
    question = {"question": "q", "segments": ["a", "b"], "answers": ["a"]}
    small, audited = {"remedies": []}, partial(ir.audit, lambda question, segments: "a")

    def message(role, content, name, tool_call_id, tool_calls, custom):
        fields = {"name": name, "tool_call_id": tool_call_id, "custom": custom}
        called = {"role": "assistant", "content": "", "tool_calls": tool_calls}
        return model.chat_prompt(messages=[called, {"role": role, "content": content, **fields}])

    def with_method(method, **choices):
        return model.with_method(method, **choices).generate(prompt, max_new_tokens=1)

    def ensemble(kind):
        return then(kind, lambda each: each.score(**scored))

    def intervention(kind):
        return then(kind, lambda each: with_method("sequential", intervention=each))

    options = {**dict.fromkeys([*NOT_IN_A_CONFIG, *sorted(GenerationConfig().to_dict())]), "max_new_tokens": 2}
    return {
        "InvariantModel": (ir.InvariantModel, args(model=model.model, tokenizer=model.tokenizer, cache=None)),
        "choices": (model.with_method, args(method="rotor", ordering="lexical", backend="auto", overflow="error")),
        "more choices": (model.with_method, args(max_segment_tokens=9, intervention=None)),
        "with_cache": (model.with_cache, args(cache=None)),
        "with_routing": (model.with_routing, args(alpha=0.2, plain_order="given")),
        "RoutedModel.over": (ir.RoutedModel.over, args(lm=model)),
        "from_pretrained": (ir.InvariantModel.from_pretrained, args(name=folder / "none", method="x", ordering="x")),
        "chat_prompt": (model.chat_prompt, args(question="q", segments=["a"], system="s", tools=[])),
        "messages": (lambda value: model.chat_prompt(messages=value), args(value=[{"role": "user", "content": ""}])),
        "message": (message, args(role="user", content="b", name="n", tool_call_id="i", tool_calls=[], custom=1)),
        "Trusted": (ir.Trusted, args(text="a")),
        "Tool": (Tool, args(name="f", description="d", parameters={"type": "object"})),
        "Tool.of": (Tool.of, args(tool=TOOL)),
        "ToolCall": (ToolCall, args(id="1", name="f", arguments={})),
        "ToolCall.of": (lambda call, **given: (ToolCall.of(call), ToolCall.of({"id": "1", "name": "f", **given})), args(
            call=ToolCall("1", "f", {}), id="1", name="f", arguments={})),
        "prepare": (model.prepare, args(prompt=prompt, new_tokens=1)),
        "logits": (model.logits, args(prompt=prompt)),
        "score": (model.score, scored),
        "routed.score": (routed.score, scored),
        "arranged": (lambda prompts: model.arranged(prompts).__enter__(), args(prompts=["x"])),
        "generate": (model.generate, args(prompt=prompt, max_new_tokens=1, seed=1)),
        "stream": (then(model.stream, list), args(prompt=prompt, max_new_tokens=1, seed=1)),
        "options": (partial(model.generate, prompt), options),
        "sampling": (partial(model.generate, prompt, do_sample=True, max_new_tokens=1), args(
            temperature=1.0, top_k=9, top_p=1.0, min_p=0.1, typical_p=1)),
        "Segment": (then(ir.Segment, parts_of), args(text="", title=None, metadata={}, score=None, token_ids=None)),
        "Segment.of": (ir.Segment.of, args(value="a")),
        "metadata": (lambda value: parts_of(ir.Segment("a", None, {"k": value})), args(value=1)),
        "SegmentSet": (then(ir.SegmentSet, hash), args(segments=["a"], slots=None)),
        "permuted": (ir.SegmentSet(["a", "b"]).permuted, args(order=[1, 0])),
        "Prompt": (then(ir.Prompt, model.prepare), args(
            prefix="p", segments=["a"], suffix="s", query=None, rendering=str)),
        "with_sets": (prompt.with_sets, args(sets=[ir.SegmentSet(["a"])])),
        "shuffled": (prompt.shuffled, args(random_state=random.Random(0))),
        "cache": (ir.KeyValueCache, args(max_bytes=1, device=None, folder=None, max_disk_bytes=1, namespace="")),
        "MicroBatcher": (ir.MicroBatcher().generate, args(
            lm=model, prompt=prompt, options={"max_new_tokens": 1}, batch_size=2, abandoned=None)),
        "Judge": (ir.Judge, args(lm=model, criteria="x", by="letters")),
        "compare": (judge.compare, args(question="q", a="a", b="a", reference=None, explain=False)),
        "choose": (judge.choose, args(question="q", options=["a"], explain=False)),
        "describe": (judge.compare("q", "a", "a").describe, args(names=["a", "b"])),
        "resolve_ordering": (resolve_ordering, args(name_or_instance="lexical", default=None)),
        "resolve_method": (resolve_method, args(method="rotor")),
        "resolve_intervention": (resolve_intervention, args(intervention=None, method=Sequential(), model=model.model)),
        "MonoT5": (MonoT5, args(tokenizer=None, batch_size=1, max_length=1, device=None, true_word="t")),
        "CrossEncoder": (CrossEncoder, args(model="x", batch_size=1, device=None)),
        "Embedding": (Embedding, args(model="x", batch_size=1, device=None)),
        "APE": (then(APE, with_method), args(temperature=0.9, scale=0.9)),
        "HiddenScaling": (intervention(HiddenScaling), args(
            dimensions=1, factor=0.5, layers=[0], last_tokens=1, skip_first=0, scale_values=False)),
        "HiddenScaling.published": (HiddenScaling.published, args(model="x")),
        "HiddenScaling.load": (HiddenScaling.load, args(path=folder / "none")),
        "HiddenScaling.save": (HiddenScaling(1, 0.5, [0]).save, args(path=folder / "scaling.json")),
        "MsPoE": (intervention(partial(MsPoE, first_layer=1)), args(smallest=1.2, largest=1.8, threshold=3.0)),
        "search_dimension": (search_dimension, args(model=model.model, examples=[], texts=[], keep=1, factors=[0.5])),
        "RingAverage": (ensemble(ir.RingAverage), args(lm=model, cuts=1)),
        "permutations": (ensemble(ir.PermutationAverage), args(lm=model, count=1, permutations="rotations", seed=0)),
        "SelfConsistency": (ir.SelfConsistency, args(lm=model, count=1, permutations="random", answer=str)),
        "AttentionSorting": (ensemble(ir.AttentionSorting), args(lm=model, rounds=1)),
        "ContextExperts": (ensemble(ir.ContextExperts), args(lm=model, beta=1.0, gamma=0)),
        "ContextualCalibration": (ir.ContextualCalibration, args(scorer=model, content_free=["a"], blank=str)),
        "ensemble.generate": (ir.RingAverage(model).generate, args(prompt=prompt, max_new_tokens=1)),
        "ensemble.score": (ir.AttentionSorting(model).score, scored),
        "blank_segments": (blank_segments, args(prompt=prompt, blank="a")),
        "LazyModel": (LazyModel, args(source=model, options=None)),
        "ToolCalling": (
            then(ToolCalling, lambda each: each.constrain(prompt, max_new_tokens=60)),
            args(lm=model, tools=[], tool_choice="auto", parallel=True)),
        "ToolCalling.constrain": (calling.constrain, args(prompt=prompt, max_new_tokens=60)),
        "constrain": (constrain, args(lm=model, schema=SCHEMA, max_new_tokens=20)),
        "generate_structured": (generate_structured, args(lm=model, prompt=prompt, schema=SCHEMA)),
        "schema": (
            lambda value: constrain(model, {**SCHEMA, "properties": {"a": value}}, max_new_tokens=40),
            args(value={"enum": ["x"]})),
        "BM25Retriever": (BM25Retriever, args(segments=segments, show_progress=False)),
        "FaissRetriever": (FaissRetriever, args(segments=[], show_progress=False)),
        "retrieve": (bm25.retrieve, args(query="a", k=1)),
        "Document": (then(Document, lambda each: chunk_documents([each])), args(text="a", title=None, metadata={})),
        "chunk_documents": (chunk_documents, args(documents=[Document("a")], max_chars=9, overlap=0)),
        "load_documents": (load_documents, args(paths=folder)),
        "cite": (cite, args(answer="a", question="q", segments=segments, included=None)),
        "RAG": (ir.RAG, args(model=model, retriever=bm25, k=1, system=None)),
        "RAG.from_documents": (ir.RAG.from_documents, args(
            paths=folder, model=model, retriever="bm25", k=1, max_chars=9, overlap=0)),
        "tune_alpha": (tune_alpha, args(records=[RoutingRecord(0.5, 0.5, 1, 1)], alphas=[0.1])),
        "RoutingRecord": (then(RoutingRecord, lambda each: tune_alpha([each])), args(
            plain_confidence=0.5, plain_score=1, invariant_confidence=0.5, invariant_score=1)),
        "route": (route, args(plain_confidence=0.5, invariant_confidence=0.5, alpha=0.1)),
        "candidate_confidence": (candidate_confidence, args(logprobs=[-1.0])),
        "text_confidence": (text_confidence, args(logprobs=[-1.0])),
        "check_order": (check_order, args(
            model=model, prompt=prompt, orders=1, seed=0, max_new_tokens=1, progress=no_progress)),
        "Question": (Question, args(text="q", segments=tuple(segments), answers=("a",), gold=(0,), id="1")),
        "audit": (audited, args(
            questions=[question], k=1, seed=0, workers=1, margin=0.1, **small)),
        "audit.question": (lambda **given: audited([{**question, **given}], **small), args(
            question="q", segments=["a", "b"], answers=["a"], gold=[0], id="1", pairwise=False)),
    }  # fmt: skip


def test_no_argument_of_a_public_callable_ends_in_a_raw_traceback(table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # some values are names of files
    tried, raw = 0, []
    for name, (call, valid) in table.items():
        for place, argument in enumerate(valid):
            for value in ODD[place % 3 :: 3] if name == "options" else ODD:  # a third for each of many alike
                tried += 1
                try:
                    call(**{**valid, argument: value})
                except InvariantRAGError as error:
                    assert str(error), (name, argument)  # noqa: PT017
                except Exception as error:  # noqa: BLE001 - what the test is about
                    raw.append(f"{name}({argument}={type(value).__name__}): {type(error).__name__}: {str(error)[:80]}")
    assert len(table) >= 80
    assert len({type(each) for each in ODD}) >= 20
    assert tried > 5000
    assert not raw, "\n".join(raw)


CIRCLE = {}
CIRCLE["again"] = CIRCLE


@pytest.mark.parametrize("value", [b"x", {1, 2}, object(), [{"deep": b"x"}], {b"x": 1}, CIRCLE])
def test_what_no_json_can_say_is_no_argument_of_a_tool(model, value):
    function = {"name": "now", "arguments": {"fine": 1, "wrong": value}}
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "function": function}]}
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "wrong": value}}}
    chat, say = model.chat_prompt, chat_messages
    for call in (partial(chat, messages=[called]), partial(chat, "q", tools=[tool]), partial(say, [called])):
        with pytest.raises(InvalidTool, match=r"expected JSON as .*now.* as 'wrong'"):
            call()


def test_a_refusal_names_the_argument_and_what_was_expected(model):
    refusals = {
        "count: expected at least 1, got": lambda: ir.PermutationAverage(model, count="3"),
        "alpha: expected a finite number": lambda: model.with_routing(float("nan")),
        "expected a list of tools, got 3": lambda: model.chat_prompt("q", ["a"], tools=3),
        "expected a list of Mapping": lambda: model.chat_prompt(messages="hello"),
        "expected at least one message": lambda: model.chat_prompt(messages=[]),
        "tool_calls: expected a list": lambda: model.chat_prompt(messages=[{"role": "assistant", "tool_calls": 3}]),
        "token ids below the size of a vocabulary": lambda: ir.Prompt("a", ["b"], [10**30]),
        "content_free: expected at least one text": lambda: ir.ContextualCalibration(model, content_free=3),
        "True, False or 'never'": lambda: model.generate(ir.Prompt("a"), early_stopping=NESTED),
        "device: expected a device": lambda: ir.KeyValueCache(device="nowhere"),
    }
    for message, refused in refusals.items():
        with pytest.raises(InvariantRAGError, match=message):
            refused()
