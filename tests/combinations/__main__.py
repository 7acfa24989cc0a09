"""``python -m tests.combinations``: train every model at all degrees, and renew docs/combinations.md.

Then save some of these trainings at all degrees, and let each go on at all of them. Prints what is further
from one process than it may be. ``--models`` and ``--ranks`` leave some out, and the page as it is.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.combinations.checkpoints import KINDS, rest_of, resumed, saved
from tests.combinations.compare import differences, distance
from tests.combinations.models import MODELS
from tests.combinations.training import STEPS, alone, shared_out
from tests.combinations.ways import PRECISIONS, Degrees, all_degrees
from tests.support.patience import PATIENCE
from tests.support.ranks import RankFailed, RankPool

PAGE = Path(__file__).resolve().parents[2] / "docs" / "combinations.md"
RANKS = 8
HEAD = f"""# Every combination of degrees

All ways of dividing a model among ranks, combined and trained in every precision: {{degrees}} combinations
of partitions, tensor-parallel ranks, sharded parameters (`sharded_data_parallel_degree`) and copies of all
that. These are all combinations that fit {RANKS} processes. The models are an MLP, a tiny GPT-2 with tied
embeddings and a tiny Llama. `python -m tests.combinations` runs them and renews this page.

A training is {STEPS} steps of SGD with momentum, with gradients clipped over all ranks and two microbatches.
The batch is always the same. The training is compared with one process: FP32 with plain PyTorch, 16 bits with
torch's own recipe (a model of 16 bits, FP32 masters, fp16 with a loss scale). The table shows the largest
difference of a gradient in the first step, relative to the largest entry of its tensor. A difference that is
too large would be printed in bold.

- FP32 agrees within 1e-6 in losses, norms and gradients, and within 1e-5 in parameters after all steps.
- In 16 bits, ranks add up numbers that have been rounded. One rounding is 7.8e-3 in bf16, and 9.8e-4 in fp16.
  Losses agree within half a rounding and norms within one; gradients and masters agree within four roundings
  of the largest entry of their tensor and a quarter of the model's.
- With one rank, or with partitions alone, 16 bits compute what torch's recipe does.
"""


CHECKPOINTS = """
## Checkpoints

{names} were also saved after the first step at each of these degrees, partially and in full, with the
optimizer's state and masters. From both, training was resumed at each of these degrees: {count} resumptions.
After each, losses, norms and parameters were compared in the same way with the undisturbed training of one
process.
{verdict}
"""
RESUMED = [("MLP", "fp32"), ("MLP", "fp16")]


@dataclass
class Jobs:
    """Ranks for every number of them, and how many trainings were made and differed."""

    pools: dict[int, RankPool] = field(default_factory=dict)
    count: int = 0
    wrong: int = 0

    def of(self, degrees: Degrees) -> RankPool:
        """As many ranks as these degrees need."""
        if degrees.ranks not in self.pools:
            self.pools[degrees.ranks] = RankPool(degrees.ranks)
        return self.pools[degrees.ranks]

    def note(self, text: str, lines: Sequence[str]) -> None:
        """Print what became of a training, and what differs."""
        self.count += 1
        self.wrong += bool(lines)
        print(text, *lines[:3], sep="\n    ", flush=True)


def main(words: Sequence[str]) -> int:
    """Run what was asked for; how many combinations differ."""
    parser = argparse.ArgumentParser(prog="python -m tests.combinations", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=RANKS)
    options = parser.parse_args(words)
    jobs = Jobs()
    cells = train_all(jobs, options.models, options.ranks)
    print(f"{jobs.count} trainings, {jobs.wrong} differ from one process", flush=True)
    resuming = Jobs(jobs.pools)
    for name, precision in RESUMED:
        if name in options.models:
            resume_all(resuming, name, precision, list(all_degrees(options.ranks)))
    print(f"{resuming.count} resumptions, {resuming.wrong} differ from one process")
    for pool in jobs.pools.values():
        pool.close()
    if options.ranks == RANKS and options.models == list(MODELS):
        head = HEAD.format(degrees=len(list(all_degrees(RANKS))))
        PAGE.write_text("\n".join([head, *table(cells)]) + "\n" + about_checkpoints(resuming))
    return jobs.wrong + resuming.wrong


def train_all(jobs: Jobs, models: Sequence[str], ranks: int) -> dict[tuple[Degrees, str, str], str]:
    """The cells of the table."""
    cells: dict[tuple[Degrees, str, str], str] = {}
    for degrees in all_degrees(ranks):
        for name in models:
            for precision in PRECISIONS:
                cell, lines = trained(jobs.of(degrees), name, precision, degrees)
                cells[degrees, name, precision] = cell
                jobs.note(f"{degrees} {name} {precision}: {cell}", lines)
    return cells


def resume_all(jobs: Jobs, name: str, precision: str, every: Sequence[Degrees]) -> None:
    """Save at all degrees, and go on at all from each."""
    with tempfile.TemporaryDirectory() as top:
        folders = {degrees: Path(top) / str(number) for number, degrees in enumerate(every)}
        for degrees, folder in folders.items():
            folder.mkdir()
            jobs.of(degrees).run(saved, name, precision, degrees, folder, timeout=4 * PATIENCE)
        for degrees in every:
            for kind in KINDS:
                go_on(jobs, name, precision, degrees, kind, folders)


def go_on(
    jobs: Jobs, name: str, precision: str, degrees: Degrees, kind: str, folders: Mapping[Degrees, Path]
) -> None:
    """At ``degrees``, from what was saved at all others."""
    wanted = rest_of(name, precision)
    for source, folder in folders.items():
        try:
            found = jobs.of(degrees).run(
                resumed, name, precision, degrees, folder, kind, timeout=4 * PATIENCE
            )
            lines = [line for one in found for line in differences(one, wanted, precision)]
        except RankFailed as error:
            lines = [str(error)]
        jobs.note(f"{name} {precision}, {kind} of {source} at {degrees}: {len(lines)} differences", lines)


def about_checkpoints(jobs: Jobs) -> str:
    """What the page says of resumptions."""
    names = " and ".join(f"the {name} in {precision}" for name, precision in RESUMED)
    verdict = "None differed." if jobs.wrong == 0 else f"**{jobs.wrong} differed.**"
    return CHECKPOINTS.format(names=names[0].upper() + names[1:], count=jobs.count, verdict=verdict)


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
