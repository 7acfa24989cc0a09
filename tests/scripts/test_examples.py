"""The data-parallel examples run with tiny settings: learn, save, resume, and read the user's own data.

One is started with ``smdrun``; ranks of the pool run the others.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from tests.support.forked_jobs import run_job
from tests.support.ranks import ROOT, RankPool
from tests.support.scripts import run_script

EXAMPLES = ROOT / "examples" / "data_parallel"
SMDRUN = Path(sys.executable).with_name("smdrun")
Pools = Callable[[int], RankPool]


def smdrun(script: str, *args: object, ranks: int = 2) -> str:
    """What the script printed, run by so many ranks."""
    command = [SMDRUN, "-n", str(ranks), EXAMPLES / script, *map(str, args)]
    done = run_job(command, cwd=ROOT, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def losses(printed: str) -> list[float]:
    return [float(match) for match in re.findall(r"loss ([\d.]+)", printed)]


@pytest.fixture(scope="module")
def images() -> ModuleType:
    """The module that reads images, which scripts import from their own folder."""
    spec = importlib.util.spec_from_file_location("images", EXAMPLES / "images.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def some_images(count: int = 40) -> tuple[np.ndarray, np.ndarray]:
    """Bright and dark squares, which anything can learn to tell apart."""
    labels = np.arange(count) % 2
    noise = np.random.default_rng(0).integers(0, 50, (count, 6, 6))
    return (noise + 150 * labels[:, None, None]).astype(np.uint8), labels


def test_digits_learns_own_images_saves_and_resumes(pool: Pools, tmp_path: Path) -> None:
    pixels, labels = some_images(64)
    np.savez(tmp_path / "mine.npz", images=pixels, labels=labels)
    checkpoint = tmp_path / "digits.pt"
    options = ["--data", tmp_path / "mine.npz", "--checkpoint", checkpoint, "--batch-size", 16]
    first = smdrun("digits.py", *options, "--epochs", 3)
    assert losses(first)[-1] < losses(first)[0]
    assert "accuracy on 12 images" in first
    second = run_script(pool(2), EXAMPLES / "digits.py", *options, "--epochs", 4, "--resume")
    assert "epoch 4" in second and "epoch 3" not in second
    assert torch.load(checkpoint)["epoch"] == 3


def test_char_gpt_learns_own_text_saves_and_resumes(pool: Pools, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    checkpoint = tmp_path / "gpt.pt"
    options = ["--data", tmp_path, "--pattern", "*.txt", "--checkpoint", checkpoint, "--batch-size", 4]
    script = EXAMPLES / "char_gpt.py"
    first = run_script(pool(2), script, *options, "--steps", 8)
    assert losses(first)[-1] < losses(first)[0]
    run_script(pool(2), script, *options, "--steps", 9, "--resume", "--backend", "gloo")
    assert torch.load(checkpoint)["step"] == 9


def test_side_by_side_finds_the_same_losses_over_both_backends(pool: Pools, tmp_path: Path) -> None:
    options = ["--steps", 3, "--plot", tmp_path / "plot.png"]
    printed = run_script(pool(2), EXAMPLES / "side_by_side.py", *options)
    assert "losses over both backends agree" in printed
    assert (tmp_path / "plot.png").stat().st_size > 5000


def test_images_are_read_from_csv_and_from_a_folder_alike(images: ModuleType, tmp_path: Path) -> None:
    pixels, labels = some_images()
    table = np.column_stack([labels, pixels.reshape(len(pixels), -1)])
    np.savetxt(tmp_path / "mine.csv", table[np.argsort(labels, kind="stable")], delimiter=",")
    for i, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        folder = tmp_path / "classes" / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(folder / f"{i:03}.png")
    from_csv = images.load_images(tmp_path / "mine.csv")
    from_folder = images.load_images(tmp_path / "classes")
    assert from_csv[2] == from_folder[2] == 2
    for one, other in zip(from_csv[:2], from_folder[:2], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, other.tensors, strict=True))
    assert from_csv[0].tensors[0].shape == (32, 1, 6, 6)


def test_images_that_do_not_fit_their_labels_are_refused(images: ModuleType, tmp_path: Path) -> None:
    np.savez(tmp_path / "bad.npz", images=np.zeros((3, 4, 4)), labels=np.zeros(2))
    with pytest.raises(ValueError, match="3 images with 2 labels"):
        images.load_images(tmp_path / "bad.npz")
    with pytest.raises(ValueError, match=r"expected a \.npz file"):
        images.load_images(tmp_path / "bad.txt")
