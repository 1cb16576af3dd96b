"""Fine-tune the embedded generator with RoToR attention: `python train_native.py --out FOLDER [--log losses.tsv]`.

Training uses the inference arrangement: documents in lexical order on a ring, each last in its own row. As in
`train.py`, one row of a batch holds a context once and several questions after it, each at the position ids of a prompt
with this question only. Since RoToR is a causal window over the segments laid out twice, a row costs three products.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from names import Names
from tokenizer import END, PREFIX, SUFFIX
from torch import Tensor, nn
from train import IGNORE, Log, Row, bucket, collate, losses, optimiser_for, options_of, save
from transformers import AttentionInterface
from transformers.models.llama.modeling_llama import rotate_half
from world import make_context

from invariant_rag import InvariantModel, Prompt, Segment
from invariant_rag.segments import document_rendering

DOCUMENTS = (4, 6, 8, 10, 10, 10, 12, 12, 16, 20, 20, 24, 30)
QUESTIONS = 20
TOKENS = 8_192
"""Tokens of a batch, padding included."""
DESCENTS = ((1_600, 4e-4), (2_000, 8e-4))
"""Steps and highest learning rate, from which it falls to (almost) nothing; then it starts anew."""


class Batches:
    """Rows of contexts and questions; batch number `step` is a function of the seed and the step alone."""

    def __init__(self, lm: InvariantModel, seed: int) -> None:
        self.lm, self.seed = lm, seed
        self.prefix = lm.tokenizer.encode(PREFIX, add_special_tokens=False)
        self.end = lm.tokenizer.convert_tokens_to_ids(END)

    def draw(self, step: int) -> dict[str, Tensor]:
        """Return a batch of contexts with equally many documents."""
        rng = random.Random(f"native-{self.seed}-{step}")
        names, documents = Names(rng), rng.choice(DOCUMENTS)
        drawn = [self.row(names, documents)]
        while True:
            drawn.append(self.row(names, documents))
            if bucket(max(len(row.ids) for row, _ in drawn)) * len(drawn) > TOKENS:
                return self.batch(drawn[:-1])

    def row(self, names: Names, documents: int) -> tuple[Row, list[int]]:
        """Return a context in canonical order with its questions, and the end of each of its segments."""
        context = make_context(names, documents, QUESTIONS, skew=0.0)
        segments = [Segment(document.text, title=document.title) for document in context.documents]
        prepared = self.lm.prepare(Prompt(self.prefix, segments, [self.end], rendering=document_rendering))
        layout = prepared.arrangement.layout
        ids = list(prepared.input_ids[:-1])
        ends = [layout.texts[0] + sum(layout.sets[0][: count + 1]) for count in range(documents)]
        start = len(ids)
        row = Row(ids, [0] * start, list(range(start)), [IGNORE] * start)
        for branch, question in enumerate(context.questions, 1):
            asked = SUFFIX.format(question=question.text)
            suffix, answer = (
                self.lm.tokenizer.encode(text, add_special_tokens=False) for text in (asked, question.answer)
            )
            row.add(branch, suffix, [*answer, self.end], start)
        return row, ends

    def batch(self, drawn: list[tuple[Row, list[int]]]) -> dict[str, Tensor]:
        """Add to the rows of a batch what RoToR needs: where the segment of each token ends, and the context's end."""
        batch = collate([row for row, _ in drawn], TOKENS)
        end = torch.zeros_like(batch["ids"])
        total = torch.zeros(len(end), 1, dtype=torch.long)
        for number, (_, ends) in enumerate(drawn):
            total[number] = ends[-1]
            end[number] = ends[-1]
            for start, stop in zip([len(self.prefix), *ends], ends, strict=False):
                end[number, start:stop] = stop
        return {**batch, "end": end, "total": total}


class Ring:
    """What RoToR adds to plain attention, for one batch.

    A query of a segment that ends at `e` attends to all preceding keys, and to later segments at a shift of `-T`; the
    prefix then has a shift of `-(T - e)`.
    """

    def __init__(self, model: nn.Module, batch: dict[str, Tensor], prefix: int) -> None:
        end, total = batch["end"], batch["total"]
        self.prefix, self.stop = prefix, int(total.max())
        rotary = model.model.rotary_emb
        like = model.model.embed_tokens.weight
        self.ahead = [part[:, None] for part in rotary(like, total - end)]
        self.back = [part[:, None] for part in rotary(like, prefix - total)]
        key = torch.arange(self.prefix, self.stop)
        wrapped = (key >= end[..., None]) & (key < total[..., None])
        self.mask = additive(torch.cat([batch["seen"], wrapped[:, None]], -1))


def additive(seen: Tensor) -> Tensor:
    """Return a mask to be added to scores."""
    return torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf)


def turn(states: Tensor, by: list[Tensor]) -> Tensor:
    """Rotate queries or keys further."""
    return states * by[0] + rotate_half(states) * by[1]


def attend_ring(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: Tensor, scaling: float, ring: Ring, **_: Any
) -> tuple[Tensor, None]:
    """Attend to the prefix, to the row causally, and to its segments once more, shifted by `-T`."""
    start, stop = ring.prefix, ring.stop
    query, again = query * scaling, turn(key[:, :, start:stop], ring.back)
    scores = torch.cat(
        [turn(query, ring.ahead) @ key[:, :, :start].mT, query @ torch.cat([key[:, :, start:], again], 2).mT], -1
    )
    weights = torch.softmax(scores + ring.mask.to(scores.dtype), -1)
    return (weights @ torch.cat([value, value[:, :, start:stop]], 2)).transpose(1, 2), None


AttentionInterface.register("ring", attend_ring)


def rates() -> Iterator[float]:
    """Yield the learning rate of each step."""
    for steps, highest in DESCENTS:
        for step in range(steps):
            yield highest * min((step + 1) / 50, max(0.02, 1 - step / steps))


def main() -> None:
    """Fine-tune and save."""
    parser = options_of(__doc__)
    parser.add_argument("--model", type=Path, help="folder of the generator; the embedded one if left out")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lm = InvariantModel.from_pretrained(options.model, dtype="float32", device_map=None)
    model, batches = lm.model, Batches(lm, options.seed)
    model.set_attn_implementation("ring")
    optimiser = optimiser_for(model, DESCENTS[0][1])
    ahead = ThreadPoolExecutor(1)
    coming = ahead.submit(batches.draw, 0)
    log = Log(options.log, 20)
    for step, rate in enumerate(rates()):
        batch = coming.result()
        coming = ahead.submit(batches.draw, step + 1)
        for group in optimiser.param_groups:
            group["lr"] = rate
        ring = Ring(model, batch, len(batches.prefix))
        answer, text, right = losses(model, batch, getattr(torch, options.dtype), ring=ring)
        answer.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        log.add(step, batch["ids"].numel(), [answer, text, right])
        if (step + 1) % 100 == 0:
            save(model, lm.tokenizer.backend_tokenizer, options.out)
    save(model, lm.tokenizer.backend_tokenizer, options.out)


if __name__ == "__main__":
    main()
