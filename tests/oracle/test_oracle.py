"""Every backend computes what the papers say: logits and cached decoding equal an oracle that shares no code with it.

Everything is computed in float64, so the bound is above rounding and far below any mistake.
"""

import random
from functools import cache
from itertools import chain, product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.arrangement import Layout
from invariant_rag.attention import pine, resolve_backend
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.positions import Rotation
from invariant_rag.errors import ContextOverflow
from invariant_rag.methods import APE, resolve_method
from invariant_rag.testing.families import tiny_model
from tests.comparing import frequencies
from tests.oracle.attention import APE_SCALE, APE_TEMPERATURE, Layer, Rotary, float64_throughout, layer_of, logits_with
from tests.oracle.methods import METHODS, World

BOUND = 1e-12
"""Relative to the largest value: thousands of roundings of float64."""

_SMALL = {"hidden_size": 32, "head_dim": 8, "num_hidden_layers": 2}
_LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_LONGROPE |= {"short_factor": [1.0, 1.3], "long_factor": [2.0, 8.0]}
FAMILIES = (
    *("llama", "llama (llama3 scaling)", "llama (linear scaling)", "llama (yarn scaling)", "llama (dynamic scaling)"),
    *("phi3", "mistral (sliding window)", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi", "cohere2", "olmo2"),
    *("granite", "glm4", "gpt_neox", "gpt_oss", "exaone4", "gptj", "falcon", "falcon (ALiBi)", "bloom", "mpt"),
)
_SMALLER = {
    "llama (dynamic scaling)": {"max_position_embeddings": 24},
    "phi3": {"rope_parameters": _LONGROPE, "original_max_position_embeddings": 16},  # some prompts are longer
    "granite": {"attention_multiplier": 0.2},
    "gptj": {"rotary_dim": 4},
    **{family: {"head_dim": ...} for family in ("falcon", "falcon (ALiBi)")},
    **{family: {"sliding_window": 7} for family in ("mistral (sliding window)", "gemma2", "gpt_oss")},
    **{
        family: {"sliding_window": 7, "layer_types": ["sliding_attention", "full_attention"]}
        for family in ("gemma3_text", "cohere2", "exaone4")
    },
}
"""Families of `invariant_rag.testing.families`, made small; windows are shorter than prompts."""

PROMPTS = {
    "one set": ((3, 4), ((4, 1, 6, 0, 3),)),
    "two sets": ((2, 1, 3), ((3, 2), (1, 4, 2))),
    "no prefix": ((0, 2), ((5, 3, 4),)),
    "past the window": ((3, 4), ((16, 15, 16),)),
}
"""Lengths of texts, and of the segments of the sets between them."""

BACKENDS = ("sdpa", "varlen")
NEW_TOKENS = 3


def combinations():
    """Return every family with PINE, which alone undoes rotations, and three other methods in turn.

    `test_one_layer_computes_what_the_papers_say_for_any_lengths` has every method with everything that layers add.
    """
    others = [method for method in METHODS if method != "pine"]
    for row, family in enumerate(FAMILIES):
        for column, method in enumerate(["pine", *(others[(2 * row + turn) % len(others)] for turn in range(3))]):
            has_alibi = family in ("bloom", "mpt", "falcon (ALiBi)")
            if not (has_alibi and method == "pine-in-place"):  # it reads later positions, for which ALiBi has no biases
                yield family, method, BACKENDS[(row + column) % 2], list(PROMPTS)[(row // 4 + column) % 3]


@cache
def build(family, **overrides):
    config = tiny_model(family, eos_token_id=None, **{**_SMALL, **_SMALLER.get(family, {}), **overrides}).config
    with float64_throughout(), torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
        if model.config._experts_implementation == "grouped_mm":
            model.set_experts_implementation("eager")  # the grouped one has no float64
    return model


def _prompt(name, seed=0):
    """Return a prompt whose order is that in memory, its tokens, and what the oracle knows of it."""
    texts, sets = PROMPTS[name]
    numbers = random.Random(seed)
    written = [[numbers.randrange(3, 128) for _ in range(length)] for length in texts]
    segments = [[[numbers.randrange(3, 128) for _ in range(length)] for length in each] for each in sets]
    parts = [written[0]]
    ids = list(written[0])
    for each, text in zip(segments, written[1:], strict=True):
        parts += [SegmentSet(each), text]
        ids += [*chain(*each), *text]
    grown = (*texts[:-1], texts[-1] + NEW_TOKENS - 1)
    return Prompt.of(*parts), ids, World.of(grown, sets)


def _error(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(("number", "family"), list(enumerate(("llama", "phi3", "gptj", "mpt", "falcon (ALiBi)"))))
def test_segments_that_share_positions_reach_past_the_window(number, family):
    """The prompt has 54 tokens at 23 positions, for a window of 48."""
    prompt, _, _ = _prompt("past the window")
    model = build(family, max_position_embeddings=48, **({"max_seq_len": 48} if family == "mpt" else {}))
    methods = ("set-based", "parallel-windows", "structured", "ape") * 2
    for method in methods[number % 4 : number % 4 + 2]:
        _compare(model, method, "sdpa", "past the window")
        with pytest.raises(ContextOverflow, match="at most 48 tokens"):
            InvariantModel(model, method=method).generate(prompt, max_new_tokens=48 - 23 + 1)
    with pytest.raises(ContextOverflow, match="at most 48 tokens"):
        InvariantModel(model, method="rotor").logits(prompt)


@pytest.mark.parametrize(("family", "method", "backend", "name"), list(combinations()))
def test_logits_and_cached_decoding_are_what_the_papers_say(family, method, backend, name):
    _compare(build(family), method, backend, name)


def _compare(model, method, backend, name):
    prompt, ids, world = _prompt(name)
    chosen = APE(APE_TEMPERATURE, APE_SCALE) if method == "ape" else method
    with float64_throughout():
        models = [InvariantModel(model, method=chosen, ordering="given", backend=b) for b in ("reference", backend)]
        found = [(lm.logits(prompt), lm.generate(prompt, max_new_tokens=NEW_TOKENS)) for lm in models]
        written, largest = found[0][1].token_ids, max(models[0].prepare(prompt).positions)

        def attend(module, hidden):  # dynamic frequencies are chosen by the largest position of the prompt
            return layer_of(module, model.config, hidden, largest).outputs(world, METHODS[method])

        expected = logits_with(model, [*ids, *written[:-1]], attend)
        logprobs = expected[len(ids) - 1 :].log_softmax(dim=-1)[range(NEW_TOKENS), written]
    rope = getattr(model.config, "rope_parameters", None) or {}
    for logits, answer in found:
        assert _error(logits, expected[len(ids) - len(prompt.suffix) : len(ids)]) < BOUND
        if rope.get("rope_type") != "dynamic":  # there, transformers changes frequencies while it decodes
            assert _error(torch.tensor(answer.logprobs, dtype=torch.float64), logprobs) < BOUND


ONE_LAYER = {
    "texts": st.lists(st.integers(0, 3), min_size=4, max_size=4),
    "sets": st.lists(st.lists(st.integers(0, 8), max_size=4), min_size=1, max_size=3),
    "interleaved": st.booleans(),
    "window": st.none() | st.integers(1, 12),
    "softcap": st.none() | st.just(2.0),
    "has_sinks": st.booleans(),
    "short": st.sampled_from([1, 6, 64]),
    "cut": st.integers(0, 40),
    "are_tied": st.just(False),
    "seed": st.integers(0, 99),
}
PLAIN = dict.fromkeys(("interleaved", "has_sinks", "are_tied"), False) | {"window": None, "softcap": None}
PLAIN |= {"short": 1, "cut": 0, "seed": 0}


@pytest.mark.parametrize("method", METHODS)
@settings(max_examples=6, deadline=None)
@example({"texts": [0, 0, 0, 0], "sets": [[1, 1], [1, 1]], **PLAIN})
@example({"texts": [2, 1, 0, 0], "sets": [[3, 1, 4], [2]], **PLAIN})
@example({"texts": [2, 0, 0, 0], "sets": [[3, 3, 3]], **PLAIN, "window": 6, "are_tied": True})
@given(st.fixed_dictionaries(ONE_LAYER))
def test_one_layer_computes_what_the_papers_say_for_any_lengths(method, case):
    """Sets and segments may be empty. Then queries from anywhere on alone; two more tokens are decoded one by one.

    Segments are equally important where keys are zero: they keep their order, and the window covers the nearest only.
    """
    sets, window, softcap = (case[name] for name in ("sets", "window", "softcap"))
    before = case["texts"][: len(sets)]
    layout, world = Layout((*before, 1), tuple(map(tuple, sets))), World.of((*before, 3), sets)
    draw, total = np.random.default_rng(case["seed"]), layout.length + 2
    raw = [draw.normal(size=(heads, total, 8)) for heads in (4, 2, 2)]
    raw[1] *= not case["are_tied"]
    rotary = Rotary(10.0 ** -np.arange(3), case["interleaved"], factor=1.3)
    sinks = draw.normal(size=4) if case["has_sinks"] else None
    layer = Layer(*raw, 0.4, rotary, sliding_window=window, softcap=softcap, sinks=sinks)
    arrangement = resolve_method(APE(APE_TEMPERATURE, APE_SCALE) if method == "ape" else method).arrange(layout)
    end = arrangement.positions[-1]
    positions = [*arrangement.positions, end + 1, end + 2]
    placed = [rotary.rotate(each, np.array(positions)) for each in raw[:2]]
    queries, keys, values = (torch.from_numpy(each) for each in (*placed, raw[2]))
    module = frequencies(rotary.frequencies)
    vars(module)["attention_scaling"] = rotary.factor
    options = {"scaling": 0.4, "sliding_window": window, "softcap": softcap, "scratch": {}}
    options["sinks"] = None if sinks is None else torch.from_numpy(sinks)
    expected = torch.from_numpy(layer.outputs(world, METHODS[method]))
    prompt = layout.length
    cut = 0 if method in ("pine", "pine-reverse") else case["cut"] % prompt  # these rank for whole segments
    parts = {(0, prompt), (cut, prompt), (prompt, prompt + 1), (prompt + 1, prompt + 2)}
    for backend, (start, stop) in product(("reference", "sdpa"), sorted(parts)):
        tensors = queries[:, start:stop], keys[:, :stop], values[:, :stop]
        with float64_throughout(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(pine, "_SHORT", case["short"])
            call = AttentionCall(*tensors, Rotation(module, "inv_freq", case["interleaved"]), **options)
            found = resolve_backend(backend).attend(arrangement, call)
        assert _error(found.transpose(0, 1).flatten(1), expected[start:stop]) < BOUND


def test_the_oracle_shares_no_code_with_the_library():
    files = [each for each in Path(__file__).parent.glob("*.py") if not each.name.startswith("test_")]
    assert len(files) == 2
    assert not [each for each in files if "invariant_rag" in each.read_text()]
