"""Does attention between documents help where an answer needs two? `python two_documents.py [--seed 1] [--layers 3]`.

"Ostra flies the flag of its mother city, Varn" and "The flag of Varn is red": what colour is Ostra's? Names are single
tokens, so that a small model is trained from the start in minutes, on one core. Three models are trained on the same
questions: two attend plainly, to documents in random orders or sorted; one in RoToR's arrangement. Each is then asked
about new combinations of names, with documents in random order. The rule, fixed beforehand:
RoToR is the demonstration if it gains 15 points over the plain model with sorted documents.
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from train_native import Ring
from transformers import LlamaConfig, LlamaForCausalLM

from invariant_rag import InvariantModel, Prompt
from invariant_rag.audit.statistics import wilson_interval

NAMES, COLORS, PAIRS, LENGTH = 64, 12, 3, 3
BEGIN, LINK, IS, ASK = range(NAMES + COLORS, NAMES + COLORS + 4)
BATCH, STEPS, RATE = 64, 6_000, 2e-3
CONTEXT = 1 + 2 * PAIRS * LENGTH
RULE = 15
TRAININGS = {"plainly, random orders": (False, False), "plainly, sorted": (False, True), "in RoToR": (True, True)}
"""Whether a model is trained in RoToR's arrangement, and whether on sorted documents."""


def draw(count: int, generator: torch.Generator, two_hops: float, *, ordered: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return documents `[count, 2 * PAIRS, LENGTH]`, a question about each pair, and the answers.

    `ordered`: as the lexical ordering puts them, the largest token ids first.
    """
    names = torch.rand(count, NAMES, generator=generator).argsort(1)[:, : 2 * PAIRS].view(count, PAIRS, 2)
    colors = torch.randint(NAMES, NAMES + COLORS, (count, PAIRS), generator=generator)
    word = torch.ones_like(colors)
    links = torch.stack([names[..., 0], word * LINK, names[..., 1]], -1)
    facts = torch.stack([names[..., 1], word * IS, colors], -1)
    documents = torch.cat([links, facts], 1)
    key = -documents[..., 0].double() if ordered else torch.rand(count, 2 * PAIRS, generator=generator)
    documents = documents.gather(1, key.argsort(1)[..., None].expand_as(documents))
    hops = torch.rand(count, PAIRS, generator=generator) < two_hops
    asked = torch.where(hops, names[..., 0], names[..., 1])
    questions = torch.stack([word * ASK, asked, word * IS], -1)
    mixed = torch.rand(count, PAIRS, generator=generator).argsort(1)
    return documents, questions.gather(1, mixed[..., None].expand_as(questions)), colors.gather(1, mixed)


def batch_of(documents: Tensor, questions: Tensor) -> dict[str, Tensor]:
    """Return rows of a context and its questions, which attend to the context and themselves; and what `Ring` needs."""
    count, total = len(documents), CONTEXT
    ids = torch.cat([torch.full((count, 1), BEGIN), documents.flatten(1), questions.flatten(1)], 1)
    place = torch.arange(ids.shape[1])
    branch = (place - total).div(LENGTH, rounding_mode="floor").add(1).clamp(min=0)
    seen = (place <= place[:, None]) & ((branch == 0) | (branch == branch[:, None]))
    end = place.sub(1).div(LENGTH, rounding_mode="floor").add(1).mul(LENGTH).add(1).clamp(max=total)
    return {
        "ids": ids,
        "positions": torch.where(branch > 0, total + (place - total) % LENGTH, place).expand_as(ids),
        "end": torch.where(place == 0, total, end).expand_as(ids),
        "total": torch.full((count, 1), total),
        "seen": seen.expand(count, 1, *seen.shape),
    }


def train(layers: int, seed: int, *, in_rotor: bool, ordered: bool, steps: int) -> LlamaForCausalLM:
    """Train a model from the start: questions about one document first, then about two as well."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=NAMES + COLORS + 4,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=256,
        initializer_range=0.08,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    model.set_attn_implementation("ring" if in_rotor else "sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01)
    generator, began, two_hops = torch.Generator().manual_seed(seed), time.time(), 0.0
    places = CONTEXT + torch.arange(1, PAIRS + 1) * LENGTH - 1
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = RATE * min((step + 1) / 100, max(0.02, 1 - step / steps))
        drawn = draw(BATCH, generator, two_hops, ordered=ordered)
        batch = batch_of(*drawn[:2])
        more = {"ring": Ring(model, batch, 1)} if in_rotor else {"attention_mask": batch["seen"]}
        logits = model(batch["ids"], position_ids=batch["positions"], use_cache=False, **more).logits[:, places]
        loss = cross_entropy(logits.flatten(0, 1), drawn[2].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        right = (logits.argmax(-1) == drawn[2]).float().mean().item()
        two_hops = 0.7 if right > 0.95 else two_hops
        if (step + 1) % 200 == 0:
            print(json.dumps([step + 1, round(time.time() - began), loss.item(), right, two_hops]), flush=True)
    return model.eval()


def measure(model: LlamaForCausalLM, questions: int, seed: int) -> dict[str, list[float]]:
    """Return the share of right answers to questions about two documents, with its interval, for each method."""
    model.set_attn_implementation("sdpa")
    lm = InvariantModel(model, None)
    ways = {
        "plain": lm.with_method("sequential"),
        "plain, sorted": lm.with_method("sequential", ordering="lexical"),
        **{name: lm.with_method(name) for name in ("rotor", "pine", "set-based")},
    }
    drawn = draw(questions, torch.Generator().manual_seed(10_000 + seed), 1.0, ordered=False)
    rows = [each.tolist() for each in drawn]
    found = {}
    for name, way in ways.items():
        right = 0
        for documents, asked, answers in zip(*rows, strict=True):
            prompt = Prompt(prefix=[BEGIN], segments=documents, suffix=asked[0])
            right += int(way.logits(prompt)[-1].argmax()) == answers[0]
        estimate = wilson_interval(right, questions)
        found[name] = [round(100 * each, 1) for each in (right / questions, estimate.low, estimate.high)]
    return found


def main() -> None:
    """Train, measure, and say what the rule says."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--training", choices=TRAININGS, nargs="+", default=[*TRAININGS])
    parser.add_argument("--questions", type=int, default=500)
    parser.add_argument("--out", type=Path, help="file of the results (.json)")
    options = parser.parse_args()
    results: dict[str, dict[str, list[float]]] = {}
    for layers, how in product(options.layers, options.training):
        in_rotor, ordered = TRAININGS[how]
        model = train(layers, options.seed, in_rotor=in_rotor, ordered=ordered, steps=options.steps)
        results[f"{layers} layers, trained {how}"] = measure(model, options.questions, options.seed)
        print(json.dumps(results, indent=1), flush=True)
    for layers in options.layers:
        trained = {how: results[f"{layers} layers, trained {how}"] for how in options.training}
        plain = [each["plain, sorted"][0] for how, each in trained.items() if how.startswith("plainly")]
        gains = [
            f"{each['rotor'][0] - max(plain, default=0.0):+.1f} points trained {how}" for how, each in trained.items()
        ]
        print(f"{layers} layers: RoToR gains {', '.join(gains)}; the rule: {RULE}")
    if options.out:
        options.out.write_text(json.dumps({"seed": options.seed, "results": results}, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
