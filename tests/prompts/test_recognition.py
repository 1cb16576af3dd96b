"""What is recognised in a prompt does not depend on the order of its documents, or there is a finding."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
from hypothesis import assume, given, settings

from invariant_rag import Segment, SegmentSet
from invariant_rag.prompts import KnownDocument, Recognition, Retrieval, Turn, mark, mark_set, recognize
from tests.prompts.prompt_templates import (
    WAYS,
    Outcomes,
    Template,
    as_known,
    documents,
    every_order,
    letter,
    number_from_0,
    retrieval,
    templates,
    written,
)

FERRY, MILL, BRIDGE = (
    Segment("The ferry leaves at noon.", title="Ferries", metadata={"source": "ferry.txt", "page": 3, "id": "x7"}),
    Segment("The mill grinds barley: 40 sacks.", title="Mills", metadata={"source": "mill.txt", "page": 1, "id": "a"}),
    Segment(
        'A copper bridge\ncrosses the "Senn".',
        title="It's a bridge",
        metadata={"source": "d/b.txt", "page": 12, "id": "b2"},
    ),
)
THREE = [FERRY, MILL, BRIDGE]


def user(*parts: Any) -> Turn:
    return Turn("user", parts)


def sets_of(turns: tuple[Turn, ...]) -> list[list[str]]:
    return [sorted(each.text for each in part) for turn in turns for part in turn.parts if isinstance(part, SegmentSet)]


def as_marked_and_known(template: Template) -> Callable[[Any], Recognition]:
    return lambda listed: recognize([user(template.write_marked(listed))], [retrieval(listed)])


# --- laws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=60, deadline=None)
@given(template=templates, listed=documents())
def test_orders_without_a_finding_are_recognised_alike(way: str, template: Template, listed: list[Segment]) -> None:
    assume(template.dump is None or template.between + template.before + template.after)  # quotes back to back
    outcomes = every_order(listed, WAYS[way](template))
    assert len(outcomes.silent) <= 1, outcomes.silent


@settings(max_examples=60, deadline=None)
@given(template=templates, listed=documents())
def test_no_text_is_lost_or_changed(template: Template, listed: list[Segment]) -> None:
    prompt = template.write(listed)
    turns = recognize([user(prompt)], [retrieval(listed)]).turns
    assert written(turns, canonical=False) == (("user", (prompt,)),)


@settings(max_examples=100, deadline=None)
@given(template=templates, listed=documents(1, 1))
def test_a_prompt_with_one_document_stays_as_it_is(template: Template, listed: list[Segment]) -> None:
    prompt = template.write(listed)
    turns = recognize([user(prompt)], [retrieval(listed)]).turns
    assert written(turns) == (("user", (prompt,)),)


USUAL = {
    "joined": Template(),
    "lines": Template(between="\n"),
    "spaces": Template(between=" "),
    "rules": Template(between="\n---\n"),
    "numbers": Template(before="[{n}] ", between="\n"),
    "numbers from 0": Template(before="[{n}] ", between="\n", count=number_from_0),
    "letters": Template(before="{n}) ", between="\n", count=letter),
    "numbers behind": Template(after=" [{n}]", between="\n"),
    "list": Template(before="{n}. ", between="\n", suffix="\n\nQuestion: Which?"),
    "bullets": Template(before="- ", between="\n"),
    "quotes": Template(before="> ", between="\n"),
    "sources": Template(before="Source {n}:\n", between="\n\n", suffix="\n------\nQuery: Which?\nAnswer: "),
    "lost in the middle": Template(before="Document [{n}](Title: {title}) ", between="\n"),
    "tags": Template(before='<document index="{n}">\n', after="\n</document>", between="\n", suffix="\n</documents>\n"),
    "tags with metadata": Template(
        before='<document index="{n}">\n<source>{source}</source>\n<document_content>\n',
        after="\n</document_content>\n</document>",
        between="\n",
    ),
    "source and content": Template(before="Source: {source}\nContent: ", between="\n\n"),
    "LlamaIndex": Template(before="page_label: {page}\nfile_path: {source}\n\n", suffix="\n-----\nGiven"),
    "behind": Template(after=" (source: {source}, p. {page})", between="\n"),
    "identifiers": Template(before="<doc id={id}>", after="</doc>", between=""),
    "JSON": Template(prefix='{"context": [', between=", ", suffix=']}', dump=json.dumps),
    "Python": Template(prefix="[", between=", ", suffix="]\nWhich?", dump=repr),
    "records": Template("[", '{"source": "{source}", "text": ', "}", ", ", "]", dump=json.dumps),
    "nothing around": Template(prefix="", suffix=""),
}  # fmt: skip


@pytest.mark.parametrize("way", ["known", "marked with metadata", "parts"])
@pytest.mark.parametrize("name", USUAL)
@pytest.mark.parametrize("count", [2, 3])
def test_the_usual_templates_make_one_set_in_every_order(name: str, way: str, count: int) -> None:
    template = replace(USUAL[name], dump=USUAL[name].dump if way == "known" else None)
    recognized = as_marked_and_known(template) if way.startswith("marked") else WAYS[way](template)
    outcomes = every_order(THREE[:count], recognized)
    assert not outcomes.found
    assert len(outcomes.silent) == 1


@pytest.mark.parametrize("dump", [json.dumps, repr])
def test_a_dump_of_all_documents_in_one_string_is_one_set(dump: Callable[[str], str]) -> None:
    def dumped(listed: Any) -> Any:
        text = dump("\n\n".join(each.text for each in listed))
        return recognize([user("Read " + text + ". Which?")], [retrieval(listed)])

    outcomes = every_order([FERRY, MILL, BRIDGE, Segment("It's here.")], dumped)
    assert not outcomes.found
    assert len(outcomes.silent) == 1


# --- what is hard ---------------------------------------------------------------------------------------------------


def silent(outcomes: Outcomes) -> bool:
    return not outcomes.found and len(outcomes.silent) == 1


def test_a_document_that_the_question_repeats_is_in_the_set_once() -> None:
    template = Template(before="[{n}] ", between="\n", suffix=f"\n\nIs this true: {FERRY.text}")
    asked = Retrieval(retrieval(THREE).documents, queries=(f"Is this true: {FERRY.text}",))
    results = [recognize([user(template.write(listed))], [asked]) for listed in permutations(THREE)]
    assert not any(each.findings for each in results)
    [turn] = results[0].turns
    assert isinstance(turn.parts[-1], str)
    assert turn.parts[-1].endswith(FERRY.text)
    assert sets_of((turn,)) == [sorted(each.text for each in THREE)]


@pytest.mark.parametrize("suffix", ["\n\nAnswer yes or no.", "\n\nIs it 42 or 1?", "\n\nYes?", "\n\nyes, or maybe"])
@pytest.mark.parametrize("before", ["- ", "[{n}] ", "Document {n}: ", ""])
def test_short_documents_are_no_words_of_the_question(suffix: str, before: str) -> None:
    listed = [Segment("yes"), Segment("no"), Segment("42"), Segment("1")]
    template = Template(before=before, between="\n", suffix=suffix)
    assert silent(every_order(listed, as_known(template)))
    [turn] = recognize([user(template.write(listed))], [retrieval(listed)]).turns
    assert str(turn.parts[-1]).endswith(suffix)


def test_a_document_within_another_is_found_where_it_stands_alone() -> None:
    listed = [Segment("It sails at noon. In winter it does not sail."), Segment("In winter it does not sail."), FERRY]
    for template in (Template(), Template(before="[{n}] "), Template(between="\n---\n")):
        assert silent(every_order(listed, as_known(template)))


def test_documents_that_make_up_another_one_are_not_told_apart_silently() -> None:
    listed = [Segment("a."), Segment("a."), Segment("b."), Segment("b."), Segment("a.\n\nb.")]
    outcomes = every_order(listed, as_known(Template()), most=120)
    assert len(outcomes.silent) <= 1
    assert outcomes.found


@pytest.mark.parametrize("key", ["page", "id"])
@pytest.mark.parametrize("before", ["page {n}: ", "<doc id={n}>", "[{n}] "])
def test_metadata_equal_to_running_numbers_never_makes_two_silent_prompts(before: str, key: str) -> None:
    for values in permutations([1, 2, 3]):
        listed = [Segment(each.text, metadata={key: value}) for each, value in zip(THREE, values, strict=True)]
        counted = every_order(listed, as_known(Template(before=before)))
        shown = every_order(listed, as_known(Template(before=before.replace("{n}", f"{{{key}}}"))))
        assert len(counted.silent) <= 1
        assert len(shown.silent) <= 1
        assert len(counted.found) <= 1, "the order in which the numbers may be either"


def test_titles_with_running_numbers_never_make_two_silent_prompts() -> None:
    listed = [Segment(each.text, title=f"Document {n}") for n, each in enumerate(THREE, start=1)]
    for before in ("Document {n}: ", "{title}: ", "Title: {title}\n"):
        assert len(every_order(listed, as_known(Template(before=before))).silent) <= 1


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("between", ["\n\n", "\n---\n", " "])
def test_white_space_at_the_ends_of_documents_goes_with_them_or_warns(strips: bool, between: str) -> None:
    mixed = [FERRY, Segment("ends in a line.\n"), Segment("  begins later.")]
    outcomes = every_order(mixed, as_known(Template(between=between, strips=strips)))
    assert len(outcomes.silent) == bool(not outcomes.found), "in doubt, every order says so"
    alike = [Segment(each.text + "\n") for each in THREE]
    assert silent(every_order(alike, as_known(Template(between=between, strips=strips))))


def test_equal_documents_keep_their_number() -> None:
    listed = [FERRY, FERRY, MILL]
    outcomes = every_order(listed, as_known(Template(before="[{n}] ")))
    assert silent(outcomes)
    turns = recognize([user(Template().write(listed))], [retrieval(listed)]).turns
    assert sets_of(turns) == [sorted(each.text for each in listed)]


def test_equal_texts_with_other_sources_keep_their_sources() -> None:
    listed = [Segment("same text", metadata={"source": source}) for source in ("b.txt", "a.txt")]
    turns = recognize([user(Template().write(listed))], [retrieval(listed)]).turns
    [found] = [part for part in turns[0].parts if isinstance(part, SegmentSet)]
    assert sorted(each.metadata["source"] for each in found) == ["a.txt", "b.txt"]
    assert len(every_order(listed, as_known(Template(before="{source}: "))).silent) <= 1


def test_metadata_within_other_metadata_does_not_tell_equal_texts_apart_silently() -> None:
    listed = [Segment("same text", metadata={"source": f"{n}.txt", "page": n % 4 + 1}) for n in range(1, 5)]
    assert len(every_order(listed, as_known(Template(after=" ({source})"))).silent) <= 1


def test_documents_that_form_no_set_stay_as_they_are_written() -> None:
    padded, plain = Segment("line one\n\nline two\n"), Segment("The ferry to Ostra leaves the harbour at noon.")
    listed = [padded, padded, plain, plain]
    prompt = " and ".join(f'"{each.text}"' for each in listed)
    turns = recognize([user(prompt)], [retrieval(listed)]).turns
    assert written(turns, canonical=False) == (("user", (prompt,)),)


def test_a_separator_that_is_also_a_document_is_not_taken_for_one_silently() -> None:
    listed = [Segment("and"), FERRY, MILL]
    assert len(every_order(listed, as_known(Template(between=" and "))).silent) <= 1


def test_two_retrievals_in_one_prompt_are_two_sets_even_if_they_share_a_document() -> None:
    other = [MILL, Segment("Salt is traded for copper.")]
    shown = set()
    for first in permutations(THREE):
        for second in permutations(other):
            context = Template(prefix="Maps:\n", suffix="").write(first) + Template(prefix="\n\nTrade:\n").write(second)
            result = recognize([user(context)], [retrieval(first), retrieval(second)])
            assert not result.findings
            assert len(sets_of(result.turns)) == 2
            shown.add(written(result.turns))
    assert len(shown) == 1


def test_sets_of_two_turns_are_two_sets_and_the_answer_between_is_left_as_it_is() -> None:
    said = Turn("assistant", (f"I read: {FERRY.text}\n\n{MILL.text}",))
    shown = set()
    for first in permutations(THREE):
        turns = [user(Template().write(first)), said, user(Template(before="- ").write(first[::-1]))]
        result = recognize(turns, [retrieval(first)])
        assert not result.findings
        assert len(sets_of(result.turns)) == 2
        assert result.turns[1] == said
        shown.add(written(result.turns))
    assert len(shown) == 1


def test_segments_in_neighbouring_turns_of_one_role_form_a_set() -> None:
    result = recognize([user("Read: ", MILL), user("\n", FERRY), user("Why?")])
    assert sets_of(result.turns) == [[FERRY.text, MILL.text]]
    assert [turn.has_segments for turn in result.turns] == [True, False, False]
    results_of_tools = recognize([Turn("tool", (MILL,)), Turn("tool", (FERRY,))])
    assert [each.kind for each in results_of_tools.findings] == ["separate"]


def test_a_segment_in_an_answer_is_in_a_set_too() -> None:
    result = recognize([Turn("assistant", ("Cited: ", FERRY, MILL))])
    assert sets_of(result.turns) == [[FERRY.text, MILL.text]]


def test_what_is_no_text_parts_sets() -> None:
    image = object()
    result = recognize([user(FERRY, image, MILL)])
    assert result.turns[0].parts[1] is image
    assert len(sets_of(result.turns)) == 2


def test_token_ids_are_in_sets_without_slots() -> None:
    ids = [Segment(token_ids=(1,)), Segment(token_ids=(2,))]
    assert len(recognize([user(*ids)]).turns[0].parts[0]) == 2
    apart = recognize([user("[1] ", ids[0], "\n[2] ", ids[1])])
    assert [finding.kind for finding in apart.findings] == ["separate"]


# --- findings -------------------------------------------------------------------------------------------------------


def kinds(*turns: Turn, known: list[Retrieval] | None = None, elsewhere: list[Segment] | None = None) -> list[str]:
    found = recognize(turns, known or [], list(map(KnownDocument.of, elsewhere or []))).findings
    return [finding.kind for finding in found]


LONG = [
    Segment("The ferry to Ostra leaves the harbour at noon. In winter it does not sail at all."),
    Segment("A copper bridge crosses the river Senn near the old town. It was built by Ada Kolm."),
]


def test_each_finding_has_its_reason() -> None:
    three = [retrieval(THREE)]
    assert kinds(user(Template().write(THREE[:2])), known=three) == ["incomplete"]
    assert kinds(user(f"A: {FERRY.text} but B says {MILL.text} while C: {BRIDGE.text}"), known=three) == ["separate"]
    assert kinds(user(mark("a", 2))) == ["incomplete"]
    assert kinds(user(" or rather ".join(mark(each, 2, group="0a") for each in "ab"))) == ["separate"] * 2
    assert kinds(user(mark("a", nonce="0" * 8))) == ["marks"]
    assert kinds(user(LONG[0].text[:60], LONG[1].text[:70]), known=[retrieval(LONG)]) == ["split"]
    assert kinds(user(Template().write(LONG)), elsewhere=LONG) == ["elsewhere"]
    assert kinds(user("Read:\n", FERRY, " then look at this: ", MILL)) == ["separate"]


def test_nothing_is_found_where_there_is_nothing_to_find() -> None:
    three = [retrieval(THREE)]
    assert kinds(user("Rewrite the question: when does it leave?"), known=three) == []
    assert kinds(user("Rubrics: ", FERRY, MILL, "Answers: ", BRIDGE, Segment("b"))) == []
    assert kinds(user(Template().write(LONG)), known=[retrieval(LONG)], elsewhere=LONG) == []
    assert kinds(user(LONG[0].text), elsewhere=LONG) == []
    assert kinds(user(mark_set(THREE)), user(mark_set(THREE))) == []


def test_a_retriever_tool_that_is_called_twice_makes_two_complete_sets() -> None:
    assert kinds(Turn("tool", (mark_set(THREE),)), Turn("tool", (mark_set(THREE),))) == []


# --- time -----------------------------------------------------------------------------------------------------------


def takes_less_than(
    limit: float, *turns: Turn, known: list[Retrieval] | None = None, elsewhere: list[KnownDocument] | None = None
) -> bool:
    """Whether recognition takes less than so many seconds; whoever is disturbed gets two more tries."""

    def once() -> float:
        start = time.process_time()
        recognize(turns, known or [], elsewhere or [])
        return time.process_time() - start

    return any(once() < limit for _ in range(3))


def sentences(seed: int, length: int) -> str:
    words = [f"w{seed * 7919 % 10007 + n * 31 % 9973}" for n in range(length // 6)]
    return " ".join(words)[: length - 1] + "."


def test_a_hundred_documents_of_2000_characters_take_a_fraction_of_a_second() -> None:
    listed = [Segment(sentences(n, 2000), metadata={"source": f"{n}.txt", "page": n * 3 % 101}) for n in range(100)]
    for template in (Template(), Template(before="[{n}] {source}: "), Template(suffix="\n\n" + listed[3].text)):
        prompt = template.write(listed)
        assert len(prompt) > 200_000
        assert takes_less_than(0.5, user(prompt), known=[retrieval(listed)])
    others = [KnownDocument.of(Segment(sentences(n + 1000, 2000))) for n in range(64 * 20)]
    assert takes_less_than(0.5, user("Q " + sentences(9, 200_000)), elsewhere=others)


@pytest.mark.parametrize(
    "unit",
    ["a ", "- ", "1 ", "[1] ", "yes\n", "'a' ", '"', "<doc>", "<doc ", "<source><doc>", "Document 1\n", "document ((",
     "[", "\ueca0", "\\ueca0", "\\", "\ueca0aaaa;", "    ", "\n", "\t-#* "],
)  # fmt: skip
def test_no_repeated_text_takes_long(unit: str) -> None:
    short = [Segment(each) for each in ("a", "b c", "1", "-", "yes")]
    text = unit * (50_000 // len(unit))
    elsewhere = [KnownDocument.of(Segment(text[:20_000]))]
    assert takes_less_than(3, user(text), known=[retrieval(short)], elsewhere=elsewhere)


# --- what shows the order outside of a set --------------------------------------------------------------------------


def kinds_in_every_order(
    write: Callable[[list[Segment]], str], listed: list[Segment], query: str = "Which?"
) -> set[Any]:
    """Return the kinds of findings, over all orders, of what a user writes of documents."""
    results = (
        recognize([user(write(list(order)))], [Retrieval(known(order), (query,))]) for order in permutations(listed)
    )
    return {tuple(dict.fromkeys(each.kind for each in result.findings)) for result in results}


def known(segments: Any) -> tuple[KnownDocument, ...]:
    return tuple(map(KnownDocument.of, segments))


SCORED = [replace(each, score=score) for each, score in zip(THREE, (0.91, 0.78, 0.5), strict=True)]


@pytest.mark.parametrize(
    "beside",
    [
        lambda listed: f"Best match: {listed[0].text}",
        lambda listed: f"Best match: {listed[0].title}",
        lambda listed: f"See also {listed[-1].metadata['source']}",
        lambda listed: "Scores: " + ", ".join(f"{each.score:.1f}" for each in listed),
        lambda listed: "Scores: " + " / ".join(f"{each.score:.0%}" for each in listed),
        lambda listed: "Pages: " + ", ".join(str(each.metadata["page"]) for each in listed),
        lambda listed: "Ids: " + ", ".join(str(each.metadata["id"]) for each in listed[::-1]),
        lambda listed: f"It begins: {' '.join(listed[0].text.split()[:3])} ...",
    ],
)
@pytest.mark.parametrize("first", [True, False])
def test_text_beside_a_set_that_follows_its_order_is_found_in_every_order(beside: Any, first: bool) -> None:
    def write(listed: list[Segment]) -> str:
        texts = "\n".join(f"- {each.text}" for each in listed)
        return "\n\n".join([beside(listed), texts, "Which?"] if first else [texts, beside(listed), "Which?"])

    assert kinds_in_every_order(write, SCORED) == {("named",)}


def test_a_question_may_name_and_quote_documents() -> None:
    question = f"Compare Ferries and Mills: {FERRY.text} See {MILL.metadata['source']}, 0.91, 0.78, 0.50?"
    write = lambda listed: "\n".join(f"- {each.text}" for each in listed) + f"\n\n{question}"  # noqa: E731
    assert kinds_in_every_order(write, SCORED, question) == {()}


@pytest.mark.parametrize(
    "rewrite",
    [
        lambda text: text[:10],
        str.lower,
        lambda text: " ".join(text.split()[:3]),
        lambda text: text.replace(" ", "\n\n"),
    ],
)
def test_rewritten_documents_of_the_run_are_found_in_every_order(rewrite: Callable[[str], str]) -> None:
    write = lambda listed: "\n".join(rewrite(each.text) for each in listed) + "\nWhich?"  # noqa: E731
    assert kinds_in_every_order(write, THREE) == {("split",)}
    chinese = [
        Segment("渡船中午从奥斯特拉出发开往韦恩。"),
        Segment("磨坊每天磨四十袋大麦和小麦。"),
        Segment("铜桥横跨森恩河通往老城。"),
    ]
    cut = lambda listed: "\n".join(each.text[:6] for each in listed) + "\nWhich?"  # noqa: E731
    assert kinds_in_every_order(cut, chinese) == {("split",)}


def test_documents_that_begin_alike_are_told_apart_by_what_follows() -> None:
    alike = [
        Segment(f"According to the report, {what}.")
        for what in ("ferries leave at noon", "salt is sold", "mills grind")
    ]
    write = lambda listed: "\n".join(each.text.lower() for each in listed) + "\nWhich?"  # noqa: E731
    assert kinds_in_every_order(write, alike) == {("split",)}


def test_documents_of_signs_are_found_and_those_of_punctuation_are_a_reason_to_warn() -> None:
    write = lambda listed: "\n\n".join(each.text for each in listed) + "\nWhich?"  # noqa: E731
    assert kinds_in_every_order(write, [Segment("🚢🌊"), Segment("🧂🐟"), Segment("🗼💡")]) == {()}
    assert kinds_in_every_order(write, [Segment("***"), Segment("!!!"), Segment("+++")]) == {("split",)}


def test_escaped_html_is_found() -> None:
    pages = [Segment(f"<b>{what}</b> & more") for what in ("ferry", "mill", "bridge")]
    write = lambda listed: "\n".join(html.escape(each.text) for each in listed) + "\nWhich?"  # noqa: E731
    assert kinds_in_every_order(write, pages) == {()}


def test_documents_that_differ_in_white_space_alone_are_a_reason_to_warn() -> None:
    alike = [Segment("a b c."), Segment("a  b c."), Segment("d e f.")]
    write = lambda listed: "\n\n".join(each.text for each in listed) + "\nWhich?"  # noqa: E731
    assert all(kinds_in_every_order(write, alike))


def test_documents_in_a_message_of_the_assistant_alone_are_found() -> None:
    said = Turn("assistant", (f"I found: {FERRY.text} {MILL.text}",))
    findings = recognize([said, user("Which?")], [retrieval(THREE)]).findings
    assert [each.kind for each in findings] == ["split"]


def test_metadata_as_python_writes_it_is_understood_in_every_order() -> None:
    pages = [Segment(each.text, metadata={"page": page}) for page, each in enumerate(THREE, start=1)]
    write = lambda listed: "\n\n".join(f"Source: {dict(each.metadata)}\nContent: {each.text}" for each in listed)  # noqa: E731
    assert kinds_in_every_order(lambda listed: write(listed) + "\n\nWhich?", pages) == {()}
