"""Which backward of a step may be its last."""

from __future__ import annotations

from opensmd.modelparallel.replicas.backward_count import Backwards


def test_the_last_of_equally_many_is_the_one_that_comes_last() -> None:
    backwards = Backwards(3)
    found = []
    for microbatch in (0, 0, 1, 1, 2, 2):
        backwards.add(microbatch)
        found.append(backwards.may_be_last(microbatch))
    assert found == [False, False, False, False, False, True]
    assert backwards.total == 6


def test_any_further_one_of_the_last_microbatch_may_be_the_last_too() -> None:
    backwards = Backwards(2)
    for microbatch in (0, 1):
        backwards.add(microbatch)
    assert backwards.may_be_last(1)
    backwards.add(1)
    assert backwards.may_be_last(1)


def test_each_of_a_single_microbatch_may_be_the_last() -> None:
    backwards = Backwards(1)
    for _ in range(2):
        backwards.add(0)
        assert backwards.may_be_last(0)


def test_the_first_one_may_be_the_last_where_earlier_microbatches_have_none() -> None:
    backwards = Backwards(2)
    backwards.add(1)
    assert backwards.may_be_last(1)
