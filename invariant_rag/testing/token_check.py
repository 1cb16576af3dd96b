"""Does any text from outside make a control token? Hostile texts, put wherever text from outside goes."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from invariant_rag.errors import InvariantRAGError
from invariant_rag.prompts import Tool, control_tokens, question_messages, render_chat, tokenize_prompt
from invariant_rag.prompts.template_probes import rendered_probes, template_words
from invariant_rag.segments import Prompt, Segment, SegmentSet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_WIDE = {code: code + 0xFEE0 for code in range(33, 127)}  # full-width letters, which NFKC makes ordinary
_HARMLESS = "x"
_BETWEEN = ("", "", " ", "\n", "a", "<", "|", "\u200b", "\u0338", "\ueca40\ueca5", "\ueca4\ueca6\ueca5", "\u2581")


@dataclass(frozen=True)
class BreakOut:
    """A text from outside that made control tokens, or that the tokenizer refused.

    Attributes:
        place: Where the text was: `segment`, `title`, `question`, `tool result`...
        text: The text.
        tokens: Names of the tokens; or the message of the error.
    """

    place: str
    text: str
    tokens: tuple[str, ...]


def hostile_texts(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[str]:
    """Return texts made of names of added tokens, of what the chat template renders, and of variants of both.

    Args:
        tokenizer: The tokenizer.
        count: How many.
        seed: Of the random choices.
    """
    state = random.Random(seed)
    names = sorted({token.content for token in tokenizer.added_tokens_decoder.values()} - {""})
    rendered = sorted({text for text in rendered_probes(tokenizer) if len(text) < 2000})
    bases = names or [_HARMLESS]
    middles = sorted({"".join(re.findall(r"\w+", name)) for name in names} - {""})
    edited = template_words(tokenizer) or [_HARMLESS]

    def fragment() -> str:
        name = state.choice(bases)
        cut = state.randrange(len(name) + 1)
        other = state.choice(bases)
        return state.choice(
            (
                name,
                name,
                name.upper(),
                name.lower(),
                name.translate(_WIDE),
                name.replace("k", "\u212a").replace("s", "\u017f"),
                name[:cut] + other + name[cut:],
                name[:cut],
                name[cut:],
                name[:cut] + state.choice(_BETWEEN) + name[cut:],
                name[:cut] + state.choice(edited) + name[cut:],
                state.choice(middles or bases),
                "".join(chr(state.choice((32, 60, 62, 91, 93, 124, 0xE9, 0x4E2D, 0x1F600))) for _ in range(3)),
            )
        )

    def text() -> str:
        if rendered and state.random() < 0.15:
            whole = state.choice(rendered)
            start = state.randrange(len(whole) + 1)
            return whole[start : start + state.randrange(200)]
        return "".join(state.choice(_BETWEEN) + fragment() for _ in range(state.randrange(1, 6)))

    return [*names, *middles, *("".join(pair) for pair in pairwise(names)), *(text() for _ in range(count))][:count]


def find_break_outs(
    tokenizer: PreTrainedTokenizerBase, texts: Iterable[str], control: Collection[int] | None = None
) -> list[BreakOut]:
    """Put each text into segments, titles and messages, and return those that made control tokens.

    A segment may hold no control token; a prompt with the text in a message has those of a prompt with a harmless one.

    Args:
        tokenizer: The tokenizer.
        texts: The texts.
        control: Ids of control tokens. None: `control_tokens(tokenizer)`.
    """
    control_ids = frozenset(control_tokens(tokenizer) if control is None else control)
    added = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    places = _places(tokenizer)

    def control_of(build: Callable[[str], Prompt], text: str) -> list[int]:
        tokens = tokenize_prompt(build(text), tokenizer)
        parts = (*tokens.texts, *(segment.token_ids for each in tokens.sets for segment in each))
        return [index for ids in parts for index in ids if index in control_ids]

    expected = {place: control_of(build, _HARMLESS) for place, build in places.items()}
    break_outs = []
    for text in texts:
        for place, build in places.items():
            try:
                ids = control_of(build, text)
            except InvariantRAGError as error:
                break_outs.append(BreakOut(place, text, (str(error),)))
                continue
            if ids != expected[place]:
                more = Counter(ids) - Counter(expected[place])
                names = [added.get(index, str(index)) for index in more.elements()]
                break_outs.append(BreakOut(place, text, tuple(names) or ("fewer than the template writes",)))
    return break_outs


def _places(tokenizer: PreTrainedTokenizerBase) -> dict[str, Callable[[str], Prompt]]:
    """Return what puts a text into a segment or a message, by the name of the place, if the template takes it."""

    def of(messages: Callable[[str], Sequence[Any]], **options: Any) -> Callable[[str], Prompt]:
        return lambda text: render_chat(messages(text), tokenizer, **options)

    question: dict[str, Any] = {"role": "user", "content": "q"}
    tool = Tool("search", "Search.")

    def called(arguments: dict[str, Any], result: str = "r") -> list[Any]:
        calls = [{"id": "abcdef123", "name": "search", "args": arguments}]
        answered = {"role": "tool", "tool_call_id": "abcdef123", "content": result}
        return [question, {"role": "assistant", "content": "", "tool_calls": calls}, answered]

    def schema(name: str) -> dict[str, Any]:
        return {"type": "object", "properties": {name: {"type": "string", "description": "d"}}}

    places: dict[str, Callable[[str], Prompt]] = {
        "segment": lambda text: Prompt("", [Segment(text)], ""),
        "title": lambda text: Prompt("", [Segment(_HARMLESS, title=text)], ""),
        "question": of(lambda text: question_messages(text, SegmentSet(["d"]))),
        "system message": of(lambda text: question_messages("q", SegmentSet(["d"]), text)),
        "earlier answer": of(lambda text: [question, {"role": "assistant", "content": f"a{text}"}, question]),
        "tool result": of(lambda text: called({"query": "q"}, text), tools=[tool]),
        "tool call": of(lambda text: called({"query": text}), tools=[tool]),
        "argument": of(lambda text: called({text: "q"})),
        "name of an author": of(lambda text: [{**question, "name": text}]),
        "parameter": lambda text: render_chat([question], tokenizer, tools=[Tool("search", "d", schema(text))]),
        "tool description": lambda text: render_chat([question], tokenizer, tools=[Tool("search", text)]),
    }
    usable = {}
    for place, build in places.items():
        with suppress(InvariantRAGError):  # the template does not take it
            build(_HARMLESS)
            usable[place] = build
    return usable
