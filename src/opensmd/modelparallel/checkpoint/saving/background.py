"""Saving in the background: a thread copies and writes.

The threads of all ranks agree through process groups that nothing else uses, so they never come between the
messages of a step. Failures are raised by the next save, by ``wait``, or by ``smp.shutdown``; if a script
calls none of these, they are printed at its end.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import logging
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

import torch.distributed as dist

from opensmd.collectives._torch_internals import cpu_backend, timeout_of
from opensmd.collectives.name import NAME
from opensmd.collectives.stall import missing_from
from opensmd.modelparallel.checkpoint.saving.hurry import Hurry
from opensmd.modelparallel.checkpoint.saving.pacing import Pace
from opensmd.modelparallel.checkpoint.saving.saving_thread import SavingThread
from opensmd.modelparallel.checkpoint.saving.snapshot import HostCopies, Snapshot
from opensmd.modelparallel.checkpoint.saving.writing import SavingGroups, write_snapshot
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.ranks.grid import CommGroup
from opensmd.modelparallel.ranks.groups import Groups, default_group
from opensmd.modelparallel.state import state

__all__ = ["BackgroundSave", "end_background_saves", "finish_background_save", "save_in_background"]

logger = logging.getLogger("opensmd.modelparallel")

LOOK = 0.5  # seconds between two looks whether a save that is waited for makes progress
NICENESS = 10  # gets a tenth of a core that training wants
PATIENCE = timedelta(minutes=30)  # of the threads' groups, as other ranks' threads may rest for long


class BackgroundSave:
    """A save that runs in the background.

    Args:
        snapshot: copies of what is saved.
        groups: used for nothing else.
        thread: an idle thread.
        hurry: tells the ranks that somebody waits for this save.
    """

    def __init__(self, snapshot: Snapshot, groups: SavingGroups, thread: SavingThread, hurry: Hurry) -> None:
        self._name = f"the checkpoint {snapshot.tag!r} in {snapshot.folder}"
        self._world = groups.world
        self._patience = timeout_of(default_group())  # read now: the group may be gone later
        self._copying = snapshot.copying
        self._is_told = False
        self._process = os.getpid()
        self._hurry = hurry
        self._pace = Pace(hurry.is_wanted)
        self._written = thread.submit(
            functools.partial(_write, replace(snapshot, between=self._pace), groups)
        )
        self._written.add_done_callback(self._let_go)

    def wait_until_copied(self) -> None:
        """Wait until this rank's parameters and optimizer state may be changed.

        ``optimizer.step`` and ``load_state_dict`` wait by themselves.
        """
        copying = self._copying
        if copying is not None and os.getpid() == self._process:
            copying.finish()

    @property
    def done(self) -> bool:
        """Whether it has ended, successfully or not."""
        return self._written.done()

    def wait(self) -> None:
        """Wait until the checkpoint is on disk; called on all ranks or on one.

        Raises:
            SMPCheckpointError, OSError, TypeError: as ``smp.save_checkpoint``, but only once. Also if this
                rank's thread has made no progress for the timeout of process groups, because other ranks do
                not come; and in a fork of the process that saves.
        """
        if self._is_told:
            return
        if os.getpid() != self._process:
            raise SMPCheckpointError(
                f"{self._name} is saved by another process, of which this is a fork: wait there"
            )
        if not self.done:
            self._pace.hurry()
            self._hurry.want()
        error = self._outcome()
        if error is not None:
            self._is_told = True
            raise error

    def _outcome(self) -> BaseException | None:
        """Return what the save raised, or what is wrong if it does not end.

        The save's own groups have a longer timeout than this wait, because other ranks' threads may rest. Now
        none rests any more.
        """
        begun = time.perf_counter()
        while True:
            try:
                return self._written.exception(LOOK)
            except TimeoutError:
                quiet = time.perf_counter() - max(begun, self._pace.worked_at)
                if self._patience is not None and quiet > self._patience.total_seconds():
                    return SMPCheckpointError(
                        f"{self._name} was not saved: its thread has waited for other ranks for {quiet:.0f} s"
                        f"{missing_from(self._world) or self._hurry.silence()}"
                    )

    def _let_go(self, _: object) -> None:
        self._copying = None


def _write(snapshot: Snapshot, groups: SavingGroups) -> None:
    try:
        write_snapshot(snapshot, groups)
    finally:
        if snapshot.copying is not None:
            snapshot.copying.abandon()  # the next save reuses the buffers


def _give_way() -> None:
    """Give this thread what training leaves of the cores, and a little more on a full machine."""
    policy = os.sched_getscheduler(0)
    if policy in (os.SCHED_FIFO, os.SCHED_RR):
        os.sched_setscheduler(0, policy, os.sched_param(os.sched_get_priority_min(policy)))
    else:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _make_thread() -> SavingThread:
    """Start the one thread of all saves, because training waits while a thread starts."""
    return SavingThread(_give_way)


@dataclass
class _Saver:
    """What background saves over the same groups share.

    Attributes:
        of: the groups; a job whose replicas come and go has others after each change.
    """

    of: Groups
    groups: SavingGroups
    copies: HostCopies = field(default_factory=HostCopies)
    thread: SavingThread = field(default_factory=_make_thread)
    latest: BackgroundSave | None = None
    saves: int = 0
    is_stuck: bool = False  # the thread waits for ranks that do not come, perhaps for long

    def save(self, snapshot: Snapshot) -> BackgroundSave:
        self.saves += 1
        hurry = Hurry(self.groups.world, self.saves)
        self.latest = BackgroundSave(self.copies.of(snapshot), self.groups, self.thread, hurry)
        return self.latest

    def finish(self) -> None:
        latest = self.latest
        if latest is None:
            return
        try:
            latest.wait()
        except Exception:
            self.latest = None
            raise
        finally:  # after an interrupt it is still the latest, whose copies are in use
            self.is_stuck = not latest.done
        self.latest = None

    def end(self) -> None:
        """Finish, and let go of the thread and the groups."""
        try:
            self.finish()
        finally:
            if not self.is_stuck:
                self.thread.end()
                for group in {self.groups.world, self.groups.replica, self.groups.shards}:
                    with contextlib.suppress(RuntimeError, ValueError):  # with all others, when ranks parted
                        dist.destroy_process_group(group)


_saver: _Saver | None = None  # of the latest groups


def save_in_background(snapshot: Snapshot) -> BackgroundSave:
    """Copy and write the snapshot during training; all ranks must call."""
    global _saver
    _end_of_earlier_groups()
    if _saver is None:
        _saver = _Saver(state.groups, _make_groups())
        if _forget not in state.undoing:
            state.undoing.append(_forget)
    return _saver.save(snapshot)


def finish_background_save() -> None:
    """Wait for the save in progress, if there is one.

    Raises:
        SMPCheckpointError, OSError, TypeError: the save has failed.
    """
    _end_of_earlier_groups()
    if _saver is not None:
        _saver.finish()


def _end_of_earlier_groups() -> None:
    if _saver is not None and _saver.of is not state.groups:
        end_background_saves()


def end_background_saves() -> None:
    """Finish for good, as other groups follow.

    What a save has failed with is a warning: ranks that join know nothing of it, and are in the next save.
    """
    if _saver is None:
        return
    try:
        _forget()
    except Exception as error:
        logger.warning("%s", error)
    gc.collect()  # the error's traceback has held on to the memory of the groups


def _make_groups() -> SavingGroups:
    """Create process groups for the thread, on the CPU because it has nothing on devices."""
    world = tuple(range(state.grid.size))
    made = {world: _make_group(world)}
    replicas, shards = state.grid.partition(CommGroup.MP_GROUP), state.groups.all_shards()
    for members in (*replicas, *shards):
        if members not in made:
            made[members] = _make_group(members)
    return SavingGroups(
        world=made[world],
        replica=made[state.groups.members(CommGroup.MP_GROUP)],
        shards=made[next(row for row in shards if state.rank in row)],
    )


def _make_group(members: Sequence[int]) -> dist.ProcessGroup:
    """Create a group within training's timeout, whose own timeout is long."""
    usual = default_group()
    backend = NAME if dist.get_backend(usual) == NAME else "gloo"
    timeout = timeout_of(usual)
    group: dist.ProcessGroup = dist.new_group(list(members), backend=backend, timeout=timeout)
    if state.rank in members:
        cpu_backend(group)._set_default_timeout(max(PATIENCE, timeout or PATIENCE))
    return group


def _forget() -> None:
    global _saver
    saver, _saver = _saver, None
    if saver is not None:
        saver.end()


def _leave_to_parent() -> None:
    """In a forked child, which has no thread that saves, let nothing wait for one."""
    global _saver
    _saver = None


def _report() -> None:
    """At the end of a script, print failures that nobody has asked about."""
    if _saver is None:
        return
    try:
        _saver.finish()
    except Exception as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)


atexit.register(_report)
os.register_at_fork(after_in_child=_leave_to_parent)
