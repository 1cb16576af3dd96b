"""Every way in which retrieved nodes reach a model, by topic; README.md says for each whether it is invariant."""

import json
from collections import namedtuple
from collections.abc import Iterator
from functools import partial

from cases import QUERY, SEARCH, ListRetriever, Recorder, engine_of, index_of, read, told_by_tool
from framework_cases import EveryBit, Writing
from llama_index.core import Settings, SummaryIndex, get_response_synthesizer, query_engine
from llama_index.core import evaluation as evaluators
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.base.llms.types import CitableBlock, DocumentBlock, TextBlock, ToolCallBlock
from llama_index.core.bridge.pydantic import Field, create_model
from llama_index.core.chat_engine import CondensePlusContextChatEngine, ContextChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import ChatMessage
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.postprocessor import LLMRerank, LongContextReorder, MetadataReplacementPostProcessor
from llama_index.core.prompts import ChatPromptTemplate, PromptTemplate, RichPromptTemplate
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import CompactAndRefine, Refine
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import MetadataMode, NodeRelationship, RelatedNodeInfo
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool, RetrieverTool, ToolMetadata
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step

from llama_index.chat_engine.invariant_rag import InvariantChatEngine
from llama_index.evaluation.invariant_rag import InvariantPairwiseEvaluator
from llama_index.llms.invariant_rag import InvariantLLM, SegmentBlock, canonical
from llama_index.postprocessor.invariant_rag import SegmentMarkerPostprocessor, SourceJoiner
from llama_index.response_synthesizers.invariant_rag import InvariantSynthesizer

MARKER = SegmentMarkerPostprocessor()
MARKED = {"node_postprocessors": [MARKER]}
LINE = TextBlock(text="\n---\n")
WHOLE = ["compact", "tree_summarize", "compact_accumulate", "simple_summarize"]
"""Response modes whose one call holds all nodes."""
ONE_BY_ONE = ["refine", "accumulate"]
IDS = [f"node of {name}" for name in ("ferry", "mill", "bridge", "bell")]  # no running number, as LlamaIndex's are none
Case = namedtuple("Case", ["llm", "nodes", "question"], defaults=[QUERY])
"""What is asked, of whom, with nodes in the order given."""


def answer(ask, llm, nodes, question=QUERY):
    """Return the text of an answer, and the response. The LLM is LlamaIndex's global one meanwhile.

    `ask` is an entry: it builds everything anew for a `Case`, and returns a query engine, or what `read` takes, or a
    generator of that.
    """
    Settings.llm = llm
    asked = ask(Case(llm, nodes, question))
    asked = asked.query(question) if isinstance(asked, query_engine.BaseQueryEngine) else asked
    replies = list(map(read, asked if isinstance(asked, Iterator) else [asked]))
    return " | ".join(text for text, _ in replies), replies[0][1]


def local_llm(lm):
    """Return an LLM in memory whose two letters depend on everything that it reads."""
    return InvariantLLM(lm, max_tokens=2, generation_kwargs={"logits_processor": [EveryBit(lm)]})


# --- engines ---

Found = create_model("Found", input=(str, Field(pattern="^[a-z]{6}$")))
"""What was found, or what a tool is asked; a random model would never end a longer text."""


def longer(llm):
    """Return the LLM with tokens enough for a small object or a call, which its grammar alone constrains."""
    return llm.model_copy(update={"max_tokens": 80, "generation_kwargs": {}})


def query(c, way="query", **options):
    return getattr(index_of(c.nodes).as_query_engine(**options), way)(c.question)


def ours(c, way="query", llm=None, streaming=False, **options):
    """Ask by an `InvariantSynthesizer`."""
    own = InvariantSynthesizer(llm or c.llm, streaming=streaming, **options)
    return query(c, way, streaming=streaming, response_synthesizer=own)


def citation(c, **options):
    return query_engine.CitationQueryEngine.from_args(index_of(c.nodes), llm=c.llm, **options)


def bare(c):
    """Leave the metadata of nodes out of what an LLM reads, so that each is one paragraph."""
    for each in c.nodes:
        each.node.excluded_llm_metadata_keys = list(each.node.metadata)
    return c


def in_small_batches(c, mode):
    """Ask where two nodes at most fit into one call."""
    synthesizer = get_response_synthesizer(response_mode=mode)
    synthesizer._prompt_helper.chunk_size_limit = 36
    return engine_of(bare(c).nodes, response_synthesizer=synthesizer)


