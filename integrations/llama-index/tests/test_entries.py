"""Every way in which retrieved nodes reach a model, a row each; as a script, it writes the table in the README.

Every entry gives one answer for all orders of the nodes, or warns at each order, as the table says. The same entries
around a plain model must give several answers: otherwise this could not tell. Three nodes are asked about in all six
orders, four in eight of 24.
"""

from __future__ import annotations

import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import asks
import pytest
from asks import FORMATS, IDS, ONE_BY_ONE, WHOLE, Ask, Nodes, answer, blocks, built, chat, citation, ours, query
from cases import TEXTS as THREE
from cases import HashingLLM, ListRetriever, caught, engine_of, report_of
from invariant_rag import InvariantModel
from llama_index.core import SummaryIndex, evaluation, get_response_synthesizer
from llama_index.core.base.llms.types import CitableBlock, DocumentBlock, TextBlock
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.postprocessor import LongContextReorder
from llama_index.core.query_engine import MultiStepQueryEngine, TransformQueryEngine
from llama_index.core.response_synthesizers import CompactAndRefine, Refine, ResponseMode
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from tiny import local_llm

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import SegmentBlock, canonical, vote
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

TEXTS = (*THREE, "The bell of Varn rings twice a day.")
MARKED = {"node_postprocessors": [asks.MARKER]}


@dataclass(frozen=True)
class Entry:
    """One way in which retrieved nodes reach a model."""

    topic: str  # a row of the table lists the entries of one topic that behave alike
    name: str  # as a user would write it
    expected: str  # `yes`: one answer for all orders, and no warning. `no: warns`: several, and a warning at each
    todo: str  # what a user has to do
    ask: Ask
    wrapper: str = "InvariantLLM"  # the other ones stand around an LLM behind an API

    @property
    def title(self) -> str:
        return f"{self.topic}: {self.name}"

    def nodes(self, order: Sequence[int]) -> Nodes:
        """Return nodes in an order, tied, as a reader of files makes them; no other entry has the same texts."""
        page = zlib.crc32(self.title.encode()) % 10_000

        def node(i: int) -> TextNode:
            metadata = {"file_name": f"{IDS[i].removeprefix('node of ')}.txt"}
            return TextNode(text=f"{TEXTS[i]} See page {page}.", id_=IDS[i], metadata=metadata)

        return [NodeWithScore(node=node(i), score=0.5) for i in order]

    def around(self, wrapper: str) -> Entry:
        """Return the same entry with a wrapper around the LLM."""
        todo = self.todo.replace(GLOBAL, f"nothing but `Settings.llm = {wrapper}(llm)`")
        return replace(self, name=self.title, todo=todo, wrapper=wrapper, topic=f"`{wrapper}(llm)`")


def rows(expected: str, topic: str, todo: str, ways: Mapping[str, Ask]) -> list[Entry]:
    return [Entry(topic, name, expected, todo, ask) for name, ask in ways.items()]


invariant, warns = partial(rows, "yes"), partial(rows, "no: warns")
WRAPPERS: dict[str, Callable[[InvariantModel], LLM]] = {
    "InvariantLLM": local_llm,
    "canonical": lambda _: canonical(HashingLLM()),
    "vote": lambda _: vote(HashingLLM(), votes=3),
}

# --- the table ---

