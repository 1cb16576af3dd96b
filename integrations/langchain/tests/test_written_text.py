"""What users and models write arrives byte for byte: questions, histories, answers, and arguments of tools."""

from __future__ import annotations

import json
from typing import Any

import pytest
from invariant_rag import InvariantModel
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough

from langchain_invariant_rag import ChatInvariant
from langchain_invariant_rag.documents import to_block, to_segment

from .shared import DOCUMENTS, Listed
from .tool_models import Writing

TEXTS = [each.page_content for each in DOCUMENTS]
QUESTIONS = [
    template.format(*TEXTS)
    for template in (
        "My steps: 1. {0} 2. {1} 3. {2} What was step 1?",
        "{0}\n\n{1}\n\n{2}",
        "'{0}' or '{1}' or '{2}'?",
        "Day 1: {0} Day 2: {1} Day 3: {2}",
        "docs = [Document(page_content='{0}'), Document(page_content='{1}')]",
        "[1] {0} [2] {1} [3] {2} Which is [1]?",
        "9:00 {0}\n10:00 {1}\n11:00 {2}",
        "{2} {1} {0}",
    )
]
"""Questions that name the documents that they find."""

ANSWERS = """price = row[1]; qty = row[2]
np.array([1, 2])
matrix[1][2]
\\sqrt[3]{x}
[1](https://example.org/1)
[^1]: A footnote.
He wrote "see [2]".
[2]
[1, 3]
[Doc 2]
Source 2
(2)
#2
{"source": 2}
{"documents": 2}
<cite>2</cite>
^2^
rows[1:2]
a[0], a[1] = a[1], a[0]
arr[[1, 2]]
x = [[1, 2], [3, 1]]
list[int]
Document 1 is older than document 2.
1. First
2. Second
[x] done, [ ] open
- [1] one
【1】
regex: [1-3]
[a]
"doc_ids": ["1", 2]
f(x)[2]
The page [1] of [3]
[1][2][3]
passage 3; passage 1
<source id=2>
As a result 2 ferries left.
three (3) ferries
ref. 2
$[1]$
[1] and [2] disagree: [1] is right.""".splitlines()

ARGUMENTS: list[dict[str, Any]] = [
    {"code": code}
    for code in (
        "rows[1]+rows[2]", "a[1], a[2] = a[2], a[1]", "np.array([1, 2])[0]", "print('[2]')", "x = [3, 1, 2]",
        "df.iloc[1:2]", "m[1][2]", "s.split('[1]')", "[i for i in [1, 2, 3]]", "re.sub(r'[1-3]', '', t)",
    )
] + [{"query": query} for query in ("see [1]", "Source 2", "document 3", "(1)", "#2", "[Doc 1]", "[1, 2]")] + [
    {"documents": 2}, {"source": 1}, {"citation": "2"}, {"ids": [1, 2]}, {"doc": "1"}, {"page": 3, "source": 2},
    {"refs": ["1", "3"]}, {"context": "[2]"},
]  # fmt: skip


class Seen(BaseCallbackHandler):
    def __init__(self) -> None:
        self.messages: list[Any] = []

    def on_chat_model_start(self, serialized: Any, messages: Any, **kwargs: Any) -> None:
        self.messages = messages[0]


@pytest.fixture(scope="module")
def chat(spoken: InvariantModel) -> ChatInvariant:
    end = {"eos_token_id": spoken.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    return ChatInvariant(model=spoken, max_tokens=90, generation_kwargs=end)


def asked(documents: list[Any]) -> list[Any]:
    """Return a question over documents whose places have labels."""
    slots = [{"before": [f"[{n}] "], "after": ["\n"], "number": str(n)} for n in range(1, 4)]
    blocks = [to_block(to_segment(each), 0, slot) for each, slot in zip(documents, slots, strict=True)]
    return [HumanMessage([*blocks, {"type": "text", "text": "Which?"}])]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_that_names_its_documents_reaches_the_model_as_it_is(chat: ChatInvariant, question: str) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Be brief.\n{context}"), ("human", "{question}")])
    context = Listed(documents=DOCUMENTS[::-1]) | (lambda found: "\n\n".join(each.page_content for each in found))
    seen = Seen()
    chain = {"context": context, "question": RunnablePassthrough()} | prompt | chat.bind(max_tokens=1)
    answer = chain.invoke(question, config={"callbacks": [seen]})
    assert seen.messages[1].content == question
    assert answer.response_metadata["sets"] == [3]


@pytest.mark.parametrize("text", QUESTIONS)
def test_histories_and_system_prompts_reach_the_model_as_they_are(chat: ChatInvariant, text: str) -> None:
    history = [SystemMessage(f"{text} So."), HumanMessage(f"Q: {text}"), AIMessage(text)]
    seen = Seen()
    call = {"name": "find", "args": {"query": text}, "id": "1", "type": "tool_call"}
    given = [*history, HumanMessage("And?"), AIMessage("", tool_calls=[call]), ToolMessage("none", tool_call_id="1")]
    chat.invoke(given, config={"callbacks": [seen]}, max_tokens=1, documents=DOCUMENTS)
    assert [each.content for each in seen.messages[:3]] == [each.content for each in history]
    assert seen.messages[4].tool_calls == [call]


def test_there_are_forty_answers_and_twenty_five_calls() -> None:
    assert (len(ANSWERS), len(ARGUMENTS)) == (40, 25)


@pytest.mark.parametrize("text", ANSWERS)
def test_an_answer_arrives_as_the_model_wrote_it(chat: ChatInvariant, text: str) -> None:
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        options = {"logits_processor": [Writing(chat.lm, f"{text}<|im_end|>")]}
        assert chat.invoke(asked(documents), **options).content == text
    options = {"logits_processor": [Writing(chat.lm, f"{text}<|im_end|>")]}
    assert "".join(piece.text for piece in chat.stream(asked(DOCUMENTS), **options)) == text


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=json.dumps)
def test_arguments_arrive_as_the_model_wrote_them(chat: ChatInvariant, arguments: dict[str, Any]) -> None:
    kinds = {str: "string", int: "integer"}
    fields = {
        name: {"type": kinds[type(value)]} if type(value) in kinds else {"type": "array", "items": {}}
        for name, value in arguments.items()
    }
    schema = {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
    described = {"type": "function", "function": {"name": "run", "description": "Run.", "parameters": schema}}
    bound = chat.bind_tools([described], tool_choice="run")
    written = f'<tool_call>\n{{"name": "run", "arguments": {json.dumps(arguments)}}}\n</tool_call><|im_end|>'
    for documents in (DOCUMENTS, DOCUMENTS[::-1]):
        answer = bound.invoke(asked(documents), logits_processor=[Writing(chat.lm, written)])
        assert answer.tool_calls[0]["args"] == arguments