def reranked(c):
    """Return the node that the LLM chooses by its number."""
    chooser = LLMRerank(
        llm=c.llm, top_n=1, parse_choice_select_answer_fn=lambda text, n: ([1 + sum(map(ord, text)) % n], [9.0])
    )
    return engine_of(c.nodes, llm=c.llm, node_postprocessors=[chooser]).query(c.question).source_nodes[0].text


def tool(c, name="harbour", **options):
    return QueryEngineTool.from_defaults(engine_of(c.nodes, **options), name=name, description=f"Knows the {name}.")


def routed(c):
    choice = [{"choice": number, "reason": "It fits."} for number in (1, 2)]
    selector = LLMMultiSelector.from_defaults(Recorder(says=json.dumps(choice)))
    tools = [tool(c, "harbour"), tool(c, "town")]
    return query_engine.RouterQueryEngine.from_defaults(tools, selector=selector, select_multi=True)


def sub_questions(c, **options):
    asked = [{"sub_question": word, "tool_name": "harbour"} for word in ("When?", "Where?")]
    options["question_gen"] = LLMQuestionGenerator.from_defaults(Recorder(says=json.dumps(asked)))
    return query_engine.SubQuestionQueryEngine.from_defaults([tool(c)], verbose=False, **options)


def windows(c, *then):
    """Ask over sentences, each with its window of sentences, as a `SentenceWindowNodeParser` writes them."""
    for each in c.nodes:
        each.node.metadata["window"] = f"Before it. {each.text} After it."
        each.node.excluded_llm_metadata_keys = ["window", "file_name"]
    return query(c, node_postprocessors=[MetadataReplacementPostProcessor(target_metadata_key="window"), *then])


def chunks(c, *then):
    """Ask over nodes of which two are chunks of one document that overlap."""
    for each in c.nodes:
        if each.node.node_id in IDS[:2]:
            each.node.relationships[NodeRelationship.SOURCE] = RelatedNodeInfo(node_id="atlas")
            each.node.start_char_idx = 0 if each.node.node_id == IDS[0] else len(each.text) - 10
    return query(c, node_postprocessors=[SourceJoiner(), *then])


ANSWERS = {IDS[0]: "At noon, says the harbour master.", IDS[1]: "It does not leave in winter."}


def better(c, evaluator):
    """Compare two answers that nobody retrieved, in the order of two nodes; return the better, and what was said."""
    one, other = (ANSWERS[each.node.node_id] for each in c.nodes if each.node.node_id in ANSWERS)
    result = evaluator.evaluate(query=c.question, response=one, second_response=other)
    return {1.0: one, 0.0: other}.get(result.score, "a tie"), str(result.feedback)


def pairwise(c, **options):
    """Compare them by LlamaIndex's evaluator; the verdict of a random model is its first letter."""
    verdict = lambda text: (text < "m", float(text < "m"), text)  # noqa: E731
    return better(c, evaluators.PairwiseComparisonEvaluator(c.llm, parser_function=verdict, **options))


# --- prompts that a user writes around nodes ---


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


def retrieve(c):
    """Retrieve nodes whose metadata stays out of the text."""
    return c._replace(nodes=ListRetriever(bare(c).nodes).retrieve(c.question))


@get_dispatcher(__name__).span
def in_one_span(c, ask):
    """Retrieve and ask, as one function of an application that is traced."""
    return ask(retrieve(c))


def marked(c, ask):
    found = retrieve(c)
    return ask(found._replace(nodes=MARKER.postprocess_nodes(found.nodes)))


def prompt_of(context):
    return f"Answer from these sources.\n\n{context}\n\nQuestion: {QUERY}\nAnswer:"


def completing(c, write=JOINED):
    return c.llm.complete(prompt_of(write(c.nodes)))


def predicting(c, template=PLAIN, write=JOINED):
    return str(c.llm.predict(template, context_str=write(c.nodes), query_str=c.question))


def told(c, write):
    """Ask about the content of a tool's message."""
    call = ChatMessage(role="assistant", blocks=[ToolCallBlock(tool_call_id="1", tool_name="search", tool_kwargs={})])
    return c.llm.chat([ChatMessage(c.question), call, told_by_tool(write(c.nodes))])


def blocks(c, make, between=()):
    """Ask with one message: a block for each node, and the question."""
    found = [block for text in contents(retrieve(c).nodes) for block in (make(text), *between)]
    return c.llm.chat([ChatMessage(blocks=[*found, TextBlock(text=c.question)])])


