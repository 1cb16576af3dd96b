"""The laws of every method in the registry, through the kit that method authors use."""

import pytest

from invariant_rag import InvariantModel
from invariant_rag.attention import BACKENDS
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import APE, METHODS, PINEReverse
from invariant_rag.testing import MethodContract
from invariant_rag.testing.rounding import rounding
from tests.comparing import gap

KIT = type("Kit", (MethodContract,), {"method": "rotor"})()
for _name, _method in {**{name: name for name in METHODS}, "instance": PINEReverse()}.items():
    globals()[f"Test{_name.title().replace('-', '')}"] = type(_name, (MethodContract,), {"method": _method})


def test_every_backend_has_its_law():
    laws = {f"test_{name}_agrees_with_the_reference" for name in BACKENDS if name != "reference"}
    assert laws
    assert laws <= {*dir(MethodContract)}


@pytest.mark.parametrize("method", METHODS)
def test_a_fair_method_ignores_the_ordering_and_no_other_does(method):
    lm, prompt = KIT.wrapped().with_method(method), KIT.prompts()[2]
    first, *others = (lm.with_method(ordering=each).logits(prompt) for each in ("lexical", "lexical-reversed", "given"))
    largest = max(gap(each, first) for each in others)
    assert largest <= rounding(lm.logits, prompt) if METHODS[method].fair else largest > 1e-1


def test_wrapping_twice_probes_once(llama):
    assert InvariantModel(llama).prefiller.shared is InvariantModel(llama, method="pine").prefiller.shared


@pytest.mark.parametrize(("kind", "valid"), [("method", "rotor"), ("ordering", "lexical"), ("backend", "sdpa")])
def test_an_unknown_name_is_refused_with_the_valid_ones(kind, valid, llama):
    with pytest.raises(ValueError, match=f"choose from.*'{valid}'"):
        InvariantModel(llama, **{kind: "nonsense"})
    for parameters in ((0.0, 0.9), (0.9, -1.0)):
        with pytest.raises(InvalidChoice, match="above 0"):
            APE(*parameters)
