"""Load the cases: a question over a long context in chunks: as it is, reversed, and with both halves reversed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from invariant_rag_benchmarks.base import Case, Selection
from invariant_rag_benchmarks.chunks import split_into_chunks, token_starts
from invariant_rag_benchmarks.sources import DataSource, get_field, read_examples

MEMBER = "2wikimqa_e.jsonl"
PUBLIC = "hub://THUDM/LongBench/data.zip"
ASK = "Answer the question based on the given passages. Only give me the answer and do not output any other words."


@dataclass(frozen=True)
class Settings:
    """Settings of the benchmark.

    Attributes:
        chunk: Tokens in a segment.
        limit: Tokens of the context that are kept; the paper kept 10,000.
    """

    chunk: int = 512
    limit: int = 10_000


def load(source: DataSource, settings: Settings, selection: Selection) -> list[Case]:
    """Read LongBench-E's file, or its archive that contains the file."""
    examples = read_examples(source.file(MEMBER, PUBLIC), MEMBER)
    cases = []
    for index, example in selection.sample(examples):
        where = f"example {index}"
        question, context = get_field(example, "input", where), get_field(example, "context", where)
        starts = token_starts(context, selection.tokenizer)
        chunks = split_into_chunks(context, starts, settings.chunk, settings.limit)
        for variant, listed in chunk_orders(chunks).items():
            cases.append(
                Case(
                    question=str(index),
                    variant=variant,
                    prefix=f"{ASK}\n\nThe following are given passages.\n",
                    segments=tuple(listed),
                    suffix=f"\n\n{ASK}\n\nQuestion: {question}\nAnswer:",
                    gold=tuple(get_field(example, "answers", where)),
                    query=question,
                    group=length_band(len(starts)),
                )
            )
    return cases


def chunk_orders(chunks: Sequence[str]) -> dict[str, list[str]]:
    """Return the three orders of RoToR, Appendix J.

    >>> chunk_orders("12345")["centre-flipped"]
    ['3', '2', '1', '5', '4']
    """
    middle = (len(chunks) + 1) // 2
    return {
        "initial": list(chunks),
        "reversed": list(chunks[::-1]),
        "centre-flipped": [*chunks[:middle][::-1], *chunks[middle:][::-1]],
    }


def length_band(tokens: int) -> str:
    """Return the band of context lengths that the paper reports."""
    return "0-4k" if tokens < 4000 else "4-8k" if tokens < 8000 else "8k+"
