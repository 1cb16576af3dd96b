"""Files of every benchmark in miniature, in the formats of the real ones, and a tiny model that reads them."""

import gzip
import json
import os
import zipfile

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.testing import tiny_model, toy_tokenizer
from pyarrow import Table, parquet

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.data import DataSource

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

ORACLE = [
    {
        "question": f"who is {name}",
        "answers": [name, name.upper()],
        "ctxs": [{"title": f"T{name}", "text": f"{name} is here.", "isgold": True}],
    }
    for name in ("ann", "bob", "cid", "dan")
]
NOISE = [{"title": f"D{place}", "text": f"noise {place}", "isgold": False} for place in range(9)]
PRINTED = (
    "Write.\n\nDocument [1](Title: D0) noise (with brackets)\nDocument [2](Title: Tann) ann is here.\n"
    "Document [3](Title: D1) more noise\n\nQuestion: who is ann\nAnswer:"
)
PAIRS = [[f"key{place}", f"value{place}"] for place in range(6)]
TRIPLES = [[f"s{place}", "r", place] for place in range(40)]
PENS = {"question": "Ann has 3 pens. She buys 4. Bo gives 2. How many are there?", "answer": 9}
LONG = {"input": "Who?", "context": "abcdefghij" * 3, "answers": ["the Answer"], "all_classes": None}
PARAGRAPHS = [
    {"context": f"paragraph {k}", "qas": [{"id": f"q{k}", "question": f"Which {k}?", "answers": [{"text": str(k)}]}]}
    for k in range(5)
]
EVENTS = [
    {"Q": "Reorder. I. a II. b III. c", "A": "II,I,III", "type": "timeline_reorder"},
    {"Q": "Other?", "A": "x", "type": "computation"},
]
SAMPLES = {  # records of each benchmark
    "lost-in-the-middle": [{**record, "ctxs": [*NOISE, *record["ctxs"]]} for record in ORACLE],
    "key-value": [{"ordered_kv_records": PAIRS, "key": f"key{place}", "value": f"value{place}"} for place in (1, 4)],
    "mmlu": [
        {"question": f"What is {place}?", "subject": "some_subject", "choices": list("wxyz"), "answer": place % 4}
        for place in range(6)
    ],
    "mintaka": [
        {"question": "who?", "answers": ["Rome", "Oslo"], "knowledges": [TRIPLES]},
        {"question": "none?", "answers": ["No"], "knowledges": [[]]},
    ],
    "reward-bench": [
        {"prompt": f"Do {subset}.", "chosen": "Done.", "rejected": "No.", "subset": subset}
        for subset in ("alpacaeval-easy", "mt-bench-hard", "donotanswer", "math-prm", "hep-go")
    ],
    "llmbar": [
        {"input": f"Say {word}.", "output_1": "yes", "output_2": "no", "label": label}
        for word, label in (("yes", 1), ("no", 2))
    ],
    "two-wiki": [LONG],
    "longbench": [LONG],
    "xquad": {"data": [{"title": "Some_Article", "paragraphs": PARAGRAPHS}]},
    "r-gsm": [{**PENS, "interchangeable": ["She buys 4.", "Bo gives 2."]}],
    "timeline": [
        {"input": "First one. Then two. Then three. ", "qa_pairs": str(EVENTS)},
        {"context": "abc def", "question": "Order I. II.", "answer": "II, I", "task": "timeline_reorder"},
    ],
}
SETTINGS = {  # that fit them
    "lost-in-the-middle": {"documents": 10},
    "key-value": {"keys": 6},
    "two-wiki": {"chunk": 4},
    "timeline": {"chunk": 8},
    "longbench": {"chunk": 8, "tasks": "qasper"},
}
FILES = {  # records by the names that the loaders ask for
    "nq-open-10_total_documents_gold_at_0.jsonl.gz": SAMPLES["lost-in-the-middle"],
    "nq-open-oracle.jsonl.gz": ORACLE,
    "printed.jsonl": [{"input": each, "output": "v"} for each in ("Extract the value. JSON data: {}", PRINTED)],
    "kv-retrieval-6_keys.jsonl.gz": SAMPLES["key-value"],
    **{f"mmlu_{split}.json": SAMPLES["mmlu"] for split in ("validation", "test")},
    **{f"mintaka_noshuffle_top{count}.json": SAMPLES["mintaka"] for count in (30, 50)},
    "r_gsm.jsonl": SAMPLES["r-gsm"],
    "filtered-00000-of-00001.parquet": SAMPLES["reward-bench"],
    **{f"{name}.json": SAMPLES["llmbar"] for name in ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")},
    "xquad.en.json": SAMPLES["xquad"],
    **{f"{name}.jsonl": [LONG] for name in ("qasper", "multifieldqa_en", "narrativeqa", "triviaqa", "samsum")},
    "trec.jsonl": [{"input": "Q: x", "context": "abc", "answers": ["Food"], "all_classes": ["Food", "Sport"]}],
    "2wikimqa_e.jsonl": SAMPLES["two-wiki"],
    "shortdep_qa.jsonl": ["none of ours"],
    "longdep_qa.jsonl": SAMPLES["timeline"],
}


def records(scores, metric="accuracy", answers=(), **more):
    """Records of a run, given the scores of its questions by variant; questions are answered alike if scored alike."""
    made = [
        {"question": str(number), "variant": variant, "answer": str(score), "scores": {metric: score, "other": 0.5}}
        for variant, each in scores.items()
        for number, score in enumerate(map(float, each))
    ]
    for record, answer in zip(made, answers, strict=bool(answers)):
        record["answer"] = answer
    return [{"group": "", "dropped": 0, "trimmed": 0, **record, **more} for record in made]


@pytest.fixture(scope="session")
def lm():
    """A tiny random Llama that reads bytes, with room for long prompts."""
    model = tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None)
    return InvariantModel(model, toy_tokenizer())


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with a file of every benchmark, and an archive of all of them."""
    folder = tmp_path_factory.mktemp("data")
    with zipfile.ZipFile(folder / "data.zip", "w") as archive:
        for name, records in FILES.items():
            path, lines = folder / name, "".join(json.dumps(record) + "\n" for record in records).encode()
            if path.suffix == ".parquet":
                parquet.write_table(Table.from_pylist(records), path)
            elif path.suffix == ".json":
                path.write_text(json.dumps(records, indent=1))
            else:
                path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
            archive.write(path, f"data/{name}")
    return folder


@pytest.fixture(scope="session")
def load(files, lm):
    """Load the cases of a benchmark: from its small file in the folder, or from a `source`, such as another one."""

    def loaded(name, source="", questions=None, seed=0, **settings):
        benchmark = BENCHMARKS[name]
        given = benchmark.parse_settings({**SETTINGS.get(name, {}), **settings})
        path = None if source is None else files / source
        return benchmark.load(DataSource(path), given, Selection(questions, seed, lambda: lm.tokenizer))

    return loaded
