"""Attention beyond the laws: gradients, parts, masks, the private operator; positions; and the backend `varlen`.

Windows of `varlen` say what the rows say, its kernels agree, and its calls do not grow. Where there is no GPU, a double
stands for the function that CUDA's kernel calls. It does what is documented, for the arguments that it was given.
"""

import random
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DynamicCache
from transformers import masking_utils as masks

from invariant_rag import InvariantModel
from invariant_rag.arrangement import Arrangement, Layout, Span
from invariant_rag.attention import BACKENDS, backend_label, resolve_backend, softmax
from invariant_rag.attention.base import AttentionCall
from invariant_rag.attention.hook import _sliding_window
from invariant_rag.attention.per_model import cache_keyword, forward_parameters
from invariant_rag.attention.positions import Alibi, Rotation, candidates
from invariant_rag.attention.reference import Reference
from invariant_rag.attention.varlen import Grouped, TorchVarlen, Varlen, difference, usable_kernel
from invariant_rag.attention.varlen.kernels import PackedLayer, PackedWindows
from invariant_rag.errors import UnknownName, UnsupportedModel
from invariant_rag.methods import METHODS, resolve_method
from invariant_rag.testing import random_prompt, tiny_model
from invariant_rag.testing.rounding import assert_rounded_alike, rounding
from tests.comparing import another_thread_at, assert_computes, frequencies

RING = (5, 1, 7, 3, 3, 1, 2, 9, 4)


def test_backends_have_names_and_auto_chooses_by_the_device():
    assert [resolve_backend(name).name for name in BACKENDS] == list(BACKENDS)
    assert resolve_backend("auto", torch.device("cuda")).name == "varlen"
    assert resolve_backend("auto", torch.device("cpu")).name == resolve_backend("auto").name == "sdpa"
    assert InvariantModel(tiny_model("llama")).with_method(backend="auto").backend.name == "sdpa"
    with pytest.raises(UnknownName, match=r"'auto'.*'reference'.*'sdpa'.*'varlen'"):
        resolve_backend("flex")


@pytest.mark.parametrize(("method", "trained"), [("rotor", "q_proj"), ("pine", "v_proj"), ("pine-in-place", "q_proj")])
def test_gradients_flow_and_are_the_same_where_some_projections_are_trained_alone(method, trained):
    model, prompt = tiny_model("llama"), random_prompt(random.Random(0), (3, 5, 2))
    lm, weight = InvariantModel(model, method=method), getattr(model.model.layers[0].self_attn, trained).weight
    prepared = lm.prepare(prompt)

    def logits():
        with lm.arranged([prepared]):
            return model(torch.tensor([prepared.input_ids]), use_cache=False).logits[0, -4:]

    def gradient(others):
        model.requires_grad_(others)
        weight.requires_grad_(True)
        model.zero_grad(set_to_none=True)
        logits().logsumexp(dim=-1).sum().backward()
        return weight.grad.clone()

    assert_computes(logits().detach(), lm.logits, prompt)
    bound, among_all = rounding(gradient, True), gradient(True)
    assert all(each.grad is not None and torch.isfinite(each.grad).all() for each in model.parameters())
    torch.testing.assert_close(gradient(False), among_all, atol=bound, rtol=0)


@pytest.mark.parametrize(("method", "backend"), [("pine", "sdpa"), ("pine", "varlen"), ("rotor", "varlen")])
def test_another_text_with_the_same_arrangement_keeps_nothing_of_the_one_before(llama, method, backend):
    lm = InvariantModel(llama, method=method, ordering="given", backend=backend)
    one, other = (lm.prepare(random_prompt(random.Random(seed), (3, 5, 2))) for seed in (0, 1))
    assert one.arrangement == other.arrangement

    def logits_of(prepared):
        """Logits of the prompt and of a decoded token."""
        cache = {cache_keyword(forward_parameters(llama)): DynamicCache()}
        steps = (prepared.input_ids, [9])
        return torch.cat([llama(torch.tensor([ids]), use_cache=True, **cache).logits for ids in steps], dim=1)

    with torch.no_grad():
        with lm.arranged([other]):
            expected = logits_of(other)
        with lm.arranged([one]):
            assert not torch.equal(logits_of(one), expected)
            assert torch.equal(logits_of(other), expected)


