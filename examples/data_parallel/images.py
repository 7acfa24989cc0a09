"""Images for ``digits.py``: scikit-learn's digits, or the user's own.

* ``.npz``: arrays ``images`` of shape [N, H, W] or [N, H, W, C], and ``labels`` of N integers
* ``.csv``: a line an image, the label first, then H*W pixels of a square grey image; no header
* a folder: a subfolder a class, with PNG or JPEG files of one size in it
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.utils.data import TensorDataset

__all__ = ["load_images"]


def load_images(path: Path | None, *, test_share: float = 0.2) -> tuple[TensorDataset, TensorDataset, int]:
    """Images as float [N, C, H, W] with mean 0 and deviation 1, and labels as int64 [N]: for training, for
    the test at the end, and the number of classes. The same split on every rank.

    Raises:
        ValueError: ``path`` is none of the forms above, or its images and labels do not fit together.
    """
    images, labels = _read(path)
    if len(images) != len(labels) or len(images) < 2:
        raise ValueError(
            f"{path}: {len(images)} images with {len(labels)} labels; need 2 or more, one label each"
        )
    x = torch.from_numpy(images.astype(np.float32))
    x = x.unsqueeze(1) if x.dim() == 3 else x.permute(0, 3, 1, 2).contiguous()
    x = (x - x.mean()) / x.std().clamp(min=1e-6)
    y = torch.from_numpy(labels.astype(np.int64))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    held = max(1, int(len(x) * test_share))
    test, train = order[:held], order[held:]
    return TensorDataset(x[train], y[train]), TensorDataset(x[test], y[test]), int(y.max()) + 1


def _read(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    if path is None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        return digits.images, digits.target
    if path.is_dir():
        return _read_folder(path)
    if path.suffix == ".npz":
        with np.load(path) as arrays:
            return arrays["images"], arrays["labels"]
    if path.suffix == ".csv":
        table = np.loadtxt(path, delimiter=",", ndmin=2)
        side = round((table.shape[1] - 1) ** 0.5)
        return table[:, 1:].reshape(len(table), side, side), table[:, 0]
    raise ValueError(f"{path}: expected a .npz file, a .csv file or a folder with a subfolder a class")


def _read_folder(path: Path) -> tuple[np.ndarray, np.ndarray]:
    from PIL import Image

    images, labels = [], []
    for label, folder in enumerate(sorted(one for one in path.iterdir() if one.is_dir())):
        for file in sorted(one for one in folder.iterdir() if one.suffix in (".png", ".jpg", ".jpeg")):
            images.append(np.asarray(Image.open(file)))
            labels.append(label)
    if len({image.shape for image in images}) != 1:
        raise ValueError(f"{path}: expected images of one size in subfolders, found {len(images)} of several")
    return np.stack(images), np.asarray(labels)
