"""Where torch's elastic agent sends the ranks' output and errors: to the launcher's console."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.multiprocessing.api import LogsDest

from opensmd.launch.output import reports
from opensmd.launch.output.console import Console

__all__ = ["RankLogs"]


class RankLogs(LogsSpecs):
    """Connects every rank's standard streams and report file to a :class:`Console`.

    ``folder`` holds the report files, one folder an attempt and rank.
    """

    def __init__(self, console: Console, folder: Path) -> None:
        super().__init__(log_dir=str(folder))
        self._console = console
        self._folder = folder
        self._reports: dict[int, Path] = {}  # of the last attempt, by rank

    @property
    def root_log_dir(self) -> str:
        """The folder of the reports."""
        return str(self._folder)

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Called by the agent with each local rank's environment, once an attempt."""
        outs: dict[int, str] = {}
        errs: dict[int, str] = {}
        files: dict[int, str] = {}
        for local_rank, env in envs.items():
            rank = int(env["RANK"])
            folder = self._folder / f"attempt-{env['TORCHELASTIC_RESTART_COUNT']}" / str(rank)
            folder.mkdir(parents=True)
            report = folder / "error.json"
            env["TORCHELASTIC_ERROR_FILE"] = files[local_rank] = str(report)
            outs[local_rank] = self._console.open(rank, sys.stdout)
            errs[local_rank] = self._console.open(rank, sys.stderr)
            self._reports[rank] = report
            self._console.expect_report(report, rank)
        return LogsDest(stdouts=outs, stderrs=errs, error_files=files)

    def ended(self) -> dict[int, int | None]:
        """When each rank's script came to its end, as ``time.time_ns``; None for those that left no word."""
        return {rank: reports.read_end(report) for rank, report in self._reports.items()}
