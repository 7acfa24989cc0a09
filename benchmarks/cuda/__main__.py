"""``python -m benchmarks.cuda``: calls with CUDA tensors over smddp and over torch's NCCL, then the table."""

from __future__ import annotations

import torch

from benchmarks.cuda.rank import NCCL, OURS
from benchmarks.harness import launch
from benchmarks.harness.options import command_parser, rank_arguments
from benchmarks.harness.table import Ratio, print_table

RANK = "benchmarks.cuda.rank"


def main() -> None:
    """Measure all calls, by default on two ranks."""
    parser = command_parser(__doc__, seconds=3.0)
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit(f"benchmarks.cuda needs a GPU, and torch {torch.__version__} finds none")
    results = launch.run(RANK, ranks=options.ranks, mpi=None, args=rank_arguments(options))
    print_table(results, [Ratio("NCCL / smddp", OURS, [NCCL])])
    results.save(options.out / f"cuda-{options.ranks}.json")


if __name__ == "__main__":
    main()
