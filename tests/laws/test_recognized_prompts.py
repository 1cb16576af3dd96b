"""Prompts whose documents were recognised: no order of them changes a bit of the answer, and citations lead back."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from itertools import permutations
from typing import Any

import pytest
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from invariant_rag import InvariantModel, KeyValueCache, Prompt, Segment, SegmentSet
from invariant_rag.ensembles import AttentionSorting, ContextExperts, PermutationAverage, RingAverage, SelfConsistency
from invariant_rag.generation import Generation
from invariant_rag.methods import METHODS
from invariant_rag.prompts import KnownDocument, Retrieval, Turn, recognize
from invariant_rag.prompts.labels import translate_labels, translate_stream
from invariant_rag.segments import Slot

DOCUMENTS = [
    Segment("The ferry leaves at noon.", metadata={"source": "f.txt"}),
    Segment("The mill grinds barley: 40 sacks.", metadata={"source": "mill.txt"}),
    Segment("yes", metadata={"source": "y.txt"}),
]
TEMPLATES: dict[str, Callable[[int, Segment], str]] = {
    "joined": lambda n, each: f"{each.text}\n\n",
    "numbered": lambda n, each: f"[{n}] {each.text}\n",
    "tagged": lambda n, each: f"<doc id={n}>{each.text}</doc>",
    "with sources": lambda n, each: f"Source: {each.metadata['source']}\nContent: {each.text}\n\n",
}


def prompt_of(template: str, listed: Iterable[Segment], question: str = "Which? yes or no") -> Prompt:
    """The prompt as a framework passes it: as text."""
    listed = list(listed)
    text = "".join(TEMPLATES[template](n, each) for n, each in enumerate(listed, start=1))
    known = [Retrieval(tuple(map(KnownDocument.of, listed)))]
    recognition = recognize([Turn("user", (f"Read:\n{text}{question}",))], known)
    assert not recognition.findings
    return Prompt.of(*recognition.turns[0].parts)


def bits(generation: Generation) -> tuple[Any, ...]:
    return generation.token_ids, generation.logprobs, generation.usage.prompt_tokens, generation.sets


@pytest.fixture(params=sorted(METHODS))
def lm(
    request: pytest.FixtureRequest, chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method=request.param, ordering="lexical")


@pytest.fixture(scope="module")
def rotor(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> InvariantModel:
    return InvariantModel(chat_llama, tokenizer, method="rotor")


def test_without_recognition_the_order_shows(chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    lm = InvariantModel(chat_llama, tokenizer, method="rotor")
    texts = ["\n".join(each.text for each in listed) for listed in permutations(DOCUMENTS)]
    assert len({bits(lm.generate(Prompt(text), max_new_tokens=4)) for text in texts}) == 6


@pytest.mark.parametrize("template", TEMPLATES)
def test_every_order_gives_the_same_bits(lm: InvariantModel, template: str) -> None:
    generations = [lm.generate(prompt_of(template, listed), max_new_tokens=4) for listed in permutations(DOCUMENTS)]
    assert len(set(map(bits, generations))) == 1
    assert generations[0].sets == (3,)
    assert generations[0].invariant


@pytest.mark.parametrize("template", TEMPLATES)
def test_the_model_reads_every_document_in_a_place_of_the_template(rotor: InvariantModel, template: str) -> None:
    expected = "".join(
        TEMPLATES[template](n, each)
        for n, each in enumerate(sorted(DOCUMENTS, key=lambda each: each.text, reverse=True), start=1)
    )
    for listed in permutations(DOCUMENTS):
        prepared = rotor.prepare(prompt_of(template, listed), new_tokens=1)
        assert rotor.tokenizer is not None
        assert rotor.tokenizer.decode(prepared.input_ids) == f"Read:\n{expected}Which? yes or no"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_batch_a_stream_and_scores_are_invariant_too(rotor: InvariantModel, template: str) -> None:
    prompts = [prompt_of(template, listed) for listed in permutations(DOCUMENTS)]
    assert len(set(map(bits, rotor.generate(prompts, max_new_tokens=4)))) == 1
    assert len({tuple(rotor.stream(prompt, max_new_tokens=4)) for prompt in prompts}) == 1
    assert len({tuple(rotor.score(prompt, ["noon", "six [1]"])) for prompt in prompts}) == 1


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("method", ["rotor", "set-based", "parallel-windows", "pine"])
def test_a_cache_changes_nothing(
    chat_llama: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, template: str, method: str
) -> None:
    cold = InvariantModel(chat_llama, tokenizer, method=method)
    cached = cold.with_cache(KeyValueCache())
    prompts = [prompt_of(template, listed) for listed in permutations(DOCUMENTS)]
    generations = [cached.generate(prompt, max_new_tokens=4) for prompt in prompts]
    assert len({each.token_ids for each in generations} | {cold.generate(prompts[0], max_new_tokens=4).token_ids}) == 1
    assert len({each.logprobs for each in generations[1:]}) == 1
    assert all(each.usage.cached_tokens > 0 for each in generations[1:])


@pytest.mark.parametrize("overflow", ["drop_last", "trim_segments"])
@pytest.mark.parametrize("template", TEMPLATES)
def test_what_does_not_fit_is_the_same_in_every_order(rotor: InvariantModel, template: str, overflow: Any) -> None:
    short = rotor.with_method(max_segment_tokens=40, overflow=overflow)
    outcomes = set()
    for listed in permutations(DOCUMENTS):
        prompt = prompt_of(template, listed)
        generation = short.generate(prompt, max_new_tokens=4)
        changed = [prompt.segments[index].text for index in (*generation.dropped, *generation.trimmed)]
        outcomes.add((*bits(generation), tuple(sorted(changed))))
    assert len(outcomes) == 1


@pytest.mark.parametrize("ensemble", [AttentionSorting, PermutationAverage, RingAverage, SelfConsistency])
def test_ensembles_are_invariant_with_slots(rotor: InvariantModel, ensemble: Any) -> None:
    prompts = [prompt_of("numbered", listed) for listed in permutations(DOCUMENTS)]
    generations = [ensemble(rotor).generate(prompt, max_new_tokens=3) for prompt in prompts]
    assert len({(each.token_ids, each.logprobs) for each in generations}) == 1


def test_context_experts_are_invariant_with_slots(rotor: InvariantModel) -> None:
    experts = ContextExperts(rotor, beta=0.5, gamma=0)
    generations = [
        experts.generate(prompt_of("numbered", listed), max_new_tokens=3) for listed in permutations(DOCUMENTS)
    ]
    assert len({(each.token_ids, each.logprobs) for each in generations}) == 1


def test_citations_lead_to_the_documents_as_they_were_listed(rotor: InvariantModel) -> None:
    for listed in permutations(DOCUMENTS):
        prompt = prompt_of("numbered", listed)
        generation = rotor.generate(prompt, max_new_tokens=4)
        for place, index in enumerate(generation.order, start=1):
            answer = f"So it is [{place}], see source {place}."
            cited = translate_labels(answer, generation.labels)
            assert "".join(translate_stream(answer, generation.labels)) == cited
            assert prompt.segments[index] == listed[int(cited[-2]) - 1]
            assert f"[{int(cited[-2])}]" in cited


@pytest.mark.parametrize("written", ["({}) ", "#{} ", "Item {}: ", "D{}: ", "<doc id={}>", "Source {}: "])
def test_citations_lead_to_the_same_document_in_whatever_way_it_was_numbered(
    rotor: InvariantModel, written: str
) -> None:
    cited = set()
    for listed in permutations(DOCUMENTS):
        slots = [Slot((written.format(number),), ("\n",), str(number)) for number in (1, 2, 3)]
        generation = rotor.generate(Prompt("", SegmentSet(listed, slots=slots), "Which?"), max_new_tokens=1)
        answer = translate_labels(f"So it is, {written.format(2).strip()} source 2.", generation.labels)
        numbers = re.findall(r"\d", answer)
        cited.add(tuple(listed[int(number) - 1] for number in numbers))
    assert len(cited) == 1
    assert {len(set(each)) for each in cited} == {1}


def test_prompts_of_two_retrievals_are_invariant_in_both(rotor: InvariantModel) -> None:
    other = [Segment("Salt is traded."), Segment("The bridge is copper.")]
    outcomes = set()
    for first in permutations(DOCUMENTS):
        for second in permutations(other):
            text = "Maps:\n" + "".join(f"[{n}] {each.text}\n" for n, each in enumerate(first, start=1))
            text += "Trade:\n" + "\n\n".join(each.text for each in second) + "\nWhich?"
            known = [Retrieval(tuple(map(KnownDocument.of, each))) for each in (first, second)]
            recognition = recognize([Turn("user", (text,))], known)
            assert not recognition.findings
            outcomes.add(bits(rotor.generate(Prompt.of(*recognition.turns[0].parts), max_new_tokens=4)))
    assert len(outcomes) == 1
