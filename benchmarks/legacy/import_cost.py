"""``python -m benchmarks.legacy.import_cost``: what the import aliases cost at ``import torch``.

Two figures: the time that torch spends on them, measured inside fresh interpreters, and the whole time
of ``import torch`` with torch's loading of extensions on and off, interleaved.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

RUNS = 15
WHOLE = "import time; t = time.perf_counter(); import torch; print(time.perf_counter() - t)"
ALIASES = """
import os; os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
import time, torch
t = time.perf_counter()
from importlib.metadata import entry_points
found = entry_points(group="torch.backends")
u = time.perf_counter()
for each in found:
    if each.value.startswith("opensmd."):
        each.load()()
print(time.perf_counter() - u)
"""


def main() -> None:
    """Print the medians in milliseconds."""
    on, off, aliases = [], [], []
    for _ in range(RUNS):
        on.append(seconds(WHOLE, "1"))
        off.append(seconds(WHOLE, "0"))
        aliases.append(seconds(ALIASES, "0"))
    print(f"the aliases alone:                  {1000 * statistics.median(aliases):8.2f} ms")
    print(f"import torch, extensions on:      {1000 * statistics.median(on):8.2f} ms")
    print(f"import torch, extensions off:     {1000 * statistics.median(off):8.2f} ms")


def seconds(script: str, autoload: str) -> float:
    """What the script prints, from a fresh interpreter."""
    env = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": autoload}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=True)
    return float(done.stdout)


if __name__ == "__main__":
    main()
