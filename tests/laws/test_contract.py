"""The laws of every method in the registry, through the kit that method authors use."""

from __future__ import annotations

import random

import pytest
import torch

from invariant_rag import InvariantModel
from invariant_rag.attention import BACKENDS
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import APE, METHODS, PINEReverse
from invariant_rag.testing import MethodContract
from invariant_rag.testing.rounding import rounding

KIT = type("Kit", (MethodContract,), {"method": "rotor"})()
for _name in METHODS:  # `TestPineInPlace` and the others
    globals()[f"Test{_name.title().replace('-', '')}"] = type(_name, (MethodContract,), {"method": _name})


class TestInstance(MethodContract):
    method = PINEReverse()


def test_every_backend_has_its_law() -> None:
    laws = {f"test_{name}_agrees_with_the_reference" for name in BACKENDS if name != "reference"}
    assert laws
    assert laws <= {*dir(MethodContract)}


def test_methods_differ_from_each_other_and_sequential_depends_on_the_order_given() -> None:
    prompt, lm = KIT.prompts()[1], KIT.wrapped()
    answers = [lm.with_method(name, ordering="lexical").logits(prompt) for name in METHODS]
    for index, one in enumerate(answers):
        for other in answers[index + 1 :]:
            assert float((one - other).abs().max()) > 1e-2
    plain = lm.with_method("sequential", ordering="given")
    assert not torch.equal(plain.logits(prompt), plain.logits(prompt.shuffled(random.Random(1))))


@pytest.mark.parametrize("method", METHODS)
def test_a_fair_method_ignores_the_ordering_and_no_other_does(method: str) -> None:
    lm, prompt = KIT.wrapped().with_method(method), KIT.prompts()[2]
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


@pytest.mark.parametrize("parameters", [(0.0, 0.9), (0.9, -1.0)])
def test_ape_refuses_what_is_not_positive(parameters: tuple[float, float]) -> None:
    with pytest.raises(InvalidChoice, match="above 0"):
        APE(*parameters)
