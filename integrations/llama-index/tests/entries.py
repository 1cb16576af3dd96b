"""Every way in which retrieved nodes reach a model, by topic; README.md says for each whether it is invariant."""

import json
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import faiss
from cases import QUERY, SEARCH, ListRetriever, Recorder, engine_of, index_of, read, told_by_tool
from framework_cases import EveryBit, Writing
from llama_index.core import Settings, StorageContext, SummaryIndex, VectorStoreIndex, get_response_synthesizer
from llama_index.core import evaluation as evaluators
from llama_index.core import query_engine as engines
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import CitableBlock, DocumentBlock, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import Field, create_model
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.indices.prompt_helper import PromptHelper
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import LLM, ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank, LongContextReorder, MetadataReplacementPostProcessor
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import CompactAndRefine, Refine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import MetadataMode, NodeRelationship, RelatedNodeInfo, TextNode
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index.vector_stores.faiss import FaissVectorStore
from llama_index.vector_stores.qdrant import QdrantVectorStore
from qdrant_client import QdrantClient

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

MARKER = SegmentMarkerPostprocessor()
MARKED = {"node_postprocessors": [MARKER]}
WHOLE = ["compact", "tree_summarize", "compact_accumulate", "simple_summarize"]
"""Response modes whose one call holds all nodes."""
ONE_BY_ONE = ["refine", "accumulate"]
IDS = [f"node of {name}" for name in ("ferry", "mill", "bridge", "bell")]  # no running number, as LlamaIndex's are none
ANSWERS = {IDS[0]: "At noon, says the harbour master.", IDS[1]: "It does not leave in winter."}
Found = create_model("Found", input=(str, Field(pattern="^[a-z]{6}$")))
"""What was found, or what a tool is asked; a random model would never end a longer text."""


def answer(ask, llm, nodes, question=QUERY):
    """Return the text of what an entry answers, and the response. The LLM is LlamaIndex's global one.

    For a `Case`, an entry builds everything anew: it returns a query engine, what `read` takes, or a generator of that.
    """
    Settings.llm = llm
    asked = ask(Case(llm, nodes, question))
    asked = asked.query(question) if isinstance(asked, engines.BaseQueryEngine) else asked
    replies = list(map(read, asked if isinstance(asked, Iterator) else [asked]))
    return " | ".join(text for text, _ in replies), replies[0][1]


def local_llm(lm):
    """Return an LLM in memory whose two letters depend on everything that it reads."""
    return InvariantLLM(lm, max_tokens=2, generation_kwargs={"logits_processor": [EveryBit(lm)]})


def contents(nodes):
    """Return the texts of nodes; those between marks if they have marks."""
    return [node.get_content(MetadataMode.LLM) for node in nodes]


def listing(form="{text}", between="\n\n"):
    """Return a function that writes one node after the other: its number `n`, its `text`, and what else it has."""
    return lambda nodes: between.join(
        form.format(n=n, text=text, node=node)
        for n, (text, node) in enumerate(zip(contents(nodes), nodes, strict=True), start=1)
    )


JOINED = listing()
FORMATS = {
    'joined with `"\\n\\n"`': JOINED,
    "as bullets": listing("- {text}", "\n"),
    "numbered `[1] ...`": listing("[{n}] {text}"),
    "as `Document 1:`": listing("Document {n}:\n{text}"),
    "as `<document>` with its source": listing(
        "<document>\n<source>{node.metadata[file_name]}</source>\n{text}\n</document>", "\n"
    ),
    "separated by `---`": listing(between="\n---\n"),
    "as a JSON list of texts": lambda nodes: json.dumps(contents(nodes), ensure_ascii=False),
}
JINJA = RichPromptTemplate(
    "{% for one in context_str %}<source nr={{ loop.index }}>{{ one }}</source>\n{% endfor %}\nAnswer: {{ query_str }}"
)
CHAT_TEMPLATE = ChatPromptTemplate([ChatMessage("Read: {context_str}", role="system"), ChatMessage("{query_str}")])
NUMBERED = PromptTemplate("{context_str}\n{query_str}", function_mappings={"context_str": lambda context_str, **_: (
    "\n\n".join(f"[{n}] {text}" for n, text in enumerate(context_str.split("\n\n"), start=1))
)})  # fmt: skip
PLAIN = PromptTemplate("Context: {context_str}\nQuestion: {query_str}")


