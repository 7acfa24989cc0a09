"""``make demo``: train two models with two processes over smddp, then smddp against gloo on the same work."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

EXAMPLES = Path(__file__).parent / "data_parallel"
SMDRUN = Path(sys.executable).with_name("smdrun")
STEPS = [
    ("A convolutional net on handwritten digits", "digits.py"),
    ("A character-level GPT on the standard library's own sources", "char_gpt.py"),
    ("smddp against gloo on the same work, step by step in turn", "side_by_side.py"),
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-n", type=int, default=2, help="processes")
    ranks = str(parser.parse_args().n)
    console = Console()
    console.rule("Compiling the native core (once, about half a minute)")
    subprocess.run([sys.executable, "-m", "opensmd.collectives.build"], check=True)
    start = time.perf_counter()
    for title, script in STEPS:
        command = ["smdrun", "-n", ranks, f"examples/data_parallel/{script}"]
        console.rule(title)
        console.print(" ".join(command), style="dim")
        subprocess.run([SMDRUN, "-n", ranks, EXAMPLES / script], check=True)
    console.rule(f"done in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
