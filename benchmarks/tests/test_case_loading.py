"""Claims about benchmark files with wrong values: every one is a typed error that names the file, or is read."""

from __future__ import annotations

import copy
import gzip
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from invariant_rag import InvariantModel
from invariant_rag.errors import InvariantRAGError

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.data import DataSource, read_examples
from invariant_rag_benchmarks.errors import InvalidDataset

from .conftest import SMALL

VALUES = [None, 5, -1, True, "", "x", [], {}, [None], [[]], {"a": 1}, float("nan"), 10**400, "\ud800"]


def mutated(document: Any, source: random.Random) -> Any:
    """The same document with one value replaced by another, or taken away."""
    changed = copy.deepcopy(document)
    places: list[tuple[Any, Any]] = []
    remaining = [changed]
    while remaining:
        each = remaining.pop()
        if isinstance(each, dict | list):
            places += [(each, key) for key in (each if isinstance(each, dict) else range(len(each)))]
            remaining += each.values() if isinstance(each, dict) else each
    if places:
        holder, key = source.choice(places)
        if source.random() < 0.2:
            del holder[key]
        else:
            holder[key] = copy.deepcopy(source.choice(VALUES))
    return changed


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_value_of_another_type_is_refused_by_name(
    name: str, data_of: Callable[[str], Path], lm: InvariantModel, tmp_path: Path
) -> None:
    benchmark, source = BENCHMARKS[name], random.Random(name)
    settings = benchmark.parse_settings(SMALL.get(name, {}))
    selection = Selection(None, 0, lambda: lm.tokenizer)
    original = DataSource(data_of(name))
    benchmark.load(original, settings, selection)
    file = original.path
    if file.is_dir():
        file = next(each for each in sorted(file.rglob("*")) if each.name in map(os.path.basename, original.digests))
    member = {"two-wiki": "2wikimqa_e.jsonl", "timeline": "longdep_qa.jsonl"}.get(name, "")
    examples = read_examples(file, member)
    if name == "llmbar":  # which has several files
        shutil.copytree(file.parent, tmp_path / name)
    refused = 0
    for _ in range(60):
        target = tmp_path / (f"{name}/{file.name}" if name == "llmbar" else "data.json")
        target.write_text(json.dumps(mutated(examples, source)))
        try:
            benchmark.load(DataSource(target.parent if name == "llmbar" else target), settings, selection)
        except InvariantRAGError as error:
            refused += isinstance(error, InvalidDataset)
    assert refused > 5


def test_a_file_that_is_torn_or_none_is_refused_by_name(tmp_path: Path) -> None:
    whole = gzip.compress(json.dumps({"a": "b" * 1000}).encode())
    contents = {
        "torn.json.gz": whole[:-9],
        "flipped.json.gz": whole[:20] + b"\xff\xff" + whole[22:],
        "none.zip": b"PK nothing",
        "deep.jsonl": b"[" * 100_000,
        "digits.json": b"9" * 5000,
        "latin.json": b'"caf\xe9"',
        "none.parquet": b"PAR1",
    }
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(InvariantRAGError, match=name if name != "none.parquet" else "parquet|pyarrow"):
            read_examples(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "file", "settings"),
    [
        ("mmlu", "mmlu_validation.json", {"split": "test"}),
        ("mmlu", "my_test.json", {"split": "validation"}),
        ("mintaka", "mintaka_noshuffle_top30.json", {"triples": 50}),
        ("llmbar", "Natural.json", {"subsets": "Neighbor"}),
        ("longbench", "qasper.jsonl", {"tasks": "narrativeqa"}),
        ("longbench", "qasper.jsonl", {"tasks": "single-doc"}),
    ],
)
def test_a_file_serves_its_own_settings_alone(name: str, file: str, settings: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / file).write_text("[]")
    benchmark = BENCHMARKS[name]
    with pytest.raises(InvalidDataset, match=file):
        benchmark.load(DataSource(tmp_path / file), benchmark.parse_settings(settings), Selection())


def test_the_tree_of_lost_in_the_middle_is_read(files: Path, tmp_path: Path) -> None:
    name = "nq-open-10_total_documents_gold_at_0.jsonl.gz"
    folder = tmp_path / "qa_data" / "10_total_documents"
    folder.mkdir(parents=True)
    shutil.copy(files / name, folder)
    benchmark = BENCHMARKS["lost-in-the-middle"]
    settings = benchmark.parse_settings({"documents": 10})
    cases = [
        benchmark.load(DataSource(path), settings, Selection())
        for path in (tmp_path / "qa_data", tmp_path, files / name)
    ]
    assert cases[0] == cases[1] == cases[2]


def test_lists_named_lines_and_lines_named_lists_are_read(tmp_path: Path) -> None:
    """RoToR's `mmlu_validation_cache.jsonl` is a list over many lines."""
    records = [{"a": 1}, {"b": [2]}]
    (tmp_path / "list.jsonl").write_text(json.dumps(records, indent=4))
    (tmp_path / "lines.json").write_text("".join(json.dumps(each) + "\n" for each in records))
    (tmp_path / "one.json").write_text(json.dumps(records[1], indent=4))
    assert [read_examples(tmp_path / name) for name in ("list.jsonl", "lines.json", "one.json")] == [
        records,
        records,
        [records[1]],
    ]


def test_a_broken_line_is_named_by_its_number_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"a": 1}\n\n{"a": \n{"a": 2}\n')
    with pytest.raises(InvalidDataset, match="line 3: ") as caught:
        read_examples(tmp_path / "data.jsonl")
    assert "line 1" not in str(caught.value)


@pytest.mark.parametrize("answers", [["none of them"], []])
def test_a_gold_answer_that_cannot_be_compared_with_is_found_before_the_model_is_asked(
    answers: list[str], lm: InvariantModel, tmp_path: Path
) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"input": "Which?", "context": "text", "answers": answers}))
    source, selection = DataSource(tmp_path / "data.jsonl"), Selection(load_tokenizer=lambda: lm.tokenizer)
    benchmark = BENCHMARKS["longbench"]
    with pytest.raises(InvalidDataset, match="none that"):
        benchmark.load(source, benchmark.parse_settings({"tasks": "passage_count"}), selection)
