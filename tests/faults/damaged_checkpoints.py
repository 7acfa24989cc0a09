"""Thousands of damaged and foreign checkpoint files, of which none may load wrong.

    python -m tests.faults.damaged_checkpoints --trials 10000 --seed 1

Every trial takes a good checkpoint, spoils one of its files, and loads it as a script does. The outcome must
be what was saved, or SMPCheckpointError with the file's name and a model and optimizer that are as they were.
The first trials are every bit of the zip directories of three files and of what follows those, as far as half
of the trials go; the others are drawn.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import random
import sys
import tempfile
import time
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from opensmd.modelparallel.checkpoint.files import Caller, commit, write_aside
from opensmd.modelparallel.checkpoint.resume_folder import resume_from_checkpoint
from opensmd.modelparallel.checkpoint.save_folder import save_checkpoint
from opensmd.modelparallel.checkpoint.save_load import load, save
from opensmd.modelparallel.checkpoint.seal import RECORD, Label
from opensmd.modelparallel.exceptions import SMPCheckpointError
from opensmd.modelparallel.optimizer import DistributedOptimizer
from opensmd.modelparallel.state import state
from opensmd.modelparallel.state_dicts.model_state import ModelState
from tests.support.partitioned import restart, split

__all__ = ["Report", "run"]

SLOW = 10.0  # seconds for a file of some kilobytes
DIRECTORY = b"PK\x01\x02"


@dataclass(frozen=True)
class Specimen:
    """A good checkpoint.

    Attributes:
        files: what to damage, by path.
        load: load it as a script does; returns what came of it.
        expected: what should come of it.
        unchanged: says whether a refusal has left model and optimizer as they were.
    """

    name: str
    files: dict[Path, bytes]
    load: Callable[[], Any]
    expected: Any
    unchanged: Callable[[], bool] = lambda: True


@dataclass
class Report:
    """What came of all trials.

    Attributes:
        counts: trials by (specimen, damage, outcome).
        bad: a line for every trial that should not have ended so.
    """

    counts: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    bad: list[str] = field(default_factory=list)

    def total(self, outcome: str | None = None) -> int:
        """The number of trials with this outcome, or of all."""
        return sum(count for key, count in self.counts.items() if outcome in (None, key[2]))

    def __str__(self) -> str:
        outcomes = sorted({key[2] for key in self.counts})
        rows = sorted({key[:2] for key in self.counts})
        lines = [f"{'checkpoint':12} {'damage':22} " + " ".join(f"{outcome:>14}" for outcome in outcomes)]
        lines += [
            f"{specimen:12} {damage:22} "
            + " ".join(f"{self.counts[specimen, damage, outcome]:14}" for outcome in outcomes)
            for specimen, damage in rows
        ]
        lines.append(f"{'all':35} " + " ".join(f"{self.total(outcome):14}" for outcome in outcomes))
        return "\n".join([*lines, *self.bad[:20]])


def run(folder: Path, *, trials: int, seed: int) -> Report:
    """Damage and load ``trials`` times; called in a process group of one.

    Args:
        folder: an empty one.
        seed: of everything that is drawn.
    """
    rng = random.Random(seed)
    restart(partitions=1)
    specimens = [full(folder), parts(folder), plain(folder), earlier(folder), checkpoint_folder(folder)]
    report = Report()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for specimen in specimens:
            assert same(specimen.load(), specimen.expected), f"{specimen.name} does not load undamaged"
        for specimen, damage, path, content in spoilt(specimens, rng, trials):
            try_one(specimen, damage, path, content, report)
    return report


def try_one(specimen: Specimen, damage: str, path: Path, content: bytes, report: Report) -> None:
    """One trial: replace the file, load, judge, put the good one back."""
    path.write_bytes(content)
    start = time.monotonic()
    detail = ""
    try:
        outcome = "loaded right" if same(specimen.load(), specimen.expected) else "LOADED WRONG"
    except SMPCheckpointError as error:
        detail = str(error)
        named = path.name in detail or path.name.rpartition("_")[0] in detail
        outcome = "refused" if named and specimen.unchanged() else "UNCLEAR"
    except Exception as error:  # what this campaign looks for
        outcome, detail = "OTHER ERROR", f"{type(error).__name__}: {error}"
    finally:
        path.write_bytes(specimen.files[path])
    if time.monotonic() - start > SLOW:
        outcome = "SLOW"
    report.counts[specimen.name, damage, outcome] += 1
    if outcome not in ("loaded right", "refused"):
        report.bad.append(f"{outcome}: {specimen.name}, {damage}, {path.name}: {detail[:200]}")


# --- checkpoints --------------------------------------------------------------------------------------


def content() -> dict[str, Any]:
    """Some of everything that checkpoints hold."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 5, generator=generator)
    return {
        "weight": weight,
        "tied": weight,
        "half": torch.randn(7, generator=generator).bfloat16(),
        "bytes": torch.arange(64, dtype=torch.uint8),
        "epoch": 7,
        "lr": np.float64(0.1),
        "args": argparse.Namespace(name="text", steps=[1, 2]),
    }