PARTS = {
    **{f"rows, {n} together": ("llama", "sdpa", {"sdpa._BATCH": n}) for n in (0, 12, 10_000)},
    **{
        family: (family, "sdpa", {"softmax._QUERY_BLOCK": 3, "softmax._SCORE_BLOCK": 3})
        for family in ("mistral (sliding window)", "gemma2", "gpt_oss")
    },
    "packed queries": ("llama", "varlen", {"varlen.packing._BLOCK": 5}),
}
"""How prompts are attended to in parts: neighbouring rows, and blocks of the queries of long rows, or of all rows."""


@pytest.mark.parametrize("name", PARTS)
def test_prompts_give_the_same_in_parts(name, monkeypatch):
    family, backend, sizes = PARTS[name]
    model, draw = tiny_model(family, num_hidden_layers=2), random.Random(1)
    prompts = [random_prompt(draw, lengths, prefix=n) for lengths, n in (((20, 40, 7), 6), (RING, 0), (RING, 1))]
    for place, size in sizes.items():
        monkeypatch.setattr(f"invariant_rag.attention.{place}", size)
    for method, prompt in product(("rotor", "pine", "isolated", "ape"), prompts):
        exact, lm = (InvariantModel(model, method=method, backend=each) for each in ("reference", backend))
        assert_computes(exact.logits(prompt), lm.logits, prompt)


def test_the_window_is_read_off_the_mask_of_transformers_and_other_masks_are_refused():
    for window in (1, 2, 3, 16, 4095, 4096, 100_000):
        assert _sliding_window(masks.sliding_window_causal_mask_function(window)) == window
    assert _sliding_window(masks.causal_mask_function) is None
    for window, ours in ((None, [[1, 1, 1, 0], [1, 1, 1, 1]]), (2, [[0, 1, 1, 0], [0, 0, 1, 1]])):
        assert softmax.causal_mask(2, 4, window, torch.device("cpu")).int().tolist() == ours
    chunked = masks.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64))
    for mask in (chunked, masks.bidirectional_mask_function):
        with pytest.raises(UnsupportedModel):
            _sliding_window(mask)


# --- the private operator of PyTorch, and what stands in for it where a release has none ---


@pytest.mark.parametrize("kernel", dict.fromkeys([softmax._kernel(), softmax.ungrouped_kernel]))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("count", "is_causal"), [(1, False), (5, True), (5, False)])
def test_matrix_products_compute_what_the_fused_operator_computes(kernel, dtype, count, is_causal):
    draw = torch.Generator().manual_seed(0)
    queries = torch.randn(3, 4, count, 16, generator=draw, dtype=torch.float64).to(dtype)
    keys, values = (torch.randn(3, 2, 5, 16, generator=draw, dtype=torch.float64).to(dtype) for _ in range(2))
    mask = torch.zeros(3, 1, count, 5, dtype=dtype)
    mask[..., 0] = float("-inf")
    for bias in (None, None if is_causal else mask):
        options = {"is_causal": is_causal, "attn_mask": bias, "scale": 0.3}
        one, other = (each(queries, keys, values, **options) for each in (kernel, softmax.matmul_kernel))
        bound = rounding(partial(softmax.matmul_kernel, **options), queries, keys, values, dtype=dtype)
        for fast, slow in zip(one, other, strict=True):
            torch.testing.assert_close(fast, slow, atol=bound, rtol=0)