GLOBAL = "nothing but `Settings.llm = InvariantLLM(...)`"
MORE = "nothing more"
ONE_CALL = "`response_synthesizer=InvariantSynthesizer(llm)`: one call reads all nodes"
UNNUMBERED = "leave the numbers away, or use `CitationQueryEngine` with `InvariantSynthesizer`"
IN_ONE_SPAN = "retrieve and ask in one function under `@dispatcher.span`, or in one workflow"
DECLARED = "mark the nodes (`SegmentMarkerPostprocessor`), or give `SegmentBlock`s"
ENGINE, MODES = "`index.as_query_engine(...)`", "`index.as_query_engine(response_mode=...)`"
WITH_MARKS, BY_HAND = "`SegmentMarkerPostprocessor`, `response_mode=...`", "a response synthesizer by hand"
OURS = "`response_synthesizer=InvariantSynthesizer(llm, ...)`"
CITATIONS = "`CitationQueryEngine` with the parts of this package"
WITH_OURS = "`CitationQueryEngine.from_args(..., response_synthesizer=InvariantSynthesizer(llm))`"
NUMBERS = "a `text_qa_template` that numbers the nodes"
CHATS, CONDENSE = "chat engines with the parts of this package", "condense_plus_context"
RETRIEVER_TOOL = "`RetrieverTool(..., node_postprocessors=[SegmentMarkerPostprocessor()])`"

NO_NODES = ["generation", "no_text", "context_only"]
"""Response modes that show no node to an LLM; the last two ask none at all."""

COMPLETED = {name: partial(asks.completing, write=write) for name, write in FORMATS.items()}
TOLD = {name: partial(asks.told, write=write) for name, write in FORMATS.items()}
PROMPTS: dict[str, Ask] = {
    '`llm.chat`, joined with `"\\n\\n"`': lambda c: c.llm.chat([ChatMessage(asks.prompt_of(asks.JOINED(c.nodes)))]),
    "`RichPromptTemplate` with a Jinja loop": partial(asks.predicting, template=asks.JINJA, write=asks.contents),
    "`PromptTemplate`": asks.predicting,
    "`PromptTemplate` with a function that numbers": partial(asks.predicting, template=asks.NUMBERED),
    "`ChatPromptTemplate`": partial(asks.predicting, template=asks.CHAT_TEMPLATE),
    "`structured_predict`, numbered": lambda c: str(
        asks.longer(c.llm).structured_predict(
            asks.Found, asks.PLAIN, context_str=FORMATS["numbered `[1] ...`"](c.nodes), query_str=c.question
        )
    ),
    "`as_structured_llm`, bullets": lambda c: asks.longer(c.llm).as_structured_llm(asks.Found).complete(
        asks.prompt_of(FORMATS["as bullets"](c.nodes))
    ),
}  # fmt: skip
COUNTED = {"numbered `[1] ...`", "as `Document 1:`"}
TAGGED, JSON = "as `<document>` with its source", "as a JSON list of texts"
NUMBERING = {name for name in PROMPTS if "number" in name or "loop" in name}
TRACED, BY_MARKS = (IN_ONE_SPAN, DECLARED), (MORE, "leave the numbers away")


def by_mode(modes: Sequence[str], **options: Any) -> dict[str, Ask]:
    return {f'`"{mode}"`': partial(query, response_mode=mode, **options) for mode in modes}


def both(topic: str, around: Callable[..., Any], ways: Mapping[str, Ask], sets: set[str], *todo: str) -> list[Entry]:
    """Return entries of which some are sets; what to do for these, and for the others."""
    made = {name: partial(around, ask=ask) for name, ask in ways.items()}
    return [
        *invariant(topic, todo[0], {name: ask for name, ask in made.items() if name in sets}),
        *warns(topic, todo[1], {name: ask for name, ask in made.items() if name not in sets}),
    ]


