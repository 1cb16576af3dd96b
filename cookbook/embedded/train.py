"""Train the embedded generator: `python train.py --out FOLDER [--log losses.tsv]`.

The plain causal model, trained in the ordinary way. One row of a batch holds a context once and several questions after
it; each question attends to the context and itself, at the position ids of a prompt with this question only, so every
question is trained in exactly the format of inference.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from names import Names
from tokenizer import END, PREFIX, SUFFIX, save_tokenizer, train_tokenizer
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import AttentionInterface, GenerationConfig, LlamaConfig, LlamaForCausalLM
from world import FULL, Difficulty, make_context

IGNORE = -100
ANSWERS = 1_024
TEXTS = 512
LENGTHS = (64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 3072)


@dataclass(frozen=True)
class Stage:
    """A stretch of training; the next one begins when this one is learned, or has had its steps.

    Attributes:
        kind: `repeat` (random tokens, repeated), `recall` (keys, gaps and values) or `read` (contexts and questions).
        tokens: tokens of a batch.
        documents: how many documents a context may have.
        gap: longest gap between a key and its value.
        level: how much of the world is used.
        learned: share of first answer tokens right, over the last 25 batches, at which the stage is learned.
        most: steps after which it ends in any case.
    """

    kind: str
    tokens: int
    documents: tuple[int, ...] = ()
    gap: int = 0
    level: Difficulty = FULL
    learned: float = 0.85
    most: int = 400


def easy(relations: int, wordings: int, sentences: int, **others: float) -> Difficulty:
    """Return a difficulty without fillers, pronouns and unknown answers, unless they are given."""
    return Difficulty(relations, wordings, sentences, **{"fillers": 0.0, "pronouns": 0.0, "unknown": 0.0, **others})


STAGES = (
    Stage("repeat", 3_072, learned=0.95),
    *(Stage("recall", 3_072, gap=gap, learned=0.88) for gap in range(13)),
    Stage("read", 3_072, (2, 3), level=easy(1, 1, 1)),
    Stage("read", 3_072, (2, 3, 4), level=easy(2, 1, 1)),
    Stage("read", 3_072, (2, 3, 4, 6), level=easy(3, 1, 2)),
    Stage("read", 3_072, (2, 4, 6), level=easy(5, 1, 2)),
    Stage("read", 3_072, (2, 4, 6), level=easy(8, 1, 2)),
    Stage("read", 4_096, (2, 4, 6, 8), level=easy(12, 2, 2)),
    Stage("read", 4_096, (2, 4, 6, 8), level=easy(18, 2, 3)),
    Stage("read", 4_096, (2, 4, 6, 8), level=easy(24, 3, 3, pronouns=0.1)),
    Stage("read", 4_096, (2, 4, 6, 8), level=easy(24, 4, 3, fillers=0.05, pronouns=0.2, unknown=0.04)),
    Stage("read", 4_096, (2, 4, 6, 8, 10), level=easy(24, 6, 4, fillers=0.1, pronouns=0.3, unknown=0.07)),
    Stage("read", 6_144, (2, 4, 6, 8, 10), level=easy(24, 99, 5, fillers=0.15, pronouns=0.4, unknown=0.1)),
    Stage("read", 6_144, (2, 4, 6, 8, 10, 12, 16), learned=0.9, most=1500),
    Stage("read", 8_192, (2, 6, 10, 14, 20, 26, 32), learned=1.1, most=10_000),
)
RECALL = 96
DECAY = 0.4
"""Share of the steps, the last ones, over which the learning rate falls to nothing."""
FIRST = 3.0
"""Weight of the first token of an answer: it is the one to be retrieved, the others follow it by copying."""


@dataclass
class Row:
    """Token ids with, for each, its branch (0: the context, 1..: a question), its position and its label."""

    ids: list[int]
    branch: list[int]
    position: list[int]
    label: list[int]

    def add(self, branch: int, suffix: list[int], answer: list[int], start: int) -> None:
        """Append a question, whose first position is `start`, and its answer."""
        self.ids += suffix + answer
        self.branch += [branch] * (len(suffix) + len(answer))
        self.position += range(start, start + len(suffix) + len(answer))
        self.label += [IGNORE] * len(suffix) + answer


class Batches:
    """Batch number `step` of a stage is a function of the seed, the step and the stage alone."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer, self.seed = tokenizer, seed
        self.end = tokenizer.token_to_id(END)
        self.prefix = tokenizer.encode(PREFIX, add_special_tokens=False).ids
        self.tail = tokenizer.encode(SUFFIX.format(question="?"), add_special_tokens=False).ids[-4:]
        self.common = random.Random("common").sample(range(300, 900), 32)

    def draw(self, step: int, stage: Stage) -> dict[str, Tensor]:
        """Return a batch."""
        rng = random.Random(f"{self.seed}-{step}")
        if stage.kind == "repeat":
            length = rng.choice((64, 64, 128))
            return collate([self._repeated(rng, length) for _ in range(stage.tokens // length)], stage.tokens)
        if stage.kind == "recall":
            return collate([self._recall(rng, stage.gap) for _ in range(stage.tokens // RECALL)], stage.tokens)
        names, documents = Names(rng), rng.choice(stage.documents)
        rows = [self._context(names, documents, stage.level)]
        while True:
            row = self._context(names, documents, stage.level)
            length = bucket(max(len(row.ids) for row in (*rows, row)))
            if length * (len(rows) + 1) > stage.tokens:
                return collate(rows, stage.tokens)
            rows.append(row)

    def _repeated(self, rng: random.Random, length: int) -> Row:
        period = rng.randint(4, length // 2)
        once = [rng.randrange(3, self.tokenizer.get_vocab_size()) for _ in range(period)]
        ids = (once * (length // period + 1))[:length]
        return Row(ids, [0] * length, list(range(length)), [IGNORE] * period + ids[period:])

    def _recall(self, rng: random.Random, gap: int) -> Row:
        """Keys of two tokens, a gap, a value; then the keys again, each with its value to be said."""
        draw = range(900, self.tokenizer.get_vocab_size())

        def noise(most: int) -> list[int]:
            return rng.choices(self.common, k=rng.randint(0, most))

        pairs = [
            (rng.sample(draw, 2), rng.sample(draw, rng.choice((1, 1, 2)))) for _ in range(rng.choice((2, 3, 4, 6)))
        ]
        ids = [token for key, value in pairs for token in (*key, *noise(gap), *value, *noise(1))]
        label = [IGNORE] * len(ids)
        for key, value in rng.sample(pairs, len(pairs)):
            asked = [*key, *self.tail[max(0, len(self.tail) - gap) :]]
            ids += asked + value
            label += [IGNORE] * len(asked) + value
        return Row(ids[:RECALL], [0] * len(ids[:RECALL]), list(range(len(ids[:RECALL]))), label[:RECALL])

    def _context(self, names: Names, documents: int, level: Difficulty) -> Row:
        context = make_context(names, documents, min(20, 3 + documents), level=level)
        parts = [document.render() for document in context.documents]
        for question in context.questions:
            parts += [SUFFIX.format(question=question.text), question.answer]
        encoded = [part.ids for part in self.tokenizer.encode_batch(parts, add_special_tokens=False)]
        ids = self.prefix + [token for part in encoded[:documents] for token in part]
        start = len(ids)
        row = Row(ids, [0] * start, list(range(start)), [IGNORE] * start)
        for branch in range(len(context.questions)):
            suffix, answer = encoded[documents + 2 * branch], [*encoded[documents + 2 * branch + 1], self.end]
            row.add(branch + 1, suffix, answer, start)
        return row


def bucket(length: int) -> int:
    """Return the padded length of a batch: few lengths, since each new one costs the kernels of a CPU seconds."""
    return next(size for size in LENGTHS if size >= length)


def collate(rows: list[Row], tokens: int) -> dict[str, Tensor]:
    """Pad rows to one length, and the batch with empty rows. `label[t]` is to be predicted at t - 1."""
    length = bucket(max(len(row.ids) for row in rows))
    rows = rows + [Row([], [], [], [])] * (tokens // length - len(rows))

    def stack(name: str, pad: int) -> Tensor:
        return torch.tensor([getattr(row, name) + [pad] * (length - len(row.ids)) for row in rows])

    branch = stack("branch", -1)
    same = (branch[:, None, :] == 0) | (branch[:, None, :] == branch[:, :, None])
    seen = same & torch.ones(length, length, dtype=torch.bool).tril()
    seen |= torch.eye(length, dtype=torch.bool)
    ids, label = stack("ids", 0), stack("label", IGNORE)
    text = torch.where(branch == 0, ids, IGNORE)
    text[:, 0] = label[:, 0] = IGNORE
    answer_at, answer = scored(label, ANSWERS)
    text_at, text = scored(text, TEXTS)
    return {
        "ids": ids,
        "position": stack("position", 0),
        "seen": seen[:, None],
        "answer_at": answer_at,
        "answer": answer,
        "text_at": text_at,
        "text": text,
    }


def scored(label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the flat indices of `count` states to be scored and the tokens that follow them, padded with `IGNORE`."""
    at = (label.flatten() != IGNORE).nonzero()[:, 0]
    at = at[:: max(1, -(-len(at) // count))]
    labels = torch.full((count,), IGNORE)
    labels[: len(at)] = label.flatten()[at]
    return torch.cat([at - 1, at.new_zeros(count - len(at))]), labels


def attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """Attend by two matrix products: on a CPU, several times as fast to differentiate as the fused kernel."""
    scores = torch.baddbmm(
        mask.expand(-1, query.shape[1], -1, -1).flatten(0, 1),
        query.flatten(0, 1),
        key.flatten(0, 1).transpose(1, 2),
        alpha=scaling,
    )
    out = scores.softmax(-1) @ value.flatten(0, 1)
    return out.unflatten(0, query.shape[:2]).transpose(1, 2), None


AttentionInterface.register("two-products", attend)


def build_model(vocabulary: int, end: int) -> LlamaForCausalLM:
    """Build the untrained model: a Llama with query and key biases, so that a head can attend by relative position
    alone.

    The rotary base is high, so that about half of each head's dimensions hardly rotate within a context: they compare
    contents independently of the distance.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000_000.0},
        tie_word_embeddings=True,
        attention_bias=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=0,
        initializer_range=0.088,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:
        layer.self_attn.o_proj.bias.requires_grad_(False)
    start_reading(model)
    return model


@torch.no_grad()
def start_reading(model: LlamaForCausalLM) -> None:
    """Start from weak heads that copy and that compare, which otherwise take tens of millions of tokens to form.

    In the first layer, head 0 attends to the previous token and head 1 to the one before it; heads 2 and 3 average over
    the last tokens, about 5 and about 15 of them. In the second layer, heads 0 and 1 match a token with the outputs of
    those heads at earlier positions, and copy it; in the third, heads 2 and 3 match positions whose last tokens are
    those before the query. Only distances of a few tokens are encoded: no slot is favoured, and far positions are
    treated alike.
    """
    layers = [layer.self_attn for layer in model.model.layers]
    width = model.config.head_dim
    half, speed = width // 2, model.model.rotary_emb.inv_freq
    steady = torch.cat([speed, speed]) < 3e-4  # hardly rotated within a context
    model.model.embed_tokens.weight.mul_(6.0)
    model.model.norm.weight.fill_(0.2)
    for layer in model.model.layers:
        layer.mlp.down_proj.weight.mul_(0.3)
    for attention in layers[1:]:
        attention.o_proj.weight.copy_(attention.v_proj.weight.T)
    first, second, third = layers
    first.o_proj.weight.mul_(0.5)
    first.q_proj.weight.mul_(0.1)
    first.k_proj.weight.mul_(0.1)
    looks = ((1, slice(0, 7), 5.0), (2, slice(0, 7), 5.0), (0, slice(2, 15), 3.0), (0, slice(5, 17), 3.0))
    for head, (distance, pairs, norm) in enumerate(looks):
        start = width * head
        rows = slice(start, start + width)
        phase = torch.rand(half)[pairs] * 6.2832
        at = torch.arange(half)[pairs] + start
        for bias, angle in ((first.q_proj.bias, phase), (first.k_proj.bias, phase + distance * speed[pairs])):
            bias[at] = norm * angle.cos()
            bias[at + half] = norm * angle.sin()
        written = first.o_proj.weight[:, rows] @ first.v_proj.weight[rows]
        if head < 2:
            query = second.k_proj.weight[rows] @ written
            second.q_proj.weight[rows] = query * (second.k_proj.weight.std() / query.std())
        else:
            both = third.k_proj.weight[rows] @ written.T
            both *= third.k_proj.weight.std() / both.std() * steady[:, None]
            third.q_proj.weight[rows] = both
            third.k_proj.weight[rows] = both


def losses(
    model: LlamaForCausalLM, batch: dict[str, Tensor], dtype: torch.dtype, **attention: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses on the answers and on some tokens of the contexts, and the share of first tokens right.

    `attention` goes to the attention function as it is.
    """
    mask = torch.zeros(batch["seen"].shape, dtype=dtype).masked_fill_(~batch["seen"], -math.inf)
    with torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16):
        states = model.model(
            input_ids=batch["ids"], position_ids=batch["position"], attention_mask=mask, use_cache=False, **attention
        ).last_hidden_state.flatten(0, 1)
        logits = model.lm_head(states[batch["answer_at"]]).float()
        text_logits = model.lm_head(states[batch["text_at"]]).float()
    wanted = batch["answer"]
    first = wanted != IGNORE
    first[1:] &= batch["answer_at"][1:] != batch["answer_at"][:-1] + 1
    right = (logits.argmax(-1) == wanted)[first].float().mean()
    weight = torch.where(first, FIRST, 1.0) * (wanted != IGNORE)
    each = cross_entropy(logits, wanted, reduction="none", ignore_index=IGNORE)
    return (each * weight).sum() / weight.sum(), cross_entropy(text_logits, batch["text"]), right


class Curriculum:
    """Go through the stages: to the next when one is learned, or has had its steps."""

    def __init__(self, stages: tuple[Stage, ...]) -> None:
        self.stages, self.at, self.steps = stages, 0, 0
        self.recent: deque[float] = deque(maxlen=25)

    @property
    def stage(self) -> Stage:
        """The stage that the next batch is drawn from."""
        return self.stages[self.at]

    def passed(self, right: float) -> None:
        """Take note of a step and the share of first tokens that were right in it."""
        self.steps += 1
        self.recent.append(right)
        learned = len(self.recent) == self.recent.maxlen and sum(self.recent) / len(self.recent) > self.stage.learned
        if learned or self.steps == self.stage.most:
            print(f"stage {self.at} {'learned' if learned else 'left'} after {self.steps} steps", flush=True)
            self.at, self.steps = self.at + 1, 0
            self.recent.clear()


def optimiser_for(model: nn.Module, peak: float) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices only."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in model.parameters() if p.ndim == 2], "weight_decay": 0.01},
        {"params": [p for p in model.parameters() if p.ndim < 2 and p.requires_grad], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=peak, betas=(0.9, 0.95), fused=True)


class Log:
    """Means of some figures over `every` steps, printed and written as the lines of a table."""

    def __init__(self, path: Path | None, every: int) -> None:
        self.file = path.open("w") if path else None
        self.every, self.began, self.tokens, self.figures = every, time.time(), 0, list[list[float]]()

    def add(self, step: int, tokens: int, figures: list[Tensor], *more: int) -> None:
        """Take note of the step with this number, from 0; `more` comes after its number in the table."""
        self.tokens += tokens
        self.figures.append([float(each) for each in figures])
        if (step + 1) % self.every == 0:
            means = [round(sum(column) / self.every, 4) for column in zip(*self.figures, strict=True)]
            line = [step + 1, *more, self.tokens, round(time.time() - self.began), *means]
            print(json.dumps(line), flush=True)
            if self.file:
                print(*line, sep="\t", file=self.file, flush=True)
            self.figures.clear()


def options_of(about: str | None) -> argparse.ArgumentParser:
    """Return a parser of what every training script takes."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model")
    parser.add_argument("--log", type=Path, help="file of the loss table (tab-separated)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the computation")
    return parser


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model and the tokenizer as `from_pretrained` reads them."""
    save_tokenizer(tokenizer, folder)
    model.generation_config = GenerationConfig(
        eos_token_id=model.config.eos_token_id, pad_token_id=0, do_sample=False, max_new_tokens=32
    )
    model.save_pretrained(folder)


def main() -> None:
    """Train and save."""
    parser = options_of(__doc__)
    parser.add_argument("--peak", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--steps", type=int, default=10_000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)

    tokenizer = train_tokenizer(options.seed)
    model = build_model(tokenizer.get_vocab_size(), tokenizer.token_to_id(END))
    model.set_attn_implementation("two-products")
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    optimiser, batches, curriculum = (
        optimiser_for(model, options.peak),
        Batches(tokenizer, options.seed),
        Curriculum(STAGES),
    )
    log, ahead = Log(options.log, 50), ThreadPoolExecutor(1)
    coming = ahead.submit(batches.draw, 0, curriculum.stage)
    for step in range(options.steps):
        batch = coming.result()
        coming = ahead.submit(batches.draw, step + 1, curriculum.stage)
        left = (options.steps - step) / (options.steps * DECAY)
        for group in optimiser.param_groups:
            group["lr"] = options.peak * min(1.0, (step + 1) / 50, max(left, 0.02))
        answer, text, right = losses(model, batch, getattr(torch, options.dtype))
        (answer + 0.1 * text).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        curriculum.passed(float(right))
        log.add(step, batch["ids"].numel(), [answer, text, right], curriculum.at)
        if (step + 1) % 250 == 0:
            save(model, tokenizer, options.out)
    save(model, tokenizer, options.out)


if __name__ == "__main__":
    main()