@pytest.mark.parametrize("method", ["rotor", "pine"])
@pytest.mark.parametrize("named", ["_an_operator_that_no_release_has", f"{softmax.OPERATOR}_backward"])
def test_an_operator_that_is_missing_or_computes_something_else_is_not_used_and_answers_are_the_same(
    named, method, llama, monkeypatch, caplog, request
):
    """The kernel is chosen once for each process: it is chosen anew in this test and after it."""
    request.addfinalizer(softmax._kernel.cache_clear)
    lm, prompt = InvariantModel(llama, method=method), random_prompt(random.Random(0), (5, 1, 70, 3))
    with_operator = lm.logits(prompt)
    assert softmax._kernel() is not softmax.matmul_kernel
    softmax._kernel.cache_clear()
    monkeypatch.setattr(softmax, "OPERATOR", named)
    assert_computes(with_operator, lm.logits, prompt)
    assert softmax._kernel() is softmax.matmul_kernel
    assert sum("matrix products" in record.message for record in caplog.records) == 1
    assert "not those" in softmax._difference(lambda q, k, v, **options: softmax.matmul_kernel(q, k, 2 * v, **options))
    assert torch.equal(lm.logits(prompt.shuffled(random.Random(1))), lm.logits(prompt))


# --- positions ---

ENCODINGS = {
    "half-split": Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq", interleaved=False),
    "interleaved": Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq", interleaved=True),
    "ALiBi": Alibi(torch.tensor([0.5, 0.125], dtype=torch.float64)),
}


@pytest.mark.parametrize("encoding", ENCODINGS.values(), ids=ENCODINGS)
def test_shifts_add_up_and_undo_each_other_and_are_complex_factors_or_looked_up_in_a_table_to_its_ends(encoding):
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    turned = encoding.rotate_by(encoding.rotate_by(x, 700), -3)
    assert_rounded_alike(turned, encoding.rotate_by(x, 697), 3 * 700, magnitude=700)  # positions of up to 700
    assert_rounded_alike(encoding.rotate_by(turned, -697), x, 3 * 700, magnitude=700)
    shifts = torch.tensor([[5, -2, 0], [40, 1, -40]])
    assert_rounded_alike(encoding.rotate_each(x, shifts, 40), encoding.rotate_by(x, shifts))
    if isinstance(encoding, Rotation):  # one factor for each pair of dimensions
        turns = torch.exp(1j * shifts[..., None] * encoding.frequencies().double())
        assert_rounded_alike(encoding.rotate_with(x, turns), encoding.rotate_by(x, shifts), magnitude=40)


def test_scores_of_alibi_lose_slope_times_distance_whether_keys_are_a_part_of_the_prompt_or_more():
    alibi, shapes = ENCODINGS["ALiBi"], ((2, 3, 8), (1, 7, 8), (1, 7, 8))
    call = AttentionCall(*(torch.randn(shape).double() for shape in shapes), rotation=alibi, scaling=0.25)
    for at, known in (((0, 1, 2, 2, 3, 9, 10), 7), ((0, 1, 2, 2, 9, 10, 11), 5), ((0, 1, 2, 2, 9, 10, 11, 12), 8)):
        prompt, positions = Arrangement(Layout((known,), ()), (), at[:known]), torch.tensor(at[:7])
        encoded = alibi.encoded(replace(call, scratch={}), prompt)
        biases = alibi.slopes[:, None, None] * (positions[-3:, None] - positions)
        expected = call.queries @ call.keys.mT * call.scaling - biases
        assert_rounded_alike(encoded.queries @ encoded.keys.mT * call.scaling, expected)