# --- chats, workflows and agents ---


def chat(c, kind=None, way="chat", **options):
    """Say two things to a chat engine of a kind, or else to one of the index."""
    if kind is None:
        engine = index_of(c.nodes).as_chat_engine(**options)
    else:
        engine = kind.from_defaults(ListRetriever(c.nodes), llm=c.llm, **options)
    return (getattr(engine, way)(said) for said in (c.question, "And then?"))


class Retrieved(Event):
    """What the first step of a workflow found, in `nodes`."""


class Answering(Workflow):
    """Retrieves in one step, and in the next does as it is told."""

    @step
    async def retrieve(self, ev: StartEvent) -> Retrieved:
        return Retrieved(nodes=await ListRetriever(ev.get("listed")).aretrieve(QUERY), then=ev.get("then"))

    @step
    async def answer(self, ev: Retrieved) -> StopEvent:
        return StopEvent(result=str(await ev.then(ev.nodes)))


async def run(runs, *args, **kwargs):
    """Run a workflow or an agent, in an event loop."""
    return str(await runs.run(*args, **kwargs))


def agent(c, kind, llm=None, memory=None, **options):
    """Let an agent search; its own model reads what was found."""
    search = RetrieverTool.from_defaults(ListRetriever(c.nodes), name="harbour", description="Knows boats.", **options)
    made = kind(tools=[search], llm=llm or c.llm, streaming=False)
    if kind is ReActAgent:
        made.formatter.system_header = "Tools:\n{tool_desc}\n{tool_names}\nAction Input:"
    return run(made, c.question, memory=memory)


def react(c, **options):
    """Let a ReAct agent search, whose own model has learnt one thing: to search before it answers."""
    search = Writing(c.llm.lm, lambda prompt: "" if "Observation:" in prompt else SEARCH)
    processors = [*c.llm.generation_kwargs["logits_processor"], search]
    update = {"max_tokens": len(SEARCH) + 2, "generation_kwargs": {"logits_processor": processors}}
    return agent(c, ReActAgent, c.llm.model_copy(update=update), **options)


def searching(c, *, is_workflow=False):
    """Let an agent search, whose own model writes the call; what it says then is up to the model."""
    about = ToolMetadata("Finds records of the harbour.", name="harbour", fn_schema=Found)
    made = FunctionAgent(
        name="one", description="It searches.", initial_tool_choice="harbour", llm=longer(c.llm),
        tools=[RetrieverTool(ListRetriever(c.nodes), about)], streaming=not is_workflow,
    )  # fmt: skip
    return run(AgentWorkflow(agents=[made], root_agent="one") if is_workflow else made, c.question)


def agent_tool(c, **options):
    """Let an agent ask a query engine; the answer is what its tool said."""
    made = FunctionAgent(tools=[tool(c, **options)], llm=Recorder(says=str), streaming=False)
    return run(made, c.question)


def remembered(c, **options):
    """Let an agent search, and ask about its memory in a call of its own."""
    memory = ChatMemoryBuffer.from_defaults()
    read(agent(c, FunctionAgent, canonical(Recorder(says=str)), memory, **options))
    return c.llm.chat([*memory.get_all()[:-1], ChatMessage("And then?")])


# --- the table: topics, and in each of them entries as a user would write them ---


def by_mode(modes=(*WHOLE, *ONE_BY_ONE), **options):
    return {f'`"{mode}"`': partial(query, response_mode=mode, **options) for mode in modes}


def around(how, ways):
    return {name: partial(how, ask=ask) for name, ask in ways.items()}


