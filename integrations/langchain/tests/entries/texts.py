"""Entries in which the user's own function, or a template, formats the retrieved documents as one text."""

from __future__ import annotations

import json
import pprint
from collections.abc import Callable, Sequence
from operator import itemgetter
from textwrap import fill
from typing import Any

from jinja2 import Template
from langchain_core.documents import Document
from langchain_core.load import dumps
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnablePassthrough

from .base import ALL, CHAT_PROMPT, FOUR, NESTED, NOTHING, QUESTION, QUOTED, WHOLE_TEXTS, entry, joined

Documents = list[Document]
Format = Callable[[Documents], str]

FORMAT_DOCS = '`{"context": retriever | format_docs} | prompt | model`'
TEMPLATE = "documents formatted in the prompt template"


def format_each(template: str, separator: str = "\n\n", first: int = 1) -> Format:
    """Format every document with a template of its number `n`, its text and its metadata."""

    def format_docs(documents: Documents) -> str:
        fields = (
            {"n": number, "text": each.page_content, **each.metadata} for number, each in enumerate(documents, first)
        )
        return separator.join(template.format_map(each) for each in fields)

    return format_docs


def lcel(model: Any, retriever: BaseRetriever, format_docs: Any, prompt: Any = CHAT_PROMPT) -> str:
    """Ask the chain of LangChain's tutorials."""
    context = {"context": retriever | format_docs, "question": RunnablePassthrough()}
    return (context | prompt | model | StrOutputParser()).invoke(QUESTION)


UNDERSTOOD: dict[str, Format] = {
    "joined by an empty line": joined,
    "by a line break": format_each("{text}", "\n"),
    "by a space": format_each("{text}", " "),
    "by `---`": format_each("{text}", "\n---\n"),
    "bullets": format_each("- {text}", "\n"),
    "quoted": format_each("> {text}"),
    "in triple quotes": format_each('"""{text}"""'),
    '`<doc id="…">` with an id of the metadata': format_each('<doc id="{id}">{text}</doc>', "\n"),
    "`Source: …`, `Content: …`": format_each("Source: {source}\nContent: {text}"),
    "text, then `(source, page)`": format_each("{text} ({source}, p. {page})", "\n"),
    "YAML": format_each("- source: {source}\n  text: {text}", "\n"),
    "JSON lines": lambda documents: "\n".join(
        json.dumps({"source": each.metadata["source"], "text": each.page_content}) for each in documents
    ),
}
NOT_UNDERSTOOD: dict[str, Format] = {
    "numbered `[1]`": format_each("[{n}] {text}"),
    "from `[0]`": format_each("[{n}] {text}", first=0),
    "`1.`": format_each("{n}. {text}", "\n"),
    "`Document 1:`": format_each("Document {n}: {text}", "\n"),
    "`Document 1 of 3`": format_each("Document {n} of 3\n{text}"),
    "`<doc id=1>`": format_each("<doc id={n}>{text}</doc>", "\n"),
    "XML with index and source": format_each(
        '<document index="{n}">\n<source>{source}</source>\n<content>\n{text}\n</content>\n</document>', "\n"
    ),
    "headings with number and source": format_each("### Document {n} ({source})\n{text}"),
    "rows of a Markdown table": format_each("| {n} | {text} | {source} |", "\n"),
    "JSON list of texts": lambda documents: json.dumps([each.page_content for each in documents]),
    "indented JSON list": lambda documents: json.dumps([each.page_content for each in documents], indent=2),
    "JSON with metadata": lambda documents: json.dumps(
        [{"page_content": each.page_content, "metadata": each.metadata} for each in documents]
    ),
    "`dumps` of LangChain": dumps,
    "`repr` of texts": lambda documents: repr([each.page_content for each in documents]),
    "`repr` of dicts": lambda documents: str([each.model_dump() for each in documents]),
    "`pprint`": pprint.pformat,
    "a Jinja loop": lambda documents: Template(
        "{% for doc in docs %}[{{ loop.index }}] {{ doc.page_content }}\n{% endfor %}"
    ).render(docs=documents),
    "lettered": lambda documents: "\n".join(f"{chr(65 + n)}) {each.page_content}" for n, each in enumerate(documents)),
    "`First:`, `Second:`": lambda documents: "\n".join(
        f"{word}: {each.page_content}" for word, each in zip(["First", "Second", "Third"], documents, strict=True)
    ),
    "the first one in another way": lambda documents: "\n".join(
        ("Best match: " if n == 0 else "See also: ") + each.page_content for n, each in enumerate(documents)
    ),
    "cut to 20 characters": lambda documents: "\n\n".join(each.page_content[:20] for each in documents),
    "upper case": lambda documents: joined(documents).upper(),
    "wrapped anew": lambda documents: "\n\n".join(fill(each.page_content, 16) for each in documents),
    "the first two only": lambda documents: joined(documents[:2]),
}


def add_formats(formats: dict[str, Format], *, todo: str, warns: bool, models: Sequence[str]) -> None:
    """Register one entry for each way of writing `format_docs`."""
    for variant, format_docs in formats.items():
        entry(FORMAT_DOCS, variant, todo=todo, warns=warns, models=models)(
            lambda model, retriever, format_docs=format_docs: lcel(model, retriever, format_docs)
        )


add_formats(UNDERSTOOD, todo=NOTHING, warns=False, models=ALL)


