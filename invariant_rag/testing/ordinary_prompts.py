"""200 prompts without retrieved documents, on which an integration must not warn of their order.

Much in them looks like a list of sources and is none: numbered lists, bibliographies, logs, JSON, the escape of a
marker character. `ordinary_prompts.json` holds their texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain, product
from pathlib import Path
from typing import TypeAlias

Conversation: TypeAlias = tuple[dict[str, str], ...]

_TEXTS = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def dialogue(contents: Iterable[str]) -> Conversation:
    """Return a conversation in which user and assistant take turns."""
    return tuple(
        {"role": "assistant" if index % 2 else "user", "content": content} for index, content in enumerate(contents)
    )


KINDS: dict[str, list[Conversation]] = {
    **{kind: [dialogue([text]) for text in texts] for kind, texts in _TEXTS["single"].items()},
    **{
        kind: [dialogue([f"{task}\n\n{text}"]) for task, text in product(each["tasks"], each["texts"])]
        for kind, each in _TEXTS["tasks about a text"].items()
    },
    **{kind: [dialogue(contents) for contents in each] for kind, each in _TEXTS["dialogues"].items()},
    "system prompts": [
        ({"role": "system", "content": system}, *dialogue([question]))
        for system, question in product(_TEXTS["system prompts"]["prompts"], _TEXTS["system prompts"]["questions"])
    ],
}
"""The conversations by what they look like."""

ORDINARY: tuple[Conversation, ...] = tuple(chain.from_iterable(KINDS.values()))
"""All of them, each a tuple of messages with `role` and `content`."""
