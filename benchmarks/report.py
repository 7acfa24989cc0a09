"""``python -m benchmarks.report``: put the newest results into the pages of benchmarks and docs/img/.

The pages are written by hand except between ``<!-- results NAME -->`` and ``<!-- end -->``: there the table
of ``out/bench/NAME.json`` is renewed, with a line on the machine under it.
``<!-- results NAME columns: a; b -->`` keeps these columns alone. Plots are copied.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from benchmarks import targets
from benchmarks.allocator.__main__ import grid as allocator_grid
from benchmarks.allreduce.__main__ import ratios as allreduce_ratios
from benchmarks.collectives.__main__ import ratios as collectives_ratios
from benchmarks.ddp.__main__ import RATIOS as DDP_RATIOS
from benchmarks.harness.results import Results
from benchmarks.harness.table import Grid, Ratio, markdown
from benchmarks.hosts.__main__ import compressed_grid
from benchmarks.hosts.__main__ import grid as hosts_grid
from benchmarks.hosts.prediction import grid as prediction_grid
from benchmarks.hosts.step import grid as hosts_step_grid
from benchmarks.memory.__main__ import grid as memory_grid
from benchmarks.one_partition.__main__ import grid as one_partition_grid
from benchmarks.pipeline.__main__ import grid as pipeline_grid
from benchmarks.resident.__main__ import grid as resident_grid
from benchmarks.saving.__main__ import grid as saving_grid
from benchmarks.sharded.__main__ import RATIOS as SHARDED_RATIOS
from benchmarks.small_messages.__main__ import RATIOS as SMALL_MESSAGES_RATIOS
from benchmarks.tensor_parallel.__main__ import RATIOS as TENSOR_PARALLEL_RATIOS
from benchmarks.timeline.__main__ import grid as timeline_grid

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "bench"
PAGES = [
    ROOT / "docs" / name
    for name in (
        "benchmarks.md",
        "benchmarks-hosts.md",
        "benchmarks-tables.md",
        "models-that-do-not-fit.md",
        "checkpoints.md",
    )
]
GRIDS = {
    "pipeline": pipeline_grid,
    "allocator": allocator_grid,
    "one partition": one_partition_grid,
    "hosts": hosts_grid,
    "compressed": compressed_grid,
    "prediction": prediction_grid,
    "step between hosts": hosts_step_grid,
    "memory": memory_grid,
    "resident": resident_grid,
    "saving": saving_grid,
    "timeline": timeline_grid,
}
RATIOS = {
    "ddp step": DDP_RATIOS,
    "sharded step": SHARDED_RATIOS,
    "small messages": SMALL_MESSAGES_RATIOS,
    "tensor parallel step": TENSOR_PARALLEL_RATIOS,
}
BLOCK = re.compile(
    r"(<!-- results (?P<name>[\w.-]+)(?: columns: (?P<columns>[^\n]+?))? -->\n).*?(<!-- end -->)", re.DOTALL
)


def main() -> None:
    """Renew every table whose results exist; say which do not."""
    text = ""
    for page in PAGES:
        renewed = BLOCK.sub(lambda block: block[1] + _content(block) + block[4], page.read_text())
        page.write_text(renewed)
        text += renewed
    images = ROOT / "docs" / "img"
    images.mkdir(parents=True, exist_ok=True)
    for plot in sorted(OUT.glob("*.png")):
        if f"img/{plot.name}" in text:
            shutil.copy(plot, images / plot.name)


def _content(block: re.Match[str]) -> str:
    content = table(block["name"], block[0])
    return with_columns(content, block["columns"].split("; ")) if block["columns"] else content


def with_columns(content: str, wanted: Sequence[str]) -> str:
    """Markdown in which the lines of its table have only the columns with these headings, in this order."""
    lines, numbers = [], None
    for line in content.splitlines():
        if line.startswith("|"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            numbers = numbers or [cells.index(heading) for heading in wanted]
            line = "| " + " | ".join(cells[number] for number in numbers) + " |"
        lines.append(line)
    return "\n".join(lines) + "\n"


def table(name: str, before: str) -> str:
    """The Markdown of one result, or what stood there before."""
    old = before.split("\n", 1)[1].removesuffix("<!-- end -->")
    if name == "targets":
        missing = targets.missing(OUT)
        print("".join(f"no {stem}*.json: the table of targets stays as it was\n" for stem in missing), end="")
        return old if missing else targets.markdown(OUT)
    path = OUT / f"{name}.json"
    if not path.exists():
        print(f"no {path.relative_to(ROOT)}: its table stays as it was")
        return old
    results = Results.load(path)
    notes = "; ".join(f"{key}: {value}" for key, value in results.notes.items())
    if results.claim == "floor":
        body = Grid(
            "", ["limit", "median"], [[row.case, f"{row.p50:.3g}"] for row in results.rows]
        ).markdown()
    elif results.claim in GRIDS:
        body = GRIDS[results.claim](results).markdown()
    else:
        body = markdown(results, _ratios(results))
    return f"{body}\n{results.layout}, medians. {notes}.\n"


def _ratios(results: Results) -> list[Ratio]:
    if results.claim in RATIOS:
        return RATIOS[results.claim]
    mpi_name = results.notes.get("MPI", "none")
    return allreduce_ratios(mpi_name) if results.claim == "all_reduce" else collectives_ratios(mpi_name)


if __name__ == "__main__":
    main()
