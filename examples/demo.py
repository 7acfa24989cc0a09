"""``make demo``: data parallelism over smddp, smddp against gloo, then a model split over processes."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

EXAMPLES = Path(__file__).parent
SMDRUN = Path(sys.executable).with_name("smdrun")
CHART = "out/pipeline.png"
STEPS = [  # title, processes (None: as asked for), script and its options
    ("A convolutional net on handwritten digits", None, ["data_parallel/digits.py"]),
    ("A character-level GPT on the standard library's own sources", None, ["data_parallel/char_gpt.py"]),
    ("smddp against gloo on the same work, step by step in turn", None, ["data_parallel/side_by_side.py"]),
    (
        "A GPT split over two processes, and the same training in one",
        2,
        ["model_parallel/pipeline.py", "--compare", "--chart", CHART],
    ),
    (
        "Two copies of the split GPT, and the same training in one process",
        4,
        ["model_parallel/hybrid.py", "--compare"],
    ),
    (
        "A GPT that does not fit into one process, split over four that may hold no more",
        4,
        ["model_parallel/limited.py"],
    ),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2, help="processes of the data-parallel parts")
    asked = parser.parse_args().n
    console = Console()
    console.rule("Compiling the native core (once, about half a minute)")
    subprocess.run([sys.executable, "-m", "opensmd.native.build"], check=True)
    start = time.perf_counter()
    for title, processes, (script, *options) in STEPS:
        ranks = str(processes or asked)
        console.rule(title)
        console.print(" ".join(["smdrun", "-n", ranks, f"examples/{script}", *options]), style="dim")
        subprocess.run([SMDRUN, "-n", ranks, EXAMPLES / script, *options], check=True)
    console.rule(f"done in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
