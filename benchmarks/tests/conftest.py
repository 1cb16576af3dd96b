"""Files of every benchmark in miniature, in the formats of the real ones, and a tiny model that reads them."""

import gzip
import importlib.util
import json
import os
import zipfile
from contextlib import contextmanager

import pytest
import torch
from invariant_rag import InvariantModel
from invariant_rag.testing import tiny_model, toy_tokenizer

from invariant_rag_benchmarks import BENCHMARKS, Selection
from invariant_rag_benchmarks.data import DataSource

NOISE = [{"title": f"D{place}", "text": f"noise {place}", "isgold": False} for place in range(9)]
ORACLE = [
    {
        "question": f"who is {name}",
        "answers": [name, name.upper()],
        "ctxs": [{"title": f"T{name}", "text": f"{name} is here.", "isgold": True}],
    }
    for name in ("ann", "bob", "cid", "dan")
]
TEN = [{**record, "ctxs": [*NOISE, *record["ctxs"]]} for record in ORACLE]
PRINTED = [
    {"input": "Extract the value. JSON data: {}", "output": "v"},
    {
        "input": "Write.\n\nDocument [1](Title: D0) noise (with brackets)\nDocument [2](Title: Tann) ann is here.\n"
        "Document [3](Title: D1) more noise\n\nQuestion: who is ann\nAnswer:",
        "output": "ann",
    },
]
PAIRS = [[f"key{place}", f"value{place}"] for place in range(6)]
KEY_VALUE = [{"ordered_kv_records": PAIRS, "key": f"key{place}", "value": f"value{place}"} for place in (1, 4)]
MMLU = [
    {"question": f"What is {place}?", "subject": "some_subject", "choices": list("wxyz"), "answer": place % 4}
    for place in range(6)
]
TRIPLES = [[f"s{place}", "r", place] for place in range(40)]
MINTAKA = [
    {"question": "who?", "answers": ["Rome", "Oslo"], "knowledges": [TRIPLES]},
    {"question": "none?", "answers": ["No"], "knowledges": [[]]},
]
REWARD = [
    {"prompt": f"Do {subset}.", "chosen": "Done.", "rejected": "No.", "subset": subset}
    for subset in ("alpacaeval-easy", "mt-bench-hard", "donotanswer", "math-prm", "hep-go")
]
LLMBAR = [
    {"input": "Say yes.", "output_1": "yes", "output_2": "no", "label": 1},
    {"input": "Say no.", "output_1": "yes", "output_2": "no", "label": 2},
]
TWO_WIKI = [{"input": "Who?", "context": "abcdefghij" * 3, "answers": ["the Answer"]}]
LONGBENCH = {
    name: [{"input": "Who?", "context": "abcdefghij" * 3, "answers": ["the Answer"], "all_classes": None}]
    for name in ("qasper", "multifieldqa_en", "narrativeqa", "triviaqa", "samsum")
}
LONGBENCH["trec"] = [{"input": "Q: x", "context": "abc", "answers": ["Food"], "all_classes": ["Food", "Sport"]}]
PARAGRAPHS = [
    {
        "context": f"paragraph {place}",
        "qas": [{"id": f"q{place}", "question": f"Which {place}?", "answers": [{"text": str(place)}]}],
    }
    for place in range(5)
]
XQUAD = {"data": [{"title": "Some_Article", "paragraphs": PARAGRAPHS}]}
R_GSM = [
    {
        "question": "Ann has 3 pens. She buys 4. Bo gives 2. How many are there?",
        "interchangeable": ["She buys 4.", "Bo gives 2."],
        "answer": 9,
    }
]
EVENTS = [
    {"Q": "Reorder. I. a II. b III. c", "A": "II,I,III", "type": "timeline_reorder"},
    {"Q": "Other?", "A": "x", "type": "computation"},
]
TIMELINE = [
    {"input": "First one. Then two. Then three. ", "qa_pairs": str(EVENTS)},
    {"context": "abc def", "question": "Order I. II.", "answer": "II, I", "task": "timeline_reorder"},
]
SMALL = {
    "lost-in-the-middle": {"documents": 10},
    "key-value": {"keys": 6},
    "two-wiki": {"chunk": 4},
    "timeline": {"chunk": 8},
    "longbench": {"chunk": 8},
}
"""Settings that fit the small files."""


def imported(path):
    """A script as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def calling(step):
    """A progress display that calls a function after every step."""

    @contextmanager
    def progress(label, total=None, completed=0):
        yield step

    return progress


@pytest.fixture(scope="session", autouse=True)
def _one_thread():
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))


@pytest.fixture(scope="session")
def chat_llama():
    """A tiny random Llama with room for the toy tokenizer's vocabulary and long prompts."""
    return tiny_model("llama", num_hidden_layers=2, vocab_size=261, max_position_embeddings=4096, eos_token_id=None)


@pytest.fixture(scope="session")
def tokenizer():
    """One token per byte."""
    return toy_tokenizer()


FILES = {
    "nq-open-10_total_documents_gold_at_0.jsonl.gz": TEN,
    "nq-open-oracle.jsonl.gz": ORACLE,
    "printed.jsonl": PRINTED,
    "kv-retrieval-6_keys.jsonl.gz": KEY_VALUE,
    "mmlu_validation.json": MMLU,
    "mintaka_noshuffle_top30.json": MINTAKA,
    "r_gsm.jsonl": R_GSM,
    "rewards.jsonl": REWARD,
    **{f"{name}.json": LLMBAR for name in ("Natural", "Neighbor", "GPTInst", "GPTOut", "Manual")},
    "data.zip": {"2wikimqa_e.jsonl": TWO_WIKI},
    "longbench.zip": {f"{name}.jsonl": records for name, records in LONGBENCH.items()},
    "loogle.zip": {"shortdep_qa.jsonl": ["none of ours"], "longdep_qa.jsonl": TIMELINE},
    "xquad.en.json": XQUAD,
}
"""Records by the names that the loaders ask for; of an archive, by member."""


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    """A folder with a file of every benchmark."""
    folder = tmp_path_factory.mktemp("data")

    def lines(records):
        return "".join(json.dumps(record) + "\n" for record in records).encode()

    for name, content in FILES.items():
        if name.endswith(".zip"):
            with zipfile.ZipFile(folder / name, "w") as opened:
                for member, records in content.items():
                    opened.writestr(f"data/{member}", lines(records))
        elif name.endswith(".json"):
            (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
        else:
            (folder / name).write_bytes(gzip.compress(lines(content)) if name.endswith(".gz") else lines(content))
    return folder


@pytest.fixture(scope="session")
def data_of(files):
    """Where the data of a benchmark are: the folder, or the file where its real name is another format."""
    single = {"reward-bench": "rewards.jsonl", "two-wiki": "data.zip", "timeline": "loogle.zip"}
    single["longbench"] = "longbench.zip"
    return lambda name: files / single[name] if name in single else files


@pytest.fixture(scope="session")
def load(data_of, lm):
    """Load the cases of a benchmark from its small file."""

    def loaded(name, *, path=None, questions=None, **settings):
        benchmark = BENCHMARKS[name]
        given = benchmark.parse_settings({**SMALL.get(name, {}), **settings})
        return benchmark.load(DataSource(path or data_of(name)), given, Selection(questions, 0, lambda: lm.tokenizer))

    return loaded


@pytest.fixture(scope="session")
def lm(chat_llama, tokenizer):
    """A tiny random model that reads bytes."""
    return InvariantModel(chat_llama, tokenizer)