def test_the_table_of_angles_follows_the_frequencies():
    rotation = Rotation(frequencies([1.0, 0.3, 0.05]), "inv_freq")
    x, shift = torch.randn(1, 8), torch.tensor([3])
    before = rotation.rotate_each(x, shift, 10)
    rotation.module.inv_freq = torch.tensor([0.7, 0.2, 0.01])
    after = rotation.rotate_each(x, shift, 10)
    assert not torch.equal(before, after)
    assert_rounded_alike(after, rotation.rotate_by(x, 3))
    rotation.module.inv_freq *= 2  # the same tensor, with other numbers
    assert_rounded_alike(rotation.rotate_each(x, shift, 10), rotation.rotate_by(x, 3))
    assert not torch.equal(rotation.rotate_each(x, shift, 10), after)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frequencies_of_a_table_of_sines_are_exact_in_half_precision_too(dtype):
    """GPT-J keeps a table `[positions, R]` in each layer. The angles of its last position are nearly exact."""
    model = tiny_model("gptj", max_position_embeddings=2048).to(dtype)
    found = [each.frequencies() for each in candidates(model) if each.module is not None]
    exact = 10000.0 ** -(torch.arange(0, 8, 2, dtype=torch.float64) / 8)
    assert len(found) == 2, "one for each layout, from the first layer"
    angles = torch.finfo(dtype).eps + 2047 * torch.finfo(torch.float32).eps  # of the table, and of 2047 radians in it
    torch.testing.assert_close(found[0], exact, atol=angles / 2047, rtol=0)


# --- frequencies that depend on the length: what other threads run on the model meanwhile changes no bit ---

PROMPT = random_prompt(random.Random(0), (9, 4, 11), suffix=5)
BEYOND = random_prompt(random.Random(0), (30, 4, 61), suffix=5)
"""Longer than the trained length (64)."""
EVEN_LONGER = torch.arange(3, 123)[None] % 90
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64, "factor": 4.0}
LONGROPE |= {"short_factor": [1.0] * 8, "long_factor": [2.0 + index for index in range(8)]}
KINDS = {
    "dynamic": {"family": "llama (dynamic scaling)"},
    "longrope": {"family": "llama", "rope_parameters": LONGROPE, "max_position_embeddings": 256},
}


def model_of(kind):
    return tiny_model(**KINDS[kind], eos_token_id=None, num_hidden_layers=2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["rotor", "pine", "sequential"])
def test_another_thread_in_the_middle_of_a_forward_pass_changes_no_bit_and_gets_its_own_frequencies(kind, method):
    """Around every rotation and in the middle of the layers, another thread runs the model to its end."""
    model = model_of(kind)
    lm, rotary = InvariantModel(model, method=method), model.model.rotary_emb
    for prompt, other in ((PROMPT, EVEN_LONGER), (BEYOND, EVEN_LONGER[:, :5])):
        logits, answer = lm.logits(prompt), lm.generate(prompt, max_new_tokens=2)
        expected = model_of(kind)(input_ids=other, use_cache=False).logits
        places = [rotary, model.model.layers[-1]]
        call = partial(model, input_ids=other, use_cache=False)
        with another_thread_at(places, lambda call=call: call().logits, after=[rotary]) as seen:
            assert torch.equal(lm.logits(prompt), logits)
            assert lm.generate(prompt, max_new_tokens=2).logprobs == answer.logprobs
        assert len(seen) >= 6
        assert all(torch.equal(each, expected) for each in seen)
    assert "forward" not in vars(rotary), "the model must be as it was"


def test_one_call_within_another_or_after_it_has_its_own_frequencies():
    """The plain model remembers no prompt beyond the trained length either."""
    model = model_of("dynamic")
    lm = InvariantModel(model)
    alone, prepared = lm.logits(PROMPT), lm.prepare(BEYOND)
    ids, positions = torch.tensor([prepared.input_ids]), torch.tensor([prepared.positions])
    with lm.arranged([prepared]), torch.no_grad():
        before = model(ids, position_ids=positions, use_cache=False).logits
        assert torch.equal(lm.logits(PROMPT), alone)
        assert torch.equal(model(ids, position_ids=positions, use_cache=False).logits, before)
    lm.generate(BEYOND, max_new_tokens=4)
    assert torch.equal(lm.logits(PROMPT), alone)
    assert model.model.rotary_emb.max_seq_len_cached == 64


# --- the backend `varlen` ---

HEADS, KEY_HEADS, SIZE = 4, 2, 16
CPU = torch.device("cpu")


