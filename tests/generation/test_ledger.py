"""The ledger says what was read, in words that do not depend on the order given."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.generation.batching import MicroBatcher
from invariant_rag.generation.outputs import ledger

THREE = [Segment("one"), Segment("two, longer"), Segment("three, the longest")]


def ledger_of(lm: InvariantModel, prompt: Prompt, **options: Any) -> dict[str, Any]:
    return ledger(lm.generate(prompt, max_new_tokens=2), prompt, **options)


@pytest.fixture
def rotor(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method="rotor")


def test_the_ledger_is_the_same_in_every_order(rotor: InvariantModel) -> None:
    ledgers = [ledger_of(rotor, Prompt("Read:", order, "Why?")) for order in permutations(THREE)]
    assert all(each == ledgers[0] for each in ledgers)
    assert ledgers[0] == {
        "sets": [3],
        "order": [each.content_hash for each in sorted(THREE, key=lambda each: each.text, reverse=True)],
        "dropped": [],
        "trimmed": [],
        "cached_tokens": 0,
        "method": "rotor",
        "invariant": True,
    }


def test_invariant_is_what_was_read_and_not_what_the_model_promises(rotor: InvariantModel) -> None:
    prompt = Prompt("Read:", THREE, "Why?")
    assert ledger_of(rotor, Prompt("Why?"))["invariant"] is None, "no documents"
    assert ledger_of(rotor, Prompt("Why?"))["sets"] == []
    assert ledger_of(rotor, prompt, recognized=False)["invariant"] is False
    plain = rotor.with_method("sequential", ordering="given")
    assert ledger_of(plain, prompt)["invariant"] is False
    assert ledger_of(plain, prompt)["method"] == "sequential"
    assert ledger_of(rotor.with_method("sequential", ordering="lexical"), prompt)["invariant"] is True


def test_several_sets_and_slots_are_listed_in_physical_order(rotor: InvariantModel) -> None:
    prompt = Prompt.of("Rubrics:", SegmentSet(["a", "b"]), "Answers:", SegmentSet(["d", "c", "e"]), "Which?")
    found = ledger_of(rotor, prompt)
    assert found["sets"] == [2, 3]
    assert found["order"] == [Segment(text).content_hash for text in "baedc"]


@pytest.mark.parametrize(("overflow", "key"), [("drop_last", "dropped"), ("trim_segments", "trimmed")])
def test_what_did_not_fit_is_named_by_content(rotor: InvariantModel, overflow: Any, key: str) -> None:
    short = rotor.with_method(max_segment_tokens=12, overflow=overflow)
    ledgers = [ledger_of(short, Prompt("Read:", order, "Why?")) for order in permutations(THREE)]
    assert all(each == ledgers[0] for each in ledgers)
    assert ledgers[0][key] == [THREE[2].content_hash]
    assert len(ledgers[0]["order"]) == (2 if overflow == "drop_last" else 3)


def test_a_batch_of_several_prompts_is_in_the_verdict_unless_it_changes_no_bit(rotor: InvariantModel) -> None:
    prompts = [Prompt("Read:", THREE, question) for question in ("Why?", "When?")]
    deterministic = InvariantModel(rotor.model, rotor.tokenizer, method="rotor", deterministic=True)
    for lm, expected in ((rotor, False), (deterministic, None)):
        calls = [(prompt, {"max_new_tokens": 2}) for prompt in prompts]
        for prompt, generation in zip(prompts, MicroBatcher().generate_all(lm, calls), strict=True):
            assert ledger(generation, prompt).get("bitwise") is expected
        alone = MicroBatcher().generate(lm, prompts[0], {"max_new_tokens": 2})
        assert "bitwise" not in ledger(alone, prompts[0])