def prompt_of(context):
    return f"Answer from these sources.\n\n{context}\n\nQuestion: {QUERY}\nAnswer:"


class Answering(Workflow):
    """Retrieves in one step, and in the next does as it is told."""

    @step
    async def retrieve(self, ev: StartEvent) -> Event:
        return Event(nodes=await ListRetriever(ev.get("listed")).aretrieve(QUERY), then=ev.get("then"))

    @step
    async def answer(self, ev: Event) -> StopEvent:
        return StopEvent(result=str(await ev.then(ev.nodes)))


async def run(runs, *args, **kwargs):
    """Run a workflow or an agent, in an event loop."""
    return str(await runs.run(*args, **kwargs))


class Case(NamedTuple):
    """What is asked, of whom, with nodes in the order given; and how it can be asked."""

    llm: LLM
    nodes: list
    question: str = QUERY

    @property
    def longer(self):
        """The LLM with tokens enough for a small object or a call, which its grammar alone constrains."""
        return self.llm.model_copy(update={"max_tokens": 80, "generation_kwargs": {}})

    def bare(self):
        """Leave the metadata of nodes out of what an LLM reads, so that each is one paragraph."""
        for each in self.nodes:
            each.node.excluded_llm_metadata_keys = list(each.node.metadata)
        return self

    def query(self, way="query", **options):
        return getattr(engine_of(self.nodes, **options), way)(self.question)

    def ours(self, way="query", llm=None, streaming=False, **options):
        """Ask by an `InvariantSynthesizer`."""
        own = InvariantSynthesizer(llm or self.llm, streaming=streaming, **options)
        return self.query(way, streaming=streaming, response_synthesizer=own)

    def in_small_batches(self, mode):
        """Ask where two nodes at most fit into one call."""
        small = PromptHelper(chunk_size_limit=36)
        return self.bare().query(response_synthesizer=get_response_synthesizer(response_mode=mode, prompt_helper=small))

    def citation(self, **options):
        return engines.CitationQueryEngine.from_args(index_of(self.nodes), llm=self.llm, **options)

    def stored(self, store, **options):
        """Ask an index over a vector store, to which all nodes are equally near: it lists them as they were added."""
        nodes = [TextNode(text=each.text, metadata=each.metadata) for each in self.nodes]
        context = StorageContext.from_defaults(vector_store=store)
        index = VectorStoreIndex(nodes, storage_context=context, embed_model=MockEmbedding(8))
        return index.as_query_engine(similarity_top_k=3, **options)

    def reranked(self):
        """Return the node that the LLM chooses by its number."""
        chooser = LLMRerank(
            llm=self.llm, top_n=1, parse_choice_select_answer_fn=lambda text, n: ([1 + sum(map(ord, text)) % n], [9.0])
        )
        return self.query(node_postprocessors=[chooser]).source_nodes[0].text

    def tool(self, name="harbour", **options):
        engine = engine_of(self.nodes, **options)
        return QueryEngineTool.from_defaults(engine, name=name, description=f"Knows the {name}.")

    def routed(self):
        choice = [{"choice": number, "reason": "It fits."} for number in (1, 2)]
        selector = LLMMultiSelector.from_defaults(Recorder(says=json.dumps(choice)))
        tools = [self.tool("harbour"), self.tool("town")]
        return engines.RouterQueryEngine.from_defaults(tools, selector=selector, select_multi=True)

    def sub_questions(self, **options):
        asked = [{"sub_question": word, "tool_name": "harbour"} for word in ("When?", "Where?")]
        options["question_gen"] = LLMQuestionGenerator.from_defaults(Recorder(says=json.dumps(asked)))
        return engines.SubQuestionQueryEngine.from_defaults([self.tool()], verbose=False, **options)

    def windows(self, *then):
        """Ask over sentences, each with its window of sentences, as a `SentenceWindowNodeParser` writes them."""
        for each in self.nodes:
            each.node.metadata["window"] = f"Before it. {each.text} After it."
            each.node.excluded_llm_metadata_keys = ["window", "file_name"]
        return self.query(node_postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window"), *then])

    def chunks(self, *then):
        """Ask over nodes of which two are chunks of one document that overlap."""
        for each in self.nodes:
            if each.node.node_id in IDS[:2]:
                each.node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="atlas")
                each.node.start_char_idx = 0 if each.node.node_id == IDS[0] else len(each.text) - 10
        return self.query(node_postprocessors=[SourceJoiner(), *then])

    def better(self, evaluator):
        """Compare two answers that nobody retrieved, in the order of two nodes; return the better and what was said."""
        one, other = (ANSWERS[each.node.node_id] for each in self.nodes if each.node.node_id in ANSWERS)
        result = evaluator.evaluate(query=self.question, response=one, second_response=other)
        return {1.0: one, 0.0: other}.get(result.score, "a tie"), str(result.feedback)

    def pairwise(self, **options):
        """Compare them by LlamaIndex's evaluator; the verdict of a random model is its first letter."""
        options["parser_function"] = lambda text: (text < "m", float(text < "m"), text)
        return self.better(evaluators.PairwiseComparisonEvaluator(self.llm, **options))

    def retrieve(self):
        """Retrieve nodes whose metadata stays out of the text."""
        return self._replace(nodes=ListRetriever(self.bare().nodes).retrieve(self.question))

    @get_dispatcher(__name__).span
    def in_one_span(self, ask):
        """Retrieve and ask, as one function of an application that is traced."""
        return ask(self.retrieve())

    def marked(self, ask):
        found = self.retrieve()
        return ask(found._replace(nodes=MARKER.postprocess_nodes(found.nodes)))

    def complete(self, write=JOINED):
        return self.llm.complete(prompt_of(write(self.nodes)))

    def predict(self, template=PLAIN, write=JOINED):
        return str(self.llm.predict(template, context_str=write(self.nodes), query_str=self.question))

    def told(self, write):
        """Ask about the content of a tool's message."""
        call = [ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={})]
        calling = ChatMessage(role="assistant", blocks=call)
        return self.llm.chat([ChatMessage(self.question), calling, told_by_tool(write(self.nodes))])

    def blocks(self, make, between=()):
        """Ask with one message: a block for each node, and the question."""
        found = [block for text in contents(self.retrieve().nodes) for block in (make(text), *between)]
        return self.llm.chat([ChatMessage(blocks=[*found, TextBlock(text=self.question)])])

    def chat(self, kind=None, way="chat", **options):
        """Say two things to a chat engine of a kind, or else to one of the index."""
        if kind is None:
            engine = index_of(self.nodes).as_chat_engine(**options)
        else:
            engine = kind.from_defaults(ListRetriever(self.nodes), llm=self.llm, **options)
        return (getattr(engine, way)(said) for said in (self.question, "And then?"))

    def agent(self, kind, llm=None, memory=None, **options):
        """Let an agent search; its own model reads what was found."""
        retriever = ListRetriever(self.nodes)
        search = RetrieverTool.from_defaults(retriever, name="harbour", description="Knows boats.", **options)
        made = kind(tools=[search], llm=llm or self.llm, streaming=False)
        if kind is ReActAgent:
            made.formatter.system_header = "Tools:\n{tool_desc}\n{tool_names}\nAction Input:"
        return run(made, self.question, memory=memory)

    def react(self, **options):
        """Let a ReAct agent search, whose own model has learnt one thing: to search before it answers."""
        search = Writing(self.llm.lm, lambda prompt: "" if "Observation:" in prompt else SEARCH)
        processors = [*self.llm.generation_kwargs["logits_processor"], search]
        update = {"max_tokens": len(SEARCH) + 2, "generation_kwargs": {"logits_processor": processors}}
        return self.agent(ReActAgent, self.llm.model_copy(update=update), **options)

    def searching(self, *, is_workflow=False):
        """Let an agent search, whose own model writes the call; what it says then is up to the model."""
        about = ToolMetadata("Finds records of the harbour.", name="harbour", fn_schema=Found)
        made = FunctionAgent(
            name="one", description="It searches.", initial_tool_choice="harbour", llm=self.longer,
            tools=[RetrieverTool(ListRetriever(self.nodes), about)], streaming=not is_workflow,
        )  # fmt: skip
        return run(AgentWorkflow(agents=[made], root_agent="one") if is_workflow else made, self.question)

    def agent_tool(self, **options):
        """Let an agent ask a query engine; the answer is what its tool said."""
        made = FunctionAgent(tools=[self.tool(**options)], llm=Recorder(says=str), streaming=False)
        return run(made, self.question)

    def remembered(self, **options):
        """Let an agent search, and ask about its memory in a call of its own."""
        memory = ChatMemoryBuffer.from_defaults()
        read(self.agent(FunctionAgent, canonical(Recorder(says=str)), memory, **options))
        return self.llm.chat([*memory.get_all()[:-1], ChatMessage("And then?")])