OWN = [
    *invariant(ENGINE, GLOBAL, {
        "as it is": query,
        "`aquery`": partial(query, way="aquery"),
        "`streaming=True`": partial(query, streaming=True),
        "`streaming=True`, `aquery`": partial(query, way="aquery", streaming=True),
        "`text_qa_template=`": partial(query, text_qa_template=asks.PLAIN),
        "`output_cls=`": lambda c: query(c, llm=asks.longer(c.llm), output_cls=asks.Found),
        "`as_structured_llm`": lambda c: query(c, llm=asks.longer(c.llm).as_structured_llm(asks.Found)),
        '`"generation"`, which reads no node': partial(query, response_mode="generation"),
    }),
    *warns(ENGINE, ONE_CALL, {"`multimodal=True`": partial(query, multimodal=True)}),
    *warns(ENGINE, UNNUMBERED, {NUMBERS: lambda c: query(asks.bare(c), text_qa_template=asks.NUMBERED)}),
    *invariant(MODES, GLOBAL, by_mode(WHOLE)),
    *warns(MODES, ONE_CALL, {
        **by_mode(ONE_BY_ONE),
        '`"tree_summarize"`, several batches': partial(asks.in_small_batches, mode="tree_summarize"),
        '`"compact"`, several batches': partial(asks.in_small_batches, mode="compact"),
    }),
    *invariant(WITH_MARKS, MORE, by_mode(WHOLE, **MARKED)),
    *warns(WITH_MARKS, ONE_CALL, by_mode(ONE_BY_ONE, **MARKED)),
    *warns(WITH_MARKS, UNNUMBERED, {NUMBERS: lambda c: query(asks.bare(c), text_qa_template=asks.NUMBERED, **MARKED)}),
    *invariant(OURS, MORE, {
        "as it is": ours,
        "`aquery`": partial(ours, way="aquery"),
        "`streaming=True`": partial(ours, streaming=True),
        "`output_cls=`": lambda c: ours(c, llm=asks.longer(c.llm), output_cls=asks.Found),
    }),
    *warns(OURS, UNNUMBERED, {NUMBERS: lambda c: ours(asks.bare(c), text_qa_template=asks.NUMBERED)}),
    *invariant(BY_HAND, GLOBAL, {
        "`get_response_synthesizer().synthesize(query, nodes)`": lambda c: get_response_synthesizer().synthesize(
            c.question, c.nodes
        ),
        "`CompactAndRefine().get_response(query, texts)`": lambda c: CompactAndRefine().get_response(
            c.question, asks.contents(c.nodes)
        ),
    }),
    *warns(BY_HAND, ONE_CALL, {
        "`Refine().get_response(query, texts)`": lambda c: Refine().get_response(c.question, asks.contents(c.nodes)),
    }),
    *warns("`CitationQueryEngine`", WITH_OURS, {"as it is": citation}),
    *invariant(CITATIONS, MORE, {
        "`InvariantSynthesizer`": lambda c: citation(c, response_synthesizer=InvariantSynthesizer(c.llm)),
    }),
    *warns(CITATIONS, WITH_OURS, {"`SegmentMarkerPostprocessor`": partial(citation, **MARKED)}),
    *warns("`LLMRerank`", "choose by a model that scores each node by itself, or let the answer read all", {
        "the node that the LLM chooses by its number": asks.reranked,
    }),
    *invariant("query engines around others", GLOBAL, {
        "`RouterQueryEngine` to two engines": asks.routed,
        "`SubQuestionQueryEngine`": asks.sub_questions,
        "`SubQuestionQueryEngine`, `use_async=False`": partial(asks.sub_questions, use_async=False),
        "`TransformQueryEngine` with HyDE": lambda c: TransformQueryEngine(
            engine_of(c.nodes), HyDEQueryTransform(c.llm)
        ).query(c.question),
        "`MultiStepQueryEngine`": lambda c: MultiStepQueryEngine(
            engine_of(c.nodes), StepDecomposeQueryTransform(llm=c.llm), index_summary="Boats.", num_steps=2
        ).query(c.question),
    }),
    *invariant("retrievers and other indices", GLOBAL, {
        "`QueryFusionRetriever` with written queries": lambda c: engine_of([]).with_retriever(QueryFusionRetriever(
            [ListRetriever(c.nodes)], HashingLLM(says="When?"), use_async=False, similarity_top_k=9
        )).query(c.question),
        "`SummaryIndex`": lambda c: SummaryIndex([one.node for one in c.nodes]).as_query_engine().query(c.question),
    }),
    *invariant("postprocessors", GLOBAL, {
        "sentence windows by `MetadataReplacementPostProcessor`": asks.windows,
        "`LongContextReorder`": partial(query, node_postprocessors=[LongContextReorder()]),
        "`SourceJoiner` of this package": asks.chunks,
    }),
    *invariant("postprocessors with `SegmentMarkerPostprocessor`", MORE, {
        "behind sentence windows": lambda c: asks.windows(c, asks.MARKER),
        "behind `SourceJoiner`": lambda c: asks.chunks(c, asks.MARKER),
    }),
    *invariant("evaluators", GLOBAL, {
        f"`{name}` with nodes as `contexts`": lambda c, name=name: str(getattr(evaluation, name)(llm=c.llm).evaluate(
            query=c.question, response="At noon.", contexts=[each.text for each in c.nodes]
        ).feedback)
        for name in ("FaithfulnessEvaluator", "RelevancyEvaluator", "ContextRelevancyEvaluator")
    }),
    *invariant("two answers", MORE, {
        "`InvariantPairwiseEvaluator`": lambda c: asks.better(c, InvariantPairwiseEvaluator(c.llm))[0],
        "`PairwiseComparisonEvaluator`, which asks in both orders": lambda c: asks.better(
            c, evaluation.PairwiseComparisonEvaluator(c.llm, parser_function=asks.verdict)
        )[0],
    }),
    *warns("two answers", "`InvariantPairwiseEvaluator(llm)`, or `enforce_consensus=True`", {
        "`PairwiseComparisonEvaluator(enforce_consensus=False)`": lambda c: str(asks.better(
            c, evaluation.PairwiseComparisonEvaluator(c.llm, parser_function=asks.verdict, enforce_consensus=False)
        )),
    }),
    *both("nodes in `llm.complete(...)`", asks.in_one_span, COMPLETED, set(), *TRACED),
    *both("nodes in other calls", asks.in_one_span, PROMPTS, {"`PromptTemplate`", "`ChatPromptTemplate`"}, *TRACED),
    *both("nodes in a tool's message", asks.in_one_span, TOLD, {*FORMATS} - COUNTED - {JSON}, *TRACED),
    *both("nodes in `llm.complete(...)`, marked", asks.marked, COMPLETED, {*FORMATS} - COUNTED - {TAGGED}, *BY_MARKS),
    *both("nodes in other calls, marked", asks.marked, PROMPTS, {*PROMPTS} - NUMBERING, *BY_MARKS),
    *invariant("`llm.chat`", MORE, {
        "`SegmentBlock`s": partial(blocks, make=SegmentBlock.of),
        "`CitableBlock`s": partial(blocks, make=lambda text: CitableBlock(
            title="", source="harbour", content=[TextBlock(text=text)]
        )),
        "`DocumentBlock`s of plain text": partial(blocks, make=lambda text: DocumentBlock(
            data=text.encode(), document_mimetype="text/plain", title=""
        )),
        "`SegmentBlock`s with `---` between them": partial(blocks, make=SegmentBlock.of, between="\n---\n"),
    }),
    *both("nodes of `retriever.retrieve(...)`, in a call of its own", lambda c, ask: ask(asks.retrieve(c)), {
        "`llm.complete`, joined": asks.completing,
        "`llm.chat`, joined": PROMPTS['`llm.chat`, joined with `"\\n\\n"`'],
        "`llm.predict`": asks.predicting,
        "`as_structured_llm`, bullets": PROMPTS["`as_structured_llm`, bullets"],
    }, set(), *TRACED),
    *invariant("`index.as_chat_engine(chat_mode=...)`", GLOBAL, {
        **{f'`"{mode}"`': partial(chat, mode=mode) for mode in ("best", "context", "condense_question", CONDENSE)},
        '`"context"`, `stream_chat`': partial(chat, mode="context", way="stream_chat"),
        '`"context"`, `achat`': partial(chat, mode="context", way="achat"),
        '`"condense_plus_context"`, `stream_chat`': partial(chat, mode=CONDENSE, way="stream_chat"),
        '`"simple"`, which reads no node': partial(chat, mode="simple"),
    }),
    *invariant(CHATS, MORE, {
        **{
            f"`InvariantChatEngine`, `{way}`": partial(built, kind=InvariantChatEngine, way=way, system_prompt="Short.")
            for way in ("chat", "stream_chat", "achat", "astream_chat")
        },
        **{
            f"`{kind.__name__}` with `SegmentMarkerPostprocessor`": partial(built, kind=kind, **MARKED)
            for kind in (ContextChatEngine, CondensePlusContextChatEngine)
        },
    }),
    *invariant("workflows", GLOBAL, {
        "the one of LlamaIndex's documentation: retrieve, synthesize": lambda c: asks.run(
            asks.Answering(), listed=c.nodes, then=partial(get_response_synthesizer().asynthesize, asks.QUERY)
        ),
    }),
    *warns("workflows", "fill in a template: `llm.apredict(template, context_str=...)`", {
        "a step that joins the nodes and calls `llm.acomplete`": lambda c: asks.run(
            asks.Answering(), listed=c.nodes, then=lambda nodes: c.llm.acomplete(asks.prompt_of(asks.JOINED(nodes)))
        ),
    }),
    *invariant("agents", GLOBAL, {
        "`FunctionAgent` with a `RetrieverTool`": asks.searching,
        "`AgentWorkflow` of a `FunctionAgent` with a `RetrieverTool`": partial(asks.searching, is_workflow=True),
        "`FunctionAgent` with a `QueryEngineTool`": asks.agent_tool,
        "a later call with the memory of a `FunctionAgent` with a `RetrieverTool`": asks.remembered,
    }),
    *warns("agents", RETRIEVER_TOOL, {"`ReActAgent` of an `InvariantLLM` with a `RetrieverTool`": asks.react}),
    *invariant("agents with the parts of this package", MORE, {
        "`FunctionAgent` with a `QueryEngineTool` over `InvariantSynthesizer`": lambda c: asks.agent_tool(
            c, response_synthesizer=InvariantSynthesizer(c.llm)
        ),
        "a later call with what a `RetrieverTool` with `SegmentMarkerPostprocessor` found": partial(
            asks.remembered, **MARKED
        ),
        "`ReActAgent` with a `RetrieverTool` and `SegmentMarkerPostprocessor`": partial(asks.react, **MARKED),
    }),
]  # fmt: skip

