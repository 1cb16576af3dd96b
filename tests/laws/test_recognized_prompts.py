"""Prompts whose slots were recognised: no order of the documents changes a bit of the answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import permutations

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import Generation, InvariantModel, KeyValueCache, Prompt, Segment, SegmentSet
from invariant_rag.methods import METHODS
from invariant_rag.prompts import Retrieval, Turn, recognize, render_chat

DOCUMENTS = [
    Segment("The ferry leaves at noon.", metadata={"source": "f.txt", "year": 2021}),
    Segment("The mill grinds barley: 40 sacks.", metadata={"source": "mill.txt", "year": 2019}),
    Segment("yes", metadata={"source": "y.txt", "year": 2024}),
]
TEMPLATES: dict[str, Callable[[Segment], str]] = {
    "joined": lambda each: each.text,
    "tagged": lambda each: f"<doc>{each.text}</doc>",
    "with sources": lambda each: f"Source: {each.metadata['source']}\nContent: {each.text}",
    "with years": lambda each: f"{each.metadata['year']}: {each.text}",
}
PAIRS = [(method, list(TEMPLATES)[number % 4]) for number, method in enumerate(METHODS)]


def prompt_of(template: str, listed: Iterable[Segment]) -> Prompt:
    """The prompt as a framework passes it: as text, with the variable that it was filled in with."""
    listed = tuple(listed)
    slot = "\n\n".join(map(TEMPLATES[template], listed))
    found = recognize([Turn("user", (f"Read:\n{slot}\nWhich?",))], [Retrieval(listed, "Which?")], [slot])
    assert not found.findings
    return Prompt.of(*found.turns[0].parts)


def bits(generation: Generation) -> tuple[object, ...]:
    return generation.token_ids, generation.logprobs, generation.usage.prompt_tokens, generation.sets


@pytest.fixture
def rotor(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method="rotor")


def test_without_recognition_the_order_shows(rotor: InvariantModel) -> None:
    texts = ["\n".join(each.text for each in listed) for listed in permutations(DOCUMENTS)]
    assert len({bits(rotor.generate(Prompt(text), max_new_tokens=4)) for text in texts}) == 6


@pytest.mark.parametrize(("method", "template"), PAIRS)
def test_every_order_gives_the_same_bits(rotor: InvariantModel, method: str, template: str) -> None:
    lm = rotor.with_method(method, ordering="lexical")
    generations = [lm.generate(prompt_of(template, listed), max_new_tokens=2) for listed in permutations(DOCUMENTS)]
    assert len(set(map(bits, generations))) == 1
    assert generations[0].sets == (3,)
    assert generations[0].invariant


def test_the_model_reads_what_the_template_writes_for_the_canonical_order(rotor: InvariantModel) -> None:
    for template, write in TEMPLATES.items():
        prompts = [rotor.prepare(prompt_of(template, each)) for each in permutations(DOCUMENTS)]
        (text,) = {rotor.tokenizer.decode(each.input_ids) for each in prompts}
        assert sum("\n\n".join(map(write, each)) in text for each in permutations(DOCUMENTS)) == 1


def test_a_cache_knows_the_documents_in_any_order(rotor: InvariantModel) -> None:
    lm = rotor.with_cache(KeyValueCache())
    first = lm.generate(prompt_of("with sources", DOCUMENTS), max_new_tokens=4)
    again = lm.generate(prompt_of("with sources", DOCUMENTS[::-1]), max_new_tokens=4)
    assert again.usage.cached_tokens > first.usage.cached_tokens == 0
    assert again.token_ids == first.token_ids


def test_the_verdict_is_none_without_documents_and_false_for_sets_of_one(rotor: InvariantModel) -> None:
    plain = render_chat([{"role": "user", "content": "Which?"}], rotor.tokenizer)
    assert rotor.generate(plain, max_new_tokens=1).invariant is None
    first, second, last = SegmentSet([Segment("aa")]), SegmentSet([Segment("bbb")]), SegmentSet(["c", "d"])
    for one, other in ((first, second), (second, first)):
        prompt = Prompt.of(one, "\n", other, "\n", last, "Which?")
        assert rotor.generate(prompt, max_new_tokens=1).invariant is False
