"""The laws of every method in the registry: through the kit that method authors use, and against the published code.

Law 5: the published implementations of five methods, on a random Llama, in float32.
"""

from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from invariant_rag import InvariantModel, Prompt
from invariant_rag.attention import BACKENDS
from invariant_rag.errors import InvalidChoice
from invariant_rag.methods import APE, METHODS, PINEReverse
from invariant_rag.testing import MethodContract
from invariant_rag.testing.rounding import rounding
from tests.comparing import assert_computes, gap

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


# --- the published code ---

OURS = {
    "vanilla": ("sequential", "given"),
    "rotor_lexical": ("rotor", "lexical"),
    "rotor_revlexical": ("rotor", "lexical-reversed"),
    "rotor_freq": ("rotor", "frequency"),
    "rotor_given": ("rotor", "given"),
    "pine": ("pine", "lexical"),
    "sbp": ("set-based", "lexical"),
}


def published_runs(published, manifest, arrays):
    """Return entry, prompt, suffix logits and greedy tokens of each golden run of a published method."""
    runs = []
    for entry in (entry for entry in manifest["entries"] if entry["method"] == published):
        case, key = manifest["cases"][entry["case"]], f"{entry['model']}/{entry['case']}/{published}"
        counts, distinct = Counter(chain(*case["segs"])), {*map(tuple, case["segs"])}
        ties = len({tuple(map(counts.get, each)) for each in distinct}) < len(distinct)
        if published == "rotor_freq" and ties:
            continue  # the published code falls back to the input order then
        order = entry["physical_order"] if published == "rotor_given" else range(len(case["segs"]))
        prompt = Prompt(case["prefix"], [case["segs"][index] for index in order], case["suffix"])
        logits, greedy = (arrays[f"{key}/{name}"] for name in ("suffix_logits", "greedy"))
        runs.append((entry, prompt, torch.from_numpy(logits), tuple(greedy.tolist())))
    assert len(runs) >= 5
    return runs


@pytest.mark.parametrize("published", OURS)
def test_logits_and_greedy_tokens_equal_the_published_code(published, golden_model, golden_manifest, golden_arrays):
    method, ordering = OURS[published]
    lm = InvariantModel(golden_model, method=method, ordering=ordering)
    for entry, prompt, expected, greedy in published_runs(published, golden_manifest, golden_arrays):
        bound = rounding(lm.logits, prompt)
        torch.testing.assert_close(lm.logits(prompt), expected, atol=bound, rtol=0)
        if entry["min_top2_margin"] > 2 * bound:
            generation = lm.generate(prompt, max_new_tokens=8)
            assert (generation.token_ids, generation.finish_reason) == (greedy, "length")


def test_logits_and_greedy_tokens_are_those_of_the_published_functions(golden_model, golden_manifest):
    """The last logits and 8 greedy tokens, in float32, of two golden cases in `windows.npz`.

    PCW: `combine_past_key_values` and `generate_pcw_position_ids` of AI21Labs/Parallel-Context-Windows (e6d3100) with
    transformers' Llama. Structured Prompting: `make_positions` and the rescaling of `MultiheadAttention.forward` of
    microsoft/LMOps (4f2a9de) in that Llama; there, the prefix is the first token, as in all of its prompts.
    """
    with np.load(Path(__file__).parents[1] / "golden" / "windows.npz") as arrays:
        golden = dict(arrays)
    names = {tuple(key.split("/")[:2]) for key in golden}
    assert len(names) == 4
    for method, name in names:
        case = golden_manifest["cases"][name]
        prefix = case["prefix"][:1] if method == "structured" else case["prefix"]
        prompt, lm = Prompt(prefix, case["segs"], case["suffix"]), InvariantModel(golden_model, method=method)
        expected = torch.from_numpy(golden[f"{method}/{name}/last_logits"])
        assert_computes(expected, lambda lm=lm, prompt=prompt: lm.logits(prompt)[-1])
        written = lm.generate(prompt, max_new_tokens=8).token_ids
        assert written == tuple(golden[f"{method}/{name}/greedy"].tolist())
