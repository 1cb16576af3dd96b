"""Outputs scored by hand, and by the benchmarks."""

from __future__ import annotations

import heapq
from dataclasses import replace
from itertools import combinations
from math import factorial
from pathlib import Path

import pytest
from invariant_rag.audit.metrics import best_subspan_em

from invariant_rag_benchmarks import BENCHMARKS, Case
from invariant_rag_benchmarks.tasks.longbench import edit_similarity, rouge_l, tasks
from invariant_rag_benchmarks.tasks.reward_bench import SECTIONS, judge_figures
from invariant_rag_benchmarks.tasks.timeline import location_agreement, square_agreement, swap_agreement


def case(*gold: str, variant: str = "0", candidates: tuple[str, ...] = ()) -> Case:
    return Case("q", variant, "", (), "", gold, candidates=candidates)


OTHER_NUMERALS = (
    "II, I, III",
    "The correct order is II, I and III.",
    "II. opened on 1 May, I. built by 3 men, III. closed.",
    "(2) (1) (3)",
    "two, one, three",
    "The order is: Two -> One -> Three",
    "two\none\nthree",
)
AMBIGUOUS = (
    "I think that two of them came before one, and three after.",
    "II, III",
    "I, II, III; or II, I, III",
    "two, one, three, that is I, II, III",
    "9" * 5000,
)
TIMELINE_RIGHT = dict.fromkeys(("accuracy", "location_agreement", "square_agreement", "swap_agreement"), 1.0)
TIMELINE_NONE = dict.fromkeys(TIMELINE_RIGHT, 0.0)


@pytest.mark.parametrize(
    ("name", "gold", "output", "scores"),
    [
        ("lost-in-the-middle", ("The Beatles",), "It was Beatles, I think", {"best_subspan_em": 1, "exact_match": 0}),
        ("lost-in-the-middle", ("Rome",), "I do not know.\nRome", {"best_subspan_em": 0, "exact_match": 0}),
        ("lost-in-the-middle", ("x", "Röntgen"), "\n A Röntgen!", {"best_subspan_em": 1, "exact_match": 1}),
        ("xquad", ("308",), "308 points", {"best_subspan_em": 1, "exact_match": 0}),
        ("key-value", ("ab-CD",), 'The value is "AB-cd".', {"accuracy": 1}),
        ("key-value", ("ab-cd",), "abcd", {"accuracy": 0}),
        ("commonsense-qa", ("race track", "desert"), "the race track.", {"accuracy": 1}),
        ("commonsense-qa", ("race track", "desert"), "race track or desert", {"accuracy": 0}),
        ("commonsense-qa", ("race track", "desert"), "Race track", {"accuracy": 0}),
        ("mintaka", ("Rome",), '{"Answer": "the Rome"}', {"accuracy": 1, "exact_match": 1, "f1": 1}),
        ("mintaka", ("Rome",), '{"Answer": "Rome city"} Rome', {"accuracy": 1, "exact_match": 0, "f1": 2 / 3}),
        ("mintaka", ("Oslo",), "{'Answer': ['Rome', 'Oslo']}", {"accuracy": 1, "exact_match": 0, "f1": 2 / 3}),
        ("mintaka", ("7",), '{"Answer": 7}', {"accuracy": 1, "exact_match": 1, "f1": 1}),
        ("mintaka", ("Rome",), 'The Answer is {"x": 1}', {"accuracy": 0, "exact_match": 0, "f1": 0}),
        ("mintaka", ("Rome",), "Rome\nOslo", {"accuracy": 1, "exact_match": 1, "f1": 1}),
        ("two-wiki", ("no", "a big town"), "Big city", {"f1": 0.5}),
        ("r-gsm", ("1200",), "3 + 4. Answer: 7\nAnswer: 1,200.00", {"accuracy": 1}),
        ("r-gsm", ("7",), "It is 7.", {"accuracy": 0}),
        ("r-gsm", ("-2",), "Answer: $-2.", {"accuracy": 1}),
        (
            "timeline",
            ("II", "I", "III"),
            "II. b\nI. a\nIII. c",
            {"accuracy": 1, "location_agreement": 1, "square_agreement": 1, "swap_agreement": 1},
        ),
        (
            "timeline",
            ("II", "I", "III"),
            "III, I, II",
            {"accuracy": 0, "location_agreement": 0, "square_agreement": 0, "swap_agreement": 0.5},
        ),
        (
            "timeline",
            ("I", "II"),
            "I think so",
            {"accuracy": 0, "location_agreement": 0, "square_agreement": 0, "swap_agreement": 0},
        ),
        (
            "timeline",  # the official file has Arabic numerals, and events have dates
            ("2", "1", "3"),
            "2. Guadalupe: 11 December 1965.\n1. Arcos: 7 November 1966.\n3. Carmona: 1976, 3 floors.",
            {"accuracy": 1, "location_agreement": 1, "square_agreement": 1, "swap_agreement": 1},
        ),
        ("timeline", ("3", "5", "1", "4", "2"), "The order is 3, 5, 1, 4, 2.", TIMELINE_RIGHT),
        ("timeline", ("2", "1"), "Event 2 came before event 1.", TIMELINE_RIGHT),
        *(("timeline", ("2", "1", "3"), output, TIMELINE_RIGHT) for output in OTHER_NUMERALS),
        *(("timeline", ("II", "I", "III"), output, TIMELINE_RIGHT) for output in ("2, 1, 3", *OTHER_NUMERALS[3:])),
        ("timeline", ("(2)", "(1)"), "2, 1", TIMELINE_RIGHT),
        *(("timeline", ("2", "1", "3"), output, TIMELINE_NONE) for output in AMBIGUOUS),
        (
            "timeline",
            ("2", "1", "3"),
            "1 -> 2 -> 3",
            {
                **TIMELINE_RIGHT,
                "accuracy": 0,
                "location_agreement": 0.5,
                "square_agreement": 0.75,
                "swap_agreement": 0.5,
            },
        ),
        (
            "reward-bench",
            ("B",),
            'I shall say "[[A]]" or "[[B]]".\nA is short, [[A]]?\nFinal verdict: [[B]]',
            {"accuracy": 1},
        ),
        ("reward-bench", ("A",), "Both are fine. [[A]]", {"accuracy": 1}),
        ("reward-bench", ("B",), "[[A]]", {"accuracy": 0}),
        ("llmbar", ("A",), "[[A]] or [[B]]", {"accuracy": 0.5}),
        ("llmbar", ("A",), "Neither.", {"accuracy": 0.5}),
    ],
)
def test_an_output_gets_the_score_that_was_worked_out_by_hand(name, gold, output, scores):
    assert BENCHMARKS[name].score(case(*gold), output).scores == pytest.approx(scores)


