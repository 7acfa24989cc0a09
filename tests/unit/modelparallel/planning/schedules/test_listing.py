"""Tables made by rules: all of a step is in them, in an order that can be followed and fits the memory."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from opensmd.modelparallel.planning.schedules.listing import RULES, Rule, listed
from opensmd.modelparallel.planning.schedules.playing import play
from opensmd.modelparallel.planning.schedules.tables import ChunkTimes, Table, in_a_v, looped

numbers = st.integers(1, 4).map(float)


@given(
    st.integers(1, 4),
    st.integers(1, 6),
    st.booleans(),
    st.sampled_from(RULES),
    st.integers(0, 6),
    st.data(),
)
def test_a_rule_does_everything_once_within_the_memory(
    ranks: int, microbatches: int, two: bool, rule: Rule, more: int, data: st.DataObject
) -> None:
    stages = in_a_v(ranks) if two else looped(ranks)
    chunks = len(stages[0])
    times = [
        ChunkTimes(*data.draw(st.tuples(numbers, numbers, st.sampled_from([0.0, 1.0, 2.0]))))
        for _ in range(ranks * chunks)
    ]
    most_kept = [chunks + more] * ranks
    rows = listed(stages, times, microbatches, most_kept, rule)
    if rows is None:  # what was taken in fills the memory of several chunks
        assert two
        return
    for own, row in zip(stages, rows, strict=True):
        assert Counter((action.kind, action.chunk) for action in row) == {
            (kind, chunk): microbatches for kind in "FBW" for chunk in range(len(own))
        }
        assert len(set(row)) == len(row)
    played = play(Table(str(rule), rows, stages), times)
    assert all(kept <= most for kept, most in zip(played.kept, most_kept, strict=True))
