"""``python -m tests.zoo``: train every model of the zoo in parts, and compare it with plain PyTorch.

One line of JSON is written for each result; what has a line is not done again, so a run can be cut off at any
time. Models that do not train in plain PyTorch, or draw random numbers, are no cases: they have one line.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

import opensmd
from tests.support.ranks import RankPool
from tests.zoo.catalogue import LIBRARIES, names
from tests.zoo.run import Line, split, traced

ROOT = Path(__file__).resolve().parents[2]
MODELS_PER_POOL = 60


class Results:
    """The lines of a file, by what they are results of."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._code = _revision()
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        self._lines = {self._key(line): line for line in map(json.loads, lines)}

    def _key(self, line: Line) -> tuple[str, str, int]:
        return line["kind"], line["model"], line.get("stages", 0)

    def wanted(self, kind: str, model: str, stages: int = 0) -> bool:
        """Whether there is no such result yet, of something that is a case."""
        return not {(kind, model, stages), ("plain", model, 0)} & self._lines.keys()

    def add(self, line: Line) -> None:
        """Keep a result with the code's revision, in the file too."""
        line = {**line, "code": self._code}
        self._lines[self._key(line)] = line
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{line['kind']} {line.get('stages', '')} {line['model']}: {line['status']} {line['why'][:160]}",
            flush=True,
        )


def _revision() -> str:
    """The commit that is checked out, with a plus where files differ from it; of a bare copy, the version."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--exclude=*", "--dirty=+"]
    described = subprocess.run(command, capture_output=True, text=True)
    return described.stdout.strip() if described.returncode == 0 else opensmd.__version__


def main(arguments: list[str]) -> int:
    """Do what has not been done."""
    options = _parser().parse_args(arguments)
    results = Results(options.out)
    until = time.monotonic() + options.seconds
    chosen = [key for library in options.libraries for key in names(library) if re.search(options.only, key)]
    if options.draw:
        chosen = random.Random(0).sample(chosen, min(options.draw, len(chosen)))
    with TemporaryDirectory(prefix="zoo-") as kept:
        for stages in options.stages:
            for some in _parts([name for name in chosen if results.wanted("split", name, stages)]):
                with closing(RankPool(stages)) as pool, closing(RankPool(1)) as alone:
                    for name in some:
                        if time.monotonic() < until:
                            results.add(split(pool, alone, name, stages, Path(kept)))
    if options.trace:
        for some in _parts([name for name in chosen if results.wanted("tracer", name)]):
            with closing(RankPool(1)) as alone:
                for name in some:
                    if time.monotonic() < until:
                        results.add({"kind": "tracer", "model": name, **traced(alone, name)})
    return 0


def _parts(names: list[str]) -> Iterator[list[str]]:
    """So many models at a time as one pool of processes takes: their libraries' code stays in memory."""
    for first in range(0, len(names), MODELS_PER_POOL):
        yield names[first : first + MODELS_PER_POOL]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.zoo", description=__doc__)
    parser.add_argument("libraries", nargs="*", default=LIBRARIES, help="all when none is named")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "zoo.jsonl")
    parser.add_argument("--stages", type=int, nargs="*", default=[3, 2, 4], help="none: the tracer alone")
    parser.add_argument("--only", default="", metavar="PATTERN", help="models whose names match")
    parser.add_argument("--draw", type=int, metavar="COUNT", help="so many of them, always the same")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing after this time")
    parser.add_argument("--no-trace", dest="trace", action="store_false", help="leave out torch's own tracer")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