# --- the table: topics, and in each of them entries as a user would write them ---

NUMBERS = "a `text_qa_template` that numbers the nodes"
CHAT_MODES = ["best", "context", "condense_question", "condense_plus_context"]
COMPLETED = {name: partial(Case.complete, write=write) for name, write in FORMATS.items()}
PROMPTS = {
    '`llm.chat`, joined with `"\\n\\n"`': lambda c: c.llm.chat([ChatMessage(prompt_of(JOINED(c.nodes)))]),
    "`RichPromptTemplate` with a Jinja loop": lambda c: c.predict(JINJA, contents),
    "`PromptTemplate`": Case.predict,
    "`PromptTemplate` with a function that numbers": lambda c: c.predict(NUMBERED),
    "`ChatPromptTemplate`": lambda c: c.predict(CHAT_TEMPLATE),
    "`structured_predict`, numbered": lambda c: str(c.longer.structured_predict(
        Found, PLAIN, context_str=FORMATS["numbered `[1] ...`"](c.nodes), query_str=c.question
    )),
    "`as_structured_llm`, bullets":
        lambda c: c.longer.as_structured_llm(Found).complete(prompt_of(FORMATS["as bullets"](c.nodes))),
}  # fmt: skip


def by_mode(**options):
    return {f'`"{mode}"`': partial(Case.query, response_mode=mode, **options) for mode in (*WHOLE, *ONE_BY_ONE)}


