"""One gold segment at any slot among others: Lost in the Middle, XQuAD and key-value retrieval."""

from __future__ import annotations

import random
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeAlias

from invariant_rag.errors import InvalidChoice
from invariant_rag.prompts import DEFAULT_SYSTEM
from pydantic import Field

from invariant_rag_benchmarks import base
from invariant_rag_benchmarks.base import Benchmark, Case, Example, S, Scored, Selection, T, TaskSettings, Text
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import DatasetUnavailable, InvalidDataset
from invariant_rag_benchmarks.scores import best_subspan_em, exact_match, normalize_answer

_LOST = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/qa_data/"
_PAIRS = "https://raw.githubusercontent.com/nelson-liu/lost-in-the-middle/main/kv_retrieval_data/"
_XQUAD = "https://raw.githubusercontent.com/google-deepmind/xquad/master/xquad.en.json"
ORACLE = "nq-open-oracle.jsonl.gz"
_PROMPTS = base.declared("tasks/prompts")
_FILES = (10, 20, 30)  # documents in the published files; fewer are the gold one and the first of the others
_PRINTED = re.compile(r"^Document \[\d+\]\(Title: (.*?)\) ", re.MULTILINE)

_Document: TypeAlias = tuple[str, str]
"""Title and text."""


def insert_gold(gold: T, others: Sequence[T], slots: Iterable[int]) -> dict[str, list[T]]:
    """Return the other segments in their order with the gold one inserted at each slot, by slot."""
    return {str(slot): [*others[:slot], gold, *others[slot:]] for slot in slots}


class _LostInTheMiddleSettings(TaskSettings):
    documents: int = Field(20, ge=1, description="documents in a prompt; 10, 20 and 30 in the paper")
    slots: str = Field("", description="gold slots: all, or numbers with commas; empty: those of the paper")
    index: bool = Field(False, description='whether documents are numbered ("index bias" in the paper of RoToR)')
    template: Literal["paper", "one-sentence", "plain"] = Field(
        "paper", description="one-sentence: PINE's prompt (Appendix E.3); plain: this library's own prompt"
    )

    def cases(
        self, name: str, question: str, answers: Iterable[str], orders: Mapping[str, Sequence[_Document]]
    ) -> Iterator[Case]:
        """Yield the cases of a question over documents in these orders."""
        written = _PROMPTS["lost_in_the_middle"][self.template]
        document = written.get("numbered", written["document"]) if self.index else written["document"]
        shown = {
            slot: [
                (document if title else written.get("untitled", document)).format(number=number, title=title, text=text)
                for number, (title, text) in enumerate(listed, start=1)
            ]
            for slot, listed in orders.items()
        }
        system, suffix = written.get("system", DEFAULT_SYSTEM), written["suffix"].format(question=question)
        case = Case(name, prefix=written["prefix"], suffix=suffix, gold=tuple(answers), query=question, system=system)
        return case.in_orders(shown)


class _Context(Example):
    title: Text
    text: Text
    isgold: bool = False


class _Documents(Example):
    question: Text
    answers: list[Text]
    ctxs: list[_Context]

    def documents(self, where: str) -> tuple[_Document, list[_Document]]:
        """Return the gold document, and the others in their order."""
        gold = [each for each in self.ctxs if each.isgold]
        if len(gold) != 1:
            raise InvalidDataset(f"{where}: expected one document with isgold, got {len(gold)}")
        return (gold[0].title, gold[0].text), [(each.title, each.text) for each in self.ctxs if each is not gold[0]]


class _Printed(Example):
    input: Text


class _OneGold(Benchmark[S]):
    variants = "gold slot, from 0"
    metric = "best_subspan_em"

    def score(self, case: Case, output: str) -> Scored:
        """Score the first line by `best_subspan_em`, the metric of Lost in the Middle, and by exact match."""
        line = output.strip().split("\n")[0].strip()
        scores = {each.__name__: each(line, case.gold) for each in (best_subspan_em, exact_match)}
        return Scored(normalize_answer(line), scores)


