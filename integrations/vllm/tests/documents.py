"""Documents about made-up places, as many as one asks for, and questions about them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from invariant_rag import Segment
from langchain_core.messages import HumanMessage
from langchain_invariant_rag.documents import to_block

_SYLLABLES = "bel tar mor quel ost gan lu ren va dri no sel ka tho mi".split()
_COLOURS = "red green blue orange black white yellow purple".split()
_TRADES = "rope sails bread glass wool paper bells salt".split()


def documents(count: int, seed: int) -> list[Segment]:
    """Return different documents, in random order."""
    rng = random.Random(seed)
    names = sorted({"".join(rng.choices(_SYLLABLES, k=3)).title() for _ in range(4 * count + 8)})
    rng.shuffle(names)
    templates = (
        "The flag of {0} is {1} and {2}. It was founded in {4}.",
        "The guild of {0} makes {3}. Its hall stands by the river.",
        "The {0} is {5} miles long. It rises in the hills and flows into the bay.",
    )
    return [
        Segment(
            rng.choice(templates).format(
                name, *rng.sample(_COLOURS, 2), rng.choice(_TRADES), rng.randint(1200, 1900), rng.randint(20, 300)
            ),
            title=name,
        )
        for name in names[:count]
    ]


def question(segments: list[Segment]) -> str:
    """Return a question about one of the documents."""
    return f"What colour is the flag of {min((str(each.title) for each in segments), default='Ostra')}?"


def body_of(segments: Sequence[Segment], **more: Any) -> dict[str, Any]:
    """Return a request to /v1/chat/completions."""
    listed = [{"title": each.title, "text": each.text} for each in segments]
    asked = [{"role": "user", "content": question(list(segments))}]
    return {"messages": asked, "documents": listed, "max_tokens": 16, **more}


def chat_message(segments: list[Segment], asked: str) -> HumanMessage:
    """Return the same as a message of LangChain."""
    blocks: list[Any] = [dict(to_block(each)) for each in segments]
    return HumanMessage(content=[*blocks, {"type": "text", "text": asked}])