@pytest.mark.parametrize(
    ("task", "gold", "output", "expected"),
    [
        ("qasper", ("no", "a big town"), "Big city", 0.5),
        ("triviaqa", ("Rome",), "\nRome\nQuestion: more", 1),
        ("passage_retrieval_en", ("Paragraph 7",), "Paragraph 7, not 3", 0.5),
        ("passage_count", ("12",), "none", 0),
        ("trec", ("Food", "Food", "Fast Food", "Sport"), "Food or Sport\nSport", 0.5),
        ("trec", ("Fast Food", "Food", "Fast Food", "Sport"), "Fast Food", 1),
        ("lcc", ("return x",), "# here\n```python\nreturn x\nreturn y", 1),
    ],
)
def test_a_longbench_task_is_scored_with_its_metric(task, gold, output, expected):
    assert BENCHMARKS["longbench"].score(replace(case(*gold), group=task), output).scores == {"score": expected}


@pytest.mark.parametrize(
    ("prediction", "gold", "rouge", "edits"),
    [
        ("with a cat it mat a on it the big", "off cat . was .", 0.181818, 0.33),
        ("and ran fish the on", "sat on ran . fish was", 0.4, 0.6),
        ("ran cat it the some sat mat", "with mat and it off was some ran some mat sat fish", 0.352941, 0.42),
        ("and some sat fish and some sat fish", "some . on off off off", 0.285714, 0.39),
        ("cat sat and on mat a big on mat . a was fish fish", "a fish mat and", 0.461538, 0.29),
        ("", "a fish", 0, 0),
    ],
)
def test_rouge_and_edit_similarity_are_those_of_the_packages(prediction, gold, rouge, edits):
    """The figures are those of rouge 1.0.1 and fuzzywuzzy 0.18, which LongBench's code calls."""
    assert rouge_l(prediction, gold) == pytest.approx(rouge, abs=1e-6)
    assert edit_similarity(prediction, gold) == edits


def test_the_groups_of_longbench_weigh_their_tasks_alike():
    records = [
        {"group": task, "variant": variant, "scores": {"score": value}}
        for task, variant, value in [
            ("qasper", "initial", 1.0),
            ("qasper", "initial", 1.0),
            ("multifieldqa_en", "initial", 0.5),
            ("narrativeqa", "initial", 0.0),
            ("narrativeqa", "reversed", 1.0),
            ("trec", "initial", 1.0),
        ]
    ]
    found = BENCHMARKS["longbench"].figures(records)
    assert found == {"qasper": 1, "multifieldqa_en": 0.5, "narrativeqa": 0, "trec": 1, "single-doc": 0.5}
    every = [{"group": name, "variant": "initial", "scores": {"score": 0.25}} for name in tasks()]
    assert BENCHMARKS["longbench"].figures(every)["mean of groups"] == 0.25


