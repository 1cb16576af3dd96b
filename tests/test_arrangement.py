"""Rows and runs against lists of (key, position in the row) written down from the definition of each method."""

from itertools import count, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.arrangement import Arrangement, Layout, Row, Run, arrange_rows
from invariant_rag.methods import RoToR, Sequential

layouts = st.lists(st.tuples(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 3)), max_size=3).flatmap(
    lambda rest: st.builds(
        Layout,
        st.integers(0, 3).map(lambda first: (first, *(text for _, text in rest))),
        st.just(tuple(tuple(lengths) for lengths, _ in rest)),
    )
)


def blocks(layout):
    """The prompt as (tokens of a text, tokens of each segment of the set behind it), counted one by one."""
    counter, result = count(), []
    for text, lengths in zip(layout.texts, (*layout.sets, ()), strict=True):
        tokens = [next(counter) for _ in range(text)]
        result.append((tokens, [[next(counter) for _ in range(length)] for length in lengths]))
    return result


def plain_keys(token):
    return {key: token - key for key in range(token + 1)}


def brute_force(layout, rows):
    """For each token, the keys it sees and how far behind it, by writing its row out from far to near."""
    seen_by_token, before = [], []  # everything before the block, where it lies
    for (text, segments), order in zip(blocks(layout), (*rows, ()), strict=True):
        seen_by_token += map(plain_keys, text)
        before += text
        for segment, others in zip(segments, order, strict=True):
            row = before + [key for other in others for key in segments[other]]
            for token in segment:
                position = {key: at for at, key in enumerate(row)}
                reader = position[token]
                seen_by_token.append({key: reader - at for key, at in position.items() if at <= reader})
        before += [key for segment in segments for key in segment]
    return seen_by_token


def read_off(arrangement):
    """The same from rows and runs: a key at `k` with shift `s` is seen as if it lay at `k + s`."""
    seen_by_token = []
    for row in arrangement.rows:
        assert row.queries.start == len(seen_by_token), "rows cover the prompt, in memory order"
        for token in range(row.queries.start, row.queries.stop):
            seen = [(key, token - key - run.shift) for run in row.runs for key in range(run.start, run.stop)]
            seen = [(key, distance) for key, distance in seen if distance >= 0]
            assert len(seen) == len(dict(seen)), "a key is in a row once"
            seen_by_token.append(dict(seen))
    return seen_by_token


RULES = {
    "ring": lambda i, n: [*range(i + 1, n), *range(i + 1)],  # RoToR
    "line": lambda i, n: [*range(i + 1)],  # the plain model
    "alone": lambda i, n: [i],
}


def rows_of(layout, rule):
    return [[RULES[rule](i, len(each)) for i in range(len(each))] for each in layout.sets]


@st.composite
def rows_that_see(draw, layout):
    """For each segment, itself behind any others in any order; or all segments by one of the rules."""
    if rule := draw(st.none() | st.sampled_from(list(RULES))):
        return rows_of(layout, rule)
    rows = []
    for lengths in layout.sets:
        others = [[j for j in range(len(lengths)) if j != i] for i in range(len(lengths))]
        seen = [draw(st.lists(st.sampled_from(each), unique=True)) if each else [] for each in others]
        rows.append([[*each, i] for i, each in enumerate(seen)])
    return rows


@given(layouts, st.data())
def test_rows_are_their_definition_and_merged_only_into_rows_that_are_truly_plain(layout, data):
    rotor, sequential = RoToR().arrange(layout), Sequential().arrange(layout)
    for method, rule in ((rotor, "ring"), (sequential, "line")):
        assert method.rows == arrange_rows(layout, rows_of(layout, rule)).rows
    assert rotor.is_plain == (max(layout.counts, default=0) < 2), "one segment with tokens per set, or none"
    assert sequential.is_plain
    rows = data.draw(rows_that_see(layout))
    arrangement, expected = arrange_rows(layout, rows), brute_force(layout, rows)
    assert read_off(arrangement) == expected
    for row in arrangement.rows:
        of_row = range(row.queries.start, row.queries.stop)
        truly = all(expected[token] == plain_keys(token) for token in of_row)
        assert truly or not row.is_causal
        assert of_row or row is arrangement.rows[-1]
        if of_row:
            assert all(run.start < run.stop for run in row.runs)
            assert row.runs[-1].stop == row.queries.stop, "the last run ends with the span itself"
            apart = [(one.stop, one.shift) != (two.start, two.shift) for one, two in pairwise(row.runs)]
            assert all(apart), "two runs that could be one"
    assert arrangement.is_plain == all(row.is_causal for row in arrangement.rows)
    assert not any(one.is_causal and two.is_causal for one, two in pairwise(arrangement.rows))
    assert arrangement.positions == tuple(range(layout.length))
    shared = arrange_rows(layout, rows_of(layout, "alone"), slots="shared").positions
    plain = Arrangement(layout, (Row(layout.text_spans[0], (Run(0, layout.texts[0], 0),)),), shared)
    assert plain.is_plain == (shared == arrangement.positions), "other positions are not those of the plain model"
    with pytest.raises(ValueError, match="zip"):
        RoToR().arrange(Layout((*layout.texts, 1), layout.sets))
