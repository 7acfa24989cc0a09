"""smp.save and smp.load on real processes: any partition count, plain PyTorch, damage, kills."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from opensmd.modelparallel import communicate
from opensmd.modelparallel.checkpoint import save_load
from opensmd.modelparallel.checkpoint.resume_folder import resume_from_checkpoint
from opensmd.modelparallel.checkpoint.save_folder import save_checkpoint
from opensmd.modelparallel.checkpoint.save_load import load, save
from opensmd.modelparallel.exceptions import PeerCheckpointError, SMPCheckpointError
from opensmd.modelparallel.optimizer import DistributedOptimizer
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from tests.support.partitioned import restart, split
from tests.support.ranks import RankPool, run_once


def module() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 2))


def trained(*, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Plain PyTorch after some steps with known gradients."""
    model = module()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return model, optimizer


def wrapped(model: nn.Module, optimizer: Any, *, at_once: bool = True) -> tuple[ModelState, Any]:
    outer = ModelState(model)
    state.model = outer
    inner = DistributedOptimizer(optimizer)
    if at_once:
        split(outer)
    return outer, inner


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def save_all(folder: str) -> None:
    """Partial, full and folder checkpoints of the state after three steps."""
    restart(partitions=dist.get_world_size())
    model, optimizer = wrapped(*trained(steps=3))
    parts = {"model": model.local_state_dict(), "opt": optimizer.local_state_dict(), "epoch": 7}
    save(parts, f"{folder}/part.pt", partial=True)
    assert Path(f"{folder}/part.pt_{state.rank}").is_file()
    full = {"model": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 7}
    save(full, f"{folder}/full.pt", partial=False)
    save_checkpoint(folder, "t1", partial=True, model=model, optimizer=optimizer, user_content={"epoch": 7})
    save_checkpoint(folder, "whole", partial=False, model=model, user_content={"epoch": 8})
    save_checkpoint(folder, "t2", model=model, optimizer=optimizer, user_content={"epoch": 9})


def load_all(folder: str) -> None:
    """Every kind of checkpoint, before and after partitioning, gives the state after three steps."""
    plain, plain_optimizer = trained(steps=3)
    expected, expected_optimizer = plain.state_dict(), plain_optimizer.state_dict()
    for kind in ("part.pt", "full.pt", "plain.pt", "t1", "newest"):
        for at_once in (True, False):
            restart(partitions=dist.get_world_size())
            model, optimizer = wrapped(*trained(steps=1), at_once=at_once)
            if kind == "t1":
                assert resume_from_checkpoint(folder, tag="t1") == {"epoch": 7}
            elif kind == "newest":
                assert resume_from_checkpoint(folder) == {"epoch": 9}
            else:
                found = load(f"{folder}/{kind}", partial=kind == "part.pt")
                assert found["epoch"] == 7
                model.load_state_dict(found["model"])
                optimizer.load_state_dict(found["opt"])
            if not at_once:
                split(model)
            assert same(dict(model.state_dict()), dict(expected)), (kind, at_once)
            assert same(optimizer.state_dict(), expected_optimizer), (kind, at_once)
    restart(partitions=dist.get_world_size())
    model, _ = wrapped(*trained(steps=1))
    assert resume_from_checkpoint(folder, tag="whole", partial=False) == {"epoch": 8}
    assert same(dict(model.state_dict()), dict(expected))
    for name in ("load_optimizer", "load_optimizer_states"):
        restart(partitions=dist.get_world_size())
        _, optimizer = wrapped(*trained(steps=1))
        resume_from_checkpoint(folder, tag="t1", **{name: False})
        assert same(optimizer.state_dict(), trained(steps=1)[1].state_dict()), name


