"""No finding on prompts without retrieved text; a finding on prompts that plainly hold it, without segments."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invariant_rag import Segment
from invariant_rag.prompts import KnownDocument, Turn, recognize

ORDINARY = [
    "",
    "Hello!",
    "When does the ferry to Ostra leave?",
    "Translate to French: The documents are on the table.",
    "Write a haiku about documents, sources and passages.",
    "Summarise the passage below in one sentence.\n\nThe ferry leaves at noon.",
    "1. Boil water.\n2. Add tea.\n3. Wait.\nWhat is missing?",
    "- apples\n- pears\n- plums\n\nWhich of these are red?",
    "a) red\nb) blue\nc) green\nAnswer with a letter.",
    "Q: 2+2?\nA: 4\nQ: 3+3?\nA:",
    "As shown in [1] and [2], salt is traded.\n\nReferences\n[1] A. Kolm. Salt. 2001.\n[2] I. Marn. Copper. 2003.",
    "[1] Kolm, A. Salt.\n[2] Marn, I. Copper.\n\nFormat this bibliography as BibTeX.",
    "| Name | Age |\n|---|---|\n| Ada | 36 |\n| Ivo | 41 |\nWho is older?",
    "| Document | Pages |\n|---|---|\n| 1 | 20 |\n| 2 | 31 |\nSum up the pages.",
    "name,age\nAda,36\nIvo,41\n",
    '{"documents": [{"id": 1, "text": "a"}, {"id": 2, "text": "b"}]}',
    '[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]',
    "Fix this:\n```python\ndocs = [Document(page_content='a'), Document(page_content='b')]\n```",
    "```python\nfor i, source in enumerate(sources, start=1):\n    print(f'Source {i}: {source}')\n```",
    "```html\n<video>\n  <source src='a.mp4'>\n  <source src='a.webm' type='video/webm'>\n</video>\n```",
    "```xml\n<plugin><source>17</source><target>17</target></plugin>\n```",
    "```solr\n<add><doc><id>1</id></doc><doc><id>2</id></doc></add>\n```\nAdd a third.",
    "What does `<document>` mean in XML?",
    "Explain the following context manager:\n\nclass Timer:\n\n    def __enter__(self): return self\n\nThanks a lot!",
    "Given the context that I am new to Python, what is a list?\n\nPlease keep it short.\n\nThanks for all of it!",
    "Shorten the following documents policy.\n\nStaff lock their screens.\n\nVisitors wear badges at all times.",
    "Explain the tags <doc>, <source> and </doc> to me.",
    "What is the difference between document.write() and document.append()?",
    "def f(x):\n    return x[1] + x[2]\n",
    "SELECT * FROM documents WHERE id IN (1, 2) ORDER BY source;",
    "The characters \\ueca0 and \\ueca3 are private use.",
    "Icons: \ueca0 \ueca1 \ueca2 \ueca3",
    "Is U+ECA0 the same as \\uECA0?",
    "# Title\n\n## Section 1\n\nText.\n\n## Section 2\n\nMore text.",
    "> quoted\n> text\n\nReply politely.",
    "---\ntitle: a\n---\n\nbody\n\n---\n\nmore",
    "Chapter 1: The start\nChapter 2: The end\n\nWhich is longer?",
    "Step 1: open.\nStep 2: close.\n",
    "Question 1: Why?\nQuestion 2: How?\nOption 1: a\nOption 2: b",
    "Player 1: rock\nPlayer 2: paper\nWho wins?",
    "Dear Sir,\n\nEnclosed are document 1 and document 2.\n\nYours, Ada",
    "See source 1 and source 2 in the appendix; passage 3 is missing.",
    "Line one\r\nLine two\r\n\r\nLine four",
    "渡船什么时候离开？文档在桌子上。",
    "السؤال: متى تغادر العبارة؟",
    "\U0001f600" * 50,
    "$x_1 + x_2 = \\frac{1}{2}$ where [1] holds",
    "Use the following context: you are a teacher.\n\nWrite a poem about mills.",
    "Answer the following questions about documents.\n\n1. What is a will?\n\n2. What is a deed?",
    "Context: you are a pirate. Answer in rhymes.",
    "Context:\nThe ferry leaves at noon.\n\nQuestion: when?\nAnswer:",
    "git diff\n-  Source: a\n+  Source: b\n@@ -1,2 +1,2 @@",
    "Results 2024: up 3%. Results 2023: down 1%.",
    "Result: 12\nExpected result: 13\nWhy?",
]

RETRIEVED = [
    "Document 1: The ferry leaves at noon.\nDocument 2: The mill grinds barley.\nWhen?",
    "Document [1](Title: Ferries) The ferry leaves at noon.\nDocument [2](Title: Mills) The mill grinds barley.\n",
    "Source 1:\nThe ferry leaves at noon.\n\nSource 2:\nThe mill grinds barley.\n\nQuery: when?",
    'Read: <document index="1">a ferry leaves</document>\n<document index="2">a mill grinds</document>\nWhen?',
    "<documents>\n<document>\n<source>a.txt</source>\na ferry leaves</document><document>a mill grinds</document>",
    "<doc>a ferry leaves</doc><doc>a mill grinds</doc>",
    "<context>a ferry leaves</context>\n<context>a mill grinds</context>",
    "<passage id=1>a ferry leaves</passage> <passage id=2>a mill grinds</passage>",
    "Passage 1:\nThe ferry leaves.\nPassage 2:\nThe mill grinds.\n",
    "Context 1: the ferry leaves\nContext 2: the mill grinds\n",
    "[Document 1]: the ferry leaves\n[Document 2]: the mill grinds",
    "(Source 1) the ferry leaves\n(Source 2) the mill grinds",
    "### Source 1\nthe ferry leaves\n### Source 2\nthe mill grinds\n",
    "**ignored**\n- Document 1: the ferry leaves\n- Document 2: the mill grinds",
    "Chunk 0:\nthe ferry leaves\nChunk 1:\nthe mill grinds\nChunk 2:\nthe bridge stands",
    "Snippet #1: the ferry leaves\nSnippet #2: the mill grinds",
    "Search result 1: the ferry leaves\nSearch result 2: the mill grinds",
    "Excerpt 1 - the ferry leaves\nExcerpt 2 - the mill grinds",
    "DOCUMENT 1\nthe ferry leaves\n\nDOCUMENT 2\nthe mill grinds",
    "Document 7: the ferry leaves\nnoise\nDocument 8: the mill grinds",
    "Answer from the text between backticks: ```\nDocument 1: the ferry leaves\nDocument 2: the mill grinds```",
    "Use the following context:\n\na ferry leaves at noon\n\na mill grinds\n\nQuestion: when?",
    "Use the following context:\n\nthe ferry leaves\n\nthe mill grinds\n\nthe bridge stands",
    "Use the following pieces of retrieved context to answer.\nContext: the ferry leaves\n\na mill grinds\nQuestion: ?",
    "Context information is below.\n-----\nthe ferry leaves\n\nthe mill grinds\n-----\nQuery: when?\nAnswer:",
    "Answer from this:\n<context>\nthe ferry leaves\n\nthe mill grinds\n</context>\nWhen?",
    "Source: a.txt\nContent: the ferry leaves\n\nSource: b.txt\nContent: the mill grinds\n\nWhen?",
    "<search_result url='a'>the ferry leaves</search_result><search_result url='b'>the mill grinds</search_result>",
]


def kinds(text: str, role: str = "user") -> list[str]:
    return [each.kind for each in recognize([Turn("system", ("Be brief.",)), Turn(role, (text,))]).findings]


def test_there_are_enough_prompts() -> None:
    assert len(ORDINARY) >= 40
    assert len(RETRIEVED) >= 20


@pytest.mark.parametrize("prompt", ORDINARY)
def test_an_ordinary_prompt_is_left_alone(prompt: str) -> None:
    elsewhere = [
        KnownDocument.of(Segment(f"Retrieved text number {n}, which nobody has asked about.")) for n in range(9)
    ]
    for text in (prompt, json.dumps(prompt), repr(prompt)):
        recognition = recognize([Turn("user", (text,))], (), elsewhere)
        assert recognition.findings == ()
        assert recognition.turns == (Turn("user", (text,) if text else ()),)


@pytest.mark.parametrize("prompt", RETRIEVED)
def test_retrieved_text_without_segments_is_found(prompt: str) -> None:
    assert kinds(prompt) == ["no_segments"]
    assert kinds(prompt, "system") == ["no_segments"]
    assert kinds(prompt, "assistant") == [], "what a model said is no context"


@settings(max_examples=300)
@given(st.text(max_size=60) | st.lists(st.sampled_from(ORDINARY), max_size=4, unique=True).map("\n".join))
def test_other_text_is_neither_changed_nor_a_finding(text: str) -> None:
    recognition = recognize([Turn("user", (text,))])
    assert recognition.turns == (Turn("user", (text,) if text else ()),)
    assert recognition.findings == ()
