"""From documents to answers: entries, stores, documentation, the package, and a model of a server.

Each entry of the table in README.md is invariant, or warns, as its row says. It gives one answer for all orders of the
nodes, or warns at each order. The same entries around a plain model must give several answers: otherwise this could not
tell. Three nodes are asked about in all six orders, four in eight of 24.
"""

import re
import subprocess
import sys
import zlib
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import pytest
from cases import ORDERS, QUERY, TEXTS, ListRetriever, Recorder, message_of, node, nodes_of, read, report_of
from entries import ENTRIES, IDS, ONE_BY_ONE, WHOLE, answer, local_llm
from framework_cases import caught, examples
from invariant_rag import InvariantModel, Segment
from invariant_rag.prompts import mark
from invariant_rag.testing.ordinary_prompts import ORDINARY
from llama_index.core.llms import ChatMessage, CitationBlock, MockLLM
from llama_index.core.response_synthesizers import ResponseMode

import llama_index
from llama_index.llms.invariant_rag import InvariantLLM, canonical, vote

NAMESPACES = ("llms", "response_synthesizers", "postprocessor", "evaluation", "chat_engine")
HERE = Path(__file__).parent.parent
REPOSITORY = HERE.parents[1]
README = (HERE / "README.md").read_text("utf-8")
WRAPPERS = {
    "`canonical(llm)`": lambda _: canonical(Recorder(says=str)),
    "`vote(llm)`": lambda _: vote(Recorder(says=str), votes=3),
}
"""Topics of which the entries are others, around an LLM behind an API."""


class Row(NamedTuple):
    """What the table says of an entry."""

    wrapper: str  # empty for `InvariantLLM`
    topic: str
    name: str
    warns: bool  # whether each order of the nodes has an answer of its own, and a warning; else all have one answer

    @property
    def title(self):
        return ": ".join(filter(None, self[:3]))

    def ask(self, llm, order):
        """Return the answer for an order of the nodes, what was read, the verdict, and whether a user is warned."""
        (text, response), messages = caught(answer, ENTRIES[self.topic][self.name], llm, self.nodes(order))
        says = report_of(response) or ({} if hasattr(response, "metadata") else None)  # every engine says what was read
        return text, repr(says), (says or {}).get("invariant"), bool(messages)

    def nodes(self, order):
        """Return nodes in an order, tied, as a reader of files makes them; no other entry has the same texts."""
        texts, page = (*TEXTS, "The bell of Varn rings twice a day."), zlib.crc32(self.title.encode()) % 10_000
        written = [f"{text} See page {page}." for text in texts]
        return [node(written[i], name=IDS[i], file_name=f"{IDS[i][8:]}.txt") for i in order]


def rows():
    """Return the rows of the table, an entry each."""
    (table,) = re.findall(r"<!-- entries: .*? -->\n\n.*?\n.*?\n(.*?)\n\n<!--", README, re.DOTALL)
    for line in table.split("\n"):
        titles, expected, _ = line.strip("| ").split(" | ")
        topic, names = titles.split(": ", 1)
        for name in names.split("; "):
            place = (topic, *name.split(": ", 1)) if topic in WRAPPERS else ("", topic, name)
            yield Row(*place, warns={"yes": False, "no: warns": True}[expected])


TABLE = list(rows())
OF_FOUR_NODES = [tuple((start + step * i) % 4 for i in range(4)) for start in range(4) for step in (1, -1)]
SHOWN = ("as it is", "`InvariantChatEngine`, `chat`")
"""Entries that are asked about four nodes, too."""
CASES = [(row, ORDERS) for row in TABLE]
CASES += [(row, OF_FOUR_NODES) for row in TABLE if not row.wrapper and row.name in SHOWN]
NAMES = (
    "which reads no node",
    "`CitationQueryEngine`: with `InvariantSynthesizer`",
    "two answers: `InvariantPairwiseEvaluator`",
    "two answers: `PairwiseComparisonEvaluator`,",
)
"""Entries whose answer is one even from a plain model: they read no node, or put them in order themselves."""
OF_SEVERAL = ("two answers", "`LLMRerank`")
"""Entries that compare nodes: there is nothing to ask about one."""


