"""The laws of every method in the registry, through the kit that method authors use."""

from __future__ import annotations

import random

import pytest
import torch

from invariant_rag import InvariantModel
from invariant_rag.attention import BACKENDS
from invariant_rag.methods import METHODS, PINEReverse
from invariant_rag.testing import MethodContract
from invariant_rag.testing.rounding import rounding


class TestSequential(MethodContract):
    method = "sequential"

    def test_with_the_order_as_given_it_is_not_invariant(self) -> None:
        lm = self.wrapped(ordering="given")
        prompt = self.prompts()[1]
        assert not torch.equal(lm.logits(prompt), lm.logits(prompt.shuffled(random.Random(1))))


class TestRoToR(MethodContract):
    method = "rotor"


class TestPINE(MethodContract):
    method = "pine"


class TestPINEInPlace(MethodContract):
    method = "pine-in-place"


class TestPINEReverse(MethodContract):
    method = PINEReverse()


class TestIsolated(MethodContract):
    method = "isolated"


class TestParallelWindows(MethodContract):
    method = "parallel-windows"


class TestSetBased(MethodContract):
    method = "set-based"


class TestStructured(MethodContract):
    method = "structured"


class TestAPE(MethodContract):
    method = "ape"


def test_every_method_of_the_registry_has_its_contract() -> None:
    covered = {
        each.method if isinstance(each.method, str) else each.method.name for each in MethodContract.__subclasses__()
    }
    assert covered >= set(METHODS)  # other tests have contracts of their own


def test_every_backend_is_compared_with_the_reference() -> None:
    laws = {f"test_{name}_agrees_with_the_reference" for name in BACKENDS if name != "reference"}
    assert laws
    assert laws <= {*dir(MethodContract)}


def test_methods_differ_from_each_other() -> None:
    prompt = TestRoToR().prompts()[1]
    lm = TestRoToR().wrapped()
    answers = [lm.with_method(name, ordering="lexical").logits(prompt) for name in METHODS]
    for index, one in enumerate(answers):
        for other in answers[index + 1 :]:
            assert float((one - other).abs().max()) > 1e-2


@pytest.mark.parametrize("method", METHODS)
def test_a_fair_method_ignores_the_ordering_and_no_other_does(method: str) -> None:
    lm = TestRoToR().wrapped().with_method(method)
    prompt = TestRoToR().prompts()[2]
    answers = [lm.with_method(ordering=each).logits(prompt) for each in ("lexical", "lexical-reversed", "given")]
    gap = max(float((answer - answers[0]).abs().max()) for answer in answers[1:])
    assert gap <= rounding(lm.logits, prompt) if METHODS[method].fair else gap > 1e-1


def test_wrapping_twice_probes_once(llama: object) -> None:
    first, second = InvariantModel(llama), InvariantModel(llama, method="pine")  # type: ignore[arg-type]
    assert first.prefiller.shared is second.prefiller.shared


@pytest.mark.parametrize("kind", ["method", "ordering", "backend"])
def test_an_unknown_name_is_refused_with_the_valid_ones(kind: str, llama: object) -> None:
    with pytest.raises(ValueError, match="choose from") as caught:
        InvariantModel(llama, **{kind: "nonsense"})  # type: ignore[arg-type]
    assert {"method": "rotor", "ordering": "lexical", "backend": "sdpa"}[kind] in str(caught.value)