AROUND_OTHERS = {
    ENGINE: ["as it is", "`streaming=True`", "`aquery`"],
    WITH_MARKS: ['`"compact"`', '`"refine"`'],
    OURS: ["as it is"],
    "query engines around others": ["`SubQuestionQueryEngine`"],
    "`index.as_chat_engine(chat_mode=...)`": ['`"context"`'],
    CHATS: ["`ContextChatEngine` with `SegmentMarkerPostprocessor`"],
    CITATIONS: ["`InvariantSynthesizer`"],
    "nodes in other calls": ["`PromptTemplate`"],
    "nodes in `llm.complete(...)`": ["numbered `[1] ...`"],
    "nodes in `llm.complete(...)`, marked": ["as bullets"],
    "`llm.chat`": ["`SegmentBlock`s"],
    "evaluators": ["`FaithfulnessEvaluator` with nodes as `contexts`"],
}
"""Entries of which an LLM behind an API is asked, too."""

AROUND = [
    each.around(w) for w in ("canonical", "vote") for each in OWN if each.name in AROUND_OTHERS.get(each.topic, ())
]
ENTRIES = {entry.title: entry for entry in (*OWN, *AROUND)}
assert len(ENTRIES) == len(OWN) + len(AROUND), "two entries have one title"

README = Path(__file__).parent.parent / "README.md"
PLACE = re.compile(r"(<!-- entries: .*? -->\n).*?(<!-- end of entries -->)", re.DOTALL)


