"""Rows and runs against lists of (key, position in the row) written down from the definition of each method."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from invariant_rag.arrangement import Layout, Row, Run, Span, arrange_rows
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
    counter, result = iter(range(10_000)), []
    for text, lengths in zip(layout.texts, (*layout.sets, ()), strict=True):
        tokens = [next(counter) for _ in range(text)]
        result.append((tokens, [[next(counter) for _ in range(length)] for length in lengths]))
    return result


def brute_force(layout, rows, *, stacked):
    """For each token, the keys it sees and how far behind it, by writing its row out from far to near."""
    seen_by_token = []
    before = []  # everything before the block, where it lies
    for (text, segments), order in zip(blocks(layout), (*rows, ()), strict=True):
        seen_by_token += [{key: token - key for key in range(token + 1)} for token in text]
        before += text
        for segment, others in zip(segments, order, strict=True):
            row = before + [key for other in others for key in segments[other]]
            for token in segment:
                position = {key: at for at, key in enumerate(row)} if stacked else {key: key for key in row}
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
            keys = {}
            for run in row.runs:
                for key in range(run.start, run.stop):
                    if key + run.shift <= token:
                        assert key not in keys, "a key is in a row once"
                        keys[key] = token - key - run.shift
            seen_by_token.append(keys)
    return seen_by_token


def ring(layout):
    """Row of segment i of RoToR: i+1..n-1, 0..i."""
    return [[list(range(i + 1, len(each))) + list(range(i + 1)) for i in range(len(each))] for each in layout.sets]


def line(layout):
    """Row of segment i of the plain model: 0..i."""
    return [[list(range(i + 1)) for i in range(len(each))] for each in layout.sets]


def alone(layout):
    """Row of segment i where segments do not see each other."""
    return [[[i] for i in range(len(each))] for each in layout.sets]


@given(layouts)
def test_sequential_is_its_definition_and_always_plain(layout):
    arrangement = Sequential().arrange(layout)
    assert read_off(arrangement) == brute_force(layout, line(layout), stacked=True)
    assert arrangement.is_plain
    assert len(arrangement.rows) <= 1, "plain rows are merged into one"


@given(layouts)
def test_segments_side_by_side_share_their_positions(layout):
    arrangement = arrange_rows(layout, alone(layout), slots="shared")
    at, start = [], 0
    for text, segments in blocks(layout):
        at += [start + offset for offset in range(len(text))]
        start += len(text)
        at += [start + offset for segment in segments for offset in range(len(segment))]
        start += max(map(len, segments), default=0)
    assert list(arrangement.positions) == at
    assert read_off(arrangement) == brute_force(layout, alone(layout), stacked=False)


@given(layouts, st.data())
def test_any_rows_are_their_definition(layout, data):
    rows = []
    for lengths in layout.sets:
        orders = []
        for i in range(len(lengths)):
            others = [j for j in range(len(lengths)) if j != i]
            seen = data.draw(st.lists(st.sampled_from(others), unique=True)) if others else []
            orders.append([*seen, i])
        rows.append(orders)
    stacked = data.draw(st.booleans())
    arrangement = arrange_rows(layout, rows, slots="stacked" if stacked else "natural")
    if stacked:
        assert read_off(arrangement) == brute_force(layout, rows, stacked=True)
    apart = arrange_rows(layout, alone(layout), slots="stacked" if stacked else "natural")
    assert read_off(apart) == brute_force(layout, alone(layout), stacked=stacked)
    assert apart.positions == tuple(range(layout.length))


@given(layouts)
def test_rotor_is_its_definition_in_rows_of_the_ring(layout):
    arrangement = RoToR().arrange(layout)
    assert read_off(arrangement) == brute_force(layout, ring(layout), stacked=True)
    assert arrangement.rows == arrange_rows(layout, ring(layout)).rows
    assert arrangement.is_plain == (max(layout.counts, default=0) < 2), "one segment with tokens per set, or none"
    for row in arrangement.rows:
        assert len(row.queries) or row is arrangement.rows[-1]
        if not len(row.queries):
            continue
        assert all(run.start < run.stop for run in row.runs)
        assert row.runs[-1].stop == row.queries.stop, "the last run ends with the span itself"
        for one, two in zip(row.runs, row.runs[1:], strict=False):
            assert (one.stop, one.shift) != (two.start, two.shift), "two runs that could be one"


def test_rotor_on_a_worked_example():
    """Prefix of 2, segments of 3, 1 and 2 tokens, suffix of 1."""
    rows = RoToR().arrange(Layout((2, 1), ((3, 1, 2),))).rows
    assert rows == (
        Row(Span(0, 2), (Run(0, 2, 0),)),
        Row(Span(2, 5), (Run(0, 2, -3), Run(5, 8, -6), Run(2, 5, 0))),
        Row(Span(5, 6), (Run(0, 2, -2), Run(6, 8, -6), Run(2, 6, 0))),
        Row(Span(6, 9), (Run(0, 9, 0),)),
    )
    assert [row.length for row in rows] == [2, 8, 8, 9]


@given(layouts, st.sampled_from([ring, line, alone]))
def test_rows_are_merged_only_into_rows_that_are_truly_plain(layout, rule):
    rows = rule(layout)
    arrangement = arrange_rows(layout, rows)
    expected = brute_force(layout, rows, stacked=True)
    for row in arrangement.rows:
        truly = all(
            expected[token] == {key: token - key for key in range(token + 1)}
            for token in range(row.queries.start, row.queries.stop)
        )
        if row.is_causal:
            assert truly
    assert arrangement.is_plain == all(row.is_causal for row in arrangement.rows)
    neighbours = zip(arrangement.rows, arrangement.rows[1:], strict=False)
    assert not any(one.is_causal and two.is_causal for one, two in neighbours)


@given(layouts)
def test_spans_lie_one_behind_the_other_and_cover_the_prompt(layout):
    spans = [(list(range(text.start, text.stop)), [list(range(s.start, s.stop)) for s in segments])
             for text, segments in zip(layout.text_spans, (*layout.set_spans, ()), strict=True)]  # fmt: skip
    assert spans == blocks(layout)
    with pytest.raises(ValueError, match="zip"):
        RoToR().arrange(Layout((*layout.texts, 1), layout.sets))
