"""Digests: equal for models that answer alike, and different as soon as anything can change an answer."""

import copy
import pickle
import random
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Semaphore

import pytest
import torch

from invariant_rag import InvariantModel, KeyValueCache
from invariant_rag.generation import digest, prefill
from invariant_rag.generation.digest import describe, model_digest, weights_digest
from invariant_rag.generation.prefill import SharedState
from invariant_rag.interventions import MsPoE
from invariant_rag.methods import APE, METHODS
from invariant_rag.orderings import Lexical, MonoT5
from invariant_rag.testing.families import tiny_model


@pytest.fixture
def lm(chat_llama, tokenizer):
    return InvariantModel(copy.deepcopy(chat_llama), copy.deepcopy(tokenizer))  # which a test may change


CHOICES = [
    *({"method": name, "ordering": "lexical"} for name in METHODS),
    *({"method": each} for each in (APE(temperature=0.5), APE(scale=0.5))),
    *({"ordering": each} for each in ("frequency", "monot5", MonoT5(max_length=9))),
    *({"max_segment_tokens": each} for each in (9, 10)),
    *({"backend": "reference"}, {"overflow": "trim_segments"}),
    *({"method": "sequential", "ordering": "lexical", "intervention": MsPoE(first_layer=layer)} for layer in (0, 1)),
]


def test_every_choice_that_changes_an_answer_changes_the_digest_and_models_that_answer_alike_share_one(lm):
    lms = [lm.with_method(**each) for each in CHOICES]
    lms += [lm.with_routing(**each) for each in ({}, {"alpha": 0.3}, {"plain_order": "canonical"})]
    assert len(set(map(model_digest, lms))) == len(lms)
    before, again = model_digest(lm), lm.with_method("pine").with_method("rotor", ordering=Lexical())
    for alike in (lm.with_method("rotor"), lm.with_cache(KeyValueCache()), pickle.loads(pickle.dumps(lm)), again):
        assert model_digest(alike) == before
    lm.generate(lm.chat_prompt("Where?", ["Here."]), max_new_tokens=1)
    assert model_digest(lm) == before, "a call leaves no trace in it"


@pytest.mark.slow
def test_it_is_the_same_in_another_process(tiny_folder):
    here = InvariantModel.from_pretrained(tiny_folder, method="ape", ordering="monot5")
    here.tokenizer(["a", "bb"], padding=True, truncation=True, max_length=1)
    code = (
        "from invariant_rag import InvariantModel\n"
        "from invariant_rag.generation.digest import model_digest\n"
        f"print(model_digest(InvariantModel.from_pretrained({str(tiny_folder)!r}, method='ape', ordering='monot5')))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == model_digest(here)


def test_a_model_with_offloaded_weights_has_an_identity_of_its_own(lm):
    other, bare = copy.deepcopy(lm), InvariantModel(lm.model)
    assert model_digest(lm) == model_digest(other)
    assert model_digest(bare) == model_digest(InvariantModel(lm.model)) != model_digest(lm), "without a tokenizer"
    for each in (lm, other):
        each.model.lm_head.to("meta")
    assert model_digest(lm) == model_digest(lm.with_method("rotor")) != model_digest(lm.with_method("pine"))
    assert model_digest(lm) != model_digest(other) == model_digest(other)


def test_objects_are_told_by_what_they_are_and_never_by_an_address_that_is_used_again():
    one, other = (type("Mine", (Lexical,), {})() for _ in range(2))
    assert describe(one) == describe(one) != describe(other), "classes of the same name"
    assert len({describe([object.__new__(type("Held", (), {}))]) for _ in range(3)}) == 3
    held = object.__new__(type("Held", (), {}))
    assert describe({"a": held}) == describe({"a": held})
    assert describe(len) == describe(len) != describe(sorted)
    assert describe(lambda: 1) != describe(lambda: 1)
    data = [1, True, "1", 1.0, None, (1,), [1], {1}, {1: 1}, b"1", Path("1"), torch.float32]
    assert len(set(map(describe, data))) == len(data)


CHANGES = {
    "the template": lambda lm: setattr(lm.tokenizer, "chat_template", lm.tokenizer.chat_template + " "),
    "a token": lambda lm: lm.tokenizer.add_tokens(["Ostra"]),
    "another end": lambda lm: setattr(lm.tokenizer, "eos_token", "a"),
    "the generation config": lambda lm: setattr(lm.model.generation_config, "repetition_penalty", 1.5),
}


def swapped(data, first, second):
    data[[first, second]] = data[[second, first]]


WEIGHTS = {
    "one weight through .data": lambda model: model.lm_head.weight.data[3, 5].add_(1e-3),
    "the last bit of a weight": lambda model: model.lm_head.weight.data.view(torch.int32)[9, 1].bitwise_xor_(1),
    "two rows swapped": lambda model: swapped(model.model.layers[1].mlp.up_proj.weight.data, 2, 7),
    "two columns swapped": lambda model: swapped(model.model.layers[1].mlp.up_proj.weight.data.T, 2, 7),
    "a matrix negated": lambda model: model.model.layers[0].self_attn.k_proj.weight.data.neg_(),
    "two signs": lambda model: model.model.norm.weight.data[1:4:2].neg_(),
    "another layer's": lambda model: setattr(model.model.layers[0].mlp, "up_proj", model.model.layers[1].mlp.up_proj),
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.mul_(1.01),
    "the epsilon of a norm": lambda model: setattr(model.model.norm, "variance_epsilon", 1e-3),
    "training": lambda model: model.train(),
    "adapters": lambda model: setattr(model.model.layers[0].mlp.up_proj, "_active_adapter", ["one"]),
    "the scale of an adapter": lambda model: setattr(model.model.layers[0].mlp.up_proj, "scaling", {"one": 2.0}),
    "the config": lambda model: setattr(model.config, "rms_norm_eps", 0.5),
    "another activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", torch.nn.ReLU()),
    "the dtype": lambda model: model.to(torch.bfloat16),
}


