"""Fine-tune the embedded generator with RoToR attention: `python train_native.py --out FOLDER [--log losses.tsv]`.

The model reads every context as it would at inference: documents in lexical order on a ring, each of them last in its
own view. Several questions follow one another as turns of a chat, so that one reading serves all of them.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from names import Names
from tokenizer import PREFIX, SUFFIX
from torch import Tensor
from torch.nn.functional import cross_entropy
from train import FIRST, IGNORE, save
from world import make_context

from invariant_rag import InvariantModel, Prompt, Segment
from invariant_rag.preparation import PreparedPrompt
from invariant_rag.segments import document_rendering

DOCUMENTS = (4, 6, 8, 10, 10, 12, 16, 20, 24, 30, 34)
QUESTIONS = 16
NEXT_TURN = "<|user|>"
CONTEXTS = 4
"""Contexts of a step."""


def conversation(lm: InvariantModel, rng: random.Random) -> tuple[PreparedPrompt, Tensor, Tensor]:
    """Return a prompt whose suffix holds questions and answers, with labels and weights of the suffix's tokens."""
    context = make_context(Names(rng), documents := rng.choice(DOCUMENTS), min(QUESTIONS, 2 + documents))

    def encode(text: str) -> list[int]:
        return list(lm.tokenizer.encode(text, add_special_tokens=False))

    suffix: list[int] = []
    labels: list[int] = []
    weights: list[float] = []
    for turn, question in enumerate(context.questions):
        asked = SUFFIX.format(question=question.text)
        ids, answer = (
            encode(NEXT_TURN + asked if turn else asked),
            [*encode(question.answer), lm.tokenizer.eos_token_id],
        )
        suffix += ids + answer
        labels += [IGNORE] * len(ids) + answer
        weights += [0.0] * len(ids) + [FIRST] + [1.0] * (len(answer) - 1)
    segments = [Segment(document.text, title=document.title) for document in context.documents]
    prompt = Prompt(encode(PREFIX), segments, suffix, rendering=document_rendering)
    return lm.prepare(prompt), torch.tensor(labels), torch.tensor(weights)


def loss_of(lm: InvariantModel, prepared: PreparedPrompt, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss on the answers to one context, and the share of first tokens that were right."""
    ids = torch.tensor([prepared.input_ids])
    with torch.autocast("cpu", torch.bfloat16), lm.reading([prepared]):
        logits = lm.model(ids, use_cache=False, logits_to_keep=len(labels) + 1).logits[0, :-1]
    each = cross_entropy(logits.float(), labels, reduction="none", ignore_index=IGNORE)
    right = (logits.argmax(-1) == labels)[weights == FIRST].float().mean()
    return (each * weights).sum() / weights.sum(), right


def main() -> None:
    """Fine-tune and save."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="folder of the generator; the embedded one if left out")
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--log", type=Path, help="file of the loss table (tab-separated)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--peak", type=float, default=6e-4, help="highest learning rate")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    lm = InvariantModel.from_pretrained(options.model, dtype="float32", device_map=None)
    optimiser = torch.optim.AdamW(lm.model.parameters(), lr=options.peak, betas=(0.9, 0.95), weight_decay=0.0)
    rng = random.Random(f"native-{options.seed}")
    ahead = ThreadPoolExecutor(1)
    coming = ahead.submit(conversation, lm, rng)
    began, seen, sums = time.time(), 0, torch.zeros(2)
    log = options.log.open("w") if options.log else None
    for step in range(options.steps):
        for group in optimiser.param_groups:
            group["lr"] = options.peak * min((step + 1) / 20, max(0.02, 1 - step / options.steps))
        for _ in range(CONTEXTS):
            prepared, labels, weights = coming.result()
            coming = ahead.submit(conversation, lm, rng)
            loss, right = loss_of(lm, prepared, labels, weights)
            (loss / CONTEXTS).backward()
            seen += len(prepared.input_ids)
            sums += torch.stack([loss.detach(), right]) / CONTEXTS
        torch.nn.utils.clip_grad_norm_(lm.model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        if (step + 1) % 20 == 0:
            line = [step + 1, seen, round(time.time() - began), *(round(value, 4) for value in (sums / 20).tolist())]
            print(json.dumps(line), flush=True)
            if log:
                print(*line, sep="\t", file=log, flush=True)
            sums.zero_()
    save(lm.model, lm.tokenizer.backend_tokenizer, options.out)


if __name__ == "__main__":
    main()
