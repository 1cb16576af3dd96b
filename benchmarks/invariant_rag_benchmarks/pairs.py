"""Pairwise judging: two responses as segments, in both orders, and figures of a judge's position bias."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from invariant_rag_benchmarks.base import Case, Record, Scored

# The prompt of RewardBench's generative judges, which PINE (Appendix E.3) uses as well.
SYSTEM = (
    "Please act as an impartial judge and evaluate the quality of the responses provided by two AI assistants to the "
    "user question displayed below. You should choose the assistant that follows the user's instructions and answers "
    "the user's question better. Your evaluation should consider factors such as the helpfulness, relevance, accuracy, "
    "depth, creativity, and level of detail of their responses. Begin your evaluation by comparing the two responses "
    "and provide a short explanation. Avoid any position biases and ensure that the order in which the responses were "
    "presented does not influence your decision. Do not allow the length of the responses to influence your "
    "evaluation. Do not favor certain names of the assistants. Be as objective as possible. After providing your "
    'explanation, output your final verdict by strictly following this format: "[[A]]" if assistant A is better, '
    '"[[B]]" if assistant B is better.'
)
FIRST, SECOND = "gold first", "gold second"
_VERDICT = re.compile(r"\[\[([AB])\]\]")


def pair_cases(name: str, question: str, good: str, bad: str, group: str, *, explain: bool) -> list[Case]:
    """Return the two cases of a pair: the better response first, and second.

    Args:
        name: Id of the question.
        question: What the user asked.
        good: The better response.
        bad: The other one.
        group: Subset.
        explain: Whether the judge writes an explanation; else the output is the likelier verdict.
    """
    cases = []
    for variant, responses in ((FIRST, (good, bad)), (SECOND, (bad, good))):
        cases.append(
            Case(
                question=name,
                variant=variant,
                prefix=f"[User Question]\n{question}\n",
                segments=tuple(
                    f"\n[The Start of Assistant {letter}'s Answer]\n{text}\n[The End of Assistant {letter}'s Answer]\n"
                    for letter, text in zip("AB", responses, strict=True)
                ),
                suffix="",
                gold=("A" if variant == FIRST else "B",),
                query=question,
                system=SYSTEM,
                candidates=() if explain else ("[[A]]", "[[B]]"),
                group=group,
            )
        )
    return cases


def score_verdict(case: Case, output: str) -> Scored:
    """Score 1 for the better response, 0 for the other, 0.5 without a verdict (as in RewardBench).

    The verdict is in the last line that has one: an explanation may quote the format, or weigh [[A]] against [[B]]. A
    line with both is no verdict. The answer is `better`, `worse` or `none`, so that a consistent judge gives the same
    answer in both orders.
    """
    verdicts = next(filter(None, (set(_VERDICT.findall(line)) for line in reversed(output.split("\n")))), set())
    if len(verdicts) != 1:
        return Scored("none", {"accuracy": 0.5})
    right = verdicts == set(case.gold)
    return Scored("better" if right else "worse", {"accuracy": float(right)})


def judge_figures(records: Iterable[Record]) -> dict[str, float]:
    """Return consistency and preference fairness (Shi et al., arXiv 2406.07791) of pairs judged in both orders.

    `position_consistency` is the share of pairs with the same verdict in both orders. `first_preferred` and
    `second_preferred` are the shares of pairs whose verdict follows the position; `preference_fairness` is the second
    minus the first: -1 for a judge that always prefers the first position, 1 for the second, and 0 for one that favours
    neither. Pairs without a verdict in one of the orders are left out; `unreadable` is their share.
    """
    verdicts: dict[str, dict[str, str]] = defaultdict(dict)
    for record in records:
        verdicts[record["question"]][record["variant"]] = record["answer"]
    pairs = [(each[FIRST], each[SECOND]) for each in verdicts.values() if {FIRST, SECOND} <= set(each)]
    if not pairs:
        return {}
    both = [pair for pair in pairs if "none" not in pair]
    unreadable = 1 - len(both) / len(pairs)
    if not both:
        return {"unreadable": unreadable}
    first = sum(pair == ("better", "worse") for pair in both) / len(both)
    second = sum(pair == ("worse", "better") for pair in both) / len(both)
    return {
        "position_consistency": sum(one == other for one, other in both) / len(both),
        "first_preferred": first,
        "second_preferred": second,
        "preference_fairness": second - first,
        "unreadable": unreadable,
    }
