# ruff: noqa: RUF001
"""200 prompts without retrieved documents, on which an integration must not warn of their order.

`ORDINARY` is a tuple of conversations, each a tuple of messages with `role` and `content`. Much in them looks like a
list of sources and is none: numbered lists, bibliographies, logs, JSON, the escape of a marker character.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain, product
from typing import TypeAlias

Conversation: TypeAlias = tuple[dict[str, str], ...]

QUESTIONS = tuple(
    """
What is the capital of Mongolia?
Why is the sky blue at noon and red in the evening?
Write a haiku about a lighthouse in winter.
How many prime numbers are there below 100?
Explain recursion to a child of ten.
Which planets have rings? Answer in one line.
hi
Thanks, that was all. :-)
What's the difference between a list and a tuple in Python?
Give me three names for a bakery near a harbour.
Translate "The ferry leaves at noon" into French, Spanish and Welsh.
Convert 72 °F to Celsius, and 5'11" to centimetres.
Who wrote "Middlemarch", and when was it published?
Is 2027 a leap year? Answer yes or no.
Plan a weekend in Lisbon: 1. where to stay, 2. what to see, 3. what to eat.
What does the error "Segmentation fault (core dumped)" mean?
Draft a polite reply that declines an invitation to a wedding.
Solve 3x² - 12x + 9 = 0 and show every step.
What would happen to the tides without the moon?
Suggest a regular expression for dates such as 2024-05-17.
How do I undo the last commit in git without losing my changes?
Compare TCP and UDP in a table with three rows.
Which is heavier: a kilogram of feathers or a kilogram of iron?
Rewrite this in the passive voice: The committee approved the budget.
What is the context of the Treaty of Westphalia, and what were its sources of conflict?
Name the documents that I need for a passport application in Germany.
When should I cite a source in an essay, and when is [1] better than (Smith, 2004)?
In LaTeX, how do I write \\cite{knuth1984} so that it prints as [12, p. 7]?
Continue the series: 2, 3, 5, 8, 13, ...
Sort these words: pear, apple, fig, quince, date.
Is the following true? "All cats are mammals; some mammals swim; therefore some cats swim."
Who are you, and which data were you trained on?
What is retrieval-augmented generation, in two sentences?
How does the order of documents in a prompt influence a language model?
Explain `SELECT DISTINCT` as opposed to `GROUP BY`.
Tell me a joke about a statistician and a lighthouse keeper.
Count the letter r in strawberry.
Which came first: the chicken or the egg? Argue both sides in 50 words each.
My train leaves at 14:05 and the trip takes 1 h 48 min. When do I arrive?
Set a timer for ten minutes and remind me to take the bread out.
""".strip().splitlines()
)

CODE = (
    "def fib(n: int) -> int:\n    a, b = 0, 1\n    for _ in range(n):\n        a, b = b, a + b\n    return a",
    'documents = ["alpha", "beta"]\nfor i, document in enumerate(documents, start=1):\n    print(f"[{i}] {document}")',
    "const total = items\n  .filter((item) => item.price > 0)\n  .reduce((sum, item) => sum + item.price, 0);",
    "interface Source { id: number; url: string }\nexport const first = (all: Source[]): Source | undefined => all[0];",
    'fn main() {\n    let sum: u64 = (1..=10).map(|x| x * x).sum();\n    println!("{sum}");\n}',
    "package main\n\nfunc gcd(a, b int) int {\n\tfor b != 0 {\n\t\ta, b = b, a%b\n\t}\n\treturn a\n}",
    '#include <stdio.h>\nint main(void) {\n  char text[4] = {0};\n  gets(text);\n  return printf("%s", text);\n}',
    "public record Point(int x, int y) {\n  double norm() { return Math.sqrt(x * x + y * y); }\n}",
    "SELECT source, COUNT(*) AS n\nFROM documents\nWHERE page > 3\nGROUP BY source\nORDER BY n DESC;",
    '#!/bin/sh\nset -eu\nfor file in "$@"; do\n  printf \'%s: \' "$file"\n  wc -l < "$file"\ndone',
    "quicksort [] = []\nquicksort (p:xs) = quicksort [x | x <- xs, x < p] ++ [p] ++ quicksort [x | x <- xs, x >= p]",
    '<ul>\n{% for doc in docs %}\n  <li id="{{ loop.index }}">{{ doc.title }}</li>\n{% endfor %}\n</ul>',
)
CODE_TASKS = (
    "What does this code do?",
    "Find the bug, if there is one, and correct it.",
    "Write a unit test for this.",
)

DATA = (
    '{"name": "Ada", "languages": ["en", "fr"], "address": {"city": "London", "zip": "W1"}, "active": true}',
    '[{"id": 1, "title": "Milk", "done": false}, {"id": 2, "title": "Bread", "done": true}, {"id": 3}]',
    "version: 3\nservices:\n  web:\n    image: nginx:1.27\n    ports:\n      - 80:80\n  db:\n    image: postgres:16",
    "- name: checkout\n  uses: actions/checkout@v4\n- name: test\n  run: make test\n- name: build\n  run: make build",
    '[package]\nname = "tide"\nversion = "0.3.1"\n\n[dependencies]\nserde = { version = "1", features = ["derive"] }',
    "date,station,temperature\n2024-01-01,North,-3.5\n2024-01-02,North,-1.0\n2024-01-01,South,4.5",
    '<order id="7"><item id="1">Rope</item><item id="2">Anchor</item><note>Deliver to pier 4.</note></order>',
    '{"type": "object", "properties": {"who": {"type": "string"}, "when": {"type": "string"}}, "required": ["who"]}',
)
DATA_TASKS = ("Is this well-formed? If not, say where it breaks.", "Convert this to another common format.")

LISTS = (
    "1. Boil the water.\n2. Add the salt and the pasta.\n3. Stir, and wait nine minutes.\n4. Drain it.",
    "- buy stamps\n- call the dentist\n- water the plants\n- return the library books",
    "# Release notes\n\n## Fixed\n- A crash when the list is empty\n- The date in the footer\n\n## Added\n- Dark mode",
    "| city | country | people |\n|---|---|---|\n| Oslo | Norway | 709,000 |\n| Turku | Finland | 197,000 |",
    "(a) The tenant pays the rent monthly.\n(b) The deposit is two months' rent.\n(c) Pets need written consent.",
    "Question 1: What is osmosis?\nQuestion 2: Name the parts of a cell.\nQuestion 3: What do ribosomes do?",
    "Monday: soup\nTuesday: lentils\nWednesday: fish\nThursday: leftovers\nFriday: pizza",
    "* Pros\n  * cheap\n  * near the station\n* Cons\n  * noisy\n  * no lift\n\n---\n\n* Decision: not yet",
)
LIST_TASKS = ("Is anything missing here?", "Turn this into flowing text.", "Put this into the best order, and say why.")

LOGS = (
    (
        "2024-05-17 09:14:02 INFO  server started on :8080\n2024-05-17 09:14:09 WARN  slow query (2103 ms)\n"
        "2024-05-17 09:15:44 ERROR connection reset by peer"
    ),
    (
        'Traceback (most recent call last):\n  File "main.py", line 3, in <module>\n    print(data["source"])\n'
        "KeyError: 'source'"
    ),
    "[1/4] Resolving packages...\n[2/4] Fetching packages...\n[3/4] Linking dependencies...\n[4/4] Building...\nDone.",
    (
        '10.0.0.7 - - [17/May/2024:09:14:02 +0000] "GET /documents/1 HTTP/1.1" 200 512\n'
        '10.0.0.8 - - [17/May/2024:09:14:03 +0000] "GET /documents/2 HTTP/1.1" 404 19'
    ),
    (
        "FAILED tests/test_tide.py::test_high - assert 3 == 4\nFAILED tests/test_tide.py::test_low - ValueError\n"
        "2 failed, 31 passed in 1.40s"
    ),
)
LOG_TASKS = ("What went wrong?", "Summarise this in one sentence for somebody who does not program.")

MAILS = (
    "From: Mina\nTo: Jon\nSubject: Thursday\n\nHi Jon,\ncould we meet at four instead of three?\n\nBest,\nMina",
    "Dear Sir or Madam,\n\nI ordered two lamps (order 5531) on 3 May. One arrived broken.\n\nRegards\nT. Okafor",
    "> > Shall we take the early ferry?\n> I would rather sleep.\nThe late one, then. I have the tickets.",
    "Hello team,\n\n1) the offer is out, 2) the demo is on Monday, 3) please send me your holidays.\n\nThanks!\nRuth",
    "Subject: Re: Re: Invoice 2024-118\n\nThe source of the difference is VAT: 19 % of 240 is 45.60.\n\nKind regards",
    "Hey!! 🎉 we got the flat 🏠 moving on the 1st, can you help? 🙏 pizza is on us 🍕\n\nxx Lou",
)
MAIL_TASKS = ("Answer this e-mail politely.", "What does the writer want?", "Correct the style of this e-mail.")

CITATIONS = (
    (
        "Attention weights are not explanations [1], but some disagree [2, 3].\n\nReferences\n[1] Jain, 2019.\n"
        "[2] Wiegreffe and Pinter, 2019.\n[3] Bibal et al., 2022."
    ),
    "@book{knuth1984,\n  author = {Donald E. Knuth},\n  title = {The TeXbook},\n  year = {1984}\n}",
    (
        "Bibliography\n1. Darwin, C. (1859). On the Origin of Species. London: Murray.\n"
        "2. Wallace, A. R. (1889). Darwinism. London: Macmillan."
    ),
    "The harbour was closed in 1911.¹ It opened again after the war.²\n\n¹ Town records, p. 12.\n² Ibid., p. 40.",
    "Coffee may lower the risk of stroke.[4][5] Source: a review of 2021, according to the article.",
    '"To be, or not to be" (Hamlet 3.1.56)\n"All the world\'s a stage" (As You Like It 2.7.139)',
)
CITATION_TASKS = ("Write these references in APA style.", "Which of these claims needs a better source?")

SCRIPTS = (
    "Переведи на английский: «Паром уходит в полдень».",
    "「渡し船は正午に出ます」を英語に訳してください。",
    "请用三句话介绍长城的历史:\n一、起源;\n二、修建;\n三、现状。",
    "ما هي عاصمة المغرب؟ أجب بكلمة واحدة.",
    "מתי יוצאת המעבורת?",
    "नमस्ते! १. चाय २. कॉफ़ी ३. पानी — इनमें से कौन सा गरम नहीं है?",
    "Γράψε ένα ποίημα δύο στίχων για τη θάλασσα.",
    "👩‍🚀🚀🌕 = ? and 🐝+🌼 = ? 🤔",
)

ESCAPES = (
    r'What is the code point of "\ue200", and in which block is it?',
    r'In JSON, is {"text": "\ue200a\ue201"} the same as {"text": "a"}?',
    r"Which regular expression matches every character from \ue200 to \uf8ff?",
    "Fill in the template: Dear {name}, your {context} is about {question}.",
    "What does Document(page_content='...', metadata={}) stand for in LangChain?",
    "Why does print([1, 'two', None]) show quotes around two, but print('two') does not?",
    "What do <|im_start|> and <|im_end|> mean in a chat template?",
    "Escape this for HTML: <doc id=1>fish & chips</doc>",
)

SYSTEMS = (
    "You are a helpful assistant. Answer briefly.",
    "You are a pirate. Rules:\n1. Say arr.\n2. Never mention documents.\n3. Stay polite.",
    "Use the following format:\n\nQuestion: the question\nThought: what you think\nAnswer: the answer",
    (
        "You answer questions about our ferry. Opening hours:\n- Monday to Friday: 8 to 18\n- Saturday: 9 to 12\n"
        "If the context does not say it, say that you do not know. Cite sources as [1]."
    ),
)
SYSTEM_QUESTIONS = ("When are you open?", "Introduce yourself.", "How long is the Danube?")

EXAMPLES = (
    (("great film!", "positive"), ("what a waste of time", "negative"), ("it was fine, I suppose", "")),
    (("cat", "chat"), ("dog", "chien"), ("horse", "")),
    (("2 + 2", "4"), ("7 * 6", "42"), ("9 - 12", "")),
    (("The ferry sinks.", "Sinks the ferry?"), ("She sings.", "Does she sing?"), ("They left.", "")),
)
HISTORIES = (
    ("Hello!", "Hello, how can I help?", "Recommend a book.", "A novel, or something else?", "A novel, please."),
    (
        "Write a limerick.",
        "There was a young lady of Ryde ...",
        "Go on.",
        "... who went out with the evening tide.",
        "More!",
    ),
    ("List three rivers.", "1. Rhine\n2. Oder\n3. Loire", "Which one is the longest?"),
    ("Cite a paper.", "Vaswani et al. [1].\n\n[1] Attention Is All You Need, 2017.", "And another one?"),
    ("What is 12 squared?", "144", "And to the third power?", "1728", "Is that divisible by 9?"),
    ("Show me JSON.", '{"a": [1, 2, 3]}', "Now the same in YAML.", "a:\n- 1\n- 2\n- 3", "And in TOML?"),
    ("Is the shop open?", "Which shop do you mean?", "The bakery at the harbour."),
    ("Sing.", "La, la, la.", "Louder!", "LA, LA, LA!", "Thank you. 😀", "You are welcome.", "Bye"),
)


def user(content: str) -> Conversation:
    """Return a conversation of one message."""
    return ({"role": "user", "content": content},)


def dialogue(contents: Iterable[str]) -> Conversation:
    """Return a conversation in which user and assistant take turns."""
    return tuple(
        {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(contents)
    )


def with_material(tasks: Iterable[str], materials: Iterable[str]) -> list[Conversation]:
    """Return every task about every material."""
    return [user(f"{task}\n\n{material}") for task, material in product(tasks, materials)]


def examples_as_text(examples: Iterable[tuple[str, str]]) -> Conversation:
    """Return a few-shot prompt in one message."""
    return user("\n\n".join(f"Input: {given}\nOutput: {wanted}".strip() for given, wanted in examples))


KINDS: dict[str, list[Conversation]] = {
    "questions": [user(question) for question in QUESTIONS],
    "code": with_material(CODE_TASKS, CODE),
    "data": with_material(DATA_TASKS, DATA),
    "lists": with_material(LIST_TASKS, LISTS),
    "logs": with_material(LOG_TASKS, LOGS),
    "e-mails": with_material(MAIL_TASKS, MAILS),
    "citations": with_material(CITATION_TASKS, CITATIONS),
    "scripts": [user(text) for text in SCRIPTS],
    "escapes": [user(text) for text in ESCAPES],
    "system prompts": [
        ({"role": "system", "content": system}, *user(question))
        for system, question in product(SYSTEMS, SYSTEM_QUESTIONS)
    ],
    "examples in one message": [examples_as_text(examples) for examples in EXAMPLES],
    "examples as turns": [dialogue([*chain.from_iterable(examples)][:-1]) for examples in EXAMPLES],
    "histories": [dialogue(contents) for contents in HISTORIES],
}
"""The conversations by what they look like."""

ORDINARY: tuple[Conversation, ...] = tuple(chain.from_iterable(KINDS.values()))
"""All of them."""
