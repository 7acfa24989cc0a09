"""A rank's side of a case of split training."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from tests.faults.campaign.member import LONGEST_SILENCE
from tests.faults.campaign.records import Board, Failure, Record
from tests.faults.campaign.split.cases import IN_A_STEP, STEPS, SplitCase
from tests.faults.campaign.split.model import make_model, make_optimizer, rows
from tests.faults.campaign.victim import UserError
from tests.support.patience import PATIENCE
from tests.support.timeouts import expire_after

__all__ = ["SplitRecord", "run_rank"]

FILE_LIMIT = 1_000  # bytes that a victim with a full disk may write into a file


@dataclass
class SplitRecord(Record):
    """What one rank saw of a training.

    Attributes:
        replica: of the model that it is part of.
        losses: of the steps that it completed.
        saved: the last step whose checkpoint was written as far as this rank knows; -1 for none.
        refused: what the save that met a full disk said.
    """

    replica: int = 0
    losses: list[float] = field(default_factory=list)
    saved: int = -1
    refused: str = ""


class Training:
    """The script: a loop of steps and checkpoints, in which the victim misbehaves."""

    def __init__(self, case: SplitCase, rank: int, backend: str, board: Board, folder: Path) -> None:
        self.case, self.rank, self.board, self.folder = case, rank, board, folder
        self.backend = backend
        self.record = SplitRecord()
        self.current = 0
        self.passed: Counter[str] = Counter()  # how often this step has come to each of its moments
        self.struck = False
        self.doing, self.began = "start", time.monotonic()
        self.save_beside: tuple[int, Any] | None = None  # its step, and what waits for it

    def run(self, port: int) -> None:
        """Train until the end, or until something is raised."""
        import smdistributed.modelparallel.torch as smp

        case, backend = self.case, self.backend
        if backend == "smddp":
            import smdistributed.dataparallel.torch.torch_smddp  # noqa: F401
        dist.init_process_group(
            backend,
            init_method=f"tcp://127.0.0.1:{port}",
            rank=self.rank,
            world_size=case.ranks,
            timeout=timedelta(seconds=LONGEST_SILENCE if backend == "smddp" else case.timeout),
        )
        smp.init(self._settings())
        self.record.replica = smp.rdp_rank()
        model, optimizer = self._parts(smp)
        self.board.say_ready(self.rank)
        while not self.board.ready(case.ranks):
            time.sleep(0.001)
        if case.moment == "anytime":
            self._lose_patience_soon()

        @smp.step
        def train(x: Tensor) -> Tensor:
            self._misbehave("forward")
            loss = model(x).square().mean()
            self._misbehave("before backward")
            model.backward(loss)
            self._misbehave("after backward")
            return loss  # type: ignore[no-any-return]

        self.train = train
        for self.current in range(STEPS):
            self._step(train, optimizer)
            if case.saves_after(self.current):
                self._save(smp, model, optimizer)
        self._do("save")
        self._await_save_beside()
        self._do("end")
        dist.barrier()

    def _settings(self) -> dict[str, Any]:
        case = self.case
        found: dict[str, Any] = {
            "partitions": case.partitions,
            "microbatches": case.microbatches,
            "pipeline": case.pipeline,
            "ddp": case.ranks > case.partitions,
        }
        if case.layout == "sharded":
            # gathered again and again, and not changed beside what plain training does
            often = {"sdp_param_persistence_threshold": 0, "sdp_max_live_parameters": 1}
            found |= {"sharded_data_parallel_degree": case.ranks, "sdp_gradient_clipping": 0.0, **often}
        if case.layout == "tensor-parallel":
            found |= {"tensor_parallel_degree": case.sharing, "prescaled_batch": True}
        return found if case.automatic else {**found, "auto_partition": False, "default_partition": 0}

    def _parts(self, smp: Any) -> tuple[Any, Any]:
        module = make_model(self.case)
        if self.case.layout == "tensor-parallel":
            linear = [layer for layer in module if isinstance(layer, nn.Linear)]
            for layer in linear[:-1]:  # the last has one output
                smp.set_tensor_parallelism(layer)
        if not self.case.automatic:
            for index, layer in enumerate(module):
                smp.set_partition(layer, index * self.case.partitions // len(module))
        model = smp.DistributedModel(module)
        return model, smp.DistributedOptimizer(make_optimizer(model))

    def _do(self, what: str) -> None:
        self.doing, self.began = what, time.monotonic()

    def _step(self, train: Any, optimizer: Any) -> None:
        self._do("step")
        self.passed.clear()
        self._misbehave("between steps")
        if self.current == self.case.step:
            self._lose_patience_soon()
        optimizer.zero_grad()
        loss = train(rows(self.case, self.current, self.record.replica))
        optimizer.step()
        self.record.losses.append(float(loss.reduce_mean()))
        self.record.completed += 1

    def _await_save_beside(self) -> None:
        if self.save_beside is not None:
            step, save = self.save_beside
            save.wait()
            self.record.saved, self.save_beside = step, None

    def _save(self, smp: Any, model: Any, optimizer: Any) -> None:
        self._do("save")
        with self._trouble_in_save():
            try:
                self._await_save_beside()
                save = smp.save_checkpoint(
                    str(self.folder),
                    f"s{self.current}",
                    partial=self.case.partial,
                    model=model,
                    optimizer=optimizer if self.case.partial else None,
                    user_content=self.current,
                    blocking=not self.case.beside,
                )
            except (RuntimeError, OSError) as error:
                if self.case.fault != "full disk":
                    raise
                self.record.refused = f"{type(error).__name__}: {error}"
            else:
                if self.case.beside:
                    self.save_beside = (self.current, save)
                else:
                    self.record.saved = self.current

    def _lose_patience_soon(self) -> None:
        """Where the others must lose patience with the victim. Of all other faults smddp tells at once."""
        if self.backend == "smddp" and self.case.expires and self.rank != self.case.victim:
            expire_after(self.case.timeout)

    # ---------------------------------------------------------------- the fault

    def _comes(self, moment: str) -> bool:
        case = self.case
        if self.rank != case.victim or case.moment != moment or self.current != case.step or self.struck:
            return False
        if moment in IN_A_STEP and self.passed[moment] != case.microbatch + 1:
            return False
        return case.fault != "none"

    def _misbehave(self, moment: str) -> None:
        self.passed[moment] += 1
        if self._comes(moment):
            self._strike()

    def _strike(self) -> None:
        self.struck = True
        self.board.strike()
        fault = self.case.fault
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault == "exit":
            os._exit(3)
        elif fault == "exception":
            raise UserError("the script's own mistake")
        elif fault == "absent":
            time.sleep(PATIENCE)  # and is killed when the others have been told
            os._exit(3)
        elif fault == "late":
            time.sleep(self.case.timeout / 3)

    @contextmanager
    def _trouble_in_save(self) -> Iterator[None]:
        """Strike from a thread while the checkpoint is written, or allow no files."""
        if not self._comes("save"):
            yield
            return
        if self.case.fault == "full disk":
            self.struck = True
            self.board.strike()
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_LIMIT, limits[1]))
            try:
                yield
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            return
        if self.case.fault in ("kill", "stop", "exit"):
            threading.Timer(self.case.delay / 20, self._strike).start()
        else:
            self._strike()
        yield


def run_rank(case: SplitCase, rank: int, backend: str, port: int, board: Board, folder: Path) -> SplitRecord:
    """Run the case on this rank.

    Raises:
        UserError: that is the fault.
    """
    training = Training(case, rank, backend, board, folder)
    record = training.record
    try:
        training.run(port)
    except UserError:
        raise
    except Exception as error:
        if "the script's own mistake" in str(error) and isinstance(error.__cause__, UserError):
            raise
        record.failure = _failure(error, training)
        record.trouble = "" if board.ready(case.ranks) else traceback.format_exc()
        record.again = _again(training)
    return record


def _failure(error: Exception, training: Training) -> Failure:
    return Failure(type(error).__name__, str(error), training.doing, training.began, time.monotonic())


def _again(training: Training) -> Failure | None:
    """What a step says after a failure, at once: a wait would be a long one."""
    if not hasattr(training, "train"):
        return None
    if training.backend == "smddp":
        expire_after(LONGEST_SILENCE)
    training._do("step")
    try:
        training.train(rows(training.case, 0, 0))
    except Exception as error:
        return _failure(error, training)
    return None