class Dense:
    """Matrix products over all keys, and a mask, in float32 or wider; the number of operators does not grow."""

    name = "dense"

    def __call__(self, queries, keys, values, windows, scaling):
        wide, (count, heads, _) = torch.promote_types(queries.dtype, torch.float32), queries.shape
        grouped = queries.to(wide).unflatten(1, (keys.shape[1], -1))
        scores = torch.einsum("thgd,shd->thgs", grouped, keys.to(wide)) * scaling
        window = torch.repeat_interleave(windows.query_starts.diff(), output_size=count)
        place, query = torch.arange(len(keys), device=keys.device), torch.arange(count, device=keys.device)
        first = windows.key_starts[window]
        stop = first + windows.key_lengths[window]
        if windows.is_causal:
            stop = stop - (windows.query_starts[window + 1] - 1 - query)
        visible = (place >= first[:, None]) & (place < stop[:, None])
        scores = scores.masked_fill(~visible[:, None, None], float("-inf"))
        out = torch.einsum("thgs,shd->thgd", scores.softmax(dim=-1), values.to(wide))
        return softmax.AttentionState(out.flatten(1, 2).to(queries.dtype), scores.logsumexp(dim=-1).view(count, heads))


def _arrangement(method, chance):
    counts = chance.choice(([3], [1], [5], [2, 3], [1, 1, 2], [0, 4]))
    sets = tuple(tuple(chance.randint(1, 6) for _ in range(count)) for count in counts)
    texts = (chance.randint(0, 4), *(chance.randint(0, 5) for _ in counts[1:]), chance.randint(1, 5))
    return resolve_method(method).arrange(Layout(texts, sets))


def _batch(arrangements, num_queries=None, generated=0, **options):
    lengths = [each.layout.length + generated for each in arrangements]
    longest = max(lengths)
    keys, values = (torch.randn(len(lengths), KEY_HEADS, longest, SIZE, dtype=torch.float64) for _ in range(2))
    queries = torch.randn(len(lengths), HEADS, num_queries or longest, SIZE, dtype=torch.float64)
    rotation = Rotation(frequencies(10_000.0 ** -(torch.arange(0, SIZE, 2).double() / SIZE)), "inv_freq")
    call = AttentionCall(queries, keys, values, rotation, SIZE**-0.5, **options)
    return [longest - length for length in lengths], call


def _assert_by_reference(found, arrangements, padding, call):
    """Assert that each row of a batch `[B, Q, H, D]` is what the reference gives for it, in parts of float32."""
    assert found is not None
    assert torch.isfinite(found).all()
    for row, (arrangement, padded) in enumerate(zip(arrangements, padding, strict=True)):
        skipped = max(0, padded - (call.keys.shape[2] - call.queries.shape[2]))
        tensors = call.queries[row, :, skipped:], call.keys[row, :, padded:], call.values[row, :, padded:]
        one = AttentionCall(*tensors, call.rotation, call.scaling, sinks=call.sinks)
        assert_computes(found[row, skipped:].transpose(0, 1), Reference().attend, arrangement, one)


@pytest.mark.parametrize(
    ("method", "kernel"), [*((method, Dense()) for method in METHODS), ("rotor", Grouped()), ("pine", Grouped())]
)
def test_a_padded_batch_gets_what_each_prompt_gets_by_the_reference(method, kernel):
    """Also the last queries alone, and with sinks. PINE ranks for all tokens of a segment."""
    chance = random.Random(method)
    last = [{"num_queries": count, "sinks": torch.randn(HEADS)} for count in (1, 3)]
    for size, options in ((1, {}), (3, {}), *((3, each) for each in last if method not in ("pine", "pine-reverse"))):
        arrangements = [_arrangement(method, chance) for _ in range(size)]
        padding, call = _batch(arrangements, **options)
        _assert_by_reference(Varlen(kernel).batch(arrangements, padding, call, {}), arrangements, padding, call)


