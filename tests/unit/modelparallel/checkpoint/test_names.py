"""Names of the files of checkpoints."""

from __future__ import annotations

import pytest

from opensmd.modelparallel.checkpoint.names import (
    PartName,
    partial_name,
    parts_of,
    pending_name,
    pending_of,
    ranks_sharing,
)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ({"pp_rank": 1}, "model_1.pt"),
        ({"pp_rank": 1, "tp_rank": 2}, "model_1_2.pt"),
        ({"pp_rank": 1, "tp_rank": 2, "rdp_rank": 0}, "model_1_2_0.pt"),
        ({"pp_rank": 1, "rdp_rank": 0}, "model_1_0_0.pt"),
    ],
)
def test_a_part_is_found_under_the_name_that_it_was_given(ranks: dict[str, int], name: str) -> None:
    assert partial_name("model", **ranks, suffix=".pt") == name  # type: ignore[arg-type]
    (part,) = parts_of("model", [name], suffix=".pt")
    assert (part.file, part.stage, part.tensor, part.save) == (name, 1, ranks.get("tp_rank", 0), None)
    assert part.numbers == len(name.split("_")) - 1


def test_only_parts_of_the_checkpoint_itself_are_found() -> None:
    others = [
        "model.pt",
        "model_1.pt.tmp",
        "model_x_1.pt",
        "a_model_1.pt",
        "model_1_0_1.pt",
        "model_1",
        "m_1.pt",
    ]
    assert parts_of("model", others, suffix=".pt") == []
    assert [part.file for part in parts_of("m.x", ["m.x_0", "max_0"])] == ["m.x_0"], "a dot is a dot"


def test_parts_that_wait_for_their_names_are_found_with_their_save() -> None:
    waiting = pending_name("model_0_1.pt", "abc123")
    assert parts_of("model", [waiting], suffix=".pt") == [
        PartName(file=waiting, numbers=2, stage=0, tensor=1, save="abc123")
    ]
    present = [
        waiting,
        pending_name("model_0_1.pt", "def"),
        pending_name("model_0_11.pt", "abc"),
        "model_0_1.pt",
    ]
    assert pending_of("model_0_1.pt", present) == present[:2]


def test_a_replica_finds_its_own_parts_and_otherwise_those_of_the_first() -> None:
    present = ["f_0_0_0", "f_0_0_1", "f_1_0_0", "f_1_0_1"]
    for replica, found in ((0, "f_0_0_0 f_1_0_0"), (1, "f_0_0_1 f_1_0_1"), (2, "f_0_0_0 f_1_0_0")):
        assert [part.file for part in parts_of("f", present, replica=replica)] == found.split()
    assert [part.file for part in parts_of("f", ["f_0", "f_0_0_1"])] == ["f_0"]


def test_the_names_tell_how_many_ranks_shared_tensors() -> None:
    assert ranks_sharing(parts_of("f", ["f_0", "f_1"])) == 1
    assert ranks_sharing(parts_of("f", ["f_0_0", "f_0_1", "f_0_2"])) == 3