def test_checkpoints_of_any_partition_count_load_at_any_other_and_in_plain_pytorch(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    plain, optimizer = trained(steps=3)
    for size in (1, 2, 3):
        folder = tmp_path / str(size)
        folder.mkdir()
        pool(size).run(save_all, str(folder), backend="gloo")
        full = torch.load(folder / "full.pt")
        assert same(dict(full["model"]), dict(plain.state_dict()))
        assert same(full["opt"], optimizer.state_dict())
        assert not list(folder.glob(".*")), "nothing is left beside the files"
        torch.save(
            {"model": plain.state_dict(), "opt": optimizer.state_dict(), "epoch": 7}, folder / "plain.pt"
        )
    for saved, loading in [(1, 2), (2, 2), (3, 2), (2, 3), (2, 1), (3, 1)]:
        pool(loading).run(load_all, str(tmp_path / str(saved)), backend="gloo")


def damage(path: Path) -> None:
    """Change one byte in the middle of a tensor's data."""
    content = bytearray(path.read_bytes())
    content[content.index(b"\x01\x02\x03\x04")] ^= 0xFF
    path.write_bytes(content)


def check_damage(folder: str) -> None:
    restart(partitions=2)
    me, name = state.rank, f"{folder}/x.pt"
    data = torch.tensor([1, 2, 3, 4] * 100, dtype=torch.uint8)
    path = Path(f"{name}_{me}")

    def fresh() -> None:
        save({"data": data, "me": me}, name)
        communicate.barrier()

    def both_raise(match: str, error: type[Exception] = SMPCheckpointError) -> None:
        communicate.barrier()  # the files are as they shall be
        with pytest.raises(error, match=match):
            load(name)
        communicate.barrier()

    fresh()
    assert load(name)["me"] == me
    communicate.barrier()
    if me == 1:
        damage(path)
    if me == 1:
        both_raise("is damaged: its content does not have the checksum")
    else:
        both_raise("mp_rank 1: SMPCheckpointError", PeerCheckpointError)  # a consequence, as smdrun shows it
    fresh()
    if me == 1:
        path.write_bytes(path.read_bytes()[:500])
    both_raise("is damaged, incomplete, or was not written by torch.save")
    fresh()
    if me == 0:
        path.write_text("not a checkpoint at all")
    both_raise("was not written by torch.save")
    fresh()
    if me == 1:
        path.unlink()
    communicate.barrier()
    both_raise(r"parts \[1\] of 2 are missing")
    fresh()
    if me == 0:
        path.unlink()
    communicate.barrier()
    with pytest.raises(FileNotFoundError, match="there is no partial checkpoint"):
        load(name)
    communicate.barrier()
    if me == 0:
        torch.save({"a": 1}, name)
    communicate.barrier()
    with pytest.raises(FileNotFoundError, match=r"but a full one, .*partial=False"):
        load(name)
    with pytest.raises(FileNotFoundError, match=r"there is no checkpoint .*other\.pt"):
        load(f"{folder}/other.pt", partial=False)
    with pytest.raises(TypeError, match=r"must be a file name \(str\)"):
        load(Path(name))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"smp.load takes no v3: .* \(v3 among it\) the files say"):
        load(name, v3=True)
    communicate.barrier()
    with pytest.raises(
        TypeError, match=r"obj\['object'\] is of type fractions.Fraction, which would not load"
    ):
        save({"data": data, "object": Fraction(1, 3)}, name)
    communicate.barrier()
    save({"data": data, "object": Fraction(1, 3)}, name, weights_only=False)
    both_raise("asks for fractions.Fraction, which is neither a tensor")
    assert load(name, weights_only=False)["object"] == Fraction(1, 3)
    previous = load(name, weights_only=False)
    communicate.barrier()
    bad = {"data": (lambda: 0) if me == 1 else data}
    with pytest.raises(
        Exception, match=r"obj\['data'\] is the function .*lambda.* cannot be saved|is untouched: mp_rank 1"
    ):
        save(bad, name)
    communicate.barrier()
    assert same(load(name, weights_only=False), previous), "a save that failed on one rank changes nothing"
    save({"me": me}, f"{folder}/y", v3=True)
    assert load(f"{folder}/y")["me"] == me


@pytest.mark.newest
def test_damaged_foreign_and_missing_files_raise_on_all_ranks(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(check_damage, str(tmp_path), backend="gloo")


def save_generations(folder: str, die_at: tuple[str, int] | None) -> None:
    """Save generation 1, then 2; the rank told to die kills itself at one moment of the second save."""
    restart(partitions=2)
    name = f"{folder}/g.pt"

    def parts(generation: int) -> dict[str, Any]:
        return {
            "generation": generation,
            "rank": state.rank,
            "data": torch.full((50_000,), float(generation)),
        }

    save(parts(1), name)
    communicate.barrier()
    if die_at is not None:
        moment, victim = die_at
        original = getattr(save_load, moment)

        def deadly(*args: Any, **kwargs: Any) -> Any:
            if state.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(save_load, moment, deadly)
    save(parts(2), name)


def load_generation(folder: str) -> tuple[int, int]:
    restart(partitions=2)
    found = load(f"{folder}/g.pt")
    assert found["rank"] == state.rank
    assert bool((found["data"] == found["generation"]).all())
    communicate.barrier()
    save(found, f"{folder}/g.pt")
    again = load(f"{folder}/g.pt")
    assert again["generation"] == found["generation"]
    return found["generation"], len(list(Path(folder).glob(".*")))


@pytest.mark.parametrize(
    ("moment", "victim", "generation"),
    [("write_aside", 1, 1), ("commit", 0, 2), ("commit", 1, 2)],
)
def test_a_rank_killed_in_any_phase_of_saving_leaves_one_whole_checkpoint(
    pool: Callable[[int], RankPool], tmp_path: Path, moment: str, victim: int, generation: int
) -> None:
    outcomes = run_once(2, save_generations, str(tmp_path), (moment, victim), backend="gloo")
    assert outcomes[victim].kind == "died"
    found = pool(2).run(load_generation, str(tmp_path), backend="gloo")
    assert found == [(generation, 0)] * 2
