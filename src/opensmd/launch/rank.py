"""The process of one rank: set it up, run the user's script as ``__main__``, report its failure.

``smdrun`` starts this. Other launchers can, too, if a script needs ``--device cpu`` or pinning::

    mpiexec -n 2 python -m opensmd.launch.rank --device cpu script.py
    torchrun --nproc-per-node 2 -m opensmd.launch.rank --bind script.py

Nothing heavy is imported before the affinity is set: torch sizes its thread pools when it is imported.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from opensmd.environment import siblings, variables
from opensmd.launch import affinity, torch_import
from opensmd.launch.output import reports
from opensmd.launch.script import check_script, find_program

__all__ = ["LAUNCHER", "main"]

LAUNCHER = "SMDRUN_PID"  # set by smdrun: the process id of whoever shows this rank's reports
_PR_SET_PDEATHSIG = 1


def main(argv: Sequence[str] | None = None) -> None:
    """Prepare this process according to ``argv``, run the script, and exit like it."""
    options = _parse(sys.argv[1:] if argv is None else argv)
    own = os.getpid()
    under_smdrun = os.environ.get(LAUNCHER) == str(os.getppid())
    if under_smdrun:
        _die_with_launcher()
        faulthandler.enable()
    variables.fill()
    if under_smdrun:
        _note_process()
        os.environ["SMDRUN_STORE"] = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        _speak_as_mpirun()
    if options.bind:
        _bind()
    if options.no_python:
        _become(options.script, options.args)
    torch_import.without_collector()
    try:
        if options.device == "cpu":
            from opensmd.launch.mapped_cuda import cuda_on_cpu

            cuda_on_cpu.install()
        _run(options)
        _note_end()
    except KeyboardInterrupt:
        if not under_smdrun:
            raise
        sys.exit(128 + signal.SIGINT)
    except SystemExit as leaving:
        if under_smdrun and reports.code_of(leaving) and os.getpid() == own:
            _leave_report(leaving)
        else:
            _note_end()
        raise
    except Exception as error:
        _report(error, of_rank=os.getpid() == own)
        sys.exit(1)


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m opensmd.launch.rank", description=__doc__)
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="cpu: map CUDA to the CPU")
    parser.add_argument("--bind", action="store_true", help="pin this rank to its share of the cores")
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("--no-python", action="store_true", help="the script is a program to run as it is")
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser.parse_args(argv)


def _run(options: argparse.Namespace) -> None:
    """Run the script as Python itself would: with its argv, its folder first on the path, as ``__main__``."""
    sys.argv = [options.script, *options.args]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
        return
    try:
        check_script(options.script)
    except ValueError as error:
        raise SystemExit(f"smdrun: {error}") from None
    if not sys.flags.safe_path:  # otherwise the first entry of the path is something else
        sys.path[0] = str(Path(options.script).resolve().parent)
    runpy.run_path(options.script, run_name="__main__")


def _become(program: str, args: Sequence[str]) -> NoReturn:
    """Become another program, which inherits the variables, the cores and the launcher's control."""
    try:
        os.execv(find_program(program), [program, *args])
    except ValueError as error:
        raise SystemExit(f"smdrun: {error}") from None
    except OSError as error:
        raise SystemExit(f"smdrun: cannot execute {program!r}: {error.strerror}") from None


def _bind() -> None:
    local = os.environ.get("LOCAL_RANK"), os.environ.get("LOCAL_WORLD_SIZE")
    if affinity.chosen_by_user(os.environ) is None and local[0] and local[1]:
        affinity.pin(int(local[0]), int(local[1]))


def _speak_as_mpirun() -> None:
    """Set Open MPI's variables as well: containers start scripts with mpirun, and some scripts read them."""
    for theirs, ours in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE")):
        os.environ.setdefault(f"OMPI_COMM_WORLD_{theirs}", os.environ[ours])
        os.environ.setdefault(f"OMPI_COMM_WORLD_LOCAL_{theirs}", os.environ[f"LOCAL_{ours}"])


def _die_with_launcher() -> None:
    """Ask the kernel to end this process when the launcher dies, for whatever reason."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _report(error: Exception, *, of_rank: bool) -> None:
    """Pass the traceback to the launcher, which shows the first failure first; otherwise print it as usual.

    Args:
        error: the uncaught exception.
        of_rank: whether it is the rank's own, not that of a process forked from it.
    """
    trace = _of_the_script(error.__traceback__)
    # As the interpreter does for an uncaught exception.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    handed_over = of_rank and _leave_report(error, trace) and os.environ.get(LAUNCHER) == str(os.getppid())
    # torch.distributed replaces the hook only to add a prefix with the rank.
    custom = sys.excepthook is not sys.__excepthook__ and "torch.distributed" not in sys.excepthook.__module__
    if custom or not handed_over:
        sys.excepthook(type(error), error, trace)


def _leave_report(error: BaseException, trace: TracebackType | None = None) -> bool:
    """Write the report file that the launcher asked for; return False if there is none."""
    path = os.environ.get(siblings.REPORT, "")
    try:
        if path:
            reports.write(Path(path), error, trace, reports.own_rank(os.environ))
    except OSError:
        return False
    return bool(path)


def _note_process() -> None:
    """Let ranks that wait for this one see its end; replicas start again one by one, under other numbers."""
    if siblings.REPORT in os.environ and "SMDRUN_REPLICAS" not in os.environ:
        with contextlib.suppress(OSError):
            siblings.note_process(int(os.environ["WORLD_SIZE"]))


def _note_end() -> None:
    """Tell the launcher when this rank had finished its work, in case others fail later."""
    path = os.environ.get(siblings.REPORT, "")
    with contextlib.suppress(OSError):
        if path and os.environ.get(LAUNCHER) == str(os.getppid()):
            reports.write_end(Path(path))


def _of_the_script(trace: TracebackType | None) -> TracebackType | None:
    """Return the traceback without the frames of this file and of runpy, which are not the user's."""
    while trace is not None:
        name = trace.tb_frame.f_code.co_filename
        if name != __file__ and "runpy" not in name:
            break
        trace = trace.tb_next
    return trace


if __name__ == "__main__":
    main()