def full(folder: Path) -> Specimen:
    """One file of smp.save."""
    path = folder / "full.pt"
    save(content(), str(path), partial=False)
    return Specimen("full", read_files(path), lambda: load(str(path), partial=False), content())


def parts(folder: Path) -> Specimen:
    """Two files of one partial save, put together by one process."""
    path = folder / "parts.pt"
    whole = content()
    for part, names in enumerate((["weight", "tied", "half", "args"], ["bytes", "epoch", "lr"])):
        own = {"m": {**{name: whole[name] for name in names}, "_smp_is_partial": True}}
        label = Label(save="5a5a", part=part, parts=2)
        target = folder / f"parts.pt_{part}"
        commit(write_aside(own, target, label, caller=Caller()), target, alone=True)
    files = read_files(*(folder / f"parts.pt_{part}" for part in range(2)))
    return Specimen("parts", files, lambda: load(str(path)), {"m": whole})


def plain(folder: Path) -> Specimen:
    """A file of torch.save, without our checksum."""
    path = folder / "plain.pt"
    torch.save(content(), path)
    return Specimen("torch.save", read_files(path), lambda: load(str(path), partial=False), content())


def earlier(folder: Path) -> Specimen:
    """A partial checkpoint of one file as versions before the checksum wrote it."""
    path = folder / "earlier.pt_0"
    torch.save(content(), path)
    with zipfile.ZipFile(path, "a") as archive:
        root = archive.namelist()[0].partition("/")[0]
        archive.writestr(f"{root}/{RECORD}", json.dumps({"save": "ab12", "part": 0, "parts": 1}))
    return Specimen("earlier", read_files(path), lambda: load(str(folder / "earlier.pt")), content())


def checkpoint_folder(folder: Path) -> Specimen:
    """What smp.save_checkpoint wrote, loaded into a model and an optimizer that are elsewhere."""
    target = folder / "folder"
    torch.manual_seed(3)
    model = ModelState(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 3)))
    plain_optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    plain_optimizer.step()
    state.model = model
    optimizer = DistributedOptimizer(plain_optimizer)
    split(model)
    save_checkpoint(str(target), "t", model=model, optimizer=optimizer, user_content=content())
    saved = pickle.dumps((model.state_dict(), optimizer.state_dict()))
    expected = (content(), *pickle.loads(saved))

    def tensors() -> list[torch.Tensor]:
        return [*model.parameters(), *(tensor for own in optimizer.state.values() for tensor in own.values())]

    def spoil() -> None:
        with torch.no_grad():
            for tensor in tensors():
                tensor.fill_(-1.0)

    def resume() -> Any:
        spoil()
        found = resume_from_checkpoint(str(target))
        return found, model.state_dict(), optimizer.state_dict()

    def unchanged() -> bool:
        return all(bool((tensor == -1.0).all()) for tensor in tensors())

    files = read_files(*(path for path in target.rglob("*") if path.is_file()))
    return Specimen("folder", files, resume, expected, unchanged)


def read_files(*paths: Path) -> dict[Path, bytes]:
    """The content of files."""
    return {path: path.read_bytes() for path in paths}


# --- damage -------------------------------------------------------------------------------------------


def spoilt(
    specimens: list[Specimen], rng: random.Random, trials: int
) -> Iterator[tuple[Specimen, str, Path, bytes]]:
    """So many damaged files: up to half of them every bit of some directories, the others drawn."""
    bits = [
        (specimen, path, bit)
        for specimen in specimens
        if len(specimen.files) == 1
        for path, good in specimen.files.items()
        for bit in range(8 * good.index(DIRECTORY), 8 * len(good))
    ]
    bits = bits if len(bits) <= trials // 2 else rng.sample(bits, trials // 2)
    for specimen, path, bit in bits:
        yield specimen, "every directory bit", path, flipped(specimen.files[path], bit)
    for _ in range(trials - len(bits)):
        specimen = rng.choice(specimens)
        path, good = rng.choice(list(specimen.files.items()))
        name, damage = rng.choice(list(DAMAGES.items()))
        bad = damage(good, rng)
        while bad == good:
            bad = damage(good, rng)
        yield specimen, name, path, bad


