"""Sending the ranks' output and errors from torch's elastic agent to the launcher's console."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from opensmd.launch.output import reports
from opensmd.launch.output.console import Console

__all__ = ["Place", "RankLogs"]


Place = Callable[[dict[str, str], int], None]  # takes a rank's environment and its local rank


class RankLogs(LogsSpecs):
    """Connects every rank's standard streams and report file to a :class:`Console`.

    Args:
        console: shows the output.
        folder: for the report files, with one folder per attempt and rank.
    """

    def __init__(self, console: Console, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._console = console
        self._folder = folder
        self._place: Place | None = None
        self._reports: dict[int, Path] = {}  # of the latest attempt, by rank

    def placing(self, place: Place) -> RankLogs:
        """Return the logs of further ranks of the same job, whose environment ``place`` changes first."""
        others = RankLogs(self._console, self._folder)
        others._place, others._reports = place, self._reports
        return others

    @property
    def root_log_dir(self) -> str:
        """The folder of the reports."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Connect the local ranks; the agent calls this once per attempt with their environments."""
        outs: dict[int, str] = {}
        errs: dict[int, str] = {}
        files: dict[int, str] = {}
        for local_rank, env in envs.items():
            if self._place is not None:
                self._place(env, local_rank)
            rank = int(env["RANK"])
            folder = self._folder / f"attempt-{env['TORCHELASTIC_RESTART_COUNT']}" / str(rank)
            folder.mkdir(parents=True)
            self._console.end_attempt(rank)
            report = folder / "error.json"
            env["TORCHELASTIC_ERROR_FILE"] = files[local_rank] = str(report)
            outs[local_rank] = self._console.open(rank, sys.stdout)
            errs[local_rank] = self._console.open(rank, sys.stderr)
            self._reports[rank] = report
            self._console.expect_report(report, rank)
        return LogsDest(stdouts=outs, stderrs=errs, error_files=files)

    def ended(self) -> dict[int, int | None]:
        """Return when each rank's script ended, as ``time.time_ns``; None if unknown."""
        return {rank: reports.read_end(report) for rank, report in self._reports.items()}
