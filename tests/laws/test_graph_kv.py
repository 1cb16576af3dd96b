"""Graph-KV against the model itself, with a mask and positions written down from the paper."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from invariant_rag import InvariantModel, Prompt, Segment, SegmentSet
from invariant_rag.attention import available_backends
from invariant_rag.errors import InvalidPrompt, InvalidSegment
from invariant_rag.generation.kv_cache import KeyValueCache
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

A, B = Segment(token_ids=(5, 6)), Segment(token_ids=(7,))
LONG = Segment(token_ids=(30, 31, 32, 33, 34))
READER = Segment(token_ids=(8, 9, 10), sources=(A, LONG))
CHAIN = Segment(token_ids=(20, 21, 22, 23), sources=(READER, B))

SETS = {
    "none": [],
    "one": [A],
    "two, one reads the other": [A, Segment(token_ids=(9, 9, 4), sources=[A])],
    "a reader and a bystander": [A, B, LONG, READER],
    "a chain: a source that reads": [B, CHAIN, A, READER, LONG],
    "six, two readers of one source": [
        A,
        B,
        LONG,
        READER,
        Segment(token_ids=(11, 12), sources=[A]),
        Segment(token_ids=(13, 14, 15, 16, 17, 18, 19), sources=[LONG, B]),
    ],
    "a source that is there twice": [A, A, B, Segment(token_ids=(40, 41), sources=[A])],
    "only readers of one": [LONG, *(Segment(token_ids=(50 + i,) * (i + 1), sources=[LONG]) for i in range(3))],
}


def paper(model: PreTrainedModel, parts: Sequence[Any]) -> torch.Tensor:
    """Logits at the last text, from section 3.1, for texts (lists of ids) and sets (lists of segments).

    Every chunk that is read as a source, or that reads nothing, stands in the first range of positions; every chunk
    that reads others stands in the second. Tokens carry (copy, what they may see): the texts before, the source copies
    of their sources, their own copy. Texts see all copies.
    """
    ids: list[int] = []
    positions: list[int] = []
    rows: list[set[int]] = []
    start = 0

    def put(tokens: Sequence[int], at: int, sees: set[int]) -> set[int]:
        own: set[int] = set()
        for offset, token in enumerate(tokens):
            own.add(len(ids))
            rows.append(sees | own)
            ids.append(token)
            positions.append(at + offset)
        return own

    for part in parts:
        before = set(range(len(ids)))
        if not part or not isinstance(part[0], Segment):
            put(part, start, before)
            start += len(part)
            continue
        sources = {source for each in part for source in each.sources}
        firsts = [each for each in part if not each.sources or each in sources]
        copies = [(each, put(each.token_ids, start, before)) for each in firsts]
        behind = start + max(len(each.token_ids) for each in firsts)
        readers = [each for each in part if each.sources]
        for each in readers:
            seen = [copy for other, copy in copies if other in each.sources]
            put(each.token_ids, behind, before.union(*seen))
        start = behind + max((len(each.token_ids) for each in readers), default=0)
    mask = torch.full((len(ids), len(ids)), -torch.inf, dtype=torch.float64)
    for token, row in enumerate(rows):
        mask[token, list(row)] = 0.0
    with torch.no_grad():
        options = {"position_ids": torch.tensor([positions]), "attention_mask": mask[None, None], "use_cache": False}
        logits: torch.Tensor = model(torch.tensor([ids]), **options).logits[0, -len(parts[-1]) :]
    return logits.float()


@pytest.fixture(scope="module", params=["llama", "qwen2"])
def float64(request: pytest.FixtureRequest) -> PreTrainedModel:
    model: Any = tiny_model(request.param, num_hidden_layers=2)
    return model.double()


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("backend", available_backends())
def test_logits_are_those_of_the_paper(float64: PreTrainedModel, name: str, backend: str) -> None:
    chosen = SETS[name]
    lm = InvariantModel(float64, method="graph-kv", backend=backend)
    prompt = Prompt([3, 4, 2], chosen, [11, 12])
    expected, bound = paper(float64, [[3, 4, 2], chosen, [11, 12]]), rounding(lm.logits, prompt, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(prompt), expected, atol=bound, rtol=0)


def test_several_sets_each_have_their_ranges(float64: PreTrainedModel) -> None:
    first, second = SETS["a reader and a bystander"], SETS["a chain: a source that reads"]
    prompt = Prompt.of([3], SegmentSet(first), [4, 2], SegmentSet(second), [6], SegmentSet([B]), [11, 12])
    expected = paper(float64, [[3], first, [4, 2], second, [6], [B], [11, 12]])
    lm = InvariantModel(float64, method="graph-kv")
    bound = rounding(lm.logits, prompt, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(prompt), expected, atol=bound, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_permutation_gives_the_same_bits(dtype: torch.dtype) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2, eos_token_id=None)
    lm = InvariantModel(model.to(dtype), method="graph-kv")
    for name in ("a reader and a bystander", "a source that is there twice"):
        prompts = [Prompt([3, 4], order, [11, 12]) for order in itertools.permutations(SETS[name])]
        assert len(prompts) == 24
        expected, written = lm.logits(prompts[0]), lm.generate(prompts[0], max_new_tokens=4).token_ids
        for prompt in prompts[1:]:
            assert torch.equal(lm.logits(prompt), expected)
            assert lm.generate(prompt, max_new_tokens=4).token_ids == written
    chain = Prompt([3, 4], SETS["a chain: a source that reads"], [11, 12])
    assert all(torch.equal(lm.logits(chain), lm.logits(chain.shuffled(random.Random(i)))) for i in range(20))


def test_who_reads_whom_changes_the_answer(llama: PreTrainedModel) -> None:
    lm = InvariantModel(llama, method="graph-kv")
    answers = [
        lm.logits(Prompt([3, 4], [A, B, LONG, Segment(token_ids=(8, 9, 10), sources=each)], [11, 12]))
        for each in ([], [A], [B], [A, B], [A, B, LONG])
    ]
    for one, other in itertools.combinations(answers, 2):
        assert float((one - other).abs().max()) > 1e-3
    plain = lm.with_method("set-based").logits(Prompt([3, 4], [A, B, LONG, READER], [11, 12]))
    assert torch.equal(plain, answers[0]), "without sources it is set-based, and other methods read no sources"


@pytest.mark.parametrize("name", ["two, one reads the other", "a chain: a source that reads"])
def test_decoding_scoring_batches_and_the_cache_agree_with_recomputing(llama: PreTrainedModel, name: str) -> None:
    lm, prompt = InvariantModel(llama, method="graph-kv"), Prompt([3, 4], SETS[name], [11, 12])
    written = lm.generate(prompt, max_new_tokens=12).token_ids
    longer = Prompt([3, 4], SETS[name], [11, 12, *written[:-1]])
    assert tuple(lm.logits(longer)[1:].argmax(dim=-1).tolist()) == written
    logprobs = torch.log_softmax(lm.logits(longer), dim=-1)[1:]
    expected = sum(float(logprobs[step, token]) for step, token in enumerate(written))
    assert lm.score(prompt, [written, [3]])[0] == pytest.approx(
        expected, abs=rounding(lm.score, prompt, [written, [3]])
    )
    other = Prompt([3], [A, B], [9])
    assert [each.token_ids for each in lm.generate([other, prompt], max_new_tokens=12)][1] == written
    cached = lm.with_cache(KeyValueCache())
    cold, warm = cached.generate(prompt, max_new_tokens=12), cached.generate(prompt, max_new_tokens=12)
    assert cold.token_ids == warm.token_ids == written
    assert warm.usage.cached_tokens
    without = Prompt([3, 4], [Segment(token_ids=each.token_ids) for each in SETS[name]], [11, 12])
    assert torch.equal(cached.logits(without), lm.with_cache(KeyValueCache()).logits(without)), (
        "other sources, other key"
    )


def test_a_source_that_overflow_drops_is_read_no_longer(llama: PreTrainedModel) -> None:
    dropping = InvariantModel(llama, method="graph-kv", max_segment_tokens=4, overflow="drop_last")
    reader, alone = Segment(token_ids=(8, 9, 10), sources=[A, LONG]), Segment(token_ids=(8, 9, 10), sources=[A])
    prompt = Prompt([3, 4], [A, LONG, reader], [11, 12])
    assert dropping.generate(prompt, max_new_tokens=1).dropped == (1,)
    assert torch.equal(dropping.logits(prompt), dropping.logits(Prompt([3, 4], [A, alone], [11, 12])))


def test_sources_are_a_set_and_part_of_the_segment() -> None:
    one, two = Segment("x", sources=["a", "b"]), Segment("x", sources=[Segment("b"), "a", "a"])
    assert one == two
    assert hash(one) == hash(two)
    assert one.sources == (Segment("a"), Segment("b"))
    assert one != Segment("x", sources=["a"]) != Segment("x")
    assert pickle.loads(pickle.dumps(one)) == one


def test_what_is_no_source_is_refused(llama: PreTrainedModel) -> None:
    for wrong in ("a", Segment("a"), 3, {"a": 1}):
        with pytest.raises(InvalidSegment, match="sources: expected a collection"):
            Segment("x", sources=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidSegment, match="expected str, Segment or token ids"):
        Segment("x", sources=[None])  # type: ignore[list-item]
    lm = InvariantModel(llama, method="graph-kv")
    for prompt in (Prompt([3], [A, CHAIN], [9]), Prompt.of([3], SegmentSet([A, LONG]), SegmentSet([READER]), [9])):
        with pytest.raises(InvalidPrompt, match="sources of a segment in its own set"):
            lm.logits(prompt)