def flipped(good: bytes, bit: int) -> bytes:
    """``good`` with one other bit."""
    bad = bytearray(good)
    bad[bit // 8] ^= 1 << bit % 8
    return bytes(bad)


def directory_bit(good: bytes, rng: random.Random) -> bytes:
    """One bit of a directory, of any file."""
    return flipped(good, rng.randrange(8 * max(0, good.find(DIRECTORY)), 8 * len(good)))


def any_bit(good: bytes, rng: random.Random) -> bytes:
    """One bit anywhere."""
    return flipped(good, rng.randrange(8 * len(good)))


def some_bits(good: bytes, rng: random.Random) -> bytes:
    """Two to twenty bits anywhere."""
    for _ in range(rng.randint(2, 20)):
        good = any_bit(good, rng)
    return good


def zeroed(good: bytes, rng: random.Random) -> bytes:
    """A block that the disk never got."""
    start = rng.randrange(len(good))
    size = rng.choice([16, 512, 4096])
    return good[:start] + bytes(len(good[start : start + size])) + good[start + size :]


def shuffled(good: bytes, rng: random.Random) -> bytes:
    """Two pieces in each other's place."""
    size = max(1, min(512, len(good) // 4))
    a, b = sorted(rng.sample(range(len(good) - size + 1), 2))
    if b - a < size:
        return good[:a] + good[b : b + size] + good[a + size :]
    return good[:a] + good[b : b + size] + good[a + size : b] + good[a : a + size] + good[b + size :]


def truncated(good: bytes, rng: random.Random) -> bytes:
    """The beginning alone."""
    return good[: rng.randrange(len(good))]


def headless(good: bytes, rng: random.Random) -> bytes:
    """The end alone."""
    return good[rng.randrange(1, len(good) + 1) :]


def longer(good: bytes, rng: random.Random) -> bytes:
    """Bytes too many, somewhere."""
    where = rng.choice([0, len(good), rng.randrange(len(good))])
    return good[:where] + rng.randbytes(rng.randint(1, 600)) + good[where:]


def foreign(good: bytes, rng: random.Random) -> bytes:
    """Something else under the name."""
    kind = rng.randrange(8)
    archive = io.BytesIO()
    if kind == 0:
        with zipfile.ZipFile(archive, "w") as other:
            other.writestr(rng.choice(["data.pkl", "archive/data.pkl", "notes.txt"]), rng.randbytes(50))
        return archive.getvalue()
    if kind == 1:
        np.savez(archive, a=np.ones(rng.randint(1, 50)))
        return archive.getvalue()
    return [
        rng.randbytes(rng.randint(1, 5000)),
        b"\x89PNG\r\n\x1a\n" + rng.randbytes(100),
        json.dumps({"a": list(range(rng.randint(1, 99)))}).encode(),
        pickle.dumps({"a": [rng.random()]}, protocol=rng.choice([0, 2, 4])),
        b"PK\x03\x04"
        + rng.randbytes(rng.randint(0, 900))
        + b"PK\x05\x06"
        + rng.randbytes(rng.randint(0, 40)),
        b"" if rng.random() < 0.3 else rng.choice([b"P", b"PK\x03\x04", b"\x80\x02.", b"opensmd:1:"]),
    ][kind - 2]


DAMAGES: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "a directory bit": directory_bit,
    "a bit anywhere": any_bit,
    "some bits": some_bits,
    "a zeroed block": zeroed,
    "pieces exchanged": shuffled,
    "truncated": truncated,
    "the end alone": headless,
    "bytes too many": longer,
    "a foreign file": foreign,
}


def same(one: Any, other: Any) -> bool:
    """Whether two loaded objects are equal, in types, dtypes and shapes too."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return sorted(map(str, one)) == sorted(map(str, other)) and all(
            same(one[key], other[key]) for key in one
        )
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def main() -> int:
    """The command line; returns 1 if a trial did not end as it must."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    dist.init_process_group(
        "gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = run(Path(folder), trials=given.trials, seed=given.seed)
    print(f"{report}\n{report.total()} trials in {time.monotonic() - start:.0f} s, seed {given.seed}")
    dist.destroy_process_group()
    return 1 if report.bad else 0


if __name__ == "__main__":
    sys.exit(main())
