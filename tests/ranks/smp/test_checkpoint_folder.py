"""smp.save_checkpoint and smp.resume_from_checkpoint: what scripts put into them, and what is refused."""

from __future__ import annotations

import argparse
import copy
import threading
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import smdistributed.modelparallel.torch as smp
from opensmd.modelparallel import communicate
from opensmd.modelparallel.checkpoint.conversion.whole_model import (
    get_full_state_dict_from_sharded_data_parallel_checkpoint as full_state_dict,
)
from opensmd.modelparallel.checkpoint.files import Caller, commit, write_aside
from opensmd.modelparallel.checkpoint.resume_folder import resume_from_checkpoint
from opensmd.modelparallel.checkpoint.save_folder import save_checkpoint
from opensmd.modelparallel.checkpoint.save_load import load, save
from opensmd.modelparallel.checkpoint.saving import background, snapshot
from opensmd.modelparallel.checkpoint.seal import Label
from opensmd.modelparallel.exceptions import PeerCheckpointError, SMPCheckpointError
from opensmd.modelparallel.init import shutdown
from opensmd.modelparallel.optimizer import DistributedOptimizer
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from tests.support.partitioned import restart, split
from tests.support.ranks import RankPool


def wrapped(*, width: int = 4, at_once: bool = True) -> tuple[ModelState, Any]:
    torch.manual_seed(width)
    plain = nn.Sequential(nn.Linear(3, width), nn.Linear(width, width), nn.Linear(width, 2))
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.1)
    for parameter in plain.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain_optimizer.step()
    model = ModelState(plain)
    state.model = model
    optimizer = DistributedOptimizer(plain_optimizer)
    if at_once:
        split(model)
    return model, optimizer


def save_what_scripts_save(folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    restart(partitions=2)
    model, optimizer = wrapped()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.float64(0.9) ** step)
    scheduler.step()
    content = {
        "cli_args": argparse.Namespace(lr=0.1, output_dir=Path("/opt/ml")),
        "model_config": transformers.GPT2Config(n_layer=2),
        "lr_scheduler": scheduler.state_dict(),
        "num_params": np.int64(12),
        "start_train_path_index": 3,
    }
    save_checkpoint(folder, "step_10", model=model, optimizer=optimizer, user_content=content)
    found = resume_from_checkpoint(folder)
    assert found["cli_args"] == content["cli_args"]
    assert found["model_config"].to_dict() == content["model_config"].to_dict()
    assert found["lr_scheduler"] == content["lr_scheduler"]
    assert type(found["num_params"]) is np.int64
    save_checkpoint(folder, "last", partial=False, model=model, user_content=content)
    assert resume_from_checkpoint(folder, partial=False)["start_train_path_index"] == 3


