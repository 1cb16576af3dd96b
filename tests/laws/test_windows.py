"""PCW and Structured Prompting as their published code computes them: one forward pass for each window, keys joined."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from invariant_rag import InvariantModel, Prompt, SegmentSet
from invariant_rag.arrangement import Layout
from invariant_rag.methods import Structured
from invariant_rag.testing import random_prompt
from invariant_rag.testing.families import tiny_model
from invariant_rag.testing.rounding import rounding

Layers = list[tuple[torch.Tensor, torch.Tensor]]
FAMILIES = {
    "llama, grouped heads": ("llama", {}),
    "llama, one key head per head": ("llama", {"num_key_value_heads": 4}),
    "qwen2": ("qwen2", {}),
}
GOLDEN = Path(__file__).parents[1] / "golden" / "windows.npz"
LENGTHS = ((4,), (2, 5), (3, 1, 6), (4, 4, 1, 7), (1, 6, 2, 3, 5), (5, 2, 2, 9, 1, 3))


@dataclass(frozen=True)
class Context:
    """What was read: keys and values, the score that later tokens add to each key, and where the next text starts."""

    model: Any
    layers: Layers
    added: tuple[float, ...] = ()
    position: int = 0
    score: float = 0.0

    def read(self, tokens: list[int], position: int | None = None) -> tuple[torch.Tensor, Context]:
        """Read more tokens; return their logits, and the context with them."""
        if not tokens:
            return torch.empty(0), self
        start = self.position if position is None else position
        cache = DynamicCache()
        for index, (keys, values) in enumerate(self.layers):
            cache.update(keys, values, index)
        known, count = len(self.added), len(tokens)
        added = (*self.added, *[self.score] * count)
        mask = torch.tensor(added, dtype=torch.float64).repeat(count, 1)
        mask[:, known:] += torch.full((count, count), -torch.inf, dtype=torch.float64).triu(1)
        with torch.no_grad():
            logits = self.model(
                torch.tensor([tokens]),
                position_ids=torch.arange(start, start + count)[None],
                attention_mask=mask[None, None],
                past_key_values=cache,
            ).logits[0]
        layers = [(layer.keys, layer.values) for layer in cache.layers]
        return logits, replace(self, layers=layers, added=added, position=start + count)

    def parallel_windows(self, segments: list[list[int]]) -> Context:
        """Ratner et al.: the longest window, and all others without their first token; then the end of the longest."""
        windows = [self.read(each)[1] for each in segments]
        longest = max(windows, key=lambda each: each.position)
        joined = [longest, *(each.without(1) for each in windows if each is not longest)]
        return replace(self._joined(joined), position=longest.position)

    def structured(self, segments: list[list[int]]) -> Context:
        """Hao et al.: groups end alike, what is before them is kept once, and what follows counts for each group."""
        end = self.position + max(map(len, segments))
        groups = [self.read(each, position=end - len(each))[1] for each in segments]
        joined = [groups[0], *(each.without(len(self.added)) for each in groups[1:])]
        return replace(self._joined(joined), position=end, score=self.score + log(len(segments)))

    def without(self, count: int) -> Context:
        """The context without its first tokens."""
        layers = [(keys[:, :, count:], values[:, :, count:]) for keys, values in self.layers]
        return replace(self, layers=layers, added=self.added[count:])

    def _joined(self, parts: list[Context]) -> Context:
        layers = [
            tuple(torch.cat([part.layers[index][which] for part in parts], dim=2) for which in (0, 1))
            for index in range(len(parts[0].layers))
        ]
        return replace(self, layers=layers, added=sum((part.added for part in parts), ()))


def published(model: PreTrainedModel, prompt: Prompt, method: str, steps: int) -> tuple[torch.Tensor, list[int]]:
    """The logits of the suffix and of `steps` greedy tokens, and these tokens."""
    _, context = Context(model, []).read(list(prompt.texts[0]))
    for each, text in zip(prompt.sets, prompt.texts[1:], strict=True):
        segments = [list(segment.token_ids) for segment in each]
        context = context.parallel_windows(segments) if method == "parallel-windows" else context.structured(segments)
        logits, context = context.read(list(text))
    written: list[int] = []
    for _ in range(steps):
        written.append(int(logits[-1].argmax()))
        more, context = context.read(written[-1:])
        logits = torch.cat((logits, more))
    return logits, written


def assert_as_published(model: PreTrainedModel, prompt: Prompt, method: str, backend: str = "sdpa") -> None:
    logits, written = published(model, prompt, method, steps=6)
    lm = InvariantModel(model, method=method, backend=backend)
    assert lm.generate(prompt, max_new_tokens=6).token_ids == tuple(written)
    before = [part for pair in zip(prompt.texts, prompt.sets, strict=False) for part in pair]
    longer = Prompt.of(*before, [*prompt.suffix, *written])
    bound = rounding(lm.logits, longer, dtype=torch.float64)
    torch.testing.assert_close(lm.logits(longer), logits.float(), atol=bound, rtol=0)


@pytest.mark.parametrize("method", ["parallel-windows", "structured"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_and_decoding_are_those_of_one_pass_for_each_window(family: str, method: str) -> None:
    name, options = FAMILIES[family]
    model: Any = tiny_model(name, num_hidden_layers=3, eos_token_id=None, **options).double()
    for lengths in LENGTHS:
        assert_as_published(model, random_prompt(random.Random(len(lengths)), lengths, prefix=5), method)


@pytest.mark.parametrize("method", ["parallel-windows", "structured"])
def test_the_reference_does_likewise(method: str) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2, eos_token_id=None).double()
    assert_as_published(model, random_prompt(random.Random(1), LENGTHS[2]), method, "reference")


@pytest.mark.parametrize("method", ["parallel-windows", "structured"])
def test_what_stands_before_a_second_set_is_the_prefix_of_its_windows(method: str) -> None:
    model: Any = tiny_model("llama", num_hidden_layers=2, eos_token_id=None).double()
    first, second = SegmentSet([[5, 6, 7], [8]]), SegmentSet([[9, 10], [11, 12, 13, 14], [15]])
    assert_as_published(model, Prompt.of([3, 4, 20], first, [21, 22], second, [23, 24]), method)
    assert_as_published(model, Prompt.of([3, 4, 20], first, [], second, [23, 24]), method)


def test_windows_of_a_single_common_token_are_set_based_prompting() -> None:
    for prefix in (0, 1):
        prompt = random_prompt(random.Random(3), (3, 1, 4), prefix=prefix)
        lm = InvariantModel(tiny_model("llama"), method="parallel-windows")
        expected = lm.with_method("set-based").logits(prompt)
        torch.testing.assert_close(lm.logits(prompt), expected, atol=rounding(lm.logits, prompt), rtol=0)
    longer = random_prompt(random.Random(3), (3, 1, 4), prefix=2)
    assert float((lm.logits(longer) - lm.with_method("set-based").logits(longer)).abs().max()) > 1e-2


def test_logits_and_greedy_tokens_are_those_of_the_published_functions(
    golden_model: PreTrainedModel, golden_manifest: dict[str, Any]
) -> None:
    """The last logits and 8 greedy tokens, in float32, of two golden cases in `windows.npz`.

    PCW: `combine_past_key_values` and `generate_pcw_position_ids` of AI21Labs/Parallel-Context-Windows (e6d3100) with
    transformers' Llama. Structured Prompting: `make_positions` and the rescaling of `MultiheadAttention.forward` of
    microsoft/LMOps (4f2a9de) in that Llama; there, the prefix is the first token, as in all of its prompts.
    """
    with np.load(GOLDEN) as arrays:
        golden = dict(arrays)
    names = {tuple(key.split("/")[:2]) for key in golden}
    assert len(names) == 4
    for method, name in names:
        case = golden_manifest["cases"][name]
        prefix = case["prefix"][:1] if method == "structured" else case["prefix"]
        prompt = Prompt(prefix, case["segs"], case["suffix"])
        lm = InvariantModel(golden_model, method=method)
        expected = torch.from_numpy(golden[f"{method}/{name}/last_logits"])
        torch.testing.assert_close(lm.logits(prompt)[-1], expected, atol=rounding(lm.logits, prompt), rtol=0)
        written = lm.generate(prompt, max_new_tokens=8).token_ids
        assert written == tuple(golden[f"{method}/{name}/greedy"].tolist())


def test_positions_of_groups_are_the_published_ones() -> None:
    """`make_positions` of microsoft/LMOps for groups of 4, 6 and 2 tokens, the first of which is common, and a test."""
    published = [0, *(3, 4, 5), *(1, 2, 3, 4, 5), 5, *(6, 7, 8)]
    assert Structured().arrange(Layout((1, 3), ((3, 5, 1),))).positions == tuple(published)
