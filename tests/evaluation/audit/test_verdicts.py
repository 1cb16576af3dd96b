"""Claims about verdicts: sentences in the manner of judges that explain themselves, and which response they name."""

from __future__ import annotations

import pytest

from invariant_rag import Segment
from invariant_rag.evaluation.audit.verdicts import parse_verdict

SEGMENTS = [Segment("one text"), Segment("another text")]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Output (a) is short and wrong. Therefore, Output (a) is better.", 0),
        ("Output (b) is better. Output (a) contains more information than the instruction asks for.", 1),
        ("I think Output (b) is better at first sight. Thus, Output (a) is the better output.", 0),
        ("One judge says Output (a) is better, another that Output (b) is better. Overall, Output (b) is better.", 1),
        ("Output (a) is better.\n\nOutput (b) is better because it is short.", None),
        ("I prefer (b).", 1),
        ("The better response is (a).", 0),
        ("Output (a)", 0),
        ("The format is [[A]] or [[B]].\n[[B]]", 1),
        ("[[A]] or [[B]]", None),
        ("[[B]] is wrong.\nFinal verdict: [[A]]", 0),
        ("Therefore, **Output (a)** is better.", 0),
        ("__Therefore__, *Output* `(b)` is better.", 1),
        (r"The verdict is $\boxed{B}$.", 1),
        (r"\boxed{\text{(a)}}", 0),
    ],
)
def test_a_judge_that_explains_itself_is_read_by_its_conclusion(answer: str, expected: int | None) -> None:
    assert parse_verdict(answer, SEGMENTS) == expected