@pytest.mark.parametrize(("method", "kernel"), [("pine", Dense()), ("pine-reverse", Grouped())])
def test_every_decoded_token_gets_what_it_gets_by_the_reference(method, kernel):
    chance, generated = random.Random(method), 3
    for size in (1, 3, 3):
        arrangements = [_arrangement(method, chance) for _ in range(size)]
        sinks = torch.randn(HEADS) if size == 1 else None
        padding, whole = _batch(arrangements, generated + 1, generated, sinks=sinks)
        plans, scratch = {}, {}
        for token in range(generated + 1):
            behind = whole.keys.shape[2] - generated + token
            parts = {name: getattr(whole, name)[:, :, :behind] for name in ("keys", "values")}
            queries = whole.queries[:, :, token : token + 1]
            call = AttentionCall(**{**vars(whole), **parts, "queries": queries, "scratch": scratch})
            _assert_by_reference(Varlen(kernel).batch(arrangements, padding, call, plans), arrangements, padding, call)


# --- what a layer costs ---

WAITS = ("equal", "item", "_local_scalar_dense", "nonzero", "masked_select", "unique", "lift_fresh")
"""Parts of the names of operators that wait for the device, or bring numbers of the host to it."""


class _Operators(TorchDispatchMode):
    """Counts the operators of PyTorch that are called, and what they return that shares no memory with their inputs."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()
        self.sizes = []

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        self.calls[str(function)] += 1
        given = {each.untyped_storage().data_ptr() for each in args if isinstance(each, torch.Tensor)}
        out = function(*args, **(kwargs or {}))
        for each in out if isinstance(out, tuple) else (out,):
            if isinstance(each, torch.Tensor) and each.untyped_storage().data_ptr() not in given:
                self.sizes.append(each.numel())
        return out


@pytest.mark.parametrize("decoding", [False, True], ids=["prefill", "decoding"])
@pytest.mark.parametrize("method", ["rotor", "set-based", "ape", "pine"])
def test_the_operators_of_a_layer_do_not_grow_with_segments_or_prompts(method, decoding):
    def count(prompts, segments):
        layout = Layout((3, 4), ((3,) * segments,))
        arrangements = [resolve_method(method).arrange(layout) for _ in range(prompts)]
        padding, call = _batch(arrangements, 1 if decoding else None)
        backend, plans = Varlen(Dense()), {}
        assert backend.batch(arrangements, padding, call, plans) is not None
        with _Operators() as operators:
            backend.batch(arrangements, padding, call, plans)
        return operators.calls

    few = count(2, 3)
    assert count(2, 30) == few
    assert count(8, 5) == few
    most = 4 if method == "pine" and not decoding else 2
    assert 1 <= few["aten.repeat_interleave.Tensor"] <= most, "calls of the kernel per layer"
    assert not [name for name in few if any(part in name for part in WAITS)], "the device would be waited for"


def test_the_test_above_sees_what_waits_for_the_device():
    numbers = torch.ones(3)
    waiting = (lambda: torch.equal(numbers, numbers), numbers.sum().item, numbers.nonzero, lambda: torch.tensor([1, 2]))
    for part, call in zip(("equal", "_local_scalar_dense", "nonzero", "lift_fresh"), waiting, strict=True):
        with _Operators() as operators:
            call()
        assert any(part in name for name in operators.calls)


def test_another_token_of_the_batch_copies_no_keys():
    """Windows of a cache are packed as it lies: all that is as large as the keys is made at the first token."""
    arrangements = [resolve_method("pine").arrange(Layout((3, 4), ((50, 50, 50),))) for _ in range(4)]
    padding, call = _batch(arrangements, 1)
    backend, plans = Varlen(Grouped()), {}
    backend.batch(arrangements, padding, call, plans)
    with _Operators() as operators:
        backend.batch(arrangements, padding, call, plans)
    assert max(operators.sizes) < call.keys.numel() / 4


# --- kernels ---


def test_a_kernel_that_is_wrong_is_found_out():
    def late(queries, keys, values, windows, scaling):
        """Every window begins one key late."""
        return Dense()(queries, keys.roll(1, 0), values.roll(1, 0), windows, scaling)

    assert not difference(Dense(), CPU, torch.float32)
    assert not difference(Grouped(), CPU, torch.bfloat16)
    assert "not those" in difference(late, CPU, torch.float32)


def test_a_kernel_gets_no_more_windows_than_a_gpu_can_start_blocks():
    def limited(queries, keys, values, windows, scaling):
        counts.append(len(windows.key_lengths))
        return Dense()(queries, keys, values, windows, scaling)

    counts, lengths = [], [1, 2] * 35_000
    spans = [Span(index % 3, index % 3 + 2) for index in range(len(lengths))]
    queries, keys = torch.randn(sum(lengths), 1, 2), torch.randn(5, 1, 2)
    layer = PackedLayer(limited, AttentionCall(queries, keys, keys, Rotation(None), scaling=1.0), queries, keys, keys)
    for is_causal in (True, False):
        windows = PackedWindows.of(lengths, spans, is_causal, CPU)
        found = layer.attend(windows, queries)
        for each, expected in zip(found, Dense()(queries, keys, keys, windows, 1.0), strict=True):
            torch.testing.assert_close(each, expected)
    assert len(counts) == 4
    assert max(counts) < 1 << 16


def test_a_backend_says_which_kernel_it_takes_and_without_one_or_for_other_layers_takes_none(monkeypatch, caplog):
    arrangements = [_arrangement("rotor", random.Random(0))]
    for change in ({"softcap": 5.0}, {"dropout": 0.1}, {"sliding_window": 3}):
        padding, call = _batch(arrangements, **change)
        assert Varlen().batch(arrangements, padding, call, {}) is None, "it is left to the other backend"
    backends = (resolve_backend("sdpa"), Varlen(), Varlen(Dense()))
    labels = [backend_label(each, tiny_model("llama")) for each in backends]
    assert labels == ["sdpa", "varlen (grouped)", "varlen (dense)"]

    def missing(*_):
        raise ImportError("no varlen here")

    monkeypatch.setattr(TorchVarlen, "__call__", missing)
    usable_kernel.cache_clear()
    assert Varlen().kernel_for(torch.device("meta"), torch.bfloat16, 64) is None
    assert "one by one: ImportError: no varlen here" in caplog.text
    usable_kernel.cache_clear()


def test_the_kernel_for_cuda_computes_all_windows_if_its_operator_does_what_is_documented():
    def documented(q, k, v, starts, key_starts, most, most_keys, dropout, causal, debug, *, scale, **keywords):
        lengths = keywords["seqused_k"]
        assert {each.dtype for each in (starts, key_starts, lengths)} == {torch.int32}
        assert len(starts) == len(key_starts) == len(lengths) + 1
        assert (most, most_keys) == (int(starts.diff().max()), int(lengths.max()))
        assert (dropout, debug, causal) == (0.0, False, keywords["window_size_right"] == 0)
        assert keywords["window_size_left"] == -1
        out, lse = Dense()(q, k, v, PackedWindows(starts, key_starts, lengths, most, most_keys, causal), scale)
        return out, lse.T, *(torch.empty(0) for _ in range(3))

    assert difference(TorchVarlen(), CPU, torch.float32), "this cannot be computed on a CPU"
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", documented, "CPU")
        assert not difference(TorchVarlen(), CPU, torch.float32)
    meta = torch.device("meta")  # the operator of the installed PyTorch takes the arguments
    queries = torch.empty(12, 4, 64, dtype=torch.bfloat16, device=meta)
    keys = torch.empty(9, 2, 64, dtype=torch.bfloat16, device=meta)
    for is_causal in (True, False):
        windows = PackedWindows.of((4, 8), [Span(0, 5), Span(0, 9)], is_causal, meta)
        out, lse = TorchVarlen()(queries, keys, keys, windows, 0.125)
        assert (out.shape, out.dtype) == ((12, 4, 64), torch.bfloat16)
        assert (lse.shape, lse.dtype) == ((12, 4), torch.float32)
