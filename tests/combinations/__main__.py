"""``python -m tests.combinations``: train every model at all degrees, and renew docs/combinations.md.

Prints what is further from one process than it may be. ``--models`` and ``--ranks`` leave some out, and the
page as it is.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.combinations.compare import differences, distance
from tests.combinations.models import MODELS
from tests.combinations.training import STEPS, alone, shared_out
from tests.combinations.ways import PRECISIONS, Degrees, all_degrees
from tests.support.patience import PATIENCE
from tests.support.ranks import RankFailed, RankPool

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
RANKS = 8
HEAD = f"""# Every combination of degrees

All ways of sharing a model out among ranks, trained together and in every precision: {{degrees}} combinations
of partitions, tensor-parallel ranks, sharded parameters (`sharded_data_parallel_degree`) and copies of all
that, which are all that {RANKS} processes allow. The models are an MLP, a tiny GPT-2 with tied embeddings and
a tiny Llama. `python -m tests.combinations` runs them and renews this page.

A training is {STEPS} steps of SGD with momentum, with gradients clipped over all ranks and two microbatches;
the batch is always the same. It is compared with one process: FP32 with plain PyTorch, 16 bits with torch's
own recipe (a model of 16 bits, FP32 masters, fp16 with a loss scale). The table shows the largest difference
of a gradient in the first step, relative to the largest entry of its tensor. A difference that is too large
would be printed in bold.

- FP32 agrees within 1e-6 in losses and norms, and within 1e-5 in gradients and parameters.
- In 16 bits, ranks add up numbers that have been rounded. One rounding is 7.8e-3 in bf16, and 9.8e-4 in fp16.
  Losses agree within half a rounding and norms within one; gradients and masters agree within four roundings
  of the largest entry of their tensor and a quarter of the model's.
- With one rank, or with partitions alone, 16 bits compute what torch's recipe does.
"""


def main(words: Sequence[str]) -> int:
    """Run what was asked for; how many combinations differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=RANKS)
    options = parser.parse_args(words)
    pools: dict[int, RankPool] = {}
    cells: dict[tuple[Degrees, str, str], str] = {}
    wrong = 0
    for degrees in all_degrees(options.ranks):
        for name in options.models:
            for precision in PRECISIONS:
                pool = pools.setdefault(degrees.ranks, RankPool(degrees.ranks))
                cell, lines = trained(pool, name, precision, degrees)
                cells[degrees, name, precision] = cell
                wrong += bool(lines)
                print(f"{degrees} {name} {precision}: {cell}", *lines[:3], sep="\n    ", flush=True)
    for pool in pools.values():
        pool.close()
    print(f"{len(cells)} trainings, {wrong} differ from one process")
    if options.ranks == RANKS and options.models == list(MODELS):
        PAGE.write_text("\n".join([HEAD.format(degrees=len(list(all_degrees(RANKS)))), *table(cells)]) + "\n")
    return wrong


def trained(pool: RankPool, name: str, precision: str, degrees: Degrees) -> tuple[str, list[str]]:
    """A cell of the table, and what differs."""
    wanted = alone(name, precision)
    try:
        found = pool.run(shared_out, name, precision, degrees, timeout=4 * PATIENCE)
    except RankFailed as error:
        return "failed", [str(error)]
    lines = [line for one in found for line in differences(one, wanted, precision)]
    far = max(distance(one, wanted).gradients for one in found)
    return f"**{far:.0e}**" if lines else f"{far:.0e}", lines


def table(cells: dict[tuple[Degrees, str, str], str]) -> Iterator[str]:
    """A row for each combination of degrees."""
    heads = [f"{name} {precision}" for name in MODELS for precision in PRECISIONS]
    yield f"| partitions | tensor | sharded | copies | ranks | {' | '.join(heads)} |"
    yield "|---" * (5 + len(heads)) + "|"
    for degrees in dict.fromkeys(key[0] for key in cells):
        numbers = (degrees.stages, degrees.tensor, degrees.sharded, degrees.copies, degrees.ranks)
        values = [cells[degrees, name, precision] for name in MODELS for precision in PRECISIONS]
        yield f"| {' | '.join(map(str, numbers))} | {' | '.join(values)} |"


if __name__ == "__main__":
    sys.exit(min(1, main(sys.argv[1:])))
