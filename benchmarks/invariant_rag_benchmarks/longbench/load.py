"""Load the cases: a question over a long context in chunks; the middle of a context that is too long is cut out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from invariant_rag.errors import InvalidDataset

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.chunks import split_into_chunks, token_starts
from invariant_rag_benchmarks.longbench.tasks import Task, parse_tasks, tasks
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples
from invariant_rag_benchmarks.two_wiki.load import PUBLIC, chunk_orders


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        tasks: `all`, a group (`single-doc`, `multi-doc`, `synthetic`, `summaries`, `few-shot`, `code`), or task names,
            comma-separated.
        chunk: Tokens in a segment.
        limit: Tokens of the context that are kept, half of them from its start and half from its end.
        reorder: Ask also with the segments reversed, and with both halves reversed.
    """

    tasks: str = "single-doc"
    chunk: int = 512
    limit: int = 10_000
    reorder: bool = False


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read the file of each task, or the archive that contains them."""
    cases = []
    chosen = parse_tasks(settings.tasks)
    _check_file(source.path, chosen)
    for name in chosen:
        member = f"{name}.jsonl"
        examples = read_examples(source.file(member, PUBLIC), f"/{member}")
        for index, example in selection.sample(examples):
            where = f"example {index} of {name}"
            context = get_field(example, "context", where)
            starts = token_starts(context, selection.tokenizer)
            chunks = split_without_middle(context, starts, settings.chunk, settings.limit)
            orders = chunk_orders(chunks) if settings.reorder else {"initial": chunks}
            for variant, listed in orders.items():
                cases.append(_case(name, tasks()[name], f"{name}-{index}", variant, listed, example, where))
    return cases


def _check_file(path: Path | None, chosen: list[str]) -> None:
    """Refuse a file of one task as the data of others."""
    if path is None or not path.is_file() or path.suffix == ".zip":
        return
    known = [name for name in tasks() if re.fullmatch(rf"{re.escape(name)}(_e)?", path.name.partition(".")[0])]
    if len(chosen) > 1 or (known and known != chosen):
        raise InvalidDataset(
            f"expected an archive or a folder with the files of {', '.join(chosen)}, got {path.name!r}",
            hint=f"Choose `--set tasks={(known or chosen)[0]}`.",
        )


def split_without_middle(text: str, starts: list[int], tokens: int, limit: int) -> list[str]:
    """Split a text into chunks; of one with more than `limit` tokens, its first and its last half of them only.

    >>> split_without_middle("abcdefgh", [*range(8)], tokens=2, limit=4)
    ['ab', 'gh']
    """
    if len(starts) <= limit:
        return split_into_chunks(text, starts, tokens, limit)
    tail = limit - limit // 2
    first = starts[-tail]
    end = [start - first for start in starts[-tail:]]
    return [
        *split_into_chunks(text, starts, tokens, limit // 2),
        *split_into_chunks(text[first:], end, tokens, tail),
    ]


def _case(name: str, task: Task, question: str, variant: str, chunks: list[str], example: Any, where: str) -> Case:
    asked, gold = get_field(example, "input", where), tuple(get_field(example, "answers", where))
    classes = tuple(get_field(example, "all_classes", where)) if task.metric == "class" else ()
    return Case(
        question=question,
        variant=variant,
        prefix=task.prefix,
        segments=tuple(chunks),
        suffix=task.suffix.replace("{input}", asked),
        gold=(*gold, *classes),
        query=asked,
        chat=not task.is_continued,
        group=name,
        max_new_tokens=task.max_new_tokens,
    )
