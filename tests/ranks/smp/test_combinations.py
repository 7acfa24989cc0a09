"""Kinds of combinations that no other file has; ``python -m tests.combinations`` runs all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.combinations.checkpoints import KINDS, rest_of, resumed, saved
from tests.combinations.compare import differences
from tests.combinations.training import Trained, alone, shared_out
from tests.combinations.ways import Degrees, all_degrees
from tests.support.ranks import RankPool, run_once

Pools = Callable[[int], RankPool]

Case = tuple[str, Degrees]
OF_FOUR = [("fp16", Degrees(stages=2, sharded=2)), ("bf16", Degrees(tensor=2, sharded=2))]
OF_EIGHT = [
    ("bf16", Degrees(stages=2, tensor=2, sharded=2)),
    ("fp32", Degrees(stages=2, tensor=2, sharded=2)),
    ("fp32", Degrees(stages=4, sharded=2)),
    ("fp32", Degrees(tensor=2, copies=2, sharded=2)),
]


RESUMED = [
    Degrees(stages=2, sharded=2),
    Degrees(tensor=2, copies=2),
    Degrees(copies=2, sharded=2),
    Degrees(stages=2, tensor=2),
]


def trained(cases: list[Case]) -> list[Trained]:
    return [shared_out("MLP", *case) for case in cases]


def require_equal(cases: list[Case], found: list[Trained]) -> None:
    for (precision, degrees), training in zip(cases, found, strict=True):
        lines = list(differences(training, alone("MLP", precision), precision))
        assert not lines, (degrees, lines)


def test_stages_and_slices_whose_parameters_are_sharded_train_in_16_bits(pool: Pools) -> None:
    for found in pool(4).run(trained, OF_FOUR):
        require_equal(OF_FOUR, found)


def test_eight_ranks_share_a_model_out_in_three_ways_at_once() -> None:
    for outcome in run_once(8, trained, OF_EIGHT):
        assert outcome.kind == "value", outcome.text
        require_equal(OF_EIGHT, outcome.value)


def goes_on(top: Path) -> list[tuple[Degrees, Degrees, str, Trained]]:
    """From what was saved at some degrees to the next, and to those after them."""
    folders = {degrees: top / str(number) for number, degrees in enumerate(RESUMED)}
    for degrees, folder in folders.items():
        folder.mkdir(exist_ok=True)
        saved("MLP", "fp16", degrees, folder)
    found = []
    for number, degrees in enumerate(RESUMED):
        for other in (RESUMED[number - 1], RESUMED[number - 2]):
            for kind in KINDS:
                found.append((other, degrees, kind, resumed("MLP", "fp16", degrees, folders[other], kind)))
    return found


def test_what_is_saved_at_some_degrees_goes_on_at_others(pool: Pools, tmp_path: Path) -> None:
    wanted = rest_of("MLP", "fp16")
    for found in pool(4).run(goes_on, tmp_path):
        for source, degrees, kind, training in found:
            lines = list(differences(training, wanted, "fp16"))
            assert not lines, (source, degrees, kind, lines)


def test_what_is_apart_is_named() -> None:
    wanted = alone("MLP", "bf16")
    plain = alone("MLP", "fp32")
    assert not list(differences(wanted, wanted, "bf16"))
    lines = "\n".join(differences(wanted, plain, "fp32"))
    assert "loss of step 0: " in lines and "gradient 0.weight: apart" in lines


def test_all_combinations_of_degrees_fit_the_processes() -> None:
    degrees = list(all_degrees(8))
    assert len(degrees) == len(set(degrees)) == 19
    assert max(one.ranks for one in degrees) == 8