def test_what_public_scripts_give_as_user_content_comes_back(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(save_what_scripts_save, str(tmp_path), backend="gloo")


def refuse_on_all(folder: str) -> None:
    restart(partitions=2)
    model, optimizer = wrapped()
    save_checkpoint(folder, "a", model=model, optimizer=optimizer, user_content={"epoch": 1})
    for partial in (True, False):
        content = {"epoch": 2, "loss": Fraction(1, 3)}
        if state.rank == 0:
            with pytest.raises(
                TypeError, match=r"^smp.save_checkpoint: user_content\['loss'\] is of type fract"
            ):
                save_checkpoint(folder, "b", partial=partial, model=model, user_content=content)
        else:
            with pytest.raises(PeerCheckpointError, match=r"mp_rank 0: TypeError: .*user_content\['loss'\]"):
                save_checkpoint(folder, "b", partial=partial, model=model, user_content=content)
        communicate.barrier()
        assert resume_from_checkpoint(folder) == {"epoch": 1}, "the newest is the one before"
    content = {"loss": Fraction(1, 3)}
    save_checkpoint(folder, "c", model=model, user_content=content, weights_only=False)
    with pytest.raises(SMPCheckpointError, match=r"asks for fractions\.Fraction"):
        resume_from_checkpoint(folder)
    assert resume_from_checkpoint(folder, weights_only=False) == content


def test_content_that_would_not_load_is_refused_on_all_ranks_when_it_is_saved(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(refuse_on_all, str(tmp_path), backend="gloo")


def refuse_beside_replicas(folder: str) -> None:
    """A replica that saves nothing hears of the failure of the one that does."""
    restart(partitions=1, ddp=True)
    model = ModelState(nn.Linear(2, 2))
    split(model)
    expected = TypeError if state.rank == 0 else PeerCheckpointError
    with pytest.raises(expected, match=r"user_content\['x'\]"):
        save_checkpoint(folder, "b", model=model, user_content={"x": Fraction(1, 3)})
    communicate.barrier()


def test_other_replicas_do_not_wait_for_a_save_that_failed(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(refuse_beside_replicas, str(tmp_path), backend="gloo")


def check_newest(folder: str) -> None:
    restart(partitions=2)
    model, optimizer = wrapped()
    newest = Path(folder) / "newest"
    save_checkpoint(folder, "step_1", model=model, optimizer=optimizer, user_content=1)
    assert newest.read_text() == "step_1_partial\n"
    assert (Path(folder) / newest.read_text().strip()).is_dir()
    with pytest.raises(
        SMPCheckpointError, match=r"'step_1', is a partial one, and partial=False asks for a full"
    ):
        resume_from_checkpoint(folder, partial=False)
    save_checkpoint(folder, "whole", partial=False, model=model, user_content=2)
    assert newest.read_text() == "whole\n"
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        SMPCheckpointError, match=r"'whole', is a full one, and partial=True asks for a partial"
    ):
        resume_from_checkpoint(folder)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert resume_from_checkpoint(folder, tag="step_1") == 1
    assert resume_from_checkpoint(folder, partial=False) == 2
    with pytest.raises(
        FileNotFoundError, match=r"no partial checkpoint .*whole_partial; whole is of a full one"
    ):
        resume_from_checkpoint(folder, tag="whole")
    with pytest.raises(
        FileNotFoundError, match=r"no full checkpoint .*step_1; step_1_partial is a partial one"
    ):
        resume_from_checkpoint(folder, tag="step_1", partial=False)
    communicate.barrier()
    for text in (b"gone_partial\n", b"", b"\xff\xfe", b"../step_1_partial", b"long" * 500):
        if state.rank == 0:
            newest.write_bytes(text)
        communicate.barrier()
        with pytest.raises(SMPCheckpointError, match="newest is damaged"):
            resume_from_checkpoint(folder)
        communicate.barrier()
    if state.rank == 0:
        newest.write_text("step_1_partial\n")
    communicate.barrier()
    elsewhere = folder if state.rank == 0 else f"{folder}/elsewhere"  # a disk that one host does not see
    with pytest.raises(
        PeerCheckpointError if state.rank == 0 else FileNotFoundError, match=r"has no file 'newest'"
    ):
        resume_from_checkpoint(elsewhere)
    communicate.barrier()
    if state.rank == 0:  # as earlier versions wrote it
        torch.save({"tag": "step_1", "partial": True}, newest)
    communicate.barrier()
    assert resume_from_checkpoint(folder) == 1
    for tag in ("epoch/1", "", "..", "newest"):
        with pytest.raises(ValueError, match=r"the tag '.*' (cannot be|is) the name of "):
            save_checkpoint(folder, tag, user_content=1)


@pytest.mark.newest
def test_newest_is_text_and_knows_full_from_partial(pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    pool(2).run(check_newest, str(tmp_path), backend="gloo")


def prune(folder: str) -> None:
    restart(partitions=2)
    model, _ = wrapped()
    if state.rank == 0:
        (Path(folder) / "results_partial").mkdir()
        (Path(folder) / "results_partial" / "notes.txt").write_text("mine")
        (Path(folder) / "killed_partial").mkdir()
        (Path(folder) / "killed_partial" / ".model_0.pt.1f.new").touch()
    for number in range(4):
        save_checkpoint(folder, f"s{number}", model=model, num_kept_partial_checkpoints=2)
    communicate.barrier()
    assert sorted(path.name for path in Path(folder).iterdir()) == [
        "newest",
        "results_partial",
        "s2_partial",
        "s3_partial",
    ]


def test_older_partial_checkpoints_are_removed_and_no_folders_of_the_users(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(prune, str(tmp_path), backend="gloo")


def refuse_other_shapes(folder: str) -> None:
    for at_once in (True, False):
        restart(partitions=dist.get_world_size())
        model, optimizer = wrapped()
        save_checkpoint(folder, "model", model=model)
        _, other = wrapped(width=5)
        save_checkpoint(folder, "optimizer", optimizer=other)
        communicate.barrier()
        if state.rank == 0:
            for file in (Path(folder) / "optimizer_partial").iterdir():
                file.replace(Path(folder) / "model_partial" / file.name)
        communicate.barrier()
        model, optimizer = wrapped(at_once=at_once)
        with torch.no_grad():
            for name, parameter in model.module.named_parameters():
                if model.is_local(name):
                    parameter.zero_()
        before = str(optimizer.state_dict())
        with pytest.raises(
            ValueError, match=r"exp_avg of parameter 0: \(5, 3\) in the checkpoint, \(4, 3\) here"
        ):
            resume_from_checkpoint(folder, tag="model")
        assert not any(tensor.any() for tensor in model.state_dict().values()), "the model is as it was"
        assert str(optimizer.state_dict()) == before


def test_optimizer_state_of_other_shapes_is_refused_before_anything_changes(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    for size in (1, 2):
        (tmp_path / str(size)).mkdir()
        pool(size).run(refuse_other_shapes, str(tmp_path / str(size)), backend="gloo")


def load_impossible_sets(folder: str) -> None:
    restart(partitions=1)
    path = Path(folder) / "x.pt_0"
    for parts in (2, 1_000_000_000):
        label = Label(save="ab", part=0, parts=parts)
        commit(write_aside({"a": 1}, path, label, caller=Caller()), path, alone=True)
        with pytest.raises(
            SMPCheckpointError, match=rf"parts \[1.*\].* of {parts} are missing from the save ab"
        ):
            load(f"{folder}/x.pt")


def test_a_set_with_impossibly_many_parts_is_refused_at_once(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(1).run(load_impossible_sets, str(tmp_path), backend="gloo")


def save_full_on_all_ranks(folder: str) -> None:
    restart(partitions=2)
    for _ in range(20):
        save({"a": torch.ones(1000)}, f"{folder}/full.pt", partial=False)
    communicate.barrier()
    assert load(f"{folder}/full.pt", partial=False)["a"].sum() == 1000
    assert [path.name for path in Path(folder).iterdir()] == ["full.pt"]


def test_all_ranks_may_write_the_same_full_file_at_once(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(save_full_on_all_ranks, str(tmp_path), backend="gloo")


def save_in_parts(folder: str) -> dict[str, torch.Tensor]:
    restart(partitions=2)
    model, optimizer = wrapped()
    save_checkpoint(folder, "step_1", model=model, optimizer=optimizer)
    return dict(model.state_dict())


def test_one_process_makes_the_whole_model_of_a_partial_checkpoint(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    wanted = pool(2).run(save_in_parts, str(tmp_path))[0]
    for tag in (None, "step_1", (tmp_path / "newest").read_text().strip()):
        found = full_state_dict(str(tmp_path), tag=tag, dtype=torch.bfloat16)
        assert list(found) == list(wanted)
        assert all(torch.equal(found[name], value.bfloat16()) for name, value in wanted.items())
    assert full_state_dict(str(tmp_path))["0.weight"].dtype == torch.float32
    with pytest.raises(FileNotFoundError, match="other_partial"):
        full_state_dict(str(tmp_path), tag="other")
    (tmp_path / "step_1_partial" / "model_1.pt").unlink()
    with pytest.raises(SMPCheckpointError, match=r"parts \[1\] of 2 are missing"):
        full_state_dict(str(tmp_path))


def save_in_the_background(folder: str) -> None:
    restart(partitions=2)
    model, optimizer = wrapped()
    Path(folder, "taken").touch(exist_ok=True)
    saved = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save = save_checkpoint(folder, "step_1", model=model, optimizer=optimizer, blocking=False)
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()  # training goes on
    assert save is not None
    save.wait()
    assert save.done
    resume_from_checkpoint(folder)
    torch.testing.assert_close(model.state_dict(), saved, rtol=0.0, atol=0.0)

    for told in ("wait", "save", "shutdown"):  # the folder cannot be made, which the thread finds out
        failing = save_checkpoint(f"{folder}/taken", "step_2", model=model, blocking=False)
        assert failing is not None
        with pytest.raises((FileExistsError, NotADirectoryError), match="taken"):
            if told == "wait":
                failing.wait()
            elif told == "save":
                save_checkpoint(folder, "step_3", model=model, blocking=False)
            else:
                shutdown()
    restart(partitions=2)


def test_a_save_in_the_background_keeps_what_it_was_given_and_its_failure_is_told(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(save_in_the_background, str(tmp_path))
    assert (tmp_path / "newest").read_text() == "step_1_partial\n"


def dropout_goes_on(folder: str, partitions: int) -> None:
    """Masks of dropout, on one stage and of what all stages know, are those of an undisturbed training."""

    def start() -> tuple[Any, Callable[[], float]]:
        restart(partitions=partitions, microbatches=2)
        torch.manual_seed(3)
        model = smp.DistributedModel(nn.Sequential(nn.Linear(4, 16), nn.Dropout(), nn.Linear(16, 4)))

        @smp.step
        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(nn.functional.dropout(x)).square().mean()
            model.backward(loss)
            return loss

        return model, lambda: step(torch.rand(8, 4)).reduce_mean().item()

    model, train = start()
    train()
    smp.save_checkpoint(folder, "one", model=model)
    wanted = [train(), train()]
    assert wanted[0] != wanted[1]
    model, train = start()
    torch.rand(5)
    smp.resume_from_checkpoint(folder)
    assert [train(), train()] == wanted


@pytest.mark.parametrize("partitions", [1, 2])
def test_dropout_goes_on_as_if_undisturbed(
    pool: Callable[[int], RankPool], tmp_path: Path, partitions: int
) -> None:
    pool(partitions).run(dropout_goes_on, str(tmp_path), partitions)


WIDE = 200  # so that its parameters are copied beside training


def train_beside_a_save(folder: str, settings: dict[str, Any]) -> None:
    """Steps right after the save leave what was saved as it was; also those that follow more quickly."""
    restart(**settings)
    torch.manual_seed(0)
    plain = nn.Sequential(
        nn.Embedding(64, WIDE * 2, max_norm=0.5),  # changes its weight in forward
        nn.Linear(WIDE * 2, WIDE * 2),
        nn.BatchNorm1d(WIDE * 2),
        nn.Linear(WIDE * 2, WIDE * 2),
    )
    plain[3].weight.requires_grad_(False)
    model = smp.DistributedModel(plain)
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def step(rows: torch.Tensor) -> torch.Tensor:
        loss = model(rows).float().square().mean()
        model.backward(loss)
        return loss

    def train() -> None:
        optimizer.zero_grad()
        step(torch.randint(64, (64,)))
        optimizer.step()

    def states() -> Any:
        return copy.deepcopy((dict(model.state_dict()), optimizer.state_dict()["state"]))

    train()
    for again in range(3):
        saved, content = states(), {"array": np.zeros(1000), "options": argparse.Namespace(a=1)}
        save = smp.save_checkpoint(
            folder, f"s{again}", model=model, optimizer=optimizer, user_content=content, blocking=False
        )
        content["array"][:] = content["options"].a = 5
        train()
        train()
        save.wait()
        found = smp.resume_from_checkpoint(folder)
        assert not found["array"].any() and found["options"].a == 1
        torch.testing.assert_close(states(), saved, rtol=0.0, atol=0.0)
    save = smp.save_checkpoint(folder, "loaded", model=model, optimizer=optimizer, blocking=False)
    saved = states()
    train()
    other = states()
    model.load_state_dict(saved[0])
    for given in (other, saved):
        save = smp.save_checkpoint(folder, "loaded", model=model, optimizer=optimizer, blocking=False)
        model.load_state_dict(given[0])
        optimizer.load_state_dict(optimizer.state_dict())
    save.wait()


@pytest.mark.parametrize(
    "settings",
    [
        {"partitions": 2, "microbatches": 2},
        {"partitions": 2, "bf16": True},
        {"ddp": True, "shard_optimizer_state": True},
        {"ddp": True, "sharded_data_parallel_degree": 2, "fp16": True},
    ],
)
def test_training_goes_on_beside_the_copies_of_a_save(
    pool: Callable[[int], RankPool], tmp_path: Path, settings: dict[str, Any]
) -> None:
    pool(2).run(train_beside_a_save, str(tmp_path), settings)


def save_and_count(folder: str, settings: dict[str, Any], partial: bool) -> tuple[int, int]:
    """Bytes that this rank copies for a save, and those that are saved."""
    restart(**settings)
    torch.manual_seed(0)
    model = smp.DistributedModel(nn.Sequential(nn.Linear(WIDE, 2 * WIDE), nn.Linear(2 * WIDE, WIDE)))
    optimizer = smp.DistributedOptimizer(torch.optim.Adam(model.parameters(), lr=0.1))

    @smp.step
    def step(rows: torch.Tensor) -> None:
        model.backward(model(rows).square().mean())

    step(torch.ones(4, WIDE))
    optimizer.step()
    buffer_for, copied = snapshot._buffer_for, 0

    def counted(tensor: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
        nonlocal copied
        copied += tensor.nbytes
        return buffer_for(tensor, before)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshot, "_buffer_for", counted)
        smp.save_checkpoint(folder, "one", partial, model=model, optimizer=optimizer, blocking=False).wait()
    communicate.barrier()
    return copied, sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())


# Of four parts: the parameters, twice in files of sharded ones, and two moments of Adam.
SHARDED = {"ddp": True, "sharded_data_parallel_degree": 2}


@pytest.mark.parametrize(
    ("settings", "partial", "copied", "saved"),
    [
        (SHARDED, True, (1.5, 1.5), 4),
        ({"ddp": True, "shard_optimizer_state": True}, True, (2, 1), 3),
        ({"ddp": True}, True, (3, 0), 3),
        (SHARDED, False, (0, 0), 3),  # gathered for the save alone
    ],
)
def test_a_rank_copies_for_a_save_what_only_it_writes_or_sends(
    pool: Callable[[int], RankPool],
    tmp_path: Path,
    settings: dict[str, Any],
    partial: bool,
    copied: tuple[float, float],
    saved: float,
) -> None:
    found = pool(2).run(save_and_count, str(tmp_path), settings, partial)
    for (own, whole), expected in zip(found, copied, strict=True):
        assert own / whole == pytest.approx(expected / saved, abs=0.04)


def write_before_the_copy(folder: str) -> None:
    restart(partitions=2)
    model, optimizer = wrapped(width=1500)  # 9 MB
    smp.save_checkpoint(folder, "step_1", model=model, optimizer=optimizer)

    def clip() -> None:
        with torch.no_grad():
            for parameter in model.local_parameters():
                parameter.clamp_(-0.01, 0.01)

    with pytest.MonkeyPatch.context() as patch:
        written = threading.Event()
        patch.setattr(background, "_give_way", written.wait)
        save = smp.save_checkpoint(folder, "step_2", model=model, optimizer=optimizer, blocking=False)
        clip()
        written.set()
    with pytest.raises(SMPCheckpointError, match=r"1\.weight was written after smp\.save_checkpoint"):
        save.wait()
    communicate.barrier()
    assert (Path(folder) / "newest").read_text() == "step_1_partial\n"
    assert not list((Path(folder) / "step_2_partial").glob("[mo]*"))

    save = smp.save_checkpoint(folder, "step_3", model=model, optimizer=optimizer, blocking=False)
    save.wait_until_copied()
    saved = copy.deepcopy(dict(model.state_dict()))
    with torch.no_grad():
        for parameter in model.local_parameters():
            parameter.zero_()
    save.wait()
    smp.resume_from_checkpoint(folder)
    torch.testing.assert_close(dict(model.state_dict()), saved, rtol=0.0, atol=0.0)


def test_a_script_that_writes_parameters_before_they_are_copied_is_told_so(
    pool: Callable[[int], RankPool], tmp_path: Path
) -> None:
    pool(2).run(write_before_the_copy, str(tmp_path))
