"""The warning to step functions that add gradients up."""

from __future__ import annotations

import warnings

import pytest

from opensmd.modelparallel.runtime.backward.sum_warning import SumWarning


def test_it_comes_once_and_says_how_many_microbatches_are_added_up() -> None:
    warning = SumWarning(is_due=True)
    with pytest.warns(UserWarning, match="adds up the gradients of the 4 microbatches"):
        warning.plain_backward(4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warning.plain_backward(4)


@pytest.mark.parametrize(("is_due", "microbatches"), [(False, 4), (True, 1)])
def test_where_the_sum_is_meant_nothing_is_said(is_due: bool, microbatches: int) -> None:
    warning = SumWarning(is_due=is_due)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warning.plain_backward(microbatches)
        warning.plain_backward(8)  # what was meant once is meant later