class LostInTheMiddle(_OneGold[_LostInTheMiddleSettings]):
    """Questions over 10, 20 or 30 documents, the gold one at any slot."""

    name = "lost-in-the-middle"
    paper = "Liu et al. 2023, arXiv 2307.03172"

    def read(self, source: DataSource, settings: _LostInTheMiddleSettings, selection: Selection) -> Iterator[Case]:
        """Read the official files, the oracle file, from which distractors are drawn, or printed prompts."""
        count = settings.documents
        questions = _questions(source, count)
        slots = base.parse_numbers("slots", settings.slots, count, [0, *range(4, count, 5)])
        pool = sorted({each.documents(f"example {index}")[0] for index, each in enumerate(questions)})
        for index, question in selection.sample(questions):
            gold, others = question.documents(f"example {index}")
            if not others and count > 1:  # the oracle file: gold documents of other questions are distractors
                different = [each for each in pool if each != gold]
                drawn = random.Random(f"{selection.seed} {index}")
                others = drawn.sample(different, min(count - 1, len(different)))
            if len(others) < count - 1:
                raise InvalidDataset(f"example {index}: expected at least {count} documents, got {len(others) + 1}")
            orders = insert_gold(gold, others[: count - 1], slots)
            yield from settings.cases(str(index), question.question, question.answers, orders)


def _questions(source: DataSource, count: int) -> list[_Documents]:
    """Return the questions of the smallest published file with enough documents, or of the file at the path."""
    total = next((size for size in _FILES if size >= count), count)
    name = f"nq-open-{total}_total_documents_gold_at_0.jsonl.gz"
    path = source.file(name, f"{_LOST}{total}_total_documents/{name}")
    records = read_examples(path)
    if any(isinstance(each, dict) and "input" in each for each in records):
        records = _parse_printed(records, path.with_name(ORACLE), source)
    return [base.parse_example(_Documents, each, f"example {index}") for index, each in enumerate(records)]


def _parse_printed(records: Sequence[Any], oracle: Path, source: DataSource) -> list[Any]:
    """Parse printed prompts; gold passages and accepted answers are in the oracle file beside them."""
    if not oracle.is_file():
        raise DatasetUnavailable(f"expected {ORACLE} beside the printed prompts: it holds the accepted answers")
    answered = [base.parse_example(_Documents, each, ORACLE) for each in read_examples(source.read(oracle, ORACLE))]
    known = {each.question: each for each in answered if each.ctxs}
    examples = []
    for index, record in enumerate(records):
        text = base.parse_example(_Printed, record, f"example {index}").input
        head, mark, question = text.rpartition("\n\nQuestion: ")
        fields = _PRINTED.split(head)[1:]
        if not mark or not fields:
            continue  # a prompt of another benchmark
        question = question.removesuffix("\nAnswer:")
        if question not in known:
            raise InvalidDataset(f"example {index}: {question!r} is not in {ORACLE}")
        gold = known[question].ctxs[0].text
        documents = [
            {"title": title, "text": body.rstrip("\n"), "isgold": body.strip() == gold.strip()}
            for title, body in zip(fields[::2], fields[1::2], strict=True)
        ]
        examples.append({"question": question, "answers": known[question].answers, "ctxs": documents})
    return examples


class _XQuADSettings(TaskSettings):
    slots: str = Field("", description="slots with commas; empty: all")


class _Answer(Example):
    text: Text


class _Question(Example):
    id: Text
    question: Text
    answers: list[_Answer]


class _Paragraph(Example):
    context: Text
    qas: list[_Question]


class _Article(Example):
    title: Text
    paragraphs: list[_Paragraph]


class _File(Example):
    data: list[_Article]