NUMBERS = "a `text_qa_template` that numbers the nodes"
CONDENSE = "condense_plus_context"
COMPLETED = {name: partial(completing, write=write) for name, write in FORMATS.items()}
PROMPTS = {
    '`llm.chat`, joined with `"\\n\\n"`': lambda c: c.llm.chat([ChatMessage(prompt_of(JOINED(c.nodes)))]),
    "`RichPromptTemplate` with a Jinja loop": partial(predicting, template=JINJA, write=contents),
    "`PromptTemplate`": predicting,
    "`PromptTemplate` with a function that numbers": partial(predicting, template=NUMBERED),
    "`ChatPromptTemplate`": partial(predicting, template=CHAT_TEMPLATE),
    "`structured_predict`, numbered": lambda c: str(longer(c.llm).structured_predict(
        Found, PLAIN, context_str=FORMATS["numbered `[1] ...`"](c.nodes), query_str=c.question
    )),
    "`as_structured_llm`, bullets": lambda c: longer(c.llm).as_structured_llm(Found).complete(
        prompt_of(FORMATS["as bullets"](c.nodes))
    ),
}  # fmt: skip
ENTRIES = {
    "`index.as_query_engine(...)`": {
        "as it is": query,
        "`aquery`": partial(query, way="aquery"),
        "`streaming=True`": partial(query, streaming=True),
        "`streaming=True`, `aquery`": partial(query, way="aquery", streaming=True),
        "`text_qa_template=`": partial(query, text_qa_template=PLAIN),
        "`output_cls=`": lambda c: query(c, llm=longer(c.llm), output_cls=Found),
        "`as_structured_llm`": lambda c: query(c, llm=longer(c.llm).as_structured_llm(Found)),
        '`"generation"`, which reads no node': partial(query, response_mode="generation"),
        "`multimodal=True`": partial(query, multimodal=True),
        NUMBERS: lambda c: query(bare(c), text_qa_template=NUMBERED),
    },
    "`index.as_query_engine(response_mode=...)`": {
        **by_mode(),
        '`"tree_summarize"`, several batches': partial(in_small_batches, mode="tree_summarize"),
        '`"compact"`, several batches': partial(in_small_batches, mode="compact"),
    },
    "`SegmentMarkerPostprocessor`, `response_mode=...`": {
        **by_mode(**MARKED),
        NUMBERS: lambda c: query(bare(c), text_qa_template=NUMBERED, **MARKED),
    },
    "`response_synthesizer=InvariantSynthesizer(llm, ...)`": {
        "as it is": ours,
        "`aquery`": partial(ours, way="aquery"),
        "`streaming=True`": partial(ours, streaming=True),
        "`output_cls=`": lambda c: ours(c, llm=longer(c.llm), output_cls=Found),
        NUMBERS: lambda c: ours(bare(c), text_qa_template=NUMBERED),
    },
    "a response synthesizer by hand": {
        "`get_response_synthesizer().synthesize(query, nodes)`": lambda c: get_response_synthesizer().synthesize(
            c.question, c.nodes
        ),
        "`CompactAndRefine().get_response(query, texts)`": lambda c: CompactAndRefine().get_response(
            c.question, contents(c.nodes)
        ),
        "`Refine().get_response(query, texts)`": lambda c: Refine().get_response(c.question, contents(c.nodes)),
    },
    "`CitationQueryEngine`": {
        "as it is": citation,
        "with `InvariantSynthesizer`": lambda c: citation(c, response_synthesizer=InvariantSynthesizer(c.llm)),
        "with `SegmentMarkerPostprocessor`": partial(citation, **MARKED),
    },
    "query engines around others, retrievers and other indices": {
        "`RouterQueryEngine` to two engines": routed,
        "`SubQuestionQueryEngine`": sub_questions,
        "`SubQuestionQueryEngine`, `use_async=False`": partial(sub_questions, use_async=False),
        "`TransformQueryEngine` with HyDE": lambda c: query_engine.TransformQueryEngine(
            engine_of(c.nodes), HyDEQueryTransform(c.llm)
        ),
        "`MultiStepQueryEngine`": lambda c: query_engine.MultiStepQueryEngine(
            engine_of(c.nodes), StepDecomposeQueryTransform(llm=c.llm), index_summary="Boats.", num_steps=2
        ),
        "`QueryFusionRetriever` with written queries": lambda c: engine_of([]).with_retriever(QueryFusionRetriever(
            [ListRetriever(c.nodes)], Recorder(says="When?"), use_async=False, similarity_top_k=9
        )),
        "`SummaryIndex`": lambda c: SummaryIndex([one.node for one in c.nodes]).as_query_engine(),
    },
    "postprocessors": {
        "sentence windows by `MetadataReplacementPostProcessor`": windows,
        "`SegmentMarkerPostprocessor` behind sentence windows": lambda c: windows(c, MARKER),
        "`LongContextReorder`": partial(query, node_postprocessors=[LongContextReorder()]),
        "`LLMRerank`, the node that the LLM chooses by its number": reranked,
        "`SourceJoiner` of this package": chunks,
        "`SegmentMarkerPostprocessor` behind `SourceJoiner`": lambda c: chunks(c, MARKER),
    },
    "evaluators": {
        f"`{name}` with nodes as `contexts`": lambda c, name=name: str(getattr(evaluators, name)(llm=c.llm).evaluate(
            query=c.question, response="At noon.", contexts=[each.text for each in c.nodes]
        ).feedback)
        for name in ("FaithfulnessEvaluator", "RelevancyEvaluator", "ContextRelevancyEvaluator")
    },
    "two answers": {
        "`InvariantPairwiseEvaluator`": lambda c: better(c, InvariantPairwiseEvaluator(c.llm))[0],
        "`PairwiseComparisonEvaluator`, which asks in both orders": lambda c: pairwise(c)[0],
        "`PairwiseComparisonEvaluator(enforce_consensus=False)`": lambda c: str(pairwise(c, enforce_consensus=False)),
    },
    "nodes in `llm.complete(...)`": around(in_one_span, COMPLETED),
    "nodes in other calls": around(in_one_span, PROMPTS),
    "nodes in a tool's message": around(
        in_one_span, {name: partial(told, write=write) for name, write in FORMATS.items()}
    ),
    "nodes in `llm.complete(...)`, marked": around(marked, COMPLETED),
    "nodes in other calls, marked": around(marked, PROMPTS),
    "`llm.chat`": {
        "`SegmentBlock`s": partial(blocks, make=SegmentBlock.of),
        "`CitableBlock`s": partial(blocks, make=lambda text: CitableBlock(
            title="", source="harbour", content=[TextBlock(text=text)]
        )),
        "`DocumentBlock`s of plain text": partial(blocks, make=lambda text: DocumentBlock(
            data=text.encode(), document_mimetype="text/plain", title=""
        )),
        "`SegmentBlock`s with `---` between them": partial(blocks, make=SegmentBlock.of, between=[LINE]),
    },
    "nodes of `retriever.retrieve(...)`, in a call of its own": around(
        lambda c, ask: ask(retrieve(c)), {"`llm.complete`, joined": completing, **PROMPTS}
    ),
    "`index.as_chat_engine(chat_mode=...)`": {
        **{f'`"{mode}"`': partial(chat, chat_mode=mode) for mode in ("best", "context", "condense_question", CONDENSE)},
        '`"context"`, `stream_chat`': partial(chat, chat_mode="context", way="stream_chat"),
        '`"context"`, `achat`': partial(chat, chat_mode="context", way="achat"),
        '`"condense_plus_context"`, `stream_chat`': partial(chat, chat_mode=CONDENSE, way="stream_chat"),
        '`"simple"`, which reads no node': partial(chat, chat_mode="simple"),
    },
    "chat engines with the parts of this package": {
        **{
            f"`InvariantChatEngine`, `{way}`": partial(chat, kind=InvariantChatEngine, way=way, system_prompt="Short.")
            for way in ("chat", "stream_chat", "achat", "astream_chat")
        },
        **{
            f"`{kind.__name__}` with `SegmentMarkerPostprocessor`": partial(chat, kind=kind, **MARKED)
            for kind in (ContextChatEngine, CondensePlusContextChatEngine)
        },
    },
    "workflows and agents": {
        "the one of LlamaIndex's documentation: retrieve, synthesize": lambda c: run(
            Answering(), listed=c.nodes, then=partial(get_response_synthesizer().asynthesize, QUERY)
        ),
        "a step that joins the nodes and calls `llm.acomplete`": lambda c: run(
            Answering(), listed=c.nodes, then=lambda nodes: c.llm.acomplete(prompt_of(JOINED(nodes)))
        ),
        "`FunctionAgent` with a `RetrieverTool`": searching,
        "`AgentWorkflow` of a `FunctionAgent` with a `RetrieverTool`": partial(searching, is_workflow=True),
        "`FunctionAgent` with a `QueryEngineTool`": agent_tool,
        "a later call with the memory of a `FunctionAgent` with a `RetrieverTool`": remembered,
        "`ReActAgent` of an `InvariantLLM` with a `RetrieverTool`": react,
        "`FunctionAgent` with a `QueryEngineTool` over `InvariantSynthesizer`": lambda c: agent_tool(
            c, response_synthesizer=InvariantSynthesizer(c.llm)
        ),
        "a later call with what a `RetrieverTool` with `SegmentMarkerPostprocessor` found": partial(
            remembered, **MARKED
        ),
        "`ReActAgent` with a `RetrieverTool` and `SegmentMarkerPostprocessor`": partial(react, **MARKED),
    },
}  # fmt: skip
