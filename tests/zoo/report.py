"""``python -m tests.zoo.report``: the tables of docs/zoo.md, from the results that there are."""

from __future__ import annotations

import json
import sys
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from tests.zoo.__main__ import ROOT
from tests.zoo.catalogue import LIBRARIES, names

__all__ = ["main", "page"]

Line = dict[str, Any]
STATUSES = ("equal", "refused", "failed", "wrong", "hang", "died")
HEAD = """# The zoo

Models of other libraries, taken as they are, trained in parts and compared with plain PyTorch. `make zoo`
runs all of them and renews this page. It installs the libraries in an environment of its own
(`requirements-zoo.txt`), and an interrupted run continues where it stopped.

A case is a tiny configuration of an architecture, with random weights and nothing random in its forward.
It is trained for three steps of plain SGD, on 4 microbatches: once in one process with plain PyTorch, and
once with the automatic plan on as many processes as there are stages. Losses, gradients of every step, and
the whole state dict at the end, buffers included, must agree within 1e-5 of each tensor's largest entry.

Details:

- Some models amplify rounding errors. They must agree within twice the distance that plain PyTorch has from
  itself when its backward rounds differently.
- Half of the cases have their weights in a mapped safetensors file (transformers: `from_pretrained`).
- A quarter use the activation checkpointing of their library, if it has one. Running statistics of norms are
  not compared there ([why](restrictions.md#what-works-differently-without-a-message)).
- Architectures whose tiny configuration does not train in plain PyTorch are not cases.

Outcomes:

- *Equal*: as plain PyTorch.
- *Refused*: an error of OpenSMD's own that says what is not supported and what to do.
- *Failed*: any other error.
- *Wrong*, *hang*, *died*: numbers further apart than that, no end, or a rank that was gone.

The last column is torch's own `torch.distributed.pipelining.pipeline()` on the same models: how many of them
its tracer cuts in two before a middle layer, with `use_cache=False` where there is such a setting. Nothing
was trained there.
"""


def page(lines: Iterable[Line], *, listed: int) -> str:
    """The whole page, of the results of some of the ``listed`` models."""
    latest = {(line["kind"], line["model"], line.get("stages", 0)): line for line in lines}
    splits = [line for (kind, *_), line in latest.items() if kind == "split"]
    traced = {line["model"]: line["status"] for (kind, *_), line in latest.items() if kind == "tracer"}
    none = sum(kind == "plain" for kind, *_ in latest)
    parts = [HEAD.rstrip()]
    for stages in sorted({line["stages"] for line in splits}):
        these = [line for line in splits if line["stages"] == stages]
        run = f"Of {listed} models, {len(these)} have been run and {none} turned out not to be cases."
        if swayed := sum(line["status"] == "equal" and line.get("swayed", False) for line in these):
            run += f" Equal ones that amplify rounding errors, in plain PyTorch as well: {swayed}."
        run += f" Revisions of the code: {_revisions(these)}."
        parts += [f"## {stages} stages", run, "\n".join(_table(these, traced))]
    parts += ["## What was not equal", "\n".join(_reasons(splits))]
    return "\n\n".join(parts) + "\n"


def _revisions(lines: Sequence[Line]) -> str:
    """Which commits the results are of, and how many each."""
    count = Counter(line.get("code", "an earlier version") for line in lines)
    if len(count) == 1:
        return next(iter(count))
    return ", ".join(f"{code} ({number})" for code, number in count.most_common())


def _table(lines: Sequence[Line], traced: dict[str, str]) -> Iterator[str]:
    yield f"| library | cases | {' | '.join(STATUSES)} | torch's tracer |"
    yield "|---|" + "---|" * (len(STATUSES) + 2)
    libraries = sorted({_library(line) for line in lines})
    for library in libraries:
        yield _row(library, [line for line in lines if _library(line) == library], traced)
    if len(libraries) > 1:
        yield _row("**all**", lines, traced)


def _row(title: str, lines: Sequence[Line], traced: dict[str, str]) -> str:
    count = Counter(line["status"] for line in lines)
    tried = [traced[line["model"]] for line in lines if line["model"] in traced]
    tracer = f"{tried.count('split')} of {len(tried)}" if tried else "not run"
    return f"| {title} | {len(lines)} | {' | '.join(str(count[status]) for status in STATUSES)} | {tracer} |"


def _library(line: Line) -> str:
    return str(line["model"].partition(": ")[0])


def _reasons(lines: Sequence[Line]) -> Iterator[str]:
    others = sorted((line for line in lines if line["status"] != "equal"), key=lambda line: line["model"])
    if not others:
        yield "Nothing."
        return
    yield "| model | stages | outcome | why |"
    yield "|---|---|---|---|"
    for line in others:
        why = textwrap.shorten(line["why"].replace("|", "\\|"), 300, placeholder=" …")
        yield f"| {line['model']} | {line['stages']} | {line['status']} | {why} |"


def main() -> int:
    """Write docs/zoo.md."""
    results = ROOT / "out" / "zoo.jsonl"
    if not results.exists():
        print(f"{results} is not there: run python -m tests.zoo first", file=sys.stderr)
        return 1
    listed = sum(len(names(library)) for library in LIBRARIES)
    text = page(map(json.loads, results.read_text().splitlines()), listed=listed)
    (ROOT / "docs" / "zoo.md").write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