def test_every_entry_has_a_row_and_every_response_mode_is_an_entry():
    assert sorted(each[1:3] for each in TABLE if not each.wrapper) == sorted(
        (topic, name) for topic, names in ENTRIES.items() for name in names
    )
    assert len({each.title for each in TABLE}) == len(TABLE) >= 71
    without_nodes = ["generation", "no_text", "context_only"]  # the last two ask no LLM at all
    assert {*WHOLE, *ONE_BY_ONE, *without_nodes} == {mode.value for mode in ResponseMode}


@pytest.mark.parametrize(("row", "orders"), CASES, ids=lambda given: getattr(given, "title", len(given)))
def test_an_entry_is_invariant_or_warns_as_its_row_says_and_a_plain_model_answers_by_the_order(spoken, row, orders):
    llm = WRAPPERS.get(row.wrapper, local_llm)(spoken)
    asked = [row.ask(llm, order) for order in orders]
    answers, reports, verdicts, warned = map(set, zip(*asked, strict=True))
    assert ((len(answers) > 1), warned) == (row.warns, {row.warns}), asked
    assert row.warns or len(reports) == 1, "what was read is one for all orders, too"
    assert len(verdicts) == 1, asked
    assert verdicts == {not row.warns} or reports == {"None"} or "reads no node" in row.name, "a text says nothing"
    if orders is not ORDERS:
        return
    if row.warns and not any(each in row.title for each in OF_SEVERAL):
        assert not row.ask(llm, (0,))[-1], "nobody is warned about one node"
    plain = Recorder(says=str) if row.wrapper else local_llm(spoken.with_method("sequential", ordering="given"))
    answers, others = set(), iter(ORDERS)
    while len(answers) < 2 and (order := next(others, None)):
        answer, *_, warned = row.ask(plain, order)
        answers.add(answer)
        assert not warned or row.wrapper
    assert (len(answers) > 1) != any(each in row.title for each in NAMES)


