"""LongBench 2WikiMultihopQA: multi-hop questions over a long context in chunks."""

from __future__ import annotations

from collections.abc import Iterator

from invariant_rag.audit.metrics import normalise_answer, token_f1
from pydantic import Field

from invariant_rag_benchmarks.base import Benchmark, Case, Example, Scored, Selection, Settings, Text, parse_example
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.variants import chunk_orders, split_into_chunks, token_starts

MEMBER = "2wikimqa_e.jsonl"
PUBLIC = "hub://THUDM/LongBench/data.zip"
ASK = "Answer the question based on the given passages. Only give me the answer and do not output any other words."


class TwoWikiSettings(Settings):
    """Settings of the benchmark."""

    chunk: int = Field(512, ge=1, description="tokens in a segment")
    limit: int = Field(10_000, ge=1, description="tokens of the context that are kept; the paper kept 10,000")


class _Question(Example):
    input: Text
    context: Text
    answers: list[Text]


class TwoWiki(Benchmark[TwoWikiSettings]):
    """Questions over a context as it is, reversed, and with both halves reversed."""

    name = "two-wiki"
    about = "Multi-hop questions over a long context in chunks: initial, reversed, centre-flipped."
    paper = "Bai et al. 2024, arXiv 2308.14508 (LongBench-E); chunk orders of RoToR, arXiv 2502.08662, Appendix J"
    variants = "order of the chunks"
    settings = TwoWikiSettings
    metric = "f1"
    max_new_tokens = 32

    def read(self, source: DataSource, settings: TwoWikiSettings, selection: Selection) -> Iterator[Case]:
        """Read LongBench-E's file, or its archive that contains the file."""
        for index, record in selection.sample(read_examples(source.file(MEMBER, PUBLIC), MEMBER)):
            asked = parse_example(_Question, record, f"example {index}")
            starts = token_starts(asked.context, selection.load_tokenizer)
            chunks = split_into_chunks(asked.context, starts, settings.chunk, settings.limit)
            for variant, listed in chunk_orders(chunks).items():
                yield Case(
                    question=str(index),
                    variant=variant,
                    prefix=f"{ASK}\n\nThe following are given passages.\n",
                    segments=tuple(listed),
                    suffix=f"\n\n{ASK}\n\nQuestion: {asked.input}\nAnswer:",
                    gold=tuple(asked.answers),
                    query=asked.input,
                    group=length_band(len(starts)),
                )

    def score(self, case: Case, output: str) -> Scored:
        """Return the F1 of the whole output (LongBench's `qa_f1_score`); other tasks take the first line only."""
        return Scored(normalise_answer(output), {"f1": token_f1(output, case.gold)})


def length_band(tokens: int) -> str:
    """Return the band of context lengths that the paper reports."""
    return "0-4k" if tokens < 4000 else "4-8k" if tokens < 8000 else "8k+"
