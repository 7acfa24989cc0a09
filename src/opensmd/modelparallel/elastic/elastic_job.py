"""One rank's part in an elastic job: it carries out every step, whichever replicas are lost meanwhile.

::

    a step             its work ........ all to all: done
    a replica is lost  its work .. error, groups torn down, who is left? groups made, state restored, again
    one wants to join  its work ........ all to all: done, and somebody is waiting
    the next border    groups torn down, who is there? groups made, state sent to new replicas

The message at the end of a point contains the number of requests to join that rank 0 has seen, so that all
reach the border with the same knowledge.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from opensmd.collectives.locality import Locality
from opensmd.collectives.stores.replica_store import JobPlace, Replica, ReplicaStore
from opensmd.modelparallel.checkpoint.saving.background import end_background_saves
from opensmd.modelparallel.elastic.agreement import Agreement
from opensmd.modelparallel.elastic.job_groups import leave_groups, make_world
from opensmd.modelparallel.elastic.join_requests import JoinRequests
from opensmd.modelparallel.elastic.joining import LoopPosition, send_state
from opensmd.modelparallel.elastic.kept import KeptStep
from opensmd.modelparallel.elastic.losses import may_be_a_loss
from opensmd.modelparallel.elastic.membership import Arrived, Decision
from opensmd.modelparallel.elastic.regrouped_model import RegroupedModel
from opensmd.modelparallel.exceptions import SMPError
from opensmd.modelparallel.ranks.grid import RankGrid
from opensmd.modelparallel.ranks.groups import Groups, default_group
from opensmd.modelparallel.ranks.sendable import control_device
from opensmd.modelparallel.settings.config import Config
from opensmd.modelparallel.settings.elastic import Elastic
from opensmd.modelparallel.state import state
from opensmd.modelparallel.wrapped import WrappedModel

__all__ = ["ElasticJob"]

logger = logging.getLogger("opensmd.modelparallel")

Result = TypeVar("Result")


class ElasticJob:
    """What the setting ``elastic`` adds to ``smp.init``.

    Args:
        cfg: the settings.
        elastic: the setting of that name.
        place: this rank's position, from smdrun.

    Attributes:
        objects: the script's objects whose state joining replicas get.
        position: the position in the loop over steps.
    """

    def __init__(self, cfg: Config, elastic: Elastic, place: JobPlace) -> None:
        if place.size != cfg.pipeline_parallel_degree:
            raise ValueError(
                f"smdrun --elastic-replicas has started replicas of {place.size} ranks, and this script "
                f"splits its model over {cfg.pipeline_parallel_degree}; start partitions x replicas ranks"
            )
        self.objects: Mapping[str, Any] = {}
        self.position = LoopPosition()
        self._cfg, self._place, self._least = cfg, place, elastic.min_replicas
        self._timeout = timedelta(seconds=elastic.timeout)
        self._store = ReplicaStore.at(place.address)
        self._agreement = Agreement(self._store, place, elastic.timeout)
        self._done = 0
        self._requested = 0  # the requests to join that all members know of
        self._has_state = self._is_member = place.replica.attempt == 0
        self._kept: KeptStep | None = None
        self._inside = False
        # What ranks send each other at the end of a point: the requests to join that they have seen.
        self._word = torch.zeros(1, dtype=torch.int64, device="cpu")
        self._join_requests: JoinRequests | None = None  # on rank 0, while there are groups

    @property
    def locality(self) -> Locality:
        """This rank's position on its host, which never changes."""
        return Locality(self._place.local_rank, self._place.local_size)

    def begin(self) -> RankGrid:
        """Create the first groups: of all replicas, or of this one alone if the others are already training.

        Raises:
            SMPError: the job cannot go on.
            SystemExit: with status 0, as it has come to its end.
        """
        self._agreement.require_job()
        if not self._is_member:
            name = "alone/" + "/".join(map(str, self._place.replica))
            return self._make_groups(name, (self._place.replica,))
        decision = self._agreement.next_generation(self._arrival(None))
        self._require_enough(decision)
        return self._make_groups("generation/0", decision.members)

    def carry_out(self, work: Callable[[], Result], what: str, *, alone: bool = False) -> Result:
        """Run ``work``, a step or another point of all replicas, on all that are left; return its result.

        Args:
            work: a function that may run several times.
            what: what it does, for errors.
            alone: whether a returning replica may do it by itself before it joins.

        Raises:
            SMPError: this replica has not joined, or has lost a rank; or too few replicas are left.
        """
        if self._inside or (alone and not self._is_member):
            return work()
        if not self._is_member:
            raise SMPError(
                f"{what} was called by a replica that has come back and not joined the others yet, which it "
                "does in the loop `for step in smp.elastic_steps(...)`: call it in that loop"
            )
        point, self._kept = self._done + 1, None
        while True:
            try:
                with self._point():
                    result = work()
                    self._agree_on_end()
            except Exception as error:
                if not may_be_a_loss(error):
                    raise
                self._regroup(error, point)
            else:
                self._done = point
            if self._done < point:
                gc.collect(1)  # the error's traceback kept the memory of the old groups alive
                continue
            self._done, self._kept = point, None
            return result

    def keep(self, model: WrappedModel) -> None:
        """Save what the step that is starting will change."""
        self._kept = KeptStep(model)

    def border(self, loop: int) -> bool:
        """Between two steps of a loop, admit waiting replicas, or join the others.

        Returns:
            Whether the loop continues; for a replica that comes too late, it is over.
        """
        if not self._is_member:
            return self._join(loop)
        if self._requested > self._agreement.requests:
            self._regroup(None, self._done, loop)
        return True

    def begin_loop(self, loop: int) -> None:
        """Start the loop of this number together with all members."""
        if self._is_member and state.rank == 0:
            self._store.set_number("loop", loop)

    def end(self) -> None:
        """Note that this rank has reached the end of its script."""
        self._stop_looking()
        if self._is_member and self._place.rank == 0:
            with contextlib.suppress(RuntimeError):  # smdrun may be gone
                self._store.leave(self._place.replica, self._done)

    @contextlib.contextmanager
    def _point(self) -> Iterator[None]:
        self._inside = True
        try:
            yield
        finally:
            self._inside = False

    def _agree_on_end(self) -> None:
        """Tell all ranks that this one has done its part of a point, and wait for theirs."""
        self._word.fill_(0 if self._join_requests is None else self._join_requests.number)
        dist.all_reduce(self._word, op=dist.ReduceOp.MAX)
        self._requested = max(self._requested, int(self._word))

    def _arrival(self, loop: int | None) -> Arrived:
        return Arrived(self._done, loop, self._has_state)

    def _regroup(self, error: BaseException | None, point: int, loop: int | None = None) -> None:
        """Continue with the remaining and new replicas, at a border or after an error within a point.

        Raises:
            SMPError: this replica cannot continue; chained to ``error``, if there is one.
        """
        began = time.monotonic()
        if error is None:
            end_background_saves()  # whose ranks are all there
        while True:
            self._leave_groups()
            try:
                decision = self._agreement.next_generation(self._arrival(loop))
            except SMPError as why:
                raise why from error
            self._require_enough(decision)
            self._done = max(self._done, decision.done)
            if self._done < point and self._kept is not None:
                self._kept.put_back()
            if self._enter(decision):
                break
        self._say(decision, time.monotonic() - began)

    def _join(self, loop: int) -> bool:
        decision = self._agreement.admission(loop)
        if decision is None:
            return False
        self._leave_groups()
        if not self._enter(decision):
            self._regroup(None, 0, loop)
        self._is_member = True
        return True

    def _enter(self, decision: Decision) -> bool:
        """Create a generation's groups, and make new replicas equal to the others; False if one was lost."""
        # Some may know of requests from a message that others did not get. All hear of them again and so go
        # to the same border; otherwise some would go there in every generation, and the others into a step.
        self._requested = self._agreement.requests
        if not self._agreement.wait_until_all_know(decision):
            return False
        try:
            self._make_groups(f"generation/{self._agreement.generation}", decision.members)
            self._enter_model(decision)
            self._has_state = True
            dist.barrier()
        except Exception as error:
            if not may_be_a_loss(error):
                raise
            return False
        return True

    def _enter_model(self, decision: Decision) -> None:
        self._done = decision.done
        model = state.model
        if isinstance(model, RegroupedModel):
            model.enter_groups(equal=bool(decision.joined) or decision.done == 0)
        if decision.joined:
            send_state(self.objects, self.position, receives=not self._has_state)

    def _make_groups(self, name: str, members: Sequence[Replica]) -> RankGrid:
        cfg, place = self._cfg, self._place
        grid = RankGrid(
            len(members) * place.size, cfg.pipeline_parallel_degree, placement=cfg.placement_strategy
        )
        rank = make_world(self._store.store, name, place, members, grid, self._timeout)
        groups = Groups(grid, rank)
        if state.initialized:
            state.refill(cfg=cfg, grid=grid, groups=groups)
            state.rank = rank
        else:
            state.fill(cfg=cfg, grid=grid, groups=groups, rank=rank, locality=self.locality, owns_world=True)
        self._word = torch.zeros(1, dtype=torch.int64, device=control_device(default_group()))
        if rank == 0 and self._is_member:
            self._join_requests = JoinRequests(self._place.address)
        return grid

    def _leave_groups(self) -> None:
        self._stop_looking()
        model = state.model
        if isinstance(model, RegroupedModel):
            model.leave_groups()
        leave_groups()

    def _stop_looking(self) -> None:
        if self._join_requests is not None:
            self._join_requests.stop()
            self._join_requests = None

    def _require_enough(self, decision: Decision) -> None:
        """Raise on all members if they are too few."""
        if len(decision.members) < self._least:
            why = (
                f"{len(decision.members)} of the at least {self._least} replicas are left that the setting "
                "elastic asks for (min_replicas)"
            )
            self._store.end(why)
            raise SMPError(why)

    def _say(self, decision: Decision, seconds: float) -> None:
        if state.rank == 0:
            lost, joined = (
                ", ".join(f"replica {replica.number}" for replica in which)
                for which in (decision.lost, decision.joined)
            )
            parts = [f"{lost} lost" * bool(lost), f"{joined} joined" * bool(joined)]
            logger.warning(
                "%s: %d go on, after %.2f s",
                ", ".join(filter(None, parts)) or "groups made anew",
                len(decision.members),
                seconds,
            )
