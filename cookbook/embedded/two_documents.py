"""Facts that are spread over two documents: does it help that chunks attend to each other in every order?

One document says that a town flies the flag of its mother city, another one what the flag of that city looks like. Who
asks for the flag of the town needs both. In a plain causal model only the later of the two documents attends to the
other one; in RoToR's arrangement both do, whatever the order.

`python two_documents.py train --layers 4 --out FOLDER [--ring]` trains a small model; documents come in a random order,
so either of the two comes first half of the time. `--ring` trains in RoToR's arrangement. `python two_documents.py
measure FOLDER...` asks fresh questions. `two_documents.md` says what was fixed beforehand, and what came out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from evaluate import interval
from names import COLOURS, ENDINGS, HEADS
from torch import Tensor
from train import IGNORE, Row, build_model, collate, losses, optimiser_for
from train_native import Ring
from transformers import LlamaForCausalLM

from invariant_rag import InvariantModel, Prompt

TOKENS = 4_096
LINK = "{town} flies the flag of its mother city {city} ."
FACT = "The flag of {city} is {colour} ."
COLOUR = "What colour is the flag of {name} ?"
MOTHER = "What is the mother city of {name} ?"
PREFIX = "Documents :"
WORDS = ["<pad>", "<end>", *dict.fromkeys(f"{LINK} {FACT} {COLOUR} {MOTHER} {PREFIX}".split())]
TOWNS = [head + ending for head, ending in zip(HEADS[:320], ENDINGS * 10, strict=False)]
VOCABULARY = {word: number for number, word in enumerate([*WORDS, *COLOURS, *TOWNS])}
METHODS = {"plain, sorted": "sequential", "RoToR": "rotor", "PINE": "pine", "set-based": "set-based"}
"""Name of a row and method. Documents are sorted by a salt, that is, at random, and alike for all methods."""


def ids(text: str) -> list[int]:
    """Return a text in tokens: whole words, since this is about finding facts and not about spelling."""
    return [VOCABULARY[word] for word in text.split()]


@dataclass(frozen=True)
class World:
    """Towns with their mother cities, and the flags of the cities.

    Attributes:
        documents: The documents in a random order, farthest from the question first.
        asked: Questions with their answers, and the places of the documents that they take: the link and the flag, or
            one of them. Those that take both come first.
    """

    documents: list[str]
    asked: list[tuple[str, str, tuple[int, ...]]]

    @classmethod
    def draw(cls, rng: random.Random, pairs: int) -> World:
        """Draw as many towns, and as many cities, with a colour each."""
        names, colours = rng.sample(TOWNS, 2 * pairs), rng.sample(COLOURS, pairs)
        towns, cities = names[:pairs], names[pairs:]
        told = [LINK.format(town=town, city=city) for town, city in zip(towns, cities, strict=True)]
        told += [FACT.format(city=city, colour=colour) for city, colour in zip(cities, colours, strict=True)]
        order = rng.sample(range(2 * pairs), 2 * pairs)
        place = {number: at for at, number in enumerate(order)}
        two = [
            (COLOUR.format(name=town), colours[number], (place[number], place[pairs + number]))
            for number, town in enumerate(towns)
        ]
        links = [(MOTHER.format(name=town), cities[number], (place[number],)) for number, town in enumerate(towns)]
        flags = [(COLOUR.format(name=city), colours[n], (place[pairs + n],)) for n, city in enumerate(cities)]
        return cls([told[number] for number in order], [*two, *links, *flags])


def draw(seed: int, step: int, pairs: int) -> dict[str, Tensor]:
    """Return a batch, a function of its arguments: contexts, each with all questions about it."""
    rng, drawn, prefix = random.Random(f"{seed}-{step}"), [], ids(PREFIX)
    while True:
        world, tokens, ends = World.draw(rng, pairs), list(prefix), []
        for document in world.documents:
            tokens += ids(document)
            ends.append(len(tokens))
        row = Row(tokens, [0] * len(tokens), list(range(len(tokens))), [IGNORE] * len(tokens))
        for branch, (question, answer, _) in enumerate(world.asked, 1):
            row.add(branch, ids(question), [VOCABULARY[answer], VOCABULARY["<end>"]], ends[-1])
        drawn.append((row, ends))
        if sum(len(each.ids) for each, _ in drawn) + len(row.ids) > TOKENS * 0.7:
            break
    batch = collate([each for each, _ in drawn], TOKENS)
    end, total = torch.zeros_like(batch["ids"]), torch.zeros(len(batch["ids"]), 1, dtype=torch.long)
    for number, (_, ends) in enumerate(drawn):
        end[number] = total[number] = ends[-1]
        for start, stop in zip([len(prefix), *ends], ends, strict=False):
            end[number, start:stop] = stop
    return {**batch, "end": end, "total": total}


def start(layers: int) -> LlamaForCausalLM:
    """Return a model that starts as in `train.py`, with weak heads that copy and compare; later layers are copies."""
    model = build_model(len(VOCABULARY), VOCABULARY["<end>"])
    config, states = model.config, model.state_dict()
    old, config.num_hidden_layers = config.num_hidden_layers, layers
    for new in range(old, layers):
        source = f"model.layers.{old - 2 + (new - old) % 2}."
        copied = {name: tensor.clone() for name, tensor in states.items() if name.startswith(source)}
        states |= {f"model.layers.{new}." + name.removeprefix(source): tensor for name, tensor in copied.items()}
    deeper = LlamaForCausalLM(config)
    deeper.load_state_dict(states)
    for layer in deeper.model.layers:
        layer.self_attn.o_proj.bias.requires_grad_(False)
    return deeper


def train(options: argparse.Namespace) -> None:
    """Train and save."""
    torch.manual_seed(options.seed)
    model, pairs = start(options.layers), 1
    model.set_attn_implementation("ring" if options.ring else "two-products")
    optimiser, began, sums, log = optimiser_for(model, options.peak), time.time(), torch.zeros(3), []
    for step in range(options.steps):
        batch = draw(options.seed, step, pairs)
        for group in optimiser.param_groups:
            left = 2 * (options.steps - step) / options.steps
            group["lr"] = options.peak * min(1.0, (step + 1) / 50, max(0.02, left))
        more = {"ring": Ring(model, batch, len(ids(PREFIX)))} if options.ring else {}
        answer, text, right = losses(model, batch, torch.bfloat16, **more)
        answer.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        sums += torch.stack([answer.detach(), text.detach(), right])
        if (step + 1) % 50 == 0:
            means = [round(value, 4) for value in (sums / 50).tolist()]
            log.append([step + 1, round(time.time() - began), pairs, *means])
            print(json.dumps(log[-1]), flush=True)
            sums.zero_()
            pairs = min(5, pairs + (means[2] > 0.9))
    model.set_attn_implementation("sdpa")
    model.save_pretrained(options.out)
    facts = {"layers": options.layers, "ring": options.ring, "steps": options.steps, "seed": options.seed, "log": log}
    (options.out / "training.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace) -> None:
    """Ask every model the same questions, with every method."""
    rng = random.Random(f"measure-{options.seed}")
    worlds = [World.draw(rng, options.pairs) for _ in range(options.questions)]
    found: list[dict[str, Any]] = []
    for folder in options.models:
        trained = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        base = InvariantModel(LlamaForCausalLM.from_pretrained(folder), None)
        for name, method in METHODS.items():
            lm = base.with_method(method, ordering="given")
            counts: dict[str, list[bool]] = {"two": [], "link first": [], "flag first": [], "one": []}
            for world in worlds:
                documents = [ids(each) for each in world.documents]
                for kind, (question, answer, needed) in (("two", world.asked[0]), ("one", world.asked[-1])):
                    prompt = Prompt(ids(PREFIX), documents, ids(question))
                    right = lm.logits(prompt)[-1].argmax().item() == VOCABULARY[answer]
                    counts[kind].append(right)
                    if kind == "two":
                        counts["link first" if needed[0] < needed[1] else "flag first"].append(right)
            row = {key: trained[key] for key in ("layers", "ring", "steps", "seed")} | {"method": name}
            for kind, each in counts.items():
                share = sum(each) / len(each)
                bounds = interval(sum(each), len(each))
                row[kind] = [*(round(number, 4) for number in (share, *bounds)), len(each)]
            found.append(row)
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Train, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train one model")
    training.add_argument("--layers", type=int, default=4)
    training.add_argument("--ring", action="store_true", help="train in RoToR's arrangement")
    training.add_argument("--out", type=Path, required=True, help="folder of the model")
    training.add_argument("--steps", type=int, default=3_000)
    training.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    measuring = commands.add_parser("measure", help="measure models")
    measuring.add_argument("models", nargs="+", type=Path, help="folders of models")
    measuring.add_argument("--out", type=Path, default=Path(__file__).with_name("two_documents.json"))
    measuring.add_argument("--questions", type=int, default=500)
    measuring.add_argument("--pairs", type=int, default=5)
    for each in (training, measuring):
        each.add_argument("--seed", type=int, default=0)
        each.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    {"train": train, "measure": measure}[options.command](options)


if __name__ == "__main__":
    main()