def around(how, ways):
    return {name: partial(how, ask=ask) for name, ask in ways.items()}


ENTRIES = {
    "`index.as_query_engine(...)`": {
        "as it is": Case.query,
        "`aquery`": lambda c: c.query("aquery"),
        "`streaming=True`": lambda c: c.query(streaming=True),
        "`streaming=True`, `aquery`": lambda c: c.query("aquery", streaming=True),
        "`text_qa_template=`": lambda c: c.query(text_qa_template=PLAIN),
        "`output_cls=`": lambda c: c.query(llm=c.longer, output_cls=Found),
        "`as_structured_llm`": lambda c: c.query(llm=c.longer.as_structured_llm(Found)),
        '`"generation"`, which reads no node': lambda c: c.query(response_mode="generation"),
        "`multimodal=True`": lambda c: c.query(multimodal=True),
        NUMBERS: lambda c: c.bare().query(text_qa_template=NUMBERED),
    },
    "`index.as_query_engine(response_mode=...)`": {
        **by_mode(),
        '`"tree_summarize"`, several batches': lambda c: c.in_small_batches("tree_summarize"),
        '`"compact"`, several batches': lambda c: c.in_small_batches("compact"),
    },
    "`SegmentMarkerPostprocessor`, `response_mode=...`": {
        **by_mode(**MARKED),
        NUMBERS: lambda c: c.bare().query(text_qa_template=NUMBERED, **MARKED),
    },
    "`response_synthesizer=InvariantSynthesizer(llm, ...)`": {
        "as it is": Case.ours,
        "`aquery`": lambda c: c.ours("aquery"),
        "`streaming=True`": lambda c: c.ours(streaming=True),
        "`output_cls=`": lambda c: c.ours(llm=c.longer, output_cls=Found),
        NUMBERS: lambda c: c.bare().ours(text_qa_template=NUMBERED),
    },
    "a response synthesizer by hand": {
        "`get_response_synthesizer().synthesize(query, nodes)`":
            lambda c: get_response_synthesizer().synthesize(c.question, c.nodes),
        "`CompactAndRefine().get_response(query, texts)`":
            lambda c: CompactAndRefine().get_response(c.question, contents(c.nodes)),
        "`Refine().get_response(query, texts)`": lambda c: Refine().get_response(c.question, contents(c.nodes)),
    },
    "`CitationQueryEngine`": {
        "as it is": Case.citation,
        "with `InvariantSynthesizer`": lambda c: c.citation(response_synthesizer=InvariantSynthesizer(c.llm)),
        "with `SegmentMarkerPostprocessor`": lambda c: c.citation(**MARKED),
    },
    "query engines around others, retrievers and other indices": {
        "`RouterQueryEngine` to two engines": Case.routed,
        "`SubQuestionQueryEngine`": Case.sub_questions,
        "`SubQuestionQueryEngine`, `use_async=False`": lambda c: c.sub_questions(use_async=False),
        "`TransformQueryEngine` with HyDE":
            lambda c: engines.TransformQueryEngine(engine_of(c.nodes), HyDEQueryTransform(c.llm)),
        "`MultiStepQueryEngine`": lambda c: engines.MultiStepQueryEngine(
            engine_of(c.nodes), StepDecomposeQueryTransform(llm=c.llm), index_summary="Boats.", num_steps=2
        ),
        "`QueryFusionRetriever` with written queries": lambda c: engine_of([]).with_retriever(QueryFusionRetriever(
            [ListRetriever(c.nodes)], Recorder(says="When?"), use_async=False, similarity_top_k=9
        )),
        "`SummaryIndex`": lambda c: SummaryIndex([one.node for one in c.nodes]).as_query_engine(),
        "`FaissVectorStore`, with `SegmentMarkerPostprocessor`":
            lambda c: c.stored(FaissVectorStore(faiss_index=faiss.IndexFlatIP(8)), **MARKED),
        "`QdrantVectorStore`, with `InvariantSynthesizer`": lambda c: c.stored(
            QdrantVectorStore("atlas", client=QdrantClient(":memory:")), response_synthesizer=InvariantSynthesizer()
        ),
    },
    "postprocessors": {
        "sentence windows by `MetadataReplacementPostProcessor`": Case.windows,
        "`SegmentMarkerPostprocessor` behind sentence windows": lambda c: c.windows(MARKER),
        "`LongContextReorder`": lambda c: c.query(node_postprocessors=[LongContextReorder()]),
        "`LLMRerank`, the node that the LLM chooses by its number": Case.reranked,
        "`SourceJoiner` of this package": Case.chunks,
        "`SegmentMarkerPostprocessor` behind `SourceJoiner`": lambda c: c.chunks(MARKER),
    },
    "evaluators": {
        f"`{name}` with nodes as `contexts`": lambda c, name=name: str(getattr(evaluators, name)(llm=c.llm).evaluate(
            query=c.question, response="At noon.", contexts=[each.text for each in c.nodes]
        ).feedback)
        for name in ("FaithfulnessEvaluator", "RelevancyEvaluator", "ContextRelevancyEvaluator")
    },
    "two answers": {
        "`InvariantPairwiseEvaluator`": lambda c: c.better(InvariantPairwiseEvaluator(c.llm))[0],
        "`PairwiseComparisonEvaluator`, which asks in both orders": lambda c: c.pairwise()[0],
        "`PairwiseComparisonEvaluator(enforce_consensus=False)`": lambda c: str(c.pairwise(enforce_consensus=False)),
    },
    "nodes in `llm.complete(...)`": around(Case.in_one_span, COMPLETED),
    "nodes in other calls": around(Case.in_one_span, PROMPTS),
    "nodes in a tool's message":
        around(Case.in_one_span, {name: partial(Case.told, write=write) for name, write in FORMATS.items()}),
    "nodes in `llm.complete(...)`, marked": around(Case.marked, COMPLETED),
    "nodes in other calls, marked": around(Case.marked, PROMPTS),
    "`llm.chat`": {
        "`SegmentBlock`s": lambda c: c.blocks(SegmentBlock.of),
        "`CitableBlock`s":
            lambda c: c.blocks(lambda text: CitableBlock(title="", source="harbour", content=[TextBlock(text=text)])),
        "`DocumentBlock`s of plain text": lambda c: c.blocks(lambda text: DocumentBlock(
            data=text.encode(), document_mimetype="text/plain", title=""
        )),
        "`SegmentBlock`s with `---` between them": lambda c: c.blocks(SegmentBlock.of, [TextBlock(text="\n---\n")]),
    },
    "nodes of `retriever.retrieve(...)`, in a call of its own":
        around(lambda c, ask: ask(c.retrieve()), {"`llm.complete`, joined": Case.complete, **PROMPTS}),
    "`index.as_chat_engine(chat_mode=...)`": {
        **{f'`"{mode}"`': partial(Case.chat, chat_mode=mode) for mode in CHAT_MODES},
        '`"context"`, `stream_chat`': lambda c: c.chat(chat_mode="context", way="stream_chat"),
        '`"context"`, `achat`': lambda c: c.chat(chat_mode="context", way="achat"),
        '`"condense_plus_context"`, `stream_chat`': lambda c: c.chat(chat_mode=CHAT_MODES[-1], way="stream_chat"),
        '`"simple"`, which reads no node': lambda c: c.chat(chat_mode="simple"),
    },
    "chat engines with the parts of this package": {
        **{
            f"`InvariantChatEngine`, `{way}`": lambda c, way=way: c.chat(InvariantChatEngine, way, system_prompt="Hi.")
            for way in ("chat", "stream_chat", "achat", "astream_chat")
        },
        **{
            f"`{kind.__name__}` with `SegmentMarkerPostprocessor`": partial(Case.chat, kind=kind, **MARKED)
            for kind in (ContextChatEngine, CondensePlusContextChatEngine)
        },
    },
    "workflows and agents": {
        "the one of LlamaIndex's documentation: retrieve, synthesize":
            lambda c: run(Answering(), listed=c.nodes, then=partial(get_response_synthesizer().asynthesize, QUERY)),
        "a step that joins the nodes and calls `llm.acomplete`":
            lambda c: run(Answering(), listed=c.nodes, then=lambda nodes: c.llm.acomplete(prompt_of(JOINED(nodes)))),
        "`FunctionAgent` with a `RetrieverTool`": Case.searching,
        "`AgentWorkflow` of a `FunctionAgent` with a `RetrieverTool`": lambda c: c.searching(is_workflow=True),
        "`FunctionAgent` with a `QueryEngineTool`": Case.agent_tool,
        "a later call with the memory of a `FunctionAgent` with a `RetrieverTool`": Case.remembered,
        "`ReActAgent` of an `InvariantLLM` with a `RetrieverTool`": Case.react,
        "`FunctionAgent` with a `QueryEngineTool` over `InvariantSynthesizer`":
            lambda c: c.agent_tool(response_synthesizer=InvariantSynthesizer(c.llm)),
        "a later call with what a `RetrieverTool` with `SegmentMarkerPostprocessor` found":
            lambda c: c.remembered(**MARKED),
        "`ReActAgent` with a `RetrieverTool` and `SegmentMarkerPostprocessor`": lambda c: c.react(**MARKED),
    },
}  # fmt: skip
