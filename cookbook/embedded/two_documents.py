"""Facts that are spread over two documents: does it help that chunks attend to each other in every order?

One document says that a town flies the flag of its mother city, another one what the flag of that city looks like. Who
asks for the flag of the town needs both. In a plain causal model only the later of the two documents attends to the
other one; in RoToR's arrangement both do, whatever the order.

`python two_documents.py train --layers 4 --out FOLDER [--ring]` trains the embedded generator further, with layers that
are added at its end; documents come in a random order, so either of the two comes first half of the time. `--ring`
trains in RoToR's arrangement. `python two_documents.py measure FOLDER...` asks fresh questions over
held-out names. `two_documents.md` says what was fixed beforehand, and what came out.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from evaluate import interval
from names import COLOURS, Names
from tokenizer import END, PREFIX, SUFFIX
from torch import Tensor
from train import IGNORE, Row, bucket, collate, losses, optimiser_for, save
from train_native import Ring
from transformers import LlamaForCausalLM
from world import Document

from invariant_rag import InvariantModel, Segment

PAIRS = (2, 3, 4, 5)
"""Towns of a context, each with its mother city, so that a context has twice as many documents."""
TOKENS = 4_096
LINKS = (
    "{town} flies the flag of its mother city, {city}.",
    "The flag of {town} is that of its mother city, {city}.",
    "{town} was founded from {city}, and flies the flag of its mother city.",
)
FACTS = (
    "The flag of {city} is {colour}.",
    "{city} flies a flag that is {colour}.",
    "The colour of the flag of {city} is {colour}.",
)
QUESTIONS = ("What colour is the flag of {name}?", "What is the colour of the flag of {name}?")
MOTHER = ("What is the mother city of {name}?", "Which city is the mother city of {name}?")
METHODS = {
    "plain, as given": "sequential",
    "RoToR": "rotor",
    "PINE": "pine",
    "set-based": "set-based",
}
"""Name of a row and method. Documents are in a random order, which is how a salted sort would order them."""


@dataclass(frozen=True)
class World:
    """Towns with their mother cities, and the flags of the cities.

    Attributes:
        documents: The documents in a random order, farthest from the question first.
        asked: Questions with their answers, and the places of the documents that they take: the link and the flag, or
            only the flag.
    """

    documents: list[Document]
    asked: list[tuple[str, str, tuple[int, ...]]]

    @classmethod
    def draw(cls, names: Names, pairs: int) -> World:
        """Draw a world in which every name occurs once as a title."""
        rng = names.rng
        stems = list(dict.fromkeys(names.stem() for _ in range(3 * pairs)))[: 2 * pairs]
        if len(stems) < 2 * pairs:
            return cls.draw(names, pairs)
        told: list[tuple[Document, int]] = []
        colours = rng.sample(COLOURS, pairs)
        for number, (town, city, colour) in enumerate(zip(stems[:pairs], stems[pairs:], colours, strict=True)):
            told.append((Document(town, rng.choice(LINKS).format(town=town, city=city)), number))
            told.append((Document(city, rng.choice(FACTS).format(city=city, colour=colour)), pairs + number))
        rng.shuffle(told)
        place = {number: at for at, (_, number) in enumerate(told)}
        two, one, links = [], [], []
        for number, (town, city, colour) in enumerate(zip(stems[:pairs], stems[pairs:], colours, strict=True)):
            link, flag = place[number], place[pairs + number]
            two.append((rng.choice(QUESTIONS).format(name=town), colour, (link, flag)))
            one.append((rng.choice(QUESTIONS).format(name=city), colour, (flag,)))
            links.append((rng.choice(MOTHER).format(name=town), city, (link,)))
        return cls([document for document, _ in told], [*two, *links, *one])


class Batches:
    """Rows of contexts and questions, in the format of `train.py`; a batch is a function of the seed and its number."""

    def __init__(self, lm: InvariantModel, seed: int) -> None:
        self.lm, self.seed = lm, seed
        self.prefix = self.ids(PREFIX)
        self.end = lm.tokenizer.convert_tokens_to_ids(END)

    def ids(self, text: str) -> list[int]:
        """Return the tokens of a text."""
        return self.lm.tokenizer.encode(text, add_special_tokens=False)

    def draw(self, step: int) -> dict[str, Tensor]:
        """Return a batch of contexts with equally many documents."""
        rng = random.Random(f"two-documents-{self.seed}-{step}")
        names, pairs = Names(rng), rng.choice(PAIRS)
        drawn = [self._row(World.draw(names, pairs))]
        while True:
            drawn.append(self._row(World.draw(names, pairs)))
            if bucket(max(len(row.ids) for row, _ in drawn)) * len(drawn) > TOKENS:
                return self._batch(drawn[:-1])

    def _row(self, world: World) -> tuple[Row, list[int]]:
        """Return a context with its questions, and where each document of it ends."""
        ids, ends = list(self.prefix), []
        for document in world.documents:
            ids += self.ids(document.render())
            ends.append(len(ids))
        row = Row(ids, [0] * len(ids), list(range(len(ids))), [IGNORE] * len(ids))
        for branch, (question, answer, _) in enumerate(world.asked, 1):
            row.add(branch, self.ids(SUFFIX.format(question=question)), [*self.ids(answer), self.end], ends[-1])
        return row, ends

    def _batch(self, drawn: list[tuple[Row, list[int]]]) -> dict[str, Tensor]:
        """Add where the document of each token ends, and where the documents end, as `Ring` takes them."""
        batch = collate([row for row, _ in drawn], TOKENS)
        end, total = torch.zeros_like(batch["ids"]), torch.zeros(len(batch["ids"]), 1, dtype=torch.long)
        for number, (_, ends) in enumerate(drawn):
            end[number] = total[number] = ends[-1]
            for start, stop in zip([len(self.prefix), *ends], ends, strict=False):
                end[number, start:stop] = stop
        return {**batch, "end": end, "total": total}


def deepen(model: LlamaForCausalLM, layers: int) -> LlamaForCausalLM:
    """Return the model with more layers: copies of its last two in turn, which add nothing until they are trained."""
    config, old = model.config, model.config.num_hidden_layers
    config.num_hidden_layers = layers
    deeper = LlamaForCausalLM(config)
    states = model.state_dict()
    for new in range(old, layers):
        source = f"model.layers.{old - 2 + (new - old) % 2}."
        for name, tensor in list(states.items()):
            if name.startswith(source):
                silent = name.endswith(("o_proj.weight", "o_proj.bias", "down_proj.weight"))
                states[f"model.layers.{new}." + name.removeprefix(source)] = tensor * 0 if silent else tensor.clone()
    deeper.load_state_dict(states)
    return deeper


def train(options: argparse.Namespace) -> None:
    """Train and save."""
    torch.manual_seed(options.seed)
    lm = InvariantModel.from_pretrained(dtype="float32", device_map=None)
    batches, model = Batches(lm, options.seed), deepen(lm.model, options.layers)
    model.train()
    model.set_attn_implementation("ring" if options.ring else "two-products")
    optimiser, began, sums, log = optimiser_for(model, options.peak), time.time(), torch.zeros(3), []
    ahead = ThreadPoolExecutor(1)
    coming = ahead.submit(batches.draw, 0)
    for step in range(options.steps):
        batch = coming.result()
        coming = ahead.submit(batches.draw, step + 1)
        for group in optimiser.param_groups:
            group["lr"] = options.peak * min(
                1.0, (step + 1) / 50, max(0.02, 2 * (options.steps - step) / options.steps)
            )
        more = {"ring": Ring(model, batch, len(batches.prefix))} if options.ring else {}
        answer, text, right = losses(model, batch, torch.bfloat16, **more)
        answer.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        sums += torch.stack([answer.detach(), text.detach(), right])
        if (step + 1) % 50 == 0:
            log.append([step + 1, round(time.time() - began), *(round(value, 4) for value in (sums / 50).tolist())])
            print(json.dumps(log[-1]), flush=True)
            sums.zero_()
    save(model, lm.tokenizer.backend_tokenizer, options.out)
    facts = {"layers": options.layers, "ring": options.ring, "steps": options.steps, "seed": options.seed, "log": log}
    (options.out / "training.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")


def measure(options: argparse.Namespace) -> None:
    """Ask every model the same questions, with every method."""
    names = Names(random.Random(f"two-documents-measure-{options.seed}"), "test")
    worlds = [World.draw(names, options.pairs) for _ in range(options.questions)]
    found: list[dict[str, Any]] = []
    for folder in options.models:
        trained = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        base = InvariantModel.from_pretrained(folder, dtype="float32", device_map=None)
        for name, method in METHODS.items():
            lm = base.with_method(method, ordering="given")
            counts: dict[str, list[bool]] = {"two": [], "link first": [], "flag first": [], "one": []}
            for number, world in enumerate(worlds):
                documents = [Segment(each.text, title=each.title) for each in world.documents]
                for kind, (question, answer, needed) in (("two", world.asked[0]), ("one", world.asked[-1])):
                    if kind == "one" and number % 5:
                        continue
                    right = lm.generate(lm.chat_prompt(question, documents), max_new_tokens=6).text == answer
                    counts[kind].append(right)
                    if kind == "two":
                        counts["link first" if needed[0] < needed[1] else "flag first"].append(right)
            row = {key: trained[key] for key in ("layers", "ring", "steps", "seed")} | {"method": name}
            for kind, each in counts.items():
                share = sum(each) / len(each)
                row[kind] = [round(number, 4) for number in (share, *interval(sum(each), len(each)))] + [len(each)]
            found.append(row)
            print(json.dumps(row), flush=True)
            options.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Train, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    training = commands.add_parser("train", help="train one model")
    training.add_argument("--layers", type=int, default=3)
    training.add_argument("--ring", action="store_true", help="train in RoToR's arrangement")
    training.add_argument("--out", type=Path, required=True, help="folder of the model")
    training.add_argument("--steps", type=int, default=1_500)
    training.add_argument("--peak", type=float, default=1e-3, help="highest learning rate")
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
