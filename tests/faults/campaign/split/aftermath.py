"""What is on the disk after a training: a fresh process resumes from it, and trains plainly to compare."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.faults.campaign.split.cases import SplitCase
from tests.faults.campaign.split.model import Reference, make_model, make_optimizer, plain_training, rows
from tests.support.ports import free_port

__all__ = ["Aftermath", "look_at"]

NO_CHECKPOINT = -1


@dataclass
class Aftermath:
    """What a fresh process found.

    Attributes:
        losses: what plain PyTorch gets, by replica and step.
        resumed: the step of the newest checkpoint; -1 for none.
        wrong: what is wrong with it.
        left: files that no checkpoint has, after the next save.
    """

    losses: list[list[float]] = field(default_factory=list)
    resumed: int = NO_CHECKPOINT
    wrong: str = ""
    left: list[str] = field(default_factory=list)


def look_at(case: SplitCase, folder: Path) -> Aftermath:
    """Resume from a folder of checkpoints in a process of its own, with one partition."""
    return _in_a_child(lambda: _resume(case, folder))


def _in_a_child(work: Callable[[], Aftermath]) -> Aftermath:
    theirs, ours = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            found = work()
        except BaseException:
            found = Aftermath(wrong=traceback.format_exc())
        ours.send_bytes(pickle.dumps(found))
        os._exit(0)
    ours.close()
    found = pickle.loads(theirs.recv_bytes())
    os.waitpid(pid, 0)
    assert isinstance(found, Aftermath)
    return found


def _resume(case: SplitCase, folder: Path) -> Aftermath:
    import smdistributed.modelparallel.torch as smp

    reference = plain_training(case)
    found = Aftermath(losses=reference.losses)
    if not (folder / "newest").exists():
        return found
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1)
    smp.init({"partitions": 1})
    model = smp.DistributedModel(make_model(case))
    optimizer = smp.DistributedOptimizer(make_optimizer(model))
    found.resumed = smp.resume_from_checkpoint(str(folder), partial=case.partial)
    found.wrong = _differences(model.state_dict(), reference, found.resumed)
    _save_after_a_step(smp, case, folder, model, optimizer)
    found.left = [path.name for path in folder.glob(".*")]
    return found


def _save_after_a_step(smp: Any, case: SplitCase, folder: Path, model: Any, optimizer: Any) -> None:
    @smp.step  # type: ignore[untyped-decorator]
    def train(x: Tensor) -> None:
        model.backward(model(x).square().mean())

    train(rows(case, 0, 0))
    kept = optimizer if case.partial else None
    smp.save_checkpoint(str(folder), "next", partial=case.partial, model=model, optimizer=kept)


def _differences(state: dict[str, torch.Tensor], reference: Reference, step: int) -> str:
    expected = reference.states[step]
    if state.keys() != expected.keys():
        return f"it has {sorted(state)} instead of {sorted(expected)}"
    wrong = [name for name in expected if not torch.allclose(state[name], expected[name], 1e-12, 1e-14)]
    return f"after step {step}, {wrong} are not what plain training has" if wrong else ""