@entry(FORMAT_DOCS, "four documents", todo=WHOLE_TEXTS, warns=True, models=ALL, documents=FOUR)
def four_documents(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, retriever, format_each("[{n}] {source}: {text}"))


@entry(FORMAT_DOCS, "one document within another", todo=WHOLE_TEXTS, warns=True, models=ALL, documents=NESTED)
def nested_documents(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, retriever, joined)


@entry(FORMAT_DOCS, "documents of several lines", todo=WHOLE_TEXTS, warns=True, models=ALL, documents=QUOTED)
def documents_of_several_lines(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, retriever, format_each("{n}. {text}"))


@entry(FORMAT_DOCS, "context in the system message", todo=NOTHING, models=ALL)
def context_in_the_system_message(model: Any, retriever: BaseRetriever) -> str:
    prompt = ChatPromptTemplate.from_messages([("system", "Answer from this:\n\n{context}"), ("human", "{question}")])
    return lcel(model, retriever, joined, prompt)


@entry(FORMAT_DOCS, "question first", todo=WHOLE_TEXTS, warns=True, models=ALL)
def question_first(model: Any, retriever: BaseRetriever) -> str:
    prompt = ChatPromptTemplate.from_template("{question}\nAnswer from this only: {context}")
    return lcel(model, retriever, format_each("[{n}] {text}", "\n"), prompt)


@entry(FORMAT_DOCS, "context twice", todo=WHOLE_TEXTS, warns=True, models=ALL)
def context_twice(model: Any, retriever: BaseRetriever) -> str:
    prompt = ChatPromptTemplate.from_template("{context}\n\n{question}\nRead it again:\n\n{context}\n\n{question}")
    return lcel(model, retriever, joined, prompt)


@entry(FORMAT_DOCS, "a prompt template for completion models", todo=NOTHING, models=ALL)
def completion_prompt(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, retriever, joined, PromptTemplate.from_template("{context}\n\nQ: {question}\nA:"))


add_formats(NOT_UNDERSTOOD, todo=WHOLE_TEXTS, warns=True, models=ALL)


@entry(
    FORMAT_DOCS, "JSON that escapes line breaks and quotes", todo=WHOLE_TEXTS, warns=True, models=ALL, documents=QUOTED
)
def escaping_json(model: Any, retriever: BaseRetriever) -> str:
    return lcel(model, retriever, lambda documents: json.dumps([each.page_content for each in documents]))


@entry(TEMPLATE, "the list in `{context}`", todo=WHOLE_TEXTS, warns=True, models=ALL)
def plain_list(model: Any, retriever: BaseRetriever) -> str:
    context = {"context": retriever, "question": RunnablePassthrough()}
    return (context | CHAT_PROMPT | model | StrOutputParser()).invoke(QUESTION)


@entry(
    TEMPLATE,
    "the list, of documents with quotes and line breaks",
    todo=WHOLE_TEXTS,
    warns=True,
    models=ALL,
    documents=QUOTED,
)
def plain_list_of_quotes(model: Any, retriever: BaseRetriever) -> str:
    return plain_list(model, retriever)


@entry(TEMPLATE, "a Jinja loop", todo=WHOLE_TEXTS, warns=True, models=ALL)
def jinja_loop(model: Any, retriever: BaseRetriever) -> str:
    template = "{% for text in context %}[{{ loop.index }}] {{ text }}\n{% endfor %}\n{{ question }}"
    prompt = ChatPromptTemplate.from_messages([("human", template)], template_format="jinja2")
    return lcel(model, retriever, lambda documents: [each.page_content for each in documents], prompt)


@entry(TEMPLATE, "a mustache section", todo=WHOLE_TEXTS, warns=True, models=ALL)
def mustache_section(model: Any, retriever: BaseRetriever) -> str:
    template = "{{#context}}\n- {{{page_content}}}\n{{/context}}\n{{{question}}}"
    prompt = ChatPromptTemplate.from_messages([("human", template)], template_format="mustache")
    return lcel(model, retriever, lambda documents: [each.model_dump() for each in documents], prompt)


@entry(TEMPLATE, "an f-string with one variable per document", todo=WHOLE_TEXTS, warns=True, models=ALL)
def variable_per_document(model: Any, retriever: BaseRetriever) -> str:
    prompt = ChatPromptTemplate.from_template("Document 1: {a}\nDocument 2: {b}\nDocument 3: {c}\n{question}")
    texts = {name: retriever | (lambda documents, n=n: documents[n].page_content) for n, name in enumerate("abc")}
    return ({**texts, "question": RunnablePassthrough()} | prompt | model | StrOutputParser()).invoke(QUESTION)


@entry(TEMPLATE, "two retrievers, two places", todo=NOTHING, models=ALL)
def two_places(model: Any, retriever: BaseRetriever) -> str:
    other = retriever.model_copy(update={"documents": [Document("Bread costs two crowns."), Document("It rains.")]})
    prompt = ChatPromptTemplate.from_template("Facts:\n{facts}\n\nNews:\n{news}\n\n{question}")
    inputs = {
        "facts": itemgetter("question") | retriever | format_each("- {text}", "\n"),
        "news": itemgetter("question") | other | format_each("- {text}", "\n"),
        "question": itemgetter("question"),
    }
    return (inputs | prompt | model | StrOutputParser()).invoke({"question": QUESTION})
