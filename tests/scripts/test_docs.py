"""Every Python example of the README and the docs runs, and every link between pages leads somewhere.

An example is a fence that begins with ```python. Words after that say how it runs::

    ```python                one process
    ```python ranks=2        two processes, RANK and WORLD_SIZE set as smdrun sets them
    ```python ranks=2 fresh  in processes of its own, for what cannot be undone in a process
    ```python continues      after the code of the page's example before it
    ```python raises=ValueError
    ```python needs=ray      only where that library is, which is where `make clients` has installed it

What is not to be run is not marked as Python.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.support.ranks import ROOT, RankPool, describe, run_once

FENCE = re.compile(r"^```python(?P<words>[^\n]*)\n(?P<source>.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?P<target>[^)#\s]+)(#[^)]*)?\)")
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Example:
    """One fence: where it stands and how it is to run."""

    place: str
    source: str
    ranks: int = 1
    fresh: bool = False
    raises: str | None = None
    needs: str | None = None


def pages() -> list[Path]:
    """The README, the guide for contributors, the pages of docs, and the pages beside the code."""
    found = [*ROOT.glob("*.md")]
    for folder in ("docs", "examples", "benchmarks"):
        found += (ROOT / folder).rglob("*.md")
    return sorted(found)


def examples() -> list[Example]:
    """Every Python fence of every page."""
    found = []
    for page in pages():
        text, before = page.read_text(), ""
        for fence in FENCE.finditer(text):
            place = f"{page.relative_to(ROOT)}:{text[: fence.start()].count(chr(10)) + 1}"
            found.append(read_fence(place, fence["words"].split(), fence["source"], before))
            before = found[-1].source
    return found


def read_fence(place: str, words: list[str], source: str, before: str = "") -> Example:
    """An example from the words after ```python; ``before`` is the source of the one before it."""
    ranks, fresh, raises, needs = 1, False, None, None
    for word in words:
        name, _, value = word.partition("=")
        if name == "ranks":
            ranks = int(value)
        elif name == "raises":
            raises = value
        elif name == "needs":
            needs = value
        elif word == "fresh":
            fresh = True
        elif word == "continues":
            source = before + source
        else:
            known = "ranks=N, fresh, continues, raises=ERROR and needs=LIBRARY"
            raise ValueError(f"{place}: {word!r} after ```python; known are {known}")
    return Example(place, source, ranks, fresh, raises, needs)


def run_source(example: Example, folder: str) -> None:
    """On a rank: run the example as a script in ``folder``, and leave the process as it was."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        code = compile(example.source, example.place, "exec")
        try:
            exec(code, {"__name__": "__main__"})
        except Exception as error:
            if type(error).__name__ != example.raises:
                raise
            return
        assert example.raises is None, f"{example.place} should have raised {example.raises}"
    finally:
        os.chdir(before)
        if dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group()


@pytest.mark.parametrize(
    "example",
    [example for example in examples() if example.needs is None],
    ids=lambda example: example.place,
)
def test_example_runs(example: Example, pool: Callable[[int], RankPool], tmp_path: Path) -> None:
    if example.fresh:
        outcomes = run_once(example.ranks, run_source, example, str(tmp_path), backend=None)
        assert all(outcome.kind == "value" for outcome in outcomes), describe(run_source, outcomes)
    else:
        pool(example.ranks).run(run_source, example, str(tmp_path), backend=None)


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    targets = [found["target"] for found in LINK.finditer(CODE.sub("", page.read_text()))]
    local = [target for target in targets if "://" not in target and not target.startswith("mailto:")]
    missing = [target for target in local if not (page.parent / target).exists()]
    assert not missing, f"{page}: nothing at {missing}"


def test_unknown_words_after_python_are_refused() -> None:
    with pytest.raises(ValueError, match="known are ranks=N"):
        read_fence("page.md:1", ["rank=2"], "")
