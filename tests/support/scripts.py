"""Users' whole scripts, run by ranks of a pool instead of new processes.

What a script computes does not depend on what has started it, but starting it takes seconds on every rank: an
import of torch, another of what torch's optimizers need, a third of the script's libraries. So one test of
each script starts it with ``smdrun``, as users do, and the others run it here.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.support.ranks import RankPool

__all__ = ["run_as_main", "run_script"]


def run_script(pool: RankPool, script: Path, *options: object) -> str:
    """What all ranks of ``pool`` printed, one after the other, as they ran the script with these options.

    Raises:
        RankFailed: the script failed on a rank.
    """
    return "".join(pool.run(run_as_main, str(script), list(map(str, options)), backend=None))


def run_as_main(script: str, options: list[str]) -> str:
    """On a rank: the script as ``__main__``, its output caught, and the process left as it was."""
    out = io.StringIO()
    with _as_it_was(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        sys.argv = [script, *options]
        sys.path.insert(0, str(Path(script).parent))
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"{script} ended with {end.code}\n{out.getvalue()}") from end
    return out.getvalue()


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """Take back what scripts do to their process, which is not to outlive them here."""
    argv, path, modules, environment = sys.argv, [*sys.path], {*sys.modules}, dict(os.environ)
    root = logging.getLogger()
    handlers, level = [*root.handlers], root.level
    try:
        with warnings.catch_warnings():  # each script hears the warnings that are shown once
            yield
    finally:
        sys.argv, sys.path[:] = argv, path
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:], root.level = handlers, level
        for name in {*sys.modules} - modules:
            if _beside_a_script(name):
                del sys.modules[name]  # scripts of several folders have modules of one name
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


def _beside_a_script(name: str) -> bool:
    """Whether a module was found through the folder of a script, not in a package."""
    file = getattr(sys.modules[name], "__file__", None) or ""
    return "." not in name and "site-packages" not in file and "examples" in Path(file).parts
