"""The pages of benchmarks show parts of tables."""

from __future__ import annotations

import pytest
from benchmarks.report import BLOCK, with_columns

TABLE = "| size | smddp | gloo |\n| --- | --- | --- |\n| 4 B | 4 µs | 166 µs |\n\n2 ranks, medians.\n"


def test_a_page_may_show_some_columns_of_a_table_in_an_order_of_its_own() -> None:
    assert with_columns(TABLE, ["gloo", "size"]) == (
        "| gloo | size |\n| --- | --- |\n| 166 µs | 4 B |\n\n2 ranks, medians.\n"
    )


def test_a_column_that_a_table_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="MPI"):
        with_columns(TABLE, ["MPI"])


def test_a_block_says_which_columns_it_shows() -> None:
    block = BLOCK.search("text\n<!-- results floor-2 columns: size; gloo / smddp -->\nold\n<!-- end -->\n")
    assert block is not None
    assert (block["name"], block["columns"]) == ("floor-2", "size; gloo / smddp")