def filled(text: str) -> str:
    """Return the README with a row of its table for the entries of a topic that behave alike."""
    found: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for entry in ENTRIES.values():
        found[entry.topic, entry.expected, entry.todo].append(entry.name)
    cells = [["entry", "invariant", "what to do"], ["---"] * 3]
    cells += [[f"{topic}: {'; '.join(names)}", *others] for (topic, *others), names in found.items()]
    table = "\n".join(f"| {' | '.join(row)} |" for row in cells)
    return PLACE.sub(lambda match: f"{match[1]}\n{table}\n\n{match[2]}", text)


# --- each row holds ---

ALL_ORDERS = list(permutations(range(3)))
OF_FOUR_NODES = [tuple((start + step * i) % 4 for i in range(4)) for start in range(4) for step in (1, -1)]
ASKED_OF_FOUR = [each.title for each in OWN if each.name in ("as it is", "`InvariantChatEngine`, `chat`")]
NAMES = (
    "which reads no node",
    "`CitationQueryEngine` with the parts of this package: `InvariantSynthesizer`",
    "two answers: `InvariantPairwiseEvaluator`",
    "two answers: `PairwiseComparisonEvaluator`,",
)
UNORDERED = {title for title in ENTRIES if any(each in title for each in NAMES)}
"""Entries whose answer is one even from a plain model: they read no node, or put them in order themselves."""
OF_SEVERAL = {"two answers", "`LLMRerank`"}
"""Topics whose entries compare nodes: there is nothing to ask about one."""