class XQuAD(_OneGold[_XQuADSettings]):
    """Questions over the five paragraphs of one article, the gold one at any slot."""

    name = "xquad"
    paper = "Artetxe et al. 2020, arXiv 1910.11856"

    def read(self, source: DataSource, settings: _XQuADSettings, selection: Selection) -> Iterator[Case]:
        """Read the file: the other paragraphs of the same article are the distractors."""
        records = read_examples(source.file("xquad.en.json", _XQUAD))
        articles = base.parse_example(_File, records[0] if records else None, "the file").data
        questions = [
            (article, gold, example)
            for article in articles
            for gold, paragraph in enumerate(article.paragraphs)
            for example in paragraph.qas
        ]
        shown = _LostInTheMiddleSettings.model_validate({})
        for _, (article, gold, example) in selection.sample(questions):
            documents = [(article.title.replace("_", " "), each.context) for each in article.paragraphs]
            slots = base.parse_numbers("slots", settings.slots or "all", len(documents))
            orders = insert_gold(documents[gold], [*documents[:gold], *documents[gold + 1 :]], slots)
            yield from shown.cases(example.id, example.question, [each.text for each in example.answers], orders)


class _KeyValueSettings(TaskSettings):
    """In arXiv 2406.02536, of a file of 300 pairs with the queried one moved to its slot, 140 are kept: `keys`."""

    keys: int = Field(75, ge=1, description="pairs in a prompt; 75, 140 and 300 in the paper")
    slots: str = Field("", description="`all`, or slots with commas; empty: 0, 25, 50, 75 and 100%, rounded down")
    file_keys: int = Field(0, ge=0, description="pairs in the file, of which the first `keys` are kept; 0: as many")
    make: int = Field(0, ge=0, description="make that many questions from the seed, instead of reading a file")


class _Pairs(Example):
    ordered_kv_records: list[tuple[Text, Text]]
    key: Text
    value: Text


class KeyValue(Benchmark[_KeyValueSettings]):
    """Find the value of a key among 75, 140 or 300 random pairs."""

    name = "key-value"
    paper = "Liu et al. 2023, arXiv 2307.03172"
    variants = "slot of the queried pair, from 0"

    def read(self, source: DataSource, settings: _KeyValueSettings, selection: Selection) -> Iterator[Case]:
        """Read the official file, or generate random pairs."""
        count = settings.keys
        in_file = count if settings.make else settings.file_keys or count
        if in_file < count:
            raise InvalidChoice(f"file_keys: expected at least the {count} keys of a prompt, got {in_file}")
        if settings.make:
            examples = _random_pairs(settings.make, count, selection.seed)
        else:
            name = f"kv-retrieval-{in_file}_keys.jsonl.gz"
            examples = read_examples(source.file(name, _PAIRS + name))
        quarters = sorted({quarter * (count - 1) // 4 for quarter in range(5)})
        slots = base.parse_numbers("slots", settings.slots, count, quarters)
        for index, example in selection.parse(_Pairs, examples):
            pair, pairs = (example.key, example.value), example.ordered_kv_records
            if len(pairs) != in_file or pair not in pairs:
                raise InvalidDataset(f"example {index}: expected {in_file} pairs with this one, got {len(pairs)}")
            written = [f'"{key}": "{value}",\n ' for key, value in (pair, *(each for each in pairs if each != pair))]
            yield from Case(
                question=str(index),
                prefix=_PROMPTS["key_value"],
                suffix=f'}}\n\nKey: "{example.key}"\nCorresponding value:',
                gold=(example.value,),
                query=example.key,
            ).in_orders(insert_gold(written[0], written[1:count], slots))

    def score(self, case: Case, output: str) -> Scored:
        """Return accuracy as in Lost in the Middle: the value is a substring of the output, ignoring case."""
        answer = output.strip().lower()
        right = case.gold[0].lower() in answer
        return Scored(case.gold[0].lower() if right else answer, {"accuracy": float(right)})


def _random_pairs(questions: int, keys: int, seed: int) -> list[dict[str, Any]]:
    """Return random UUID pairs in the format of the official files."""
    source = random.Random(f"key-value {keys} {seed}")
    examples = []
    for _ in range(questions):
        made = [str(uuid.UUID(int=source.getrandbits(128), version=4)) for _ in range(2 * keys)]
        pairs = list(zip(made[::2], made[1::2], strict=True))
        key, value = source.choice(pairs)
        examples.append({"ordered_kv_records": pairs, "key": key, "value": value})
    return examples