@pytest.mark.parametrize("change", [*CHANGES, *WEIGHTS])
def test_every_change_in_place_is_noticed(change, lm, chat_llama):
    other = lm.with_method("pine")
    before, of_weights = [model_digest(lm), model_digest(other)], weights_digest(lm.model)
    assert ([model_digest(lm), model_digest(other)], weights_digest(chat_llama)) == (before, of_weights)
    versions = [each._version for each in lm.model.parameters()]
    CHANGES[change](lm) if change in CHANGES else WEIGHTS[change](lm.model)
    assert len({*before, model_digest(lm), model_digest(other)}) == 4
    assert change in CHANGES or weights_digest(lm.model) != of_weights
    assert "data" not in change or [each._version for each in lm.model.parameters()] == versions


@pytest.mark.parametrize("family", ["llama", "llama (dynamic scaling)", "gpt_oss", "gptj", "bloom", "gemma3_text"])
def test_a_call_leaves_no_trace(family):
    model = tiny_model(family)
    before = weights_digest(model)
    with torch.no_grad():
        model(torch.tensor([list(range(1, 40))]), use_cache=False)
    assert weights_digest(model) == before


@pytest.mark.parametrize("piece", [64, 1 << 24])
@pytest.mark.parametrize("checksum", [lambda content: digest._checksums([content]), digest._sum_on_device])
def test_random_changes_of_bytes_change_the_checksum_wherever_it_is_computed(checksum, piece, monkeypatch):
    monkeypatch.setattr(digest, "_PIECE", piece)
    monkeypatch.setattr(digest, "_factors", cache(digest._factors.__wrapped__))  # of pieces of this size
    source = random.Random(0)
    content = torch.tensor(list(source.randbytes(1001)), dtype=torch.uint8)
    expected = checksum(content)
    for _ in range(200):
        changed = content.clone()
        for _ in range(source.randint(1, 3)):
            changed[source.randrange(1001)] ^= 1 << source.randrange(8)
        assert (checksum(changed) == expected) == torch.equal(changed, content)
    assert checksum(content.clone()[1:]) == checksum(content[1:]), "aligned or not"
    assert checksum(content[:960].roll(64)) != checksum(content[:960]), "pieces in another order"


def test_threads_that_ask_at_the_same_time_share_a_digest_that_was_begun_after_they_asked(monkeypatch):
    model, begun = tiny_model("llama"), Semaphore(0)
    shared, calls = SharedState([]), []

    def slow(asked):
        calls.append(weights_digest(asked))
        begun.release()
        time.sleep(0.3)
        return calls[-1]

    monkeypatch.setattr(prefill, "weights_digest", slow)
    with ThreadPoolExecutor(9) as threads:
        first = threads.submit(shared.weights_digest, model)
        begun.acquire()
        model.lm_head.weight.data[0, 0] += 1  # after the first was begun, before the others ask
        others = [threads.submit(shared.weights_digest, model) for _ in range(8)]
        found = {each.result() for each in others}
    assert found == {weights_digest(model)} != {first.result()}
    asked = len(calls)
    assert asked <= 3
    shared.weights_digest(model)
    assert len(calls) == asked + 1, "nothing is remembered between calls"
