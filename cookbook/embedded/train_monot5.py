"""Train the embedded MonoT5: `python train_monot5.py --out FOLDER [--log losses.tsv]`.

A tiny T5 encodes `Query: ... Document: ... Relevant:` and its decoder generates `true` or `false` (Nogueira et al.,
https://arxiv.org/abs/2003.06713). Queries and documents come from the same made-up world as those of the generator.
"""

from __future__ import annotations

import random

import torch
from names import Names
from tokenizer import save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset
from train import Log, easy, options_of
from transformers import T5Config, T5ForConditionalGeneration
from world import Difficulty, make_context

STAGES: tuple[tuple[int, int, Difficulty], ...] = (
    (300, 6, easy(2, 1, 1)),
    (400, 6, easy(12, 1, 2)),
    (500, 8, easy(24, 2, 3)),
    (700, 10, easy(24, 99, 4, fillers=0.1, pronouns=0.2)),
    (3100, 20, Difficulty(unknown=0.0)),
)
"""Steps, documents of a context, and how much of the world is used."""
PAIRS, WIDTH = 64, 128
FALSE_PER_TRUE = 3


class Batches(Dataset[dict[str, Tensor]]):
    """Batch number `step`: pairs of a question and a document, one in four of them relevant."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.schedule = [(documents, level) for steps, documents, level in STAGES for _ in range(steps)]

    def __len__(self) -> int:
        return len(self.schedule)

    def __getitem__(self, step: int) -> dict[str, Tensor]:
        documents, level = self.schedule[step]
        rng = random.Random(f"monot5-{self.seed}-{step}")
        texts: list[str] = []
        labels: list[int] = []
        while len(texts) < PAIRS:
            context = make_context(Names(rng), documents, 4, skew=0.0, level=level)
            for question in context.questions:
                others = [slot for slot in range(documents) if slot != question.slot]
                # The hardest documents are those that share words with the question.
                words = set(question.text.split())
                others.sort(key=lambda slot: -len(words & set(context.documents[slot].render().split())))
                chosen = others[:2] + rng.sample(others[2:], min(len(others) - 2, FALSE_PER_TRUE - 2))
                for slot in (question.slot, *chosen):
                    texts.append(f"Query: {question.text} Document: {context.documents[slot].render()} Relevant:")
                    labels.append(int(slot == question.slot))
        rows = [encoded.ids[:WIDTH] for encoded in self.tokenizer.encode_batch(texts[:PAIRS], add_special_tokens=False)]
        width = -(-max(map(len, rows)) // 32) * 32
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        return {"ids": ids, "mask": (ids != 0).long(), "label": torch.tensor(labels[:PAIRS])}


def build_model(vocabulary: int) -> T5ForConditionalGeneration:
    """Build the untrained model."""
    config = T5Config(
        vocab_size=vocabulary,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=3,
        num_decoder_layers=1,
        num_heads=4,
        relative_attention_num_buckets=32,
        relative_attention_max_distance=128,
        dropout_rate=0.0,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=True,
        pad_token_id=0,
        decoder_start_token_id=0,
        eos_token_id=1,
    )
    model = T5ForConditionalGeneration(config)
    start_matching(model)
    return model


@torch.no_grad()
def start_matching(model: T5ForConditionalGeneration) -> None:
    """Start from heads that attend to a neighbour (two of four) or to equal tokens elsewhere (the other two).

    Without them, matching the words of a query with those of a document takes far longer to form.
    """
    layers = [block.layer[0].SelfAttention for block in model.encoder.block]
    bias = layers[0].relative_attention_bias.weight  # [buckets, heads]
    before, after, itself = 1, bias.shape[0] // 2 + 1, 0
    bias.zero_()
    bias[before, 0] = bias[after, 1] = 6.0
    bias[itself, 2:] = -6.0
    half = model.config.num_heads // 2 * model.config.d_kv
    for layer in layers:
        layer.q.weight[half:] *= 3.0
        layer.k.weight[half:] = layer.q.weight[half:]


def main() -> None:
    """Train and save."""
    parser = options_of(__doc__)
    parser.add_argument("--peak", type=float, default=7e-4, help="highest learning rate")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    tokenizer = train_tokenizer(options.seed)
    answers = [tokenizer.token_to_id("Ġfalse"), tokenizer.token_to_id("Ġtrue")]
    model = build_model(tokenizer.get_vocab_size())
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=options.peak, betas=(0.9, 0.98), weight_decay=0.0)
    batches = Batches(tokenizer, options.seed)
    log = Log(options.log, 100)
    for step, batch in enumerate(DataLoader(batches, batch_size=None, num_workers=1, prefetch_factor=4)):
        left = (len(batches) - step) / 2500
        for group in optimiser.param_groups:
            group["lr"] = options.peak * min(1.0, (step + 1) / 100, max(left, 0.02))
        dtype = getattr(torch, options.dtype)
        with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
            logits = model(
                input_ids=batch["ids"],
                attention_mask=batch["mask"],
                decoder_input_ids=torch.zeros(len(batch["ids"]), 1, dtype=torch.long),
            ).logits[:, 0, answers]
        loss = cross_entropy(logits.float(), batch["label"])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        log.add(step, batch["ids"].numel(), [loss, (logits.argmax(-1) == batch["label"]).float().mean()])
        if (step + 1) % 500 == 0:
            save_tokenizer(tokenizer, options.out)
            model.save_pretrained(options.out)
    save_tokenizer(tokenizer, options.out)
    model.save_pretrained(options.out)


if __name__ == "__main__":
    main()