def test_an_option_counts_whatever_its_letter():
    letters = (" A", " B", " C", " D")
    score = BENCHMARKS["mmlu"].score
    first = score(case("2", variant="0123", candidates=letters), " C")
    moved = score(case("2", variant="2310", candidates=letters), " A")
    assert first == moved
    assert first.scores == {"accuracy": 1.0}
    assert score(case("2", variant="2310", candidates=letters), " C").answer == "1"


def test_agreement_falls_from_the_right_order_to_the_reversed_one():
    assert [location_agreement(places, 4) for places in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0])] == [1, 0.75, 0]
    # Two neighbours exchanged are off by 1 each, all four reversed by 3, 1, 1 and 3.
    assert [square_agreement(places, 4) for places in ([0, 1, 2, 3], [1, 0, 2, 3], [3, 2, 1, 0])] == [1, 0.9, 0]
    # One swap, and the three swaps of a cycle of four, which is the farthest.
    assert [swap_agreement(places, 4) for places in ([1, 0, 2, 3], [1, 2, 3, 0])] == pytest.approx([2 / 3, 0])


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_the_swaps_that_sort_an_order_cover_half_of_all_deviations(count):
    """Dijkstra over all orders: a swap costs its distance. The timeline's README leaves that deviation out for it."""
    cheapest, queue = {}, [(0, tuple(range(count)))]
    while queue:
        cost, places = heapq.heappop(queue)
        if places in cheapest:
            continue
        cheapest[places] = cost
        for left, right in combinations(range(count), 2):
            swapped = list(places)
            swapped[left], swapped[right] = places[right], places[left]
            heapq.heappush(queue, (cost + right - left, tuple(swapped)))
    assert len(cheapest) == factorial(count)
    for places, cost in cheapest.items():
        assert 2 * cost == sum(abs(place - index) for index, place in enumerate(places))


def judged(*answers: tuple[str, str], group: str = "") -> list[dict[str, object]]:
    worth = {"better": 1.0, "worse": 0.0, "none": 0.5}
    return [
        {
            "question": f"{group}{number}",
            "variant": variant,
            "group": group,
            "answer": answer,
            "scores": {"accuracy": worth[answer]},
        }
        for number, pair in enumerate(answers)
        for variant, answer in zip(("gold first", "gold second"), pair, strict=True)
    ]


def test_a_judge_who_follows_the_first_place_is_found_out():
    found = judge_figures(judged(("better", "worse"), ("better", "worse"), ("worse", "better"), ("better", "better")))
    assert found == {
        "position_consistency": 0.25,
        "first_preferred": 0.5,
        "second_preferred": 0.25,
        "preference_fairness": -0.25,
        "unreadable": 0,
    }


def test_pairs_without_a_verdict_take_no_part_in_consistency():
    found = judge_figures(judged(("none", "none"), ("better", "none"), ("better", "better"), ("worse", "better")))
    assert (found["position_consistency"], found["preference_fairness"], found["unreadable"]) == (0.5, 0.5, 0.5)
    assert judge_figures(judged(("none", "none"))) == {"unreadable": 1}


def test_sections_weigh_their_subsets_as_the_benchmark_does():
    records = judged(("better", "worse"), group="math-prm") + judged(("worse", "worse"), group="hep-go")
    found = BENCHMARKS["reward-bench"].figures(records)
    assert found["Reasoning: gold first"] == pytest.approx(984 / (984 + 164))
    assert found["Reasoning: gold second"] == 0
    assert found["Reasoning: shuffled"] == pytest.approx(984 / (984 + 164) / 2)
    assert found["Reasoning: flips"] == pytest.approx(984 / (984 + 164))
    assert "Full: gold first" not in found
    everywhere = [
        record for name in SECTIONS.values() for record in judged(("better", "better"), group=next(iter(name)))
    ]
    assert BENCHMARKS["reward-bench"].figures(everywhere)["Full: gold second"] == 1


def _pairs() -> list[tuple[str, list[str], float]]:
    lines = (Path(__file__).parent / "subspan_pairs.tsv").read_text(encoding="utf-8").splitlines()[1:]
    fields = [line.split("\t") for line in lines]
    return [(output, golds.split("|"), float(right)) for output, golds, right in fields]


def test_best_subspan_em_agrees_with_pairs_judged_by_hand():
    pairs = _pairs()
    assert len(pairs) >= 200
    assert [pair for pair in pairs if best_subspan_em(pair[0], pair[1]) != pair[2]] == []
