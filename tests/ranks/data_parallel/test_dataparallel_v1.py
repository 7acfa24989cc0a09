"""The v1 functions on real ranks, compared with what their text promises."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import smdistributed.dataparallel
import smdistributed.dataparallel.exceptions as exceptions
import smdistributed.dataparallel.torch.distributed as dist
from opensmd.dataparallel import deprecation
from opensmd.environment import variables
from tests.support.ranks import RankPool

Pool = Callable[[int], RankPool]


def collectives() -> dict[str, Any]:
    """Every collective of the interface, sync and async, with its result."""
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([1.0, 2.0, -3.0]) * (rank + 1)
    found: dict[str, Any] = {"place": (rank, size, dist.get_local_rank())}
    for op in (None, *dist.ReduceOp):
        for async_op in (False, True):
            tensor = own.clone()
            handle = dist.all_reduce(tensor, op=op, async_op=async_op)
            assert (handle is not None) == async_op
            if handle is not None:
                handle.wait()
            found[f"all_reduce {op.name if op else None} {async_op}"] = tensor.tolist()
    for src in (None, size - 1):
        tensor = own.clone()
        assert (dist.broadcast(tensor) if src is None else dist.broadcast(tensor, src)) is None
        found[f"broadcast {src}"] = tensor.tolist()
    gathered = [torch.zeros(3) for _ in range(size)]
    assert dist.all_gather(gathered, own, dist.group.WORLD) is None
    found["all_gather"] = torch.stack(gathered).tolist()
    output = torch.zeros(size)
    dist.all_to_all_single(output_t=output, input_t=torch.arange(size) + 10.0 * rank)
    found["all_to_all"] = output.tolist()
    # rank r sends r + 1 elements to everyone
    output = torch.zeros(sum(range(1, size + 1)))
    splits = [other + 1 for other in range(size)]
    handle = dist.all_to_all_single(
        output, torch.full((size * (rank + 1),), float(rank)), splits, [rank + 1] * size, async_op=True
    )
    assert handle is not None
    handle.wait()
    found["uneven all_to_all"] = output.tolist()
    assert dist.barrier() is None
    handle = dist.barrier(dist.group.WORLD, async_op=True)
    assert handle is not None
    handle.wait()
    return found


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_gives_what_its_text_promises(pool: Pool, size: int) -> None:
    owns = torch.stack([torch.tensor([1.0, 2.0, -3.0]) * (rank + 1) for rank in range(size)])
    reduced = {
        None: owns.sum(0),
        dist.ReduceOp.SUM: owns.sum(0),
        dist.ReduceOp.AVERAGE: owns.mean(0),
        dist.ReduceOp.MIN: owns.amin(0),
        dist.ReduceOp.MAX: owns.amax(0),
    }
    for rank, found in enumerate(pool(size).run(collectives)):
        assert found.pop("place") == (rank, size, rank)
        for op, value in reduced.items():
            for async_op in (False, True):
                assert found.pop(f"all_reduce {op.name if op else None} {async_op}") == value.tolist()
        assert found.pop("broadcast None") == owns[0].tolist()
        assert found.pop(f"broadcast {size - 1}") == owns[-1].tolist()
        assert found.pop("all_gather") == owns.tolist()
        assert found.pop("all_to_all") == [rank + 10.0 * other for other in range(size)]
        assert found.pop("uneven all_to_all") == [
            float(other) for other in range(size) for _ in range(other + 1)
        ]
        assert not found


def refusals() -> list[str]:
    """The texts of what the interface refuses."""
    part = torch_dist.new_group([0])
    texts = []
    for call in (
        lambda: dist.all_reduce(torch.ones(1), group=part),
        lambda: dist.get_rank(group=None),
        lambda: dist.barrier("workers"),
        lambda: dist.all_reduce(torch.ones(1), op="sum"),
        lambda: dist.all_reduce(torch.ones(1), op=torch_dist.ReduceOp.PRODUCT),
        lambda: dist.init_process_group(group=part),
    ):
        try:
            call()
        except (exceptions.SMDDPGroupError, TypeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
    dist.barrier(torch_dist.group.WORLD)
    return texts


def test_only_world_and_the_four_reductions_are_accepted(pool: Pool) -> None:
    for texts in pool(2).run(refusals):
        assert [text.split(":")[0] for text in texts] == [
            "SMDDPGroupError",
            "SMDDPGroupError",
            "SMDDPGroupError",
            "TypeError",
            "TypeError",
            "SMDDPGroupError",
        ]
        assert "torch.distributed.new_group" in texts[0]
        assert "ReduceOp.AVERAGE" in texts[3]


def life_of_a_group() -> dict[str, Any]:
    """What the state functions say before and after initialisation."""
    said: dict[str, Any] = {"available": dist.is_available(), "before": dist.is_initialized()}
    for name in ("get_rank", "get_world_size", "get_local_rank", "barrier"):
        try:
            getattr(dist, name)()
        except exceptions.SMDDPNotInitializedError as error:
            said[name] = str(error)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dist.init_process_group("nccl", group=dist.group.WORLD)
    said["ignored"] = [str(warning.message) for warning in caught if warning.category is UserWarning]
    said["after"] = (dist.is_initialized(), torch_dist.get_backend(), dist.get_rank())
    dist.barrier()  # rank 0 takes the store with it, which the others may still be reading
    torch_dist.destroy_process_group()
    return said


def test_the_group_is_made_by_init_process_group_alone(pool: Pool) -> None:
    for rank, said in enumerate(pool(2).run(life_of_a_group, backend=None)):
        assert said["available"] is True
        assert said["before"] is False
        for name in ("get_rank", "get_world_size", "get_local_rank", "barrier"):
            assert f"{name} was called before init_process_group()" in said[name]
        assert said["ignored"] == ["the backend 'nccl' is ignored; the group uses 'smddp'"]
        assert said["after"] == (True, "smddp", rank)


def place_given_by_the_script(rank: int, address: str) -> None:
    dist.init_process_group(init_method=address, rank=rank, world_size=2)
    assert (dist.get_rank(), dist.get_local_rank()) == (rank, rank)
    dist.barrier()
    torch_dist.destroy_process_group()


def test_ranks_that_a_script_starts_itself_know_their_local_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    alone: dict[str, str] = {}
    variables.fill(alone)  # as the import of the library does before the script starts its ranks
    assert "LOCAL_RANK" not in alone
    for name, value in alone.items():
        monkeypatch.setenv(name, value)
    torch.multiprocessing.spawn(place_given_by_the_script, (f"file://{tmp_path / 'meeting'}",), nprocs=2)


def test_in_a_plain_local_run_the_library_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "OPENSMD_FILLED"):
        monkeypatch.delenv(name, raising=False)
    assert dist.is_available() is False
    assert dist.is_initialized() is False


def test_each_name_warns_once_and_names_its_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deprecation, "_warned", set())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            dist.is_initialized()
            dist.is_available()
    assert [warning.category for warning in caught] == [DeprecationWarning] * 2
    assert "torch.distributed.is_initialized" in str(caught[0].message)
    assert {warning.filename for warning in caught} == {__file__}


def test_a_reduction_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(AttributeError, match="no PRODUCT; the v1 interface has AVERAGE, SUM, MIN, MAX"):
        dist.ReduceOp.PRODUCT  # noqa: B018
    assert dist.ReduceOp["SUM"] is dist.ReduceOp.SUM


def test_the_names_answer_under_both_spellings() -> None:
    package = importlib.import_module("smdistributed.dataparallel.torch")
    for name in dist.__all__:
        assert getattr(package, name) is getattr(dist, name)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # noqa: B018
    assert smdistributed.dataparallel.__version__ == "1.8.0"
    assert issubclass(exceptions.SMDDPGroupError, exceptions.SMDDPError)
    one = importlib.import_module("smdistributed.dataparallel.torch.parallel")
    other = importlib.import_module("smdistributed.dataparallel.torch.parallel.distributed")
    assert one.DistributedDataParallel is other.DistributedDataParallel