def ask(entry: Entry, llm: LLM, order: tuple[int, ...]) -> tuple[str, str, bool | None, bool]:
    """Return the answer for an order of the nodes, what was read, the verdict, and whether a user is warned."""
    (text, response), messages = caught(answer, entry.ask, llm, entry.nodes(order))
    report = report_of(response)
    return text, repr(report), report.get("invariant"), bool(messages)


CASES = [*((title, ALL_ORDERS) for title in ENTRIES), *((title, OF_FOUR_NODES) for title in ASKED_OF_FOUR)]


@pytest.mark.parametrize(("title", "orders"), CASES)
def test_an_entry_is_invariant_or_warns_as_its_row_says(spoken: InvariantModel, title: str, orders: list) -> None:
    entry = ENTRIES[title]
    llm, warns = WRAPPERS[entry.wrapper](spoken), entry.expected != "yes"
    asked = [ask(entry, llm, order) for order in orders]
    answers, reports, verdicts, warned = map(set, zip(*asked, strict=True))
    assert ((len(answers) > 1), warned) == (warns, {warns}), asked
    assert warns or len(reports) == 1, "what was read is one for all orders, too"
    assert len(verdicts) == 1, asked
    assert verdicts == {not warns} or reports == {"{}"} or "reads no node" in title, "a text says nothing"
    if warns and orders is not OF_FOUR_NODES and entry.topic not in OF_SEVERAL:
        assert not ask(entry, llm, (0,))[-1], "nobody is warned about one node"


@pytest.mark.parametrize("title", ENTRIES)
def test_a_plain_model_answers_by_the_order_and_nobody_is_warned(spoken: InvariantModel, title: str) -> None:
    entry = ENTRIES[title]
    is_local = entry.wrapper == "InvariantLLM"
    llm = local_llm(spoken.with_method("sequential", ordering="given")) if is_local else HashingLLM()
    answers, orders = set[str](), iter(ALL_ORDERS)
    while len(answers) < 2 and (order := next(orders, None)):
        answer, *_, warned = ask(entry, llm, order)
        answers.add(answer)
        assert not (is_local and warned)
    assert (len(answers) > 1) == (title not in UNORDERED)


def test_every_response_mode_is_an_entry_and_the_table_in_the_readme_is_current() -> None:
    assert {*WHOLE, *ONE_BY_ONE, *NO_NODES} == {mode.value for mode in ResponseMode}
    text = README.read_text(encoding="utf-8")
    assert len(PLACE.findall(text)) == 1
    assert filled(text) == text, "run `make docs`"


if __name__ == "__main__":
    README.write_text(filled(README.read_text(encoding="utf-8")), encoding="utf-8")