PAGES = {
    "package": examples(HERE / "README.md"),
    "tutorial": examples(REPOSITORY / "docs" / "tutorials" / "llamaindex.md"),
    "project": examples(REPOSITORY / "README.md", "llama_index"),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of workflows
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs_and_prints_what_it_says(page, capsys):
    names = {"__name__": page}
    for code, said in PAGES[page]:
        exec(compile(code, "example.md", "exec", dont_inherit=True), names if page == "tutorial" else {**names})
        printed = capsys.readouterr().out.splitlines()
        assert printed[-1].endswith(" True") if page == "project" else printed == said
        assert page != "package" or len(said) == 1
    assert PAGES[page]


def test_prompts_without_retrieved_nodes_raise_no_warning(lm):
    ListRetriever(nodes_of()).retrieve(QUERY)  # somebody has just retrieved something else
    local = InvariantLLM(lm.with_method(overflow="trim_segments"), max_tokens=1)

    def ask():
        for place, turns in enumerate(ORDINARY):
            for llm in (canonical(MockLLM()), *([local] if place % 7 == 0 else [])):
                llm.chat([ChatMessage(each["content"], role=each["role"]) for each in turns])
                llm.complete("\n\n".join(each["content"] for each in turns))

    assert caught(ask)[1] == []


def test_each_package_is_where_llama_index_users_look_and_no_namespace_is_taken():
    for namespace in NAMESPACES:
        place = HERE / "llama_index" / namespace / "invariant_rag"
        assert find_spec(f"llama_index.{namespace}.invariant_rag").origin == str(place / "__init__.py")
        assert (place / "py.typed").exists()
    assert llama_index.__spec__.origin is None
    assert not list(HERE.glob("llama_index/__init__.py")) + list(HERE.glob("llama_index/*/__init__.py"))
    assert (HERE / "LICENSE").read_text() == (REPOSITORY / "LICENSE").read_text()
    source = "".join(each.read_text() for each in HERE.glob("llama_index/**/*.py"))
    assert not re.search(r"_getframe|f_locals|gi_frame|cr_frame", source), "no frame of anybody's code is looked into"


def printed(*code):
    """Return the lines that a process of its own prints."""
    command = [sys.executable, "-W", "ignore", "-c", "\n".join(code)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    return done.stdout.splitlines() or [done.stderr]


def test_no_optional_package_is_needed_and_an_import_within_a_run_warns_where_the_next_run_is_known():
    assert printed(
        "import sys, warnings",
        "sys.modules.update(dict.fromkeys(['langchain', 'langchain_core', 'xgrammar', 'faiss', 'qdrant_client']))",
        "from llama_index.core import Document, PromptTemplate, SummaryIndex",
        "from llama_index.core.instrumentation import get_dispatcher",
        "from pydantic import create_model",
        f"index = SummaryIndex.from_documents([Document(text=text) for text in {FLAGS!r}])",
        "@get_dispatcher('mine').span",
        "def ask():",
        "    context = ' '.join(each.text for each in index.as_retriever().retrieve('Which?'))",
        "    with warnings.catch_warnings(record=True) as found:",
        "        warnings.simplefilter('always')",
        "        from llama_index.llms.invariant_rag import canonical",
        "    from cases import Recorder",
        "    warned = sum('before a run begins' in str(each.message) for each in found)",
        "    llm = canonical(Recorder(), require_segments=True)",
        "    try: print(warned, llm.predict(PromptTemplate('{context_str}'), context_str=context))",
        "    except Warning as error: print(warned, type(error).__name__)",
        "ask()",
        "ask()",
        *(f"import llama_index.{each}.invariant_rag" for each in NAMESPACES),
        "llm = llama_index.llms.invariant_rag.InvariantLLM(max_tokens=1)",
        "print(len(llm.complete('Hello').raw))",
        "try: llm.structured_predict(create_model('A', a=int), PromptTemplate('x'))",
        "except Exception as error: print(type(error).__name__, error)",
    ) == [
        "1 OrderWarning",
        "0 Noon.",
        "9",
        'ExtraRequired xgrammar is not installed; run `pip install "invariant-rag[structured]"`',
    ]


COLOUR = "What colour is the flag of Ostra?"
FLAGS = ["The flag of Ostra is white.", "The flag of Brenn is green.", "The mill of Ostra grinds barley."]
MARKED = "".join(mark(Segment(text)) for text in FLAGS) + f"\n{COLOUR}"


def test_a_remote_model_answers_as_one_in_memory(base_url):
    def content(response):
        return response.message.model_dump(), response.raw, [each[0].token for each in response.logprobs]

    asked = [[message_of(order, f"\n{COLOUR}")] for order in permutations(FLAGS)]
    options = {"max_tokens": 16, "citations": True, "logprobs": True}
    local = InvariantLLM(InvariantModel.from_pretrained(), **options)
    remote = InvariantLLM(base_url=base_url, **options)
    here = local.chat(asked[0])
    assert here.message.content == "white"
    assert any(isinstance(block, CitationBlock) for block in here.message.blocks)
    there = [*map(remote.chat, asked)]
    there += [read(ask(asked[0]))[1] for ask in (remote.stream_chat, remote.achat, remote.astream_chat)]
    assert all(content(each) == content(here) for each in there)
    texts = [read(ask(MARKED)) for ask in (local.complete, remote.complete, remote.stream_complete)]
    assert len({(text, *response.raw["order"]) for text, response in texts}) == 1
    assert remote.metadata.context_window == 4096
    chosen = InvariantLLM(base_url=base_url, method="pine", max_tokens=1)
    assert [each.chat(asked[0], max_tokens=1).raw["method"] for each in (remote, chosen)] == ["rotor", "pine"]


def test_the_application_needs_no_torch_and_its_first_call_is_as_good_as_the_second(base_url):
    assert printed(
        "import sys",
        "from cases import QUERY, Recorder, engine_of, message_of, nodes_of",
        "from llama_index.llms.invariant_rag import InvariantLLM, canonical",
        "llm = canonical(Recorder(), strict=True)",
        "print([engine_of(nodes_of(), llm=llm).query(QUERY).metadata['invariant_rag']['sets'] for _ in range(2)])",
        f"print(InvariantLLM(base_url={base_url!r}).chat([message_of({FLAGS!r}, {COLOUR!r})]).message.content)",
        "assert not (sys.modules.get('torch') or sys.modules.get('transformers'))",
        "print('no torch')",
    ) == ["[[3], [3]]", "white", "no torch"]
